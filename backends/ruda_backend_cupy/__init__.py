"""The CuPy backend: float16, bfloat16, float32 and float64 on CUDA devices.

CuPy is imported when `CupyBackend` is first asked for, so that the kernels' source and the
operations over them can be read, compiled and tested where there is no CuPy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ruda_backend_cupy.backend import CupyBackend

__all__ = ["CupyBackend"]


def __getattr__(name: str) -> type[CupyBackend]:
    if name != "CupyBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ruda_backend_cupy.backend import CupyBackend

    return CupyBackend
