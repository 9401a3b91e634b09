"""What the CuPy backend does, but for the device it does it on.

The operations of `MutableArrayApiBackend` in words CuPy has, and a device kernel for each stage
that would otherwise cost a pass over memory for every arithmetic step. Where kernels run is left
to `launch`: `CupyBackend` hands them to the GPU, the tests' stand-in to a host compiler.
"""

from __future__ import annotations

import importlib.util
from abc import abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

from ruda.backend.array_api import MutableArrayApiBackend
from ruda.base.dtypes import DType, wider
from ruda.base.strategies import CombineGradientStrategy, ExpertStrategy, Request
from ruda.stages.dispatch import RowLayout
from ruda.stages.options import CombineAccumulation
from ruda_backend_cupy import source
from ruda_backend_cupy.source import Kernel

A = TypeVar("A")

_HAS_BFLOAT16 = importlib.util.find_spec("ml_dtypes") is not None
_THREADS = 256
_PLANE = 32
_MOST_BLOCKS = 2**31 - 1


# CuPy ships no types: its tensors are Any.
class CupyOperations(MutableArrayApiBackend[Any, Any, Any]):
    """The CuPy backend on any namespace with NumPy's names, kernels by way of `launch`."""

    name = "cupy"
    dtypes = frozenset(dtype for dtype in DType if dtype is not DType.BFLOAT16 or _HAS_BFLOAT16)

    @abstractmethod
    def launch(self, kernel: Kernel, blocks: int, threads: int, /, *arguments: Any) -> None:
        """Run a kernel; an argument is an array in row-major order or an integer."""

    def on_device(self) -> AbstractContextManager[object]:
        """Entered where a tensor is made outside a pass."""
        return nullcontext()

    def unsupported(self, request: Request, /) -> str | None:
        """No 16-bit matrix units: products are formed in float32 or float64. Planes of 32 lanes."""
        if request.strategy is CombineGradientStrategy.PLANE:
            return super().unsupported(replace(request, strategy=None))
        if request.strategy is ExpertStrategy.TENSOR_CORE:
            return "its products run through cuBLAS in float32 or float64, off the matrix units"
        return super().unsupported(request)

    def _dtype(self, dtype: DType) -> Any:
        if dtype is DType.BFLOAT16:
            import ml_dtypes

            return self.xp.dtype(ml_dtypes.bfloat16)
        return self.xp.dtype(dtype.value)

    def from_numpy(self, array: Any, /) -> Any:
        with self.on_device():
            return super().from_numpy(array)

    def full(self, shape: tuple[int, ...], value: float, dtype: DType, /) -> Any:
        with self.on_device():
            return super().full(shape, value, dtype)

    def empty(self, shape: tuple[int, ...], dtype: DType, /) -> Any:
        with self.on_device():
            return super().empty(shape, dtype)

    def arange(self, stop: int, /) -> Any:
        with self.on_device():
            return super().arange(stop)

    def stable_argsort(self, keys: Any, /) -> Any:
        if not keys.size:
            return self.xp.zeros(keys.shape, dtype=self._index_dtype)
        # Adding zero makes -0.0 into 0.0, which a radix sort would tell apart.
        plain = keys + 0 if keys.dtype.kind == "f" else keys
        return self.xp.argsort(plain, axis=-1, kind="stable")

    def counts(self, ids: Any, length: int, /) -> Any:
        # Edges in the sorted ids; `bincount` would read its largest element back to the host.
        if not ids.size:
            return self.xp.zeros((length,), dtype=self._index_dtype)
        edges = self.xp.searchsorted(self.xp.sort(ids), self.xp.arange(length + 1, dtype=ids.dtype))
        return self.xp.astype(edges[1:] - edges[:-1], self._index_dtype, copy=False)

    def add_rows(self, target: Any, rows: Any, values: Any, /) -> Any:
        target = self._packed(target)
        if not target.size or not rows.size:
            return target
        count, width = rows.shape[0], target.size // target.shape[0]
        index = self._packed_index(rows)
        dtype = self.dtype(target)
        added = self._packed(self.cast(values, dtype))
        self._each(
            source.add_rows(dtype),
            count * width,
            target,
            index,
            self.stable_argsort(index),
            added,
            count,
            width,
        )
        return target

    def swiglu(self, gate_output: Any, up_output: Any, /) -> Any:
        dtype = self.dtype(gate_output)
        gate, up = self._packed(gate_output), self._packed(self.cast(up_output, dtype))
        activation = self.empty(gate.shape, dtype)
        self._each(source.swiglu(dtype), gate.size, gate, up, activation, gate.size)
        return activation

    def swiglu_backward(self, gate_output: Any, up_output: Any, da: Any, /) -> tuple[Any, Any]:
        dtype = self.dtype(gate_output)
        gate = self._packed(gate_output)
        up, upstream = (self._packed(self.cast(tensor, dtype)) for tensor in (up_output, da))
        dg, du = self.empty(gate.shape, dtype), self.empty(gate.shape, dtype)
        kernel = source.swiglu_backward(dtype)
        self._each(kernel, gate.size, gate, up, upstream, dg, du, gate.size)
        return dg, du

    def routing_weight_gradient(
        self, b: Any, activation: Any, /, *, dtype: DType, strategy: CombineGradientStrategy
    ) -> Any:
        storage = self.dtype(b)
        plane = strategy is CombineGradientStrategy.PLANE
        rows, width = b.shape
        dweights = self.empty((rows,), dtype)
        self._each(
            source.weight_gradient(storage, dtype, plane=plane),
            rows * (_PLANE if plane else 1),
            self._packed(b),
            self._packed(self.cast(activation, storage)),
            dweights,
            rows,
            width,
        )
        return dweights

    def combine(
        self,
        expert_output: Any,
        weights: Any,
        layout: RowLayout[Any],
        /,
        *,
        accumulation: CombineAccumulation,
        dtype: DType,
    ) -> Any:
        tokens, slots = layout.positions.shape
        hidden = expert_output.shape[1]
        types = (self.dtype(expert_output), self.dtype(weights).compute, dtype)
        compute = wider(types[1], dtype.compute)
        positions = self.xp.empty((tokens, slots), dtype=self._index_dtype)
        ordered = self.empty((tokens, slots), compute)
        self._each(
            source.order_slots(*types),
            tokens * slots,
            self._packed_index(layout.expert_ids),
            self._packed_index(layout.positions),
            self._packed(self.cast(weights, types[1])),
            positions,
            ordered,
            tokens,
            slots,
        )
        output = self.empty((tokens, hidden), dtype)
        self._each_token(
            source.combine(*types),
            tokens,
            hidden,
            self._packed(expert_output),
            positions,
            ordered,
            output,
            tokens,
            slots,
            hidden,
            int(accumulation is CombineAccumulation.STORAGE),
        )
        return output

    def copy_backward(self, drows: Any, layout: RowLayout[Any], /, *, dtype: DType) -> Any:
        tokens, slots = layout.positions.shape
        hidden = drows.shape[1]
        result = self.empty((tokens, hidden), dtype)
        self._each_token(
            source.copy_backward(self.dtype(drows), dtype),
            tokens,
            hidden,
            self._packed(drows),
            self._packed_index(layout.positions),
            result,
            tokens,
            slots,
            hidden,
        )
        return result

    def _packed(self, tensor: Any) -> Any:
        """In row-major order: the tensor itself where it is."""
        return self.xp.ascontiguousarray(tensor)

    def _packed_index(self, tensor: Any) -> Any:
        return self.xp.ascontiguousarray(tensor, dtype=self._index_dtype)

    def _each(self, kernel: Kernel, threads: int, /, *arguments: Any) -> None:
        """At least so many threads, if any; beyond the largest grid, threads come round again."""
        if threads:
            blocks = min(-(-threads // _THREADS), _MOST_BLOCKS)
            self.launch(kernel, blocks, _THREADS, *arguments)

    def _each_token(self, kernel: Kernel, tokens: int, hidden: int, /, *arguments: Any) -> None:
        """A block a token, of no more threads than columns need."""
        if tokens and hidden:
            threads = min(_THREADS, -(-hidden // _PLANE) * _PLANE)
            self.launch(kernel, min(tokens, _MOST_BLOCKS), threads, *arguments)
