"""`MoeOptions` as JSON and back: versioned, and strict about what it reads.

    {"version": 1,
     "selection": {"kind": "softmax", "top_k": 8},
     "weights": {"scoring": "softmax", "renormalize": true, "scale": 1.0, "epsilon": 0.0},
     "forward": "auto", "backward": "auto", "combine_backward": "serial",
     "combine": "compute", "intermediates": "storage"}

A selection of kind "fixed" has no ids here; whoever reads the text has them as a tensor. What has a
default in Python may be left out; a key or value that is not known is a `ConfigurationError`, so a
file from a newer version is never half understood.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from enum import Enum
from typing import Any, TypeVar, cast

from ruda.base.errors import ConfigurationError
from ruda.base.strategies import CombineGradientStrategy, ExpertStrategy
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

VERSION = 1

T = TypeVar("T")

_KINDS: dict[str, type[Selection]] = {
    "softmax": SoftmaxSelection,
    "grouped": GroupedSelection,
    "fixed": FixedSelection,
}
_ENUMS: dict[str, type[Enum]] = {
    "scoring": RouterScoring,
    "forward": ExpertStrategy,
    "backward": ExpertStrategy,
    "combine_backward": CombineGradientStrategy,
    "combine": CombineAccumulation,
    "intermediates": Intermediates,
}


def options_to_dict(options: MoeOptions) -> dict[str, Any]:
    """The options as plain JSON values; the ids of a `FixedSelection` are left out."""
    result = {"version": VERSION, **_plain(options)}
    selection = options.selection
    kind = next(kind for kind, made in _KINDS.items() if type(selection) is made)
    values = {} if isinstance(selection, FixedSelection) else _plain(selection)
    result["selection"] = {"kind": kind, **values}
    result["weights"] = _plain(options.weights)
    return result


def dump_options(options: MoeOptions) -> str:
    """The options as JSON text; the ids of a `FixedSelection` are left out."""
    return json.dumps(options_to_dict(options))


def load_options(text: str, expert_ids: Any = None) -> MoeOptions:
    """The options in a JSON text; `expert_ids` become its selection where that is "fixed".

    Raises `ConfigurationError` for anything that is not exactly such options, and where ids are
    given but not asked for or the other way round.
    """
    values = _object("options", _parse(text))
    if values.pop("version", None) != VERSION:
        raise ConfigurationError(f"options.version: expected {VERSION}")
    for name in ("selection", "weights"):
        if name not in values:
            raise ConfigurationError(f"options.{name} is missing")
    selection = _selection(_object("options.selection", values["selection"]), expert_ids)
    weights = _object("options.weights", values["weights"])
    values["selection"] = selection
    values["weights"] = _make("options.weights", RouterWeightOptions, weights)
    return _make("options", MoeOptions, values)


def _plain(record: Any) -> dict[str, Any]:
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return {
        name: value.value if isinstance(value, Enum) else value for name, value in values.items()
    }


def _selection(values: dict[str, Any], expert_ids: Any) -> Selection:
    kind = values.pop("kind", None)
    made = _KINDS.get(kind) if isinstance(kind, str) else None
    if made is None:
        expected = ", ".join(_KINDS)
        raise ConfigurationError(
            f"options.selection.kind: expected one of {expected}, got {kind!r}"
        )
    if (made is FixedSelection) != (expert_ids is not None):
        state = "missing" if expert_ids is None else "given"
        raise ConfigurationError(f"expert_ids: {state}, but options.selection.kind is {kind!r}")
    if made is FixedSelection:
        if values:
            raise ConfigurationError(f"options.selection: unknown key {next(iter(values))!r}")
        return FixedSelection(expert_ids)
    return _make("options.selection", made, values)


def _make(where: str, kind: type[T], values: dict[str, Any]) -> T:
    """A dataclass from its fields, enums by value."""
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            raise ConfigurationError(f"{where}: unknown key {name!r}")
    for name, field in known.items():
        if name not in values and field.default is MISSING:
            raise ConfigurationError(f"{where}.{name} is missing")
    arguments = {
        name: _member(f"{where}.{name}", _ENUMS[name], value) if name in _ENUMS else value
        for name, value in values.items()
    }
    return kind(**arguments)


def _member(where: str, kind: type[Enum], value: object) -> Enum:
    for member in kind:
        if member.value == value:
            return member
    expected = ", ".join(str(member.value) for member in kind)
    raise ConfigurationError(f"{where}: expected one of {expected}, got {value!r}")


def _parse(text: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=_without_repeats)
    except ConfigurationError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"options: not valid JSON: {error}") from None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ConfigurationError(f"options: key {repeated!r} occurs twice")
    return values


def _object(where: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigurationError(f"{where}: expected an object, got {value!r}")
    values = cast(dict[str, Any], value)
    return dict(values)
