"""NumPy as a `Backend`: the array-API operations, with what NumPy does better in its own words.

Products are always formed in float32 or float64: NumPy's 16-bit matrix products have result types
and speeds that are not ours to rely on.
"""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from ruda.backend.array_api import MutableArrayApiBackend
from ruda.base.dtypes import DType

FloatArray: TypeAlias = npt.NDArray[np.floating[Any]]
IntArray: TypeAlias = npt.NDArray[np.integer[Any]]
BoolArray: TypeAlias = npt.NDArray[np.bool_]

_HAS_BFLOAT16 = importlib.util.find_spec("ml_dtypes") is not None


@cache
def _numpy_dtype(dtype: DType) -> np.dtype[Any]:
    if dtype is DType.BFLOAT16:
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)  # type: ignore[no-any-return]
    return np.dtype(dtype.value)


class NumpyBackend(MutableArrayApiBackend[FloatArray, IntArray, BoolArray]):
    """NumPy arrays on the host."""

    name = "numpy"
    xp: ClassVar[Any] = np
    FloatTensor: type[FloatArray] = np.ndarray
    IntTensor: type[IntArray] = np.ndarray
    BoolTensor: type[BoolArray] = np.ndarray
    dtypes = frozenset(dtype for dtype in DType if dtype is not DType.BFLOAT16 or _HAS_BFLOAT16)

    @property
    def version(self) -> str:
        """NumPy's version."""
        return np.__version__

    def owns(self, tensor: object, /) -> bool:
        """Plain arrays and memory maps; a masked array or a matrix means something else by `*`."""
        return isinstance(tensor, np.ndarray) and not isinstance(
            tensor, (np.ma.MaskedArray, np.matrix)
        )

    def numerics(self) -> AbstractContextManager[object]:
        """NaN and inf travel as IEEE says, without warnings."""
        return np.errstate(all="ignore")

    def _dtype(self, dtype: DType) -> Any:
        return _numpy_dtype(dtype)

    def cast(self, tensor: FloatArray, dtype: DType, /) -> FloatArray:
        # Most casts are none, and many a product of a few rows takes no longer than to find out.
        return tensor if tensor.dtype == _numpy_dtype(dtype) else super().cast(tensor, dtype)

    def to_numpy(self, tensor: FloatArray | IntArray, /) -> Any:
        """The array itself."""
        return tensor

    def from_dlpack(self, tensor: Any, /) -> FloatArray | None:
        """Shares the memory of another framework's host tensor, where NumPy has its type."""
        kind = tensor.__dlpack_device__()[0] if hasattr(tensor, "__dlpack_device__") else None
        if kind != 1 or "bfloat16" in str(getattr(tensor, "dtype", "")):
            return None
        shared: Any = np.from_dlpack(tensor)
        return shared  # type: ignore[no-any-return]

    def add_rows(self, target: FloatArray, rows: IntArray, values: FloatArray, /) -> FloatArray:
        np.add.at(target, rows, values)
        return target

    def counts(self, ids: IntArray, length: int, /) -> IntArray:
        return np.bincount(ids, minlength=length)
