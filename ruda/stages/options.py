"""What a caller may ask for: selections, router weights, strategies, wanted gradients.

Everything is checked as soon as it can be: on construction what needs no operand, and in `check`
what needs the number of experts. Both raise `ConfigurationError` before any work is done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Self, TypeAlias, get_args

from ruda.base.errors import ConfigurationError
from ruda.base.strategies import CombineGradientStrategy, ExpertStrategy
from ruda.base.values import count, member_of, number, shown, truth


class RouterScoring(Enum):
    """How a logit becomes a score (contract 3)."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    SQRT_SOFTPLUS = "sqrt_softplus"


class CombineAccumulation(Enum):
    """Where the combine sum is held (contract 6)."""

    COMPUTE = "compute"
    STORAGE = "storage"


class Intermediates(Enum):
    """Whether values between the expert products are rounded to the storage type (contract 5)."""

    STORAGE = "storage"
    COMPUTE = "compute"


@dataclass(frozen=True)
class SoftmaxSelection:
    """The `top_k` largest logits, exact ties to the lower expert id (contract 2)."""

    top_k: int

    def __post_init__(self) -> None:
        _normalize(self, top_k=count)

    def check(self, experts: int) -> None:
        """Raise `ConfigurationError` if this cannot choose among `experts` experts."""
        _check_top_k("SoftmaxSelection.top_k", self.top_k, experts)


@dataclass(frozen=True)
class GroupedSelection:
    """DeepSeek-style choice by score plus correction bias, within the best groups (contract 2).

    `groups` contiguous equal groups are ranked by their largest biased score, or by the sum of
    their two largest with `group_top_two`; the `top_k` experts come from `selected_groups` of them.
    One group is plain biased top-k.
    """

    top_k: int
    scoring: RouterScoring = RouterScoring.SIGMOID
    groups: int = 1
    selected_groups: int = 1
    group_top_two: bool = False

    def __post_init__(self) -> None:
        _normalize(self, top_k=count, scoring=member_of(RouterScoring), groups=count)
        _normalize(self, selected_groups=count, group_top_two=truth)
        if self.selected_groups > self.groups:
            raise ConfigurationError(
                f"GroupedSelection.selected_groups: expected 1..{self.groups} (groups), "
                f"got {self.selected_groups}"
            )

    def check(self, experts: int) -> None:
        """Raise `ConfigurationError` if this cannot choose among `experts` experts."""
        _check_top_k("GroupedSelection.top_k", self.top_k, experts)
        if experts % self.groups:
            raise ConfigurationError(
                f"GroupedSelection.groups: expected a divisor of the {experts} experts, "
                f"got {self.groups}"
            )
        size = experts // self.groups
        if self.group_top_two and size < 2:
            raise ConfigurationError(
                "GroupedSelection.group_top_two: expected at least two experts a group, "
                f"got {experts} experts in {self.groups} groups"
            )
        if self.top_k > self.selected_groups * size:
            raise ConfigurationError(
                f"GroupedSelection.top_k: expected at most {self.selected_groups * size} "
                f"(selected_groups {self.selected_groups} x {size} experts a group), "
                f"got {self.top_k}"
            )


@dataclass(frozen=True, eq=False, repr=False)
class FixedSelection:
    """The caller's own expert ids, an integer tensor [T, k] (contract 2).

    Repeated ids in a row are separate slots. An id outside [0, E) is a `SelectionError`.
    """

    expert_ids: Any

    def __repr__(self) -> str:
        shape = getattr(self.expert_ids, "shape", None)
        extents = list(shape) if shape is not None else type(self.expert_ids).__name__
        return f"FixedSelection(expert_ids={extents})"

    def check(self, experts: int) -> None:
        """Nothing to check here: the ids are checked with the other operands."""


Selection: TypeAlias = SoftmaxSelection | GroupedSelection | FixedSelection


@dataclass(frozen=True)
class RouterWeightOptions:
    """How selected scores become routing weights (contract 3)."""

    scoring: RouterScoring
    renormalize: bool
    scale: float = 1.0
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        _normalize(
            self, scoring=member_of(RouterScoring), renormalize=truth, scale=number, epsilon=number
        )
        if self.scale <= 0.0:
            raise ConfigurationError(
                f"RouterWeightOptions.scale: expected a finite number > 0, got {self.scale}"
            )
        if self.epsilon < 0.0:
            raise ConfigurationError(
                f"RouterWeightOptions.epsilon: expected a finite number >= 0, got {self.epsilon}"
            )


@dataclass(frozen=True, kw_only=True)
class ExpertOptions:
    """How the stages from dispatch to combine run, both ways (contract 5 to 8)."""

    forward: ExpertStrategy = ExpertStrategy.AUTO
    backward: ExpertStrategy = ExpertStrategy.AUTO
    combine_backward: CombineGradientStrategy = CombineGradientStrategy.SERIAL
    combine: CombineAccumulation = CombineAccumulation.COMPUTE
    intermediates: Intermediates = Intermediates.STORAGE

    def __post_init__(self) -> None:
        _normalize(self, forward=member_of(ExpertStrategy), backward=member_of(ExpertStrategy))
        _normalize(self, combine_backward=member_of(CombineGradientStrategy))
        _normalize(
            self, combine=member_of(CombineAccumulation), intermediates=member_of(Intermediates)
        )


@dataclass(frozen=True, kw_only=True)
class MoeOptions(ExpertOptions):
    """A whole branch: which experts, with which weights, computed how.

    `selection` and `weights` have no default: no model family is guessed.
    """

    selection: Selection
    weights: RouterWeightOptions

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_selection(self.selection)
        if not isinstance(self.weights, RouterWeightOptions):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(
                f"MoeOptions.weights: expected a RouterWeightOptions, got {shown(self.weights)}"
            )


class _GradientSelection:
    def __post_init__(self) -> None:
        _normalize(self, **dict.fromkeys(self.names(), truth))

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The gradients there are, in order."""
        return tuple(cls.__annotations__)

    @classmethod
    def all(cls) -> Self:
        """Every gradient."""
        return cls(**dict.fromkeys(cls.names(), True))

    @classmethod
    def none(cls) -> Self:
        """No gradient."""
        return cls()

    @property
    def wanted(self) -> tuple[str, ...]:
        """The names of the wanted gradients, in order."""
        return tuple(name for name in self.names() if getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class MoeGradientSelection(_GradientSelection):
    """Which of the five gradients of `MoeBackward` are wanted (contract 7)."""

    input: bool = False
    logits: bool = False
    gate: bool = False
    up: bool = False
    down: bool = False


@dataclass(frozen=True, kw_only=True)
class ExpertsGradientSelection(_GradientSelection):
    """Which of the five gradients of `ExpertsBackward` are wanted (contract 7)."""

    input: bool = False
    weights: bool = False
    gate: bool = False
    up: bool = False
    down: bool = False


def _check_top_k(name: str, top_k: int, experts: int) -> None:
    if top_k > experts:
        raise ConfigurationError(f"{name}: expected 1..{experts} (experts), got {top_k}")


def _check_selection(value: object) -> None:
    if isinstance(value, get_args(Selection)):
        return
    kinds = " or ".join(kind.__name__ for kind in get_args(Selection))
    kind = type(value)
    if isinstance(value, (list, tuple)) or "shape" in dir(kind):
        raise ConfigurationError(
            f"MoeOptions.selection: expected a {kinds}, got {kind.__module__}.{kind.__qualname__}; "
            "expert ids of your own go into FixedSelection(ids)"
        )
    raise ConfigurationError(f"MoeOptions.selection: expected a {kinds}, got {shown(value)}")


def _normalize(record: object, **kinds: Callable[[str, Any], object]) -> None:
    """Replace each field named by what its kind makes of it: a number, a truth, a member."""
    owner = type(record).__name__
    for field, kind in kinds.items():
        object.__setattr__(record, field, kind(f"{owner}.{field}", getattr(record, field)))
