"""The tolerance rule: what it lets through, and that it stops wrong results."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest

from ruda.base.dtypes import DType
from ruda.stages.options import MoeOptions, RouterScoring, RouterWeightOptions, SoftmaxSelection
from ruda.testing.layers import Array, numpy_dtype, random_layer
from ruda.testing.reference import Arithmetic, reference_layer
from ruda.testing.tolerance import Comparison, assert_exact, assert_same_bits, compare, ulp

DTYPES = list(DType)
NAN, INF = math.nan, math.inf


@pytest.fixture(autouse=True)
def _no_warning_leaks() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def judged(got: list[float], exact: list[float], plain: list[float]) -> Comparison:
    single = np.array(got, np.float32)
    return compare("x", single, np.array(exact), np.array(plain, np.float32), DType.FLOAT32)


@pytest.mark.parametrize(
    ("dtype", "at_one", "smallest", "largest"),
    [
        (DType.FLOAT16, 2.0**-10, 2.0**-24, 65504.0),
        (DType.BFLOAT16, 2.0**-7, 2.0**-133, 3.3895313892515355e38),
        (DType.FLOAT32, 2.0**-23, 2.0**-149, float(np.finfo(np.float32).max)),
        (DType.FLOAT64, 2.0**-52, 2.0**-1074, float(np.finfo(np.float64).max)),
    ],
)
def test_ulp(dtype: DType, at_one: float, smallest: float, largest: float) -> None:
    got = ulp(np.array([1.0, -1.5, 2.0, 1.0 - at_one, 0.0, smallest, 3 * smallest]), dtype)
    assert got.tolist() == [at_one, at_one, 2 * at_one, at_one / 2, smallest, smallest, smallest]
    np_largest = np.array(largest).astype(numpy_dtype(dtype))
    assert float(np_largest) == largest
    below = np_largest.view(f"u{dtype.itemsize}") - np.array(1, f"u{dtype.itemsize}")
    step = largest - float(np.asarray(below).view(numpy_dtype(dtype)))
    assert float(ulp(largest, dtype)) == step
    assert np.isnan(ulp(np.array([NAN, INF]), dtype)).all()


def test_twice_the_plain_error_plus_two_ulp() -> None:
    unit, exact = 2.0**-23, [1.0, 0.5, 0.25]
    assert judged([1.0, 0.5 + 2 * unit, 0.25], exact, exact).passed
    over = judged([1.0, 0.5 + 3 * unit, 0.25], exact, exact)
    assert not over.passed
    assert "largest error" in over.reason
    assert over.max_ulp == 6
    assert (over.error, over.allowed) == (3 * unit, 2 * unit)
    plain = [1.0, 0.5, 0.25 + 2 * unit]
    assert judged([1.0, 0.5 + 6 * unit, 0.25], exact, plain).passed
    assert not judged([1.0, 0.5 + 7 * unit, 0.25], exact, plain).passed


def test_many_small_errors_fail_by_their_norm() -> None:
    exact = np.full(1000, 1e-3)
    exact[0] = 1.0
    got = (exact + 2.0**-23).astype(np.float32)
    result = compare("x", got, exact, exact.astype(np.float32), DType.FLOAT32)
    assert not result.passed
    assert "norm" in result.reason
    assert result.error < result.allowed
    assert result.relative_frobenius > result.allowed_frobenius


def test_unit_is_that_of_another_type_on_request() -> None:
    exact, got = np.array([1.0]), np.array([1.01], np.float32)
    assert not compare("x", got, exact, exact, DType.FLOAT32).passed
    assert compare("x", got, exact, exact, DType.FLOAT32, unit=DType.BFLOAT16).passed


@pytest.mark.parametrize(
    ("got", "exact", "plain", "passed"),
    [
        pytest.param([NAN, 1], [NAN, 1], [NAN, 1], True, id="nan where it belongs"),
        pytest.param([INF, 1], [NAN, 1], [NAN, 1], False, id="inf for nan"),
        pytest.param([-INF, 1], [INF, 1], [INF, 1], False, id="the other inf"),
        pytest.param([INF, 1], [1e40, 1], [INF, 1], True, id="overflow"),
        pytest.param([1e38, 1], [1e40, 1], [INF, 1], False, id="no overflow"),
        pytest.param([INF, 1], [0, 1], [NAN, 1], True, id="case_072"),
        pytest.param([NAN, 1], [1, 1], [1, 1], False, id="nan where it does not belong"),
        pytest.param([1, 1], [1, 1], [NAN, 1], False, id="plain is nan"),
        pytest.param([1, 1], [NAN, 1], [1, 1], False, id="no reference"),
        pytest.param([NAN, 2], [NAN, 1], [NAN, 1], False, id="wrong beside a nan"),
        pytest.param([NAN], [NAN], [NAN], True, id="nothing finite"),
    ],
)
def test_non_finite(got: list[float], exact: list[float], plain: list[float], passed: bool) -> None:
    result = judged(got, exact, plain)
    assert result.passed == passed
    assert bool(result.reason) != passed
    assert ("FAILED" in str(result)) != passed


def test_shape_and_type_are_failures_not_exceptions() -> None:
    exact = np.ones((2, 3))
    shape = compare("x", np.ones((3, 2)), exact, exact, DType.FLOAT64)
    assert (shape.passed, "(2, 3)" in shape.reason) == (False, True)
    dtype = compare("x", np.ones((2, 3), np.float32), exact, exact, DType.FLOAT64)
    assert (dtype.passed, "float64" in dtype.reason) == (False, True)
    assert not compare("x", exact, exact, np.ones(3), DType.FLOAT64).passed


def test_zeros_empties_subnormals_and_huge_values() -> None:
    assert judged([0, 0], [0, 0], [0, 0]).passed
    assert not judged([0, 1e-40], [0, 0], [0, 0]).passed
    assert judged([], [], []).passed
    tiny = 2.0**-149
    assert judged([3 * tiny] * 9, [tiny] * 9, [tiny] * 9).passed
    assert not judged([4 * tiny] * 9, [tiny] * 9, [tiny] * 9).passed
    huge = np.array([1e300, -1e300])
    assert compare("x", huge, huge, huge, DType.FLOAT64).passed
    assert not compare("x", -huge, huge, huge, DType.FLOAT64).passed


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wrong_layer_fails(dtype: DType) -> None:
    layer = random_layer(
        tokens=6, hidden=8, intermediate=8, experts=4, dtype=dtype, seed=0,
        options=MoeOptions(
            selection=SoftmaxSelection(2),
            weights=RouterWeightOptions(RouterScoring.SOFTMAX, renormalize=True),
        ),
    )  # fmt: skip
    plain = reference_layer(layer, Arithmetic.same_type(layer))
    exact = reference_layer(layer, Arithmetic.exact())

    for name in ("input", "logits", "gate", "up", "down"):
        correct: Array = vars(plain.grads)[name]
        reference: Array = vars(exact.grads)[name]
        expected_type = dtype.compute if name in {"gate", "up", "down"} else dtype
        assert compare(name, correct, reference, correct, expected_type).passed
        for wrong in (-correct, np.zeros_like(correct), np.roll(correct, 1, axis=0), 2 * correct):
            got = wrong.astype(correct.dtype)
            assert not compare(name, got, reference, correct, expected_type).passed, name


def test_assert_exact() -> None:
    assert_exact("ids", np.array([[1, 2]], np.int32), np.array([[1, 2]], np.int64))
    bf16 = numpy_dtype(DType.BFLOAT16)
    assert_exact("x", np.array([NAN, 0.0], bf16), np.array([NAN, -0.0], bf16))
    with pytest.raises(AssertionError, match=r"ids\[0, 1\]: expected 3, got 2 \(1 of 2"):
        assert_exact("ids", np.array([[1, 2]]), np.array([[1, 3]]))
    with pytest.raises(AssertionError, match=r"x\[0\]: expected 1.0, got nan"):
        assert_exact("x", np.array([NAN]), np.array([1.0]))
    with pytest.raises(AssertionError, match="expected shape"):
        assert_exact("x", np.zeros(2), np.zeros((2, 1)))
    with pytest.raises(AssertionError, match="expected float64, got int64"):
        assert_exact("x", np.zeros(2, np.int64), np.zeros(2))
    with pytest.raises(AssertionError):
        assert_exact("x", np.array([2**64 - 1], np.uint64), np.array([-1]))


def test_assert_same_bits() -> None:
    x = np.array([[NAN, 1.0], [0.0, 2.0]])
    assert_same_bits("x", x.T, np.ascontiguousarray(x.T))
    with pytest.raises(AssertionError, match=r"x\[1\]"):
        assert_same_bits("x", np.array([1.0, 0.0]), np.array([1.0, -0.0]))
    with pytest.raises(AssertionError, match="float32"):
        assert_same_bits("x", np.zeros(1, np.float32), np.zeros(1))
