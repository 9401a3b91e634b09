"""How a run of the command ends: a status, and at most one readable line on standard error.

Status 0 is success, 1 a failed verdict, 2 bad input or a missing package, 3 a fault of the program,
130 an interrupt, 143 a termination. A traceback is shown only with ``--debug``.
"""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Any

import typer
from typer.core import TyperGroup

from ruda.base.errors import MoeError
from ruda.cli.console import CliError

BAD_INPUT = 2
FAULT = 3
_LONGEST = 600
_TERMINATED = 128 + signal.SIGTERM

_EXTRA_PACKAGES = frozenset({"numpy", "ml_dtypes", "safetensors", "cattrs", "psutil", "matplotlib"})


class Cli(TyperGroup):
    """The group of commands, with this module's way to report errors."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run, report, exit."""
        words = list(sys.argv[1:] if args is None else args)
        # Accepted anywhere on the line, so that it can be added to a command that has just failed.
        debug = "--debug" in words
        words = [word for word in words if word != "--debug"]
        try:
            status = super().main(
                words, prog_name or "ruda", complete_var, False, windows_expand_args, **extra
            )
        except Exception as error:
            status, line = _explain(error)
            if debug:
                traceback.print_exc()
            typer.echo(f"error: {line}", err=True)
        sys.exit(status if isinstance(status, int) else 0)


def _explain(error: Exception) -> tuple[int, str]:
    """The exit status for an error, and the line to print."""
    if isinstance(error, typer.TyperException):
        return BAD_INPUT, _one_line(error.format_message())
    if isinstance(error, (MoeError, CliError)):
        return BAD_INPUT, _one_line(str(error))
    if isinstance(error, ModuleNotFoundError) and _root(error.name) in _EXTRA_PACKAGES:
        return BAD_INPUT, f"{error.name} is not installed; pip install 'ruda[cli]'"
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return BAD_INPUT, _one_line(f"{where}{error.strerror or error}")
    if isinstance(error, MemoryError):
        return BAD_INPUT, _one_line(f"out of memory; a smaller layer may fit ({error})")
    return FAULT, _one_line(
        f"{type(error).__name__}: {error} (a fault of this program; --debug shows where)"
    )


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."


def _root(name: str | None) -> str:
    return (name or "").partition(".")[0]


def stop_cleanly_on_sigterm() -> None:
    """Leave by an exception, so that unfinished output files are removed on the way."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(_TERMINATED)

    signal.signal(signal.SIGTERM, stop)
