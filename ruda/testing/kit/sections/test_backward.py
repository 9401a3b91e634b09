"""Contract 7: the five gradients, what is kept for them, and what is not computed."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import ruda
from ruda.base.dtypes import DType
from ruda.stages.options import Intermediates, MoeGradientSelection, RouterScoring
from ruda.testing.kit.plugin import Checker
from ruda.testing.layers import numpy_dtype
from ruda.testing.run import on_host
from ruda.testing.specimens.run import placed, run_experts, run_moe
from ruda.testing.specimens.specimen import Choice, Numbers, Routing, Specimen
from ruda.testing.tolerance import assert_exact, assert_same_bits

SECTION = "7 backward"

MOE = ("input", "logits", "gate", "up", "down")
EXPERTS = ("input", "weights", "gate", "up", "down")

SHAPES = (
    Specimen(tokens=1, hidden=1, intermediate=1, experts=1, top_k=1),
    Specimen(tokens=2, hidden=2, intermediate=2, experts=2, top_k=1, numbers=Numbers.WHOLE),
    Specimen(tokens=3, hidden=3, intermediate=3, experts=3, top_k=2),
    Specimen(tokens=0),
    Specimen(tokens=17, hidden=7, intermediate=5, experts=8, top_k=3),
    Specimen(tokens=65, hidden=16, intermediate=9, experts=4, top_k=2, routing=Routing.SKEWED),
    Specimen(tokens=5, hidden=6, intermediate=10, experts=40, top_k=2),
    Specimen(tokens=6, experts=8, top_k=3, routing=Routing.FEW_EXPERTS),
    Specimen(tokens=9, experts=5, top_k=5),
    Specimen(tokens=9, routing=Routing.MASKED, scoring=RouterScoring.SIGMOID),
    Specimen(tokens=9, routing=Routing.FAR_APART),
)


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("shape", SHAPES, ids=repr)
def test_shapes(checker: Checker, shape: Specimen, dtype: DType) -> None:
    checker.specimen(replace(shape, dtype=dtype), run_moe, MOE)
    checker.specimen(replace(shape, dtype=dtype), run_experts, EXPERTS)


RULES = [
    Specimen(scoring=scoring, renormalize=renormalize, scale=scale, epsilon=epsilon)
    for scoring, renormalize in itertools.product(RouterScoring, (True, False))
    for scale, epsilon in ((1.0, 0.0), (2.5, 1e-20))
]


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_router_rules(checker: Checker, rule: Specimen) -> None:
    for specimen in (
        rule,
        replace(rule, choice=Choice.GROUPED, bias=True, experts=8, groups=4, selected_groups=2),
        replace(rule, choice=Choice.FIXED, repeated_ids=True, top_k=4, experts=5),
    ):
        checker.specimen(specimen, run_moe, MOE)


@pytest.mark.parametrize("intermediates", list(Intermediates))
@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
def test_where_16_bits_are_rounded(
    checker: Checker, dtype: DType, intermediates: Intermediates
) -> None:
    for specimen in (
        Specimen(tokens=33, hidden=12, intermediate=8, seed=1),
        Specimen(tokens=33, hidden=1, intermediate=1, experts=2, top_k=1, seed=2),
        Specimen(tokens=300, hidden=3, intermediate=2, experts=1, top_k=1, seed=3),
        Specimen(tokens=9, logits_dtype=DType.FLOAT32, seed=4),
    ):
        kind = replace(specimen, dtype=dtype, intermediates=intermediates)
        checker.specimen(kind, run_moe, MOE)


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
def test_weight_gradients_of_16_bits_are_float32(checker: Checker, dtype: DType) -> None:
    """257 rows that each add 1: a 16-bit sum, or one rounded to 16 bits, is not 257."""
    checker.needs(dtype)
    kind = numpy_dtype(dtype)
    backend = checker.backend
    tokens = 257 if dtype is DType.BFLOAT16 else 2049
    # silu(40) is 40 there, and u is 1/40 rounded: a is the same for all rows.
    u = np.float32(np.array(1 / 40).astype(kind))
    operands = (
        np.ones((tokens, 1), kind),
        np.full((1, 1, 1), 40, kind),
        np.full((1, 1, 1), u, kind),
        np.ones((1, 1, 1), kind),
    )
    x, *weights = (backend.from_numpy(array) for array in operands)
    _, state = ruda.experts_forward(
        x,
        backend.from_numpy(np.zeros((tokens, 1), np.int64)),
        backend.from_numpy(np.ones((tokens, 1), np.float32)),
        *weights,
        backend=backend,
    )
    gradients = ruda.experts_backward(state, backend.from_numpy(operands[0]))
    a = np.float32(np.array(np.float32(40) * u).astype(kind))
    wanted = np.array([[[np.float32(tokens) * a]]], np.float32)
    assert_exact("down", on_host(backend, {"down": gradients.down})["down"], wanted)


def test_a_token_counts_once_for_each_slot(checker: Checker) -> None:
    """Both experts read token 0: its gradient is the sum of theirs, not the last one written."""
    specimen = Specimen(
        tokens=1, hidden=1, intermediate=1, experts=2, top_k=2, numbers=Numbers.WHOLE, seed=1
    )
    for seed in range(4):
        checker.specimen(replace(specimen, seed=seed), run_moe, MOE)


def test_a_zero_weight_has_a_gradient(checker: Checker) -> None:
    """A sigmoid of exactly 0 in one slot: nothing is divided by it."""
    backend = checker.backend
    on = placed(backend, Specimen(tokens=3, top_k=2))
    ids = backend.from_numpy(np.array([[0, 1], [2, 3], [1, 0]]))
    tensors = [on.tensors[name] for name in ("gate", "up", "down")]

    def gradient(weights: Any) -> Any:
        wide = backend.from_numpy(np.array(weights, np.float32))
        _, state = ruda.experts_forward(on.tensors["input"], ids, wide, *tensors, backend=backend)
        return on_host(backend, ruda.experts_backward(state, on.grad_output).asdict())["weights"]

    some = gradient([[0.0, 1.0], [0.5, 0.0], [0.0, 0.0]])
    assert np.all(some != 0)
    # The gradient of a weight does not depend on the weights.
    assert_same_bits("weights", some, gradient([[2.0, 1.0], [0.5, 3.0], [1.0, 1.0]]))


@pytest.mark.parametrize(
    "wanted", [(), *((name,) for name in MOE), ("input", "logits"), ("gate", "down")]
)
def test_what_is_not_wanted_is_none(checker: Checker, wanted: tuple[str, ...]) -> None:
    """Asked for at the forward or only at the backward, the same bits; the others are `None`."""
    backend = checker.backend
    on = placed(backend, Specimen(tokens=6))
    selection = MoeGradientSelection(**dict.fromkeys(wanted, True))
    full_output, full = on.forward()
    all_gradients = on_host(backend, ruda.moe_backward(full, on.grad_output).asdict())
    told_output, told = on.forward(selection)
    outputs = on_host(backend, {"told": told_output, "full": full_output})
    assert_same_bits("output", outputs["told"], outputs["full"])
    for state in (full, told):
        found = ruda.moe_backward_selected(state, on.grad_output, selection).asdict()
        for name, tensor in found.items():
            assert (tensor is None) == (name not in wanted), f"{name}, where {wanted} are wanted"
        some = on_host(backend, {name: found[name] for name in wanted})
        for name in wanted:
            assert_same_bits(name, some[name], all_gradients[name])


def test_what_was_not_kept_is_an_error(checker: Checker) -> None:
    backend = checker.backend
    on = placed(backend, Specimen())
    _, state = on.forward(MoeGradientSelection(logits=True))
    assert state.experts.kept.gate_output is None
    assert state.experts.kept.activation is not None
    with pytest.raises(ruda.StateError, match="input, gate, up, down asked for"):
        ruda.moe_backward(state, on.grad_output)


def test_what_a_state_keeps(checker: Checker) -> None:
    """g and u, [R, I] each, in the storage type, and nothing else by row."""
    backend = checker.backend
    for dtype in sorted(backend.dtypes):
        on = placed(backend, Specimen(tokens=6, dtype=dtype))
        _, state = on.forward()
        kept = state.experts.kept
        assert kept.activation is None
        for name in ("gate_output", "up_output"):
            tensor = getattr(kept, name)
            assert tensor is not None, f"{name} is not kept"
            assert backend.shape(tensor) == (12, 3)
            assert backend.dtype(tensor) is dtype


def test_backward_again(checker: Checker) -> None:
    """A state may be used any number of times; nothing in it is a buffer."""
    backend = checker.backend
    for dtype in sorted(backend.dtypes):
        on = placed(backend, Specimen(tokens=9, dtype=dtype))
        _, state = on.forward()
        first = on_host(backend, ruda.moe_backward(state, on.grad_output).asdict())
        second = on_host(backend, ruda.moe_backward(state, on.grad_output).asdict())
        for name in MOE:
            assert_same_bits(f"{name}, a second time", second[name], first[name])


def test_inference_gives_the_same_bits(checker: Checker) -> None:
    backend = checker.backend
    for specimen in (Specimen(), Specimen(tokens=40, choice=Choice.GROUPED, bias=True)):
        on = placed(backend, specimen)
        output, _ = on.forward()
        alone = on.inference()
        found = on_host(backend, {"forward": output, "inference": alone})
        assert_same_bits("moe_inference", found["inference"], found["forward"])
