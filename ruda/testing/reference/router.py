"""Contract 2 and 3 written out row by row: choosing experts, their weights, and the VJP of these.

Legend: T tokens, E experts, k slots; p scores, q gathered scores. Of contract 3, `total` is S and
`mean`, the mean of dw weighted by q, is M.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ruda.base.errors import SelectionError
from ruda.stages.options import (
    FixedSelection,
    GroupedSelection,
    RouterScoring,
    RouterWeightOptions,
    Selection,
)
from ruda.testing.layers import Array, dtype_of, numpy_dtype
from ruda.testing.reference.arithmetic import Arithmetic


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)) in the type of x, without overflow."""
    small: Array = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + small), small / (1 + small))


def scores(x_E: Array, scoring: RouterScoring, total: Callable[[Array], Any] = np.sum) -> Array:
    """The scores of one row of logits, in the type of the row; NaN for an undefined softmax."""
    if scoring is RouterScoring.SIGMOID:
        return sigmoid(x_E)
    if scoring is RouterScoring.SQRT_SOFTPLUS:
        softplus_E: Array = np.maximum(x_E, 0) + np.log1p(np.exp(-np.abs(x_E)))
        return np.asarray(np.sqrt(softplus_E))
    if _softmax_is_undefined(x_E):
        return np.full_like(x_E, np.nan)
    exp_E = np.exp(x_E - x_E.max())
    return np.asarray(exp_E / total(exp_E))


def reference_selection(
    logits_TE: Array, correction_bias_E: Array | None, selection: Selection
) -> Array:
    """The chosen expert ids [T, k], int64; ids outside [0, E) are a `SelectionError`."""
    if isinstance(selection, FixedSelection):
        return _checked_ids(np.asarray(selection.expert_ids), logits_TE.shape[1])
    with np.errstate(all="ignore"):
        rows = [
            _choose_in_groups(x_E, correction_bias_E, selection)
            if isinstance(selection, GroupedSelection)
            else _choose_largest_logits(x_E, selection.top_k)
            for x_E in logits_TE
        ]
    return np.asarray(rows, np.int64).reshape(len(rows), selection.top_k)


def reference_weights(
    logits_TE: Array, ids_Tk: Array, options: RouterWeightOptions, arithmetic: Arithmetic
) -> Array:
    """The routing weights [T, k] in the router's compute type."""
    return arithmetic.handed_out(router_weights(logits_TE, ids_Tk, options, arithmetic))


def router_weights(
    logits_TE: Array, ids_Tk: Array, options: RouterWeightOptions, arithmetic: Arithmetic
) -> Array:
    """`reference_weights` in the arithmetic's own type, before it is handed out."""
    weights_Tk = np.full(ids_Tk.shape, np.nan, arithmetic.router)
    with np.errstate(all="ignore"):
        for t, x_E in enumerate(logits_TE.astype(arithmetic.router)):
            if not _ids_in_range(ids_Tk[t], len(x_E)):
                continue
            q_k = arithmetic.computed(scores(x_E, options.scoring, arithmetic.total)[ids_Tk[t]])
            if options.renormalize:
                total = _denominator(q_k, options.epsilon)
                q_k = np.full_like(q_k, np.nan) if total == 0 or np.isnan(total) else q_k / total
            weights_Tk[t] = arithmetic.router.type(options.scale) * q_k
    return weights_Tk


def reference_weights_backward(
    logits_TE: Array,
    ids_Tk: Array,
    dweights_Tk: Array,
    options: RouterWeightOptions,
    arithmetic: Arithmetic,
) -> Array:
    """The gradient [T, E] of the logits as stored, in their type."""
    dlogits_TE = np.full(logits_TE.shape, np.nan, arithmetic.router)
    compute = numpy_dtype(dtype_of(logits_TE).compute)
    dweights_Tk = dweights_Tk.astype(arithmetic.router)
    with np.errstate(all="ignore"):
        for t, x_E in enumerate(logits_TE.astype(arithmetic.router)):
            if not _ids_in_range(ids_Tk[t], len(x_E)):
                continue
            row_E = _row_backward(x_E, ids_Tk[t], dweights_Tk[t], options, arithmetic, compute)
            dlogits_TE[t] = arithmetic.router.type(options.scale) * row_E
        return dlogits_TE.astype(arithmetic.logits)


def _row_backward(
    x_E: Array,
    ids_k: Array,
    dw_k: Array,
    options: RouterWeightOptions,
    arithmetic: Arithmetic,
    compute: np.dtype[Any],
) -> Array:
    """The gradient of one row with in-range ids, before the scale; all NaN if it is invalid."""
    is_exact = arithmetic.is_exact
    p_E = arithmetic.computed(scores(x_E, options.scoring, arithmetic.total))
    softmax = options.scoring is RouterScoring.SOFTMAX
    if softmax and np.isnan(p_E[0]):
        return np.full_like(x_E, np.nan)
    p_k = p_E[ids_k]
    everywhere_E = np.zeros_like(x_E)
    if options.renormalize:
        total = _denominator(p_k, options.epsilon)
        if total == 0 or np.isnan(total):
            return np.full_like(x_E, np.nan)
        q_k = p_k / total
        mean = _sum(q_k * dw_k, x_E)
        change_k = dw_k - mean
        if softmax and options.epsilon > 0:
            everywhere_E = p_E * (x_E.dtype.type(options.epsilon) / total) * mean
    else:
        total = x_E.dtype.type(1)
        q_k, change_k = p_k, dw_k
        if softmax:
            everywhere_E = p_E * _sum(p_k * dw_k, x_E)

    chosen_E = np.zeros_like(x_E)
    for j, e in enumerate(ids_k):
        if options.scoring is RouterScoring.SQRT_SOFTPLUS:
            chosen_E[e] += change_k[j] / total
        else:
            chosen_E[e] += q_k[j] * change_k[j]
    for e in {int(e) for e in ids_k}:
        if options.scoring is RouterScoring.SIGMOID:
            # 1 - p cancels for large logits; the reference must not.
            chosen_E[e] *= sigmoid(-x_E[e : e + 1])[0] if is_exact else 1 - p_E[e]
        elif options.scoring is RouterScoring.SQRT_SOFTPLUS:
            chosen_E[e] *= sigmoid(x_E[e : e + 1])[0] / (2 * p_E[e])
    # Which scores are 0 is settled in C, also where the reference can tell smaller ones from 0.
    is_zero_E = scores(x_E.astype(compute), options.scoring) == 0
    row_E = arithmetic.computed(arithmetic.computed(chosen_E) - arithmetic.computed(everywhere_E))
    return np.where(is_zero_E, x_E.dtype.type(0), row_E)


def _choose_largest_logits(x_E: Array, top_k: int) -> list[int]:
    if _softmax_is_undefined(x_E):
        return list(range(top_k))
    values = [float(x) for x in x_E]
    return sorted(range(len(values)), key=lambda e: (-values[e], e))[:top_k]


def _choose_in_groups(
    x_E: Array, correction_bias_E: Array | None, selection: GroupedSelection
) -> list[int]:
    compute = numpy_dtype(dtype_of(x_E).compute)
    c_E = scores(x_E.astype(np.float64), selection.scoring).astype(compute)
    if correction_bias_E is not None:
        c_E = c_E + correction_bias_E.astype(compute)
    size = len(x_E) // selection.groups
    group_scores: list[float] = []
    for group in range(selection.groups):
        first = group * size
        best = [c_E[e] for e in _descending(c_E, range(first, first + size))]
        group_scores.append(best[0] + best[1] if selection.group_top_two else best[0])
    kept = _descending(group_scores, range(selection.groups))[: selection.selected_groups]
    candidates = [g * size + e for g in kept for e in range(size)]
    return _descending(c_E, candidates)[: selection.top_k]


def _descending(values: Array | list[float], ids: Iterable[int]) -> list[int]:
    """The ids by value: NaN first, then larger first, exact ties to the lower id."""

    def key(i: int) -> tuple[bool, float, int]:
        value = float(values[i])
        return (False, 0.0, i) if math.isnan(value) else (True, -value, i)

    return sorted(ids, key=key)


def _checked_ids(ids_Tk: Array, experts: int) -> Array:
    for index, expert in np.ndenumerate(ids_Tk):
        if not 0 <= int(expert) < experts:
            raise SelectionError(
                f"expert_ids{list(index)}: expected 0..{experts - 1}, got {int(expert)}"
            )
    return ids_Tk.astype(np.int64)


def _ids_in_range(ids_k: Array, experts: int) -> bool:
    return all(0 <= int(e) < experts for e in ids_k)


def _softmax_is_undefined(x_E: Array) -> bool:
    values = [float(x) for x in x_E]
    return any(math.isnan(x) or x == math.inf for x in values) or max(values) == -math.inf


def _denominator(q_k: Array, epsilon: float) -> np.floating:
    total: np.floating = _sum(q_k, q_k) + q_k.dtype.type(epsilon)
    return total


def _sum(values_k: Array, like: Array) -> np.floating:
    """The sum in slot order."""
    total: np.floating = like.dtype.type(0)
    for value in values_k:
        total = total + value
    return total
