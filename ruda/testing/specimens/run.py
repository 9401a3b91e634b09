"""A specimen on a backend: operands in, every result out as NumPy arrays."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ruda.backend.registry import AnyBackend
from ruda.branch.experts import experts_backward, experts_forward
from ruda.branch.moe import moe_backward, moe_route_indices
from ruda.branch.router import selected_router_weights
from ruda.stages.options import ExpertOptions
from ruda.testing.layers import Array
from ruda.testing.reference.expected import Expected, expect
from ruda.testing.run import Placed, on_host, place_layer
from ruda.testing.specimens.specimen import Specimen


@lru_cache(maxsize=4096)
def expected(specimen: Specimen) -> Expected:
    """The references of a specimen, made once a process: they cost more than any backend."""
    return expect(specimen.layer())


def placed(backend: AnyBackend, specimen: Specimen) -> Placed:
    """The specimen's layer moved to the backend, each operand in its layout."""
    return place_layer(backend, specimen.layer(), dict(specimen.layouts))


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
