"""A layer by description: small, hashable, printed as the code that makes it.

A failing layer is worth little as a dump of numbers. A `Specimen` names what is special about it
(its shape, its rule of selection, how tokens fall on experts, where a NaN sits), so that it can be
made smaller field by field, pasted into a shell, and used as a key under which its references are
kept.

Legend: T tokens, H hidden, I intermediate, E experts, k slots a token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any, TypeAlias

import numpy as np

from ruda.base.dtypes import DType
from ruda.stages.options import (
    CombineAccumulation,
    FixedSelection,
    GroupedSelection,
    Intermediates,
    MoeOptions,
    RouterScoring,
    RouterWeightOptions,
    Selection,
    SoftmaxSelection,
)
from ruda.testing.layers import Array, Layer, numpy_dtype, random_layer
from ruda.testing.placement import Layout


class Choice(Enum):
    """Which rule of contract 2 chooses the experts."""

    SOFTMAX = "softmax"
    GROUPED = "grouped"
    FIXED = "fixed"


class Routing(Enum):
    """How tokens fall on experts."""

    RANDOM = "random"
    SKEWED = "skewed"
    """Four of five tokens prefer the last expert."""
    FEW_EXPERTS = "few_experts"
    """No token goes to the upper half of the experts, as far as k allows."""
    TIED = "tied"
    """Logits are whole numbers: many exact ties."""
    MASKED = "masked"
    """A third of the logits is -inf."""
    FAR_APART = "far_apart"
    """Logits hundreds apart: scores of exactly 0 and 1."""
    ALL_ONE = "all_one"
    """Every logit is 40: a sigmoid of exactly 1."""


class Numbers(Enum):
    """What the operands are made of."""

    WHOLE = "whole"
    """Whole numbers of -2 to 2: readable."""
    NORMAL = "normal"
    """Normally distributed, weights scaled by 1/sqrt(fan in)."""


Flaw: TypeAlias = "tuple[str, int, float]"
"""An operand, a flat position in it (modulo its size), and the value put there."""


@dataclass(frozen=True, repr=False)
class Specimen:
    """The description of a layer; `layer()` makes it. Equal descriptions, equal layers."""

    tokens: int = 5
    hidden: int = 4
    intermediate: int = 3
    experts: int = 4
    top_k: int = 2
    dtype: DType = DType.FLOAT32
    logits_dtype: DType | None = None
    """`None`: the storage type."""
    choice: Choice = Choice.SOFTMAX
    scoring: RouterScoring = RouterScoring.SOFTMAX
    renormalize: bool = True
    scale: float = 1.0
    epsilon: float = 0.0
    groups: int = 1
    selected_groups: int = 1
    group_top_two: bool = False
    bias: bool = False
    intermediates: Intermediates = Intermediates.STORAGE
    combine: CombineAccumulation = CombineAccumulation.COMPUTE
    routing: Routing = Routing.RANDOM
    numbers: Numbers = Numbers.NORMAL
    exponent: int = 0
    """Input and upstream gradient are multiplied by two to this power."""
    weights_exponent: int = 0
    """The experts' weights are multiplied by two to this power."""
    ids_dtype: str = "int64"
    repeated_ids: bool = False
    """Fixed ids may name an expert twice for one token."""
    flaws: tuple[Flaw, ...] = ()
    layouts: tuple[tuple[str, Layout], ...] = ()
    seed: int = 0

    def __repr__(self) -> str:
        """The code that makes it, leaving out what is as by default."""
        changed = [
            f"{field.name}={_code(getattr(self, field.name))}"
            for field in fields(self)
            if getattr(self, field.name) != field.default
        ]
        return f"Specimen({', '.join(changed)})"

    @property
    def router_dtype(self) -> DType:
        """The type L of the logits."""
        return self.logits_dtype or self.dtype

    def layout_of(self, operand: str) -> Layout:
        """How this operand lies in memory."""
        return dict(self.layouts).get(operand, Layout.CONTIGUOUS)

    def layer(self) -> Layer:
        """The layer described."""
        layer = random_layer(
            tokens=self.tokens,
            hidden=self.hidden,
            intermediate=self.intermediate,
            experts=self.experts,
            options=self._options(),
            dtype=self.dtype,
            logits_dtype=self.router_dtype,
            bias=self.bias,
            seed=self.seed,
        )
        arrays: dict[str, Array] = {
            name: getattr(layer, name).astype(np.float64)
            for name in ("input", "logits", "gate", "up", "down", "grad_output")
        }
        if self.numbers is Numbers.WHOLE:
            arrays = {name: np.clip(np.rint(2 * a), -2, 2) for name, a in arrays.items()}
        arrays["logits"] = self._logits(arrays["logits"])
        for name in ("input", "grad_output"):
            arrays[name] = np.ldexp(arrays[name], self.exponent)
        for name in ("gate", "up", "down"):
            arrays[name] = np.ldexp(arrays[name], self.weights_exponent)
        if layer.correction_bias is not None:
            arrays["correction_bias"] = layer.correction_bias.astype(np.float64)
        for operand, position, value in self.flaws:
            # A bias there is not has no flaws.
            flat = arrays[operand].reshape(-1) if operand in arrays else np.empty(0)
            if flat.size:
                flat[position % flat.size] = value
        for operand, layout in self.layouts:
            if layout is Layout.BROADCAST and operand in arrays and len(arrays[operand]):
                arrays[operand][...] = arrays[operand][:1]
        with np.errstate(all="ignore"):
            cast: dict[str, Any] = {
                name: a.astype(numpy_dtype(self._dtype_of(name))) for name, a in arrays.items()
            }
        return replace(layer, **cast)

    def _dtype_of(self, operand: str) -> DType:
        if operand == "logits":
            return self.router_dtype
        return self.router_dtype.compute if operand == "correction_bias" else self.dtype

    def _logits(self, logits_TE: Array) -> Array:
        rng = np.random.default_rng((self.seed, 1))
        half = max(self.experts // 2, self.top_k)
        match self.routing:
            case Routing.SKEWED:
                logits_TE[rng.random(self.tokens) < 0.8, -1] += 8
            case Routing.FEW_EXPERTS:
                logits_TE[:, half:] = -30.0
            case Routing.TIED:
                logits_TE = np.rint(logits_TE)
            case Routing.MASKED:
                logits_TE[rng.random(logits_TE.shape) < 1 / 3] = -math.inf
            case Routing.FAR_APART:
                # Not so that a score is subnormal: it would have too few digits to be judged by.
                logits_TE = np.clip(logits_TE * 200, -600, 600)
                logits_TE = np.where((logits_TE < -80) & (logits_TE > -110), -200, logits_TE)
            case Routing.ALL_ONE:
                logits_TE = np.full_like(logits_TE, 40.0)
            case Routing.RANDOM:
                pass
        return logits_TE

    def _options(self) -> MoeOptions:
        return MoeOptions(
            selection=self._selection(),
            weights=RouterWeightOptions(self.scoring, self.renormalize, self.scale, self.epsilon),
            intermediates=self.intermediates,
            combine=self.combine,
        )

    def _selection(self) -> Selection:
        if self.choice is Choice.SOFTMAX:
            return SoftmaxSelection(self.top_k)
        if self.choice is Choice.GROUPED:
            return GroupedSelection(
                self.top_k,
                self.scoring,
                groups=self.groups,
                selected_groups=self.selected_groups,
                group_top_two=self.group_top_two,
            )
        return FixedSelection(self._fixed_ids())

    def _fixed_ids(self) -> Array:
        rng = np.random.default_rng((self.seed, 2))
        reachable = self.experts
        if self.routing is Routing.FEW_EXPERTS:
            reachable = max(self.experts // 2, self.top_k)
        shape = (self.tokens, self.top_k)
        if self.repeated_ids:
            ids_Tk = rng.integers(0, reachable, shape)
        else:
            ids_Tk = np.argsort(rng.random((self.tokens, reachable)), axis=1)[:, : self.top_k]
        if self.routing is Routing.SKEWED:
            ids_Tk[rng.random(self.tokens) < 0.8] = reachable - 1 - np.arange(self.top_k)
        if self.layout_of("expert_ids") is Layout.BROADCAST:
            ids_Tk[...] = ids_Tk[:1]
        return ids_Tk.astype(self.ids_dtype)


def _code(value: Enum | tuple[Any, ...] | float | str | None) -> str:
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, tuple):
        text = ", ".join(_code(item) for item in value)
        return f"({text},)" if len(value) == 1 else f"({text})"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value)
