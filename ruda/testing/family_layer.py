"""A layer with a family's geometry and routing rules, and operands like those of a real model.

Hidden states are RMS-normalised and share a component, as those of a trained model do; the logits
are a router matrix times them. So some experts are liked by most tokens, and the load is skewed.
Everything is drawn in float64 and cast. Where the family balances by a correction bias, half of
that skew is taken out by it.

Legend: T tokens, H hidden, I intermediate, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from fractions import Fraction

import numpy as np

from ruda.base.dtypes import DType
from ruda.base.errors import ConfigurationError
from ruda.families.table import Family
from ruda.testing.layers import Array, Layer, numpy_dtype

# The spread of the logits, and how much of a hidden state is common to all tokens.
_LOGITS_SPREAD = 2.0
_SHARED = 0.5


def scaled_geometry(family: Family, scale: Fraction) -> tuple[int, int]:
    """H and I of a scaled family; experts, groups and top-k stay as they are."""
    hidden, intermediate = round(family.hidden * scale), round(family.intermediate * scale)
    if min(hidden, intermediate) < 1:
        raise ConfigurationError(
            f"scale: {scale} leaves nothing of {family.name} "
            f"(hidden {family.hidden}, intermediate {family.intermediate})"
        )
    return hidden, intermediate


def layer_bytes(family: Family, tokens: int, scale: Fraction, dtype: DType) -> int:
    """What the operands of such a layer take."""
    hidden, intermediate = scaled_geometry(family, scale)
    weights = 3 * family.experts * hidden * intermediate
    per_token = 2 * hidden * dtype.itemsize + 8 * family.experts
    return weights * dtype.itemsize + tokens * per_token


def make_layer(
    family: Family,
    *,
    tokens: int,
    scale: Fraction,
    dtype: DType,
    seed: int,
    step: Callable[[str], AbstractContextManager[object]] = nullcontext,
) -> Layer:
    """The layer; equal arguments, equal layers. `step` is entered `family.experts` + 1 times."""
    H, I = scaled_geometry(family, scale)
    E = family.experts
    rng = np.random.default_rng(seed)
    storage = numpy_dtype(dtype)
    logits_dtype = family.logits_dtype(dtype)

    with step("hidden states and router"), np.errstate(all="ignore"):
        x_TH = _hidden_states(rng, tokens, H)
        logits_TE = x_TH @ (rng.standard_normal((E, H)) * (_LOGITS_SPREAD * H**-0.5)).T
        bias_E = _correction_bias(logits_TE) if family.has_correction_bias else None
        grad_output_TH = rng.standard_normal((tokens, H)).astype(storage)

    gate_EIH = np.empty((E, I, H), storage)
    up_EIH = np.empty((E, I, H), storage)
    down_EHI = np.empty((E, H, I), storage)
    for e in range(E):
        with step("experts"):
            gate_EIH[e] = rng.standard_normal((I, H)) * H**-0.5
            up_EIH[e] = rng.standard_normal((I, H)) * H**-0.5
            down_EHI[e] = rng.standard_normal((H, I)) * I**-0.5
    return Layer(
        input=x_TH.astype(storage),
        logits=logits_TE.astype(numpy_dtype(logits_dtype)),
        gate=gate_EIH,
        up=up_EIH,
        down=down_EHI,
        grad_output=grad_output_TH,
        options=family.options,
        correction_bias=(
            None if bias_E is None else bias_E.astype(numpy_dtype(logits_dtype.compute))
        ),
    )


def _hidden_states(rng: np.random.Generator, tokens: int, hidden: int) -> Array:
    shared_H = rng.standard_normal(hidden)
    own_TH = rng.standard_normal((tokens, hidden))
    x_TH = _SHARED * shared_H + own_TH
    rms_T1 = np.sqrt(np.mean(x_TH * x_TH, axis=1, keepdims=True))
    return np.asarray(x_TH / rms_T1)


def _correction_bias(logits_TE: Array) -> Array:
    scores_TE: Array = 1 / (1 + np.exp(-logits_TE))
    if not len(scores_TE):
        return np.zeros(logits_TE.shape[1])
    mean_E = scores_TE.mean(axis=0)
    return np.asarray((mean_E.mean() - mean_E) / 2)
