"""The reference against hand-computed cases, central differences and its own arithmetic."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ruda.base.dtypes import DType
from ruda.base.errors import DTypeError, SelectionError
from ruda.stages.options import (
    CombineAccumulation,
    FixedSelection,
    GroupedSelection,
    Intermediates,
    MoeOptions,
    RouterScoring,
    RouterWeightOptions,
    Selection,
    SoftmaxSelection,
)
from ruda.testing.layers import Array, Layer, dtype_of, numpy_dtype, random_layer
from ruda.testing.reference import (
    Arithmetic,
    reference_layer,
    reference_selection,
    reference_weights,
    reference_weights_backward,
)
from ruda.testing.tolerance import compare

SOFTMAX, SIGMOID, SQRT_SOFTPLUS = RouterScoring
NAN, INF = math.nan, math.inf
EXACT = Arithmetic.exact()
ROUTER = Arithmetic.router_only(DType.FLOAT32)
DTYPES = list(DType)


@pytest.fixture(autouse=True)
def _no_warning_leaks() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def row(*values: float, dtype: Any = np.float32) -> Array:
    return np.array([values], dtype)


def chosen(logits: Array, selection: Selection, bias: Array | None = None) -> list[int]:
    ids: list[int] = reference_selection(logits, bias, selection)[0].tolist()
    return ids


def weights_of(logits: Array, ids: list[int], options: RouterWeightOptions) -> list[float]:
    result: list[float] = reference_weights(logits, np.array([ids]), options, EXACT)[0].tolist()
    return result


def dlogits_of(
    logits: Array,
    ids: list[int],
    dweights: list[float],
    options: RouterWeightOptions,
    arithmetic: Arithmetic = EXACT,
) -> list[float]:
    result: list[float] = reference_weights_backward(
        logits, np.array([ids]), np.array([dweights]), options, arithmetic
    )[0].tolist()
    return result


def moe_options(
    selection: Selection | None = None,
    weights: RouterWeightOptions | None = None,
    combine: CombineAccumulation = CombineAccumulation.COMPUTE,
    intermediates: Intermediates = Intermediates.STORAGE,
) -> MoeOptions:
    return MoeOptions(
        selection=selection or SoftmaxSelection(top_k=2),
        weights=weights or RouterWeightOptions(SOFTMAX, renormalize=True),
        combine=combine,
        intermediates=intermediates,
    )


def small_layer(options: MoeOptions | None = None, **changes: Any) -> Layer:
    settings: dict[str, Any] = {
        "tokens": 4, "hidden": 3, "intermediate": 5, "experts": 4, "dtype": DType.FLOAT64, "seed": 0
    }  # fmt: skip
    return random_layer(options=options or moe_options(), **(settings | changes))


def test_case_002_groups_by_their_best_two() -> None:
    logits = row(*(math.log(p / (1 - p)) for p in (0.9, 0.1, 0.8, 0.7)))
    best_two = GroupedSelection(top_k=1, groups=2, group_top_two=True)
    assert chosen(logits, best_two) == [2]
    assert chosen(logits, GroupedSelection(top_k=1, groups=2)) == [0]


def test_case_009_bias_chooses_but_never_weighs() -> None:
    logits, bias = row(0, 0, 0, 0), np.array([5, 4, 0, 0], np.float32)
    ids = chosen(logits, GroupedSelection(top_k=2), bias)
    assert ids == [0, 1]
    assert weights_of(logits, ids, RouterWeightOptions(SIGMOID, renormalize=True)) == [0.5, 0.5]


@pytest.mark.parametrize(
    ("scoring", "renormalize", "expected"),
    [
        (SIGMOID, True, [0.546449, 0.453551]),
        (SOFTMAX, False, [0.643914, 0.236883]),
        (SOFTMAX, True, [0.731059, 0.268941]),
    ],
    ids=["case_019", "case_020", "case_021"],
)
def test_weights_by_hand(scoring: RouterScoring, renormalize: bool, expected: list[float]) -> None:
    logits = row(2, 1, 0, -1)
    options = RouterWeightOptions(scoring, renormalize)
    assert weights_of(logits, [0, 1], options) == pytest.approx(expected, abs=1e-6)
    scaled = dataclasses.replace(options, scale=2.5)
    assert weights_of(logits, [0, 1], scaled) == pytest.approx(
        [2.5 * w for w in expected], abs=2e-6
    )


def test_case_021_softmax_before_with_norm_has_the_gradient_of_softmax_after() -> None:
    before = RouterWeightOptions(SOFTMAX, renormalize=True)
    full = dlogits_of(row(2, 1, 0, -1, dtype=np.float64), [0, 1], [0.3, -0.7], before)
    after = dlogits_of(row(2, 1, dtype=np.float64), [0, 1], [0.3, -0.7], before)
    assert full == pytest.approx([*after, 0, 0], abs=1e-15)
    assert full[2:] == [0, 0]


def test_sqrt_softplus_by_hand() -> None:
    options = RouterWeightOptions(SQRT_SOFTPLUS, renormalize=False)
    assert weights_of(row(0, 3), [0, 1], options) == pytest.approx(
        [math.sqrt(math.log(2)), math.sqrt(math.log1p(math.exp(3)))]
    )


@pytest.mark.parametrize(
    ("logits", "top_k", "expected"),
    [
        pytest.param([3, 2, 3, 2, 1, 1], 2, [0, 2], id="case_053"),
        pytest.param([0.2, 0.2, 0.4, 0.5], 3, [3, 2, 0], id="case_058"),
        pytest.param([1, NAN, 3, 0], 2, [0, 1], id="case_066"),
        pytest.param([NAN] * 4, 2, [0, 1], id="case_067"),
        pytest.param([NAN, -INF, INF, 0], 3, [0, 1, 2], id="case_068"),
        pytest.param([-INF, -1, -INF, -9], 3, [1, 3, 0], id="mask"),
        pytest.param([-INF] * 3, 2, [0, 1], id="all masked"),
        pytest.param([0.0, -0.0, 0.0], 2, [0, 1], id="signed zeros"),
    ],
)
def test_softmax_selection(logits: list[float], top_k: int, expected: list[int]) -> None:
    for dtype in DTYPES:
        assert chosen(row(*logits, dtype=numpy_dtype(dtype)), SoftmaxSelection(top_k)) == expected


def test_case_066_nan_ranks_first_in_grouped_selection() -> None:
    assert chosen(row(1, NAN, 3, 0), GroupedSelection(top_k=2)) == [1, 2]
    options = RouterWeightOptions(SIGMOID, renormalize=False)
    weights = weights_of(row(1, NAN, 3, 0), [1, 2], options)
    assert math.isnan(weights[0])
    assert weights[1] == pytest.approx(0.952574, abs=1e-6)


def test_groups_outside_the_kept_ones_are_never_chosen() -> None:
    bias = np.array([-9, -8, -1, -7, -2, -2], np.float32)
    selection = GroupedSelection(top_k=2, groups=3)
    assert chosen(row(*[0] * 6), selection, bias) == [2, 3]
    nan_bias = np.array([-9, NAN, -1, -7, -2, -2], np.float32)
    assert chosen(row(*[0] * 6), selection, nan_bias) == [1, 0]
    tied = GroupedSelection(top_k=3, groups=3, selected_groups=2)
    assert chosen(row(*[0] * 6), tied) == [0, 1, 2]


def test_fixed_selection_checks_its_ids_before_narrowing() -> None:
    ids = np.array([[1, 1], [3, 0]], np.uint8)
    np.testing.assert_array_equal(
        reference_selection(np.zeros((2, 4)), None, FixedSelection(ids)), ids
    )
    for bad in (np.array([[0, -1]]), np.array([[0, 4]]), np.array([[0, 2**64 - 1]], np.uint64)):
        with pytest.raises(SelectionError, match=r"expert_ids\[0, 1\]"):
            reference_selection(np.zeros((1, 4)), None, FixedSelection(bad))


@pytest.mark.parametrize(
    "logits", [[1, NAN, 0], [1, INF, 0], [-INF, -INF, -INF]], ids=["nan", "inf", "masked"]
)
@pytest.mark.parametrize("renormalize", [False, True])
def test_an_undefined_softmax_is_nan_throughout(logits: list[float], renormalize: bool) -> None:
    options = RouterWeightOptions(SOFTMAX, renormalize, epsilon=1e-20)
    assert np.isnan(weights_of(row(*logits), [0, 2], options)).all()
    assert np.isnan(dlogits_of(row(*logits), [0, 2], [1, 1], options)).all()


@pytest.mark.parametrize("scoring", RouterScoring)
def test_an_id_outside_makes_the_row_nan(scoring: RouterScoring) -> None:
    options = RouterWeightOptions(scoring, renormalize=False)
    for bad in (-1, 3):
        assert np.isnan(weights_of(row(1, 2, 3), [0, bad], options)).all()
        assert np.isnan(dlogits_of(row(1, 2, 3), [0, bad], [1, 1], options)).all()


def test_a_zero_denominator_is_nan_and_epsilon_mends_it() -> None:
    logits = row(-INF, -INF, 1)
    for scoring in RouterScoring:
        options = RouterWeightOptions(scoring, renormalize=True)
        assert np.isnan(weights_of(logits, [0, 1], options)).all()
        assert np.isnan(dlogits_of(logits, [0, 1], [1, 2], options)).all()
        mended = dataclasses.replace(options, epsilon=1e-20)
        assert weights_of(logits, [0, 1], mended) == [0, 0]
        assert dlogits_of(logits, [0, 1], [1, 2], mended) == [0, 0, 0]


@pytest.mark.parametrize("scoring", [SIGMOID, SQRT_SOFTPLUS])
def test_pointwise_scores_keep_nan_where_it_belongs(scoring: RouterScoring) -> None:
    options = RouterWeightOptions(scoring, renormalize=False)
    grads = dlogits_of(row(NAN, 1, NAN), [1, 2], [1, 1], options)
    assert grads[0] == 0
    assert math.isfinite(grads[1])
    assert math.isnan(grads[2])
    renormalized = dataclasses.replace(options, renormalize=True)
    assert np.isnan(dlogits_of(row(NAN, 1, NAN), [1, 2], [1, 1], renormalized)).all()


def test_a_masked_logit_gets_exactly_zero_even_from_a_non_finite_gradient() -> None:
    for scoring, renormalize in itertools.product(RouterScoring, (False, True)):
        options = RouterWeightOptions(scoring, renormalize)
        grads = dlogits_of(row(-INF, 1, 2), [0, 1], [INF, NAN], options)
        assert grads[0] == 0
        assert math.isnan(grads[1])


def test_case_025_one_expert_renormalized_gets_exactly_zero() -> None:
    for scoring, seed in itertools.product(RouterScoring, range(8)):
        options = RouterWeightOptions(scoring, renormalize=True, scale=2.5)
        logits = np.random.default_rng(seed).standard_normal((1, 4)).astype(np.float32)
        assert dlogits_of(logits, [2], [0.3], options, ROUTER) == [0] * 4


@pytest.mark.parametrize("scoring", RouterScoring)
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("epsilon", [0.0, 0.5])
@pytest.mark.parametrize("ids", [[0, 3], [2, 2], [1, 4, 1]])
def test_weights_backward_against_central_differences(
    scoring: RouterScoring, renormalize: bool, epsilon: float, ids: list[int]
) -> None:
    options = RouterWeightOptions(scoring, renormalize, scale=2.5, epsilon=epsilon)
    rng = np.random.default_rng(7)
    logits, dweights = rng.standard_normal((1, 5)), rng.standard_normal((1, len(ids)))
    ids_Tk = np.array([ids])

    def loss() -> float:
        return float((reference_weights(logits, ids_Tk, options, EXACT) * dweights).sum())

    got = reference_weights_backward(logits, ids_Tk, dweights, options, EXACT)
    np.testing.assert_allclose(got, differences(logits, loss), atol=1e-8)


@pytest.mark.parametrize("scoring", RouterScoring)
@pytest.mark.parametrize("renormalize", [False, True])
def test_layer_against_central_differences(scoring: RouterScoring, renormalize: bool) -> None:
    layer = small_layer(
        moe_options(weights=RouterWeightOptions(scoring, renormalize, 2.5, epsilon=0.1))
    )
    result = reference_layer(layer, EXACT)
    for name in ("input", "logits", "gate", "up", "down"):
        expected = differences(
            getattr(layer, name),
            lambda: float(
                (reference_layer(layer, EXACT, result.expert_ids).output * layer.grad_output).sum()
            ),
            sample=9,
        )
        got = getattr(result.grads, name)
        assert np.abs(got).max() > 1e-3
        mask = ~np.isnan(expected)
        np.testing.assert_allclose(got[mask], expected[mask], atol=1e-7, err_msg=name)


def differences(operand: Array, loss: Callable[[], float], sample: int | None = None) -> Array:
    """Central differences of the loss in some elements (all by default); NaN in the others."""
    result = np.full(operand.shape, np.nan)
    flat, step = operand.reshape(-1), 1e-5
    positions = np.arange(flat.size)
    if sample is not None:
        positions = np.random.default_rng(1).permutation(positions)[:sample]
    for i in positions:
        kept = flat[i]
        flat[i] = kept + step
        above = loss()
        flat[i] = kept - step
        below = loss()
        flat[i] = kept
        result.reshape(-1)[i] = (above - below) / (2 * step)
    return result


@pytest.mark.parametrize(
    ("combine", "expected"),
    [(CombineAccumulation.COMPUTE, 264.0), (CombineAccumulation.STORAGE, 256.0)],
)
def test_case_075_small_contributions(combine: CombineAccumulation, expected: float) -> None:
    options = moe_options(
        GroupedSelection(top_k=8), RouterWeightOptions(SIGMOID, renormalize=False), combine
    )
    bf16 = numpy_dtype(DType.BFLOAT16)
    layer = Layer(
        input=np.ones((1, 1), bf16),
        logits=np.full((1, 8), 40, bf16),
        gate=np.ones((8, 1, 1), bf16),
        up=np.ones((8, 1, 1), bf16),
        down=(1.367879 * np.array([256, 1, 1, 1, 1, 1, 1, 1.0])).astype(bf16).reshape(8, 1, 1),
        grad_output=np.ones((1, 1), bf16),
        options=options,
    )
    assert float(reference_layer(layer, Arithmetic.same_type(layer)).output[0, 0]) == expected


def test_case_074_intermediates_in_compute_do_not_overflow() -> None:
    for intermediates in Intermediates:
        layer = small_layer(
            moe_options(intermediates=intermediates), dtype=DType.FLOAT16, hidden=64
        )
        layer.grad_output[:] = 2000
        layer.down[:] = 1
        grads = reference_layer(layer, Arithmetic.same_type(layer)).grads
        stays_finite = intermediates is Intermediates.COMPUTE
        for name in ("gate", "up", "down"):
            if name != "down":
                assert np.isfinite(getattr(grads, name)).all() == stays_finite
            assert getattr(grads, name).dtype == np.float32


@pytest.mark.parametrize("intermediates", Intermediates)
@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
def test_roundings_are_where_the_contract_marks_them(
    intermediates: Intermediates, dtype: DType
) -> None:
    layer = small_layer(
        moe_options(intermediates=intermediates), tokens=1, hidden=1, intermediate=1, dtype=dtype
    )
    result = reference_layer(layer, Arithmetic.same_type(layer))
    single = np.float32

    def final(value: Any) -> Any:
        return single(np.asarray(value).astype(numpy_dtype(dtype)))

    marked = final if intermediates is Intermediates.STORAGE else single
    x, dout = single(layer.input[0, 0]), single(layer.grad_output[0, 0])
    parts: list[Any] = []
    for e, w in zip(result.expert_ids[0], result.weights[0], strict=True):
        gate, up, down = (single(z[e, 0, 0]) for z in (layer.gate, layer.up, layer.down))
        g, u = marked(x * gate), marked(x * up)
        sig = single(1) / (1 + np.exp(-g)) if g >= 0 else np.exp(g) / (1 + np.exp(g))
        s = marked(g * sig)
        a = marked(s * u)
        y = marked(a * down)
        b = marked(dout * down)
        da, dy = marked(w * b), marked(w * dout)
        dg = marked(marked(da * u) * sig * (1 + g * (1 - sig)))
        du = marked(da * s)
        dx = marked(marked(dg * gate) + marked(du * up))
        parts.append((e, w * y, dx))
        assert result.grads.weights[0].tolist().count(b * a) == 1
        assert result.grads.gate[e, 0, 0] == dg * x
        assert result.grads.up[e, 0, 0] == du * x
        assert result.grads.down[e, 0, 0] == dy * a
    assert result.grads.input[0, 0] == final(parts[0][2] + parts[1][2])
    assert result.output[0, 0] == final(parts[0][1] + parts[1][1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("logits_dtype", DTYPES)
def test_result_types_and_shapes(dtype: DType, logits_dtype: DType) -> None:
    layer = small_layer(dtype=dtype, logits_dtype=logits_dtype, tokens=5)
    plain = reference_layer(layer, Arithmetic.same_type(layer))
    exact = reference_layer(layer, EXACT)
    assert dtype_of(plain.output) == dtype_of(plain.grads.input) == dtype
    assert dtype_of(plain.grads.logits) == logits_dtype
    assert dtype_of(plain.weights) == dtype_of(plain.grads.weights) == logits_dtype.compute
    for name in ("gate", "up", "down"):
        assert dtype_of(getattr(plain.grads, name)) == dtype.compute
        assert getattr(plain.grads, name).shape == getattr(layer, name).shape
    for name in ("input", "logits", "weights", "gate", "up", "down"):
        assert getattr(exact.grads, name).dtype == np.float64
        np.testing.assert_allclose(
            getattr(plain.grads, name).astype(np.float64), getattr(exact.grads, name), atol=0.1
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_results_pass_the_tolerance_rule(dtype: DType) -> None:
    layer = small_layer(dtype=dtype)
    plain = reference_layer(layer, Arithmetic.same_type(layer))
    exact = reference_layer(layer, EXACT)
    assert compare("output", plain.output, exact.output, plain.output, dtype).passed


def test_no_tokens_and_empty_experts() -> None:
    empty = reference_layer(small_layer(tokens=0), EXACT)
    assert empty.output.shape == empty.grads.input.shape == (0, 3)
    assert empty.expert_ids.shape == empty.weights.shape == (0, 2)
    assert not any(getattr(empty.grads, name).any() for name in ("gate", "up", "down"))

    fixed = FixedSelection(np.array([[0, 2]] * 4))
    grads = reference_layer(small_layer(moe_options(fixed)), EXACT).grads
    for name in ("gate", "up", "down"):
        assert getattr(grads, name)[[0, 2]].all()
        assert not getattr(grads, name)[[1, 3]].any()


def test_a_bad_token_stays_alone() -> None:
    layer = small_layer()
    before = reference_layer(layer, EXACT)
    layer.logits[1, 0] = np.nan
    after = reference_layer(layer, EXACT)
    for first, second in (
        (before.output, after.output),
        (before.grads.input, after.grads.input),
        (before.grads.logits, after.grads.logits),
    ):
        np.testing.assert_array_equal(first[[0, 2, 3]], second[[0, 2, 3]])
        assert np.isnan(second[1]).all()


def test_ids_given_outside_make_the_token_nan() -> None:
    layer = small_layer()
    result = reference_layer(layer, EXACT, np.array([[0, 1], [-1, 4], [2, 3], [0, 3]]))
    for array in (result.output, result.weights, result.grads.input, result.grads.logits):
        assert np.isnan(array).all(axis=1).tolist() == [False, True, False, False]
    assert np.isfinite(result.grads.gate).all()
    with pytest.raises(SelectionError):
        reference_layer(small_layer(moe_options(FixedSelection(np.full((4, 2), -1)))), EXACT)


def test_layer_is_made_of_its_seed() -> None:
    first, second = (small_layer(dtype=DType.BFLOAT16, bias=True, seed=3) for _ in range(2))
    assert first.correction_bias is not None
    assert first.correction_bias.dtype == np.float32
    assert first.gate.tobytes() == second.gate.tobytes()
    assert (first.tokens, first.hidden, first.intermediate) == (4, 3, 5)
    assert (first.experts, first.top_k) == (4, 2)
    assert small_layer(moe_options(FixedSelection(np.zeros((4, 3), int)))).top_k == 3
    with pytest.raises(DTypeError):
        dtype_of(np.zeros(1, np.int32))


def test_it_is_fast_enough() -> None:
    options = moe_options(GroupedSelection(top_k=20))
    layer = random_layer(
        tokens=129, hidden=8, intermediate=8, experts=257, options=options,
        dtype=DType.BFLOAT16, bias=True, seed=0,
    )  # fmt: skip
    for arithmetic in (Arithmetic.same_type(layer), EXACT):
        start = time.process_time()
        reference_layer(layer, arithmetic)
        assert time.process_time() - start < 3.0
