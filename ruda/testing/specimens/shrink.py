"""Making a failing specimen smaller while it still fails, and saying how to see it fail again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from ruda.base.errors import MoeError
from ruda.testing.specimens.specimen import Numbers, Specimen

Check = Callable[[Specimen], "str | None"]
"""What is wrong with a backend's results for a specimen, or `None`."""

_SIZES = {"tokens": 0, "hidden": 1, "intermediate": 1, "experts": 1, "top_k": 1, "exponent": 0}
_KEPT = frozenset({*_SIZES, "dtype", "numbers"})
_ATTEMPTS = 300


def smallest(specimen: Specimen, check: Check) -> tuple[Specimen, str]:
    """The smallest specimen found on which the check fails as well, and what it says there."""
    reason = check(specimen)
    assert reason is not None
    attempts = 0
    candidates = _simpler(specimen)
    while attempts < _ATTEMPTS:
        candidate = next(candidates, None)
        if candidate is None:
            break
        attempts += 1
        found = _fails(candidate, check)
        if found is not None:
            specimen, reason = candidate, found
            candidates = _simpler(specimen)
    return specimen, reason


def _fails(specimen: Specimen, check: Check) -> str | None:
    try:
        return check(specimen)
    except MoeError:  # not a layer: more slots than experts, say
        return None


def _simpler(specimen: Specimen) -> Iterator[Specimen]:
    for field in fields(specimen):
        value = getattr(specimen, field.name)
        if field.name in _SIZES:
            least = _SIZES[field.name]
            for size in (least, (value + least) // 2, value - 1):
                if least <= size < value:
                    yield _with(specimen, field.name, size)
        elif field.name not in _KEPT and value != field.default:
            yield _with(specimen, field.name, field.default)
    for name in ("flaws", "layouts"):
        items = getattr(specimen, name)
        for i in range(len(items)):
            yield _with(specimen, name, items[:i] + items[i + 1 :])
    if specimen.numbers is Numbers.NORMAL:
        yield replace(specimen, numbers=Numbers.WHOLE)


def _with(specimen: Specimen, name: str, value: Any) -> Specimen:
    return replace(specimen, **{name: value})
