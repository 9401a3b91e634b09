"""Contract 2: the largest logits, or fixed ids; exact on every backend, against plain sorting."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import ruda
from ruda.backend.registry import AnyBackend
from ruda.base.dtypes import DType
from ruda.stages.options import FixedSelection, GroupedSelection, RouterScoring, SoftmaxSelection
from ruda.testing.layers import Array, numpy_dtype

NAN, INF = math.nan, math.inf
DTYPES = list(DType)
WEIGHTS = ruda.RouterWeightOptions(RouterScoring.SIGMOID, renormalize=True)


def choose(backend: AnyBackend, logits: Array, selection: Any) -> Any:
    """The ids that a forward pass over experts of width one reports."""
    x, cube = np.ones((logits.shape[0], 1)), np.ones((logits.shape[1], 1, 1))
    if isinstance(selection, FixedSelection):
        selection = FixedSelection(backend.from_numpy(selection.expert_ids))
    x, cube = (backend.from_numpy(array.astype(np.float32)) for array in (x, cube))
    options = ruda.MoeOptions(selection=selection, weights=WEIGHTS)
    _, state = ruda.moe_forward(
        x, backend.from_numpy(logits), cube, cube, cube, options=options, backend=backend
    )
    ids = backend.to_numpy(ruda.moe_route_indices(state))
    assert ids.dtype.kind == "i"
    return ids


def rows(*values: list[float], dtype: DType = DType.FLOAT32) -> Array:
    return np.array(values, np.float64).astype(numpy_dtype(dtype))


def best(row: list[float], k: int) -> list[int]:
    undefined = any(math.isnan(x) or x == INF for x in row) or all(x == -INF for x in row)
    return sorted(range(len(row)), key=lambda e: 0.0 if undefined else -row[e])[:k]


# --- SoftmaxSelection --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("row", "k", "expected"),
    [
        pytest.param([3, 2, 3, 2, 1, 1], 2, [0, 2], id="case 053"),
        pytest.param([3, 2, 3, 2, 1, 1], 6, [0, 2, 1, 3, 4, 5], id="case 053, all"),
        pytest.param([0.2, 0.2, 0.4, 0.5], 3, [3, 2, 0], id="case 058"),
        pytest.param([-0.0, 0.0, -0.0, 0.0], 4, [0, 1, 2, 3], id="signed zeros tie"),
        pytest.param([0.0, -0.0, 1.0, -1.0], 3, [2, 0, 1], id="signed zeros tie below one"),
        pytest.param([-INF, 1, -INF, 0], 3, [1, 3, 0], id="-inf ranks last"),
        pytest.param([-INF, -60000, -INF, -INF], 2, [1, 0], id="-inf below every number"),
        pytest.param([-INF] * 4, 2, [0, 1], id="nothing but -inf"),
        pytest.param([0, 5, INF, 1], 3, [0, 1, 2], id="+inf"),
        pytest.param([1, NAN, 3, 0], 2, [0, 1], id="case 066"),
        pytest.param([NAN] * 4, 2, [0, 1], id="case 067"),
        pytest.param([NAN, -INF, INF, 0], 3, [0, 1, 2], id="case 068"),
        pytest.param([1, NAN, 3], 1, [0], id="case 069"),
        pytest.param([5], 1, [0], id="one expert"),
        pytest.param([2, 9, 4, 9], 1, [1], id="k = 1"),
        pytest.param([-3, -1, -2], 3, [1, 2, 0], id="k = E, negative"),
    ],
)
def test_softmax_selection(
    backend: AnyBackend, dtype: DType, row: list[float], k: int, expected: list[int]
) -> None:
    others = [7.0 - e for e in range(len(row))]
    ids = choose(backend, rows(others, row, others, dtype=dtype), SoftmaxSelection(k))
    assert ids.tolist() == [list(range(k)), expected, list(range(k))]


@pytest.mark.parametrize("experts", [255, 256, 257, 384, 512])
def test_case_055_sixteen_bit_logits_past_256_experts(backend: AnyBackend, experts: int) -> None:
    """Ten calls choose alike, and in the stable order of the widened values."""
    rng = np.random.default_rng(experts)
    logits = rng.standard_normal((256, experts)).astype(numpy_dtype(DType.BFLOAT16))
    ids = choose(backend, logits, SoftmaxSelection(8))
    wide = logits.astype(np.float64).tolist()
    assert ids.tolist() == [best(row, 8) for row in wide]
    for _ in range(9):
        assert np.array_equal(choose(backend, logits, SoftmaxSelection(8)), ids)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("experts", [1, 8, 257])
def test_random_rows_with_ties_and_masks(backend: AnyBackend, dtype: DType, experts: int) -> None:
    """Small integers tie often; every k is a prefix of the whole order."""
    rng = np.random.default_rng(experts)
    logits = rng.integers(-4, 5, (64, experts)) * np.float64(0.5)
    logits[rng.random(logits.shape) < 0.1] = -INF
    logits[::7] = rng.standard_normal(logits[::7].shape)
    stored = logits.astype(numpy_dtype(dtype))
    expected = [best(row, experts) for row in stored.astype(np.float64).tolist()]
    for k in {1, 2, min(experts, 20), experts} & set(range(1, experts + 1)):
        ids = choose(backend, stored, SoftmaxSelection(k))
        assert ids.tolist() == [row[:k] for row in expected]


def test_case_057_the_order_is_descending_not_just_the_set(backend: AnyBackend) -> None:
    logits = np.random.default_rng(57).standard_normal((32, 10)).astype(np.float32)
    ids = choose(backend, logits, SoftmaxSelection(3))
    assert ids.tolist() == [best(row, 3) for row in logits.tolist()]
    picked = np.take_along_axis(logits, ids, axis=1)
    assert (np.diff(picked, axis=1) <= 0).all()


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 33, 129])
@pytest.mark.parametrize(
    "selection", [SoftmaxSelection(8), GroupedSelection(8, groups=8, selected_groups=3)], ids=str
)
def test_case_102_a_row_of_a_batch_equals_the_row_alone(
    backend: AnyBackend, tokens: int, selection: Any
) -> None:
    logits = np.random.default_rng(102).standard_normal((129, 128)).astype(np.float32)
    whole = choose(backend, logits[:tokens], selection)
    for token in {0, tokens // 2, tokens - 1}:
        alone = choose(backend, logits[token : token + 1], selection)
        assert alone.tolist() == [whole[token].tolist()]


@pytest.mark.parametrize("k", [17, 32])
@pytest.mark.parametrize("kind", [SoftmaxSelection, GroupedSelection])
def test_case_103_more_than_sixteen_of_thirty_two(backend: AnyBackend, k: int, kind: Any) -> None:
    logits = np.random.default_rng(103).permuted(np.tile(np.arange(32.0) / 8, (5, 1)), axis=1)
    ids = choose(backend, logits.astype(np.float32), kind(k))
    assert ids.tolist() == [best(row, k) for row in logits.tolist()]
    assert all(len(set(row)) == k for row in ids.tolist())


def test_values_closer_than_float32_decide_in_float64(backend: AnyBackend) -> None:
    logits = rows([1.0, 1.0 + 2.0**-50, 1.0, 1.0 + 2.0**-51], dtype=DType.FLOAT64)
    assert choose(backend, logits, SoftmaxSelection(3)).tolist() == [[1, 3, 0]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_smallest_subnormals_are_not_zero(backend: AnyBackend, dtype: DType) -> None:
    kind = numpy_dtype(dtype)
    tiny = np.array(1, f"u{dtype.itemsize}").view(kind)
    logits = np.array([[0, -tiny, tiny, -0.0, 2 * tiny]], kind)
    assert choose(backend, logits, SoftmaxSelection(5)).tolist() == [[4, 2, 0, 3, 1]]


# --- FixedSelection ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["int8", "uint8", "int16", "int32", "int64", "uint64"])
def test_fixed_ids_come_back_as_they_are(backend: AnyBackend, kind: str) -> None:
    ids = np.array([[3, 3, 0], [1, 2, 1]], kind)
    logits = rows([9, 0, 0, 0], [NAN, INF, 0, 0])
    got = choose(backend, logits, FixedSelection(ids))
    assert got.tolist() == ids.tolist()


@pytest.mark.parametrize("bad", [-1, 4, 1 << 31, 1 << 32, (1 << 32) + 1, -(1 << 63), (1 << 63) - 1])
def test_case_090_a_bad_id_is_an_error_on_every_backend(backend: AnyBackend, bad: int) -> None:
    """1 << 32 would be expert 0 after a careless narrowing, and -1 the last expert."""
    ids = np.array([[0, 1], [2, bad]], np.int64)
    with pytest.raises(ruda.SelectionError, match=rf"\[0, 4\).*{bad} at token 1, slot 1"):
        choose(backend, np.zeros((2, 4), np.float32), FixedSelection(ids))


def test_no_tokens(backend: AnyBackend) -> None:
    empty = np.zeros((0, 6), np.float32)
    grouped = GroupedSelection(2, groups=3, selected_groups=2, group_top_two=True)
    fixed = FixedSelection(np.zeros((0, 2), np.int32))
    for selection in (SoftmaxSelection(2), grouped, fixed):
        assert choose(backend, empty, selection).shape == (0, 2)
