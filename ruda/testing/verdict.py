"""Whether the results of a layer are those of the contract: the one place where that is decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ruda.base.dtypes import DType
from ruda.testing.layers import Array
from ruda.testing.reference.expected import Expected
from ruda.testing.tolerance import Comparison, assert_exact, compare

_EXPERTS_WEIGHTS = ("gate", "up", "down")


def result_dtype(name: str, storage: DType, logits: DType) -> DType:
    """The type contract 1 and 7 give a result of a layer with these types."""
    if name in ("output", "input"):
        return storage
    if name == "logits":
        return logits
    return logits.compute if name == "weights" else storage.compute


def result_unit(name: str, storage: DType, logits: DType) -> DType:
    """The coarsest type a result passed through, marked roundings aside (contract 11).

    A float64 result made with float32 routing weights has their last place, and a float64 logits
    gradient of a float32 layer that of the products its dw is made of.
    """
    compute = min(storage.compute, logits.compute, key=_size)
    own = compute if name in ("weights", *_EXPERTS_WEIGHTS) else result_dtype(name, storage, logits)
    return min(own, compute, key=_size)


def judge(expected: Expected, results: Mapping[str, Array]) -> list[Comparison]:
    """Every result by name: expert ids equal, numbers within tolerance, untouched experts zero.

    Where other experts were chosen nothing else is said: every number is that of another layer.
    """
    if "expert_ids" in results:
        try:
            assert_exact("expert_ids", results["expert_ids"], expected.expert_ids)
        except AssertionError as error:
            return [Comparison("expert_ids", passed=False, reason=str(error))]
    return [_judge(expected, name, got) for name, got in results.items() if name != "expert_ids"]


def _judge(expected: Expected, name: str, got: Array) -> Comparison:
    types = expected.layer.dtype, expected.layer.logits_dtype
    found = compare(
        name,
        got,
        expected.exact[name],
        expected.plain[name],
        result_dtype(name, *types),
        unit=result_unit(name, *types),
        edge=expected.edge[name],
    )
    if name in _EXPERTS_WEIGHTS and found.passed:
        empty = np.setdiff1d(np.arange(len(got)), expected.expert_ids)
        filled = [int(expert) for expert in empty if np.any(got[expert] != 0)]
        if filled:
            reason = f"experts {filled} have no rows, but a gradient that is not zero"
            return replace(found, passed=False, reason=reason)
    return found


def _size(dtype: DType) -> int:
    return dtype.itemsize
