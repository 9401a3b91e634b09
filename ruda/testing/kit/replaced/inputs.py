"""What every stage is called with: NumPy arrays, put on a backend when it runs.

One function a stage; a stage that has none here fails the kit with its name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np

from ruda.backend.registry import AnyBackend
from ruda.backend.specification import specification
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
from ruda.testing.layers import Array, numpy_dtype

Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments and keywords."""

_EVERY = ExpertsGradientSelection.all()


class Shape(NamedTuple):
    """T, K, E, H, I."""

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
    """The arrays of one shape and type; a NaN in one row of some where they are flawed."""

    def __init__(self, shape: Shape, dtype: DType, *, flawed: bool) -> None:
        self.tokens, self.slots, self.experts, self.hidden, self.intermediate = shape
        self.dtype, self.flawed = dtype, flawed
        self.rows = self.tokens * self.slots
        self.rng = np.random.default_rng(1)
        self.ids = self.rng.integers(0, max(1, self.experts - 1), (self.tokens, self.slots))

    def floats(self, *extents: int, dtype: DType | None = None) -> Array:
        """Normal numbers; the first may be NaN."""
        values = self.rng.standard_normal(extents)
        if self.flawed and values.size and len(extents) == 2:
            values.flat[0] = np.nan
        return values.astype(numpy_dtype(dtype or self.dtype))

    def logits(self) -> Array:
        """[T, E]"""
        return self.floats(self.tokens, self.experts)

    def rows_by(self, width: int) -> Array:
        """[R, width]"""
        return self.floats(self.rows, width)

    def weights(self) -> Array:
        """Positive routing weights [T, K] in the compute type, one of them 0."""
        values = self.rng.random((self.tokens, self.slots))
        if values.size:
            values.flat[-1] = 0.0
        return values.astype(numpy_dtype(self.dtype.compute))

    def matrices(self) -> ExpertWeights[Array]:
        """The experts' three matrices."""
        gate, up, down = (
            self.floats(self.experts, *widths)
            for widths in (
                (self.intermediate, self.hidden),
                (self.intermediate, self.hidden),
                (self.hidden, self.intermediate),
            )
        )
        return ExpertWeights(gate, up, down)

    @property
    def layout(self) -> Layout:
        """Where these ids send their rows."""
        return Layout(self.ids, self.experts)

    @property
    def offsets(self) -> Offsets:
        """The first row of each expert."""
        return Offsets(self.ids, self.experts)


def calls(stage: str, of: Inputs) -> list[Call]:
    """The calls of a stage that are compared."""
    return _CALLS[stage](of)


def put(backend: AnyBackend, value: Any) -> Any:
    """An argument as the backend takes it."""
    if isinstance(value, (Layout, Ids, Kept)):
        return value.on(backend)
    if isinstance(value, ExpertWeights):
        return ExpertWeights(*map(backend.from_numpy, cast("ExpertWeights[Array]", value)))
    if isinstance(value, np.ndarray):
        return backend.from_numpy(value)
    return value


def widened(value: Any) -> Any:
    """The same argument in float64."""
    if isinstance(value, Kept):
        return replace(value, x=widened(value.x), matrices=widened(value.matrices))
    if isinstance(value, ExpertWeights):
        return ExpertWeights(*map(widened, cast("ExpertWeights[Array]", value)))
    if isinstance(value, np.ndarray):
        array = cast("Array", value)
        return array if np.issubdtype(array.dtype, np.integer) else array.astype(np.float64)
    return DType.FLOAT64 if isinstance(value, DType) else value


@dataclass(frozen=True, eq=False)
class Ids:
    """Expert ids [T, K], to become the backend's index type."""

    ids: Array

    def on(self, backend: AnyBackend) -> Any:
        """As the backend's tensor."""
        return backend.index(backend.from_numpy(self.ids.astype(np.int32)), 1 << 20)


@dataclass(frozen=True, eq=False)
class Layout:
    """The layout of rows that these ids give."""

    ids: Array
    experts: int

    def on(self, backend: AnyBackend) -> Any:
        """As the written body lays them out."""
        return specification(backend).dispatch(Ids(self.ids).on(backend), self.experts)


class Offsets(Layout):
    """Its expert offsets alone."""

    def on(self, backend: AnyBackend) -> Any:
        """As the written body counts them."""
        return super().on(backend).expert_offsets


@dataclass(frozen=True, eq=False)
class Kept:
    """The activations a forward would have kept."""

    x: Array
    offsets: Offsets
    matrices: ExpertWeights[Array]
    options: ExpertOptions

    def on(self, backend: AnyBackend) -> Any:
        """From the written forward on this backend."""
        _, kept = specification(backend).expert_rows_forward(
            backend.from_numpy(self.x),
            self.offsets.on(backend),
            put(backend, self.matrices),
            options=self.options,
            gradients=_EVERY,
        )
        return kept


def _take_along(of: Inputs) -> list[Call]:
    whole = of.ids.astype(np.int64)
    return [((of.logits(), Ids(of.ids)), {}), ((whole, Ids(of.ids % of.slots)), {})]


def _top_k(of: Inputs) -> list[Call]:
    tied = np.rint(of.floats(of.tokens, of.experts, dtype=of.dtype.compute))
    return [((tied, n), {}) for n in {1, of.experts}]


def _select_experts(of: Inputs) -> list[Call]:
    k, logits = min(of.slots, of.experts), of.logits()
    bias = of.rng.standard_normal(of.experts).astype(numpy_dtype(of.dtype.compute))
    grouped = [GroupedSelection(k, scoring) for scoring in RouterScoring]
    if of.experts % 4 == 0:
        top_two = of.experts > 4
        grouped.append(GroupedSelection(2, groups=4, selected_groups=2, group_top_two=top_two))
    biased: list[Call] = [((logits, b, rule), {}) for rule in grouped for b in (None, bias)]
    return [((logits, None, SoftmaxSelection(k)), {}), *biased]


def _weight_options() -> list[RouterWeightOptions]:
    return [
        RouterWeightOptions(scoring, renormalize, 2.5, epsilon)
        for scoring in RouterScoring
        for renormalize in (True, False)
        for epsilon in (0.0, 1e-3)
    ]


def _one_outside(of: Inputs) -> Ids:
    outside = of.ids.copy()
    outside[:1, :1] = -1
    return Ids(outside)


def _router_weights(of: Inputs) -> list[Call]:
    logits, ids = of.logits(), _one_outside(of)
    return [((logits, ids, options), {}) for options in _weight_options()]


def _router_weights_backward(of: Inputs) -> list[Call]:
    logits, ids = of.logits(), _one_outside(of)
    dweights = of.floats(of.tokens, of.slots, dtype=of.dtype.compute)
    return [((logits, ids, dweights, options), {}) for options in _weight_options()]


def _dispatch(of: Inputs) -> list[Call]:
    return [((Ids(of.ids), of.experts), {})]


def _combine(of: Inputs) -> list[Call]:
    operands = (of.rows_by(of.hidden), of.weights(), of.layout)
    return [
        (operands, {"accumulation": accumulation, "dtype": of.dtype})
        for accumulation in CombineAccumulation
    ]


def _copy_backward(of: Inputs) -> list[Call]:
    return [((of.rows_by(of.hidden), of.layout), {"dtype": of.dtype})]


def _product(of: Inputs) -> list[Call]:
    pair = (of.floats(of.tokens, of.hidden), of.floats(of.hidden, of.intermediate))
    return [(pair, {"dtype": of.dtype.compute, "strategy": ExpertStrategy.AUTO})]


def _grouped(of: Inputs, width: int) -> list[Call]:
    operands = (of.rows_by(width), of.matrices().gate, of.offsets)
    return [
        (operands, {"dtype": dtype, "strategy": ExpertStrategy.AUTO})
        for dtype in {of.dtype, of.dtype.compute}
    ]


def _expert_weight_gradient(of: Inputs) -> list[Call]:
    operands = (of.rows_by(of.intermediate), of.rows_by(of.hidden), of.offsets)
    return [(operands, {"dtype": of.dtype.compute, "strategy": ExpertStrategy.AUTO})]


def _swiglu(of: Inputs) -> list[Call]:
    return [((of.rows_by(of.intermediate), of.rows_by(of.intermediate)), {})]


def _swiglu_backward(of: Inputs) -> list[Call]:
    return [(tuple(of.rows_by(of.intermediate) for _ in range(3)), {})]


def _routing_weight_gradient(of: Inputs) -> list[Call]:
    pair = (of.rows_by(of.intermediate), of.rows_by(of.intermediate))
    serial = CombineGradientStrategy.SERIAL
    return [(pair, {"dtype": of.dtype.compute, "strategy": serial})]


def _expert_rows_forward(of: Inputs) -> list[Call]:
    operands = (of.rows_by(of.hidden), of.offsets, of.matrices())
    return [
        (operands, {"options": ExpertOptions(intermediates=kind), "gradients": _EVERY})
        for kind in Intermediates
    ]


def _expert_rows_backward(of: Inputs) -> list[Call]:
    x, dout, weights = of.rows_by(of.hidden), of.rows_by(of.hidden), of.weights().reshape(-1)
    matrices, made = of.matrices(), list[Call]()
    for kind in Intermediates:
        options = ExpertOptions(intermediates=kind)
        kept = Kept(x, of.offsets, matrices, options)
        keywords = {"options": options, "gradients": _EVERY}
        made.append(((dout, weights, of.offsets, matrices, kept), keywords))
    return made


_CALLS: dict[str, Callable[[Inputs], list[Call]]] = {
    "take_along": _take_along,
    "top_k": _top_k,
    "select_experts": _select_experts,
    "router_weights": _router_weights,
    "router_weights_backward": _router_weights_backward,
    "dispatch": _dispatch,
    "combine": _combine,
    "copy_backward": _copy_backward,
    "product": _product,
    "grouped_matmul": lambda of: _grouped(of, of.hidden),
    "grouped_matmul_transposed": lambda of: _grouped(of, of.intermediate),
    "expert_weight_gradient": _expert_weight_gradient,
    "swiglu": _swiglu,
    "swiglu_backward": _swiglu_backward,
    "routing_weight_gradient": _routing_weight_gradient,
    "expert_rows_forward": _expert_rows_forward,
    "expert_rows_backward": _expert_rows_backward,
}
