"""Contract 4: rows by expert, ascending, stable in (token, slot); whole numbers throughout."""

from __future__ import annotations

import numpy as np
import pytest

from ruda.testing.kit.plugin import Checker
from ruda.testing.layers import Array

SECTION = "4 dispatch"


def lays_out(checker: Checker, ids: Array, experts: int) -> None:
    """Every part of the layout as NumPy makes it from the definition."""
    backend = checker.backend
    with backend.numerics():
        layout = backend.dispatch(backend.index(backend.from_numpy(ids), experts), experts)
    flat = ids.reshape(-1).astype(np.int64)
    assignments = np.argsort(flat, kind="stable")
    positions = np.empty_like(assignments)
    positions[assignments] = np.arange(len(flat))
    offsets = np.concatenate([[0], np.cumsum(np.bincount(flat, minlength=experts))])
    shown = ids.tolist() if ids.size <= 40 else f"[{ids.shape[0]} x {ids.shape[1]}]"
    natural = backend.dtype_name(backend.arange(1))
    for name, wanted in (
        ("expert_ids", ids),
        ("assignments", assignments),
        ("positions", positions.reshape(ids.shape)),
        ("expert_offsets", offsets),
    ):
        tensor = getattr(layout, name)
        got = np.asarray(backend.to_numpy(tensor))
        label = f"dispatch of expert_ids {shown} to {experts} experts: {name}"
        assert backend.dtype_name(tensor) == natural, f"{label} is {got.dtype}, not {natural}"
        assert got.shape == wanted.shape, f"{label}: expected {wanted.shape}, got {got.shape}"
        if not np.array_equal(got, wanted):
            first = np.argwhere(got != wanted)[0].tolist()
            where = tuple(first)
            pytest.fail(
                f"{label}: expected {wanted[where]} at {first}, got {got[where]}", pytrace=False
            )


@pytest.mark.parametrize(
    ("ids", "experts"),
    [
        ([[0]], 1),
        ([[0]], 4),
        ([[1, 0]], 2),
        ([[1, 1], [1, 1]], 2),
        ([[0, 1], [0, 1], [1, 0]], 4),
        ([[3, 0], [2, 1], [0, 3]], 4),
        ([[2], [0], [2], [1], [2]], 5),
        ([[3, 3, 3]], 6),
    ],
)
def test_by_hand(checker: Checker, ids: list[list[int]], experts: int) -> None:
    lays_out(checker, np.array(ids), experts)


@pytest.mark.parametrize("experts", [1, 2, 8, 255, 256, 257, 300, 1000])
def test_any_number_of_experts(checker: Checker, experts: int) -> None:
    rng = np.random.default_rng(experts)
    for tokens, slots in ((1, 1), (17, 3), (200, 8)):
        lays_out(checker, rng.integers(0, experts, (tokens, slots)), experts)
        # The last experts are never met.
        lays_out(checker, rng.integers(0, (experts + 1) // 2, (tokens, slots)), experts)


def test_no_tokens(checker: Checker) -> None:
    for experts in (1, 4):
        lays_out(checker, np.zeros((0, 2), np.int64), experts)


def test_more_rows_than_16_bits_count(checker: Checker) -> None:
    """A count kept in a 16-bit float, or any float without a unit place there, would be wrong."""
    ids = np.random.default_rng(0).integers(0, 3, (70_000, 1))
    lays_out(checker, ids, 4)
    lays_out(checker, np.full((257, 1), 1), 3)


def test_ids_in_a_view(checker: Checker) -> None:
    wide = np.array([[1, 9, 0, 9], [2, 9, 3, 9]])
    backend = checker.backend
    with backend.numerics():
        ids = backend.index(backend.from_numpy(wide)[:, ::2], 4)
        layout = backend.dispatch(ids, 4)
    assert np.asarray(backend.to_numpy(layout.assignments)).tolist() == [1, 0, 2, 3]
