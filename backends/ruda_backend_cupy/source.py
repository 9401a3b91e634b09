"""The device kernels as source text: one file a family, its element types filled in by typedefs.

A kernel is named by its family, its name and its types; nothing is compiled here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from ruda.base.dtypes import DType, wider

OPTIONS = ("--std=c++17", "--fmad=false")
"""For NVRTC: a product is rounded before it is added, as the contract's roundings want it."""

_C_NAMES = {
    DType.FLOAT16: "float16",
    DType.BFLOAT16: "bfloat16",
    DType.FLOAT32: "float",
    DType.FLOAT64: "double",
}


@dataclass(frozen=True)
class Kernel:
    """One kernel for one combination of element types."""

    family: str
    name: str
    types: tuple[tuple[str, DType], ...]

    @property
    def body(self) -> str:
        """The family's source, with its types."""
        typedefs = "".join(f"typedef {_C_NAMES[dtype]} {name};\n" for name, dtype in self.types)
        return typedefs + read(f"{self.family}.cu")

    @property
    def code(self) -> str:
        """Everything a compiler needs."""
        return read("storage.cuh") + self.body


@cache
def read(file: str) -> str:
    """The text of a file of `kernels/`."""
    return files("ruda_backend_cupy").joinpath("kernels", file).read_text(encoding="utf-8")


def swiglu(storage: DType) -> Kernel:
    """a from g and u, all of one type."""
    return Kernel("swiglu", "swiglu", (("S", storage), ("C", storage.compute)))


def swiglu_backward(storage: DType) -> Kernel:
    """dg and du from g, u and da, all of one type."""
    return Kernel("swiglu", "swiglu_backward", (("S", storage), ("C", storage.compute)))


def _combine_types(rows: DType, weights: DType, output: DType) -> tuple[tuple[str, DType], ...]:
    total = wider(weights.compute, output.compute)
    return (("Y", rows), ("W", weights), ("S", output), ("C", total))


def order_slots(rows: DType, weights: DType, output: DType) -> Kernel:
    """Positions and weights of each token in ascending expert id."""
    return Kernel("combine", "order_slots", _combine_types(rows, weights, output))


def combine(rows: DType, weights: DType, output: DType) -> Kernel:
    """The weighted sum of each token's rows."""
    return Kernel("combine", "combine", _combine_types(rows, weights, output))


def copy_backward(rows: DType, output: DType) -> Kernel:
    """The plain sum of each token's rows."""
    total = wider(rows.compute, output.compute)
    return Kernel("copy_backward", "copy_backward", (("Y", rows), ("S", output), ("C", total)))


def weight_gradient(storage: DType, weights: DType, *, plane: bool) -> Kernel:
    """dw from b and a, by one thread a weight or by a 32-lane plane."""
    name = "weight_gradient_plane" if plane else "weight_gradient_serial"
    types = (("S", storage), ("W", weights), ("C", wider(weights, storage)))
    return Kernel("weight_gradient", name, types)


def add_rows(storage: DType) -> Kernel:
    """Values added into rows of a target of the same type."""
    return Kernel("add_rows", "add_rows", (("S", storage), ("C", storage.compute)))


def every_kernel() -> list[Kernel]:
    """All combinations of types the algorithm can ask for."""
    found: list[Kernel] = []
    for storage in DType:
        found += [swiglu(storage), swiglu_backward(storage), add_rows(storage)]
        for rows in sorted({storage, storage.compute}):
            found.append(copy_backward(rows, storage))
            for weights in (DType.FLOAT32, DType.FLOAT64):
                found.append(order_slots(rows, weights, storage))
                found.append(combine(rows, weights, storage))
        for weights in (DType.FLOAT32, DType.FLOAT64):
            found.append(weight_gradient(storage, weights, plane=False))
            found.append(weight_gradient(storage, weights, plane=True))
    return found
