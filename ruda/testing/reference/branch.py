"""The branch as the contract states it, one (token, slot) at a time, from the contract alone.

`Arithmetic.exact()` makes it the reference every backend is measured against;
`Arithmetic.same_type(layer)` does the same steps in the types and with the roundings of the
contract, and so shows what error is unavoidable.

Legend: T tokens, k slots, E experts, H hidden, I intermediate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ruda.testing.layers import Array, Layer
from ruda.testing.reference.arithmetic import Arithmetic
from ruda.testing.reference.router import (
    reference_selection,
    reference_weights,
    reference_weights_backward,
    router_weights,
    sigmoid,
)

__all__ = [
    "Arithmetic",
    "Gradients",
    "ReferenceResult",
    "reference_layer",
    "reference_selection",
    "reference_weights",
    "reference_weights_backward",
]


@dataclass(frozen=True, eq=False)
class Gradients:
    """The five gradients of `MoeBackward`, and that of the routing weights."""

    input: Array
    """[T, H]"""
    logits: Array
    """[T, E]"""
    weights: Array
    """[T, k]"""
    gate: Array
    """[E, I, H]"""
    up: Array
    """[E, I, H]"""
    down: Array
    """[E, H, I]"""


@dataclass(frozen=True, eq=False)
class ReferenceResult:
    """What one run of the reference gives."""

    expert_ids: Array
    """[T, k], int64"""
    weights: Array
    """[T, k]"""
    output: Array
    """[T, H]"""
    grads: Gradients


@dataclass(frozen=True, eq=False)
class _Slot:
    """What one expert made of one token, for its backward: each [I], with contract 5's names."""

    g: Array
    u: Array
    sigmoid: Array
    s: Array
    a: Array


def reference_layer(
    layer: Layer, arithmetic: Arithmetic, expert_ids: Array | None = None
) -> ReferenceResult:
    """Forward and backward of one layer; `expert_ids` [T, k] replaces its selection.

    An id outside [0, E) given here makes its token NaN and adds nothing to the weight gradients.
    """
    if expert_ids is None:
        expert_ids = reference_selection(
            layer.logits, layer.correction_bias, layer.options.selection
        )
    with np.errstate(all="ignore"):
        return _Run(layer, arithmetic, expert_ids.astype(np.int64)).result()


class _Run:
    def __init__(self, layer: Layer, arithmetic: Arithmetic, ids_Tk: Array) -> None:
        compute = arithmetic.compute
        self.layer = layer
        self.arithmetic = arithmetic
        self.ids_Tk = ids_Tk
        self.x_TH = layer.input.astype(compute)
        self.dout_TH = layer.grad_output.astype(compute)
        self.gate_EIH = layer.gate.astype(compute)
        self.up_EIH = layer.up.astype(compute)
        self.down_EHI = layer.down.astype(compute)
        self.dgate_EIH = np.zeros(self.gate_EIH.shape, arithmetic.sums)
        self.dup_EIH = np.zeros(self.up_EIH.shape, arithmetic.sums)
        self.ddown_EHI = np.zeros(self.down_EHI.shape, arithmetic.sums)
        self.weights_Tk = router_weights(layer.logits, ids_Tk, layer.options.weights, arithmetic)

    def result(self) -> ReferenceResult:
        output_TH = np.zeros(self.x_TH.shape, self.arithmetic.storage)
        dinput_TH = np.zeros(self.x_TH.shape, self.arithmetic.storage)
        dweights_Tk = np.zeros(self.ids_Tk.shape, self.arithmetic.router)
        for t in range(len(self.x_TH)):
            y_k: list[Array] = []
            dx_H = np.zeros_like(self.x_TH[t])
            for j, e in enumerate(self.ids_Tk[t]):
                if not 0 <= e < self.layer.experts:
                    y_k.append(np.full_like(dx_H, np.nan))
                    dweights_Tk[t, j] = np.nan
                    dx_H = dx_H + np.nan
                    continue
                slot, y_H = self.expert(t, e)
                y_k.append(y_H)
                dweights_Tk[t, j], slot_dx_H = self.expert_backward(t, j, e, slot)
                dx_H = dx_H + slot_dx_H
            output_TH[t] = self.combine(t, y_k).astype(self.arithmetic.storage)
            dinput_TH[t] = dx_H.astype(self.arithmetic.storage)
        dlogits_TE = reference_weights_backward(
            self.layer.logits,
            self.ids_Tk,
            dweights_Tk,
            self.layer.options.weights,
            self.arithmetic,
        )
        out, compute = self.arithmetic.handed_out, self.arithmetic.compute
        return ReferenceResult(
            expert_ids=self.ids_Tk,
            weights=out(self.weights_Tk),
            output=output_TH,
            grads=Gradients(
                input=dinput_TH,
                logits=dlogits_TE,
                weights=out(dweights_Tk),
                gate=out(self.dgate_EIH.astype(compute)),
                up=out(self.dup_EIH.astype(compute)),
                down=out(self.ddown_EHI.astype(compute)),
            ),
        )

    def expert(self, t: int, e: int) -> tuple[_Slot, Array]:
        """Contract 5: the activations, and the expert's output [H]."""
        rounded, product = self.arithmetic.rounded, self.arithmetic.product
        x_H = self.x_TH[t]
        g_I = rounded(product(self.gate_EIH[e], x_H))
        u_I = rounded(product(self.up_EIH[e], x_H))
        sigmoid_I = sigmoid(g_I)
        s_I = rounded(g_I * sigmoid_I)
        a_I = rounded(s_I * u_I)
        return _Slot(g_I, u_I, sigmoid_I, s_I, a_I), rounded(product(self.down_EHI[e], a_I))

    def combine(self, t: int, y_k: list[Array]) -> Array:
        """Contract 6: the weighted sum [H], experts ascending, repeated ids in slot order."""
        rounded = self.arithmetic.rounded_sum
        total_H = np.zeros(self.x_TH.shape[1], self.arithmetic.mixed)
        for j in sorted(range(len(y_k)), key=lambda j: (int(self.ids_Tk[t, j]), j)):
            total_H = rounded(total_H + rounded(self.weighted(t, j, y_k[j])))
        return total_H

    def expert_backward(self, t: int, j: int, e: int, slot: _Slot) -> tuple[Array, Array]:
        """Contract 7: adds the weight gradients, gives the slot's weight and input gradients."""
        rounded, product = self.arithmetic.rounded, self.arithmetic.product
        mixed, sums = self.arithmetic.mixed, self.arithmetic.sums
        x_H, dout_H = self.x_TH[t], self.dout_TH[t]
        sigmoid_I = slot.sigmoid
        b_I = rounded(product(self.down_EHI[e].T, dout_H))
        dweight = product(b_I.astype(mixed)[None, :], slot.a.astype(mixed))[0]
        da_I = rounded(self.weighted(t, j, b_I))
        dy_H = rounded(self.weighted(t, j, dout_H))
        m_I = rounded(da_I * slot.u)
        dg_I = rounded(m_I * sigmoid_I * (1 + slot.g * (1 - sigmoid_I)))
        du_I = rounded(da_I * slot.s)
        self.ddown_EHI[e] += np.multiply.outer(dy_H.astype(sums), slot.a)
        self.dgate_EIH[e] += np.multiply.outer(dg_I.astype(sums), x_H)
        self.dup_EIH[e] += np.multiply.outer(du_I.astype(sums), x_H)
        through_gate_H = rounded(product(self.gate_EIH[e].T, dg_I))
        through_up_H = rounded(product(self.up_EIH[e].T, du_I))
        return dweight, rounded(through_gate_H + through_up_H)

    def weighted(self, t: int, j: int, value: Array) -> Array:
        """A value times the slot's routing weight, in the wider type of both."""
        mixed = self.arithmetic.mixed
        return np.asarray(self.weights_Tk[t, j].astype(mixed) * value.astype(mixed, copy=False))
