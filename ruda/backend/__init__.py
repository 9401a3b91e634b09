"""`Backend`: the required operations and the stages of the algorithm, as one protocol.

A backend is a sum of traits. `Operations` are required; each stage is written once, on `self`, and
a backend may replace a stage's method by a native kernel that gives the same numbers. Subclass
`Backend` explicitly, with a constructor that takes an optional device name; `register_backend`
refuses a class with a required operation missing.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias, TypeVar

from ruda.base.operations import BackendTypes
from ruda.base.tensors import F, I, L
from ruda.stages.dispatch import DispatchStage
from ruda.stages.experts import ExpertsStage
from ruda.stages.products import ProductsStage
from ruda.stages.selection import SelectionStage
from ruda.stages.weights import WeightsStage

__all__ = ["B", "B_co", "Backend", "BackendOf", "BackendTypes", "Floats", "Integers"]


class Backend(
    SelectionStage[F, I, L],
    WeightsStage[F, I, L],
    DispatchStage[F, I, L],
    ExpertsStage[F, I, L],
    ProductsStage[F, I, L],
    Protocol[F, I, L],
):
    """Operations on one framework's tensors on one device, and every stage made of them."""


B = TypeVar("B", bound=BackendTypes[Any, Any, Any])
B_co = TypeVar("B_co", bound=BackendTypes[Any, Any, Any], covariant=True)
Floats: TypeAlias = BackendTypes[F, Any, Any]
Integers: TypeAlias = BackendTypes[Any, I, Any]


class BackendOf(Backend[F, I, L], Protocol[B_co, F, I, L]):
    """A `Backend[F, I, L]` that is a `B`: lets a free function return `MoeBackward[B]`."""

    # Declared again, and first: pyright solves F, I and L from them before it meets `F | I`.
    FloatTensor: type[F]
    IntTensor: type[I]
    BoolTensor: type[L]

    def itself(self) -> B_co:  # type: ignore[override]
        """Itself, by its exact type."""
        ...
