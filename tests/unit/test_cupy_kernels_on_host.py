"""The CuPy backend's device kernels do what the written bodies do, bit for bit.

The kernels' own source text is compiled for the CPU and run on NumPy arrays; the written bodies run
on the NumPy backend, with the host compiler's `exp` in place of NumPy's, which differs in the last
bit. What is left to tell apart is the order of sums, where it is said what is allowed.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ruda.backend.specification import specification
from ruda.base.dtypes import DType, wider
from ruda.base.strategies import CombineGradientStrategy
from ruda.stages.options import CombineAccumulation
from ruda.testing.layers import Array, numpy_dtype
from ruda.testing.tolerance import assert_same_bits
from ruda_backend_cupy import source
from ruda_backend_cupy.operations import CupyOperations
from ruda_backend_numpy import NumpyBackend

host = pytest.importorskip("cupy_host_kernels")
stand_in = pytest.importorskip("cupy_stand_in")

pytestmark = pytest.mark.skipif(
    host.compiler() is None, reason="no host C++ compiler on Linux to compile the kernels with"
)

FLOATS = (DType.FLOAT32, DType.FLOAT64)
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 88.0, -88.0, 104.0, -104.0, 6e-8, -6e-8]
SPECIAL += [1e-40, -1e-40, 65504.0, 65520.0, -65519.0, 3e38, -3e38, 2.0**-133, 750.0, -750.0]


class SameExponential(NumpyBackend):
    """NumPy, with the exponential the host-compiled kernels use."""

    def exp(self, tensor: Any, /) -> Any:
        result = np.empty(tensor.shape, tensor.dtype)
        packed = np.ascontiguousarray(tensor)
        host.call(f"exponential_{tensor.dtype.name}", packed, result, packed.size)
        return result


NUMPY = SameExponential()
WRITTEN = specification(NUMPY)


@pytest.fixture(autouse=True)
def _overflow_is_meant() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


@pytest.fixture(scope="module")
def cupy_stand_in() -> CupyOperations:
    backend: CupyOperations = stand_in.CupyStandIn()
    return backend


def values(shape: tuple[int, ...], dtype: DType, seed: int, scale: float = 2.0) -> Array:
    rng = np.random.default_rng(seed)
    made = rng.standard_normal(shape) * scale
    # Some far from 1, so that rounding meets every exponent.
    made *= np.where(rng.random(shape) < 0.2, np.exp2(rng.integers(-20, 8, shape)), 1.0)
    return np.asarray(made.astype(numpy_dtype(dtype)))


def special_grid(dtype: DType) -> tuple[Array, ...]:
    """Every triple of special values, in three arrays."""
    special = np.array(SPECIAL).astype(numpy_dtype(dtype))
    return tuple(axis.reshape(23, -1) for axis in np.meshgrid(special, special, special))


def same(name: str, got: Array, expected: Array) -> None:
    """Equal bits; a NaN may have any sign and payload."""
    nan = np.isnan(got.astype(np.float64)) & np.isnan(expected.astype(np.float64))
    assert_same_bits(
        name,
        np.where(nan, np.zeros_like(got), got),
        np.where(nan, np.zeros_like(expected), expected),
    )


def layouts(tokens: int, slots: int, count: int, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, count, (tokens, slots))  # repeated ids too
    return NUMPY.dispatch(ids, count)


@pytest.mark.parametrize("dtype", DType)
def test_swiglu(cupy_stand_in: CupyOperations, dtype: DType) -> None:
    pairs = [(values((37, 65), dtype, 0), values((37, 65), dtype, 1)), special_grid(dtype)[:2]]
    for gate, up in pairs:
        expected = WRITTEN.swiglu(gate, up)
        same("activation", cupy_stand_in.swiglu(gate, up), expected)


@pytest.mark.parametrize("dtype", DType)
def test_swiglu_backward(cupy_stand_in: CupyOperations, dtype: DType) -> None:
    random = tuple(values((37, 65), dtype, seed) for seed in range(3))
    for gate, up, da in (random, special_grid(dtype)):
        expected = WRITTEN.swiglu_backward(gate, up, da)
        found = cupy_stand_in.swiglu_backward(gate, up, da)
        same("dg", found[0], expected[0])
        same("du", found[1], expected[1])


@pytest.mark.parametrize("accumulation", CombineAccumulation)
@pytest.mark.parametrize("weights_dtype", FLOATS)
@pytest.mark.parametrize("inner", ["storage", "compute"])
@pytest.mark.parametrize("dtype", DType)
def test_combine(
    cupy_stand_in: CupyOperations,
    dtype: DType,
    inner: str,
    weights_dtype: DType,
    accumulation: CombineAccumulation,
) -> None:
    rows_dtype = dtype if inner == "storage" else dtype.compute
    for tokens, slots, hidden in ((17, 5, 7), (1, 1, 1), (3, 20, 300), (0, 2, 4)):
        layout = layouts(tokens, slots, 8, seed=slots)
        rows = values((tokens * slots, hidden), rows_dtype, 3)
        rows.reshape(-1)[: len(SPECIAL)] = np.array(SPECIAL)[: rows.size].astype(rows.dtype)
        weights = values((tokens, slots), weights_dtype, 4, scale=0.3)
        arguments = (rows, weights, layout)
        options: Any = {"accumulation": accumulation, "dtype": dtype}
        expected = WRITTEN.combine(*arguments, **options)
        found = cupy_stand_in.combine(*arguments, **options)
        if dtype is DType.BFLOAT16 and weights_dtype is DType.FLOAT64:
            # ml_dtypes takes a float64 to bfloat16 by way of float32, the kernels do not: one
            # rounding may differ by a last place in every step, and no more.
            wide = [np.nan_to_num(array.astype(np.float64)) for array in (found, expected)]
            sums = np.nan_to_num(np.abs(rows.astype(np.float64)))[layout.positions]
            scale = (sums * np.abs(weights)[:, :, None]).sum(1)
            assert (np.abs(wide[0] - wide[1]) <= 2.0**-7 * slots * scale + 1e-38).all()
            continue
        same("output", found, expected)


@pytest.mark.parametrize("inner", ["storage", "compute"])
@pytest.mark.parametrize("dtype", DType)
def test_copy_backward(cupy_stand_in: CupyOperations, dtype: DType, inner: str) -> None:
    rows_dtype = dtype if inner == "storage" else dtype.compute
    for tokens, slots, hidden in ((17, 5, 7), (1, 1, 1), (3, 20, 300), (0, 2, 4)):
        layout = layouts(tokens, slots, 8, seed=slots)
        rows = values((tokens * slots, hidden), rows_dtype, 5)
        expected = WRITTEN.copy_backward(rows, layout, dtype=dtype)
        same("input", cupy_stand_in.copy_backward(rows, layout, dtype=dtype), expected)


@pytest.mark.parametrize("strategy", CombineGradientStrategy)
@pytest.mark.parametrize("weights_dtype", FLOATS)
@pytest.mark.parametrize("dtype", DType)
def test_routing_weight_gradient(
    cupy_stand_in: CupyOperations,
    dtype: DType,
    weights_dtype: DType,
    strategy: CombineGradientStrategy,
) -> None:
    compute = wider(weights_dtype, dtype)
    for rows, width in ((19, 1), (5, 31), (9, 33), (300, 129), (2, 2048), (0, 3)):
        b, a = values((rows, width), dtype, 6), values((rows, width), dtype, 7)
        found = cupy_stand_in.routing_weight_gradient(b, a, dtype=weights_dtype, strategy=strategy)
        assert found.dtype == numpy_dtype(weights_dtype)
        # Both orders of summation are wrong by less than what each of their roundings may be.
        products = b.astype(np.longdouble) * a.astype(np.longdouble)
        additions = min(width, 32) + -(-width // 32) + 5
        unit = np.finfo(numpy_dtype(compute)).eps / 2
        last = np.finfo(numpy_dtype(weights_dtype)).eps / 2
        allowed = np.abs(products).sum(1) * (unit * (additions + 1) * 1.01 + last)
        assert (np.abs(found - products.sum(1)) <= allowed).all()
        again = cupy_stand_in.routing_weight_gradient(b, a, dtype=weights_dtype, strategy=strategy)
        assert_same_bits("repeat", again, found)


def test_a_plane_adds_what_every_lane_has(cupy_stand_in: CupyOperations) -> None:
    ones = np.ones((70, 100), np.float32)
    count = np.arange(7000, dtype=np.float32).reshape(70, 100)
    found = cupy_stand_in.routing_weight_gradient(
        count, ones, dtype=DType.FLOAT32, strategy=CombineGradientStrategy.PLANE
    )
    assert (found == count.sum(1, dtype=np.float64)).all()


@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("shape", [(6,), (6, 3)])
def test_add_rows(cupy_stand_in: CupyOperations, dtype: DType, shape: tuple[int, ...]) -> None:
    rows = np.array([4, 0, 4, 1, 4, 0], np.int64)
    added = values((6, *shape[1:]), dtype, 8)
    target = values(shape, dtype, 9)
    expected = target.copy()
    for row, value in zip(rows, added, strict=True):
        expected[row] = expected[row] + value
    same("target", cupy_stand_in.add_rows(target.copy(), rows, added), expected)


def test_add_rows_keeps_every_contribution(cupy_stand_in: CupyOperations) -> None:
    """Case 042: a plain indexed += would give 2 and 3."""
    rows, added = np.array([0, 0, 1]), np.array([1, 2, 3], np.float32)
    assert cupy_stand_in.add_rows(np.zeros(2, np.float32), rows, added).tolist() == [3, 3]


def test_a_small_grid_comes_round_again() -> None:
    """More elements, tokens, rows than threads: each is met once all the same."""
    dtype = DType.FLOAT32
    gate, up = values((50, 3), dtype, 1), values((50, 3), dtype, 2)
    found = np.full((50, 3), np.nan, np.float32)
    host.launch(source.swiglu(dtype), 2, 7, gate, up, found, 150)
    same("activation", found, WRITTEN.swiglu(gate, up))

    layout = layouts(11, 3, 4, seed=0)
    rows = values((33, 50), dtype, 3)
    found = np.full((11, 50), np.nan, np.float32)
    host.launch(source.copy_backward(dtype, dtype), 2, 32, rows, layout.positions, found, 11, 3, 50)
    same("input", found, WRITTEN.copy_backward(rows, layout, dtype=dtype))

    found = np.full(33, np.nan, np.float32)
    kernel = source.weight_gradient(dtype, dtype, plane=True)
    host.launch(kernel, 2, 64, rows, rows, found, 33, 50)
    assert np.allclose(found, (rows.astype(np.float64) ** 2).sum(1), rtol=1e-5)


def test_nothing_is_written_past_the_end() -> None:
    buffer = np.full(130, -7.0, np.float32)
    gate = np.ones(100, np.float32)
    host.launch(source.swiglu(DType.FLOAT32), 1, 256, gate, gate, buffer[15:], 100)
    assert (buffer[:15] == -7).all()
    assert (buffer[115:] == -7).all()
    assert (buffer[15:115] != -7).all()


ROUND = {DType.FLOAT16: (np.float16, 11, -14), DType.BFLOAT16: (ml_dtypes.bfloat16, 8, -126)}


@pytest.mark.parametrize("dtype", list(ROUND))
def test_widening_every_16_bit_number(dtype: DType) -> None:
    every = np.arange(65536, dtype=np.uint16).view(ROUND[dtype][0])
    found = np.empty(65536, np.float32)
    host.call(f"widen_{dtype}", every, found, 65536)
    same("widened", found, every.astype(np.float32))


@pytest.mark.parametrize("dtype", list(ROUND))
def test_flushing_float32_subnormals_harms_no_16_bit_number(dtype: DType) -> None:
    """CuPy compiles with -ftz=true; a float16 subnormal is a normal float32."""
    every = np.arange(65536, dtype=np.uint16).view(ROUND[dtype][0])
    widened, exact = np.empty(65536, np.float32), every.astype(np.float64)
    narrowed, from_double = np.empty_like(every), np.empty_like(every)
    with host.flushed_subnormals() as able:
        if not able:
            pytest.skip("this processor does not flush subnormals")
        host.call(f"widen_{dtype}", every, widened, 65536)
        host.call(f"round_float_to_{dtype}", widened, narrowed, 65536)
        host.call(f"round_to_{dtype}", exact, from_double, 65536)
    same("widened", widened, every.astype(np.float32))
    same("narrowed", narrowed, every)
    same("narrowed from double", from_double, every)


def test_float16_gradients_with_float32_subnormals_flushed(cupy_stand_in: CupyOperations) -> None:
    gate, up, da = (values((37, 65), DType.FLOAT16, seed, scale=1e-4) for seed in range(3))
    expected = WRITTEN.swiglu_backward(gate, up, da)
    with host.flushed_subnormals():
        found = cupy_stand_in.swiglu_backward(gate, up, da)
    assert (np.abs(expected[0].astype(float)) < 2.0**-14).mean() > 0.5  # subnormal, most of them
    same("dg", found[0], expected[0])
    same("du", found[1], expected[1])


@pytest.mark.parametrize("dtype", list(ROUND))
def test_rounding_a_float32(dtype: DType) -> None:
    kind = ROUND[dtype][0]
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 2_000_000, dtype=np.uint64).astype(np.uint32)
    every = np.arange(65536, dtype=np.uint16).view(kind).astype(np.float32)
    halfway = (every[:-1].astype(np.float64) + every[1:]).astype(np.float32) / 2
    inputs = np.concatenate([bits.view(np.float32), every, halfway, np.array(SPECIAL, np.float32)])
    found = np.empty(inputs.size, kind)
    host.call(f"round_float_to_{dtype}", inputs, found, inputs.size)
    same("rounded", found, inputs.astype(kind))


@pytest.mark.parametrize("dtype", list(ROUND))
def test_rounding_a_float64_once(dtype: DType) -> None:
    """Against exact fractions: near halfway, float32 in between would round to the wrong side."""
    kind, precision, smallest = ROUND[dtype]
    rng = np.random.default_rng(1)
    inputs = [1 + 2.0**-precision + 2.0**-40, 1 + 2.0**-precision - 2.0**-40, 1 + 2.0**-precision]
    inputs += [2.0 ** (smallest - precision), 2.0 ** (smallest - precision) * 1.0001, 1e300, 1e-300]
    for mantissa, shift in rng.integers([2**precision, -40], [2 ** (precision + 1), 15], (400, 2)):
        half = float(2 * mantissa + 1) * 2.0 ** int(shift - precision)
        inputs += [half, np.nextafter(half, 0), np.nextafter(half, np.inf), half * (1 + 2.0**-30)]
    exact = np.array(inputs)
    found = np.empty(exact.size, kind)
    host.call(f"round_to_{dtype}", exact, found, exact.size)
    negative = np.empty(exact.size, kind)
    host.call(f"round_to_{dtype}", -exact, negative, exact.size)
    for x, got, mirrored in zip(inputs, found.astype(float), negative.astype(float), strict=True):
        assert got == _nearest(x, precision, smallest, float(ml_dtypes.finfo(kind).max)), x
        assert mirrored == -got, x


def _nearest(x: float, precision: int, smallest: int, largest: float) -> float:
    value = Fraction(x)
    exponent = max(int(np.floor(np.log2(x))), smallest)
    unit = Fraction(2) ** (exponent - precision + 1)
    nearest = float(round(value / unit) * unit)  # ties to even
    return nearest if nearest <= largest else np.inf


def test_a_row_beyond_2_to_31_elements() -> None:
    """Case 088. The memory is promised, and only two rows of it ever touched."""
    hidden, row = 32768, 70_000
    try:
        rows = np.zeros((row + 1, hidden), np.float16)
    except MemoryError:
        pytest.skip("no 4.6 GB of address space")
    rows[row] = values((hidden,), DType.FLOAT16, 1)
    positions = np.array([[row, 0]])
    found = np.empty((1, hidden), np.float16)
    kernel = source.copy_backward(DType.FLOAT16, DType.FLOAT16)
    host.launch(kernel, 1, 32, rows, positions, found, 1, 2, hidden)
    assert (found[0] == rows[row]).all()
