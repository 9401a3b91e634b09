"""What a caller may ask for: selections, router weights, strategies, wanted gradients.

Everything is checked as soon as it can be: on construction what needs no operand, and in `check`
what needs the number of experts. Both raise `ConfigurationError` before any work is done.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import Enum
from typing import Any, Self, TypeAlias, get_args

from ruda.base.errors import ConfigurationError
from ruda.base.strategies import CombineGradientStrategy, ExpertStrategy


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
        _check_count("SoftmaxSelection.top_k", self.top_k)

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
        _check_count("GroupedSelection.top_k", self.top_k)
        _check_member("GroupedSelection.scoring", self.scoring, RouterScoring)
        _check_count("GroupedSelection.groups", self.groups)
        _check_count("GroupedSelection.selected_groups", self.selected_groups)
        _check_bool("GroupedSelection.group_top_two", self.group_top_two)
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
        _check_member("RouterWeightOptions.scoring", self.scoring, RouterScoring)
        _check_bool("RouterWeightOptions.renormalize", self.renormalize)
        scale = _check_number("RouterWeightOptions.scale", self.scale)
        epsilon = _check_number("RouterWeightOptions.epsilon", self.epsilon)
        if scale <= 0.0:
            raise ConfigurationError(
                f"RouterWeightOptions.scale: expected a finite number > 0, got {scale}"
            )
        if epsilon < 0.0:
            raise ConfigurationError(
                f"RouterWeightOptions.epsilon: expected a finite number >= 0, got {epsilon}"
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
        owner = type(self).__name__
        _check_member(f"{owner}.forward", self.forward, ExpertStrategy)
        _check_member(f"{owner}.backward", self.backward, ExpertStrategy)
        _check_member(f"{owner}.combine_backward", self.combine_backward, CombineGradientStrategy)
        _check_member(f"{owner}.combine", self.combine, CombineAccumulation)
        _check_member(f"{owner}.intermediates", self.intermediates, Intermediates)


@dataclass(frozen=True, kw_only=True)
class MoeOptions(ExpertOptions):
    """A whole branch: which experts, with which weights, computed how.

    `selection` and `weights` have no default: no model family is guessed.
    """

    selection: Selection
    weights: RouterWeightOptions

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_member("MoeOptions.selection", self.selection, *get_args(Selection))
        _check_member("MoeOptions.weights", self.weights, RouterWeightOptions)


class _GradientSelection:
    def __post_init__(self) -> None:
        for name in self.names():
            _check_bool(f"{type(self).__name__}.{name}", getattr(self, name))

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


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigurationError(f"{name}: expected an integer >= 1, got {value!r}")


def _check_top_k(name: str, top_k: int, experts: int) -> None:
    if top_k > experts:
        raise ConfigurationError(f"{name}: expected 1..{experts} (experts), got {top_k}")


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name}: expected True or False, got {value!r}")


def _check_member(name: str, value: object, *kinds: type) -> None:
    if not isinstance(value, kinds):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise ConfigurationError(f"{name}: expected a {expected}, got {value!r}")


def _check_number(name: str, value: object) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not abs(value) <= sys.float_info.max  # an integer may be larger than any float
    ):
        raise ConfigurationError(f"{name}: expected a finite number, got {value!r}")
    return float(value)
