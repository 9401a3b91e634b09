"""`specification(backend)`: same tensors, same device, no kernel, not in a nested call either."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import ruda
from ruda.backend.array_api import ArrayApiBackend
from ruda.backend.registry import AnyBackend
from ruda.backend.specification import replaced_stages, stage_bodies
from ruda.testing.tolerance import assert_same_bits
from ruda_backend_numpy import NumpyBackend

OPTIONS = ruda.MoeOptions(
    selection=ruda.SoftmaxSelection(2),
    weights=ruda.RouterWeightOptions(ruda.RouterScoring.SOFTMAX, renormalize=True),
)


def operands() -> list[Any]:
    rng = np.random.default_rng(0)
    shapes = ((5, 4), (5, 3), (3, 6, 4), (3, 6, 4), (3, 4, 6))
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


class Doubling(NumpyBackend):
    """A third party's kernel, here one that can be told apart."""

    name = "doubling"

    def swiglu(self, gate_output: Any, up_output: Any, /) -> Any:
        return 2 * super().swiglu(gate_output, up_output)


class Passing(NumpyBackend):
    """A kernel for the whole expert pass: its output is four times too large."""

    name = "passing"

    def expert_rows_forward(self, *operands: Any, **keywords: Any) -> Any:
        rows, kept = super().expert_rows_forward(*operands, **keywords)
        return 4 * rows, kept


@pytest.mark.parametrize(("kind", "factor"), [(Doubling, 2), (Passing, 4)])
def test_a_kernel_is_used_and_its_specification_is_not(
    kind: type[NumpyBackend], factor: int
) -> None:
    backend = kind()
    plain = ruda.moe_inference(*operands(), options=OPTIONS, backend=NumpyBackend())
    kernel, _ = ruda.moe_forward(*operands(), options=OPTIONS, backend=backend)
    written, state = ruda.moe_forward(
        *operands(), options=OPTIONS, backend=ruda.specification(backend)
    )
    assert_same_bits("with the kernel", kernel, factor * plain)
    assert_same_bits("as it is written", written, plain)
    # The state goes on with the backend it was made by.
    grads = ruda.moe_backward(state, np.ones_like(written))
    other = ruda.moe_forward(*operands(), options=OPTIONS, backend=NumpyBackend())[1]
    expected = ruda.moe_backward(other, np.ones_like(written))
    for name, gradient in grads.asdict().items():
        assert_same_bits(name, gradient, expected.asdict()[name])


def test_what_is_replaced() -> None:
    assert "swiglu" in replaced_stages(Doubling)
    assert "expert_rows_forward" not in replaced_stages(Doubling)
    assert replaced_stages(type(ruda.specification(Doubling()))) == ()
    assert {"take_along", "top_k", "router_weights", "combine", "grouped_matmul", "swiglu"} <= set(
        stage_bodies()
    )
    # Facts of the framework are not stages: they stay the backend's own.
    assert not {"version", "numerics", "unsupported", "owns", "dtype"} & set(stage_bodies())


def test_every_backend(backend: AnyBackend) -> None:
    written = ruda.specification(backend)
    assert replaced_stages(type(written)) == ()
    assert (written.name, written.device, written.dtypes, written.version) == (
        backend.name,
        backend.device,
        backend.dtypes,
        backend.version,
    )
    tensors = [backend.from_numpy(array) for array in operands()]
    output, state = ruda.moe_forward(
        tensors[0], tensors[1], *tensors[2:], options=OPTIONS, backend=written
    )
    grads = ruda.moe_backward(state, output)
    assert grads.backend is written
    assert backend.owns(grads.down)
    assert type(ruda.specification(backend)) is type(written)


def test_past_a_class_that_refuses_attributes() -> None:
    @dataclass(frozen=True)
    class Frozen(ArrayApiBackend[Any, Any, Any]):
        device: str = "cpu"
        name = "frozen"
        xp = np
        FloatTensor = IntTensor = BoolTensor = np.ndarray
        dtypes = frozenset({ruda.DType.FLOAT32})

        def to_numpy(self, tensor: Any, /) -> Any:
            return tensor

        def swiglu(self, gate_output: Any, up_output: Any, /) -> Any:
            raise AssertionError("the kernel was reached")

    g = np.ones((2, 3), np.float32)
    written = ruda.specification(Frozen())
    assert_same_bits("swiglu", written.swiglu(g, g), NumpyBackend().swiglu(g, g))
    with pytest.raises(AssertionError, match="kernel was reached"):
        Frozen().swiglu(g, g)
