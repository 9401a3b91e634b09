"""What the commands print with: results on standard output, progress on standard error."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

_PLAIN_WIDTH = 100


class CliError(Exception):
    """Bad input to the command itself; the message is the one line the user sees."""


def stdout() -> Console:
    """Standard output as it is now; a fixed width where it is not a terminal."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH
    return console


def table(title: str, *columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """An empty table; the columns named in `numbers` are aligned right."""
    made = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        made.add_column(column, justify="right" if column in numbers else "left")
    return made


class Steps:
    """A progress bar over a known number of steps."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=total)

    @contextmanager
    def step(self, description: str) -> Generator[None]:
        """One step; the bar advances when it ends."""
        self._progress.update(self._task, description=description)
        self._progress.refresh()
        yield
        self._progress.advance(self._task)


@contextmanager
def steps(total: int) -> Generator[Steps]:
    """A bar on standard error that disappears at the end; nothing where that is no terminal."""
    console = Console(stderr=True)
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with progress:
        yield Steps(progress, total)
