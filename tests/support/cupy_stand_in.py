"""A stand-in for the CuPy backend: NumPy in CuPy's place, a host compiler in the GPU's.

`CupyStandIn` runs everything of the CuPy backend but the device: the same operations on NumPy's
namespace, the same kernel source compiled for the CPU (or, without a C++ compiler, the written
bodies the kernels replace). It shows that the logic is right, not that it runs on a GPU.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, ClassVar

import cupy_host_kernels
import numpy as np

from ruda.backend.array_api import MutableArrayApiBackend
from ruda.backend.specification import specification_class
from ruda_backend_cupy.operations import CupyOperations
from ruda_backend_cupy.source import Kernel

HAS_COMPILER = cupy_host_kernels.compiler() is not None


class CupyStandIn(CupyOperations):
    """NumPy arrays under the CuPy backend's operations; never a GPU."""

    name = "cupy-stand-in"
    xp: ClassVar[Any] = np
    FloatTensor: type[Any] = np.ndarray
    IntTensor: type[Any] = np.ndarray
    BoolTensor: type[Any] = np.ndarray

    @property
    def version(self) -> str:
        kernels = "host-compiled kernels" if HAS_COMPILER else "written bodies: no C++ compiler"
        return f"NumPy {np.__version__} standing in for CuPy, {kernels}"

    def numerics(self) -> AbstractContextManager[object]:
        return np.errstate(all="ignore")

    def to_numpy(self, tensor: Any, /) -> Any:
        return np.array(tensor)

    def launch(self, kernel: Kernel, blocks: int, threads: int, /, *arguments: Any) -> None:
        cupy_host_kernels.launch(kernel, blocks, threads, *arguments)


class _WithoutKernels(CupyStandIn):
    add_rows = MutableArrayApiBackend.add_rows  # the one kernel that is no stage


if not HAS_COMPILER:
    CupyStandIn = specification_class(_WithoutKernels)  # type: ignore[misc]
