"""Contract 4 and 6: rows by expert, the sum back over slots, and the backward of the copy.

Everything here is exact: expected values come from loops that add and round one number at a time.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

import ruda
from ruda.backend.registry import AnyBackend
from ruda.base.dtypes import DType
from ruda.stages.dispatch import RowLayout
from ruda.stages.options import CombineAccumulation, RouterScoring
from ruda.testing.layers import Array, numpy_dtype, random_layer

DTYPES = list(DType)
COMPUTE, STORAGE = CombineAccumulation
OPTIONS = ruda.MoeOptions(
    selection=ruda.SoftmaxSelection(2),
    weights=ruda.RouterWeightOptions(RouterScoring.SOFTMAX, renormalize=True),
)


def laid_out(backend: AnyBackend, ids: Any, experts: int) -> RowLayout[Any]:
    index = backend.index(backend.from_numpy(np.asarray(ids)), experts)
    return backend.dispatch(index, experts)


def by_expert(ids: list[list[int]], experts: int) -> list[tuple[int, int]]:
    """The (token, slot) of each row."""
    everyone = [(t, j) for t, row in enumerate(ids) for j in range(len(row))]
    return [(t, j) for e in range(experts) for t, j in everyone if ids[t][j] == e]


def as_rows(backend: AnyBackend, ids: Any, values: Array, experts: int) -> Any:
    """Values [T, K, H] in row order [R, H]."""
    order = by_expert(np.asarray(ids).tolist(), experts)
    picked = np.array([values[t, j] for t, j in order], values.dtype)
    return backend.from_numpy(picked.reshape(-1, values.shape[2]))


def combined(
    backend: AnyBackend,
    ids: Any,
    weights: Any,
    values: Array,
    accumulation: CombineAccumulation,
    dtype: DType,
    experts: int = 4,
) -> Array:
    layout = laid_out(backend, ids, experts)
    rows = as_rows(backend, ids, values, experts)
    w = backend.from_numpy(np.asarray(weights))
    with backend.numerics():
        out = backend.combine(rows, w, layout, accumulation=accumulation, dtype=dtype)
    found: Array = backend.to_numpy(out)
    assert found.dtype == numpy_dtype(dtype)
    return found


def sent_back(backend: AnyBackend, ids: Any, values: Array, dtype: DType, experts: int) -> Array:
    layout, rows = laid_out(backend, ids, experts), as_rows(backend, ids, values, experts)
    with backend.numerics():
        found: Array = backend.to_numpy(backend.copy_backward(rows, layout, dtype=dtype))
    assert found.dtype == numpy_dtype(dtype)
    return found


# --- rows by expert ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["uint8", "int32", "int64"])
@pytest.mark.parametrize("shape", [(0, 2, 4), (1, 1, 1), (17, 3, 8), (129, 5, 60), (9, 4, 250)])
def test_order_positions_and_offsets(
    backend: AnyBackend, shape: tuple[int, int, int], kind: str
) -> None:
    """Experts ascending, tokens and slots in order within one; repeated ids too."""
    tokens, slots, experts = shape
    ids = np.random.default_rng(tokens).integers(0, experts, (tokens, slots)).astype(kind)
    layout, order = laid_out(backend, ids, experts), by_expert(ids.tolist(), experts)
    assert backend.to_numpy(layout.expert_ids).tolist() == ids.tolist()
    assignments = backend.to_numpy(layout.assignments)
    assert assignments.tolist() == [t * slots + j for t, j in order]
    positions = backend.to_numpy(layout.positions)
    assert positions.shape == (tokens, slots)
    assert [int(positions[t, j]) for t, j in order] == list(range(len(order)))
    offsets = backend.to_numpy(layout.expert_offsets)
    counts = [int((ids == e).sum()) for e in range(experts)]
    assert offsets.tolist() == [0, *itertools.accumulate(counts)]
    assert offsets.dtype == assignments.dtype == positions.dtype == np.int64


def test_case_062_experts_without_rows_at_the_end(backend: AnyBackend) -> None:
    layout = laid_out(backend, [[1, 0], [0, 1], [1, 1]], 4)
    assert backend.to_numpy(layout.expert_offsets).tolist() == [0, 2, 6, 6, 6]
    counts = backend.counts(backend.index(backend.from_numpy(np.array([1, 0, 1])), 4), 4)
    assert backend.to_numpy(counts).tolist() == [1, 2, 0, 0]


def test_case_081_counts_never_pass_through_a_float(backend: AnyBackend) -> None:
    """257 in bfloat16 would be 256, and 2049 in float16 would be 2048."""
    for dtype, tokens in ((DType.BFLOAT16, 257), (DType.FLOAT16, 2049)):
        x = backend.from_numpy(np.ones((tokens, 1), numpy_dtype(dtype)))
        ids = backend.from_numpy(np.ones((tokens, 1), np.int32))
        cube = backend.from_numpy(np.ones((3, 1, 1), numpy_dtype(dtype)))
        y, state = ruda.experts_forward(x, ids, x, cube, cube, cube, backend=backend)
        assert backend.to_numpy(state.layout.expert_offsets).tolist() == [0, 0, tokens, tokens]
        found = ruda.experts_backward(state, y)
        assert backend.to_numpy(found.weights).shape == (tokens, 1)


def test_case_097_ids_that_are_every_second_element(backend: AnyBackend) -> None:
    wide = np.array([[1, 9], [0, 9], [2, 9], [3, 9]])
    strided = backend.from_numpy(wide)[:, :1]
    layout, plain = backend.dispatch(strided, 4), laid_out(backend, [[1], [0], [2], [3]], 4)
    for name in ("assignments", "positions", "expert_offsets"):
        pair = [backend.to_numpy(getattr(each, name)).tolist() for each in (layout, plain)]
        assert pair[0] == pair[1]


# --- the sum over slots ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("by_id", "total"),
    [([1e8, 1.0, -1e8], 0.0), ([1e8, -1e8, 1.0], 1.0), ([1.0, 1e8, -1e8], 0.0)],
    ids=str,
)
def test_the_sum_goes_by_ascending_expert_id(
    backend: AnyBackend, by_id: list[float], total: float
) -> None:
    """Whatever the order of the slots: in float32, 1e8 + 1 is 1e8."""
    ids = np.array(list(itertools.permutations(range(3))))
    values = np.array(by_id, np.float32)[ids][:, :, None]
    out = combined(backend, ids, np.ones((6, 3), np.float32), values, COMPUTE, DType.FLOAT32)
    assert out.tolist() == [[total]] * 6


def test_repeated_ids_are_summed_in_slot_order(backend: AnyBackend) -> None:
    """The same expert thrice, told apart by weights; and around another one."""
    ids = np.array([[2, 2, 2], [2, 2, 2], [2, 0, 2], [2, 0, 2]])
    weights = np.array([[1e8, 1, -1e8], [1e8, -1e8, 1], [1, 1e8, -1e8], [-1e8, 1e8, 1]], np.float32)
    out = combined(backend, ids, weights, np.ones((4, 3, 1), np.float32), COMPUTE, DType.FLOAT32)
    assert out.tolist() == [[0.0], [1.0], [0.0], [1.0]]


@pytest.mark.parametrize("accumulation", [COMPUTE, STORAGE], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slots", [1, 2, 7])
def test_every_rounding_of_the_sum(
    backend: AnyBackend, dtype: DType, accumulation: CombineAccumulation, slots: int
) -> None:
    """Against one addition at a time. Weights are powers of two: a fused product is the same."""
    rng = np.random.default_rng(slots)
    kind, compute = numpy_dtype(dtype), numpy_dtype(dtype.compute)
    ids = rng.integers(0, 4, (11, slots))
    weights = np.exp2(rng.integers(-3, 4, (11, slots))).astype(compute)
    values = rng.standard_normal((11, slots, 5)).astype(kind)
    partial = kind if accumulation is STORAGE else compute

    expected = np.zeros((11, 5), kind)
    for t, h in itertools.product(range(11), range(5)):
        total: Any = None
        for j in sorted(range(slots), key=lambda j: int(ids[t, j])):
            term = (weights[t, j] * values[t, j, h].astype(compute)).astype(partial)
            if total is None:
                total = term
            else:
                total = (total.astype(compute) + term.astype(compute)).astype(partial)
        expected[t, h] = total.astype(kind)
    out = combined(backend, ids, weights, values, accumulation, dtype)
    assert np.array_equal(out, expected)


@pytest.mark.parametrize(("accumulation", "total"), [(COMPUTE, 264.0), (STORAGE, 256.0)], ids=str)
def test_case_075_256_and_seven_ones_in_bfloat16(
    backend: AnyBackend, accumulation: CombineAccumulation, total: float
) -> None:
    """Through the whole branch, with unit experts and sigmoid weights of 1."""
    bf16, silu = numpy_dtype(DType.BFLOAT16), 1 / (1 + math.exp(-1))
    down = np.array([256.0] + [1.0] * 7).reshape(8, 1, 1) / silu
    arrays = np.ones((1, 1)), np.full((1, 8), 40.0), np.ones((8, 1, 1)), down
    x, logits, cube, down = (backend.from_numpy(array.astype(bf16)) for array in arrays)
    options = ruda.MoeOptions(
        selection=ruda.SoftmaxSelection(8),
        weights=ruda.RouterWeightOptions(RouterScoring.SIGMOID, renormalize=False),
        combine=accumulation,
    )
    y, _ = ruda.moe_forward(x, logits, cube, cube, down, options=options, backend=backend)
    assert backend.to_numpy(y).astype(np.float64).tolist() == [[total]]


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16], ids=str)
def test_the_sum_is_rounded_once(backend: AnyBackend, dtype: DType) -> None:
    """Float64 weights; the sum is just above the middle of two values, in float32 it is there."""
    step = 2.0**-10 if dtype is DType.FLOAT16 else 2.0**-7
    values = np.ones((1, 2, 1), numpy_dtype(dtype))
    weights = np.array([[1.0 + step / 2, 2.0**-40]])
    out = combined(backend, [[0, 1]], weights, values, COMPUTE, dtype)
    assert float(out[0, 0]) == 1 + step


@pytest.mark.parametrize("slots", [1, 2, 4, 8])
def test_case_041_errors_do_not_grow_with_k(backend: AnyBackend, slots: int) -> None:
    """One rounding to bfloat16, both ways, and nothing lost before it."""
    rng = np.random.default_rng(41)
    ids = np.argsort(rng.random((64, 8)), axis=1)[:, :slots]
    values = rng.standard_normal((64, slots, 128)).astype(numpy_dtype(DType.BFLOAT16))
    weights = rng.random((64, slots)).astype(np.float32)
    exact = values.astype(np.float64)
    for found, terms in (
        (
            combined(backend, ids, weights, values, COMPUTE, DType.BFLOAT16, 8),
            exact * weights[:, :, None],
        ),
        (sent_back(backend, ids, values, DType.BFLOAT16, 8), exact),
    ):
        error = np.abs(found.astype(np.float64) - terms.sum(1))
        bound = 2.0**-8 * np.abs(terms.sum(1)) + 2.0**-21 * np.abs(terms).sum(1)
        assert (error <= bound).all()


# --- the copy, backward ------------------------------------------------------------------------


def test_case_039_both_slots_of_a_token_add_up(backend: AnyBackend) -> None:
    values = np.array([[[0.2], [0.3]]], np.float32)
    assert sent_back(backend, [[1, 0]], values, DType.FLOAT32, 2).tolist() == [[0.5]]
    assert sent_back(backend, [[1, 1]], values, DType.FLOAT32, 2).tolist() == [[0.5]]


def test_case_042_adding_at_a_repeated_row_counts_each_time(backend: AnyBackend) -> None:
    rows = backend.index(backend.from_numpy(np.array([0, 0, 1])), 2)
    values = backend.from_numpy(np.array([1, 2, 3], np.float32))
    target = backend.full((2,), 0.0, DType.FLOAT32)
    assert backend.to_numpy(backend.add_rows(target, rows, values)).tolist() == [3.0, 3.0]


def test_input_gradients_are_summed_in_slot_order(backend: AnyBackend) -> None:
    """Not by expert: the values belong to slots here, and every order of experts gives one sum."""
    ids = np.array(list(itertools.permutations(range(3))))
    for by_slot, total in (([1e8, 1.0, -1e8], 0.0), ([1e8, -1e8, 1.0], 1.0)):
        values = np.tile(np.array(by_slot, np.float32), (6, 1))[:, :, None]
        assert sent_back(backend, ids, values, DType.FLOAT32, 3).tolist() == [[total]] * 6


# --- the whole branch --------------------------------------------------------------------------


def operands(backend: AnyBackend, dtype: DType, tokens: int = 32) -> list[Any]:
    layer = random_layer(
        tokens=tokens, hidden=16, intermediate=8, experts=8, options=OPTIONS, dtype=dtype, seed=6
    )
    arrays = layer.input, layer.logits, layer.gate, layer.up, layer.down, layer.grad_output
    return [backend.from_numpy(array) for array in arrays]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_case_064_the_output_does_not_depend_on_the_order_of_slots(
    backend: AnyBackend, dtype: DType
) -> None:
    rng = np.random.default_rng(64)
    x, _, gate, up, down, _ = operands(backend, dtype)
    ids = np.argsort(rng.random((32, 8)), axis=1)[:, :4]
    weights = rng.random((32, 4)).astype(np.float32)
    outputs: list[Array] = []
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [0, 1, 2, 3], [2, 3, 1, 0]):
        slots, w = (backend.from_numpy(array[:, order].copy()) for array in (ids, weights))
        y, state = ruda.experts_forward(x, slots, w, gate, up, down, backend=backend)
        outputs.append(backend.to_numpy(y))
        counts = np.diff(backend.to_numpy(state.layout.expert_offsets))
        assert counts.tolist() == np.bincount(ids.ravel(), minlength=8).tolist()
    assert all(np.array_equal(each, outputs[0]) for each in outputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_case_111_no_tokens(backend: AnyBackend, dtype: DType) -> None:
    x, logits, gate, up, down, dout = operands(backend, dtype, tokens=0)
    y, state = ruda.moe_forward(x, logits, gate, up, down, options=OPTIONS, backend=backend)
    grads = ruda.moe_backward(state, dout)
    shapes = {name: backend.shape(tensor) for name, tensor in grads.asdict().items()}
    cubes = {"gate": (8, 8, 16), "up": (8, 8, 16), "down": (8, 16, 8)}
    assert shapes == {"input": (0, 16), "logits": (0, 8), **cubes}
    assert backend.shape(y) == (0, 16)
    for name in cubes:
        assert (backend.to_numpy(grads.asdict()[name]) == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts_without_rows_are_never_read(backend: AnyBackend, dtype: DType) -> None:
    """Their weights are NaN; their gradients are exactly zero, and all others are as before."""
    x, _, *cubes, dout = operands(backend, dtype)
    ids = backend.from_numpy(np.random.default_rng(1).choice([1, 4], (32, 2)))
    weights = backend.from_numpy(np.random.default_rng(2).random((32, 2)).astype(np.float32))
    found: list[dict[str, Array]] = []
    for fill in (1.0, math.nan):
        arrays = [backend.to_numpy(cube).copy() for cube in cubes]
        for array in arrays:
            array[[0, 2, 3, 5, 6, 7]] = fill
        y, state = ruda.experts_forward(
            x, ids, weights, *(backend.from_numpy(array) for array in arrays), backend=backend
        )
        grads = ruda.experts_backward(state, dout).asdict()
        found.append({n: backend.to_numpy(t) for n, t in {**grads, "output": y}.items()})
    for name, array in found[1].items():
        assert np.array_equal(array, found[0][name]), name
    for name in ("gate", "up", "down"):
        assert (found[1][name][[0, 2, 3, 5, 6, 7]] == 0).all()
        assert (found[1][name][[1, 4]] != 0).any()


@pytest.mark.parametrize("poisoned", ["input", "logits", "grad_output"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_bad_token_changes_no_other(backend: AnyBackend, dtype: DType, poisoned: str) -> None:
    """Its NaN reaches its own output and gradients; every other token's are the same bits."""
    names = ("input", "logits", "gate", "up", "down", "grad_output")
    clean = dict(zip(names, operands(backend, dtype), strict=True))
    ids = ruda.FixedSelection(backend.from_numpy(np.tile([[3, 5]], (32, 1))))
    options = ruda.MoeOptions(selection=ids, weights=OPTIONS.weights)
    array = backend.to_numpy(clean[poisoned]).copy()
    array[7] = math.nan
    results: list[dict[str, Array]] = []
    for given in (clean, {**clean, poisoned: backend.from_numpy(array)}):
        *forward, dout = (given[name] for name in names)
        y, state = ruda.moe_forward(*forward, options=options, backend=backend)
        grads = ruda.moe_backward(state, dout).asdict()
        tensors = {"output": y, "input": grads["input"], "logits": grads["logits"]}
        results.append({name: backend.to_numpy(tensor) for name, tensor in tensors.items()})
    others = np.arange(32) != 7
    for name, array in results[1].items():
        assert np.array_equal(array[others], results[0][name][others]), name
        if name != "output" or poisoned != "grad_output":
            assert np.isnan(array[7].astype(np.float64)).any(), name
