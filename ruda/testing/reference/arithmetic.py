"""Which types the reference computes in, and where it rounds: exactly, or as the contract says.

The exact arithmetic must be finer than float64, or the rounding error of a float64 layer could not
be told from that of its reference. It is NumPy's long double (plain float64 where the platform has
nothing wider); its results are handed out as float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from ruda.base.dtypes import DType, wider
from ruda.stages.options import CombineAccumulation, Intermediates
from ruda.testing.layers import Array, Layer, numpy_dtype

_EXTENDED: np.dtype[Any] = np.dtype(np.longdouble)


@dataclass(frozen=True)
class Arithmetic:
    """The types of one run of the reference; `exact` or `same_type` makes one."""

    is_exact: bool
    compute: np.dtype[Any]
    """Products of the experts and weight gradients: C of D."""
    router: np.dtype[Any]
    """Scores, routing weights and their gradients: C of L."""
    mixed: np.dtype[Any]
    """Products with a routing weight: the wider of both."""
    intermediate: np.dtype[Any]
    """What a marked rounding of sections 5 and 7 rounds to."""
    partial: np.dtype[Any]
    """What products and partial sums of the combine are rounded to."""
    storage: np.dtype[Any]
    """The output and the input gradient: D."""
    logits: np.dtype[Any]
    """The logits gradient: L."""
    is_sequential: bool = False
    """Whether long sums are added up one element after the other."""
    is_fused: bool = False
    """Whether sums over products are rounded, and can overflow, only as a whole."""
    noise: np.random.Generator | None = None
    """Moves a computed value to itself or either neighbour, at random: a faithful rounding."""

    @classmethod
    def exact(cls) -> Arithmetic:
        """No rounding anywhere: the reference."""
        return cls._uniform(_EXTENDED, np.dtype(np.float64), is_exact=True)

    @classmethod
    def same_type(cls, layer: Layer) -> Arithmetic:
        """The contract's own types and roundings for this layer and its options."""
        storage, logits = layer.dtype, layer.logits_dtype
        mixed = wider(storage, logits)
        rounds = layer.options.intermediates is Intermediates.STORAGE
        rounds_sums = layer.options.combine is CombineAccumulation.STORAGE
        return cls(
            is_exact=False,
            compute=numpy_dtype(storage.compute),
            router=numpy_dtype(logits.compute),
            mixed=numpy_dtype(mixed),
            intermediate=numpy_dtype(storage if rounds else storage.compute),
            partial=numpy_dtype(storage if rounds_sums else mixed),
            storage=numpy_dtype(storage),
            logits=numpy_dtype(logits),
        )

    @classmethod
    def router_only(cls, logits_dtype: DType) -> Arithmetic:
        """The contract's types for section 3 alone, where there are no experts."""
        compute, logits = numpy_dtype(logits_dtype.compute), numpy_dtype(logits_dtype)
        return cls._uniform(compute, logits, is_exact=False)

    @classmethod
    def _uniform(
        cls, compute: np.dtype[Any], results: np.dtype[Any], *, is_exact: bool
    ) -> Arithmetic:
        return cls(is_exact, compute, compute, compute, compute, compute, results, results)

    @property
    def sums(self) -> np.dtype[Any]:
        """What weight gradients are added up in."""
        return _EXTENDED if self.is_fused else self.compute

    def product(self, matrix: Array, vector: Array) -> Array:
        """A matrix times a vector, in their type."""
        if self.is_sequential:
            return np.asarray(np.cumsum(matrix * vector, axis=-1, dtype=vector.dtype)[:, -1])
        if self.is_fused:
            fused: Array = matrix.astype(_EXTENDED) @ vector.astype(_EXTENDED)
            return fused.astype(vector.dtype)
        return np.asarray(matrix @ vector)

    def total(self, values: Array) -> Any:
        """The sum of a vector, in its type."""
        if self.is_sequential:
            return np.cumsum(values, dtype=values.dtype)[-1]
        return np.sum(values)

    def computed(self, value: Array) -> Array:
        """A value as another faithful computation in its type might have it."""
        if self.noise is None:
            return value
        step = cast("Array", self.noise.integers(-1, 2, value.shape))
        with np.errstate(invalid="ignore"):
            towards = (step * np.inf).astype(value.dtype)
        stays = (step == 0) | (value == 0) | ~np.isfinite(value)
        return np.where(stays, value, np.nextafter(value, towards))

    def rounded(self, value: Array) -> Array:
        """An intermediate after a marked rounding, again in the compute type."""
        value = self.computed(value)
        return value.astype(self.intermediate, copy=False).astype(self.compute, copy=False)

    def rounded_sum(self, value: Array) -> Array:
        """A product or partial sum of the combine, again in the mixed type."""
        value = self.computed(value)
        return value.astype(self.partial, copy=False).astype(self.mixed, copy=False)

    def handed_out(self, value: Array) -> Array:
        """A result that stays in its compute type, as the caller gets it."""
        return value.astype(np.float64) if self.is_exact else value
