"""What a run of the kit found, section by section, and the table that says so."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from dataclasses import dataclass, field

from ruda.testing.tolerance import Comparison

SECTIONS = (
    "required operations",
    "replaced kernels",
    "1 shapes and types",
    "2 choosing experts",
    "3 continuous weights",
    "4 dispatch",
    "5 experts",
    "6 combine",
    "7 backward",
    "8 strategies",
    "9 promises",
    "whole layers",
)


@dataclass
class Section:
    """The checks of one section: how many passed, failed or did not apply, and the worst error."""

    passed: int = 0
    failed: int = 0
    skipped: Counter[str] = field(default_factory=Counter[str])
    """How often each declared reason was given."""
    worst: float = math.nan
    """The largest error, as a part of what the tolerance rule allows."""
    worst_name: str = ""

    def note(self, verdict: Comparison) -> None:
        """Keep the verdict that came nearest to, or farthest over, what is allowed."""
        parts = [
            0.0 if error == 0 else error / allowed if allowed > 0 else math.inf
            for error, allowed in (
                (verdict.error, verdict.allowed),
                (verdict.relative_frobenius, verdict.allowed_frobenius),
            )
            if not math.isnan(error)
        ]
        part = max(parts, default=math.nan)
        if math.isnan(self.worst) or part > self.worst:
            self.worst, self.worst_name = part, textwrap.shorten(verdict.name, 60)


@dataclass
class Report:
    """The sections of one run, in the order of the table."""

    backend: str
    sections: dict[str, Section] = field(
        default_factory=lambda: {name: Section() for name in SECTIONS}
    )

    @property
    def ran(self) -> bool:
        """Whether something was checked."""
        return any(section.passed or section.failed for section in self.sections.values())

    @property
    def passed(self) -> bool:
        """Whether something was checked, and nothing failed."""
        return self.ran and not any(section.failed for section in self.sections.values())

    def table(self) -> str:
        """One line a section, then the reasons of what was skipped."""
        lines = [
            f"Conformance of {self.backend}",
            f"{'section':22} {'passed':>7} {'failed':>7} {'skipped':>8}   worst error / allowed",
        ]
        for name, section in self.sections.items():
            worst = (
                "" if math.isnan(section.worst) else f"{section.worst:.2f} ({section.worst_name})"
            )
            skipped = section.skipped.total()
            lines.append(
                f"{name:22} {section.passed:7} {section.failed:7} {skipped:8}   {worst}".rstrip()
            )
        reasons: Counter[str] = Counter()
        for section in self.sections.values():
            reasons.update(section.skipped)
        lines += [f"skipped {count}: {reason}" for reason, count in sorted(reasons.items())]
        lines.append(f"{self.backend}: {'PASSED' if self.passed else 'FAILED'}")
        return "\n".join(lines)
