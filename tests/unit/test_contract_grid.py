"""Output and all five gradients against the independent float64 reference, over the whole grid.

Every pair of values of any two factors meets in at least one layer, and every triple of the factors
that change the arithmetic; shapes T in {0, 1, 17, 129}, E in {1, 8, 257}, k in 1..min(E, 20).
"""

from __future__ import annotations

import itertools
import random
from functools import cache
from typing import Any

import numpy as np
import pytest

import ruda
from ruda.backend.registry import AnyBackend
from ruda.base.dtypes import DType
from ruda.testing.layers import random_layer
from ruda.testing.reference.expected import Expected, expect
from ruda.testing.run import on_host, place_layer
from ruda.testing.verdict import judge

FACTORS: dict[str, tuple[Any, ...]] = {
    "dtype": tuple(DType),
    "scoring": tuple(ruda.RouterScoring),
    "renormalize": (True, False),
    "scale": (1.0, 2.5),
    "epsilon": (0.0, 1e-20),
    "selection": ("softmax", "plain", "bias", "groups", "bias_groups", "top_two", "fixed"),
    "intermediates": tuple(ruda.Intermediates),
    "combine": tuple(ruda.CombineAccumulation),
    "logits": ("same", DType.FLOAT32, DType.FLOAT64),
    "tokens": (0, 1, 17, 129),
    "experts": (1, 8, 257),
    "k": ("one", "two", "some", "most"),
}
ARITHMETIC = ("dtype", "scoring", "renormalize", "selection", "intermediates", "combine")


def _rows() -> list[dict[str, Any]]:
    """A covering design, chosen greedily from random candidates: the same one every time."""
    rng = random.Random(0)
    names = list(FACTORS)
    wanted: set[tuple[Any, ...]] = set()
    groups = [*itertools.combinations(names, 2), *itertools.combinations(ARITHMETIC, 3)]
    for group in groups:
        for values in itertools.product(*(FACTORS[name] for name in group)):
            wanted.add((group, values))

    def covered(row: dict[str, Any]) -> set[tuple[Any, ...]]:
        return {(group, tuple(row[name] for name in group)) for group in groups} & wanted

    rows: list[dict[str, Any]] = []
    while wanted:
        group, values = rng.choice(sorted(wanted, key=repr))
        candidates = [
            {name: rng.choice(FACTORS[name]) for name in names}
            | dict(zip(group, values, strict=True))
            for _ in range(20)
        ]
        best = max(candidates, key=lambda row: len(covered(row)))
        wanted -= covered(best)
        rows.append(best)
    return rows


def _selection(row: dict[str, Any], tokens: int, experts: int, k: int, seed: int) -> Any:
    kind, scoring = row["selection"], row["scoring"]
    if kind == "softmax":
        return ruda.SoftmaxSelection(k)
    if kind == "fixed":
        rng = np.random.default_rng(seed)
        return ruda.FixedSelection(rng.integers(0, experts, (tokens, k), dtype=np.int32))
    if kind in ("plain", "bias") or experts == 1:
        return ruda.GroupedSelection(k, scoring)
    groups = 4 if experts % 4 == 0 else 1
    size = experts // groups
    return ruda.GroupedSelection(
        k,
        scoring,
        groups=groups,
        selected_groups=min(groups, -(-k // size) + 1),
        group_top_two=kind == "top_two",
    )


@cache
def case(number: int) -> Expected:
    row = ROWS[number]
    tokens, experts = row["tokens"], row["experts"]
    most = min(experts, 20)
    k = {"one": 1, "two": min(2, most), "some": (most + 1) // 2, "most": most}[row["k"]]
    options = ruda.MoeOptions(
        selection=_selection(row, tokens, experts, k, number),
        weights=ruda.RouterWeightOptions(
            row["scoring"], row["renormalize"], row["scale"], row["epsilon"]
        ),
        intermediates=row["intermediates"],
        combine=row["combine"],
    )
    dtype = row["dtype"]
    layer = random_layer(
        tokens=tokens,
        hidden=(16, 7, 1, 20)[number % 4],
        intermediate=(12, 5, 9, 1)[number // 4 % 4],
        experts=experts,
        options=options,
        dtype=dtype,
        logits_dtype=dtype if row["logits"] == "same" else row["logits"],
        bias=row["selection"] in ("bias", "bias_groups", "top_two"),
        seed=number,
    )
    return expect(layer)


ROWS = _rows()


def _identify(number: int) -> str:
    row = ROWS[number]
    return "-".join(str(getattr(value, "value", value)) for value in row.values())


@pytest.mark.parametrize("number", range(len(ROWS)), ids=_identify)
def test_output_and_gradients(backend: AnyBackend, number: int) -> None:
    found = case(number)
    layer = found.layer
    if layer.dtype not in backend.dtypes or layer.logits_dtype not in backend.dtypes:
        pytest.skip(f"{backend.name} has no {layer.dtype} or no {layer.logits_dtype}")
    on = place_layer(backend, layer)
    output, state = on.forward()
    gradients = ruda.moe_backward(state, on.grad_output)
    results = {"expert_ids": ruda.moe_route_indices(state), "output": output, **gradients.asdict()}
    failed = [str(one) for one in judge(found, on_host(backend, results)) if not one.passed]
    assert not failed, "; ".join(failed)
