"""The routed-expert branch: read top to bottom.

    logits -> select -> weights ----------------.
    input  -> dispatch -> experts (SwiGLU) -> combine -> output

and back, with the selection held fixed:

    grad_output -> experts backward -> copy backward -> input
                        '-> weights backward -> logits

Every function validates its operands, enters the backend's numerics, and calls the stages in order.
"""

from __future__ import annotations

from typing import Any, overload

from ruda.backend import B, Backend, BackendOf
from ruda.base.tensors import F, I, L
from ruda.branch import validation
from ruda.branch.experts import check_backward, run_backward, run_forward
from ruda.branch.records import (
    MoeBackward,
    MoeBackwardSelected,
    MoeState,
)
from ruda.stages.experts import ExpertWeights
from ruda.stages.options import (
    ExpertsGradientSelection,
    FixedSelection,
    MoeGradientSelection,
    MoeOptions,
)


@overload
def moe_forward(
    input: F,
    logits: F,
    gate: F,
    up: F,
    down: F,
    /,
    *,
    options: MoeOptions,
    correction_bias: F | None = None,
    gradients: MoeGradientSelection | None = None,
    backend: BackendOf[B, F, I, L],
) -> tuple[F, MoeState[B]]: ...
@overload
def moe_forward(
    input: F,
    logits: F,
    gate: F,
    up: F,
    down: F,
    /,
    *,
    options: MoeOptions,
    correction_bias: F | None = None,
    gradients: MoeGradientSelection | None = None,
    backend: str | None = None,
) -> tuple[F, MoeState[Backend[F, Any, Any]]]: ...
def moe_forward(
    input: Any,
    logits: Any,
    gate: Any,
    up: Any,
    down: Any,
    /,
    *,
    options: MoeOptions,
    correction_bias: Any = None,
    gradients: MoeGradientSelection | None = None,
    backend: Any = None,
) -> tuple[Any, MoeState[Any]]:
    """The branch's output, and a state to take gradients from (contract 1 to 6).

    `input` [T, H], `gate` and `up` [E, I, H], `down` [E, H, I] share a storage type D; `logits`
    [T, E] has its own; `correction_bias` [E] is float32 (float64 if the logits are). Returns
    `output` [T, H] of type D and the state. `gradients` says which gradients will be asked for (all
    if not given): the state keeps only what those need. The arrays decide the backend, or `backend`
    names it or is it. No operand is written to; a framework's autograd does not see this.

    Raises `ShapeError`, `DTypeError`, `DeviceError`, `BackendMismatchError`, `ConfigurationError`,
    `SelectionError`, `UnsupportedStrategyError`; each before any work.
    """
    operands = {"input": input, "logits": logits, "gate": gate, "up": up, "down": down}
    if correction_bias is not None:
        operands["correction_bias"] = correction_bias
    validation.check_options(options, MoeOptions)
    if isinstance(options.selection, FixedSelection):
        operands["expert_ids"] = options.selection.expert_ids
    gradients = MoeGradientSelection.all() if gradients is None else gradients
    validation.check_gradients(gradients, MoeGradientSelection)
    resolved = validation.resolve_backend(backend, operands)
    tokens, experts, storage = validation.check_experts(resolved, input, gate, up, down)
    validation.check_logits(resolved, logits, tokens, experts)
    validation.check_selection(resolved, options, logits, correction_bias, tokens, experts)
    validation.check_strategies(resolved, options, storage)

    with resolved.numerics():
        expert_ids = resolved.select_experts(logits, correction_bias, options.selection)
        weights = resolved.router_weights(logits, expert_ids, options.weights)
        output, experts_state = run_forward(
            resolved,
            input,
            expert_ids,
            weights,
            ExpertWeights(gate, up, down),
            options,
            _experts_part(gradients),
        )
    return output, MoeState(
        backend=resolved.itself(),
        options=options,
        gradients=gradients,
        experts=experts_state,
        logits=logits,
        versions=(resolved.write_version(logits),),
    )


def moe_inference(
    input: F,
    logits: F,
    gate: F,
    up: F,
    down: F,
    /,
    *,
    options: MoeOptions,
    correction_bias: F | None = None,
    backend: Backend[F, Any, Any] | str | None = None,
) -> F:
    """The output of `moe_forward`, to the bit, keeping nothing (contract 7)."""
    output, _ = moe_forward(
        input,
        logits,
        gate,
        up,
        down,
        options=options,
        correction_bias=correction_bias,
        gradients=MoeGradientSelection.none(),
        backend=backend,
    )
    return output


def moe_backward(state: MoeState[BackendOf[B, F, I, L]], grad_output: F, /) -> MoeBackward[B]:
    """All five gradients for an upstream gradient [T, H] of the storage type (contract 7).

    May be called any number of times on one state. Raises `StateError` if the forward was told that
    fewer gradients would be asked for, or if a saved operand was changed in place since;
    `HigherDerivativeUnsupportedError` if `grad_output` is itself being differentiated.
    """
    found = _moe_backward(state, grad_output, MoeGradientSelection.all())
    return MoeBackward(backend=state.backend.itself(), **found)


def moe_backward_selected(
    state: MoeState[BackendOf[B, F, I, L]], grad_output: F, gradients: MoeGradientSelection, /
) -> MoeBackwardSelected[B]:
    """The wanted gradients alone; the others are neither computed nor allocated, and are `None`."""
    validation.check_gradients(gradients, MoeGradientSelection)
    found = _moe_backward(state, grad_output, gradients)
    return MoeBackwardSelected(backend=state.backend.itself(), **found)


def moe_route_indices(state: MoeState[BackendOf[B, F, I, L]], /) -> I:
    """The expert ids [T, k] the forward used, in the backend's index type (contract 2)."""
    validation.check_state(state, MoeState)
    return state.experts.layout.expert_ids


def _experts_part(gradients: MoeGradientSelection) -> ExpertsGradientSelection:
    """The router's gradient comes from the gradient of the weights."""
    return ExpertsGradientSelection(
        input=gradients.input,
        weights=gradients.logits,
        gate=gradients.gate,
        up=gradients.up,
        down=gradients.down,
    )


def _moe_backward(
    state: MoeState[BackendOf[B, F, I, L]], grad_output: F, gradients: MoeGradientSelection
) -> dict[str, F | None]:
    validation.check_state(state, MoeState)
    backend, experts = state.backend, state.experts
    check_backward(experts, grad_output, gradients, state.gradients)
    validation.check_unchanged(backend, {"logits": state.logits}, state.versions)
    with backend.numerics():
        found = run_backward(experts, grad_output, _experts_part(gradients))
        dweights, dlogits = found["weights"], None
        if dweights is not None:
            dlogits = backend.router_weights_backward(
                state.logits, experts.layout.expert_ids, dweights, state.options.weights
            )
    found["logits"] = dlogits
    return {name: found[name] for name in gradients.names()}
