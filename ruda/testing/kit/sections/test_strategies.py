"""Contract 8: a strategy is served or refused, never taken as a hint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import ruda
from ruda.base.dtypes import DType
from ruda.base.strategies import CombineGradientStrategy, ExpertStrategy, Request
from ruda.testing.kit.plugin import Checker
from ruda.testing.run import on_host
from ruda.testing.specimens.run import expected, placed, run_moe
from ruda.testing.specimens.specimen import Specimen
from ruda.testing.tolerance import assert_same_bits
from ruda.testing.verdict import judge

SECTION = "8 strategies"

REQUESTS = [
    *((field, strategy) for field in ("forward", "backward") for strategy in ExpertStrategy),
    *(("combine_backward", strategy) for strategy in CombineGradientStrategy),
]


def _run(checker: Checker, specimen: Specimen, field: str, strategy: Any) -> dict[str, Any]:
    backend = checker.backend
    on = placed(backend, specimen)
    options = replace(on.options, **{field: strategy})
    output, state = replace(on, options=options).forward()
    gradients = ruda.moe_backward(state, on.grad_output)
    return on_host(backend, {"output": output, **gradients.asdict()})


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize(("field", "strategy"), REQUESTS, ids=lambda value: str(value))
def test_served_or_refused(checker: Checker, field: str, strategy: Any, dtype: DType) -> None:
    checker.needs(dtype)
    specimen = Specimen(tokens=9, hidden=8, intermediate=16, dtype=dtype)
    reason = checker.backend.unsupported(Request(strategy=strategy, dtype=dtype))
    if reason is None:
        for verdict in judge(expected(specimen), _run(checker, specimen, field, strategy)):
            checker.verdict(verdict)
        return
    assert reason.strip(), f"unsupported({strategy}, {dtype}): expected a reason"
    with pytest.raises(ruda.UnsupportedStrategyError) as caught:
        _run(checker, specimen, field, strategy)
    for part in (checker.backend.name, strategy.name, reason):
        assert part in str(caught.value), f"the error does not name {part!r}: {caught.value}"


@pytest.mark.parametrize("dtype", list(DType))
def test_scalar_and_serial_are_always_served(checker: Checker, dtype: DType) -> None:
    checker.needs(dtype)
    for strategy in (ExpertStrategy.SCALAR, ExpertStrategy.AUTO, CombineGradientStrategy.SERIAL):
        reason = checker.backend.unsupported(Request(strategy=strategy, dtype=dtype))
        assert reason is None, f"{strategy} on {dtype}: {reason}"


def test_a_device_it_lacks_is_refused(checker: Checker) -> None:
    reason = checker.backend.unsupported(Request(device="nowhere:7"))
    assert reason, "unsupported(Request(device='nowhere:7')): expected a reason"


def test_serial_repeats_to_the_bit(checker: Checker) -> None:
    specimen = Specimen(tokens=65, hidden=16, intermediate=33, experts=4, top_k=3)
    first = run_moe(checker.backend, specimen)
    second = run_moe(checker.backend, specimen)
    assert_same_bits("logits, a second time", second["logits"], first["logits"])
