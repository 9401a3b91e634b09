"""The four element types of the contract, and the type each one is computed in (contract 1)."""

from __future__ import annotations

from enum import StrEnum

from ruda.base.errors import DTypeError
from ruda.base.values import shown


class DType(StrEnum):
    """A floating element type by its common name."""

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"

    @property
    def itemsize(self) -> int:
        """Bytes an element takes."""
        return _ITEMSIZE[self]

    @property
    def compute(self) -> DType:
        """The compute type C: float64 for float64, float32 for the other three."""
        return DType.FLOAT64 if self is DType.FLOAT64 else DType.FLOAT32


_ITEMSIZE = {DType.FLOAT16: 2, DType.BFLOAT16: 2, DType.FLOAT32: 4, DType.FLOAT64: 8}

_SHORT_NAMES = {
    "fp16": DType.FLOAT16,
    "f16": DType.FLOAT16,
    "half": DType.FLOAT16,
    "bf16": DType.BFLOAT16,
    "fp32": DType.FLOAT32,
    "f32": DType.FLOAT32,
    "float": DType.FLOAT32,
    "fp64": DType.FLOAT64,
    "f64": DType.FLOAT64,
    "double": DType.FLOAT64,
}

INTEGER_NAMES = frozenset(
    {"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}
)


def parse_dtype(name: str) -> DType:
    """The type with this name, full or short (``bf16``, ``float32``); `DTypeError` otherwise."""
    text = str(name).lower()
    short = _SHORT_NAMES.get(text)
    if short is not None:
        return short
    try:
        return DType(text)
    except ValueError:
        known = ", ".join(dtype.value for dtype in DType)
        raise DTypeError(f"dtype: expected one of {known}, got {shown(name)}") from None


def wider(a: DType, b: DType) -> DType:
    """The compute type that holds both: float64 if either is float64, float32 otherwise."""
    return DType.FLOAT64 if DType.FLOAT64 in (a, b) else DType.FLOAT32
