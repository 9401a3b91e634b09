"""The static types of the public surface: read by mypy and pyright (`test_typing.py`), never run.

One line, one promise. `Single` is deliberately narrower than the NumPy backend's `FloatArray`: with
a backend given, the fields have the backend's tensor type; without, the type of the arrays.
"""

from __future__ import annotations

from typing import Any, TypeAlias, TypeVar, assert_type

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import ruda
from ruda.backend import Backend, BackendOf, BackendTypes
from ruda.base.tensors import F, I, L
from ruda.stages.dispatch import RowLayout
from ruda_backend_numpy import NumpyBackend
from ruda_backend_torch import TorchBackend

FloatArray: TypeAlias = npt.NDArray[np.floating[Any]]
IntArray: TypeAlias = npt.NDArray[np.integer[Any]]
Single: TypeAlias = npt.NDArray[np.float32]

B = TypeVar("B", bound=BackendTypes[Any, Any, Any])


def numpy_backend_given(x: FloatArray, cube: FloatArray, options: ruda.MoeOptions) -> None:
    output, state = ruda.moe_forward(
        x, x, cube, cube, cube, options=options, backend=NumpyBackend()
    )
    assert_type(output, FloatArray)
    assert_type(state, ruda.MoeState[NumpyBackend])
    assert_type(state.backend, NumpyBackend)
    assert_type(state.logits, FloatArray)
    assert_type(state.experts, ruda.ExpertsState[NumpyBackend])
    assert_type(state.experts.input, FloatArray | None)
    assert_type(state.experts.layout, RowLayout[IntArray])
    assert_type(state.experts.layout.expert_offsets, IntArray)
    assert_type(ruda.moe_route_indices(state), IntArray)

    grads = ruda.moe_backward(state, output)
    assert_type(grads, ruda.MoeBackward[NumpyBackend])
    assert_type(grads.backend, NumpyBackend)
    assert_type(grads.input, FloatArray)
    assert_type(grads.logits, FloatArray)
    assert_type(grads.gate, FloatArray)
    assert_type(grads.up, FloatArray)
    assert_type(grads.down, FloatArray)
    assert_type(grads.asdict(), dict[str, Any])


def torch_backend_given(x: Tensor, options: ruda.MoeOptions) -> None:
    output, state = ruda.moe_forward(x, x, x, x, x, options=options, backend=TorchBackend("cpu"))
    assert_type(output, Tensor)
    assert_type(state, ruda.MoeState[TorchBackend])
    assert_type(ruda.moe_route_indices(state), Tensor)

    grads = ruda.moe_backward(state, output)
    assert_type(grads, ruda.MoeBackward[TorchBackend])
    assert_type(grads.input, Tensor)
    assert_type(grads.logits, torch.Tensor)
    assert_type(grads.gate, Tensor)
    assert_type(grads.up, Tensor)
    assert_type(grads.down, Tensor)


def backend_of_the_arrays(x: Single, t: Tensor, options: ruda.MoeOptions) -> None:
    output, state = ruda.moe_forward(x, x, x, x, x, options=options)
    assert_type(output, Single)
    assert_type(state, ruda.MoeState[Backend[Single, Any, Any]])
    assert_type(ruda.moe_backward(state, output).input, Single)
    assert_type(ruda.moe_backward(state, output).down, Single)
    assert_type(ruda.moe_backward(state, output), ruda.MoeBackward[Backend[Single, Any, Any]])

    output_t, state_t = ruda.moe_forward(t, t, t, t, t, options=options, backend="torch")
    assert_type(output_t, Tensor)
    assert_type(state_t, ruda.MoeState[Backend[Tensor, Any, Any]])
    assert_type(ruda.moe_backward(state_t, output_t).input, Tensor)


def narrow_arrays_and_a_backend(x: Single, options: ruda.MoeOptions) -> None:
    _, state = ruda.moe_forward(x, x, x, x, x, options=options, backend=NumpyBackend())
    assert_type(state, ruda.MoeState[NumpyBackend])
    assert_type(ruda.moe_backward(state, x).input, FloatArray)


def not_wanted_is_none(
    numpy_state: ruda.MoeState[NumpyBackend],
    torch_state: ruda.MoeState[TorchBackend],
    x: FloatArray,
    t: Tensor,
) -> None:
    wanted = ruda.MoeGradientSelection(input=True, logits=True)
    some = ruda.moe_backward_selected(numpy_state, x, wanted)
    assert_type(some, ruda.MoeBackwardSelected[NumpyBackend])
    assert_type(some.input, FloatArray | None)
    assert_type(some.logits, FloatArray | None)
    assert_type(some.gate, FloatArray | None)
    assert_type(some.up, FloatArray | None)
    assert_type(some.down, FloatArray | None)
    if some.input is not None:
        assert_type(some.input, FloatArray)

    some_t = ruda.moe_backward_selected(torch_state, t, wanted)
    assert_type(some_t, ruda.MoeBackwardSelected[TorchBackend])
    assert_type(some_t.gate, Tensor | None)


def expert_stages_alone(x: FloatArray, ids: IntArray, t: Tensor, single: Single) -> None:
    output, state = ruda.experts_forward(x, ids, x, x, x, x, backend=NumpyBackend())
    assert_type(output, FloatArray)
    assert_type(state, ruda.ExpertsState[NumpyBackend])
    grads = ruda.experts_backward(state, output)
    assert_type(grads, ruda.ExpertsBackward[NumpyBackend])
    assert_type(grads.input, FloatArray)
    assert_type(grads.weights, FloatArray)
    assert_type(grads.down, FloatArray)
    wanted = ruda.ExpertsGradientSelection(weights=True)
    some = ruda.experts_backward_selected(state, output, wanted)
    assert_type(some, ruda.ExpertsBackwardSelected[NumpyBackend])
    assert_type(some.weights, FloatArray | None)

    _, state_t = ruda.experts_forward(t, t, t, t, t, t)
    assert_type(state_t, ruda.ExpertsState[Backend[Tensor, Any, Any]])
    assert_type(ruda.experts_backward(state_t, t).weights, Tensor)

    _, state_s = ruda.experts_forward(single, ids, single, single, single, single)
    assert_type(ruda.experts_backward(state_s, single).gate, Single)


def router_alone(x: Single, ids: IntArray, t: Tensor, rule: ruda.RouterWeightOptions) -> None:
    assert_type(ruda.selected_router_weights(x, ids, rule), Single)
    assert_type(ruda.selected_router_weights(t, t, rule), Tensor)
    assert_type(ruda.selected_router_weights(t, t, rule, backend=TorchBackend()), Tensor)
    assert_type(ruda.selected_router_weights_backward(x, ids, x, rule), Single)
    assert_type(ruda.selected_router_weights_backward(t, t, t, rule), Tensor)


def inference(x: Single, t: Tensor, options: ruda.MoeOptions) -> None:
    assert_type(ruda.moe_inference(x, x, x, x, x, options=options), Single)
    assert_type(ruda.moe_inference(t, t, t, t, t, options=options, backend="torch"), Tensor)
    assert_type(ruda.moe_inference(t, t, t, t, t, options=options, backend=TorchBackend()), Tensor)


def records_move(
    grads: ruda.MoeBackward[TorchBackend],
    some: ruda.MoeBackwardSelected[NumpyBackend],
    experts: ruda.ExpertsBackward[NumpyBackend],
    some_experts: ruda.ExpertsBackwardSelected[TorchBackend],
) -> None:
    assert_type(grads.to(NumpyBackend()), ruda.MoeBackward[NumpyBackend])
    assert_type(grads.to(NumpyBackend()).gate, FloatArray)
    assert_type(some.to(TorchBackend()), ruda.MoeBackwardSelected[TorchBackend])
    assert_type(some.to(TorchBackend()).down, Tensor | None)
    assert_type(experts.to(TorchBackend()), ruda.ExpertsBackward[TorchBackend])
    assert_type(experts.to(TorchBackend()).weights, Tensor)
    assert_type(some_experts.to(NumpyBackend()), ruda.ExpertsBackwardSelected[NumpyBackend])


def backends_by_name(t: Tensor, options: ruda.MoeOptions) -> None:
    backend = ruda.get_backend("torch", device="cpu")
    assert_type(backend, Backend[Any, Any, Any])
    assert_type(ruda.backend_of(t), Backend[Any, Any, Any])
    assert_type(ruda.known_backends(), tuple[str, ...])
    assert_type(ruda.available_backends(), dict[str, ruda.Availability])
    # A name says nothing to a type checker: the state of a backend found by name is one of Any.
    _, state = ruda.moe_forward(t, t, t, t, t, options=options, backend=backend)
    assert_type(state, ruda.MoeState[Backend[Any, Any, Any]])
    ruda.register_backend("mine", NumpyBackend)
    ruda.register_backend("theirs", "package:TheirBackend")


def anyone_of(state: ruda.MoeState[NumpyBackend]) -> ruda.MoeState[Backend[Any, Any, Any]]:
    return state  # covariant in the backend


def forward_and_back(
    backend: Backend[F, I, L], x: F, cube: F, options: ruda.MoeOptions
) -> ruda.MoeBackward[Backend[F, I, L]]:
    """Someone else's generic function: `F`, `I` and `L` are whatever the backend's are."""
    output, state = ruda.moe_forward(x, x, cube, cube, cube, options=options, backend=backend)
    assert_type(output, F)
    assert_type(ruda.moe_route_indices(state), I)
    rows = backend.index(backend.arange(backend.shape(x)[0]), backend.shape(cube)[0])
    assert_type(rows, I)
    mask: L = backend.take_rows(x, rows) > 0.0
    masked = backend.where(mask, x * 2.0, 0.0)
    assert_type(masked, F)
    grads = ruda.moe_backward(state, masked)
    assert_type(grads.input, F)
    return grads


def exactly_its_backend(
    backend: BackendOf[B, F, I, L], x: F, cube: F, options: ruda.MoeOptions
) -> ruda.MoeBackward[B]:
    """The same, returning exactly `MoeBackward[B]`."""
    grads = forward_and_back(backend, x, cube, options)
    return ruda.MoeBackward(backend=backend.itself(), **grads.asdict())


def twice(state: ruda.MoeState[BackendOf[B, F, I, L]], grad: F) -> ruda.MoeBackward[B]:
    """Or starting from a state."""
    assert_type(ruda.moe_backward(state, grad), ruda.MoeBackward[B])
    return ruda.moe_backward(state, grad)


def generic_functions_keep_the_type(
    x: FloatArray, t: Tensor, options: ruda.MoeOptions, state: ruda.MoeState[TorchBackend]
) -> None:
    assert_type(forward_and_back(NumpyBackend(), x, x, options).up, FloatArray)
    assert_type(exactly_its_backend(NumpyBackend(), x, x, options), ruda.MoeBackward[NumpyBackend])
    assert_type(exactly_its_backend(TorchBackend(), t, t, options), ruda.MoeBackward[TorchBackend])
    assert_type(exactly_its_backend(TorchBackend(), t, t, options).up, Tensor)
    assert_type(twice(state, t), ruda.MoeBackward[TorchBackend])


def a_specification_has_the_tensors_of_its_backend(
    x: FloatArray, t: Tensor, ids: npt.NDArray[np.integer[Any]], options: ruda.MoeOptions
) -> None:
    assert_type(ruda.specification(NumpyBackend()).swiglu(x, x), FloatArray)
    assert_type(ruda.specification(TorchBackend()).swiglu(t, t), Tensor)
    assert_type(ruda.specification(NumpyBackend()).dispatch(ids, 3), RowLayout[IntArray])
    written = ruda.specification(NumpyBackend())
    output, state = ruda.moe_forward(x, x, x, x, x, options=options, backend=written)
    assert_type(output, FloatArray)
    assert_type(ruda.moe_backward(state, output).up, FloatArray)
    assert_type(ruda.moe_inference(t, t, t, t, t, options=options, backend="torch"), Tensor)


def of_a_generic_backend_too(backend: Backend[F, I, L], x: F) -> None:
    assert_type(ruda.specification(backend), Backend[F, I, L])
    assert_type(ruda.specification(backend).swiglu(x, x), F)
