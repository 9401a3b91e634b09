"""Contract 1: shapes and element types of everything that comes out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import ruda
from ruda.base.dtypes import INTEGER_NAMES, DType
from ruda.testing.kit.plugin import Checker
from ruda.testing.layers import numpy_dtype
from ruda.testing.run import OPERANDS
from ruda.testing.specimens.run import expected, placed, run_experts, run_moe
from ruda.testing.specimens.specimen import Choice, Specimen
from ruda.testing.verdict import result_dtype

SECTION = "1 shapes and types"


@pytest.mark.parametrize("logits_dtype", list(DType))
@pytest.mark.parametrize("dtype", list(DType))
def test_results(checker: Checker, dtype: DType, logits_dtype: DType) -> None:
    checker.needs(dtype, logits_dtype)
    for tokens in (3, 0):
        specimen = Specimen(tokens=tokens, dtype=dtype, logits_dtype=logits_dtype)
        t, k, e, h, i = tokens, 2, 4, 4, 3
        shapes = {
            "output": (t, h),
            "input": (t, h),
            "logits": (t, e),
            "weights": (t, k),
            "gate": (e, i, h),
            "up": (e, i, h),
            "down": (e, h, i),
        }
        for run in (run_moe, run_experts):
            results = run(checker.backend, specimen)
            results.pop("expert_ids", None)
            for name, array in results.items():
                wanted = numpy_dtype(result_dtype(name, dtype, logits_dtype))
                assert array.dtype == wanted, f"{specimen}: {name} is {array.dtype}, not {wanted}"
                assert array.shape == shapes[name], f"{specimen}: {name} is {array.shape}"


def test_expert_ids_have_the_natural_index_type(checker: Checker) -> None:
    backend = checker.backend
    natural = backend.dtype_name(backend.arange(1))
    for choice in Choice:
        on = placed(backend, Specimen(choice=choice, ids_dtype="uint8"))
        _, state = on.forward()
        ids = ruda.moe_route_indices(state)
        assert backend.dtype_name(ids) == natural
        assert backend.shape(ids) == (5, 2)


@pytest.mark.parametrize("ids_dtype", sorted(INTEGER_NAMES))
def test_any_integer_type_names_experts(checker: Checker, ids_dtype: str) -> None:
    checker.specimen(
        Specimen(choice=Choice.FIXED, experts=120, top_k=3, ids_dtype=ids_dtype), run_moe
    )


@pytest.mark.parametrize("experts", [1, 8, 257, 300])
def test_any_number_of_experts(checker: Checker, experts: int) -> None:
    """An index kept in eight bits ends at 255."""
    for top_k in {1, min(experts, 3), min(experts, 20)}:
        specimen = Specimen(tokens=4, experts=experts, top_k=top_k, hidden=2, intermediate=2)
        checker.specimen(specimen, run_moe)


@pytest.mark.parametrize("operand", OPERANDS)
def test_a_wrong_shape_is_refused(checker: Checker, operand: str) -> None:
    backend = checker.backend
    on = placed(backend, Specimen())
    array = getattr(expected(Specimen()).layer, operand)
    for wrong in (array[:, :-1], array[..., :-1], array[0]):
        with pytest.raises(ruda.ShapeError):
            on.replaced(**{operand: backend.from_numpy(wrong)}).forward()


@pytest.mark.parametrize("operand", ["gate", "up", "down"])
def test_a_mixed_type_is_refused(checker: Checker, operand: str) -> None:
    other = next(
        (
            dtype
            for dtype in DType
            if dtype is not DType.FLOAT32 and dtype in checker.backend.dtypes
        ),
        None,
    )
    if other is None:
        pytest.skip(f"{checker.backend.name} declares one type")
    backend = checker.backend
    on = placed(backend, Specimen())
    wrong = getattr(expected(Specimen()).layer, operand).astype(numpy_dtype(other))
    with pytest.raises(ruda.DTypeError, match=f"{operand}: expected float32.*got {other}"):
        on.replaced(**{operand: backend.from_numpy(wrong)}).forward()


def test_a_type_it_lacks_is_refused(checker: Checker) -> None:
    backend = checker.backend
    lacking = [dtype for dtype in DType if dtype not in backend.dtypes]
    if not lacking:
        pytest.skip(f"{backend.name} has every type")
    for dtype in lacking:
        reason = backend.unsupported(ruda.Request(dtype=dtype))
        assert reason, f"unsupported(Request(dtype={dtype})): expected a reason, got {reason!r}"


def test_float_ids_are_refused(checker: Checker) -> None:
    on = placed(checker.backend, Specimen())
    ids = checker.backend.from_numpy(np.zeros((5, 2), np.float32))
    options = replace(on.options, selection=ruda.FixedSelection(ids))
    with pytest.raises(ruda.DTypeError, match="expert_ids: expected an integer type, got float32"):
        replace(on, options=options).forward()
