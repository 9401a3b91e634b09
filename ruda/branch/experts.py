"""The stages from dispatch to combine: an operation of its own, and the heart of `moe`.

    input, expert_ids -> dispatch -> experts (SwiGLU) -> combine with weights -> output

and back: experts backward -> copy backward. The public functions validate; `run_forward` and
`run_backward` are the one implementation, for a router that lives elsewhere and for
`ruda.branch.moe`.
"""

from __future__ import annotations

from typing import Any, overload

from ruda.backend import B, Backend, BackendOf
from ruda.base.dtypes import DType
from ruda.base.tensors import F, I, L
from ruda.branch import validation
from ruda.branch.records import ExpertsBackward, ExpertsBackwardSelected, ExpertsState
from ruda.stages.experts import ExpertGradients
from ruda.stages.options import ExpertOptions, ExpertsGradientSelection, MoeGradientSelection
from ruda.stages.selection import select_fixed


@overload
def experts_forward(
    input: F,
    expert_ids: Any,
    weights: F,
    gate: F,
    up: F,
    down: F,
    /,
    *,
    options: ExpertOptions | None = None,
    gradients: ExpertsGradientSelection | None = None,
    backend: BackendOf[B, F, I, L],
) -> tuple[F, ExpertsState[B]]: ...
@overload
def experts_forward(
    input: F,
    expert_ids: Any,
    weights: F,
    gate: F,
    up: F,
    down: F,
    /,
    *,
    options: ExpertOptions | None = None,
    gradients: ExpertsGradientSelection | None = None,
    backend: str | None = None,
) -> tuple[F, ExpertsState[Backend[F, Any, Any]]]: ...
def experts_forward(
    input: Any,
    expert_ids: Any,
    weights: Any,
    gate: Any,
    up: Any,
    down: Any,
    /,
    *,
    options: ExpertOptions | None = None,
    gradients: ExpertsGradientSelection | None = None,
    backend: Any = None,
) -> tuple[Any, ExpertsState[Any]]:
    """The stages from dispatch to combine, for a router that lives elsewhere (contract 4 to 7).

    Like `moe_forward` with `expert_ids` [T, k] of any integer type and `weights` [T, k] of any
    float type, which is widened to its compute type, never rounded. An id outside [0, E) is a
    `SelectionError`.
    """
    operands = {
        "input": input,
        "expert_ids": expert_ids,
        "weights": weights,
        "gate": gate,
        "up": up,
        "down": down,
    }
    options = ExpertOptions() if options is None else options
    validation.check_options(options, ExpertOptions)
    gradients = ExpertsGradientSelection.all() if gradients is None else gradients
    validation.check_gradients(gradients, ExpertsGradientSelection)
    resolved = validation.resolve_backend(backend, operands)
    tokens, experts, storage = validation.check_experts(resolved, input, gate, up, down)
    slots = validation.check_ids(resolved, expert_ids, tokens, experts)
    compute = validation.float_dtype(resolved, "weights", weights).compute
    validation.check_shape(resolved, "weights", weights, "[T, k]", (tokens, slots))
    validation.check_strategies(resolved, options, storage)

    with resolved.numerics():
        ids = select_fixed(resolved, expert_ids, experts)
        wide = resolved.cast(weights, compute)
        return run_forward(resolved, input, ids, wide, gate, up, down, options, gradients)


def experts_backward(
    state: ExpertsState[BackendOf[B, F, I, L]], grad_output: F, /
) -> ExpertsBackward[B]:
    """All five gradients of `experts_forward` for an upstream gradient [T, H] (contract 7)."""
    found = _experts_backward(state, grad_output, ExpertsGradientSelection.all())
    return ExpertsBackward(backend=state.backend.itself(), **found)


def experts_backward_selected(
    state: ExpertsState[BackendOf[B, F, I, L]],
    grad_output: F,
    gradients: ExpertsGradientSelection,
    /,
) -> ExpertsBackwardSelected[B]:
    """The wanted gradients of `experts_forward` alone; the others are `None`."""
    validation.check_gradients(gradients, ExpertsGradientSelection)
    found = _experts_backward(state, grad_output, gradients)
    return ExpertsBackwardSelected(backend=state.backend.itself(), **found)


def run_forward(
    backend: BackendOf[B, F, I, L],
    input: F,
    expert_ids: I,
    weights: F,
    gate: F,
    up: F,
    down: F,
    options: ExpertOptions,
    gradients: ExpertsGradientSelection,
) -> tuple[F, ExpertsState[B]]:
    """Dispatch, experts and combine, on operands already checked; ids in the index type."""
    layout = backend.dispatch(expert_ids, backend.shape(gate)[0])
    expert_output, kept = backend.experts_forward(
        input, layout, gate, up, down, options=options, gradients=gradients
    )
    output = backend.combine(
        expert_output,
        weights,
        layout,
        accumulation=options.combine,
        dtype=backend.dtype(input),
    )
    kept_input = input if gradients.gate or gradients.up else None
    state = ExpertsState(
        backend=backend.itself(),
        options=options,
        gradients=gradients,
        layout=layout,
        kept=kept,
        input=kept_input,
        weights=weights,
        gate=gate,
        up=up,
        down=down,
        versions=tuple(
            None if tensor is None else backend.write_version(tensor)
            for tensor in (kept_input, weights, gate, up, down)
        ),
    )
    return output, state


def run_backward(
    state: ExpertsState[BackendOf[B, F, I, L]],
    grad_output: F,
    gradients: ExpertsGradientSelection,
) -> tuple[ExpertGradients[F], F | None]:
    """The expert stage's gradients, and the input gradient made of its rows."""
    backend = state.backend
    found = backend.experts_backward(
        grad_output,
        state.layout,
        state.weights,
        state.input,
        state.gate,
        state.up,
        state.down,
        state.kept,
        options=state.options,
        gradients=gradients,
    )
    if found.rows is None:
        return found, None
    dtype = backend.dtype(grad_output)
    return found, backend.copy_backward(found.rows, state.layout, dtype=dtype)


def check_backward(
    state: ExpertsState[BackendOf[B, F, I, L]],
    grad_output: F,
    wanted: MoeGradientSelection | ExpertsGradientSelection,
    kept: MoeGradientSelection | ExpertsGradientSelection,
) -> None:
    """The upstream gradient fits, what is wanted was kept, and nothing kept was written to."""
    backend = state.backend
    tokens = backend.shape(state.layout.expert_ids)[0]
    hidden = backend.shape(state.down)[1]
    storage: DType = backend.dtype(state.down)
    validation.check_grad_output(backend, grad_output, tokens, hidden, storage)
    validation.check_kept(wanted, kept)
    operands = {
        "input": state.input,
        "weights": state.weights,
        "gate": state.gate,
        "up": state.up,
        "down": state.down,
    }
    validation.check_unchanged(backend, operands, state.versions)


def _experts_backward(
    state: ExpertsState[BackendOf[B, F, I, L]],
    grad_output: F,
    gradients: ExpertsGradientSelection,
) -> dict[str, F | None]:
    validation.check_state(state, ExpertsState)
    check_backward(state, grad_output, gradients, state.gradients)
    with state.backend.numerics():
        found, dinput = run_backward(state, grad_output, gradients)
    return {
        "input": dinput,
        "weights": found.weights,
        "gate": found.gate,
        "up": found.up,
        "down": found.down,
    }
