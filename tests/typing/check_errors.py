"""Mistakes a type checker must find: each line that ends in `# error` is one, no other line is.

`make lint` passes over them by their `type: ignore` (and mypy complains of one that is not needed);
`test_typing.py` takes those comments out and wants both checkers to report each line. Never run.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

import ruda
from ruda.backend import Backend
from ruda.base.tensors import F, I, L
from ruda_backend_numpy import NumpyBackend
from ruda_backend_torch import TorchBackend

FloatArray: TypeAlias = npt.NDArray[np.floating[Any]]
IntArray: TypeAlias = npt.NDArray[np.integer[Any]]


def the_other_backend(
    x: FloatArray,
    t: Tensor,
    options: ruda.MoeOptions,
    numpy_state: ruda.MoeState[NumpyBackend],
    torch_state: ruda.MoeState[TorchBackend],
    experts_state: ruda.ExpertsState[NumpyBackend],
) -> None:
    ruda.moe_backward(numpy_state, t)  # type: ignore[misc]  # error
    ruda.moe_backward(torch_state, x)  # type: ignore[misc]  # error
    ruda.experts_backward(experts_state, t)  # type: ignore[misc]  # error
    ruda.moe_backward_selected(numpy_state, t, ruda.MoeGradientSelection.all())  # type: ignore[misc]  # error
    _, found = ruda.moe_forward(x, x, x, x, x, options=options)
    ruda.moe_backward(found, t)  # type: ignore[misc]  # error
    ruda.moe_forward(x, x, x, x, x, options=options, backend=TorchBackend())  # type: ignore[misc]  # error
    ruda.moe_forward(t, t, t, t, t, options=options, backend=NumpyBackend())  # type: ignore[misc]  # error
    ruda.moe_forward(x, t, x, x, x, options=options, backend=NumpyBackend())  # type: ignore[misc]  # error
    ruda.moe_inference(x, x, x, x, x, options=options, backend=TorchBackend())  # type: ignore[misc]  # error
    ruda.selected_router_weights(t, t, options.weights, backend=NumpyBackend())  # type: ignore[misc]  # error


def positions_and_keywords(x: FloatArray, ids: IntArray, options: ruda.MoeOptions) -> None:
    ruda.moe_forward(x, x, x, x, x, options)  # type: ignore[call-overload]  # error
    ruda.moe_forward(x, x, x, x, x)  # type: ignore[call-overload]  # error
    ruda.moe_forward(x, x, x, x, options=options)  # type: ignore[call-overload]  # error
    ruda.moe_forward(input=x, logits=x, gate=x, up=x, down=x, options=options)  # type: ignore[call-overload]  # error
    ruda.moe_inference(x, x, x, x, x, options)  # type: ignore[call-arg]  # error
    ruda.experts_forward(x, ids, x, x, x, x, ruda.ExpertOptions())  # type: ignore[call-overload]  # error
    ruda.selected_router_weights(x, ids)  # type: ignore[call-arg]  # error
    ruda.MoeGradientSelection(True)  # type: ignore[call-arg]  # error
    ruda.MoeGradientSelection(bias=True)  # type: ignore[call-arg]  # error
    ruda.ExpertOptions(ruda.ExpertStrategy.AUTO)  # type: ignore[call-arg]  # error


def options_of_the_wrong_kind(x: FloatArray, state: ruda.MoeState[NumpyBackend]) -> None:
    rule = ruda.RouterWeightOptions(ruda.RouterScoring.SOFTMAX, renormalize=True)
    ruda.RouterWeightOptions(ruda.CombineAccumulation.STORAGE, renormalize=True)  # type: ignore[arg-type]  # error
    ruda.RouterWeightOptions("softmax", renormalize=True)  # type: ignore[arg-type]  # error
    ruda.RouterWeightOptions(ruda.RouterScoring.SOFTMAX)  # type: ignore[call-arg]  # error
    ruda.ExpertOptions(forward=ruda.CombineGradientStrategy.SERIAL)  # type: ignore[arg-type]  # error
    ruda.ExpertOptions(intermediates=ruda.CombineAccumulation.COMPUTE)  # type: ignore[arg-type]  # error
    ruda.SoftmaxSelection("2")  # type: ignore[arg-type]  # error
    ruda.GroupedSelection(2, scoring="sigmoid")  # type: ignore[arg-type]  # error
    ruda.MoeOptions(selection=ruda.SoftmaxSelection(2))  # type: ignore[call-arg]  # error
    ruda.MoeOptions(weights=rule)  # type: ignore[call-arg]  # error
    ruda.MoeOptions(selection=2, weights=rule)  # type: ignore[arg-type]  # error
    ruda.MoeOptions(selection=rule, weights=ruda.SoftmaxSelection(2))  # type: ignore[arg-type]  # error
    ruda.moe_forward(x, x, x, x, x, options=ruda.ExpertOptions())  # type: ignore[call-overload]  # error
    ruda.moe_backward_selected(state, x, ruda.ExpertsGradientSelection.all())  # type: ignore[arg-type]  # error


def records(
    x: FloatArray,
    grads: ruda.MoeBackward[NumpyBackend],
    some: ruda.MoeBackwardSelected[NumpyBackend],
    state: ruda.MoeState[NumpyBackend],
    experts_state: ruda.ExpertsState[NumpyBackend],
) -> None:
    torch_grads: ruda.MoeBackward[TorchBackend] = grads  # type: ignore[assignment]  # error
    _ = torch_grads
    _ = some.input + x  # type: ignore[operator]  # error
    _ = grads.correction_bias  # type: ignore[attr-defined]  # error
    grads.backend = NumpyBackend()  # type: ignore[misc]  # error
    grads.to("numpy")  # type: ignore[type-var]  # error
    ruda.moe_backward(experts_state, x)  # type: ignore[arg-type]  # error
    ruda.experts_backward(state, x)  # type: ignore[arg-type]  # error
    ruda.moe_route_indices(grads)  # type: ignore[arg-type]  # error


def tensors_of_the_wrong_kind(backend: Backend[F, I, L], x: F, ids: I, mask: L) -> F:
    backend.cast(ids, ruda.DType.FLOAT32)  # type: ignore[arg-type]  # error
    backend.index(x, 4)  # type: ignore[arg-type]  # error
    backend.take_rows(x, x)  # type: ignore[arg-type]  # error
    backend.where(ids, x, x)  # type: ignore[arg-type]  # error
    backend.matmul(x, ids)  # type: ignore[arg-type]  # error
    _ = x + ids  # type: ignore[operator]  # error
    _ = x | mask  # type: ignore[operator]  # error
    _ = backend.exp(mask)  # type: ignore[arg-type]  # error
    if backend.shape(x):
        return ids  # type: ignore[return-value]  # error
    return backend.arange(3)  # type: ignore[return-value]  # error


class Incomplete(Backend[FloatArray, IntArray, npt.NDArray[np.bool_]]):
    name = "incomplete"


def backends() -> None:
    Incomplete()  # type: ignore[abstract]  # error
    ruda.get_backend(NumpyBackend())  # type: ignore[arg-type]  # error
    ruda.register_backend("mine", int)  # type: ignore[arg-type]  # error
