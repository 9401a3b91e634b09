"""What a command needs before it computes, checked from the cheapest to the dearest."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import psutil

import ruda
from ruda.backend.registry import AnyBackend
from ruda.cli.console import CliError
from ruda.testing.files.atomic import check_destination
from ruda.testing.files.layers import cast_layer, read_layer
from ruda.testing.layers import Layer


def read(path: Path, dtype: str | None) -> Layer:
    """The layer of a file, cast first where a type is named."""
    wanted = None if dtype is None else ruda.parse_dtype(dtype)
    layer = read_layer(path)
    return layer if wanted is None else cast_layer(layer, wanted)


def prepare(
    path: Path, backend: str, device: str | None, dtype: str | None, output: Path | None
) -> tuple[AnyBackend, Layer]:
    """A backend, and a layer to run on it; no work that could not be written is begun."""
    if output is not None:
        check_destination(output)
        if output.exists() and path.exists() and output.samefile(path):
            raise CliError(f"{output}: is the layer file itself")
    layer = read(path, dtype)
    return ruda.get_backend(backend, device=device), layer


def check_memory(what: str, needed: int, advice: str) -> None:
    """Raise `CliError` if `needed` bytes are more than this machine has free.

    It is asked before the work starts, not learnt from a killed process.
    """
    free = psutil.virtual_memory().available
    if needed > free:
        raise CliError(
            f"{what} needs about {_gib(needed)} of memory, and {_gib(free)} are free; {advice}"
        )


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def parse_scale(text: str) -> Fraction:
    """A positive fraction such as ``1/4``, or a decimal."""
    try:
        scale = Fraction(text)
    except (ValueError, ZeroDivisionError):
        scale = Fraction(0)
    if scale <= 0:
        raise CliError(f"--scale: expected a number > 0 such as 1/4 or 0.25, got {text!r}")
    return scale
