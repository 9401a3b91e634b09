"""A cast rounds to nearest even, once, from every type to every type."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

import ruda
from ruda.backend.registry import AnyBackend
from ruda.testing.layers import numpy_dtype
from ruda.testing.tolerance import assert_same_bits

SIXTEEN = (ruda.DType.FLOAT16, ruda.DType.BFLOAT16)


def nearest_even(value: float, dtype: ruda.DType) -> float:
    """By exact arithmetic on the neighbours: no cast of the value itself."""
    kind = numpy_dtype(dtype)
    with np.errstate(invalid="ignore"):
        every = np.arange(1 << 15, dtype=np.uint16).view(kind).astype(np.float64)
    finite = every[np.isfinite(every)]
    exact, magnitude = Fraction(abs(value)), abs(value)
    above = int(np.searchsorted(finite, magnitude))
    step = Fraction(finite[-1]) - Fraction(finite[-2])
    if above == len(finite):
        limit = Fraction(finite[-1]) + step / 2
        rounded = float(finite[-1]) if exact < limit else np.inf
    else:
        low, high = Fraction(finite[max(above - 1, 0)]), Fraction(finite[above])
        middle = (low + high) / 2
        even = finite[above] if above % 2 == 0 else finite[max(above - 1, 0)]
        rounded = float(high if exact > middle else low if exact < middle else Fraction(even))
    return float(np.copysign(rounded, value))


@pytest.mark.parametrize("dtype", SIXTEEN)
def test_float64_to_sixteen_bits(backend: AnyBackend, dtype: ruda.DType) -> None:
    if dtype not in backend.dtypes:
        pytest.skip(f"{backend.name} has no {dtype}")
    rng = np.random.default_rng(16)
    ties = 1 + rng.integers(0, 64, 40) / 64 + 2.0 ** -(11 if dtype is SIXTEEN[0] else 8)
    values = np.concatenate(
        [
            ties,
            ties * (1 + 2.0**-40),
            ties * (1 - 2.0**-40),
            rng.standard_normal(40) * 10.0 ** rng.integers(-45, 39, 40),
            [0.0, 65519.999, 65520.0, 3.3e38, 3.4e38, 1e300, 1e-300, 2.0**-25, 2.0**-134],
        ]
    )
    values = np.concatenate([values, -values])
    expected = np.array([nearest_even(float(value), dtype) for value in values])
    with backend.numerics():
        got = backend.to_numpy(backend.cast(backend.from_numpy(values), dtype))
    with np.errstate(over="ignore"):
        assert_same_bits("cast", got, expected.astype(np.float32).astype(numpy_dtype(dtype)))


def test_special_values(backend: AnyBackend) -> None:
    values = np.array([np.nan, np.inf, -np.inf, -0.0])
    for dtype in sorted(backend.dtypes):
        with backend.numerics():
            got = backend.to_numpy(backend.cast(backend.from_numpy(values), dtype))
        got = got.astype(np.float64)
        assert np.isnan(got[0])
        assert got[1:].tolist() == [np.inf, -np.inf, 0.0]
        assert np.signbit(got[3])
