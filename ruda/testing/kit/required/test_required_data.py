"""Required operations: metadata, moving data, types and layout."""

from __future__ import annotations

import numpy as np
import pytest

from ruda.base.dtypes import INTEGER_NAMES, DType
from ruda.testing.kit.plugin import Checker
from ruda.testing.kit.required.calls import calls, gives, nearest_even, shown
from ruda.testing.layers import Array, numpy_dtype
from ruda.testing.tolerance import assert_exact, assert_same_bits

SECTION = "required operations"

SHAPES = ((0,), (1,), (5,), (0, 3), (2, 3), (2, 3, 4))


def numbers(*shape: int, dtype: DType = DType.FLOAT32, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(numpy_dtype(dtype))


def index_dtype(checker: Checker) -> str:
    return checker.backend.dtype_name(checker.backend.arange(1))


@pytest.mark.parametrize("dtype", list(DType))
def test_float_tensors_go_in_and_out(checker: Checker, dtype: DType) -> None:
    checker.needs(dtype)
    backend = checker.backend
    for shape in SHAPES:
        array = numbers(*shape, dtype=dtype)
        tensor = backend.from_numpy(array)
        assert backend.owns(tensor)
        assert backend.shape(tensor) == shape
        assert all(type(extent) is int for extent in backend.shape(tensor))
        assert backend.dtype_name(tensor) == dtype.value
        assert backend.dtype(tensor) is dtype
        assert backend.device_of(tensor) == backend.device
        assert_same_bits("to_numpy(from_numpy(x))", np.asarray(backend.to_numpy(tensor)), array)


def test_special_values_go_in_and_out(checker: Checker) -> None:
    array = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0], np.float32)
    tensor = checker.backend.from_numpy(array)
    assert_same_bits("to_numpy(from_numpy(x))", np.asarray(checker.backend.to_numpy(tensor)), array)


@pytest.mark.parametrize("dtype", sorted(INTEGER_NAMES))
def test_integer_tensors_go_in_and_out(checker: Checker, dtype: str) -> None:
    backend = checker.backend
    array = np.array([[0, 1, 2], [3, 100, 127]], dtype)
    tensor = backend.from_numpy(array)
    name = backend.dtype_name(tensor)
    narrowed = name == dtype.replace("64", "32") and index_dtype(checker) == "int32"
    assert name == dtype or narrowed, f"from_numpy of {dtype}: got {name}"
    assert_exact("to_numpy(from_numpy(ids))", np.asarray(backend.to_numpy(tensor)), array)


def test_from_numpy_copies(checker: Checker) -> None:
    array = numbers(64)
    tensor, before = checker.backend.from_numpy(array), array.copy()
    array[...] = 7.0
    assert_same_bits(
        "from_numpy(x), after x was changed", np.asarray(checker.backend.to_numpy(tensor)), before
    )


def test_from_numpy_takes_any_layout(checker: Checker) -> None:
    for array in (numbers(6, 4)[::2], numbers(4, 6).T, numbers(6)[::-1]):
        tensor = checker.backend.from_numpy(array)
        assert_exact("from_numpy(view)", np.asarray(checker.backend.to_numpy(tensor)), array)


@pytest.mark.parametrize("dtype", list(DType))
def test_full(checker: Checker, dtype: DType) -> None:
    checker.needs(dtype)
    for shape in SHAPES:
        for value in (0.0, -1.5, np.inf, np.nan):
            gives(
                checker.backend,
                np.full(shape, value, numpy_dtype(dtype)),
                "full",
                shape,
                value,
                dtype,
            )


# Halfway between two neighbours, a hair to either side of halfway, the edges of each format.
_ROUNDING = (
    [1.0, -1.5, 0.0, 3.14159, 65504.0, 1e5, 3.3e38, 2.0**-14]
    + [(1 + (2 * i + 1) * 2.0**-11) * s for i in range(3) for s in (1, -1)]
    + [(1 + (2 * i + 1) * 2.0**-8) * s for i in range(3) for s in (1, -1)]
    + [(1 + (2 * i + 1) * 2.0**-24) for i in range(3)]
    + [
        (1 + (2 * i + 1) * 2.0**-n) * (1 + s * 2.0**-40)
        for n in (8, 11)
        for i in range(2)
        for s in (1, -1)
    ]
    + [65519.0, 65520.0, 65519.99, 3.4e38, 1.7e38]
    + [float("nan"), float("inf"), float("-inf")]
)
_HALF_SUBNORMALS = [2.0**-24, 2.0**-25, 3 * 2.0**-25, 1.5 * 2.0**-24, 2.0**-15]


@pytest.mark.parametrize("dtype", list(DType))
def test_empty(checker: Checker, dtype: DType) -> None:
    checker.needs(dtype)
    for shape in SHAPES:
        made = np.asarray(checker.backend.to_numpy(checker.backend.empty(shape, dtype)))
        assert (made.shape, made.dtype) == (shape, numpy_dtype(dtype)), f"empty({shape}, {dtype})"


@pytest.mark.parametrize("dtype", list(DType))
def test_write_rows(checker: Checker, dtype: DType) -> None:
    checker.needs(dtype)
    for trailing in ((), (3,), (2, 3)):
        target = nearest_even(np.asarray(numbers(5, *trailing), np.float64), dtype)
        for start, count in ((0, 0), (0, 2), (1, 3), (4, 1), (5, 0), (0, 5)):
            values = np.full((count, *trailing), 7.0, target.dtype)
            expected = target.copy()
            expected[start : start + count] = values
            gives(checker.backend, expected, "write_rows", target, start, values)


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
def test_write_rows_rounds(checker: Checker, dtype: DType) -> None:
    checker.needs(dtype, dtype.compute)
    values = nearest_even(np.array(_ROUNDING), dtype.compute)
    target = np.ones(len(values) + 3, numpy_dtype(dtype))
    expected = target.copy()
    expected[1:-2] = nearest_even(values.astype(np.float64), dtype)
    gives(checker.backend, expected, "write_rows", target, 1, values)


def test_arange(checker: Checker) -> None:
    assert index_dtype(checker) in ("int32", "int64")
    for stop in (0, 1, 7, 300):
        gives(checker.backend, np.arange(stop), "arange", stop)


@pytest.mark.parametrize("to", list(DType))
@pytest.mark.parametrize("source", list(DType))
def test_cast(checker: Checker, source: DType, to: DType) -> None:
    checker.needs(source, to)
    values = _ROUNDING + (_HALF_SUBNORMALS if DType.BFLOAT16 not in (source, to) else [])
    for value in values:
        array = nearest_even(np.array([value]), source)
        gives(checker.backend, nearest_even(array.astype(np.float64), to), "cast", array, to)
    gives(
        checker.backend,
        np.zeros((0, 3), numpy_dtype(to)),
        "cast",
        np.zeros((0, 3), numpy_dtype(source)),
        to,
    )


@pytest.mark.parametrize("dtype", sorted(INTEGER_NAMES))
def test_index(checker: Checker, dtype: str) -> None:
    if "64" in dtype and index_dtype(checker) == "int32":
        pytest.skip(f"{checker.backend.name} has no 64-bit integers")
    limits = np.iinfo(dtype)
    for limit in (1, 100, 300, 70_000):
        wanted = {0, 1, 99, 100, 255, 256, 299, 300, 69_999, 2**31 - 1, 2**31, 2**32, 2**63}
        wanted |= {-1, -128, -(2**31), int(limits.min), int(limits.max)}
        values = sorted(value for value in wanted if limits.min <= value <= limits.max)
        for value in values:
            got = calls(checker.backend, "index", np.array([[value]], dtype), limit)
            assert checker.backend.dtype_name(got) == index_dtype(checker)
            inside = value if 0 <= value < limit else -1
            assert_exact(
                shown("index", (np.array([[value]], dtype), limit), {}),
                np.asarray(checker.backend.to_numpy(got)),
                np.array([[inside]]),
            )


def test_reshape(checker: Checker) -> None:
    for array in (numbers(2, 6), np.arange(12).reshape(3, 4), numbers(12)):
        for shape in ((12,), (3, 4), (4, 3), (2, 3, 2), (12, 1)):
            gives(checker.backend, array.reshape(shape), "reshape", array, shape)
    gives(checker.backend, np.zeros((0, 5), np.float32), "reshape", numbers(0), (0, 5))


def test_reshape_of_a_view(checker: Checker) -> None:
    backend, array = checker.backend, numbers(3, 4)
    view = backend.transpose(backend.from_numpy(array))
    flat = np.asarray(backend.to_numpy(backend.reshape(view, (12,))))
    assert_exact("reshape(transpose(x))", flat, array.T.reshape(12))


def test_transpose(checker: Checker) -> None:
    for shape in ((1, 1), (2, 3), (0, 4), (5, 1)):
        gives(checker.backend, numbers(*shape).T, "transpose", numbers(*shape))


def test_concat(checker: Checker) -> None:
    for shapes in (
        ((2, 3),),
        ((0, 3), (2, 3)),
        ((1, 3), (0, 3), (2, 3)),
        ((2,), (3,)),
        ((1, 2, 2), (2, 2, 2)),
    ):
        parts = [numbers(*shape, seed=i) for i, shape in enumerate(shapes)]
        gives(checker.backend, np.concatenate(parts), "concat", parts)
    integers = [np.array([1, 2]), np.array([3])]
    gives(checker.backend, np.array([1, 2, 3]), "concat", integers)


def test_take_rows(checker: Checker) -> None:
    for array in (numbers(4), numbers(4, 3), numbers(4, 3, 2), np.arange(8).reshape(4, 2)):
        for rows in ([], [0], [3, 3, 0], [2, 1, 0, 3, 2, 2]):
            ids = np.array(rows, np.int64)
            gives(checker.backend, array[ids], "take_rows", array, ids)


def test_take_along(checker: Checker) -> None:
    array = numbers(3, 300)
    for ids in (np.zeros((3, 1), np.int64), np.array([[299, 0], [256, 255], [1, 1]])):
        expected = np.take_along_axis(array, ids, axis=1)
        gives(checker.backend, expected, "take_along", array, ids)
    gives(
        checker.backend,
        np.zeros((0, 2), np.float32),
        "take_along",
        numbers(0, 3),
        np.zeros((0, 2), np.int64),
    )
