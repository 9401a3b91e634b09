"""Whether a backend's results for a specimen are those of the contract."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ruda.base.dtypes import DType
from ruda.testing.specimens.run import expected
from ruda.testing.layers import Array
from ruda.testing.specimens.specimen import Specimen
from ruda.testing.tolerance import Comparison, assert_exact, compare

_WEIGHTS = ("gate", "up", "down")


def result_dtype(specimen: Specimen, name: str) -> DType:
    """The type contract 1 and 7 give a result."""
    if name in ("output", "input"):
        return specimen.dtype
    if name == "logits":
        return specimen.router_dtype
    return specimen.router_dtype.compute if name == "weights" else specimen.dtype.compute


def result_unit(name: str, storage: DType, logits: DType) -> DType:
    """The coarsest type that a result's values passed through, marked roundings aside.

    A float64 result made with float32 routing weights has their last place, and a float64 logits
    gradient of a float32 layer that of the products its dw is made of.
    """
    compute = (
        storage.compute if storage.compute.itemsize < logits.compute.itemsize else logits.compute
    )
    own = storage if name in ("output", "input") else logits if name == "logits" else compute
    return own if own.itemsize <= compute.itemsize else compute


def judge(
    specimen: Specimen, results: dict[str, Array], names: Iterable[str] | None = None
) -> list[Comparison]:
    """Every result (or those named) judged; what must be exact raises at once where it is not."""
    reference = expected(specimen)
    verdicts: list[Comparison] = []
    for name in results if names is None else names:
        if name == "expert_ids":
            assert_exact(name, results[name], reference.expert_ids)
            continue
        verdicts.append(_judge_one(specimen, name, results[name]))
        if name in _WEIGHTS:
            _assert_empty_slabs(name, results[name], reference.expert_ids)
    return verdicts


def _judge_one(specimen: Specimen, name: str, got: Array) -> Comparison:
    reference = expected(specimen)
    dtype = result_dtype(specimen, name)
    return compare(
        name,
        got,
        reference.exact[name],
        reference.plain[name],
        dtype,
        unit=result_unit(name, specimen.dtype, specimen.router_dtype),
        edge=reference.edge[name],
    )


def _assert_empty_slabs(name: str, slabs: Array, expert_ids: Array) -> None:
    empty = np.setdiff1d(np.arange(len(slabs)), expert_ids)
    filled = [int(expert) for expert in empty if np.any(slabs[expert] != 0)]
    assert not filled, f"{name}: experts {filled} have no rows, but a gradient that is not zero"
