"""A layer on a backend: operands in, results out as NumPy arrays, timed.

Legend: T tokens, H hidden, I intermediate, E experts, k slots a token.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ruda.backend.registry import AnyBackend
from ruda.base.errors import DTypeError
from ruda.branch.moe import (
    moe_backward_selected,
    moe_forward,
    moe_inference,
    moe_route_indices,
)
from ruda.branch.records import MoeState
from ruda.branch.router import selected_router_weights
from ruda.stages.options import FixedSelection, MoeGradientSelection, MoeOptions
from ruda.testing.layers import Array, Layer
from ruda.testing.placement import Layout, place

OPERANDS = ("input", "logits", "gate", "up", "down")


@dataclass(frozen=True, eq=False)
class Placed:
    """A layer's operands as tensors of one backend."""

    backend: AnyBackend
    tensors: dict[str, Any]
    """By name, in the order `moe_forward` takes them."""
    grad_output: Any
    options: MoeOptions
    correction_bias: Any

    def forward(
        self, gradients: MoeGradientSelection | None = None
    ) -> tuple[Any, MoeState[AnyBackend]]:
        """The branch's output and state."""
        return moe_forward(
            *(self.tensors[name] for name in OPERANDS),
            options=self.options,
            correction_bias=self.correction_bias,
            gradients=gradients,
            backend=self.backend,
        )

    def inference(self) -> Any:
        """The branch's output alone."""
        return moe_inference(
            *(self.tensors[name] for name in OPERANDS),
            options=self.options,
            correction_bias=self.correction_bias,
            backend=self.backend,
        )

    def replaced(self, **tensors: Any) -> Placed:
        """The same with other tensors as the operands named."""
        return replace(self, tensors={**self.tensors, **tensors})


def place_layer(
    backend: AnyBackend, layer: Layer, layouts: Mapping[str, Layout] | None = None
) -> Placed:
    """The layer moved to the backend, each operand named in `layouts` to lie like that.

    Raises `DTypeError` where the backend has not the layer's types.
    """
    for dtype in (layer.dtype, layer.logits_dtype):
        if dtype not in backend.dtypes:
            raise DTypeError(f"backend {backend.name!r} has no {dtype}")

    def moved(name: str, array: Array) -> Any:
        return place(backend, array, (layouts or {}).get(name, Layout.CONTIGUOUS))

    options, bias = layer.options, layer.correction_bias
    if isinstance(options.selection, FixedSelection):
        ids = moved("expert_ids", np.asarray(options.selection.expert_ids))
        options = replace(options, selection=FixedSelection(ids))
    return Placed(
        backend,
        {name: moved(name, getattr(layer, name)) for name in OPERANDS},
        moved("grad_output", layer.grad_output),
        options,
        None if bias is None else moved("correction_bias", bias),
    )


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


def run_layer(backend: AnyBackend, layer: Layer, wanted: MoeGradientSelection) -> Run:
    """Forward, and backward where a gradient is wanted. Times leave out moving data in and out."""
    on = place_layer(backend, layer)
    backend.synchronize()

    started = time.perf_counter()
    output, state = on.forward(wanted)
    backend.synchronize()
    forwarded = time.perf_counter()
    gradients: dict[str, Any] = {}
    if wanted.wanted:
        found = moe_backward_selected(state, on.grad_output, wanted).asdict()
        gradients = {name: found[name] for name in wanted.wanted}
        backend.synchronize()
    finished = time.perf_counter()

    ids = moe_route_indices(state)
    weights = selected_router_weights(
        on.tensors["logits"], ids, on.options.weights, backend=backend
    )
    results = on_host(backend, {"output": output, "expert_ids": ids, "weights": weights})
    return Run(
        output=results["output"],
        expert_ids=results["expert_ids"].astype(np.int64),
        weights=results["weights"],
        gradients=on_host(backend, gradients),
        forward_seconds=forwarded - started,
        backward_seconds=finished - forwarded,
    )


def on_host(backend: AnyBackend, tensors: dict[str, Any]) -> dict[str, Array]:
    """The tensors as NumPy arrays of their own: a later pass that writes into them is seen."""
    return {name: np.array(backend.to_numpy(tensor)) for name, tensor in tensors.items()}
