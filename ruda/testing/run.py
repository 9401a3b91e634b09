"""Running a layer file's layer on one backend: operands in, results out as NumPy arrays, timed."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import ruda
from ruda.backend import Backend
from ruda.base.errors import DTypeError
from ruda.stages.options import FixedSelection, MoeGradientSelection
from ruda.testing.layers import Array, Layer


@dataclass(frozen=True, eq=False)
class Run:
    """What one pass over a layer gave."""

    output: Array
    """[T, H]"""
    expert_ids: Array
    """[T, k], int64"""
    weights: Array
    """[T, k]"""
    gradients: dict[str, Array]
    """The wanted ones, by name."""
    forward_seconds: float
    backward_seconds: float


def run_layer(backend: Backend[Any, Any, Any], layer: Layer, wanted: MoeGradientSelection) -> Run:
    """Forward, and backward where a gradient is wanted. Times leave out moving data in and out."""
    for dtype in (layer.dtype, layer.logits_dtype):
        if dtype not in backend.dtypes:
            raise DTypeError(f"backend {backend.name!r} has no {dtype}")
    tensors = {
        name: backend.from_numpy(getattr(layer, name))
        for name in ("input", "logits", "gate", "up", "down", "grad_output")
    }
    grad_output = tensors.pop("grad_output")
    bias = layer.correction_bias
    options = layer.options
    if isinstance(options.selection, FixedSelection):
        ids = backend.from_numpy(np.asarray(options.selection.expert_ids))
        options = replace(options, selection=FixedSelection(ids))
    backend.synchronize()

    started = time.perf_counter()
    output, state = ruda.moe_forward(
        *tensors.values(),
        options=options,
        correction_bias=None if bias is None else backend.from_numpy(bias),
        gradients=wanted,
        backend=backend,
    )
    backend.synchronize()
    forwarded = time.perf_counter()
    gradients: dict[str, Any] = {}
    if wanted.wanted:
        found = ruda.moe_backward_selected(state, grad_output, wanted).asdict()
        gradients = {name: found[name] for name in wanted.wanted}
        backend.synchronize()
    finished = time.perf_counter()

    expert_ids = ruda.moe_route_indices(state)
    weights = ruda.selected_router_weights(
        tensors["logits"], expert_ids, options.weights, backend=backend
    )
    return Run(
        output=_host(backend, output),
        expert_ids=_host(backend, expert_ids).astype(np.int64),
        weights=_host(backend, weights),
        gradients={name: _host(backend, tensor) for name, tensor in gradients.items()},
        forward_seconds=forwarded - started,
        backward_seconds=finished - forwarded,
    )


def _host(backend: Backend[Any, Any, Any], tensor: Any) -> Array:
    return np.asarray(backend.to_numpy(tensor))
