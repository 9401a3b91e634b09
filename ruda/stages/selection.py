"""Choosing experts: the discrete half of the router (contract 2).

Two backends must choose the same experts to the bit, so nothing here leans on a framework's order
of NaN, on an unstable sort, or on its own `exp` in single precision. Scores are made comparable
first (NaN taken out, float64 rounded once), and only then sorted, by a stable ascending sort of the
negated scores: larger first, exact ties to the lower expert id.

Shapes: T tokens, E experts, K experts chosen, G groups, S experts a group.
"""

from __future__ import annotations

from typing import Any, Protocol, assert_never

from ruda.base.dtypes import DType
from ruda.base.errors import SelectionError
from ruda.base.operations import Operations
from ruda.base.tensors import F, I, L
from ruda.stages.options import FixedSelection, GroupedSelection, Selection, SoftmaxSelection
from ruda.stages.weights import router_scores, undefined_softmax


def first_columns(ids_TE: I, k: int) -> I:
    """The first k columns."""
    columns: I = ids_TE[:, :k]
    return columns


class SelectionStage(Operations[F, I, L], Protocol[F, I, L]):
    """Experts for each token."""

    def top_k(self, scores_TE: F, k: int, /) -> I:
        """Ids [T, k] of the k largest scores in each row, larger first, ties to the lower id.

        NaN ranks above every number (contract 2.4).
        """
        is_nan_TE: L = scores_TE != scores_TE
        clean_TE = self.where(is_nan_TE, 0.0, scores_TE)
        by_score_TE = self.stable_argsort(-clean_TE)
        zeros_TE = self.full(self.shape(scores_TE), 0.0, DType.FLOAT32)
        is_number_TE = self.take_along(self.where(is_nan_TE, zeros_TE, 1.0), by_score_TE)
        nan_first_TE = self.stable_argsort(is_number_TE)
        return self.take_along(by_score_TE, first_columns(nan_first_TE, k))

    def select_experts(self, logits_TE: F, correction_bias_E: F | None, rule: Selection, /) -> I:
        """Expert ids [T, k] by any rule, in the backend's index type (contract 2)."""
        match rule:
            case SoftmaxSelection():
                return _select_softmax(self, logits_TE, rule.top_k)
            case GroupedSelection():
                return _select_grouped(self, logits_TE, correction_bias_E, rule)
            case FixedSelection():
                return select_fixed(self, rule.expert_ids, self.shape(logits_TE)[1])
            case _:
                assert_never(rule)


def _select_softmax(backend: Operations[F, I, L], logits_TE: F, k: int) -> I:
    """The k largest logits; a row whose softmax is undefined selects 0..k-1 (contract 2)."""
    x_TE = backend.cast(logits_TE, backend.dtype(logits_TE).compute)
    clean_TE = backend.where(undefined_softmax(backend, x_TE), 0.0, x_TE)
    # A copy: a view would keep all T x E sorted ids alive for as long as a state keeps these.
    return backend.concat([first_columns(backend.stable_argsort(-clean_TE), k)])


def _select_grouped(
    backend: SelectionStage[F, I, L],
    logits_TE: F,
    correction_bias_E: F | None,
    rule: GroupedSelection,
) -> I:
    """The k best biased scores inside the best groups (contract 2)."""
    compute = backend.dtype(logits_TE).compute
    precise = DType.FLOAT64 if DType.FLOAT64 in backend.dtypes else DType.FLOAT32
    scores_TE = router_scores(backend, backend.cast(logits_TE, precise), rule.scoring)
    choice_TE = backend.cast(scores_TE, compute)
    if correction_bias_E is not None:
        choice_TE = choice_TE + backend.cast(correction_bias_E, compute)
    if rule.selected_groups == rule.groups:
        return backend.top_k(choice_TE, rule.top_k)

    tokens, experts = backend.shape(choice_TE)
    size = experts // rule.groups
    choice_of_group = backend.reshape(choice_TE, (tokens * rule.groups, size))
    best = backend.take_along(
        choice_of_group, backend.top_k(choice_of_group, 2 if rule.group_top_two else 1)
    )
    score: F = best[:, 0] + best[:, 1] if rule.group_top_two else best[:, 0]
    kept = backend.top_k(backend.reshape(score, (tokens, rule.groups)), rule.selected_groups)
    kept = backend.take_along(kept, backend.stable_argsort(kept))

    # Only experts of kept groups are candidates, in ascending id: no fill value can be chosen.
    first: I = (kept * size)[:, :, None]
    candidates = backend.reshape(
        first + backend.arange(size), (tokens, rule.selected_groups * size)
    )
    chosen = backend.top_k(backend.take_along(choice_TE, candidates), rule.top_k)
    return backend.take_along(candidates, chosen)


def select_fixed(backend: Operations[F, I, L], expert_ids: Any, experts: int) -> I:
    """The caller's ids in the backend's index type; `SelectionError` names the first bad one."""
    ids_TK = backend.index(expert_ids, experts)
    tokens, slots = backend.shape(ids_TK)
    flat_R = backend.reshape(ids_TK, (tokens * slots,))
    outside_R: L = flat_R < 0
    # One number comes back to the host; the ids only to name the bad one.
    if int(backend.to_numpy(backend.sum(backend.where(outside_R, 1, flat_R * 0), axis=0))):
        bad = (backend.to_numpy(ids_TK) < 0).nonzero()
        token, slot = (int(axis[0]) for axis in bad)
        got = int(backend.to_numpy(expert_ids)[token, slot])
        raise SelectionError(
            f"expert_ids: expected ids in [0, {experts}), got {got} at token {token}, slot {slot}"
        )
    return ids_TK
