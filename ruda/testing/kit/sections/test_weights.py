"""Contract 3: the routing weights, and their gradient with the selection held fixed."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import ruda
from ruda.base.dtypes import DType
from ruda.stages.options import RouterScoring, RouterWeightOptions
from ruda.testing.kit.plugin import Checker
from ruda.testing.layers import Array, dtype_of, numpy_dtype
from ruda.testing.reference.arithmetic import Arithmetic
from ruda.testing.reference.router import reference_weights, reference_weights_backward
from ruda.testing.specimens.specimen import Routing, Specimen
from ruda.testing.tolerance import assert_exact

SECTION = "3 continuous weights"

OPTIONS = [
    RouterWeightOptions(scoring, renormalize, scale, epsilon)
    for scoring in RouterScoring
    for renormalize in (True, False)
    for scale, epsilon in ((1.0, 0.0), (2.5, 0.0), (2.5, 1e-20), (0.5, 0.25))
]


def _identify(options: RouterWeightOptions) -> str:
    normal = "renormalized" if options.renormalize else "plain"
    return f"{options.scoring.value}-{normal}-{options.scale}-{options.epsilon}"


def weights_of(checker: Checker, logits: Array, ids: Array, options: RouterWeightOptions) -> Array:
    backend = checker.backend
    tensor = ruda.selected_router_weights(
        backend.from_numpy(logits), backend.from_numpy(ids), options, backend=backend
    )
    return np.asarray(backend.to_numpy(tensor))


def gradient_of(
    checker: Checker, logits: Array, ids: Array, dweights: Array, options: RouterWeightOptions
) -> Array:
    backend = checker.backend
    tensor = ruda.selected_router_weights_backward(
        backend.from_numpy(logits),
        backend.from_numpy(ids),
        backend.from_numpy(dweights),
        options,
        backend=backend,
    )
    return np.asarray(backend.to_numpy(tensor))


def _inputs(dtype: DType, routing: Routing, experts: int, slots: int) -> tuple[Array, Array, Array]:
    specimen = Specimen(tokens=7, experts=experts, top_k=1, dtype=dtype)
    # Ordinary rows too: rows of scores that are all 0 or 1 have nothing but rounding noise.
    logits = np.concatenate(
        [replace(specimen, routing=kind).layer().logits for kind in {Routing.RANDOM, routing}]
    )
    rng = np.random.default_rng(3)
    ids = rng.integers(0, experts, (len(logits), slots))  # an expert may come twice
    dweights = rng.normal(size=ids.shape).astype(numpy_dtype(dtype.compute))
    return logits, ids, dweights


@pytest.mark.parametrize("options", OPTIONS, ids=_identify)
@pytest.mark.parametrize("dtype", list(DType))
def test_like_the_reference(checker: Checker, dtype: DType, options: RouterWeightOptions) -> None:
    checker.needs(dtype)
    for routing in (Routing.RANDOM, Routing.MASKED, Routing.FAR_APART):
        for experts, slots in ((1, 1), (4, 1), (4, 3), (40, 8)):
            logits, ids, dweights = _inputs(dtype, routing, experts, slots)
            _compare(checker, logits, ids, dweights, options)


def _compare(
    checker: Checker, logits: Array, ids: Array, dweights: Array, options: RouterWeightOptions
) -> None:
    """Against the reference over all rows at once: alone, a row of rounding noise has no scale."""
    dtype = dtype_of(logits)
    forward = partial(reference_weights, logits, ids, options)
    backward = partial(reference_weights_backward, logits, ids, dweights, options)
    for name, got, reference in (
        ("weights", weights_of(checker, logits, ids, options), forward),
        ("logits gradient", gradient_of(checker, logits, ids, dweights, options), backward),
    ):
        wanted = reference(Arithmetic.exact())
        with np.errstate(invalid="ignore"):
            off = np.nan_to_num(np.abs(got.astype(np.float64) - wanted), nan=np.inf)
        row = int(off.max(axis=1, initial=0).argmax())
        label = (
            f"{name} (worst for {logits.dtype} logits {logits[row].astype(float).tolist()}, "
            f"expert_ids {ids[row].tolist()}, dweights {dweights[row].astype(float).tolist()}, "
            f"{options})"
        )
        kind = dtype.compute if name == "weights" else dtype
        plain = reference(Arithmetic.router_only(dtype))
        checker.compare(label, got, wanted, plain, kind)


@pytest.mark.parametrize("options", OPTIONS, ids=_identify)
def test_rows_that_are_nan(checker: Checker, options: RouterWeightOptions) -> None:
    """NaN, +inf, nothing but -inf, and ids outside: NaN where the contract says, and only there."""
    inf, nan = math.inf, math.nan
    rows = [[1, nan, 0], [1, inf, 0], [-inf] * 3, [-inf, 1, 0], [1, 2, 0], [nan] * 3]
    for ids in ([0, 2], [1, 0], [2, 2], [0, 3], [-1, 0], [1, -5]):
        for row in rows:
            logits, chosen = np.array([row, [0, 1, 2]], np.float32), np.array([ids, [0, 1]])
            dweights = np.array([[1.0, -2.0], [0.5, 0.25]], np.float32)
            plain = Arithmetic.router_only(DType.FLOAT32)
            for name, got, wanted in (
                (
                    "weights",
                    weights_of(checker, logits, chosen, options),
                    reference_weights(logits, chosen, options, plain),
                ),
                (
                    "logits gradient",
                    gradient_of(checker, logits, chosen, dweights, options),
                    reference_weights_backward(logits, chosen, dweights, options, plain),
                ),
            ):
                label = f"{name} of logits {row}, expert_ids {ids}, {options}: which are NaN"
                assert_exact(label, np.isnan(got), np.isnan(wanted))
                assert not np.isnan(got[1]).any()


@pytest.mark.parametrize("scoring", list(RouterScoring))
@pytest.mark.parametrize("dtype", list(DType))
def test_one_renormalized_slot_has_no_gradient(
    checker: Checker, scoring: RouterScoring, dtype: DType
) -> None:
    """No rounding noise may reach a router that such a layer cannot train."""
    checker.needs(dtype)
    logits, ids, dweights = _inputs(dtype, Routing.RANDOM, 4, 1)
    options = RouterWeightOptions(scoring, renormalize=True)
    assert_exact(
        "weights, k = 1, renormalized",
        weights_of(checker, logits, ids, options),
        np.ones_like(dweights),
    )
    gradient = gradient_of(checker, logits, ids, dweights, options)
    assert_exact("logits gradient, k = 1, renormalized", np.abs(gradient), np.zeros_like(logits))


@pytest.mark.parametrize("scoring", list(RouterScoring))
@pytest.mark.parametrize("renormalize", [True, False])
def test_experts_nobody_chose(checker: Checker, scoring: RouterScoring, renormalize: bool) -> None:
    """Zero, except under a softmax over all experts, where it is not."""
    logits, dweights = np.array([[0.5, -1, 2, 0]], np.float32), np.array([[1, -2]], np.float32)
    options = RouterWeightOptions(scoring, renormalize)
    gradient = gradient_of(checker, logits, np.array([[0, 2]]), dweights, options)
    chosen = gradient[0, [0, 2]]
    assert np.all(chosen != 0)
    if scoring is RouterScoring.SOFTMAX and not renormalize:
        assert np.all(gradient != 0)
        assert abs(float(gradient.sum(dtype=np.float64))) < 1e-6
    else:
        assert np.all(gradient[0, [1, 3]] == 0)


def test_a_masked_logit_has_no_gradient(checker: Checker) -> None:
    logits = np.array([[0.5, -math.inf, 2, -math.inf]], np.float32)
    dweights = np.array([[1, -2, 3]], np.float32)
    for options in OPTIONS:
        gradient = gradient_of(checker, logits, np.array([[0, 1, 2]]), dweights, options)
        assert np.all(gradient[0, [1, 3]] == 0), f"{options}: {gradient.tolist()}"


def test_a_weight_of_zero_has_a_gradient(checker: Checker) -> None:
    """Nothing may be divided by a weight: 1e-30 underflows beside 1, and its gradient does not."""
    logits, ids = np.array([[100.0, 0.0, -3.0]], np.float32), np.array([[0, 1]])
    options = RouterWeightOptions(RouterScoring.SIGMOID, renormalize=True, scale=2.0)
    dweights = np.array([[0.0, 1.0]], np.float32)
    _compare(checker, logits, ids, dweights, options)


def test_no_tokens(checker: Checker) -> None:
    logits, ids = np.zeros((0, 4), np.float32), np.zeros((0, 2), np.int64)
    for options in OPTIONS:
        assert weights_of(checker, logits, ids, options).shape == (0, 2)
        none = np.zeros((0, 2), np.float32)
        assert gradient_of(checker, logits, ids, none, options).shape == (0, 4)
