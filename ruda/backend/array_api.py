"""A `Backend` for any namespace of the Python array API standard.

`ArrayApiBackend` uses only what the standard names and never writes to an array, so it serves
strict and immutable libraries alike. `MutableArrayApiBackend` is for NumPy and its likes: rows are
written in place, and a cast rounds once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

from ruda.backend import Backend
from ruda.base.dtypes import DType
from ruda.base.tensors import F, I, L

A = TypeVar("A")


class ArrayApiBackend(Backend[F, I, L]):
    """Every required operation, through the namespace `xp`."""

    xp: ClassVar[Any]

    def __init__(self, device: str | None = None) -> None:
        self.device = device if device is not None else self.devices()[0]

    def _dtype(self, dtype: DType) -> Any:
        """The namespace's own object for a dtype."""
        return getattr(self.xp, dtype.value)

    @property
    def _index_dtype(self) -> Any:
        return self.xp.int64

    def devices(self) -> list[str]:
        """One device, the host, unless a subclass knows more."""
        return ["cpu"]

    def shape(self, tensor: F | I, /) -> tuple[int, ...]:
        array: Any = tensor
        return tuple(array.shape)

    def dtype_name(self, tensor: F | I, /) -> str:
        array: Any = tensor
        return str(array.dtype).rpartition(".")[2]

    def device_of(self, tensor: F | I, /) -> str:
        return self.device

    def from_numpy(self, array: Any, /) -> Any:
        return self.xp.asarray(array, copy=True)

    def full(self, shape: tuple[int, ...], value: float, dtype: DType, /) -> F:
        result: F = self.xp.full(shape, value, dtype=self._dtype(dtype))
        return result

    def arange(self, stop: int, /) -> I:
        result: I = self.xp.arange(stop, dtype=self._index_dtype)
        return result

    def cast(self, tensor: F, dtype: DType, /) -> F:
        result: F = self.xp.astype(tensor, self._dtype(dtype), copy=False)
        return result

    def index(self, ids: I, limit: int, /) -> I:
        # A uint64 beyond int64 wraps to a negative number: outside either way.
        wide = self.xp.astype(ids, self._index_dtype, copy=False)
        inside = (wide >= 0) & (wide < limit)
        result: I = self.xp.where(inside, wide, self.xp.full_like(wide, -1))
        return result

    def reshape(self, tensor: A, shape: tuple[int, ...], /) -> A:
        result: A = self.xp.reshape(tensor, shape)
        return result

    def transpose(self, matrix: F, /) -> F:
        result: F = self.xp.permute_dims(matrix, (1, 0))
        return result

    def concat(self, tensors: Sequence[A], /) -> A:
        result: A = self.xp.concat(tensors, axis=0)
        return result

    def take_rows(self, tensor: A, rows: I, /) -> A:
        result: A = self.xp.take(tensor, rows, axis=0)
        return result

    def add_rows(self, target: F, rows: I, values: F, /) -> F:
        # A gather per round, one round for each repetition of a row.
        xp = self.xp
        length, repeats = self.shape(target)[0], self.shape(rows)[0]
        if not length or not repeats:
            return target
        order = xp.argsort(rows, stable=True)
        ordered = xp.take(rows, order, axis=0)
        row = xp.arange(length, dtype=ordered.dtype)
        first = xp.searchsorted(ordered, row)
        past = xp.searchsorted(ordered, row, side="right")
        trailing = (1,) * (len(self.shape(target)) - 1)
        for repeat in range(int(xp.max(past - first))):
            place = first + repeat
            hit = xp.reshape(place < past, (length, *trailing))
            readable = xp.where(place < past, place, xp.zeros_like(place))
            value = xp.take(values, xp.take(order, readable, axis=0), axis=0)
            target = xp.where(hit, target + value, target)
        return target

    def write_rows(self, target: F, start: int, values: F, /) -> F:
        values = self.cast(values, self.dtype(target))
        before: F = target[:start, ...]
        after: F = target[start + self.shape(values)[0] :, ...]
        return self.concat([before, values, after])

    def where(self, mask: L, a: A | float, b: A | float, /) -> A:
        result: A = self.xp.where(mask, a, b)
        return result

    def stable_argsort(self, keys: F | I, /) -> I:
        result: I = self.xp.argsort(keys, axis=-1, stable=True)
        return result

    def counts(self, ids: I, length: int, /) -> I:
        ordered = self.xp.sort(ids)
        edges = self.xp.searchsorted(ordered, self.xp.arange(length + 1, dtype=ordered.dtype))
        result: I = self.xp.astype(edges[1:] - edges[:-1], self._index_dtype, copy=False)
        return result

    def cumulative_sum(self, values: I, /) -> I:
        result: I = self.xp.cumulative_sum(values, axis=0, dtype=self._index_dtype)
        return result

    def sum(self, tensor: A, /, *, axis: int, keepdims: bool = False) -> A:
        array: Any = tensor
        result: A = self.xp.sum(array, axis=axis, keepdims=keepdims, dtype=array.dtype)
        return result

    def max(self, tensor: F, /, *, axis: int, keepdims: bool = False) -> F:
        result: F = self.xp.max(tensor, axis=axis, keepdims=keepdims)
        return result

    def exp(self, tensor: F, /) -> F:
        result: F = self.xp.exp(tensor)
        return result

    def log1p(self, tensor: F, /) -> F:
        result: F = self.xp.log1p(tensor)
        return result

    def sqrt(self, tensor: F, /) -> F:
        result: F = self.xp.sqrt(tensor)
        return result

    def matmul(self, a: F, b: F, /) -> F:
        result: F = self.xp.matmul(a, b)
        return result


class MutableArrayApiBackend(ArrayApiBackend[F, I, L]):
    """For NumPy and its likes: rows are written in place, casts round once."""

    def cast(self, tensor: F, dtype: DType, /) -> F:
        # ml_dtypes goes from float64 to bfloat16 by way of float32.
        if dtype is DType.BFLOAT16 and self.dtype_name(tensor) == "float64":
            return super().cast(self._to_odd_float32(tensor), dtype)
        return super().cast(tensor, dtype)

    def _to_odd_float32(self, tensor: Any) -> Any:
        """Float64 to float32 so that a further rounding, to 16 bits, is as if it were the only one.

        What is not exact is cut off, and its last bit set: it can then be no tie.
        """
        near = self.xp.astype(tensor, self.xp.float32)
        inexact, outward = near != tensor, abs(near) > abs(tensor)
        bits = near.view("int32") - outward
        return self.xp.where(inexact, bits | 1, near.view("int32")).astype("int32").view("float32")

    def empty(self, shape: tuple[int, ...], dtype: DType, /) -> F:
        result: F = self.xp.empty(shape, dtype=self._dtype(dtype))
        return result

    def write_rows(self, target: F, start: int, values: F, /) -> F:
        array: Any = target
        array[start : start + self.shape(values)[0], ...] = values
        return target
