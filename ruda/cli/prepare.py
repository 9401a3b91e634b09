"""What a command needs before it computes, checked from the cheapest to the dearest."""

from __future__ import annotations

from pathlib import Path

import ruda
from ruda.backend.registry import AnyBackend
from ruda.testing.files.atomic import check_destination
from ruda.cli.console import CliError
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
