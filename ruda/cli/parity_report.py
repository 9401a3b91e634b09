"""A parity report as tables and a histogram for a reader, and as JSON for a program."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import ruda
from ruda.cli.console import table
from ruda.testing.files.options import options_to_dict
from ruda.testing.layers import Array, Layer
from ruda.testing.parity import BackendReport, ParityReport
from ruda.testing.tolerance import Comparison

_PASSED = "[green]passed[/]"
_FAILED = "[bold red]FAILED[/]"

_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII = ".:-=+*#@"
_PER_LINE = 64


def describe_layer(layer: Layer) -> str:
    """The layer's geometry and types in one line."""
    return (
        f"{layer.tokens} tokens, {layer.experts} experts, top {layer.top_k}, "
        f"hidden {layer.hidden}, intermediate {layer.intermediate}, "
        f"{layer.dtype} (logits {layer.logits_dtype})"
    )


def tensor_label(name: str) -> str:
    """What a tensor is called in tables and pictures."""
    return name if name == "output" else f"grad {name}"


def print_report(console: Console, report: ParityReport) -> None:
    """Load, errors, selection, verdict."""

    def line(text: str) -> None:
        console.print(text, soft_wrap=True)

    line(f"[bold]{escape(report.source)}[/]: {describe_layer(report.layer)}")
    line("[bold]Load[/], tokens per expert")
    for text in load_lines(report.load, unicode=console.encoding.startswith("utf")):
        line(escape(text))
    console.print(_errors(report))
    for backend in report.backends:
        line(_summary(report, backend))
        for reason in _reasons(backend):
            line(f"  {_FAILED}, {escape(reason)}")
    if not report.selections_agree:
        line("selections of the backends differ from one another")
    for reason in report.absent.values():
        line(f"[dim]absent: {escape(reason)}[/]")
    line(f"verdict: {_verdict(report.passed)}")


def report_to_dict(report: ParityReport) -> dict[str, Any]:
    """The report as JSON values; a number that is not finite is null."""
    layer = report.layer
    return {
        "ruda": ruda.__version__,
        "layer": report.source,
        "tokens": layer.tokens,
        "experts": layer.experts,
        "top_k": layer.top_k,
        "hidden": layer.hidden,
        "intermediate": layer.intermediate,
        "dtype": layer.dtype.value,
        "logits_dtype": layer.logits_dtype.value,
        "options": options_to_dict(layer.options),
        "load": [int(count) for count in report.load],
        "backends": [_backend_to_dict(backend) for backend in report.backends],
        "absent": report.absent,
        "selections_agree": report.selections_agree,
        "passed": report.passed,
    }


def _backend_to_dict(report: BackendReport) -> dict[str, Any]:
    return {
        "name": report.name,
        "version": report.version,
        "device": report.device,
        "passed": report.passed,
        "fault": report.fault,
        "differing_tokens": report.differing_tokens,
        "forward_seconds": report.forward_seconds,
        "backward_seconds": report.backward_seconds,
        "not_repeated": list(report.changed),
        "tensors": {tensor.name: _tensor_to_dict(tensor) for tensor in report.tensors},
    }


def _tensor_to_dict(tensor: Comparison) -> dict[str, Any]:
    values = {field.name: getattr(tensor, field.name) for field in fields(tensor)}
    del values["name"]
    values.update(error_ulp=tensor.error_ulp, allowed_ulp=tensor.allowed_ulp)
    return {name: _finite_or_none(value) for name, value in values.items()}


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _errors(report: ParityReport) -> Table:
    # A trailing blank keeps the second heading from being the first.
    numbers = ("relative Frobenius", "allowed", "largest, ulp", "allowed ")
    made = table(
        "Error against the float64 reference",
        "backend",
        "tensor",
        *numbers,
        "verdict",
        numbers=numbers,
    )
    made.caption = "ulp: the unit in the last place at the reference's largest magnitude"
    made.caption_justify = "left"
    for backend in report.backends:
        made.add_section()
        where = f"{backend.name} ({backend.device})"
        if backend.fault:
            made.add_row(where, "", "", "", "", "", _FAILED)
        for tensor in backend.tensors:
            made.add_row(
                where,
                tensor_label(tensor.name),
                f"{tensor.relative_frobenius:.2e}",
                f"{tensor.allowed_frobenius:.2e}",
                f"{tensor.error_ulp:.3g}",
                f"{tensor.allowed_ulp:.3g}",
                _verdict(tensor.passed),
            )
            where = ""
    return made


def _summary(report: ParityReport, backend: BackendReport) -> str:
    head = f"{backend.name} {backend.version} on {backend.device}"
    if backend.fault:
        return f"{escape(head)}: {_FAILED}, {escape(backend.fault)}"
    tokens = report.layer.tokens
    same = f"selection equal for all {tokens} tokens"
    if backend.differing_tokens:
        same = f"selection {_FAILED}, differs for {backend.differing_tokens} of {tokens} tokens"
    return (
        f"{escape(head)}: {same}; forward {_milliseconds(backend.forward_seconds)}, "
        f"backward {_milliseconds(backend.backward_seconds)} (second run)"
    )


def _reasons(backend: BackendReport) -> list[str]:
    over = [tensor for tensor in backend.tensors if not tensor.passed]
    return [
        *(f"{tensor_label(tensor.name)}: {tensor.reason}" for tensor in over),
        *(f"{tensor_label(name)}: a second run gave other bits" for name in backend.changed),
    ]


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


def _verdict(passed: bool) -> str:
    return _PASSED if passed else _FAILED


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
