"""Which backends there are, and which one a tensor or a name means.

A framework is imported only when one of its tensors arrives or its backend is asked for by name:
until then a backend is a string. There is no current backend: a call answers from its arguments.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from ruda.backend import Backend
from ruda.base.dtypes import DType
from ruda.base.errors import (
    BackendMismatchError,
    BackendUnavailableError,
    DeviceError,
    IncompleteBackendError,
    MoeError,
    UnknownBackendError,
)
from ruda.base.operations import missing_operations
from ruda.base.strategies import Request
from ruda.base.values import shown

AnyBackend: TypeAlias = Backend[Any, Any, Any]

ENTRY_POINT_GROUP = "ruda.backends"


class _Entry(NamedTuple):
    """Where a backend lives; `packages` are the roots of the modules its tensor types come from.

    `rival` is another package's claim to the same name: it makes that name unusable, no other.
    """

    target: str
    packages: tuple[str, ...] = ()
    install: str = ""
    rival: str = ""


_SHIPPED = {
    "numpy": _Entry("ruda_backend_numpy:NumpyBackend", ("numpy",), "pip install 'ruda[numpy]'"),
    "torch": _Entry("ruda_backend_torch:TorchBackend", ("torch",), "pip install 'ruda[torch]'"),
    "cupy": _Entry("ruda_backend_cupy:CupyBackend", ("cupy",), "pip install 'ruda[cupy]'"),
}

_registered: dict[str, _Entry] = {}
_classes: dict[str, type[AnyBackend]] = {}
_instances: dict[tuple[str, str | None], AnyBackend] = {}
_name_of_type: dict[type, str] = {}


@dataclass(frozen=True)
class Availability:
    """Whether a backend can be used here; if not, why, and the line that would install it."""

    available: bool
    reason: str = ""
    install: str = ""

    def __bool__(self) -> bool:
        return self.available

    def __str__(self) -> str:
        if self.available:
            return "available"
        return f"unavailable, because {self.reason}" + (
            f" ({self.install})" if self.install else ""
        )


def register_backend(name: str, target: str | type[AnyBackend]) -> None:
    """Make a backend known under a name for this process: a class, or a string ``module:Class``.

    A class is checked at once and refused (`IncompleteBackendError`) with the names of the required
    operations it lacks; a string is checked when it is first loaded, or at once if its module is
    loaded already. A name already taken by something else is an `UnknownBackendError` naming both.
    """
    if not isinstance(target, str):
        _check_complete(name, target)
    text = target if isinstance(target, str) else f"{target.__module__}:{target.__qualname__}"
    holder = _entries().get(name)
    if holder is not None and holder.target != text:
        raise UnknownBackendError(
            f"backend name {name!r}: claimed by both {holder.target} and {text}"
        )
    if isinstance(target, str):
        _split_target(name, target)
        if target.partition(":")[0] in sys.modules:
            _classes[name] = _load(name, holder or _Entry(target))
    else:
        _classes[name] = target
    if name not in _SHIPPED:
        _registered[name] = _Entry(text)
    # A class defined anew (a reloaded module, a notebook cell) replaces what the old one made.
    for key in list(_instances):
        if key[0] == name:
            _instances.pop(key, None)


def known_backends() -> tuple[str, ...]:
    """The names of all backends: shipped, registered, declared by entry points; imports none."""
    return tuple(_entries())


def available_backends() -> dict[str, Availability]:
    """Every known backend: available (it imports, a tiny allocation works), or why not."""
    result: dict[str, Availability] = {}
    for name, entry in _entries().items():
        try:
            get_backend(name)
        except MoeError as error:
            result[name] = Availability(
                available=False, reason=_reason(error), install=entry.install
            )
        else:
            result[name] = Availability(available=True)
    return result


def get_backend(name: str, *, device: str | None = None) -> AnyBackend:
    """The backend with this name, on a device (its default one if none is named).

    Raises `UnknownBackendError` for a name nobody claims or two claim, `BackendUnavailableError`
    with the line that would mend it where the framework cannot be used, `DeviceError` for a device
    it does not have.
    """
    cached = _instances.get((name, device))
    if cached is None:
        cached = _make(name, device)
        _instances[name, device] = cached
    return cached


def load_backend(target: str) -> type[AnyBackend]:
    """The class at ``module:Class``, under no name; refused as by `register_backend`."""
    return _load(target, _Entry(target))


def backend_of(tensor: object) -> AnyBackend:
    """The backend of a tensor, on the tensor's device; `BackendMismatchError` if it has none."""
    name = _name_of_type.get(type(tensor))
    if name is None:
        name = _find(tensor)
        _name_of_type[type(tensor)] = name
    kind = get_backend(name)
    if not kind.owns(tensor):
        raise BackendMismatchError(
            f"expected a plain dense tensor of backend {name!r}, got {describe(tensor)}"
        )
    device = kind.device_of(tensor)
    return kind if device == kind.device else get_backend(name, device=device)


def describe(value: object) -> str:
    """A value's type by its public-looking full name."""
    kind = type(value)
    return f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}"


def _entries() -> dict[str, _Entry]:
    from importlib.metadata import entry_points

    entries = {**_SHIPPED, **_registered}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        holder = entries.get(point.name)
        if holder is None:
            entries[point.name] = _Entry(point.value)
        elif holder.target != point.value:
            entries[point.name] = holder._replace(rival=point.value)
    return entries


def _find(tensor: object) -> str:
    roots = {base.__module__.partition(".")[0] for base in type(tensor).__mro__}
    for name, entry in _SHIPPED.items():
        if roots.intersection(entry.packages) and _is_tensor(get_backend(name), tensor):
            return name
    for name in (name for name in _entries() if name not in _SHIPPED):
        try:
            owned = get_backend(name).owns(tensor)
        except MoeError:  # a package that cannot be used has no tensors here
            continue
        if owned:
            return name
    raise BackendMismatchError(
        f"expected a tensor of a known backend ({', '.join(known_backends())}), "
        f"got {describe(tensor)}"
    )


def _is_tensor(backend: AnyBackend, value: object) -> bool:
    """Of the framework's tensor type; a mixin or a scalar of the same package is not."""
    return isinstance(value, backend.FloatTensor)


def _make(name: str, device: str | None) -> AnyBackend:
    entry = _entries().get(name)
    if entry is None:
        raise UnknownBackendError(
            f"backend: expected one of {', '.join(known_backends())}, got {shown(name)}"
        )
    if entry.rival:
        raise UnknownBackendError(
            f"backend name {name!r}: claimed by both {entry.target} and {entry.rival}"
        )
    kind = _classes.get(name)
    if kind is None:
        kind = _classes[name] = _load(name, entry)
    try:
        backend = kind(device) if device is not None else kind()  # type: ignore[call-arg]
        refused = backend.unsupported(Request(device=backend.device))
    except Exception as error:
        raise _unavailable(name, entry, error) from error
    if refused is not None:
        raise DeviceError(f"device: backend {name!r} cannot serve {backend.device!r}: {refused}")
    try:
        backend.full((1,), 0.0, DType.FLOAT32)
    except Exception as error:
        raise _unavailable(name, entry, error) from error
    return backend


def _split_target(name: str, target: str) -> tuple[str, str]:
    module, _, attribute = target.partition(":")
    if not module or not attribute:
        raise UnknownBackendError(
            f"backend {shown(name)}: expected 'module:Class', got {shown(target)}"
        )
    return module, attribute


def _load(name: str, entry: _Entry) -> type[AnyBackend]:
    module, attribute = _split_target(name, entry.target)
    try:
        kind = getattr(importlib.import_module(module), attribute)
    # A framework half installed fails in any way it likes; every way means "unavailable".
    except Exception as error:
        raise _unavailable(name, entry, error) from error
    _check_complete(name, kind)
    checked: type[AnyBackend] = kind
    return checked


def _check_complete(name: str, kind: object) -> None:
    if not isinstance(kind, type) or Backend not in kind.__mro__:
        raise IncompleteBackendError(
            f"backend {name!r}: expected a subclass of ruda.Backend, got {shown(kind)}"
        )
    missing = missing_operations(kind)
    if missing:
        raise IncompleteBackendError(
            f"backend {name!r}: {kind.__module__}:{kind.__qualname__} lacks {', '.join(missing)}"
        )


def _unavailable(name: str, entry: _Entry, cause: Exception) -> BackendUnavailableError:
    mend = f"; {entry.install}" if entry.install else ""
    return BackendUnavailableError(
        f"backend {name!r} is unavailable, because {type(cause).__name__}: {cause}{mend}"
    )


def _reason(error: BaseException) -> str:
    cause = error.__cause__
    return str(error) if cause is None else f"{type(cause).__name__}: {cause}"
