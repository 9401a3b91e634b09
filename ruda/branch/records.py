"""What the algorithm returns: frozen records whose fields have their backend's own tensor type.

`MoeBackward[B]` is covariant in the backend B; a field is declared by a descriptor that reads the
tensor type off B, so `grads.input` is `np.ndarray` for NumPy and `torch.Tensor` for PyTorch, to
mypy and to pyright, without a type parameter for the tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Generic, overload

from ruda.backend import B, B_co, Backend, Floats, Integers
from ruda.base.tensors import F, I
from ruda.stages.dispatch import RowLayout
from ruda.stages.experts import Activations
from ruda.stages.options import (
    ExpertOptions,
    ExpertsGradientSelection,
    MoeGradientSelection,
    MoeOptions,
)


class _Field:
    """A field kept in the record's own dict, under its own name."""

    name: str

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __set__(self, record: object, value: Any) -> None:
        record.__dict__[self.name] = value

    def _read(self, record: Any) -> Any:
        if record is None:
            raise AttributeError  # so that `dataclass` sees a field without a default
        return record.__dict__[self.name]


class FloatField(_Field):
    """A float tensor of the record's backend."""

    @overload
    def __get__(self, record: None, owner: object) -> FloatField: ...
    @overload
    def __get__(self, record: Record[Floats[F]], owner: object) -> F: ...
    def __get__(self, record: Any, owner: object) -> Any:
        return self._read(record)


class OptionalFloatField(_Field):
    """A float tensor of the record's backend, or `None` where it was not wanted."""

    @overload
    def __get__(self, record: None, owner: object) -> OptionalFloatField: ...
    @overload
    def __get__(self, record: Record[Floats[F]], owner: object) -> F | None: ...
    def __get__(self, record: Any, owner: object) -> Any:
        return self._read(record)


class LayoutField(_Field):
    """Where each row went, in the backend's integer tensors."""

    @overload
    def __get__(self, record: None, owner: object) -> LayoutField: ...
    @overload
    def __get__(self, record: Record[Integers[I]], owner: object) -> RowLayout[I]: ...
    def __get__(self, record: Any, owner: object) -> Any:
        return self._read(record)


class ActivationsField(_Field):
    """The activations a state keeps."""

    @overload
    def __get__(self, record: None, owner: object) -> ActivationsField: ...
    @overload
    def __get__(self, record: Record[Floats[F]], owner: object) -> Activations[F]: ...
    def __get__(self, record: Any, owner: object) -> Any:
        return self._read(record)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Record(Generic[B_co]):
    """A backend, and tensors of it."""

    backend: B_co

    def asdict(self) -> dict[str, Any]:
        """Name to tensor; `None` where a gradient was not wanted."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if isinstance(type(self).__dict__.get(field.name), (FloatField, OptionalFloatField))
        }

    def __repr__(self) -> str:
        backend: Any = self.backend
        parts = [f"backend={backend.name!r}", f"device={backend.device!r}"]
        for name, tensor in self.asdict().items():
            parts.append(f"{name}={_summary(backend, tensor)}")
        return f"{type(self).__name__}({', '.join(parts)})"


class _Gradients(Record[B_co]):
    def _moved(self, backend: Any) -> dict[str, Any]:
        source: Any = self.backend
        return {
            name: None if tensor is None else _move(source, backend, tensor)
            for name, tensor in self.asdict().items()
        }


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class MoeBackward(_Gradients[B_co]):
    """The five gradients of the branch with the selection held fixed (contract 7).

    `input` [T, H] in the storage type, `logits` [T, E] in the logits' type, `gate` and `up`
    [E, I, H] and `down` [E, H, I] in the compute type: float32 even for 16-bit weights.
    """

    input: FloatField = FloatField()
    logits: FloatField = FloatField()
    gate: FloatField = FloatField()
    up: FloatField = FloatField()
    down: FloatField = FloatField()

    def to(self, backend: B) -> MoeBackward[B]:
        """The same gradients on another backend: by DLPack where both speak it, else by host."""
        return MoeBackward(backend=backend, **self._moved(backend))


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class MoeBackwardSelected(_Gradients[B_co]):
    """Like `MoeBackward`, with `None` for every gradient that was not asked for."""

    input: OptionalFloatField = OptionalFloatField()
    logits: OptionalFloatField = OptionalFloatField()
    gate: OptionalFloatField = OptionalFloatField()
    up: OptionalFloatField = OptionalFloatField()
    down: OptionalFloatField = OptionalFloatField()

    def to(self, backend: B) -> MoeBackwardSelected[B]:
        """The same gradients on another backend: by DLPack where both speak it, else by host."""
        return MoeBackwardSelected(backend=backend, **self._moved(backend))


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ExpertsBackward(_Gradients[B_co]):
    """The five gradients of the stages from dispatch to combine (contract 7).

    `weights` [T, K] is in the compute type; the others as in `MoeBackward`.
    """

    input: FloatField = FloatField()
    weights: FloatField = FloatField()
    gate: FloatField = FloatField()
    up: FloatField = FloatField()
    down: FloatField = FloatField()

    def to(self, backend: B) -> ExpertsBackward[B]:
        """The same gradients on another backend: by DLPack where both speak it, else by host."""
        return ExpertsBackward(backend=backend, **self._moved(backend))


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ExpertsBackwardSelected(_Gradients[B_co]):
    """Like `ExpertsBackward`, with `None` for every gradient that was not asked for."""

    input: OptionalFloatField = OptionalFloatField()
    weights: OptionalFloatField = OptionalFloatField()
    gate: OptionalFloatField = OptionalFloatField()
    up: OptionalFloatField = OptionalFloatField()
    down: OptionalFloatField = OptionalFloatField()

    def to(self, backend: B) -> ExpertsBackwardSelected[B]:
        """The same gradients on another backend: by DLPack where both speak it, else by host."""
        return ExpertsBackwardSelected(backend=backend, **self._moved(backend))


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ExpertsState(Record[B_co]):
    """What `experts_forward` keeps for `experts_backward` (contract 7).

    The operands by reference (`input` only if the gate or up gradient may be asked for), the
    layout, and the activations the wanted `gradients` need. Backward changes nothing in it.
    """

    options: ExpertOptions
    gradients: ExpertsGradientSelection
    layout: LayoutField = LayoutField()
    kept: ActivationsField = ActivationsField()
    input: OptionalFloatField = OptionalFloatField()
    weights: FloatField = FloatField()
    gate: FloatField = FloatField()
    up: FloatField = FloatField()
    down: FloatField = FloatField()
    versions: tuple[int | None, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class MoeState(Record[B_co]):
    """What `moe_forward` keeps for `moe_backward`: the expert stage's state, and the logits."""

    options: MoeOptions
    gradients: MoeGradientSelection
    experts: ExpertsState[B_co]
    logits: FloatField = FloatField()
    versions: tuple[int | None, ...] = ()


def _summary(backend: Backend[Any, Any, Any], tensor: Any) -> str:
    if tensor is None:
        return "None"
    return f"{backend.dtype_name(tensor)}{list(backend.shape(tensor))}"


def _move(source: Backend[F, Any, Any], target: Backend[Any, Any, Any], tensor: F) -> Any:
    shared = target.from_dlpack(tensor)
    return shared if shared is not None else target.from_numpy(source.to_numpy(tensor))
