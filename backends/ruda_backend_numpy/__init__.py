"""The NumPy backend: float16, bfloat16 (through ml_dtypes), float32 and float64 on the CPU."""

from ruda_backend_numpy.backend import NumpyBackend

__all__ = ["NumpyBackend"]
