"""One MoE branch as NumPy arrays: what a test feeds to a backend and to the reference.

Legend: T tokens, H hidden, I intermediate, E experts (contract 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from ruda.base.dtypes import DType
from ruda.base.errors import DTypeError
from ruda.stages.options import FixedSelection, MoeOptions

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

_NUMPY_DTYPES: dict[DType, np.dtype[Any]] = {
    DType.FLOAT16: np.dtype(np.float16),
    DType.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
    DType.FLOAT32: np.dtype(np.float32),
    DType.FLOAT64: np.dtype(np.float64),
}


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """NumPy's type of this name; bfloat16 is that of ml_dtypes."""
    return _NUMPY_DTYPES[dtype]


def dtype_of(array: Array) -> DType:
    """The element type of an array; `DTypeError` if it is none of the four."""
    for dtype, known in _NUMPY_DTYPES.items():
        if array.dtype == known:
            return dtype
    raise DTypeError(f"dtype: expected one of {', '.join(DType)}, got {array.dtype}")


@dataclass(frozen=True, eq=False)
class Layer:
    """The operands of a forward and a backward pass, with the options they run under."""

    input: Array
    """[T, H]"""
    logits: Array
    """[T, E]"""
    gate: Array
    """[E, I, H]"""
    up: Array
    """[E, I, H]"""
    down: Array
    """[E, H, I]"""
    grad_output: Array
    """[T, H]"""
    options: MoeOptions
    correction_bias: Array | None = None
    """[E]"""

    @property
    def dtype(self) -> DType:
        """The storage type D."""
        return dtype_of(self.input)

    @property
    def logits_dtype(self) -> DType:
        """The type L of the logits."""
        return dtype_of(self.logits)

    @property
    def tokens(self) -> int:
        """T"""
        return int(self.input.shape[0])

    @property
    def hidden(self) -> int:
        """H"""
        return int(self.input.shape[1])

    @property
    def intermediate(self) -> int:
        """I"""
        return int(self.gate.shape[1])

    @property
    def experts(self) -> int:
        """E"""
        return int(self.logits.shape[1])

    @property
    def top_k(self) -> int:
        """Slots a token, k."""
        selection = self.options.selection
        if isinstance(selection, FixedSelection):
            return int(selection.expert_ids.shape[1])
        return selection.top_k


def random_layer(
    *,
    tokens: int,
    hidden: int,
    intermediate: int,
    experts: int,
    options: MoeOptions,
    dtype: DType,
    logits_dtype: DType | None = None,
    bias: bool = False,
    seed: int,
) -> Layer:
    """A layer of normal values, weights scaled by 1/sqrt(fan in); equal seeds, equal layers."""
    # Everything is drawn in float64 and cast, so no default element type enters.
    rng = np.random.default_rng(seed)
    storage = numpy_dtype(dtype)
    router = logits_dtype or dtype

    def normal(*shape: int, scale: float = 1.0) -> Array:
        return rng.standard_normal(shape) * scale

    input_TH = normal(tokens, hidden)
    logits_TE = normal(tokens, experts)
    gate_EIH = normal(experts, intermediate, hidden, scale=hidden**-0.5)
    up_EIH = normal(experts, intermediate, hidden, scale=hidden**-0.5)
    down_EHI = normal(experts, hidden, intermediate, scale=intermediate**-0.5)
    grad_output_TH = normal(tokens, hidden)
    bias_E = normal(experts, scale=0.1) if bias else None
    return Layer(
        input=input_TH.astype(storage),
        logits=logits_TE.astype(numpy_dtype(router)),
        gate=gate_EIH.astype(storage),
        up=up_EIH.astype(storage),
        down=down_EHI.astype(storage),
        grad_output=grad_output_TH.astype(storage),
        options=options,
        correction_bias=None if bias_E is None else bias_E.astype(numpy_dtype(router.compute)),
    )
