"""What `ruda backends` shows: every known backend, or why it cannot be used."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

import ruda
from ruda.backend.registry import AnyBackend
from ruda.base.dtypes import DType
from ruda.base.strategies import CombineGradientStrategy, ExpertStrategy, Request
from ruda.cli.console import table


def print_backends(console: Console) -> None:
    """One row for each backend that can be used, one line for each that cannot."""
    made = table("Backends", "name", "version", "devices", "dtypes", "experts", "combine backward")
    unavailable: list[tuple[str, ruda.Availability]] = []
    for name, availability in ruda.available_backends().items():
        if not availability:
            unavailable.append((name, availability))
            continue
        backend = ruda.get_backend(name)
        made.add_row(
            name,
            escape(backend.version),
            "\n".join(backend.devices()),
            "\n".join(dtype.value for dtype in DType if dtype in backend.dtypes),
            "\n".join(_strategies(backend, ExpertStrategy)),
            "\n".join(_strategies(backend, CombineGradientStrategy)),
            end_section=True,
        )
    if made.row_count:
        console.print(made)
    for name, availability in unavailable:
        console.print(
            f"[bold]{name}[/]: unavailable, because {escape(availability.reason)}", soft_wrap=True
        )
        if availability.install:
            console.print(f"  {escape(availability.install)}", style="cyan")


def _strategies(
    backend: AnyBackend, kinds: type[ExpertStrategy] | type[CombineGradientStrategy]
) -> list[str]:
    return [
        strategy.value
        for strategy in kinds
        if backend.unsupported(Request(strategy=strategy)) is None
    ]
