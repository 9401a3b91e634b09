"""`ruda fuzz`: random layers on every backend until the time is up, or one is got wrong."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape

import ruda
from ruda.backend.registry import AnyBackend
from ruda.cli.console import CliError, table
from ruda.testing.files.atomic import check_destination
from ruda.testing.files.layers import write_layer
from ruda.testing.specimens.fuzz import Finding, Tally, hunt

EXAMPLES = 100
"""What a round tries at most."""
# What a second run on a layer file compares as well.
_SEEN_BY_PARITY = ("branch", "second run")


def fuzz(
    console: Console,
    backends: Sequence[AnyBackend],
    *,
    minutes: float,
    seed: int,
    rounds: int | None,
    folder: Path,
) -> bool:
    """Rounds on each backend in turn, whichever has had the least time; whether none failed."""
    if not 0 < minutes < math.inf:
        raise CliError(f"--minutes: expected a number above 0, got {minutes:g}")
    names = [backend.name for backend in backends]
    if len(set(names)) < len(names):
        raise CliError(f"--backends: expected each once, got {', '.join(names)}")
    check_destination(_destination(folder, backends[0], seed))
    _print_header(console, backends, minutes, seed)
    tallies = {backend.name: Tally() for backend in backends}
    done = dict.fromkeys(names, 0)
    until = time.monotonic() + 60 * minutes
    finding = None
    while finding is None:
        left = [b for b in backends if rounds is None or done[b.name] < rounds]
        if not left or time.monotonic() > until:
            break
        backend = min(left, key=lambda b: tallies[b.name].seconds)
        tally, number = tallies[backend.name], seed + done[backend.name]
        before = tally.examples
        finding = hunt(backend, number, examples=EXAMPLES, until=until, tally=tally)
        done[backend.name] += 1
        outcome = "FAILED" if finding else f"{tally.examples - before} examples passed"
        _say(console, f"{backend.name}, seed {number}: {outcome}")
        if finding is not None:
            _report(console, backend, number, finding, folder)
    _print_tallies(console, tallies)
    tried = sum(tally.examples for tally in tallies.values())
    _say(console, f"verdict: {'FAILED' if finding else 'passed'}, {tried} examples")
    return finding is None


def _destination(folder: Path, backend: AnyBackend, seed: int) -> Path:
    return folder / f"fuzz-{backend.name}-{seed}.safetensors"


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)


def _print_header(
    console: Console, backends: Sequence[AnyBackend], minutes: float, seed: int
) -> None:
    found = ", ".join(f"{b.name} {b.version} on {b.device}" for b in backends)
    _say(console, f"fuzz: {found}")
    tools = f"ruda {ruda.__version__}, hypothesis {version('hypothesis')}, NumPy {np.__version__}"
    _say(console, f"seeds from {seed} on, {minutes:g} minutes; {tools}")
    _say(console, "one round again: ruda fuzz --backends NAME --seed SEED --rounds 1")


def _report(
    console: Console, backend: AnyBackend, seed: int, finding: Finding, folder: Path
) -> None:
    """The failing layer: as code, as a file, and how to see it fail again."""
    specimen, fault = finding.specimen, finding.fault
    device = "" if backend.device == ruda.get_backend(backend.name).device else backend.device
    argument = f", device={device!r}" if device else ""
    console.print(f"[bold red]{escape(backend.name)} gets this wrong[/]: {escape(str(fault))}")
    if not finding.is_repeatable:
        _say(console, "Not every run of the same layer fails.")
    _say(console, "The smallest layer found, ready to paste:\n")
    _say(
        console,
        "import ruda\n"
        "from ruda.testing.specimens.properties import first_fault\n"
        "from ruda.testing.specimens.specimen import *\n\n"
        f'backend = ruda.get_backend("{backend.name}"{argument})\n'
        f"specimen = {specimen!r}\n"
        "print(specimen.layer())\n"
        "print(first_fault(backend, specimen))\n",
    )
    path = _destination(folder, backend, seed)
    metadata = {
        "specimen": repr(specimen),
        "backend": backend.name,
        "backend_version": backend.version,
        "fault": str(fault),
        "seed": str(seed),
        "ruda_version": ruda.__version__,
    }
    write_layer(path, specimen.layer(), metadata)
    name = f"{backend.name}:{device}" if device else backend.name
    _say(console, f"{path}: the layer; ruda parity {path} --backends {name}")
    if fault.check not in _SEEN_BY_PARITY:
        _say(console, f"parity does not look at what failed here ({fault.check}); the code does.")
    if specimen.layouts:
        _say(console, "A layer file has no memory layouts, and this layer needs its own to fail.")


def _print_tallies(console: Console, tallies: dict[str, Tally]) -> None:
    """How often each feature was met on each backend."""
    made = table("Examples", "feature", *tallies, numbers=tuple(tallies))
    made.add_row("all", *(str(tally.examples) for tally in tallies.values()))
    made.add_row(
        "seconds", *(f"{tally.seconds:.0f}" for tally in tallies.values()), end_section=True
    )
    for feature in sorted({name for tally in tallies.values() for name in tally.features}):
        made.add_row(feature, *(str(tally.features[feature]) for tally in tallies.values()))
    console.print(made)
