"""The plain same-type result a backend is compared with, over several orders of summation.

The rule of `tolerance` allows twice the error of the same arithmetic done by NumPy. On a tiny
layer one order of summation may be right by luck, and every other order then looks wrong; so the
arithmetic is done in several orders, by permuting tokens, experts and both widths, and once with
every product summed strictly one element after the other, as a matrix kernel may and NumPy's own
matrix-vector product does not. The worst of each element counts.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ruda.options import CombineAccumulation, FixedSelection
from ruda.testing.arithmetic import Arithmetic
from ruda.testing.layers import Array, Layer
from ruda.testing.reference import ReferenceResult, reference_layer

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


def references(
    layer: Layer, expert_ids: Array, *, orders: int = 4
) -> tuple[dict[str, Array], dict[str, Array]]:
    """The exact results, and the plain same-type results, worst of `orders` orders, by name."""
    exact_run = reference_layer(layer, Arithmetic.exact(), expert_ids)
    plain_run = reference_layer(layer, Arithmetic.same_type(layer), expert_ids)
    exact = {name: field(exact_run, name) for name in FIELDS}
    plain = {name: field(plain_run, name) for name in FIELDS}
    rng = np.random.default_rng(0)
    one_by_one = replace(Arithmetic.same_type(layer), is_sequential=True)
    sequential = reference_layer(layer, one_by_one, expert_ids)
    for name in FIELDS:
        plain[name] = _worse(exact[name], plain[name], field(sequential, name))
    for _ in range(orders - 1):
        for name, other in _permuted(layer, expert_ids, rng).items():
            plain[name] = _worse(exact[name], plain[name], other)
    return exact, plain


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
    result = reference_layer(twin, Arithmetic.same_type(twin), ids_Tk)
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
    """Of two results the one farther from exact, element by element; non-finite as in the first."""
    with np.errstate(all="ignore"):
        before, after = (np.abs(value.astype(np.float64) - exact) for value in (first, second))
        return np.where(np.isfinite(after) & (after > before), second, first)
