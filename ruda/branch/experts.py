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
from ruda.stages.dispatch import row_tokens, row_weights, slot_values
from ruda.stages.experts import Activations, ExpertWeights
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
        return run_forward(
            resolved, input, ids, wide, ExpertWeights(gate, up, down), options, gradients
        )


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
    experts: ExpertWeights[F],
    options: ExpertOptions,
    gradients: ExpertsGradientSelection,
) -> tuple[F, ExpertsState[B]]:
    """Dispatch, experts and combine, on operands already checked; ids in the index type."""
    layout = backend.dispatch(expert_ids, backend.shape(experts.gate)[0])
    expert_output, kept = backend.expert_rows_forward(
        backend.take_rows(input, row_tokens(backend, layout)),
        layout.expert_offsets,
        experts,
        options=options,
        gradients=gradients,
    )
    # The tokens stand for their rows, which backward gathers again: k times less to keep.
    kept_input = None if kept.input is None else input
    kept = Activations(None, kept.gate_output, kept.up_output, kept.activation)
    output = backend.combine(
        expert_output,
        weights,
        layout,
        accumulation=options.combine,
        dtype=backend.dtype(input),
    )
    state = ExpertsState(
        backend=backend.itself(),
        options=options,
        gradients=gradients,
        layout=layout,
        kept=kept,
        input=kept_input,
        weights=weights,
        gate=experts.gate,
        up=experts.up,
        down=experts.down,
        versions=tuple(
            None if tensor is None else backend.write_version(tensor)
            for tensor in (kept_input, weights, *experts)
        ),
    )
    return output, state


def run_backward(
    state: ExpertsState[BackendOf[B, F, I, L]],
    grad_output: F,
    gradients: ExpertsGradientSelection,
) -> dict[str, F | None]:
    """The wanted gradients by name, each brought back from rows to tokens; the others `None`."""
    backend, layout = state.backend, state.layout
    if not gradients.wanted:
        return dict.fromkeys(gradients.names())
    tokens = row_tokens(backend, layout)
    found = backend.expert_rows_backward(
        # Rows are handed over, not held here: the stage lets go of them as soon as it can.
        backend.take_rows(grad_output, tokens),
        row_weights(backend, layout, state.weights),
        layout.expert_offsets,
        ExpertWeights(state.gate, state.up, state.down),
        _kept_of_rows(state, tokens, gradients),
        options=state.options,
        gradients=gradients,
    )
    weights = None if found.weights is None else slot_values(backend, layout, found.weights)
    dinput = None
    if found.input is not None:
        dinput = backend.copy_backward(found.input, layout, dtype=backend.dtype(grad_output))
    return {
        "input": dinput,
        "weights": weights,
        "gate": found.gate,
        "up": found.up,
        "down": found.down,
    }


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


def _kept_of_rows(
    state: ExpertsState[BackendOf[B, F, I, L]], tokens_R: I, gradients: ExpertsGradientSelection
) -> Activations[F]:
    """What the state keeps, with the input's rows gathered again where they will be read."""
    kept, x_RH = state.kept, None
    if state.input is not None and (gradients.gate or gradients.up):
        x_RH = state.backend.take_rows(state.input, tokens_R)
    return Activations(x_RH, kept.gate_output, kept.up_output, kept.activation)


def _experts_backward(
    state: ExpertsState[BackendOf[B, F, I, L]],
    grad_output: F,
    gradients: ExpertsGradientSelection,
) -> dict[str, F | None]:
    validation.check_state(state, ExpertsState)
    check_backward(state, grad_output, gradients, state.gradients)
    with state.backend.numerics():
        return run_backward(state, grad_output, gradients)
