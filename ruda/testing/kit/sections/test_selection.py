"""Contract 2: which experts are chosen, to the bit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import ruda
from ruda.base.dtypes import DType
from ruda.stages.options import GroupedSelection, RouterScoring, Selection, SoftmaxSelection
from ruda.testing.kit.plugin import Checker
from ruda.testing.layers import Array, numpy_dtype
from ruda.testing.reference.router import reference_selection
from ruda.testing.specimens.specimen import Routing, Specimen

SECTION = "2 choosing experts"

INF, NAN = math.inf, math.nan
SIGMOID, SOFTMAX, SQRT = RouterScoring.SIGMOID, RouterScoring.SOFTMAX, RouterScoring.SQRT_SOFTPLUS


def chooses(
    checker: Checker,
    logits: Array,
    bias: Array | None,
    rule: Selection,
    expected: Array | None = None,
) -> None:
    """The rule chooses what the reference does; a failure shows one row, ready to paste."""
    backend = checker.backend
    with backend.numerics():
        ids = backend.select_experts(
            backend.from_numpy(logits), None if bias is None else backend.from_numpy(bias), rule
        )
    got = np.asarray(backend.to_numpy(ids))
    wanted = reference_selection(logits, bias, rule) if expected is None else expected
    assert got.shape == wanted.shape, f"{rule}: expected shape {wanted.shape}, got {got.shape}"
    for token in range(len(logits)):
        if not np.array_equal(got[token], wanted[token]):
            values = logits[token].astype(np.float64).tolist()
            biased = "None" if bias is None else bias.astype(np.float64).tolist()
            pytest.fail(
                f"{rule} on {logits.dtype} logits {values}, bias {biased}: "
                f"expected {wanted[token].tolist()}, got {got[token].tolist()}",
                pytrace=False,
            )


BY_HAND: list[tuple[list[float], list[float] | None, Any, list[int]]] = [
    ([3, 2, 3, 2, 1, 1], None, SoftmaxSelection(2), [0, 2]),
    ([0.2, 0.2, 0.4, 0.5], None, SoftmaxSelection(3), [3, 2, 0]),
    ([-0.0, 0.0, -0.0, 0.0], None, SoftmaxSelection(3), [0, 1, 2]),
    ([0.0, -0.0, 0.0], None, SoftmaxSelection(3), [0, 1, 2]),
    ([-INF, 1, -INF, 0], None, SoftmaxSelection(3), [1, 3, 0]),
    ([1, NAN, 3, 0], None, SoftmaxSelection(2), [0, 1]),
    ([1, INF, 3, 0], None, SoftmaxSelection(2), [0, 1]),
    ([-INF, -INF, -INF], None, SoftmaxSelection(2), [0, 1]),
    ([NAN, NAN, NAN], None, SoftmaxSelection(3), [0, 1, 2]),
    ([1, NAN, 3, 0], None, GroupedSelection(2, SIGMOID), [1, 2]),
    ([NAN, 1, NAN, 0], None, GroupedSelection(3, SIGMOID), [0, 2, 1]),
    ([INF, 1, 2, -INF], None, GroupedSelection(4, SIGMOID), [0, 2, 1, 3]),
    ([1, NAN, 3, 0], None, GroupedSelection(2, SOFTMAX), [0, 1]),
    ([0, 0, 0, 0], [5, 4, 0, 0], GroupedSelection(2, SIGMOID), [0, 1]),
    ([0, 0, 0, 0], [0, NAN, 0, 1], GroupedSelection(2, SIGMOID), [1, 3]),
    # A bias pushes every biased score below zero: what lies outside the groups is still not chosen.
    (
        [0, 0, 1, 1],
        [-9, -9, -3, -4],
        GroupedSelection(2, SIGMOID, groups=2, selected_groups=1),
        [2, 3],
    ),
    (
        [5, 4, 0, 0],
        [-9, -9, -2, -2],
        GroupedSelection(2, SIGMOID, groups=2, selected_groups=1),
        [2, 3],
    ),
    # One group has the best expert, the other the best two.
    ([2.2, -2.2, 1.4, 0.85], None, GroupedSelection(1, SIGMOID, groups=2, selected_groups=1), [0]),
    (
        [2.2, -2.2, 1.4, 0.85],
        None,
        GroupedSelection(1, SIGMOID, groups=2, selected_groups=1, group_top_two=True),
        [2],
    ),
    # Equal groups: the lower one. Kept groups in order of their score: experts still by theirs.
    ([1, 1, 1, 1], None, GroupedSelection(2, SIGMOID, groups=2, selected_groups=1), [0, 1]),
    (
        [1, 3, 0, 0, 3, 2],
        None,
        GroupedSelection(3, SIGMOID, groups=3, selected_groups=2),
        [1, 4, 5],
    ),
    (
        [0, 0, 9, 9, 0, 0, 9, 9],
        None,
        GroupedSelection(4, SQRT, groups=4, selected_groups=2),
        [2, 3, 6, 7],
    ),
    # Saturated sigmoids tie in every type, whatever the logits.
    ([60, 90, 80], None, GroupedSelection(2, SIGMOID), [0, 1]),
]


@pytest.mark.parametrize("case", range(len(BY_HAND)))
def test_by_hand(checker: Checker, case: int) -> None:
    logits, bias, rule, ids = BY_HAND[case]
    row = np.array([logits, logits], np.float32)
    biased = None if bias is None else np.array(bias, np.float32)
    chooses(checker, row, biased, rule, np.array([ids, ids]))


def _rules(experts: int) -> list[Selection]:
    most = min(experts, 20)
    rules: list[Selection] = [SoftmaxSelection(k) for k in {1, (most + 1) // 2, most}]
    for scoring in RouterScoring:
        rules.append(GroupedSelection(most, scoring))
        if experts % 4 == 0:
            size = experts // 4
            rules.append(GroupedSelection(min(most, size), scoring, groups=4, selected_groups=1))
            rules.append(
                GroupedSelection(
                    min(most, 2 * size),
                    scoring,
                    groups=4,
                    selected_groups=2,
                    group_top_two=size > 1,
                )
            )
    return rules


@pytest.mark.parametrize("experts", [1, 4, 8, 32, 256, 257, 384])
@pytest.mark.parametrize("dtype", list(DType))
def test_like_the_reference(checker: Checker, dtype: DType, experts: int) -> None:
    """Past 256 experts some libraries sort 16-bit numbers another way."""
    checker.needs(dtype)
    precise = DType.FLOAT64 in checker.backend.dtypes
    for routing in (Routing.RANDOM, Routing.TIED, Routing.MASKED, Routing.FAR_APART):
        logits = (
            Specimen(
                tokens=12, experts=experts, top_k=1, dtype=dtype, routing=routing, seed=experts
            )
            .layer()
            .logits
        )
        flawed = logits.copy()
        flawed[:3, 0] = (NAN, INF, -INF)
        bias = np.random.default_rng(1).normal(size=experts).astype(numpy_dtype(dtype.compute))
        for rule in _rules(experts):
            grouped = isinstance(rule, GroupedSelection)
            if grouped and not precise and routing is not Routing.TIED:
                continue  # near-ties may fall differently: see test_near_ties
            for biased in (None, bias) if grouped else (None,):
                chooses(checker, flawed, biased, rule)


def test_near_ties(checker: Checker) -> None:
    """Scores so near that float32 functions disagree: float64 decides (contract 2.1)."""
    if DType.FLOAT64 not in checker.backend.dtypes:
        pytest.skip(
            f"{checker.backend.name} declares no float64: scores for choosing are made in float32, "
            "and near-ties may fall differently"
        )
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(400, 1)) + rng.normal(size=(400, 64)) * 1e-6
    for scoring in (SIGMOID, SQRT):
        chooses(checker, logits.astype(np.float32), None, GroupedSelection(8, scoring))


def test_a_16_bit_choice_is_that_of_the_stored_logits(checker: Checker) -> None:
    """Selection in bfloat16 would tie what float32 logits tell apart."""
    logits = np.array([[1.0, 1.001, 1.002, 1.003]], np.float32)
    chooses(checker, logits, None, SoftmaxSelection(2), np.array([[3, 2]]))
    bias = np.array([1.000, 1.001, 1.002, 1.003], np.float32)
    flat = np.zeros((1, 4), np.float32)
    chooses(checker, flat, bias, GroupedSelection(2, SIGMOID), np.array([[3, 2]]))


def test_the_bias_is_not_narrowed_for_16_bit_logits(checker: Checker) -> None:
    checker.needs(DType.BFLOAT16)
    bias = np.array([1.000, 1.001, 1.002, 1.003], np.float32)
    flat = np.zeros((1, 4), numpy_dtype(DType.BFLOAT16))
    chooses(checker, flat, bias, GroupedSelection(2, SIGMOID), np.array([[3, 2]]))


def test_no_tokens(checker: Checker) -> None:
    for rule in _rules(8):
        chooses(checker, np.zeros((0, 8), np.float32), None, rule)


def test_top_k(checker: Checker) -> None:
    backend = checker.backend
    rng = np.random.default_rng(0)
    for shape in ((1, 1), (0, 3), (4, 5), (3, 300)):
        scores = np.rint(rng.normal(size=shape) * 2).astype(np.float32)
        scores.flat[::7] = NAN
        scores.flat[3::11] = -INF
        for k in {1, shape[1] // 2 + 1, shape[1]}:
            ids = np.asarray(backend.to_numpy(backend.top_k(backend.from_numpy(scores), k)))
            # Stable, and NaN first: its key is below that of +inf.
            keys = np.where(np.isnan(scores), -np.inf, -np.nextafter(scores, -INF))
            wanted = np.argsort(keys, axis=1, kind="stable")[:, :k]
            assert np.array_equal(ids, wanted), (
                f"top_k({scores.tolist()}, {k}): expected {wanted.tolist()}, got {ids.tolist()}"
            )


@pytest.mark.parametrize("bad", [-1, 4, 300])
def test_fixed_ids_outside_are_refused(checker: Checker, bad: int) -> None:
    backend = checker.backend
    ids = np.array([[0, 1], [2, bad]], np.int64)
    with (
        pytest.raises(ruda.SelectionError, match=f"got {bad} at token 1, slot 1"),
        backend.numerics(),
    ):
        backend.select_experts(
            backend.from_numpy(np.zeros((2, 4), np.float32)),
            None,
            ruda.FixedSelection(backend.from_numpy(ids)),
        )


def test_fixed_ids_are_kept_as_given(checker: Checker) -> None:
    ids = np.array([[3, 0, 3], [1, 1, 1]], np.uint8)
    backend = checker.backend
    with backend.numerics():
        got = backend.select_experts(
            backend.from_numpy(np.zeros((2, 4), np.float32)),
            None,
            ruda.FixedSelection(backend.from_numpy(ids)),
        )
    assert np.asarray(backend.to_numpy(got)).tolist() == ids.tolist()
