"""Required operations: sums, orders, functions, products, and the operators of tensors."""

from __future__ import annotations

import operator
import warnings
from typing import Any

import numpy as np
import pytest

from ruda.backend.registry import AnyBackend
from ruda.base.dtypes import DType
from ruda.base.strategies import ExpertStrategy, Request
from ruda.testing.kit.plugin import Checker
from ruda.testing.kit.required.calls import calls, gives, shown
from ruda.testing.kit.required.test_required_data import index_dtype, numbers
from ruda.testing.layers import Array, numpy_dtype
from ruda.testing.tolerance import assert_exact, assert_same_bits

SECTION = "required operations"

COMPUTE = (DType.FLOAT32, DType.FLOAT64)


@pytest.mark.parametrize("dtype", COMPUTE)
def test_add_rows(checker: Checker, dtype: DType) -> None:
    checker.needs(dtype)
    kind = numpy_dtype(dtype)
    for length, rows in ((2, [0, 0, 1]), (3, []), (3, [2]), (1, [0] * 9), (4, [3, 0, 3, 0, 3])):
        for trailing in ((), (2,)):
            values = np.arange(1, 1 + len(rows) * (2 if trailing else 1), dtype=kind)
            values = values.reshape(len(rows), *trailing)
            target = np.full((length, *trailing), 0.5, kind)
            expected = target.copy()
            np.add.at(expected, np.array(rows, np.int64), values)
            ids = np.array(rows, np.int64)
            gives(checker.backend, expected, "add_rows", target, ids, values)


def test_add_rows_repeats_to_the_bit(checker: Checker) -> None:
    rows = np.random.default_rng(0).integers(0, 5, 400)
    arguments = (np.zeros(5, np.float32), rows, numbers(400))
    first, second = (
        np.asarray(checker.backend.to_numpy(calls(checker.backend, "add_rows", *arguments)))
        for _ in range(2)
    )
    assert_same_bits("add_rows, a second time", second, first)


def test_where(checker: Checker) -> None:
    mask = np.array([[True, False, True], [False, False, True]])
    for dtype in (np.float32, np.int64):
        a, b = np.arange(6, dtype=dtype).reshape(2, 3), np.full((2, 3), 9, dtype)
        gives(checker.backend, np.where(mask, a, b), "where", mask, a, b)
        gives(checker.backend, np.where(mask, a, np.asarray(7, dtype)), "where", mask, a, 7)
        gives(checker.backend, np.where(mask, np.asarray(7, dtype), b), "where", mask, 7, b)
    x, column = numbers(2, 3), np.array([[True], [False]])
    for number in (0.0, np.nan, np.inf, -np.inf):
        number32 = np.float32(number)
        gives(checker.backend, np.where(column, number32, x), "where", column, number, x)
        gives(checker.backend, np.where(column, x, number32), "where", column, x, number)
    gives(checker.backend, np.where(column, x, x[:1]), "where", column, x, x[:1])


@pytest.mark.parametrize("dtype", COMPUTE)
def test_where_keeps_the_type(checker: Checker, dtype: DType) -> None:
    checker.needs(dtype)
    x = numbers(2, dtype=dtype)
    gives(checker.backend, np.array([0.1, x[1]], x.dtype), "where", np.array([True, False]), 0.1, x)


def _stable(keys: Array) -> Array:
    return np.argsort(keys, axis=-1, kind="stable")


def test_stable_argsort_of_floats(checker: Checker) -> None:
    for keys in (
        [],
        [1.0],
        [2.0, 1.0],
        [1.0, 1.0, 0.0, 1.0],
        [0.0, -0.0, 0.0, -0.0, -1.0],
        [np.inf, -np.inf, 0.0, -np.inf, np.inf],
    ):
        array = np.array(keys, np.float32)
        gives(checker.backend, _stable(array), "stable_argsort", array)
    rng = np.random.default_rng(0)
    for shape in ((0, 4), (3, 1), (2, 17), (4, 300), (2, 1025)):
        array = rng.integers(-3, 3, shape).astype(np.float32)
        gives(checker.backend, _stable(array), "stable_argsort", array)


def test_stable_argsort_of_integers(checker: Checker) -> None:
    rng = np.random.default_rng(0)
    for size in (0, 1, 2, 17, 300, 5000):
        array = rng.integers(0, 300, size)
        gives(checker.backend, _stable(array), "stable_argsort", array)
    for shape in ((0, 2), (3, 4), (5, 40)):
        array = rng.integers(0, 3, shape)
        gives(checker.backend, _stable(array), "stable_argsort", array)


def test_stable_argsort_of_a_view(checker: Checker) -> None:
    wide = np.array([1, 9, 0, 9, 2, 9, 3, 9])
    tensor = checker.backend.from_numpy(wide)[::2]
    got = np.asarray(checker.backend.to_numpy(checker.backend.stable_argsort(tensor)))
    assert_exact("stable_argsort(np.array([1, 9, 0, 9, 2, 9, 3, 9])[::2])", got, _stable(wide[::2]))


def test_counts(checker: Checker) -> None:
    backend = checker.backend
    for ids, length in (([], 1), ([], 4), ([0], 1), ([0, 1], 4), ([3, 3, 3], 4), ([256, 0], 257)):
        array = np.array(ids, np.int64)
        gives(backend, np.bincount(array, minlength=length), "counts", array, length)
    many = np.full(70_000, 1)
    gives(backend, np.array([0, 70_000, 0]), "counts", many, 3)
    counted = calls(backend, "counts", np.array([0]), 2)
    assert backend.dtype_name(counted) == index_dtype(checker)


def test_cumulative_sum(checker: Checker) -> None:
    for values in ([0], [1, 2, 3], [2**24, 1, 1], [0, 0, 5]):
        array = np.array(values, np.int64)
        gives(checker.backend, np.cumsum(array), "cumulative_sum", array)
    if index_dtype(checker) == "int64":
        large = np.array([2**31, 1, 2**31], np.int64)
        gives(checker.backend, np.cumsum(large), "cumulative_sum", large)


@pytest.mark.parametrize("operation", ["sum", "max"])
@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("dtype", COMPUTE)
def test_reductions(checker: Checker, operation: str, keepdims: bool, dtype: DType) -> None:
    checker.needs(dtype)
    reduce: Any = np.sum if operation == "sum" else np.max
    for shape in ((1, 1), (3, 4), (2, 1)):
        array = np.rint(4 * numbers(*shape)).astype(numpy_dtype(dtype))
        for axis in (-1, 0, 1):
            expected = reduce(array, axis=axis, keepdims=keepdims)
            gives(checker.backend, expected, operation, array, axis=axis, keepdims=keepdims)
        gives(checker.backend, reduce(array, axis=-1), operation, array, axis=-1)
    infinite = np.array([[np.inf, 1], [-np.inf, -np.inf]], numpy_dtype(dtype))
    expected = reduce(infinite, axis=-1, keepdims=keepdims)
    gives(checker.backend, expected, operation, infinite, axis=-1, keepdims=keepdims)


def test_sum_of_nothing_and_of_integers(checker: Checker) -> None:
    gives(checker.backend, np.zeros(3, np.float32), "sum", np.zeros((3, 0), np.float32), axis=-1)
    integers = np.array([[2**24, 1], [0, 0]], np.int64)
    gives(checker.backend, integers.sum(axis=1), "sum", integers, axis=1)


@pytest.mark.parametrize("name", ["exp", "log1p", "sqrt"])
@pytest.mark.parametrize("dtype", COMPUTE)
def test_functions(checker: Checker, name: str, dtype: DType) -> None:
    checker.needs(dtype)
    kind, function = numpy_dtype(dtype), getattr(np, name)
    # log1p and sqrt are asked for what is not negative, exp for what does not overflow.
    values = np.concatenate([np.linspace(0, 1, 41), [1e-10, 1e-5, 3.0, 20.0, 80.0]])
    array = (-values if name == "exp" else values).astype(kind)
    exact = function(array.astype(np.longdouble)).astype(np.float64)
    for i in range(len(array)):
        one = slice(i, i + 1)
        got = np.asarray(checker.backend.to_numpy(calls(checker.backend, name, array[one])))
        label = shown(name, (array[one],), {})
        checker.compare(label, got, exact[one], function(array[one]), dtype)
    special = {"exp": [-np.inf, np.inf, np.nan, 0.0], "log1p": [0.0, np.inf, np.nan]}
    ends = np.array(special.get(name, [0.0, 1.0, 4.0, np.inf, np.nan]), kind)
    gives(checker.backend, function(ends), name, ends)


@pytest.mark.parametrize("dtype", COMPUTE)
def test_matmul(checker: Checker, dtype: DType) -> None:
    checker.needs(dtype)
    for m, k, n in (
        (1, 1, 1),
        (2, 3, 4),
        (0, 3, 2),
        (3, 0, 2),
        (2, 3, 0),
        (17, 33, 9),
        (8, 400, 8),
    ):
        a, b = numbers(m, k, dtype=dtype), numbers(k, n, dtype=dtype, seed=1)
        exact = (a.astype(np.longdouble) @ b.astype(np.longdouble)).astype(np.float64)
        got = np.asarray(checker.backend.to_numpy(calls(checker.backend, "matmul", a, b)))
        # One element after the other, as a kernel may.
        one_by_one = np.cumsum(a[:, :, None] * b[None], axis=1, dtype=a.dtype)
        plain = one_by_one[:, -1] if k else a @ b
        farther = np.where(np.abs(a @ b - exact) > np.abs(plain - exact), a @ b, plain)
        checker.compare(f"matmul [{m}, {k}] [{k}, {n}]", got, exact, farther, dtype)


def test_matmul_of_views(checker: Checker) -> None:
    backend = checker.backend
    a, b = np.rint(numbers(4, 3) * 4), np.rint(numbers(4, 5) * 4)
    left = backend.transpose(backend.from_numpy(a))
    wide = backend.from_numpy(np.repeat(b, 2, axis=1))[:, ::2]
    got = np.asarray(backend.to_numpy(backend.matmul(left, wide)))
    assert_exact("matmul(transpose(a), b[:, ::2])", got, a.T @ b)


def test_matmul_keeps_rows_apart(checker: Checker) -> None:
    a, b = np.ones((3, 2), np.float32), np.ones((2, 2), np.float32)
    a[1, 0] = np.nan
    gives(checker.backend, np.array([[2, 2], [np.nan, np.nan], [2, 2]], np.float32), "matmul", a, b)


OPERATORS = (
    "x + y",
    "x - y",
    "x * y",
    "x / y",
    "-x",
    "x + 1.0",
    "x * 2.5",
    "x[:, 1]",
    "x[:, 1:2]",
    "x[:, :2]",
    "x[1:2, :]",
    "x * y[:, 0:1]",
    "x[:1, :] * y",
)


@pytest.mark.parametrize("expression", OPERATORS)
@pytest.mark.parametrize("dtype", COMPUTE)
def test_operators_of_floats(checker: Checker, expression: str, dtype: DType) -> None:
    checker.needs(dtype)
    operands = {name: numbers(2, 3, dtype=dtype, seed=i) for i, name in enumerate("xy")}
    _evaluates(checker.backend, expression, operands)


INTEGER_OPERATORS = ("i + j", "i * 3", "i // 2", "(i * 5)[:, None]", "i[:, None][:, :, None] + j")


@pytest.mark.parametrize("expression", INTEGER_OPERATORS)
def test_operators_of_integers(checker: Checker, expression: str) -> None:
    operands = {"i": np.array([0, 7, 299]), "j": np.array([3, 2, 1])}
    _evaluates(checker.backend, expression, operands)


def _evaluates(backend: AnyBackend, expression: str, operands: dict[str, Array]) -> None:
    """The expression means on tensors what it means on NumPy arrays."""
    tensors = {name: backend.from_numpy(array) for name, array in operands.items()}
    with backend.numerics():
        got = eval(expression, {}, tensors)
    assert_exact(expression, np.asarray(backend.to_numpy(got)), eval(expression, {}, operands))


@pytest.mark.parametrize("symbol", ["gt", "ge", "lt", "le", "eq", "ne"])
def test_comparisons(checker: Checker, symbol: str) -> None:
    backend, compare = checker.backend, getattr(operator, symbol)
    x = np.array([-np.inf, -1, -0.0, 0.0, 2, np.inf, np.nan], np.float32)
    with backend.numerics():
        tensor = backend.from_numpy(x)
        mask, itself = compare(tensor, 0.0), compare(tensor, tensor)
        both = np.asarray(backend.to_numpy(backend.where(mask & itself, 1.0, tensor * 0 + 2.0)))
        either = np.asarray(backend.to_numpy(backend.where(mask | itself, 1.0, tensor * 0 + 2.0)))
    with np.errstate(all="ignore"):
        other = x * 0 + 2
        assert_exact(
            f"{symbol}, &", both, np.where(compare(x, 0) & compare(x, x), np.float32(1), other)
        )
        assert_exact(
            f"{symbol}, |", either, np.where(compare(x, 0) | compare(x, x), np.float32(1), other)
        )


def test_whole_passes_are_quiet(checker: Checker) -> None:
    backend = checker.backend
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with backend.numerics(), backend.numerics():
            backend.exp(backend.from_numpy(np.array([1e4, np.nan, -np.inf], np.float32)))
        backend.synchronize()


def test_what_it_declares(checker: Checker) -> None:
    backend = checker.backend
    assert backend.device in backend.devices()
    assert backend.dtypes <= frozenset(DType)
    assert DType.FLOAT32 in backend.dtypes, "every backend computes in float32"
    assert backend.unsupported(Request(device=backend.device)) is None
    assert backend.unsupported(Request(strategy=ExpertStrategy.AUTO)) is None
    for dtype in backend.dtypes:
        assert backend.unsupported(Request(dtype=dtype)) is None
    assert not backend.owns(object())
    assert not backend.owns(3.0)
