"""Every backend chooses the same experts, to the bit, on a million rows of each kind.

NumPy's choice is checked against the plain Python reference on a sample; every other backend's
against NumPy's on all rows.
"""

from __future__ import annotations

import numpy as np
import pytest

import ruda
from ruda.backend.registry import AnyBackend
from ruda.testing.layers import Array, numpy_dtype
from ruda.testing.reference import reference_selection
from ruda.testing.tolerance import assert_exact

ROWS = 1 << 18  # times four dtypes: a million of each kind
EXPERTS = 16
SAMPLE = 400

SIGMOID, SOFTMAX = ruda.RouterScoring.SIGMOID, ruda.RouterScoring.SOFTMAX
SQRT_SOFTPLUS = ruda.RouterScoring.SQRT_SOFTPLUS
KINDS: dict[str, tuple[ruda.SoftmaxSelection | ruda.GroupedSelection, bool]] = {
    "softmax": (ruda.SoftmaxSelection(4), False),
    "sigmoid": (ruda.GroupedSelection(4), False),
    "softmax-scores": (ruda.GroupedSelection(3, SOFTMAX), False),
    "sqrt-softplus": (ruda.GroupedSelection(5, SQRT_SOFTPLUS), True),
    "groups": (ruda.GroupedSelection(3, SIGMOID, groups=4, selected_groups=2), True),
    "top-two": (
        ruda.GroupedSelection(4, SIGMOID, groups=4, selected_groups=2, group_top_two=True),
        True,
    ),
}


def hostile_logits(dtype: ruda.DType, rng: np.random.Generator) -> Array:
    """A quarter smooth, a quarter full of exact ties, the rest with masks, NaN, inf and zeros."""
    logits = rng.standard_normal((ROWS, EXPERTS)) * 3
    quarter = ROWS // 4
    logits[quarter : 2 * quarter] = rng.integers(-2, 3, (quarter, EXPERTS))
    special = np.array([-np.inf, -np.inf, np.nan, np.inf, -0.0, 0.0, 40.0, -100.0])
    placed = logits[2 * quarter : 3 * quarter]
    hit = rng.random(placed.shape) < 0.2
    placed[hit] = rng.choice(special, int(hit.sum()))
    masked = logits[3 * quarter :]
    masked[rng.random(masked.shape) < 0.7] = -np.inf
    with np.errstate(over="ignore"):
        return logits.astype(numpy_dtype(dtype))


def choose(
    backend: AnyBackend, logits: Array, bias: Array | None, rule: ruda.GroupedSelection
) -> tuple[Array, Array]:
    with backend.numerics():
        ids = backend.select_experts(
            backend.from_numpy(logits), None if bias is None else backend.from_numpy(bias), rule
        )
        offsets = backend.dispatch(ids, EXPERTS).expert_offsets
        return backend.to_numpy(ids), backend.to_numpy(offsets)


@pytest.mark.parametrize("integer", ["uint8", "int32", "int64", "uint64"])
def test_same_layout_of_fixed_ids(backend: AnyBackend, integer: str) -> None:
    """A quarter of a million rows a type, repeated ids and idle experts among them."""
    ids = np.random.default_rng(4).integers(0, EXPERTS - 3, (ROWS, 4)).astype(integer)
    with backend.numerics():
        rule = ruda.FixedSelection(backend.from_numpy(ids))
        logits = backend.from_numpy(np.zeros((ROWS, EXPERTS), np.float32))
        got = backend.select_experts(logits, None, rule)
        layout = backend.dispatch(got, EXPERTS)
    assert_exact("expert_ids", backend.to_numpy(got), ids.astype(np.int64))
    counts = np.bincount(ids.ravel().astype(np.int64), minlength=EXPERTS)
    expected = np.concatenate([[0], np.cumsum(counts)])
    assert_exact("expert_offsets", backend.to_numpy(layout.expert_offsets), expected)
    order = np.argsort(ids.ravel(), kind="stable")
    assert_exact("assignments", backend.to_numpy(layout.assignments), order)


@pytest.mark.parametrize("dtype", ruda.DType)
@pytest.mark.parametrize("kind", KINDS)
def test_same_experts(backend: AnyBackend, kind: str, dtype: ruda.DType) -> None:
    if dtype not in backend.dtypes:
        pytest.skip(f"{backend.name} has no {dtype}")
    rule, biased = KINDS[kind]
    rng = np.random.default_rng([list(KINDS).index(kind), list(ruda.DType).index(dtype)])
    logits = hostile_logits(dtype, rng)
    bias = (rng.standard_normal(EXPERTS) * 0.2).astype(dtype.compute.value) if biased else None
    ids, offsets = choose(backend, logits, bias, rule)
    assert ids.shape == (ROWS, rule.top_k)
    if backend.name == "numpy":
        sample = rng.choice(ROWS, SAMPLE, replace=False)
        assert_exact("expert_ids", ids[sample], reference_selection(logits[sample], bias, rule))
        counts = np.bincount(ids.ravel(), minlength=EXPERTS)
        assert_exact("expert_offsets", offsets, np.concatenate([[0], np.cumsum(counts)]))
    else:
        expected_ids, expected_offsets = choose(ruda.get_backend("numpy"), logits, bias, rule)
        assert_exact("expert_ids", ids, expected_ids)
        assert_exact("expert_offsets", offsets, expected_offsets)
