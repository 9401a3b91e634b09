"""Layers drawn at random: hypothesis strategies for `Specimen`.

Everything the contract allows can come, alone and together: no tokens, one expert, every rule of
selection, mixed element types, NaN and masks in any operand, numbers at the ends of the formats,
every memory layout. What is drawn is always a valid layer. The simplest of every choice stands
first, so that a failing one shrinks to something a person can read.

No number drawn is above 99: hypothesis would mix in constants it reads from loaded modules, and
the layers of a seed would then depend on what else was imported.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from hypothesis import strategies as st

from ruda.base.dtypes import DType
from ruda.stages.options import CombineAccumulation, Intermediates, RouterScoring
from ruda.testing.placement import Layout
from ruda.testing.specimens.specimen import Choice, Flaw, Numbers, Routing, Specimen

T = TypeVar("T")


@dataclass(frozen=True)
class Sizes:
    """The extents to draw from, simplest first."""

    tokens: tuple[int, ...]
    hidden: tuple[int, ...]
    intermediate: tuple[int, ...]
    experts: tuple[int, ...]


ANY_SIZES = Sizes(
    tokens=(1, 0, 2, 3, 4, 5, 8, 17, 33),
    hidden=(1, 2, 3, 4, 7, 8, 16, 33),
    intermediate=(1, 2, 3, 4, 5, 8, 16, 33),
    experts=(1, 2, 3, 4, 6, 8, 12, 32, 129, 257),
)
FEW_SIZES = Sizes(tokens=(1, 0, 3), hidden=(1, 4), intermediate=(1, 3), experts=(1, 4))
"""For a library that compiles every shape anew."""

_DTYPES = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16, DType.FLOAT64)
_IDS_DTYPES = ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64")
_SCALES = (1.0, 2.5, 0.125, 1e-3, 1e4)
_EPSILONS = (0.0, 1e-20, 1e-6, 0.5)
# Half the range of float16, its ends, and those of float32.
_EXPONENTS = (0, 1, -1, 4, -4, 8, -8, 14, -14, 24, -24, 60, -60, 99, -99)
_FLAWS = (
    math.nan,
    math.inf,
    -math.inf,
    0.0,
    -0.0,
    60000.0,
    -3e38,
    1e300,
    6e-8,
    -1e-40,
    1e-310,
)
_OPERANDS = ("input", "logits", "grad_output", "gate", "up", "down")
_TOP_K = 12


def specimens(
    dtypes: Collection[DType] = _DTYPES, sizes: Sizes = ANY_SIZES
) -> st.SearchStrategy[Specimen]:
    """Layers whose operands have these element types (those a backend has)."""
    return _specimens(tuple(dtype for dtype in _DTYPES if dtype in dtypes), sizes)


@st.composite
def _specimens(draw: st.DrawFn, dtypes: tuple[DType, ...], sizes: Sizes) -> Specimen:
    def pick(*choices: T) -> T:
        return draw(st.sampled_from(choices))

    def rarely(*choices: T) -> T:
        """The first three times in four."""
        return pick(*choices) if draw(st.integers(0, 3)) == 3 else choices[0]

    tokens, hidden, intermediate = (
        pick(*extents) for extents in (sizes.tokens, sizes.hidden, sizes.intermediate)
    )
    experts = pick(*sizes.experts)
    choice = pick(*Choice)
    groups, selected, top_two = 1, 1, False
    if choice is Choice.GROUPED:
        groups = pick(*(n for n in range(1, min(experts, 99) + 1) if experts % n == 0))
        selected = pick(*range(1, groups + 1))
        top_two = experts // groups >= 2 and draw(st.booleans())
    most = min(experts // groups * selected, _TOP_K)
    top_k = pick(*range(1, most + 1))
    # With all 257 experts of a small layer chosen, one example takes seconds.
    if rarely(False, True) and tokens * experts <= 100:
        top_k = experts // groups * selected
    fixed = choice is Choice.FIXED
    bias = choice is not Choice.SOFTMAX and draw(st.booleans())
    placed = (*_OPERANDS, *(["correction_bias"] * bias), *(["expert_ids"] * fixed))
    return Specimen(
        tokens=tokens,
        hidden=hidden,
        intermediate=intermediate,
        experts=experts,
        top_k=top_k,
        dtype=pick(*dtypes),
        logits_dtype=pick(None, *dtypes),
        choice=choice,
        scoring=pick(*RouterScoring),
        renormalize=draw(st.booleans()),
        scale=pick(*_SCALES),
        epsilon=pick(*_EPSILONS),
        groups=groups,
        selected_groups=selected,
        group_top_two=top_two,
        bias=bias,
        intermediates=pick(*Intermediates),
        combine=pick(*CombineAccumulation),
        routing=pick(*Routing),
        numbers=pick(*Numbers),
        exponent=rarely(*_EXPONENTS),
        weights_exponent=rarely(*_EXPONENTS),
        ids_dtype=pick(*_ids_dtypes(experts)) if fixed else "int64",
        repeated_ids=fixed and draw(st.booleans()),
        flaws=draw(_none_or(_flaws((*_OPERANDS, *(["correction_bias"] * bias))))),
        layouts=draw(_none_or(_layouts(placed))),
        seed=draw(st.integers(0, 99)) + 100 * draw(st.integers(0, 99)),
    )


def _ids_dtypes(experts: int) -> tuple[str, ...]:
    return tuple(name for name in _IDS_DTYPES if experts - 1 <= np.iinfo(name).max)


def _none_or(items: st.SearchStrategy[tuple[T, ...]]) -> st.SearchStrategy[tuple[T, ...]]:
    empty: tuple[T, ...] = ()
    return st.just(empty) | items


def _flaws(operands: tuple[str, ...]) -> st.SearchStrategy[tuple[Flaw, ...]]:
    one = st.tuples(st.sampled_from(operands), st.integers(0, 99), st.sampled_from(_FLAWS))
    return st.lists(one, max_size=3).map(tuple)


def _layouts(operands: tuple[str, ...]) -> st.SearchStrategy[tuple[tuple[str, Layout], ...]]:
    one = st.tuples(st.sampled_from(operands), st.sampled_from(list(Layout)[1:]))
    return st.lists(one, max_size=3, unique_by=lambda item: item[0]).map(tuple)


def features(specimen: Specimen) -> Iterator[str]:
    """What a specimen has of what can be had: for counting what was met."""
    yield f"dtype {specimen.dtype}"
    if specimen.router_dtype is not specimen.dtype:
        yield f"logits {specimen.router_dtype}"
    enums: tuple[tuple[str, Any], ...] = (
        ("choice", specimen.choice),
        ("scoring", specimen.scoring),
        ("routing", specimen.routing),
        ("intermediates", specimen.intermediates),
        ("combine", specimen.combine),
        ("numbers", specimen.numbers),
    )
    for name, value in enums:
        yield f"{name} {value.value}"
    if specimen.choice is Choice.FIXED:
        yield f"ids {specimen.ids_dtype}"
    yield from (f"flaw in {operand}" for operand in dict.fromkeys(f[0] for f in specimen.flaws))
    yield from (f"flaw {value}" for value in dict.fromkeys(f"{f[2]:g}" for f in specimen.flaws))
    yield from (
        f"layout {layout.value}" for layout in dict.fromkeys(dict(specimen.layouts).values())
    )
    facts = {
        "tokens none": specimen.tokens == 0,
        "tokens one": specimen.tokens == 1,
        "experts one": specimen.experts == 1,
        "experts all chosen": specimen.top_k == specimen.experts,
        "groups several": specimen.groups > 1,
        "groups top two": specimen.group_top_two,
        "bias": specimen.bias,
        "ids repeated": specimen.repeated_ids,
        "renormalize": specimen.renormalize,
        "scale": specimen.scale != 1,
        "epsilon": specimen.epsilon > 0,
        "magnitude large": max(specimen.exponent, specimen.weights_exponent) > 0,
        "magnitude small": min(specimen.exponent, specimen.weights_exponent) < 0,
    }
    yield from (name for name, met in facts.items() if met)
