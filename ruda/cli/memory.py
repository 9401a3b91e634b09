"""Whether a job fits into memory, asked before it starts, not learnt from a killed process."""

from __future__ import annotations

import os
from pathlib import Path

from ruda.cli.console import CliError


def check_memory(what: str, needed: int, advice: str) -> None:
    """Raise `CliError` if `needed` bytes are more than this machine has free."""
    free = _free_bytes()
    if free is not None and needed > free:
        raise CliError(
            f"{what} needs about {_gib(needed)} of memory, and {_gib(free)} are free; {advice}"
        )


def _free_bytes() -> int | None:
    """What Linux would give without swapping; elsewhere all the memory there is, if known."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
        if found:
            return int(found[0]) * 1024
    except (OSError, ValueError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
