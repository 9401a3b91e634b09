"""`Operations`: what a framework must provide for the algorithm to run on its tensors.

A backend is one small object bound to one device. It must let the generic algorithm run on tensors
whose library this package never imports, and keep their static types: `Operations[F, I, L]` is
generic in the float, integer and boolean tensor. The **required** operations are abstract, a line
or two each over any array library; arithmetic, comparison and slicing are done by Python operators
on the tensors themselves. The stages of the algorithm are built on these in `ruda.stages`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, Self, TypeVar

from ruda.base.dtypes import DType
from ruda.base.strategies import CombineGradientStrategy, ExpertStrategy, Request
from ruda.base.tensors import F, I, L

A = TypeVar("A")


class BackendTypes(Protocol[F, I, L]):
    """The tensor types of a backend."""

    FloatTensor: type[F]
    IntTensor: type[I]
    BoolTensor: type[L]


class Operations(BackendTypes[F, I, L], Protocol[F, I, L]):
    """Operations on one framework's tensors, on one device. See the module's first lines."""

    name: str
    device: str
    dtypes: frozenset[DType]

    # Required: metadata.

    @abstractmethod
    def shape(self, tensor: F | I, /) -> tuple[int, ...]:
        """The extents, as Python integers."""

    @abstractmethod
    def dtype_name(self, tensor: F | I, /) -> str:
        """The element type by its common name: ``float32``, ``bfloat16``, ``int64``, ``bool``..."""

    @abstractmethod
    def device_of(self, tensor: F | I, /) -> str:
        """The device, spelled like `device`."""

    # Required: moving data in and out, and making it.

    @abstractmethod
    def from_numpy(self, array: Any, /) -> Any:
        """A tensor on `device` with the values and dtype of a NumPy array (bfloat16: ml_dtypes)."""

    @abstractmethod
    def to_numpy(self, tensor: F | I, /) -> Any:
        """A NumPy array with the tensor's values and dtype; waits for the device."""

    @abstractmethod
    def full(self, shape: tuple[int, ...], value: float, dtype: DType, /) -> F:
        """A new tensor on `device`, every element `value`; the caller may write to it."""

    @abstractmethod
    def arange(self, stop: int, /) -> I:
        """0, 1, ..., stop-1 in the natural index type."""

    # Required: types and layout.

    @abstractmethod
    def cast(self, tensor: F, dtype: DType, /) -> F:
        """Round to nearest even in `dtype`; the tensor itself where it has that type already."""

    @abstractmethod
    def index(self, ids: I, limit: int, /) -> I:
        """The ids in the natural index type; -1 for any outside [0, limit).

        Any integer type comes in; bounds are checked before narrowing.
        """

    @abstractmethod
    def reshape(self, tensor: A, shape: tuple[int, ...], /) -> A:
        """The same elements in row-major order, in another shape."""

    @abstractmethod
    def transpose(self, matrix: F, /) -> F:
        """A matrix with its two axes exchanged."""

    @abstractmethod
    def concat(self, tensors: Sequence[A], /) -> A:
        """Joined along the first axis."""

    @abstractmethod
    def take_rows(self, tensor: A, rows: I, /) -> A:
        """Elements `rows` of the first axis; each within range."""

    @abstractmethod
    def add_rows(self, target: F, rows: I, values: F, /) -> F:
        """`target` with each of `values` added at its row; repeated rows all count.

        `target` is a buffer the caller gives up: it may be written to and returned.
        """

    @abstractmethod
    def write_rows(self, target: F, start: int, values: F, /) -> F:
        """`target` with `values`, rounded to its type as by `cast`, as its rows from `start` on.

        `values` have its type, or the type it is computed in. `target` is a buffer the caller gives
        up: it may be written to and returned.
        """

    # Required: arithmetic beyond the operators.

    @abstractmethod
    def where(self, mask: L, a: A | float, b: A | float, /) -> A:
        """`a` where the mask holds, else `b`, broadcast; a number takes the other's dtype."""

    @abstractmethod
    def stable_argsort(self, keys: F | I, /) -> I:
        """Ascending order along the last axis; equal keys (-0.0 and 0.0 too) keep their order.

        No NaN comes.
        """

    @abstractmethod
    def counts(self, ids: I, length: int, /) -> I:
        """How often each of 0..length-1 occurs in a vector of ids, in the natural index type."""

    @abstractmethod
    def cumulative_sum(self, values: I, /) -> I:
        """Inclusive prefix sum of a vector."""

    @abstractmethod
    def sum(self, tensor: A, /, *, axis: int, keepdims: bool = False) -> A:
        """Sum along an axis in the tensor's own type, by the same order every run."""

    @abstractmethod
    def max(self, tensor: F, /, *, axis: int, keepdims: bool = False) -> F:
        """Largest along an axis; no NaN comes."""

    @abstractmethod
    def exp(self, tensor: F, /) -> F:
        """Exponential of each element."""

    @abstractmethod
    def log1p(self, tensor: F, /) -> F:
        """log(1 + x) of each element."""

    @abstractmethod
    def sqrt(self, tensor: F, /) -> F:
        """Square root of each element."""

    @abstractmethod
    def matmul(self, a: F, b: F, /) -> F:
        """Product of two float32 or two float64 matrices, in their type."""

    # Provided: facts about the framework.

    @property
    def version(self) -> str:
        """The framework's version."""
        return "unknown"

    def itself(self) -> Self:
        """Itself: carries its exact type through `BackendOf`."""
        return self

    def owns(self, tensor: object, /) -> bool:
        """Whether this is a tensor of this framework that the operations accept."""
        return isinstance(tensor, self.FloatTensor)

    def devices(self) -> list[str]:
        """The devices tensors may live on here."""
        return [self.device]

    def unsupported(self, request: Request, /) -> str | None:
        """Why a strategy, dtype or device cannot be served, or `None` if it can."""
        if request.dtype is not None and request.dtype not in self.dtypes:
            return f"it has no {request.dtype}"
        if request.strategy is ExpertStrategy.TENSOR_CORE:
            return "it has no 16-bit matrix units"
        if request.strategy is CombineGradientStrategy.PLANE:
            return "it has no 32- or 64-lane planes"
        if request.device is not None and request.device not in self.devices():
            return f"its devices are {', '.join(self.devices())}"
        return None

    def numerics(self) -> AbstractContextManager[object]:
        """Entered around every pass: silence warnings, stop autograd, whatever applies."""
        return nullcontext()

    def synchronize(self) -> None:
        """Wait until the device has done all work given to it."""
        return

    def write_version(self, tensor: F, /) -> int | None:
        """A number that grows with every in-place change of the tensor, where there is one."""
        return None

    def tracks_gradients(self, tensor: F, /) -> bool:
        """Whether the framework would differentiate through what is computed from the tensor."""
        return False

    def from_dlpack(self, tensor: Any, /) -> F | None:
        """Another framework's tensor by DLPack, or `None` where this pair cannot."""
        return None

    def dtype(self, tensor: F, /) -> DType:
        """The element type of a float tensor."""
        return DType(self.dtype_name(tensor))

    def empty(self, shape: tuple[int, ...], dtype: DType, /) -> F:
        """A new tensor on `device` that the caller writes to, every element, before it reads."""
        return self.full(shape, 0.0, dtype)

    def take_along(self, tensor: A, ids: I, /) -> A:
        """Elements [T, K] at column `ids` [T, K] of each row of a matrix [T, E]."""
        tokens, columns = self.shape(tensor)  # type: ignore[arg-type]
        slots = self.shape(ids)[1]
        starts: I = (self.arange(tokens) * columns)[:, None]
        flat = self.reshape(starts + ids, (tokens * slots,))
        taken = self.take_rows(self.reshape(tensor, (tokens * columns,)), flat)
        return self.reshape(taken, (tokens, slots))


def missing_operations(kind: type) -> list[str]:
    """Required operations, and plain attributes, that a backend class lacks."""
    operations: frozenset[str] = getattr(kind, "__abstractmethods__", frozenset())
    attributes = ("name", "dtypes", "FloatTensor", "IntTensor", "BoolTensor")
    return sorted(operations) + [name for name in attributes if not hasattr(kind, name)]
