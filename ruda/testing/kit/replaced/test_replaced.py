"""Replaced kernels: each against the written body of its name, on the same backend.

Whole numbers and choices must be equal. Numbers are judged by the tolerance rule: the backend's
specification gives the plain result, the same body in long double the exact one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ruda.backend.registry import AnyBackend
from ruda.backend.specification import replaced_stages, specification, stage_bodies
from ruda.base.dtypes import DType
from ruda.testing.kit.plugin import Checker
from ruda.testing.kit.replaced.inputs import SHAPES, Call, Inputs, calls, put, widened
from ruda.testing.layers import Array, dtype_of
from ruda.testing.reference.extended import ExtendedBackend
from ruda.testing.tolerance import assert_exact

SECTION = "replaced kernels"

# Named apart, so that what is in one keeps the type it has.
_TUPLE: Any = tuple


def _leaves(result: Any, name: str) -> dict[str, Any]:
    """The tensors of a result by name: of a tensor, or of a tuple of such, named or not."""
    if result is None:
        return {}
    if not isinstance(result, _TUPLE):
        return {name: result}
    names = getattr(result, "_fields", range(len(result)))
    parts = {f"{name}.{part}": item for part, item in zip(names, result, strict=True)}
    return {key: leaf for part, item in parts.items() for key, leaf in _leaves(item, part).items()}


def _run(backend: AnyBackend, function: Any, call: Call, stage: str) -> dict[str, Array]:
    arguments, keywords = call
    with backend.numerics():
        result = function(*(put(backend, argument) for argument in arguments), **keywords)
    return {
        name: np.asarray(backend.to_numpy(leaf)) for name, leaf in _leaves(result, stage).items()
    }


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("stage", stage_bodies())
def test_kernel(checker: Checker, stage: str, dtype: DType) -> None:
    backend = checker.backend
    if stage not in replaced_stages(type(backend)):
        pytest.skip("the written body stands in: there is no kernel to compare")
    checker.needs(dtype)
    reference = specification(ExtendedBackend())
    kernel = getattr(backend, stage)
    written, exactly = getattr(specification(backend), stage), getattr(reference, stage)
    for shape in SHAPES:
        for flawed in (False, True):
            for call in calls(stage, Inputs(shape, dtype, flawed=flawed)):
                got = _run(backend, kernel, call, stage)
                plain = _run(backend, written, call, stage)
                wide = (tuple(map(widened, call[0])), {n: widened(v) for n, v in call[1].items()})
                exact = _run(reference, exactly, wide, stage)
                assert got.keys() == plain.keys(), (
                    f"{stage} gives {sorted(got)}, not {sorted(plain)}"
                )
                for name, array in got.items():
                    label = f"{name} of {shape}, {dtype}, {call[1] or call[0][-1]}"
                    if np.issubdtype(array.dtype, np.integer):
                        assert_exact(label, array, plain[name])
                    else:
                        checker.compare(
                            label,
                            array,
                            exact[name],
                            plain[name],
                            dtype_of(plain[name]),
                            unit=dtype,
                        )
