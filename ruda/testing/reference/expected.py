"""What a layer must give: exactly, and in its own types, where several ways to compute count.

The rule of `tolerance` allows twice the error of the same arithmetic done by NumPy. On a tiny
layer one way of computing may be right by luck, and every other then looks wrong; so the
arithmetic is done in several ways, and the worst of each element counts:

* with tokens, experts and both widths permuted, and every value formed in the compute type moved
  to itself or a neighbour: no library promises more than such a faithful rounding of its `exp`;
* with every product, and the sum of a softmax, summed strictly one element after the other, as
  a kernel may and NumPy itself, depending on memory layout, does or does not;
* with every sum of products rounded once, as fused multiply-adds come near to.

An element that overflows in some of these ways and not in others is an edge: a backend may do
either there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ruda.stages.options import CombineAccumulation, FixedSelection
from ruda.testing.layers import Array, Layer
from ruda.testing.reference.arithmetic import Arithmetic
from ruda.testing.reference.branch import ReferenceResult, reference_layer
from ruda.testing.reference.router import reference_selection

FIELDS = ("output", "input", "logits", "weights", "gate", "up", "down")

# Which permutation each axis of a result follows: tokens, experts, hidden, intermediate.
_AXES = {
    "output": "TH",
    "input": "TH",
    "logits": "TE",
    "weights": "T-",
    "gate": "EIH",
    "up": "EIH",
    "down": "EHI",
}


def field(result: ReferenceResult, name: str) -> Array:
    """The output, or one of the gradients, by name."""
    value: Array = result.output if name == "output" else getattr(result.grads, name)
    return value


@dataclass(frozen=True, eq=False)
class Expected:
    """What a layer must give, with these experts; numbers by name of the result."""

    layer: Layer
    expert_ids: Array
    """[T, k]"""
    exact: dict[str, Array]
    plain: dict[str, Array]
    """In the contract's types, the worst of several ways; finite where any of them is."""
    edge: dict[str, Array]
    """Where some ways are finite, and others not."""


def expect(layer: Layer, expert_ids: Array | None = None) -> Expected:
    """The exact results, the plain ones, and where these are not settled.

    `expert_ids` [T, k] takes the place of the layer's own choice.
    """
    if expert_ids is None:
        rule = layer.options.selection
        expert_ids = reference_selection(layer.logits, layer.correction_bias, rule)
    exact_run = reference_layer(layer, Arithmetic.exact(), expert_ids)
    plain_run = reference_layer(layer, Arithmetic.same_type(layer), expert_ids)
    exact, plain = _fields(exact_run), _fields(plain_run)
    edge = {name: np.zeros(exact[name].shape, bool) for name in FIELDS}
    rng = np.random.default_rng(0)
    same = Arithmetic.same_type(layer)
    ways = [
        _fields(reference_layer(layer, arithmetic, expert_ids))
        for arithmetic in (replace(same, is_sequential=True), replace(same, is_fused=True))
    ]
    # The smaller a layer, the likelier it is to be right by luck.
    slots = expert_ids.size
    ways += [_permuted(layer, expert_ids, rng) for _ in range(3 if slots > 64 else 8)]
    for way in ways:
        for name, other in way.items():
            edge[name] |= np.isfinite(plain[name]) != np.isfinite(other)
            plain[name] = _worse(exact[name], plain[name], other)
    return Expected(layer, expert_ids, exact, plain, edge)


def _fields(result: ReferenceResult) -> dict[str, Array]:
    return {name: field(result, name) for name in FIELDS}


def _permuted(layer: Layer, expert_ids: Array, rng: np.random.Generator) -> dict[str, Array]:
    order = {
        "T": rng.permutation(layer.tokens),
        "E": rng.permutation(layer.experts),
        "H": rng.permutation(layer.hidden),
        "I": rng.permutation(layer.intermediate),
    }

    def moved(array: Array, axes: str) -> Array:
        for axis, letter in enumerate(axes):
            if letter in order:
                array = np.take(array, order[letter], axis=axis)
        return array

    back = {letter: np.argsort(permutation) for letter, permutation in order.items()}
    ids_Tk = back["E"][moved(expert_ids, "T-")]
    twin = replace(
        layer,
        input=moved(layer.input, "TH"),
        logits=moved(layer.logits, "TE"),
        gate=moved(layer.gate, "EIH"),
        up=moved(layer.up, "EIH"),
        down=moved(layer.down, "EHI"),
        grad_output=moved(layer.grad_output, "TH"),
        options=replace(layer.options, selection=FixedSelection(ids_Tk)),
    )
    arithmetic = replace(Arithmetic.same_type(twin), noise=rng)
    result = reference_layer(twin, arithmetic, ids_Tk)
    restored: dict[str, Array] = {}
    for name, axes in _AXES.items():
        array = field(result, name)
        for axis, letter in enumerate(axes):
            if letter in back:
                array = np.take(array, back[letter], axis=axis)
        restored[name] = array
    if layer.options.combine is CombineAccumulation.STORAGE:
        # There the order of experts is no accident of summation: it decides which part is lost.
        del restored["output"]
    return restored


def _worse(exact: Array, first: Array, second: Array) -> Array:
    """Of two results the one farther from exact, element by element; finite if either is."""
    with np.errstate(all="ignore"):
        before, after = (np.abs(value.astype(np.float64) - exact) for value in (first, second))
        only = np.isfinite(second) & ~np.isfinite(first)
        return np.where(only | (np.isfinite(after) & (after > before)), second, first)
