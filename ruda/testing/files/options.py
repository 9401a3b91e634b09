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
from dataclasses import replace
from enum import Enum
from typing import Any, cast

from cattrs import Converter, transform_error
from cattrs.errors import ForbiddenExtraKeysError
from cattrs.strategies import configure_tagged_union

from ruda.base.errors import ConfigurationError, MoeError
from ruda.base.values import shown
from ruda.stages.options import (
    FixedSelection,
    GroupedSelection,
    MoeOptions,
    Selection,
    SoftmaxSelection,
)

VERSION = 1

_KINDS = {SoftmaxSelection: "softmax", GroupedSelection: "grouped", FixedSelection: "fixed"}


def options_to_dict(options: MoeOptions) -> dict[str, Any]:
    """The options as plain JSON values; the ids of a `FixedSelection` are left out."""
    return {"version": VERSION, **_CONVERTER.unstructure(options)}


def dump_options(options: MoeOptions) -> str:
    """The options as JSON text; the ids of a `FixedSelection` are left out."""
    return json.dumps(options_to_dict(options))


def load_options(text: str, expert_ids: Any = None) -> MoeOptions:
    """The options in a JSON text; `expert_ids` become its selection where that is "fixed".

    Raises `ConfigurationError` for anything that is not exactly such options, and where ids are
    given but not asked for or the other way round.
    """
    values = _parse(text)
    if values.pop("version", None) != VERSION:
        raise ConfigurationError(f"options.version: expected {VERSION}")
    try:
        options = _CONVERTER.structure(values, MoeOptions)
    # Whatever is wrong, cattrs says it in its own way; the first is enough to begin with.
    except Exception as error:
        said, _, where = transform_error(error, "options", _said)[0].rpartition(" @ ")
        raise ConfigurationError(f"{where}: {said}") from None
    fixed = isinstance(options.selection, FixedSelection)
    if fixed != (expert_ids is not None):
        state = "missing" if fixed else "given"
        kind = _KINDS[type(options.selection)]
        raise ConfigurationError(f"expert_ids: {state}, but options.selection.kind is {kind!r}")
    return replace(options, selection=FixedSelection(expert_ids)) if fixed else options


def _parse(text: str) -> dict[str, Any]:
    try:
        values: object = json.loads(text, object_pairs_hook=_without_repeats)
    except ConfigurationError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"options: not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigurationError(f"options: expected an object, got {shown(values)}")
    return cast("dict[str, Any]", values)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ConfigurationError(f"options: key {repeated!r} occurs twice")
    return values


def _said(error: BaseException, kind: Any) -> str:
    if isinstance(error, MoeError):
        return str(error)
    if isinstance(error, ForbiddenExtraKeysError):
        return f"unknown key {min(error.extra_fields)!r}"
    if isinstance(error, KeyError):
        return "missing"
    return "expected an object"


def _make_converter() -> Converter:
    converter = Converter(forbid_extra_keys=True)
    # Values are left as they come: the options themselves say what they take. Before the union,
    # which keeps the hooks it finds.
    for kind in (bool, int, float):
        converter.register_structure_hook(kind, lambda value, _: value)
    converter.register_structure_hook_func(_is_enum, lambda value, _: value)
    converter.register_unstructure_hook(FixedSelection, lambda _: {})
    converter.register_structure_hook(FixedSelection, _fixed)
    configure_tagged_union(Selection, converter, tag_generator=_KINDS.__getitem__, tag_name="kind")
    structure_union = converter.get_structure_hook(Selection)

    def selection(values: Any, kind: Any) -> Any:
        tag: object = values.get("kind")
        if tag not in _KINDS.values():
            choices = ", ".join(_KINDS.values())
            raise ConfigurationError(f"kind: expected one of {choices}, got {shown(tag)}")
        return structure_union(values, kind)

    converter.register_structure_hook(Selection, selection)
    return converter


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)


def _fixed(values: dict[str, Any], _: Any) -> FixedSelection:
    if values:
        raise ForbiddenExtraKeysError(None, FixedSelection, set(values))
    return FixedSelection(None)


_CONVERTER = _make_converter()
