"""Contract 3: routing weights and their vector-Jacobian product, row by row of its table.

Expected: a loop over slots in Python floats; and central differences of the weights themselves.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import ruda
from ruda.backend.registry import AnyBackend
from ruda.base.dtypes import DType
from ruda.stages.options import RouterScoring, RouterWeightOptions
from ruda.testing.layers import Array, numpy_dtype

NAN, INF = math.nan, math.inf
DTYPES = list(DType)
SOFTMAX, SIGMOID, ROOT = SCORINGS = list(RouterScoring)
RULES = [
    RouterWeightOptions(scoring, renormalize, scale, epsilon)
    for scoring in SCORINGS
    for renormalize, scale, epsilon in [
        (False, 1.0, 0.0),
        (False, 2.5, 0.0),
        (True, 1.0, 0.0),
        (True, 2.5, 0.0),
        (True, 1.0, 0.25),  # large enough to be seen
        (True, 2.5, 1e-20),
    ]
]
STEP = {DType.FLOAT16: 2.0**-11, DType.BFLOAT16: 2.0**-8, DType.FLOAT32: 2.0**-24}
STEP[DType.FLOAT64] = 2.0**-53
SMALLEST = {dtype: 2.0**-24 if dtype is DType.FLOAT16 else 0.0 for dtype in DTYPES}


def named(rule: Any) -> str:
    kind = "renormalized" if rule.renormalize else "plain"
    return f"{rule.scoring.value}-{kind}-{rule.scale:g}-{rule.epsilon:g}"


def weights(backend: AnyBackend, x: Array, ids: Any, rule: RouterWeightOptions) -> Array:
    logits, slots = (backend.from_numpy(np.asarray(array)) for array in (x, ids))
    w = ruda.selected_router_weights(logits, slots, rule, backend=backend)
    found: Array = backend.to_numpy(w)
    assert found.dtype == np.dtype(np.float64 if x.dtype == np.float64 else np.float32)
    return found


def gradient(backend: AnyBackend, x: Array, ids: Any, dw: Any, rule: RouterWeightOptions) -> Array:
    dw = np.asarray(dw).astype(np.float64 if x.dtype == np.float64 else np.float32)
    logits, slots, up = (backend.from_numpy(np.asarray(array)) for array in (x, ids, dw))
    dx = ruda.selected_router_weights_backward(logits, slots, up, rule, backend=backend)
    found: Array = backend.to_numpy(dx)
    assert (found.dtype, found.shape) == (x.dtype, x.shape)
    return found


def scores(x: list[float], scoring: RouterScoring) -> list[float]:
    if scoring is SOFTMAX:
        e = [math.exp(v - max(x)) for v in x]
        return [v / math.fsum(e) for v in e]
    if scoring is SIGMOID:
        return [1 / (1 + math.exp(-v)) for v in x]
    return [math.sqrt(math.log1p(math.exp(v))) for v in x]


def expected(x: list[float], ids: list[int], rule: RouterWeightOptions) -> list[float]:
    p = scores(x, rule.scoring)
    total = math.fsum(p[e] for e in ids) + rule.epsilon if rule.renormalize else 1.0
    return [rule.scale * p[e] / total for e in ids]


def expected_gradient(
    x: list[float], ids: list[int], dw: list[float], rule: RouterWeightOptions
) -> list[float]:
    """The six lines of the table in contract 3."""
    p = scores(x, rule.scoring)
    total = math.fsum(p[e] for e in ids) + rule.epsilon
    m = math.fsum(p[e] / total * d for e, d in zip(ids, dw, strict=True))
    shared = math.fsum(p[e] * d for e, d in zip(ids, dw, strict=True))
    result: list[float] = []
    for e in range(len(x)):
        mine = [d for slot, d in zip(ids, dw, strict=True) if slot == e]
        if rule.scoring is SOFTMAX and rule.renormalize:
            value = math.fsum(p[e] / total * (d - m) for d in mine)
            value -= p[e] * (rule.epsilon / total) * m
        elif rule.scoring is SOFTMAX:
            value = math.fsum(p[e] * d for d in mine) - p[e] * shared
        elif rule.scoring is SIGMOID and rule.renormalize:
            value = (1 - p[e]) * math.fsum(p[e] / total * (d - m) for d in mine)
        elif rule.scoring is SIGMOID:
            value = (1 - p[e]) * math.fsum(p[e] * d for d in mine)
        else:
            slope = (1 / (1 + math.exp(-x[e]))) / (2 * p[e])
            value = slope * math.fsum((d - m) / total if rule.renormalize else d for d in mine)
        result.append(rule.scale * value)
    return result


def operands(dtype: DType, experts: int = 9, slots: int = 4) -> tuple[Array, Array, Array]:
    """Logits, ids with repetitions, and weight gradients."""
    rng = np.random.default_rng(experts * slots)
    x = (rng.standard_normal((5, experts)) * 2).astype(numpy_dtype(dtype))
    return x, rng.integers(0, experts, (5, slots)), rng.standard_normal((5, slots))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", RULES, ids=named)
@pytest.mark.parametrize("shape", [(9, 4), (3, 3), (1, 1), (257, 20)], ids=str)
def test_the_table(
    backend: AnyBackend, rule: RouterWeightOptions, dtype: DType, shape: tuple[int, int]
) -> None:
    """Repeated ids are separate slots, and each counts in the sum."""
    x, ids, dw = operands(dtype, *shape)
    dw = dw.astype(np.float64 if dtype is DType.FLOAT64 else np.float32)
    w, dx = weights(backend, x, ids, rule), gradient(backend, x, ids, dw, rule)
    step = STEP[dtype.compute] * (8 + shape[1])
    for t in range(len(x)):
        row = x[t].astype(np.float64).tolist()
        want = np.array(expected(row, ids[t].tolist(), rule))
        assert np.abs(w[t] / want - 1).max() <= step
        want = np.array(expected_gradient(row, ids[t].tolist(), dw[t].tolist(), rule))
        # The terms of a difference may be larger than the difference: so may its error.
        total = sum(scores(row, rule.scoring)[e] for e in ids[t]) if rule.renormalize else 1.0
        size = rule.scale * np.abs(dw[t]).max() / min(total, 1.0)
        error = np.abs(dx[t].astype(np.float64) - want)
        assert (error <= step * size + STEP[dtype] * np.abs(want) + SMALLEST[dtype] / 2).all()


@pytest.mark.parametrize("rule", RULES, ids=named)
def test_central_differences(backend: AnyBackend, rule: RouterWeightOptions) -> None:
    """In float64, one logit of every row at a time, the ids held fixed, some of them twice."""
    x, ids, dw = operands(DType.FLOAT64)
    found, step = gradient(backend, x, ids, dw, rule), 1e-5
    for e in range(x.shape[1]):
        above, below = x.copy(), x.copy()
        above[:, e] += step
        below[:, e] -= step
        change = weights(backend, above, ids, rule) - weights(backend, below, ids, rule)
        slope = (change * dw).sum(1) / (2 * step)
        assert np.abs(found[:, e] - slope).max() <= 1e-8 * np.abs(found).max()


FALLING = np.array([[2.0, 1.0, 0.0, -1.0]], np.float32)


@pytest.mark.parametrize(
    ("scoring", "renormalize", "first", "second"),
    [
        pytest.param(SIGMOID, True, 0.546449, 0.453551, id="case 019"),
        pytest.param(SOFTMAX, False, 0.643914, 0.236883, id="case 020 and 021, over all experts"),
        pytest.param(SOFTMAX, True, 0.731059, 0.268941, id="case 021, renormalized"),
    ],
)
def test_case_019_020_021(
    backend: AnyBackend, scoring: RouterScoring, renormalize: bool, first: float, second: float
) -> None:
    got = weights(backend, FALLING, [[0, 1]], RouterWeightOptions(scoring, renormalize))
    assert np.abs(got - [first, second]).max() < 6e-7


def test_case_021_softmax_after_the_choice_is_renormalization(backend: AnyBackend) -> None:
    """Softmax over the chosen two alone has the gradient of the renormalized one."""
    renormalized = RouterWeightOptions(SOFTMAX, renormalize=True)
    plain = RouterWeightOptions(SOFTMAX, renormalize=False)
    dw = [[0.3, -0.7]]
    whole = gradient(backend, FALLING, [[0, 1]], dw, renormalized)
    alone = gradient(backend, FALLING[:, :2].copy(), [[0, 1]], dw, plain)
    assert np.abs(whole[:, :2] - alone).max() < 1e-7
    assert (whole[:, 2:] == 0).all()


def test_case_017_the_scale_is_applied_once(backend: AnyBackend) -> None:
    """Two experts giving 1 and 3, half each, times 2.5."""
    rule = RouterWeightOptions(SOFTMAX, renormalize=True, scale=2.5)
    options = ruda.MoeOptions(selection=ruda.SoftmaxSelection(2), weights=rule)
    down = np.array([1.0, 3.0]).reshape(2, 1, 1) * (1 + math.exp(-1))
    shapes = np.ones((1, 1)), np.zeros((1, 2)), np.ones((2, 1, 1))
    x, logits, cube, down = (backend.from_numpy(array) for array in (*shapes, down))
    y, state = ruda.moe_forward(x, logits, cube, cube, down, options=options, backend=backend)
    assert float(backend.to_numpy(y)[0, 0]) == pytest.approx(2.5 * (0.5 + 1.5), rel=1e-14)
    dlogits = backend.to_numpy(ruda.moe_backward(state, x).logits)
    assert dlogits.tolist() == [pytest.approx([-1.25, 1.25], rel=1e-14)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scoring", SCORINGS, ids=str)
def test_experts_nobody_chose_get_exactly_zero(
    backend: AnyBackend, scoring: RouterScoring, dtype: DType
) -> None:
    """With renormalization and epsilon 0; for pointwise scores always."""
    x, ids, dw = operands(dtype)
    chosen = np.zeros(x.shape, bool)
    np.put_along_axis(chosen, ids, np.True_, axis=1)
    for renormalize in (True, False):
        dx = gradient(backend, x, ids, dw, RouterWeightOptions(scoring, renormalize, 2.5))
        if scoring is SOFTMAX and not renormalize:
            assert (dx != 0).all()
        else:
            assert (dx[~chosen] == 0).all()
            assert (dx[chosen] != 0).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scoring", SCORINGS, ids=str)
def test_case_025_one_renormalized_slot_has_no_gradient(
    backend: AnyBackend, scoring: RouterScoring, dtype: DType
) -> None:
    """Its weight is the scale to the bit, and no rounding noise reaches the router."""
    rng = np.random.default_rng(25)
    x = (rng.standard_normal((16, 4)) * 5).astype(numpy_dtype(dtype))
    ids, dw = rng.integers(0, 4, (16, 1)), rng.standard_normal((16, 1)) * 1e3
    rule = RouterWeightOptions(scoring, renormalize=True, scale=2.5)
    assert (weights(backend, x, ids, rule) == 2.5).all()
    assert (gradient(backend, x, ids, dw, rule) == 0).all()


@pytest.mark.parametrize("rule", RULES, ids=named)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masked_logits_get_exactly_zero(
    backend: AnyBackend, rule: RouterWeightOptions, dtype: DType
) -> None:
    """-inf, chosen or not, and what underflows to a score of 0 likewise; the others are as ever."""
    deep = -60000.0 if dtype is DType.FLOAT16 else -1e5
    x = np.array([[-INF, 1, deep, 0.5, -INF, -2]], numpy_dtype(dtype))
    ids, dw = [[1, 0, 3, 2]], [[0.5, -3.0, 1.25, 7.0]]
    w, dx = weights(backend, x, ids, rule), gradient(backend, x, ids, dw, rule)
    assert (w[0, [1, 3]] == 0).all()
    assert (w[0, [0, 2]] > 0).all()
    assert (dx[0, [0, 2, 4]] == 0).all()
    bare = gradient(backend, x[:, [1, 3, 5]], [[0, 1]], [[0.5, 1.25]], rule)
    assert np.abs(dx[0, [1, 3, 5]] - bare[0]).astype(np.float64).max() <= 4 * STEP[dtype]


def rows_around(bad: list[float], dtype: DType) -> Array:
    return np.array([[0.5, -1, 2, 0], bad, [0.5, -1, 2, 0]], np.float64).astype(numpy_dtype(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", RULES, ids=named)
def test_an_undefined_row_is_nan_and_no_other(
    backend: AnyBackend, rule: RouterWeightOptions, dtype: DType
) -> None:
    ids, dw = [[0, 2], [0, 3], [0, 2]], [[1.0, -2.0]] * 3
    clean = rows_around([0.5, -1.0, 2.0, 0.0], dtype)
    want_w, want_dx = weights(backend, clean, ids, rule), gradient(backend, clean, ids, dw, rule)
    for bad in ([1, NAN, 0, 0], [0, 0, INF, 0], [-INF] * 4, [NAN] * 4):
        x = rows_around(bad, dtype)
        w, dx = weights(backend, x, ids, rule), gradient(backend, x, ids, dw, rule)
        if rule.scoring is SOFTMAX:
            assert np.isnan(w[1]).all()
            assert np.isnan(dx[1]).all()
        assert np.array_equal(w[[0, 2]], want_w[[0, 2]])
        assert np.array_equal(dx[[0, 2]], want_dx[[0, 2]])


@pytest.mark.parametrize("scoring", [SIGMOID, ROOT], ids=str)
def test_a_pointwise_nan_stays_where_it_is(backend: AnyBackend, scoring: RouterScoring) -> None:
    """Not chosen, it is not seen; chosen, it is its slot's, or the renormalized row's."""
    x, dw = rows_around([1, NAN, 0, 2], DType.FLOAT32), [[1.0, -2.0]] * 3
    plain = RouterWeightOptions(scoring, renormalize=False)
    renormalized = RouterWeightOptions(scoring, renormalize=True)
    for rule in (plain, renormalized):
        unseen = [[0, 2], [0, 3], [0, 2]]
        assert np.isfinite(weights(backend, x, unseen, rule)).all()
        assert np.isfinite(gradient(backend, x, unseen, dw, rule)).all()
    seen = [[0, 2], [0, 1], [0, 2]]
    assert np.isnan(weights(backend, x, seen, plain)[1]).tolist() == [False, True]
    dx = gradient(backend, x, seen, dw, plain)
    assert np.isnan(dx[1]).tolist() == [False, True, False, False]
    assert np.isnan(weights(backend, x, seen, renormalized)[1]).all()
    assert np.isnan(gradient(backend, x, seen, dw, renormalized)[1]).all()


@pytest.mark.parametrize("scoring", SCORINGS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_zero_denominator_is_not_repaired(
    backend: AnyBackend, scoring: RouterScoring, dtype: DType
) -> None:
    """With epsilon 0 the row is NaN; any epsilon makes the weights and the gradients zero."""
    x = rows_around([-INF, 3, -INF, 1], dtype)
    ids, dw = [[0, 2], [0, 2], [1, 2]], [[1.0, -2.0]] * 3
    bare = RouterWeightOptions(scoring, renormalize=True)
    w, dx = weights(backend, x, ids, bare), gradient(backend, x, ids, dw, bare)
    assert np.isnan(w).tolist() == [[False] * 2, [True] * 2, [False] * 2]
    assert np.isnan(dx).tolist() == [[False] * 4, [True] * 4, [False] * 4]
    guarded = RouterWeightOptions(scoring, renormalize=True, epsilon=1e-20)
    assert (weights(backend, x, ids, guarded)[1] == 0).all()
    assert (gradient(backend, x, ids, dw, guarded)[1] == 0).all()


def test_epsilon_over_the_sum_does_not_underflow(backend: AnyBackend) -> None:
    """S is about 2 epsilon: the logit nobody chose gets −p·(epsilon/S)·M, small but not 0."""
    x, ids, dw = np.array([[0.0, -46.0]], np.float32), [[1]], [[1e-26]]
    rule = RouterWeightOptions(SOFTMAX, renormalize=True, epsilon=1e-20)
    want = expected_gradient([0.0, -46.0], [1], [1e-26], rule)
    assert gradient(backend, x, ids, dw, rule)[0].tolist() == pytest.approx(want, rel=1e-4, abs=0)


BAD_IDS = [(-1, "int64"), (4, "int64"), (-128, "int8"), (255, "uint8"), (1 << 32, "int64")]
BAD_IDS += [(-(1 << 63), "int64"), ((1 << 64) - 1, "uint64"), (1 << 63, "uint64"), (4, "uint16")]


@pytest.mark.parametrize(("bad", "kind"), BAD_IDS)
@pytest.mark.parametrize("rule", RULES[::2], ids=named)
def test_an_id_out_of_range_makes_its_row_nan(
    backend: AnyBackend, rule: RouterWeightOptions, bad: int, kind: str
) -> None:
    """The whole row, both ways; the neighbours to the bit as without it; nothing is raised."""
    x = rows_around([1, 2, 3, 4], DType.FLOAT32)
    good, dw = np.array([[0, 2], [1, 3], [3, 0]], kind), [[1.0, -2.0]] * 3
    ids = good.copy()
    ids[1, 1] = bad
    for got, want in (
        (weights(backend, x, ids, rule), weights(backend, x, good, rule)),
        (gradient(backend, x, ids, dw, rule), gradient(backend, x, good, dw, rule)),
    ):
        assert np.isnan(got[1]).all()
        assert np.array_equal(got[[0, 2]], want[[0, 2]])


def test_nan_in_a_weight_gradient_stays_in_its_row(backend: AnyBackend) -> None:
    x, ids = rows_around([1, 2, 3, 4], DType.FLOAT32), [[0, 2], [1, 3], [3, 0]]
    for rule in RULES:
        dx = gradient(backend, x, ids, [[1.0, 2.0], [NAN, 1.0], [1.0, -1.0]], rule)
        assert np.isnan(dx[1, 1])
        assert np.isfinite(dx[[0, 2]]).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_logits_overflow_nowhere(backend: AnyBackend, dtype: DType) -> None:
    big = 65504.0 if dtype is DType.FLOAT16 else 3e38
    x = np.array([[big, -big, 100.0, -100.0]]).astype(numpy_dtype(dtype))
    for rule in RULES:
        assert np.isfinite(weights(backend, x, [[0, 2]], rule)).all()
        dx = gradient(backend, x, [[0, 2]], [[1.0, 2.0]], rule)
        assert np.isfinite(dx.astype(np.float64)).all()


def test_no_tokens(backend: AnyBackend) -> None:
    for rule in RULES:
        x, ids = np.zeros((0, 5), np.float16), np.zeros((0, 2), np.int32)
        assert weights(backend, x, ids, rule).shape == (0, 2)
        gradient(backend, x, ids, np.zeros((0, 2)), rule)
