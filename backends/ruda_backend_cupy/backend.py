"""CuPy as a `Backend`: the operations of `CupyOperations` on one CUDA device.

Kernels are compiled by NVRTC the first time each combination of element types is used. A backend
object holds a device's name and nothing of the device: a machine without a GPU can make one.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import Any, ClassVar

import cupy
import numpy as np

from ruda_backend_cupy.operations import CupyOperations
from ruda_backend_cupy.source import OPTIONS, Kernel

_DLPACK_CUDA = 2


@cache
def _compiled(kernel: Kernel) -> Any:
    """CuPy loads the module on each device it is launched on."""
    return cupy.RawModule(code=kernel.code, options=OPTIONS).get_function(kernel.name)


class CupyBackend(CupyOperations):
    """CuPy arrays on one CUDA device; work goes to CuPy's current stream of that device."""

    xp: ClassVar[Any] = cupy
    FloatTensor: type[Any] = cupy.ndarray
    IntTensor: type[Any] = cupy.ndarray
    BoolTensor: type[Any] = cupy.ndarray

    def __init__(self, device: str | None = None) -> None:
        self.device = "cuda:0" if device is None or device == "cuda" else device

    @property
    def version(self) -> str:
        """CuPy's version."""
        version: str = cupy.__version__
        return version

    def devices(self) -> list[str]:
        """Every CUDA device; CuPy's own error where there is no driver."""
        return [f"cuda:{ordinal}" for ordinal in range(cupy.cuda.runtime.getDeviceCount())]

    def device_of(self, tensor: Any, /) -> str:
        return f"cuda:{tensor.device.id}"

    def on_device(self) -> AbstractContextManager[object]:
        """CuPy's current device, for as long as this is entered."""
        device: AbstractContextManager[object] = cupy.cuda.Device(self._ordinal)
        return device

    def numerics(self) -> AbstractContextManager[object]:
        """The backend's device is CuPy's current one; CuPy warns of no NaN or inf."""
        return self.on_device()

    def synchronize(self) -> None:
        """Wait for everything on the device."""
        cupy.cuda.Device(self._ordinal).synchronize()

    def to_numpy(self, tensor: Any, /) -> Any:
        with self.on_device():
            return cupy.asnumpy(tensor)

    def from_dlpack(self, tensor: Any, /) -> Any:
        """Shares memory with a tensor on the same device; bfloat16 travels by the host."""
        place = tensor.__dlpack_device__() if hasattr(tensor, "__dlpack_device__") else None
        if place is None or tuple(map(int, place)) != (_DLPACK_CUDA, self._ordinal):
            return None
        if "bfloat16" in str(getattr(tensor, "dtype", "")):
            return None
        with self.on_device():
            return cupy.from_dlpack(tensor)

    def launch(self, kernel: Kernel, blocks: int, threads: int, /, *arguments: Any) -> None:
        packed = tuple(np.int64(one) if isinstance(one, int) else one for one in arguments)
        _compiled(kernel)((blocks,), (threads,), packed)

    @property
    def _ordinal(self) -> int:
        return int(self.device.partition(":")[2])
