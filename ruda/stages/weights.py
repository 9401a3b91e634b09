"""Router weights and their vector-Jacobian product, with the selection held fixed (contract 3).

The gradient is written slot by slot wherever it can be: an expert nobody chose is then exactly zero
because nothing was ever added to it, and no gradient divides by a weight that may be zero.

Shapes: T tokens, E experts, K slots a token. x logits in the compute type, p scores,
q selected scores (renormalized or not), w routing weights, S the renormalizing denominator.
"""

from __future__ import annotations

import math
from typing import Generic, NamedTuple, Protocol, assert_never

from ruda.base.operations import Operations
from ruda.base.tensors import F, I, L
from ruda.stages.options import RouterScoring, RouterWeightOptions


def sigmoid(backend: Operations[F, I, L], x: F) -> F:
    """1 / (1 + exp(-x)), by the branch that cannot overflow."""
    positive: L = x > 0.0
    z = backend.exp(backend.where(positive, -x, x))
    return backend.where(positive, 1.0, z) / (z + 1.0)


def undefined_softmax(backend: Operations[F, I, L], x_TE: F) -> L:
    """The rows [T, 1] with any NaN, any +inf, or nothing but -inf."""
    is_number: L = x_TE == x_TE
    largest_T1 = backend.max(backend.where(is_number, x_TE, math.inf), axis=-1, keepdims=True)
    infinite: L = largest_T1 >= math.inf
    empty: L = largest_T1 <= -math.inf
    return infinite | empty


def softmax(backend: Operations[F, I, L], x_TE: F) -> F:
    """Softmax over the last axis; an undefined row is NaN."""
    undefined_T1 = undefined_softmax(backend, x_TE)
    safe_TE = backend.where(undefined_T1, 0.0, x_TE)
    e_TE = backend.exp(safe_TE - backend.max(safe_TE, axis=-1, keepdims=True))
    p_TE = e_TE / backend.sum(e_TE, axis=-1, keepdims=True)
    return backend.where(undefined_T1, math.nan, p_TE)


def sqrt_softplus(backend: Operations[F, I, L], x: F) -> F:
    """sqrt(log(1 + exp(x))) without overflow."""
    positive: L = x > 0.0
    z = backend.exp(backend.where(positive, -x, x))
    return backend.sqrt(backend.where(positive, x, 0.0) + backend.log1p(z))


def router_scores(backend: Operations[F, I, L], x_TE: F, scoring: RouterScoring) -> F:
    """Scores of logits that are already in the type to compute in."""
    match scoring:
        case RouterScoring.SOFTMAX:
            return softmax(backend, x_TE)
        case RouterScoring.SIGMOID:
            return sigmoid(backend, x_TE)
        case RouterScoring.SQRT_SOFTPLUS:
            return sqrt_softplus(backend, x_TE)
        case _:
            assert_never(scoring)


class _Selected(NamedTuple, Generic[F, I, L]):
    """What forward and backward share; `p_TE` for softmax alone, where it needs every logit."""

    ids_TK: I
    x_TK: F
    p_TK: F
    p_TE: F | None
    denominator_T1: F | None
    invalid_T1: L


def _select(
    backend: Operations[F, I, L], logits_TE: F, expert_ids_TK: I, options: RouterWeightOptions
) -> _Selected[F, I, L]:
    x_TE = backend.cast(logits_TE, backend.dtype(logits_TE).compute)
    outside_TK: L = expert_ids_TK < 0
    ids_TK: I = backend.where(outside_TK, 0, expert_ids_TK)
    x_TK = backend.take_along(x_TE, ids_TK)
    p_TE: F | None = None
    if options.scoring is RouterScoring.SOFTMAX:
        p_TE = softmax(backend, x_TE)
        p_TK = backend.take_along(p_TE, ids_TK)
    else:
        p_TK = router_scores(backend, x_TK, options.scoring)
    void_TK = backend.where(outside_TK, math.nan, p_TK)
    denominator_T1: F | None = None
    invalid_T1: L
    if options.renormalize:
        denominator_T1 = backend.sum(void_TK, axis=-1, keepdims=True) + options.epsilon
        unknown_T1: L = denominator_T1 != denominator_T1
        zero_T1: L = denominator_T1 <= 0.0
        invalid_T1 = unknown_T1 | zero_T1
    elif options.scoring is RouterScoring.SOFTMAX:
        total_T1 = backend.sum(void_TK, axis=-1, keepdims=True)
        invalid_T1 = total_T1 != total_T1
    else:
        outside_T1 = backend.sum(backend.where(outside_TK, 1, ids_TK * 0), axis=-1, keepdims=True)
        invalid_T1 = outside_T1 > 0
    return _Selected(ids_TK, x_TK, p_TK, p_TE, denominator_T1, invalid_T1)


class WeightsStage(Operations[F, I, L], Protocol[F, I, L]):
    """Router weights, both ways."""

    def router_weights(self, logits_TE: F, expert_ids_TK: I, options: RouterWeightOptions, /) -> F:
        """Routing weights [T, K] in the logits' compute type (contract 3).

        Ids outside [0, E) must arrive as -1 (`Backend.index` sees to it); their whole row is NaN.
        """
        chosen = _select(self, logits_TE, expert_ids_TK, options)
        q_TK = chosen.p_TK
        if chosen.denominator_T1 is not None:
            q_TK = q_TK / chosen.denominator_T1
        return self.where(chosen.invalid_T1, math.nan, q_TK * options.scale)

    def router_weights_backward(
        self,
        logits_TE: F,
        expert_ids_TK: I,
        dweights_TK: F,
        options: RouterWeightOptions,
        /,
    ) -> F:
        """The VJP of `router_weights` with respect to the logits as stored: [T, E] in their type.

        Nonselected logits of a softmax without renormalization get their part; see the table in
        contract 3. Ids outside [0, E) as in `router_weights`.
        """
        chosen = _select(self, logits_TE, expert_ids_TK, options)
        p_TK = chosen.p_TK
        dw_TK = self.cast(dweights_TK, self.dtype(p_TK))
        mean_T1: F | None = None
        if chosen.denominator_T1 is not None:
            q_TK = p_TK / chosen.denominator_T1
            mean_T1 = self.sum(q_TK * dw_TK, axis=-1, keepdims=True)
            dw_TK = dw_TK - mean_T1
        else:
            q_TK = p_TK
        d_TK = _slot_gradient(self, chosen, q_TK, dw_TK, options.scoring)
        masked_TK: L = p_TK <= 0.0
        d_TE = _add_slots(
            self,
            self.shape(logits_TE),
            chosen.ids_TK,
            self.where(masked_TK, 0.0, d_TK * options.scale),
        )

        if chosen.p_TE is not None:
            shared_T1: F | None = None
            if mean_T1 is None:
                shared_T1 = self.sum(q_TK * dw_TK, axis=-1, keepdims=True)
            elif options.epsilon > 0.0 and chosen.denominator_T1 is not None:
                # Divided first: epsilon times the mean may underflow.
                shape = self.shape(mean_T1)
                epsilon_T1 = self.full(shape, options.epsilon, self.dtype(mean_T1))
                shared_T1 = mean_T1 * (epsilon_T1 / chosen.denominator_T1)
            if shared_T1 is not None:
                d_TE = d_TE - chosen.p_TE * (shared_T1 * options.scale)
            masked_TE: L = chosen.p_TE <= 0.0
            d_TE = self.where(masked_TE, 0.0, d_TE)
        d_TE = self.where(chosen.invalid_T1, math.nan, d_TE)
        return self.cast(d_TE, self.dtype(logits_TE))


def _slot_gradient(
    backend: Operations[F, I, L],
    chosen: _Selected[F, I, L],
    q_TK: F,
    dw_TK: F,
    scoring: RouterScoring,
) -> F:
    """The part of the logits' gradient [T, K] that falls on the chosen experts, before scale."""
    match scoring:
        case RouterScoring.SOFTMAX:
            return q_TK * dw_TK
        case RouterScoring.SIGMOID:
            return (-chosen.p_TK + 1.0) * (q_TK * dw_TK)
        case RouterScoring.SQRT_SOFTPLUS:
            slope_TK = sigmoid(backend, chosen.x_TK) / (chosen.p_TK * 2.0)
            d_TK = slope_TK * dw_TK
            return d_TK if chosen.denominator_T1 is None else d_TK / chosen.denominator_T1
        case _:
            assert_never(scoring)


def _add_slots(backend: Operations[F, I, L], shape: tuple[int, ...], ids_TK: I, values_TK: F) -> F:
    """Zeros [T, E] with every slot's value added at its expert, slot after slot.

    Within one slot no element is met twice, so the order of sums, and the bits, are fixed.
    """
    tokens, experts = shape
    dense = backend.full((tokens * experts,), 0.0, backend.dtype(values_TK))
    row_start: I = backend.arange(tokens) * experts
    for slot in range(backend.shape(ids_TK)[1]):
        column: I = ids_TK[:, slot]
        value: F = values_TK[:, slot]
        dense = backend.add_rows(dense, row_start + column, value)
    return backend.reshape(dense, (tokens, experts))
