"""All five gradients agree with central differences in float64, the selection held fixed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

import ruda
from ruda.backend.registry import AnyBackend
from ruda.testing.layers import Array, random_layer

TOKENS, EXPERTS, HIDDEN, INTERMEDIATE = 4, 4, 3, 5
STEP = 1e-5

SELECTIONS = {
    "softmax": ruda.SoftmaxSelection(2),
    "one": ruda.SoftmaxSelection(1),
    "groups": ruda.GroupedSelection(2, groups=2, selected_groups=1),
    "repeated": ruda.FixedSelection(np.array([[0, 0], [1, 3], [3, 1], [2, 2]])),
}


def central_differences(value: Callable[[Array], float], x: Array) -> Array:
    gradient = np.zeros_like(x)
    for index in np.ndindex(*x.shape):
        ahead, behind = x.copy(), x.copy()
        ahead[index] += STEP
        behind[index] -= STEP
        gradient[index] = (value(ahead) - value(behind)) / (2 * STEP)
    return gradient


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("intermediates", ruda.Intermediates)
@pytest.mark.parametrize(
    ("scoring", "renormalize", "scale", "epsilon"),
    [
        *itertools.product(ruda.RouterScoring, (True, False), (1.0, 2.5), (0.0,)),
        *itertools.product(ruda.RouterScoring, (True,), (2.5,), (0.3,)),
    ],
)
def test_gradients(
    backend: AnyBackend,
    selection: str,
    intermediates: ruda.Intermediates,
    scoring: ruda.RouterScoring,
    renormalize: bool,
    scale: float,
    epsilon: float,
) -> None:
    """Case 026: the router gradient is there, and right, in every mode."""
    options = ruda.MoeOptions(
        selection=SELECTIONS[selection],
        weights=ruda.RouterWeightOptions(scoring, renormalize, scale, epsilon),
        intermediates=intermediates,
    )
    layer = random_layer(
        tokens=TOKENS,
        hidden=HIDDEN,
        intermediate=INTERMEDIATE,
        experts=EXPERTS,
        options=options,
        dtype=ruda.DType.FLOAT64,
        seed=26,
    )
    operands = {name: getattr(layer, name) for name in ("input", "logits", "gate", "up", "down")}
    if selection == "repeated":
        fixed = SELECTIONS[selection]
        assert isinstance(fixed, ruda.FixedSelection)
        options = replace(
            options, selection=ruda.FixedSelection(backend.from_numpy(fixed.expert_ids))
        )
    tensors = [backend.from_numpy(array) for array in operands.values()]
    _, state = ruda.moe_forward(*tensors, options=options, backend=backend)
    gradients = ruda.moe_backward(state, backend.from_numpy(layer.grad_output))
    held = replace(options, selection=ruda.FixedSelection(ruda.moe_route_indices(state)))

    for name, x in operands.items():

        def loss(value: Array, name: str = name) -> float:
            moved = {**operands, name: value}
            output = ruda.moe_inference(
                *(backend.from_numpy(array) for array in moved.values()),
                options=held,
                backend=backend,
            )
            return float(np.sum(backend.to_numpy(output) * layer.grad_output))

        expected = central_differences(loss, x)
        got = backend.to_numpy(getattr(gradients, name))
        scale_of = max(float(np.abs(expected).max()), 1.0)
        assert np.abs(got - expected).max() <= 1e-6 * scale_of * 0.1, name
        if name == "logits" and not (selection == "one" and renormalize and epsilon == 0):
            assert np.abs(got).max() > 1e-4
