"""The router's continuous half alone: weights of given experts, and their gradient (contract 3)."""

from __future__ import annotations

from typing import Any

from ruda.backend import Backend
from ruda.base.tensors import F
from ruda.branch import validation
from ruda.stages.options import RouterWeightOptions


def selected_router_weights(
    logits: F,
    expert_ids: Any,
    options: RouterWeightOptions,
    /,
    *,
    backend: Backend[F, Any, Any] | str | None = None,
) -> F:
    """Routing weights [T, k] of given experts, in the logits' compute type (contract 3).

    `logits` [T, E], `expert_ids` [T, k] of any integer type. An id outside [0, E) makes its whole
    row NaN; nothing is raised for it.
    """
    operands = {"logits": logits, "expert_ids": expert_ids}
    resolved = _check_router(operands, options, backend)
    with resolved.numerics():
        ids = resolved.index(expert_ids, resolved.shape(logits)[1])
        weights: F = resolved.router_weights(logits, ids, options)
    return weights


def selected_router_weights_backward(
    logits: F,
    expert_ids: Any,
    dweights: F,
    options: RouterWeightOptions,
    /,
    *,
    backend: Backend[F, Any, Any] | str | None = None,
) -> F:
    """The VJP of `selected_router_weights`: [T, E] in the logits' type (contract 3).

    `dweights` [T, k] is in the logits' compute type.
    """
    operands = {"logits": logits, "expert_ids": expert_ids, "dweights": dweights}
    resolved = _check_router(operands, options, backend)
    compute = resolved.dtype(logits).compute
    validation.check_dtype(resolved, "dweights", dweights, compute, "the compute type of logits")
    validation.check_shape(resolved, "dweights", dweights, "[T, k]", resolved.shape(expert_ids))
    with resolved.numerics():
        ids = resolved.index(expert_ids, resolved.shape(logits)[1])
        dlogits: F = resolved.router_weights_backward(logits, ids, dweights, options)
    return dlogits


def _check_router(
    operands: dict[str, Any], options: RouterWeightOptions, backend: Any
) -> Backend[Any, Any, Any]:
    validation.check_options(options, RouterWeightOptions)
    logits, expert_ids = operands["logits"], operands["expert_ids"]
    resolved = validation.resolve_backend(backend, operands)
    tokens, experts = validation.check_logits(resolved, logits, None, None)
    validation.check_ids(resolved, expert_ids, tokens, experts)
    return resolved
