"""The generic algorithm in more digits than float64: what a kernel's error is measured against.

NumPy's long double stands in for float64, so that a float64 kernel has something finer to be
compared with (on platforms whose long double is float64, it has not).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, ClassVar

import numpy as np

from ruda.backend.array_api import MutableArrayApiBackend
from ruda.base.dtypes import DType
from ruda.testing.layers import Array


class ExtendedBackend(MutableArrayApiBackend[Array, Array, Array]):
    """NumPy in long double, which it calls float64."""

    name = "extended"
    xp: ClassVar[Any] = np
    FloatTensor: type[Array] = np.ndarray
    IntTensor: type[Array] = np.ndarray
    BoolTensor: type[Array] = np.ndarray
    dtypes = frozenset({DType.FLOAT64})

    def numerics(self) -> AbstractContextManager[object]:
        """NaN and inf without warnings."""
        return np.errstate(all="ignore")

    def _dtype(self, dtype: DType) -> Any:
        return np.dtype(np.longdouble if dtype is DType.FLOAT64 else dtype.value)

    def dtype_name(self, tensor: Array, /) -> str:
        """Long double is float64 here."""
        return "float64" if tensor.dtype == np.longdouble else str(tensor.dtype)

    def from_numpy(self, array: Any, /) -> Any:
        """Floats as long double."""
        kind = array.dtype if array.dtype.kind in "iub" else np.dtype(np.longdouble)
        return np.array(array, kind)

    def to_numpy(self, tensor: Array, /) -> Any:
        """Floats rounded to float64."""
        return tensor.astype(np.float64) if tensor.dtype == np.longdouble else tensor
