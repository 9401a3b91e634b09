"""The specification of a backend: its tensors and device, under the stages as they are written.

A kernel is trusted because it is compared with what it replaces, on the same tensors. The written
bodies call one another on `self`, so a specification must be a backend of its own: then no kernel
is reached by way of a nested call either.
"""

from __future__ import annotations

import copy
from functools import cache
from types import FunctionType
from typing import Any, TypeVar

from ruda.backend import Backend
from ruda.base.operations import Operations
from ruda.base.tensors import F, I, L
from ruda.stages.dispatch import DispatchStage
from ruda.stages.experts import ExpertsStage
from ruda.stages.products import ProductsStage
from ruda.stages.selection import SelectionStage
from ruda.stages.weights import WeightsStage

T = TypeVar("T")

# What `Operations` says with a body is a fact about the framework, this alone an algorithm.
_PROVIDED_OPERATIONS = ("take_along",)


@cache
def stage_bodies() -> dict[str, FunctionType]:
    """Every method a backend may replace by a kernel, and the body that says what it must give."""
    bodies = {name: vars(Operations)[name] for name in _PROVIDED_OPERATIONS}
    for stage in (SelectionStage, WeightsStage, DispatchStage, ProductsStage, ExpertsStage):
        bodies |= {
            name: body
            for name, body in vars(stage).items()
            if isinstance(body, FunctionType) and not name.startswith("_")
        }
    return bodies


def replaced_stages(kind: type[Backend[Any, Any, Any]]) -> tuple[str, ...]:
    """The stages for which a backend class has a body of its own."""
    return tuple(
        name for name, body in stage_bodies().items() if getattr(kind, name, body) is not body
    )


@cache
def specification_class(kind: type[T], /) -> type[T]:
    """A backend class like `kind` whose stages are all the written bodies."""
    namespace = {"__slots__": (), "__module__": kind.__module__, "__doc__": kind.__doc__}
    written: Any = type(f"{kind.__name__}Specification", (kind,), namespace | stage_bodies())
    return written  # type: ignore[no-any-return]


def specification(backend: Backend[F, I, L], /) -> Backend[F, I, L]:
    """A backend of the same tensors and device whose stages are all the written bodies.

    Nested calls included: `specification(b).swiglu(g, u)` beside `b.swiglu(g, u)`, or a whole pass
    with ``backend=specification(b)``. The required operations, and what the backend says of its
    framework, stay its own.
    """
    written = copy.copy(backend)
    # Past what a frozen class of somebody else would refuse.
    object.__setattr__(written, "__class__", specification_class(type(backend)))
    return written
