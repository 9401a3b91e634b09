"""Contract 2: biased scores in groups, exactly, on every backend, against plain Python sorting."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import ruda
from ruda.backend.registry import AnyBackend
from ruda.base.dtypes import DType
from ruda.stages.options import GroupedSelection, RouterScoring
from ruda.testing.layers import Array, numpy_dtype

NAN, INF = math.nan, math.inf
SCORINGS = list(RouterScoring)
DTYPES = list(DType)
WEIGHTS = ruda.RouterWeightOptions(RouterScoring.SIGMOID, renormalize=True)


def route(
    backend: AnyBackend, logits: Array, rule: GroupedSelection, bias: Array | None = None
) -> Any:
    """The state of a forward pass over experts of width one, with sigmoid weights."""
    x, cube = np.ones((logits.shape[0], 1)), np.ones((logits.shape[1], 1, 1))
    x, cube = (backend.from_numpy(array.astype(np.float32)) for array in (x, cube))
    given = None if bias is None else backend.from_numpy(bias)
    options = ruda.MoeOptions(selection=rule, weights=WEIGHTS)
    logits = backend.from_numpy(logits)
    return ruda.moe_forward(
        x, logits, cube, cube, cube, options=options, correction_bias=given, backend=backend
    )[1]


def choose(
    backend: AnyBackend, logits: Array, rule: GroupedSelection, bias: Array | None = None
) -> Any:
    """The ids it reports."""
    ids = backend.to_numpy(ruda.moe_route_indices(route(backend, logits, rule, bias)))
    assert ids.dtype.kind == "i"
    return ids


def rows(*values: list[float], dtype: DType = DType.FLOAT32) -> Array:
    return np.array(values, np.float64).astype(numpy_dtype(dtype))


def best(scores: list[float], k: int) -> list[int]:
    nan = [e for e, score in enumerate(scores) if math.isnan(score)]
    numbers = [e for e, score in enumerate(scores) if not math.isnan(score)]
    return (nan + sorted(numbers, key=lambda e: (-scores[e], e)))[:k]


def score(row: list[float], scoring: RouterScoring) -> list[float]:
    """Scores of numbers of moderate size, in float64."""
    if scoring is RouterScoring.SOFTMAX:
        top = max(row)
        e = [math.exp(x - top) for x in row]
        return [x / math.fsum(e) for x in e]
    if scoring is RouterScoring.SIGMOID:
        return [1 / (1 + math.exp(-x)) for x in row]
    return [math.sqrt(max(x, 0.0) + math.log1p(math.exp(-abs(x)))) for x in row]


def grouped_choice(row: list[float], bias: list[float], rule: GroupedSelection, wide: bool) -> Any:
    compute = np.float64 if wide else np.float32
    c = [compute(s) + compute(b) for s, b in zip(score(row, rule.scoring), bias, strict=True)]
    size = len(c) // rule.groups
    groups: list[float] = []
    for g in range(rule.groups):
        inside = [c[e] for e in range(g * size, (g + 1) * size)]
        first = best([float(s) for s in inside], 2 if rule.group_top_two else 1)
        groups.append(float(sum((inside[e] for e in first[1:]), inside[first[0]])))
    kept = best(groups, rule.selected_groups)
    candidates = [e for e in range(len(c)) if e // size in kept]
    chosen = best([float(c[e]) for e in candidates], rule.top_k)
    return [candidates[j] for j in chosen]


NINE_ONE = [math.log(p / (1 - p)) for p in (0.9, 0.1, 0.8, 0.7)]


def test_case_002_and_003_groups_by_their_best_or_by_the_sum_of_two(backend: AnyBackend) -> None:
    """Largest: 0.9 against 0.8 keeps group 0. Two largest: 1.0 against 1.5 keeps group 1."""
    by_two = GroupedSelection(1, groups=2, selected_groups=1, group_top_two=True)
    by_one = GroupedSelection(1, groups=2, selected_groups=1)
    for bias in (None, np.zeros(4, np.float32)):
        assert choose(backend, rows(NINE_ONE), by_two, bias).tolist() == [[2]]
        assert choose(backend, rows(NINE_ONE), by_one, bias).tolist() == [[0]]


def test_case_007_a_sigmoid_router_without_groups(backend: AnyBackend) -> None:
    rng = np.random.default_rng(7)
    logits, bias = rng.standard_normal((9, 8)), rng.standard_normal(8).astype(np.float32)
    logits = logits.astype(np.float32)
    rule, wide = GroupedSelection(2), logits.astype(np.float64).tolist()
    ids = choose(backend, logits, rule, bias)
    assert np.array_equal(ids, choose(backend, logits, GroupedSelection(2, groups=1), bias))
    assert ids.tolist() == [grouped_choice(row, bias.tolist(), rule, False) for row in wide]


def test_case_009_the_bias_chooses_and_nothing_else(backend: AnyBackend) -> None:
    logits, bias = np.zeros((1, 4), np.float32), np.array([5, 4, 0, 0], np.float32)
    state = route(backend, logits, GroupedSelection(2), bias)
    assert backend.to_numpy(ruda.moe_route_indices(state)).tolist() == [[0, 1]]
    assert backend.to_numpy(state.experts.weights).tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize("top_two", [False, True])
def test_negative_scores_never_lose_to_experts_outside_the_kept_groups(
    backend: AnyBackend, top_two: bool
) -> None:
    """A fill of zero for what is masked out would win against any of these."""
    bias = np.array([-9, -9, -9, -9, -5, -6, -7, -8, -9, -9, -9, -9], np.float32)
    rule = GroupedSelection(4, groups=3, selected_groups=1, group_top_two=top_two)
    assert choose(backend, np.zeros((1, 12), np.float32), rule, bias).tolist() == [[4, 5, 6, 7]]
    masked = np.full(12, -INF, np.float32)
    assert choose(backend, np.zeros((1, 12), np.float32), rule, masked).tolist() == [[0, 1, 2, 3]]


def test_ties_of_groups_and_of_experts_in_them(backend: AnyBackend) -> None:
    """First: three groups tie for two places. Then: the better group stands second, experts tie."""
    tied, later = rows([0, 0, 2, 1, 1, 2, 2, 1]), rows([1, 3, 0, 0, 4, 3])
    assert choose(backend, tied, GroupedSelection(3, groups=4, selected_groups=2)).tolist() == [
        [2, 5, 3]
    ]
    assert choose(backend, later, GroupedSelection(3, groups=3, selected_groups=2)).tolist() == [
        [4, 1, 5]
    ]


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT64], ids=str)
@pytest.mark.parametrize("scoring", SCORINGS, ids=str)
def test_equal_logits_tie_wherever_they_stand(
    backend: AnyBackend, dtype: DType, scoring: RouterScoring
) -> None:
    """A vector loop and its scalar tail must not disagree about exp."""
    values = np.random.default_rng(0).standard_normal((200, 1)) * 3
    for experts in (7, 13, 257):
        logits = np.repeat(values, experts, axis=1).astype(numpy_dtype(dtype))
        ids = choose(backend, logits, GroupedSelection(experts, scoring))
        assert (ids == np.arange(experts)).all()


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32], ids=str)
def test_the_bias_is_never_narrowed(backend: AnyBackend, dtype: DType) -> None:
    """Steps of 0.001 at 1 vanish in bfloat16."""
    bias = (1 + np.array([3, 0, 7, 1, 6, 2, 5, 4]) / 1000).astype(np.float32)
    ids = choose(backend, rows([0.0] * 8, dtype=dtype), GroupedSelection(8), bias)
    assert ids.tolist() == [[2, 4, 6, 7, 0, 5, 3, 1]]


def test_a_float64_bias_decides_in_float64(backend: AnyBackend) -> None:
    bias = np.array([0, 3, 1, 2]) * 2.0**-45
    logits = rows([0.0] * 4, dtype=DType.FLOAT64)
    assert choose(backend, logits, GroupedSelection(4), bias).tolist() == [[1, 3, 2, 0]]


def test_scores_are_rounded_once_to_the_compute_type(backend: AnyBackend) -> None:
    """In float32 sigmoid is 1 from about 17.33 on: 20 and 30 tie, 17 does not."""
    row = [17.0, 20.0, 30.0, 1000.0, -1000.0, -INF]
    for dtype in (DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32):
        ids = choose(backend, rows(row, dtype=dtype), GroupedSelection(6))
        assert ids.tolist() == [[1, 2, 3, 0, 4, 5]]
    ids = choose(backend, rows(row, dtype=DType.FLOAT64), GroupedSelection(6))
    assert ids.tolist() == [[3, 2, 1, 0, 4, 5]]


LIFTED = GroupedSelection(2, groups=3, selected_groups=1)
LIFTED_BY_TWO = GroupedSelection(2, groups=3, selected_groups=1, group_top_two=True)
UNDEFINED = GroupedSelection(3, RouterScoring.SOFTMAX, 4, 2, group_top_two=True)
ROOT = GroupedSelection(2, RouterScoring.SQRT_SOFTPLUS)


@pytest.mark.parametrize(
    ("rule", "bias", "row", "expected"),
    [
        pytest.param(GroupedSelection(2), None, [1, NAN, 3, 0], [1, 2], id="case 066"),
        pytest.param(ROOT, None, [1, NAN, 3, 0], [1, 2], id="case 066, sqrt-softplus"),
        pytest.param(GroupedSelection(2), None, [NAN] * 4, [0, 1], id="all NaN"),
        pytest.param(GroupedSelection(3), None, [NAN, 1, INF, NAN], [0, 3, 2], id="two NaN"),
        pytest.param(GroupedSelection(2), [0, 0, NAN, 0.25], [0, 9, 0, 0], [2, 1], id="NaN bias"),
        pytest.param(LIFTED, None, [9, 8, 0, NAN, 5, 5], [3, 2], id="NaN lifts its group"),
        pytest.param(LIFTED_BY_TWO, None, [9, 8, 0, NAN, 5, 5], [3, 2], id="NaN in a sum"),
        pytest.param(UNDEFINED, range(8), [0, 1, 2, NAN, 4, 5, 6, 7], [0, 1, 2], id="softmax NaN"),
        pytest.param(UNDEFINED, range(8), [-INF] * 8, [0, 1, 2], id="softmax of nothing"),
        pytest.param(UNDEFINED, range(8), [0.0] * 7 + [INF], [0, 1, 2], id="softmax +inf"),
    ],
)
def test_what_is_not_a_number_ranks_first(
    backend: AnyBackend, rule: GroupedSelection, bias: Any, row: list[float], expected: list[int]
) -> None:
    given = None if bias is None else np.array(bias, np.float32)
    clean = [0.0] * len(row)
    ids = choose(backend, rows(row, clean, row), rule, given).tolist()
    assert ids[0] == ids[2] == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scoring", SCORINGS, ids=str)
@pytest.mark.parametrize(
    ("experts", "shape"),
    [
        (8, (2, 1, 1, False)),
        (8, (8, 1, 1, False)),
        (16, (4, 4, 2, True)),
        (16, (3, 4, 2, False)),
        (16, (16, 4, 4, True)),
        (257, (20, 1, 1, False)),
        (256, (8, 8, 4, True)),
        (6, (2, 6, 3, False)),
        (1, (1, 1, 1, False)),
    ],
)
def test_grouped_selection_against_plain_python(
    backend: AnyBackend,
    dtype: DType,
    scoring: RouterScoring,
    experts: int,
    shape: tuple[int, int, int, bool],
) -> None:
    """Half the rows are small integers, so that experts and groups tie."""
    k, groups, kept, top_two = shape
    rng = np.random.default_rng(experts + k)
    logits = rng.standard_normal((8, experts))
    logits[::2] = rng.integers(-2, 3, (4, experts))
    stored = logits.astype(numpy_dtype(dtype))
    bias = (rng.integers(-8, 9, experts) / 8).astype(numpy_dtype(dtype.compute))
    rule = GroupedSelection(k, scoring, groups, kept, top_two)
    wide = dtype is DType.FLOAT64
    for given in (bias, None):
        ids = choose(backend, stored, rule, given)
        used = [0.0] * experts if given is None else given.tolist()
        for token, row in enumerate(stored.astype(np.float64).tolist()):
            assert ids[token].tolist() == grouped_choice(row, used, rule, wide)
