"""Contract 9: the same bits every time, operands left alone, faults that stay where they belong."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import numpy as np
import pytest

import ruda
from ruda.base.dtypes import DType
from ruda.testing.kit.plugin import Checker
from ruda.testing.placement import Layout
from ruda.testing.run import OPERANDS
from ruda.testing.specimens.properties import bad_token_stays_alone, operand_bytes
from ruda.testing.specimens.run import placed, run_experts, run_moe
from ruda.testing.specimens.specimen import Choice, Specimen
from ruda.testing.tolerance import assert_same_bits

SECTION = "9 promises"

CHOICES = (
    Specimen(tokens=7),
    Specimen(tokens=7, choice=Choice.GROUPED, bias=True, experts=8, groups=4, selected_groups=2),
    Specimen(tokens=7, choice=Choice.FIXED, repeated_ids=True),
)


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("specimen", CHOICES, ids=repr)
def test_a_second_run_gives_the_same_bits(
    checker: Checker, specimen: Specimen, dtype: DType
) -> None:
    checker.needs(dtype)
    kind = replace(specimen, tokens=65, hidden=16, intermediate=33, dtype=dtype)
    for run in (run_moe, run_experts):
        first = run(checker.backend, kind)
        for name, array in run(checker.backend, kind).items():
            assert_same_bits(f"{name}, a second time", array, first[name])


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("specimen", CHOICES, ids=repr)
def test_operands_are_left_alone(checker: Checker, specimen: Specimen, dtype: DType) -> None:
    checker.needs(dtype)
    on = placed(checker.backend, replace(specimen, dtype=dtype))
    before = operand_bytes(on)
    _, state = on.forward()
    ruda.moe_backward(state, on.grad_output)
    after = operand_bytes(on)
    changed = [name for name in before if before[name] != after[name]]
    assert not changed, f"{specimen}: written to {', '.join(changed)}"


@pytest.mark.parametrize("operand", [*OPERANDS, "grad_output", "expert_ids", "correction_bias"])
@pytest.mark.parametrize("layout", list(Layout)[1:])
def test_any_memory_layout(checker: Checker, layout: Layout, operand: str) -> None:
    specimen = {"expert_ids": CHOICES[2], "correction_bias": CHOICES[1]}.get(operand, CHOICES[0])
    for top_k in (1, 2, 4):
        laid = replace(specimen, top_k=top_k, layouts=((operand, layout),))
        checker.specimen(laid, run_moe)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("specimen", CHOICES, ids=repr)
def test_a_bad_token_stays_alone(checker: Checker, specimen: Specimen, value: float) -> None:
    for seed in range(3):
        bad_token_stays_alone(checker.backend, replace(specimen, seed=seed), value)


def test_no_tokens_no_warnings(checker: Checker) -> None:
    for specimen in CHOICES:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            checker.specimen(replace(specimen, tokens=0), run_moe)
            checker.specimen(replace(specimen, tokens=0), run_experts)


@pytest.mark.parametrize("operand", OPERANDS)
def test_a_tensor_of_nobody_is_refused(checker: Checker, operand: str) -> None:
    on = placed(checker.backend, Specimen())
    stranger = np.asarray(checker.backend.to_numpy(on.tensors[operand])).tolist()
    with pytest.raises(ruda.BackendMismatchError, match=operand):
        on.replaced(**{operand: stranger}).forward()
