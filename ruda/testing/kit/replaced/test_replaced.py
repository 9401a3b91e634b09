"""Replaced kernels: each against the written body of its name, on the same backend.

Whole numbers and choices must be equal. Numbers are judged by the tolerance rule: the backend's
specification gives the plain result, the same body in long double the exact one.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, cast

import numpy as np
import pytest

from ruda.backend.registry import AnyBackend
from ruda.backend.specification import replaced_stages, specification, stage_bodies
from ruda.base.dtypes import DType
from ruda.base.strategies import CombineGradientStrategy, ExpertStrategy
from ruda.stages.experts import ExpertWeights
from ruda.stages.options import (
    CombineAccumulation,
    ExpertOptions,
    ExpertsGradientSelection,
    GroupedSelection,
    Intermediates,
    RouterScoring,
    RouterWeightOptions,
    SoftmaxSelection,
)
from ruda.testing.kit.plugin import Checker
from ruda.testing.reference.extended import ExtendedBackend
from ruda.testing.layers import Array, dtype_of, numpy_dtype
from ruda.testing.tolerance import assert_exact

SECTION = "replaced kernels"


@dataclass(frozen=True)
class Shape:
    """Tokens, slots, experts, hidden, intermediate."""

    tokens: int
    slots: int
    experts: int
    hidden: int
    intermediate: int


SHAPES = (
    Shape(0, 2, 3, 4, 5),
    Shape(1, 1, 1, 1, 1),
    Shape(5, 2, 4, 3, 7),
    Shape(9, 3, 12, 8, 5),
    Shape(40, 2, 3, 33, 17),
)


class Inputs:
    """NumPy inputs of every stage for one shape and type; a NaN in one row of some."""

    def __init__(self, shape: Shape, dtype: DType, *, flawed: bool) -> None:
        self.shape, self.dtype = shape, dtype
        self.rng = np.random.default_rng(1)
        self.flawed = flawed
        self.ids = self.rng.integers(0, max(1, shape.experts - 1), (shape.tokens, shape.slots))

    def floats(self, *extents: int, dtype: DType | None = None) -> Array:
        """Normal numbers; the first may be NaN."""
        values = self.rng.standard_normal(extents)
        if self.flawed and values.size and len(extents) == 2:
            values.flat[0] = np.nan
        return values.astype(numpy_dtype(dtype or self.dtype))

    def weights(self) -> Array:
        """Positive routing weights in the compute type, one of them 0."""
        values = self.rng.random((self.shape.tokens, self.shape.slots))
        if values.size:
            values.flat[-1] = 0.0
        return values.astype(numpy_dtype(self.dtype.compute))

    @property
    def rows(self) -> int:
        """R"""
        return self.shape.tokens * self.shape.slots


def _calls(stage: str, of: Inputs) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments and keywords to call a stage with; `Layout` and types are filled in per backend."""
    shape, dtype = of.shape, of.dtype
    t, k, e, h, i = shape.tokens, shape.slots, shape.experts, shape.hidden, shape.intermediate
    logits = of.floats(t, e)
    strategy = {"strategy": ExpertStrategy.AUTO}
    if stage == "take_along":
        return [((logits, Ids(of.ids)), {}), ((of.ids.astype(np.int64), Ids(of.ids % k)), {})]
    if stage == "product":
        pair = (of.floats(t, h), of.floats(h, i))
        return [(pair, {"dtype": dtype.compute, **strategy})]
    if stage == "top_k":
        tied = np.rint(of.floats(t, e, dtype=dtype.compute))
        return [((tied, n), {}) for n in {1, e}]
    if stage == "select_experts":
        rules: list[Any] = [SoftmaxSelection(min(k, e))]
        rules += [GroupedSelection(min(k, e), scoring) for scoring in RouterScoring]
        if e % 4 == 0:
            rules.append(GroupedSelection(2, groups=4, selected_groups=2, group_top_two=e > 4))
        bias = of.rng.standard_normal(e).astype(numpy_dtype(dtype.compute))
        return [
            ((logits, b, rule), {})
            for rule in rules
            for b in (None, bias)
            if b is None or isinstance(rule, GroupedSelection)
        ]
    options = [
        RouterWeightOptions(scoring, renormalize, 2.5, epsilon)
        for scoring in RouterScoring
        for renormalize in (True, False)
        for epsilon in (0.0, 1e-3)
    ]
    outside = of.ids.copy()
    outside[:1, :1] = -1
    if stage == "router_weights":
        return [((logits, Ids(outside), option), {}) for option in options]
    if stage == "router_weights_backward":
        dweights = of.floats(t, k, dtype=dtype.compute)
        return [((logits, Ids(outside), dweights, option), {}) for option in options]
    if stage == "dispatch":
        return [((Ids(of.ids), e), {})]
    if stage == "combine":
        y = of.floats(of.rows, h)
        return [
            ((y, of.weights(), Rows(of.ids, e)), {"accumulation": accumulation, "dtype": dtype})
            for accumulation in CombineAccumulation
        ]
    if stage == "copy_backward":
        return [((of.floats(of.rows, h), Rows(of.ids, e)), {"dtype": dtype})]
    if stage in ("grouped_matmul", "grouped_matmul_transposed"):
        n = h if stage == "grouped_matmul" else i
        return [
            (
                (of.floats(of.rows, n), of.floats(e, i, h), Offsets(of.ids, e)),
                {"dtype": d, **strategy},
            )
            for d in {dtype, dtype.compute}
        ]
    if stage == "expert_weight_gradient":
        pair = (of.floats(of.rows, i), of.floats(of.rows, h))
        return [((*pair, Offsets(of.ids, e)), {"dtype": dtype.compute, **strategy})]
    g, u, da = (of.floats(of.rows, i) for _ in range(3))
    if stage == "swiglu":
        return [((g, u), {})]
    if stage == "swiglu_backward":
        return [((g, u, da), {})]
    if stage == "routing_weight_gradient":
        return [((g, u), {"dtype": dtype.compute, "strategy": CombineGradientStrategy.SERIAL})]
    experts = ExpertWeights(of.floats(e, i, h), of.floats(e, i, h), of.floats(e, h, i))
    offsets = Offsets(of.ids, e)
    x = of.floats(of.rows, h)
    every: dict[str, Any] = {"gradients": ExpertsGradientSelection.all()}
    both = [ExpertOptions(intermediates=kind) for kind in Intermediates]
    if stage == "expert_rows_forward":
        return [((x, offsets, experts), {"options": option, **every}) for option in both]
    dout, weights = of.floats(of.rows, h), of.weights().reshape(-1)
    return [
        (
            (dout, weights, offsets, experts, Kept(x, offsets, experts, option)),
            {"options": option, **every},
        )
        for option in both
    ]


@dataclass(frozen=True, eq=False)
class Ids:
    """Expert ids [T, K], to become the backend's index type."""

    ids: Array

    def on(self, backend: AnyBackend) -> Any:
        """As the backend's tensor."""
        return backend.index(backend.from_numpy(self.ids.astype(np.int32)), 1 << 20)


@dataclass(frozen=True, eq=False)
class Rows:
    """The layout of rows that these ids give."""

    ids: Array
    experts: int

    def on(self, backend: AnyBackend) -> Any:
        """As the written body lays them out."""
        return specification(backend).dispatch(Ids(self.ids).on(backend), self.experts)


class Offsets(Rows):
    """Its expert offsets alone."""

    def on(self, backend: AnyBackend) -> Any:
        """As the written body counts them."""
        return super().on(backend).expert_offsets


@dataclass(frozen=True, eq=False)
class Kept:
    """The activations a forward would have kept."""

    x: Array
    offsets: Offsets
    experts: ExpertWeights[Array]
    options: ExpertOptions

    def on(self, backend: AnyBackend) -> Any:
        """From the written forward on this backend."""
        _, kept = specification(backend).expert_rows_forward(
            backend.from_numpy(self.x),
            self.offsets.on(backend),
            _on(backend, self.experts),
            options=self.options,
            gradients=ExpertsGradientSelection.all(),
        )
        return kept


def _on(backend: AnyBackend, value: Any) -> Any:
    if isinstance(value, (Rows, Ids, Kept)):
        return value.on(backend)
    if isinstance(value, ExpertWeights):
        return ExpertWeights(*map(backend.from_numpy, cast("ExpertWeights[Array]", value)))
    if isinstance(value, np.ndarray):
        return backend.from_numpy(value)
    return value


def _widened(value: Any) -> Any:
    """The same argument in float64."""
    if isinstance(value, Kept):
        return replace(value, x=_widened(value.x), experts=_widened(value.experts))
    if isinstance(value, ExpertWeights):
        return ExpertWeights(*map(_widened, cast("ExpertWeights[Array]", value)))
    if isinstance(value, np.ndarray):
        array = cast("Array", value)
        return array if np.issubdtype(array.dtype, np.integer) else array.astype(np.float64)
    return DType.FLOAT64 if isinstance(value, DType) else value


# Named apart, so that what is in one keeps the type it has.
_TUPLE: Any = tuple


def _leaves(result: Any, name: str) -> dict[str, Any]:
    """The tensors of a result by name: of a tensor, a tuple or a record of tensors."""
    if result is None:
        return {}
    parts: dict[str, Any]
    if is_dataclass(result):
        parts = {f"{name}.{f.name}": getattr(result, f.name) for f in fields(result)}
    elif isinstance(result, _TUPLE):
        parts = {f"{name}[{i}]": part for i, part in enumerate(result)}
    else:
        return {name: result}
    return {key: leaf for part, item in parts.items() for key, leaf in _leaves(item, part).items()}


def _run(
    backend: AnyBackend, function: Any, call: tuple[tuple[Any, ...], dict[str, Any]], stage: str
) -> dict[str, Array]:
    arguments, keywords = call
    with backend.numerics():
        result = function(*(_on(backend, argument) for argument in arguments), **keywords)
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
            for call in _calls(stage, Inputs(shape, dtype, flawed=flawed)):
                got = _run(backend, kernel, call, stage)
                plain = _run(backend, written, call, stage)
                wide = (tuple(map(_widened, call[0])), {n: _widened(v) for n, v in call[1].items()})
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
