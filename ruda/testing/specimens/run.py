"""A specimen on a backend: operands in, every result out as NumPy arrays.

Legend: T tokens, H hidden, I intermediate, E experts, k slots a token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from ruda.backend.registry import AnyBackend
from ruda.branch.experts import experts_backward, experts_forward
from ruda.branch.moe import moe_backward, moe_forward, moe_inference, moe_route_indices
from ruda.branch.records import MoeState
from ruda.branch.router import selected_router_weights
from ruda.stages.options import ExpertOptions, FixedSelection, MoeGradientSelection, MoeOptions
from ruda.testing.reference.envelope import envelope
from ruda.testing.layers import Array, Layer
from ruda.testing.placement import place
from ruda.testing.reference import reference_selection
from ruda.testing.specimens.specimen import Specimen

OPERANDS = ("input", "logits", "gate", "up", "down")


@dataclass(frozen=True, eq=False)
class Expected:
    """What a layer must give: the choice of experts, and per result the exact and plain numbers."""

    layer: Layer
    expert_ids: Array
    """[T, k]"""
    exact: dict[str, Array]
    plain: dict[str, Array]
    edge: dict[str, Array]
    """Where overflow depends on the order of operations."""


@lru_cache(maxsize=4096)
def expected(specimen: Specimen) -> Expected:
    """The references of a specimen, made once a process: they cost more than any backend."""
    layer = specimen.layer()
    ids = reference_selection(layer.logits, layer.correction_bias, layer.options.selection)
    found = envelope(layer, ids)
    return Expected(layer, ids, found.exact, found.plain, found.edge)


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


def placed(backend: AnyBackend, specimen: Specimen) -> Placed:
    """The specimen's layer moved to the backend, each operand in its layout."""
    layer = specimen.layer()

    def moved(name: str, array: Array) -> Any:
        return place(backend, array, specimen.layout_of(name))

    options, bias = layer.options, layer.correction_bias
    if isinstance(options.selection, FixedSelection):
        ids = moved("expert_ids", options.selection.expert_ids)
        options = replace(options, selection=FixedSelection(ids))
    return Placed(
        backend,
        {name: moved(name, getattr(layer, name)) for name in OPERANDS},
        moved("grad_output", layer.grad_output),
        options,
        None if bias is None else moved("correction_bias", bias),
    )


def run_moe(backend: AnyBackend, specimen: Specimen) -> dict[str, Array]:
    """Expert ids, output and the five gradients of the branch, by name."""
    on = placed(backend, specimen)
    output, state = on.forward()
    gradients = moe_backward(state, on.grad_output)
    results = {"expert_ids": moe_route_indices(state), "output": output, **gradients.asdict()}
    return on_host(backend, results)


def run_experts(backend: AnyBackend, specimen: Specimen) -> dict[str, Array]:
    """Output and gradients from dispatch to combine, the reference's ids and own weights given."""
    on = placed(backend, specimen)
    ids = backend.from_numpy(expected(specimen).expert_ids.astype(np.int32))
    options = on.options
    weights = selected_router_weights(on.tensors["logits"], ids, options.weights, backend=backend)
    output, state = experts_forward(
        on.tensors["input"],
        ids,
        weights,
        *(on.tensors[name] for name in ("gate", "up", "down")),
        options=ExpertOptions(combine=options.combine, intermediates=options.intermediates),
        backend=backend,
    )
    gradients = experts_backward(state, on.grad_output)
    return on_host(backend, {"output": output, **gradients.asdict()})


def on_host(backend: AnyBackend, tensors: dict[str, Any]) -> dict[str, Array]:
    """The tensors as NumPy arrays of their own: a later pass that writes into them is seen."""
    return {name: np.array(backend.to_numpy(tensor)) for name, tensor in tensors.items()}
