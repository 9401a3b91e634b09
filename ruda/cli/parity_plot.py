"""A parity report as a picture: both halves of the tolerance rule, and the load of the experts."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ruda.cli.console import CliError
from ruda.cli.parity_report import describe_layer, load_summary, tensor_label
from ruda.testing.files.atomic import replacing
from ruda.testing.parity import TENSORS, ParityReport
from ruda.testing.tolerance import Comparison

FORMATS = ("png", "svg", "pdf")

# Okabe and Ito's colours, which readers with colour blindness can tell apart.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#000000")
_ALLOWED = "#666666"
_MARKERS = "osD^vP"
_RING = {
    "color": "#D55E00",
    "linestyle": "",
    "marker": "o",
    "markersize": 13,
    "markeredgewidth": 2,
    "fillstyle": "none",
}


def plot_format(path: Path) -> str:
    """The format a plot's name asks for."""
    found = path.suffix.lower().removeprefix(".")
    if found not in FORMATS:
        raise CliError(f"--plot: expected a name ending in .{', .'.join(FORMATS)}, got {path}")
    return found


def write_plot(path: Path, report: ParityReport) -> None:
    """Draw the report into `path`."""
    # Any: matplotlib's own annotations are partly unknown to a strict checker.
    figure: Any = Figure(figsize=(11, 7.5), layout="constrained")
    canvas: Any = FigureCanvasAgg(figure)
    verdict = "passed" if report.passed else "FAILED"
    figure.suptitle(
        f"{Path(report.source).name}: {verdict}\n{describe_layer(report.layer)}", fontsize=11
    )
    grid = figure.add_gridspec(2, 2, height_ratios=(1.5, 1))
    frobenius = figure.add_subplot(grid[0, 0])
    largest = figure.add_subplot(grid[0, 1])
    _draw_errors(frobenius, report, _frobenius, "error norm / reference norm")
    _draw_errors(largest, report, _largest, "units in the last place")
    frobenius.set_title("Relative Frobenius error", fontsize=10)
    largest.set_title("Largest error", fontsize=10)
    _draw_load(figure.add_subplot(grid[1, :]), report)
    handles, labels = frobenius.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    with replacing(path) as temporary:
        canvas.print_figure(temporary, format=plot_format(path), dpi=120)


def _frobenius(tensor: Comparison) -> tuple[float, float]:
    return tensor.relative_frobenius, tensor.allowed_frobenius


def _largest(tensor: Comparison) -> tuple[float, float]:
    return tensor.error_ulp, tensor.allowed_ulp


def _draw_errors(
    axes: Any,
    report: ParityReport,
    values: Callable[[Comparison], tuple[float, float]],
    label: str,
) -> None:
    """One panel: allowed as a line across each tensor's column, a marker for each backend."""
    axes.set_yscale("log")
    axes.set_ylabel(label, fontsize=9)
    axes.set_xticks(range(len(TENSORS)), [tensor_label(name) for name in TENSORS])
    axes.set_xlim(-0.5, len(TENSORS) - 0.5)
    axes.tick_params(labelsize=9)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    drawn = [report for report in report.backends if report.tensors]
    floor, ceiling = _range([values(t) for backend in drawn for t in backend.tensors])
    axes.set_ylim(floor / 2, ceiling * 3)
    _draw_allowed(axes, [[values(c)[1] for c in b.tensors] for b in drawn])
    for index, backend in enumerate(report.backends):
        shift = 0.7 * ((index + 0.5) / len(report.backends) - 0.5)
        style = {
            "color": _COLOURS[index % len(_COLOURS)],
            "marker": _MARKERS[index % len(_MARKERS)],
        }
        for column, tensor in enumerate(backend.tensors):
            _draw_error(axes, (column + shift, values(tensor)[0]), floor, tensor, style)
        # One legend entry a backend, whatever its points look like, and if it has none.
        label = f"{backend.name} {backend.version} ({backend.device})"
        failed = "" if backend.passed else ": FAILED"
        axes.plot([], [], linestyle="", label=f"{label}{failed}", **style)
    if any(not t.passed for backend in drawn for t in backend.tensors):
        axes.plot([], [], label="over the allowed error", **_RING)


def _draw_allowed(axes: Any, allowed: list[list[float]]) -> None:
    """The limit of each tensor: the same for all backends that chose the same experts."""
    label: str | None = "allowed"
    for column in range(len(TENSORS)):
        for limit in sorted({row[column] for row in allowed}):
            if limit > 0 and math.isfinite(limit):
                axes.hlines(
                    limit, column - 0.4, column + 0.4, color=_ALLOWED, linewidth=2, label=label
                )
                label = None


def _draw_error(
    axes: Any, at: tuple[float, float], floor: float, tensor: Comparison, style: dict[str, Any]
) -> None:
    """One marker, in a ring if the tensor failed; an error of zero is hollow, and says so."""
    x, error = at
    if not math.isfinite(error):
        return
    y = error if error > 0 else floor
    axes.plot(x, y, linestyle="", markersize=6, fillstyle="full" if error > 0 else "none", **style)
    if error == 0:
        axes.annotate("0", (x, y), (0, 7), textcoords="offset points", ha="center", fontsize=8)
    if not tensor.passed:
        axes.plot(x, y, **_RING)


def _range(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    """Where an error of exactly zero is drawn, below everything else; and the largest value."""
    known = [value for pair in pairs for value in pair if value > 0 and math.isfinite(value)]
    return min(known, default=1.0) / 3, max(known, default=1.0)


def _draw_load(axes: Any, report: ParityReport) -> None:
    load = report.load
    axes.bar(range(len(load)), load, width=0.9 if len(load) <= 64 else 1.0, color="#7f9fbf")
    axes.axhline(float(load.mean()), color=_ALLOWED, linewidth=1, linestyle="--")
    axes.set_xlim(-0.5, len(load) - 0.5)
    axes.set_xlabel("expert", fontsize=9)
    axes.set_ylabel("tokens", fontsize=9)
    axes.tick_params(labelsize=9)
    axes.set_title(f"Load (dashed: mean): {load_summary(load)}", fontsize=10)
