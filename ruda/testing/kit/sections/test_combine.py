"""Contract 6: the weighted sum over slots, in ascending expert id, rounded where asked."""

from __future__ import annotations

import numpy as np
import pytest

from ruda.base.dtypes import DType
from ruda.stages.options import CombineAccumulation, RouterScoring
from ruda.testing.kit.plugin import Checker
from ruda.testing.layers import Array, numpy_dtype
from ruda.testing.specimens.run import run_moe
from ruda.testing.specimens.specimen import Choice, Routing, Specimen
from ruda.testing.tolerance import assert_exact

SECTION = "6 combine"

COMPUTE, STORAGE = CombineAccumulation.COMPUTE, CombineAccumulation.STORAGE


def combined(
    checker: Checker,
    y: Array,
    weights: Array,
    ids: Array,
    experts: int,
    accumulation: CombineAccumulation,
) -> Array:
    """Combine of slot outputs y [T, k, H], laid out by row."""
    backend = checker.backend
    dtype = DType(y.dtype.name)
    with backend.numerics():
        layout = backend.dispatch(backend.index(backend.from_numpy(ids), experts), experts)
        order = np.asarray(backend.to_numpy(layout.assignments))
        rows = y.reshape(ids.size, y.shape[2])[order]
        output = backend.combine(
            backend.from_numpy(rows),
            backend.from_numpy(weights),
            layout,
            accumulation=accumulation,
            dtype=dtype,
        )
    return np.asarray(backend.to_numpy(output))


def test_the_order_is_by_expert(checker: Checker) -> None:
    """Float32 forgets 1 beside 1e8: what is left depends on the order alone."""
    y = np.array([[[1e8], [1.0], [-1e8]]], np.float32)
    ones = np.ones((1, 3), np.float32)
    # 1 is last, and kept, where it lies on expert 2.
    for ids, wanted in (([0, 1, 2], 0.0), ([0, 2, 1], 1.0), ([1, 2, 0], 1.0), ([2, 0, 1], 0.0)):
        got = combined(checker, y, ones, np.array([ids]), 3, COMPUTE)
        label = f"combine of [1e8, 1, -1e8] on experts {ids}"
        assert_exact(label, got, np.array([[wanted]], np.float32))


def test_repeated_ids_are_summed_in_slot_order(checker: Checker) -> None:
    ones = np.ones((1, 3), np.float32)
    for terms, wanted in (([1e8, 1.0, -1e8], 0.0), ([1e8, -1e8, 1.0], 1.0)):
        y = np.array(terms, np.float32).reshape(1, 3, 1)
        got = combined(checker, y, ones, np.array([[1, 1, 1]]), 2, COMPUTE)
        assert_exact(f"combine of {terms} on one expert", got, np.array([[wanted]], np.float32))


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
def test_where_sums_are_held(checker: Checker, dtype: DType) -> None:
    """A large term and seven ones: held in float32, or lost one by one in 16 bits."""
    checker.needs(dtype)
    kind = numpy_dtype(dtype)
    large = 2048.0 if dtype is DType.FLOAT16 else 256.0
    y = np.array([large] + [1.0] * 7).reshape(1, 8, 1).astype(kind)
    ones, ids = np.ones((1, 8), np.float32), np.arange(8)[None]
    for accumulation, wanted in ((COMPUTE, large + 7), (STORAGE, large)):
        got = combined(checker, y, ones, ids, 8, accumulation)
        assert_exact(
            f"{large} and seven ones, {accumulation}", got, np.array([[wanted]]).astype(kind)
        )


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
def test_where_products_are_rounded(checker: Checker, dtype: DType) -> None:
    """STORAGE rounds each product before it is added; COMPUTE keeps its float32 digits."""
    checker.needs(dtype)
    kind = numpy_dtype(dtype)
    bits = 11 if dtype is DType.FLOAT16 else 8
    weight = np.float32(1 + 2.0**-bits)  # halfway to the next 16-bit number: ties go to 1
    y = np.array([1.0, -1.0, 1.0]).reshape(1, 3, 1).astype(kind)
    weights = np.array([[weight, 1.0, 2.0**-9]], np.float32)
    for accumulation, wanted in ((STORAGE, 2.0**-9), (COMPUTE, 2.0**-bits + 2.0**-9)):
        got = combined(checker, y, weights, np.array([[0, 1, 2]]), 3, accumulation)
        assert_exact(f"products, {accumulation}", got, np.array([[wanted]]).astype(kind))


@pytest.mark.parametrize("accumulation", list(CombineAccumulation))
@pytest.mark.parametrize("dtype", list(DType))
def test_like_the_reference(
    checker: Checker, dtype: DType, accumulation: CombineAccumulation
) -> None:
    for tokens, experts, top_k in ((5, 4, 1), (5, 4, 4), (9, 12, 8), (3, 30, 20)):
        for choice in (Choice.SOFTMAX, Choice.FIXED):
            specimen = Specimen(
                tokens=tokens,
                experts=experts,
                top_k=top_k,
                dtype=dtype,
                combine=accumulation,
                choice=choice,
                repeated_ids=choice is Choice.FIXED,
                scoring=RouterScoring.SIGMOID,
                renormalize=False,
                scale=2.5,
            )
            checker.specimen(specimen, run_moe, ("output",))


def test_weights_of_another_type(checker: Checker) -> None:
    """Products are formed in the wider compute type of both (contract 6, decisions)."""
    checker.needs(DType.FLOAT64)
    for dtype, logits_dtype in (
        (DType.FLOAT32, DType.FLOAT64),
        (DType.FLOAT64, DType.FLOAT32),
        (DType.BFLOAT16, DType.FLOAT64),
    ):
        checker.specimen(Specimen(dtype=dtype, logits_dtype=logits_dtype), run_moe, ("output",))


def test_saturated_weights(checker: Checker) -> None:
    for routing in (Routing.FAR_APART, Routing.MASKED):
        specimen = Specimen(
            tokens=9, routing=routing, scoring=RouterScoring.SIGMOID, renormalize=False
        )
        checker.specimen(specimen, run_moe, ("output",))
