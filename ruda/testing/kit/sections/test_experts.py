"""Contract 5: what one expert makes of a row, with every marked rounding.

Seen through the branch with one slot a token and a routing weight of exactly 1, where the output is
the expert's own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import ruda
from ruda.base.dtypes import DType
from ruda.stages.options import Intermediates, RouterScoring
from ruda.testing.kit.plugin import Checker
from ruda.testing.layers import numpy_dtype
from ruda.testing.run import on_host
from ruda.testing.specimens.run import placed, run_moe
from ruda.testing.specimens.specimen import Choice, Flaw, Numbers, Routing, Specimen
from ruda.testing.tolerance import assert_exact

SECTION = "5 experts"

EXPERT = Specimen(
    top_k=1,
    choice=Choice.FIXED,
    scoring=RouterScoring.SIGMOID,
    renormalize=False,
    routing=Routing.ALL_ONE,
)
OUTPUT = ("output",)


def expert(**fields: Any) -> Specimen:
    """Routing weights of exactly 1."""
    return replace(EXPERT, **fields)


@pytest.mark.parametrize("intermediates", list(Intermediates))
@pytest.mark.parametrize("dtype", list(DType))
def test_shapes(checker: Checker, dtype: DType, intermediates: Intermediates) -> None:
    for tokens, hidden, intermediate, experts in (
        (1, 1, 1, 1),
        (3, 1, 5, 2),
        (3, 5, 1, 2),
        (7, 6, 10, 3),
        (33, 16, 24, 4),
        (5, 40, 9, 12),
    ):
        checker.specimen(
            expert(
                tokens=tokens,
                hidden=hidden,
                intermediate=intermediate,
                experts=experts,
                dtype=dtype,
                intermediates=intermediates,
            ),
            run_moe,
            OUTPUT,
        )


@pytest.mark.parametrize("dtype", list(DType))
def test_rows_on_few_experts(checker: Checker, dtype: DType) -> None:
    """Every row on one expert, most on the last, and experts without rows between."""
    checker.specimen(expert(tokens=150, experts=1, dtype=dtype), run_moe, OUTPUT)
    checker.specimen(expert(tokens=40, experts=9, top_k=1, dtype=dtype, seed=3), run_moe, OUTPUT)
    skewed = expert(
        tokens=65, experts=6, dtype=dtype, choice=Choice.SOFTMAX, routing=Routing.SKEWED
    )
    checker.specimen(skewed, run_moe, OUTPUT)


def test_whole_numbers(checker: Checker) -> None:
    """Readable operands: gate and up exchanged, or down transposed where H = I, show at once."""
    for width in (1, 2, 3):
        specimen = expert(
            tokens=2, hidden=width, intermediate=width, experts=2, numbers=Numbers.WHOLE, seed=width
        )
        checker.specimen(specimen, run_moe, OUTPUT)


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
def test_where_16_bits_are_rounded(checker: Checker, dtype: DType) -> None:
    """An up output between two 16-bit numbers: rounded before their product, or never."""
    checker.needs(dtype)
    kind = numpy_dtype(dtype)
    backend = checker.backend
    bits = 11 if dtype is DType.FLOAT16 else 8
    # g is 40, so that silu(g) is g; u is 1 + a quarter unit, which the storage type cannot hold.
    gate, up = np.array([[[40.0, 0.0]]], kind), np.array([[[1.0, 2.0 ** -(bits + 1)]]], kind)
    down = np.array([[[1.0], [-1.0]]], kind)
    for intermediates, u in (
        (Intermediates.STORAGE, 1.0),
        (Intermediates.COMPUTE, 1 + 2.0 ** -(bits + 1)),
    ):
        output, _ = ruda.experts_forward(
            backend.from_numpy(np.array([[1.0, 1.0]], kind)),
            backend.from_numpy(np.array([[0]])),
            backend.from_numpy(np.ones((1, 1), np.float32)),
            *(backend.from_numpy(array) for array in (gate, up, down)),
            options=ruda.ExpertOptions(intermediates=intermediates),
            backend=backend,
        )
        wanted = np.array([[40 * u, -40 * u]]).astype(kind)
        assert_exact(f"output, {intermediates}", on_host(backend, {"": output})[""], wanted)


@pytest.mark.parametrize("value", [-100.0, 100.0, -1e4, float("inf"), float("-inf"), float("nan")])
def test_far_out_gates(checker: Checker, value: float) -> None:
    """silu(-100) is -100 e^-100, not NaN; what is not finite stays in its token."""
    flaw: Flaw = ("input", 0, value)
    specimen = expert(tokens=4, hidden=3, flaws=(flaw,))
    checker.specimen(specimen, run_moe, OUTPUT)


def test_the_routing_weight_is_not_applied_to_the_input(checker: Checker) -> None:
    """A sigmoid weight of one half: silu(w x) is not w silu(x)."""
    specimen = expert(routing=Routing.RANDOM, scale=0.5, experts=3)
    checker.specimen(specimen, run_moe, OUTPUT)


def test_only_rows_that_exist_are_computed(checker: Checker) -> None:
    """Weights of an expert that nobody chose are never read into a result."""
    specimen = expert(tokens=6, experts=4, top_k=1, routing=Routing.ALL_ONE)
    backend = checker.backend
    ids = backend.from_numpy(np.zeros((6, 1), np.int64))
    on = placed(backend, specimen)
    sound = replace(on, options=replace(on.options, selection=ruda.FixedSelection(ids)))
    poisoned: dict[str, Any] = {}
    for name in ("gate", "up", "down"):
        array = np.array(backend.to_numpy(on.tensors[name]))
        array[1:] = np.nan
        poisoned[name] = backend.from_numpy(array)
    outputs = {
        name: layer.forward()[0]
        for name, layer in {"sound": sound, "poisoned": sound.replaced(**poisoned)}.items()
    }
    found = on_host(backend, outputs)
    label = "output, with the weights of unused experts NaN"
    assert_exact(label, found["poisoned"], found["sound"])
