"""Rows by expert, the sum back over slots, and the backward of the copy (contract 4, 6, 7).

A row is one (token, slot) pair. Rows are laid out by expert, then token, then slot; everything that
brings rows back to tokens is a gather through `positions`, never a scatter: no two writers meet,
and the order of every sum is fixed.

Shapes: T tokens, K slots a token, R = T*K rows, E experts, H hidden.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, Protocol

from ruda.base.dtypes import DType, wider
from ruda.base.operations import Operations
from ruda.base.tensors import F, I, I_co, L
from ruda.stages.options import CombineAccumulation


class RowLayout(NamedTuple, Generic[I_co]):
    """Where every (token, slot) went.

    `expert_ids` [T, K]; `assignments` [R], the flat (token, slot) index of each row;
    `positions` [T, K], the row of each (token, slot); `expert_offsets` [E+1], the first row of each
    expert, exclusive prefix sum of the counts.
    """

    expert_ids: I_co
    assignments: I_co
    positions: I_co
    expert_offsets: I_co


def row_tokens(backend: Operations[F, I, L], layout: RowLayout[I]) -> I:
    """The token of each row [R]."""
    return layout.assignments // backend.shape(layout.positions)[1]


def row_weights(backend: Operations[F, I, L], layout: RowLayout[I], weights_TK: F) -> F:
    """The routing weight of each row [R]."""
    flat_R = backend.reshape(weights_TK, backend.shape(layout.assignments))
    return backend.take_rows(flat_R, layout.assignments)


def slot_values(backend: Operations[F, I, L], layout: RowLayout[I], values_R: F) -> F:
    """One value a row brought back to its (token, slot): [T, K]."""
    shape = backend.shape(layout.positions)
    flat = backend.reshape(layout.positions, (shape[0] * shape[1],))
    return backend.reshape(backend.take_rows(values_R, flat), shape)


class DispatchStage(Operations[F, I, L], Protocol[F, I, L]):
    """Rows by expert, and back to tokens."""

    def dispatch(self, expert_ids_TK: I, experts: int, /) -> RowLayout[I]:
        """Group the rows by expert, ascending, stable in (token, slot) (contract 4)."""
        tokens, slots = self.shape(expert_ids_TK)
        flat_R = self.reshape(expert_ids_TK, (tokens * slots,))
        assignments_R = self.stable_argsort(flat_R)
        positions_R = self.stable_argsort(assignments_R)
        counts_E = self.counts(flat_R, experts)
        zero: I = self.arange(1)
        offsets = self.cumulative_sum(self.concat([zero, counts_E]))
        return RowLayout(
            expert_ids_TK, assignments_R, self.reshape(positions_R, (tokens, slots)), offsets
        )

    def combine(
        self,
        expert_output_RH: F,
        weights_TK: F,
        layout: RowLayout[I],
        /,
        *,
        accumulation: CombineAccumulation,
        dtype: DType,
    ) -> F:
        """out_t = sum over slots of w * y, in ascending expert id, then slot order (contract 6)."""
        compute = wider(self.dtype(weights_TK).compute, dtype.compute)
        by_expert_TK = self.stable_argsort(layout.expert_ids)
        positions_TK = self.take_along(layout.positions, by_expert_TK)
        ordered_TK = self.cast(self.take_along(weights_TK, by_expert_TK), compute)
        rounded = dtype if accumulation is CombineAccumulation.STORAGE else compute

        def contribution(slot: int) -> F:
            row: I = positions_TK[:, slot]
            weight: F = ordered_TK[:, slot : slot + 1]
            y_TH = self.cast(self.take_rows(expert_output_RH, row), compute)
            return self.cast(self.cast(weight * y_TH, rounded), compute)

        total_TH = contribution(0)
        for slot in range(1, self.shape(layout.positions)[1]):
            partial = total_TH + contribution(slot)
            total_TH = self.cast(self.cast(partial, rounded), compute)
        return self.cast(total_TH, dtype)

    def copy_backward(self, drows_RH: F, layout: RowLayout[I], /, *, dtype: DType) -> F:
        """dinput_t = sum over slots of the row gradients, in slot order, no weight (contract 7)."""
        compute = wider(self.dtype(drows_RH).compute, dtype.compute)

        def contribution(slot: int) -> F:
            row: I = layout.positions[:, slot]
            return self.cast(self.take_rows(drows_RH, row), compute)

        total_TH = contribution(0)
        for slot in range(1, self.shape(layout.positions)[1]):
            total_TH = total_TH + contribution(slot)
        return self.cast(total_TH, dtype)
