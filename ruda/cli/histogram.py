"""Tokens per expert in a few lines of text: one character an expert."""

from __future__ import annotations

from ruda.testing.layers import Array

_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII = ".:-=+*#@"
_PER_LINE = 64


def load_lines(load_E: Array, *, unicode: bool) -> list[str]:
    """The histogram, lines of at most 64 experts with the first and last id, then a summary."""
    ramp = _BLOCKS if unicode else _ASCII
    peak = int(load_E.max())
    bars = "".join(_bar(int(count), peak, ramp) for count in load_E)
    last = len(bars) - 1
    width = len(str(last))
    lines: list[str] = []
    for first in range(0, len(bars), _PER_LINE):
        part = bars[first : first + _PER_LINE]
        lines.append(f"  {first:>{width}} {part} {first + len(part) - 1}")
    return [*lines, f"  {load_summary(load_E)}"]


def load_summary(load_E: Array) -> str:
    """Extremes, mean, and how many experts have nothing to do."""
    idle = int((load_E == 0).sum())
    return (
        f"least {int(load_E.min())}, mean {float(load_E.mean()):.4g}, most {int(load_E.max())}; "
        f"{idle} of {len(load_E)} experts idle"
    )


def _bar(count: int, peak: int, ramp: str) -> str:
    """Blank for none; any load at all is visible."""
    if not count:
        return " "
    return ramp[-(-count * len(ramp) // peak) - 1]
