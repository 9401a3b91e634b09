"""PyTorch as a `Backend`.

Explicit gradients mean that autograd has no part here: every pass runs under `torch.no_grad`, with
autocast off, on plain dense tensors. On the CPU, products go expert by expert through BLAS in
float32 or float64; on CUDA, 16-bit operands may use the matrix units (`TENSOR_CORE`).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from ruda.backend import Backend
from ruda.base.dtypes import DType
from ruda.base.strategies import ExpertStrategy, Request

A = TypeVar("A")

_DTYPES = {
    DType.FLOAT16: torch.float16,
    DType.BFLOAT16: torch.bfloat16,
    DType.FLOAT32: torch.float32,
    DType.FLOAT64: torch.float64,
}
_SIXTEEN_BITS = (torch.float16, torch.bfloat16)


def _to_odd_float32(tensor: Tensor) -> Tensor:
    """Float64 to float32 so that a further rounding, to 16 bits, is as if it were the only one.

    PyTorch goes there by way of float32 anyway. What is not exact is cut off, and its last bit set:
    it can then be no tie.
    """
    near = tensor.to(torch.float32)
    bits = near.view(torch.int32)
    odd = (bits - (near.abs() > tensor.abs()).to(torch.int32)) | 1
    return torch.where(near != tensor, odd, bits).view(torch.float32)


class TorchBackend(Backend[Tensor, Tensor, Tensor]):
    """PyTorch tensors on one device."""

    name = "torch"
    FloatTensor = Tensor
    IntTensor = Tensor
    BoolTensor = Tensor
    dtypes = frozenset(DType)

    def __init__(self, device: str | None = None) -> None:
        self.device = device if device is not None else "cpu"

    @property
    def version(self) -> str:
        """PyTorch's version."""
        return torch.__version__

    def devices(self) -> list[str]:
        """The CPU, and every CUDA device."""
        return ["cpu", *(f"cuda:{ordinal}" for ordinal in range(torch.cuda.device_count()))]

    def unsupported(self, request: Request, /) -> str | None:
        """Matrix units on CUDA, for 16-bit operands alone; no planes."""
        if request.strategy is ExpertStrategy.TENSOR_CORE and self.device.startswith("cuda"):
            if request.dtype in (DType.FLOAT16, DType.BFLOAT16, None):
                return None
            return f"its matrix units take float16 and bfloat16, not {request.dtype}"
        return super().unsupported(request)

    @contextmanager
    def numerics(self) -> Generator[None, None, None]:
        """No autograd, no autocast."""
        kind = self.device.partition(":")[0]
        autocast = torch.is_autocast_enabled(kind)
        with torch.no_grad(), torch.autocast(kind, enabled=False) if autocast else nullcontext():
            yield

    def synchronize(self) -> None:
        """Wait for the CUDA device."""
        if self.device.startswith("cuda"):
            torch.cuda.synchronize(self.device)

    def owns(self, tensor: object, /) -> bool:
        """Dense tensors and parameters, not sparse, quantized or nested ones."""
        return (
            isinstance(tensor, Tensor)
            and tensor.layout is torch.strided
            and not tensor.is_quantized
            and not tensor.is_nested
        )

    def write_version(self, tensor: Tensor, /) -> int | None:
        """The version counter; tensors made under `torch.inference_mode` have none."""
        return None if tensor.is_inference() else tensor._version

    def tracks_gradients(self, tensor: Tensor, /) -> bool:
        """Whether autograd is recording and the tensor asks for it."""
        return torch.is_grad_enabled() and tensor.requires_grad

    def from_dlpack(self, tensor: Any, /) -> Tensor | None:
        """Shares memory with a tensor that speaks DLPack and lives on this device.

        Not with one that lies backwards: PyTorch has no negative strides, and aborts on them here.
        """
        if any(stride < 0 for stride in getattr(tensor, "strides", ())):
            return None
        kind = tensor.__dlpack_device__()[0] if hasattr(tensor, "__dlpack_device__") else None
        wanted = 2 if self.device.startswith("cuda") else 1
        if kind != wanted or "bfloat16" in str(getattr(tensor, "dtype", "")):
            return None
        shared: Tensor = from_dlpack(tensor)
        return shared if self.device_of(shared) == self.device else None

    def shape(self, tensor: Tensor, /) -> tuple[int, ...]:
        return tuple(tensor.shape)

    def dtype_name(self, tensor: Tensor, /) -> str:
        return str(tensor.dtype).removeprefix("torch.")

    def device_of(self, tensor: Tensor, /) -> str:
        device = tensor.device
        return device.type if device.type == "cpu" else str(device)

    def from_numpy(self, array: Any, /) -> Any:
        if array.dtype.name == "bfloat16":
            bits = torch.tensor(array.view("uint16").astype("int32")).to(torch.uint16)
            return bits.view(torch.bfloat16).to(self.device)
        # NumPy copies, then the memory is shared: PyTorch reads no array that lies backwards.
        return torch.asarray(array.copy(), device=self.device)

    def to_numpy(self, tensor: Tensor, /) -> Any:
        host = tensor.detach().cpu()
        if host.dtype is torch.bfloat16:
            import ml_dtypes

            return host.contiguous().view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
        return host.numpy()

    def full(self, shape: tuple[int, ...], value: float, dtype: DType, /) -> Tensor:
        return torch.full(shape, value, dtype=_DTYPES[dtype], device=self.device)

    def empty(self, shape: tuple[int, ...], dtype: DType, /) -> Tensor:
        return torch.empty(shape, dtype=_DTYPES[dtype], device=self.device)

    def arange(self, stop: int, /) -> Tensor:
        return torch.arange(stop, device=self.device)

    def cast(self, tensor: Tensor, dtype: DType, /) -> Tensor:
        target = _DTYPES[dtype]
        if tensor.dtype is target:
            return tensor
        if tensor.dtype is torch.float64 and target in _SIXTEEN_BITS:
            tensor = _to_odd_float32(tensor)
        return tensor.to(target)

    def index(self, ids: Tensor, limit: int, /) -> Tensor:
        # A uint64 beyond int64 wraps to a negative number: outside either way.
        wide = ids.to(torch.int64)
        return torch.where((wide >= 0) & (wide < limit), wide, -1)

    def reshape(self, tensor: A, shape: tuple[int, ...], /) -> A:
        array: Any = tensor
        result: A = array.reshape(shape)
        return result

    def transpose(self, matrix: Tensor, /) -> Tensor:
        return matrix.t()

    def concat(self, tensors: Sequence[A], /) -> A:
        parts: Any = tensors
        result: Any = torch.cat(tuple(parts))
        return result  # type: ignore[no-any-return]

    def take_rows(self, tensor: A, rows: Tensor, /) -> A:
        array: Any = tensor
        result: A = torch.index_select(array, 0, rows)  # type: ignore[assignment]
        return result

    def add_rows(self, target: Tensor, rows: Tensor, values: Tensor, /) -> Tensor:
        return target.index_add_(0, rows, values)

    def write_rows(self, target: Tensor, start: int, values: Tensor, /) -> Tensor:
        target[start : start + values.shape[0]] = values
        return target

    def where(self, mask: Tensor, a: A | float, b: A | float, /) -> A:
        first: Any = a
        second: Any = b
        result: Any = torch.where(mask, first, second)
        return result  # type: ignore[no-any-return]

    def stable_argsort(self, keys: Tensor, /) -> Tensor:
        # Adding zero makes -0.0 into 0.0, which a radix sort would tell apart.
        return torch.argsort(keys + 0 if keys.is_floating_point() else keys, dim=-1, stable=True)

    def counts(self, ids: Tensor, length: int, /) -> Tensor:
        ones = torch.ones_like(ids)
        return torch.zeros(length, dtype=ids.dtype, device=ids.device).index_add_(0, ids, ones)

    def cumulative_sum(self, values: Tensor, /) -> Tensor:
        return torch.cumsum(values, 0)

    def sum(self, tensor: A, /, *, axis: int, keepdims: bool = False) -> A:
        array: Any = tensor
        result: Any = torch.sum(array, dim=axis, keepdim=keepdims, dtype=array.dtype)
        return result  # type: ignore[no-any-return]

    def max(self, tensor: Tensor, /, *, axis: int, keepdims: bool = False) -> Tensor:
        return torch.amax(tensor, dim=axis, keepdim=keepdims)

    def exp(self, tensor: Tensor, /) -> Tensor:
        return torch.exp(tensor)

    def log1p(self, tensor: Tensor, /) -> Tensor:
        return torch.log1p(tensor)

    def sqrt(self, tensor: Tensor, /) -> Tensor:
        return torch.sqrt(tensor)

    def matmul(self, a: Tensor, b: Tensor, /) -> Tensor:
        return torch.mm(a, b)

    def product(self, a: Tensor, b: Tensor, /, *, dtype: DType, strategy: ExpertStrategy) -> Tensor:
        """On CUDA, 16-bit operands go through the matrix units, but for `SCALAR`."""
        on_units = (
            a.is_cuda
            and strategy is not ExpertStrategy.SCALAR
            and a.dtype in _SIXTEEN_BITS
            and a.dtype is b.dtype
        )
        if on_units:
            return torch.mm(a, b, out_dtype=_DTYPES[dtype])
        return super().product(a, b, dtype=dtype, strategy=strategy)
