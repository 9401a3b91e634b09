"""Plain values as callers give them: NumPy's scalars are numbers, an enum's value is its member."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum
from numbers import Integral, Real
from typing import TypeVar

from ruda.base.errors import ConfigurationError

E = TypeVar("E", bound=Enum)

_LONGEST = 200


def shown(value: object) -> str:
    """A value as code on one line, of at most 200 characters."""
    try:
        text = " ".join(repr(value).split())
    # An integer too long for a decimal, or a repr that fails in a way of its own.
    except Exception:
        text = f"a {type(value).__name__}"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def count(name: str, value: object) -> int:
    """An integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ConfigurationError(f"{name}: expected an integer >= 1, got {shown(value)}")
    return int(value)


def truth(name: str, value: object) -> bool:
    """True or False, NumPy's as well; no other value stands for them."""
    kind = type(value)
    if kind is not bool and (kind.__module__, kind.__name__) not in _NUMPY_BOOLS:
        raise ConfigurationError(f"{name}: expected True or False, got {shown(value)}")
    return bool(value)


_NUMPY_BOOLS = (("numpy", "bool"), ("numpy", "bool_"))


def number(name: str, value: object) -> float:
    """A finite number."""
    if not isinstance(value, bool) and isinstance(value, Real):
        try:
            found = float(value)
        except OverflowError:  # an integer may be larger than any float
            found = math.inf
        if math.isfinite(found):
            return found
    raise ConfigurationError(f"{name}: expected a finite number, got {shown(value)}")


def member_of(kind: type[E]) -> Callable[[str, object], E]:
    """What takes a member of the enum, or its value, and gives the member."""

    def member(name: str, value: object) -> E:
        for one in kind:
            if one is value or (isinstance(value, str) and one.value == value):
                return one
        choices = ", ".join(str(one.value) for one in kind)
        raise ConfigurationError(
            f"{name}: expected one of {choices} ({kind.__name__}), got {shown(value)}"
        )

    return member
