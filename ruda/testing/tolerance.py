"""The tolerance rule, from the element type alone.

Exact things (ids, counts, copies, masks, zeros) must be equal: `assert_exact`; repeats must have
the same bits: `assert_same_bits`. Everything else is `compare`: the error against the float64
reference is at most twice the error of the plain NumPy result in the same types, plus two units in
the last place of the reference. That holds for the largest absolute error (the unit is taken at the
reference's largest magnitude) and for the Frobenius norm of the error. A result must be non-finite
exactly where the plain one is, since overflow is legitimate in 16 bits; whether that is NaN, +inf
or -inf must agree where the plain result and the reference agree about it, and is free elsewhere,
since the order of an overflowing sum decides it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from ruda.base.dtypes import DType
from ruda.testing.layers import Array, numpy_dtype

# Stored mantissa bits, and the exponent of the smallest normal number.
_FORMATS = {
    DType.FLOAT16: (10, -14),
    DType.BFLOAT16: (7, -126),
    DType.FLOAT32: (23, -126),
    DType.FLOAT64: (52, -1022),
}


@dataclass(frozen=True)
class Comparison:
    """How far a result lies from the reference, and whether that is allowed."""

    name: str
    passed: bool
    reason: str = ""
    """Why it did not pass; empty if it did."""
    error: float = math.nan
    """Largest absolute error among the finite elements."""
    allowed: float = math.nan
    """What `error` may be."""
    relative_frobenius: float = math.nan
    """Frobenius norm of the error over that of the reference."""
    allowed_frobenius: float = math.nan
    """What `relative_frobenius` may be."""
    max_ulp: float = math.nan
    """Largest error in units in the last place at each reference element's own magnitude."""
    unit: float = math.nan
    """The unit in the last place at the reference's largest magnitude."""

    @property
    def error_ulp(self) -> float:
        """The largest error in such units."""
        return self.error / self.unit

    @property
    def allowed_ulp(self) -> float:
        """What `error_ulp` may be."""
        return self.allowed / self.unit

    def __str__(self) -> str:
        head = f"{self.name}: {'passed' if self.passed else 'FAILED, ' + self.reason}"
        if math.isnan(self.error):
            return head
        return (
            f"{head} (error {self.error:.3g}, allowed {self.allowed:.3g}; "
            f"Frobenius {self.relative_frobenius:.3g}, allowed {self.allowed_frobenius:.3g}; "
            f"worst element {self.max_ulp:.3g} ulp)"
        )


def ulp(x: Array | float, dtype: DType) -> Array:
    """The distance to the next number of this type at the magnitude of x, float64; NaN if none."""
    mantissa_bits, smallest_exponent = _FORMATS[dtype]
    values = np.asarray(x, np.float64)
    fraction, exponent = np.frexp(values)
    exponent = np.where(fraction == 0, smallest_exponent, exponent - 1)
    unit = np.ldexp(1.0, np.maximum(exponent, smallest_exponent) - mantissa_bits)
    return np.asarray(np.where(np.isfinite(values), unit, np.nan))


def compare(
    name: str,
    got: Array,
    exact: Array,
    plain: Array,
    dtype: DType,
    *,
    unit: DType | None = None,
    edge: Array | None = None,
) -> Comparison:
    """Judge a result of type `dtype` by the rule of this module.

    `unit` is the type whose last place counts, if it is not that of the result: a float32 weight
    gradient of a bfloat16 layer is made from values rounded to bfloat16. `edge` is true where
    equally good computations differ about overflow: a result may be finite there or not.
    """
    if got.shape != exact.shape or plain.shape != exact.shape:
        shapes = f"expected shape {exact.shape}, got {got.shape}, plain {plain.shape}"
        return Comparison(name, passed=False, reason=shapes)
    if got.dtype != numpy_dtype(dtype):
        return Comparison(name, passed=False, reason=f"expected {dtype}, got {got.dtype}")
    with np.errstate(all="ignore"):
        wide = [array.astype(np.float64) for array in (got, exact, plain)]
        settled = np.ones(got.shape, bool) if edge is None else ~edge
        reason = _misplaced_non_finite(wide[0], wide[1], wide[2], settled)
        finite = np.isfinite(wide[0]) & np.isfinite(wide[1]) & np.isfinite(wide[2])
        got, exact, plain = (array[finite] for array in wide)
        judged = _judge_finite(name, got, exact, plain, unit or dtype)
        return replace(judged, passed=False, reason=reason) if reason else judged


def assert_exact(name: str, got: Array, expected: Array) -> None:
    """Equal shape, kind and values, NaN equal to NaN; integers may differ in width."""
    if got.shape != expected.shape:
        raise AssertionError(f"{name}: expected shape {expected.shape}, got {got.shape}")
    both_integer = np.issubdtype(got.dtype, np.integer) and np.issubdtype(
        expected.dtype, np.integer
    )
    if got.dtype != expected.dtype and not both_integer:
        raise AssertionError(f"{name}: expected {expected.dtype}, got {got.dtype}")
    both_nan = _is_nan(got) & _is_nan(expected)
    _assert_none(name, (got != expected) & ~both_nan, got, expected)


def assert_same_bits(name: str, got: Array, expected: Array) -> None:
    """Equal shape, type and bits: the sign of a zero and the payload of a NaN count."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        raise AssertionError(
            f"{name}: expected {expected.dtype} {expected.shape}, got {got.dtype} {got.shape}"
        )
    bits = np.dtype(f"u{got.dtype.itemsize}")
    differ = np.ascontiguousarray(got).view(bits) != np.ascontiguousarray(expected).view(bits)
    _assert_none(name, differ.reshape(got.shape), got, expected)


def _is_nan(x: Array) -> Array:
    return np.isnan(x.astype(np.float64))


def _assert_none(name: str, differ: Array, got: Array, expected: Array) -> None:
    if not differ.any():
        return
    index = tuple(int(i) for i in np.argwhere(differ)[0])
    raise AssertionError(
        f"{name}{list(index)}: expected {expected[index]}, got {got[index]} "
        f"({int(differ.sum())} of {differ.size} elements differ)"
    )


def _judge_finite(name: str, got: Array, exact: Array, plain: Array, unit: DType) -> Comparison:
    if not got.size:
        return Comparison(
            name,
            passed=True,
            error=0.0,
            allowed=0.0,
            relative_frobenius=0.0,
            allowed_frobenius=0.0,
            max_ulp=0.0,
            unit=float(ulp(0.0, unit)),
        )
    error = np.abs(got - exact)
    plain_error = np.abs(plain - exact)
    largest = float(error.max())
    last_place = float(ulp(np.abs(exact).max(), unit))
    allowed = 2 * float(plain_error.max()) + 2 * last_place
    norm = _norm(exact)
    # Below the normal numbers a unit no longer shrinks with the value.
    floor = float(ulp(0.0, unit)) * math.sqrt(exact.size)
    epsilon = float(ulp(1.0, unit))
    frobenius = _norm(error)
    allowed_frobenius = 2 * _norm(plain_error) + 2 * max(epsilon * norm, floor)
    reason = ""
    if not largest <= allowed:
        reason = "the largest error is over the allowed one"
    elif not frobenius <= allowed_frobenius:
        reason = "the norm of the error is over the allowed one"
    return Comparison(
        name,
        passed=not reason,
        reason=reason,
        error=largest,
        allowed=allowed,
        relative_frobenius=_ratio(frobenius, norm),
        allowed_frobenius=_ratio(allowed_frobenius, norm),
        max_ulp=float((error / ulp(exact, unit)).max()),
        unit=last_place,
    )


def _misplaced_non_finite(got: Array, exact: Array, plain: Array, settled: Array) -> str:
    kind, exact_kind, plain_kind = _kind(got), _kind(exact), _kind(plain)
    wrong_place = (kind == 0) != (plain_kind == 0)
    wrong_kind = (kind != plain_kind) & (plain_kind == exact_kind)
    no_reference = (plain_kind == 0) & (exact_kind != 0)
    for found, reason in (
        (wrong_place, "finite and non-finite elements differ from the plain result"),
        (wrong_kind, "another non-finite value than the reference"),
        (no_reference, "the reference is not finite where the plain result is"),
    ):
        found = found & settled
        if found.any():
            index = tuple(int(i) for i in np.argwhere(found)[0])
            return (
                f"{reason}: at {list(index)} got {got[index]}, plain {plain[index]}, "
                f"reference {exact[index]} ({int(found.sum())} of {found.size} elements)"
            )
    return ""


def _kind(x: Array) -> Array:
    """0 for a finite number, 1 for NaN, 2 for +inf, 3 for -inf."""
    return np.select([np.isnan(x), np.isposinf(x), np.isneginf(x)], [1, 2, 3], 0)


def _norm(x: Array) -> float:
    """The Frobenius norm, without overflow or underflow of the squares."""
    largest = float(np.abs(x).max())
    return largest * float(np.linalg.norm(x / largest)) if largest > 0 else 0.0


def _ratio(a: float, b: float) -> float:
    if b > 0:
        return a / b
    return math.inf if a > 0 else 0.0
