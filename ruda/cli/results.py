"""What `ruda forward` and `ruda backward` show and write."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape

import ruda
from ruda.backend.registry import AnyBackend
from ruda.cli.console import CliError, table
from ruda.stages.options import MoeGradientSelection
from ruda.testing.files.options import dump_options
from ruda.testing.layers import Array, Layer


def parse_gradients(text: str | None) -> MoeGradientSelection:
    """The wanted gradients from a comma-separated list; all of them if none is given."""
    if text is None:
        return MoeGradientSelection.all()
    known = MoeGradientSelection.names()
    wanted = [name.strip() for name in text.split(",")]
    for name in wanted:
        if name not in known:
            raise CliError(f"--gradients: expected names among {', '.join(known)}, got {name!r}")
    return MoeGradientSelection(**dict.fromkeys(wanted, True))


def run_metadata(backend: AnyBackend, layer: Layer, source: Path) -> dict[str, str]:
    """How a result came about: enough to make it again."""
    return {
        "backend": backend.name,
        "backend_version": backend.version,
        "device": backend.device,
        "dtype": layer.dtype.value,
        "logits_dtype": layer.logits_dtype.value,
        "layer": source.name,
        "options": dump_options(layer.options),
        "ruda_version": ruda.__version__,
        "numpy_version": np.__version__,
        "python_version": platform.python_version(),
    }


def print_tensors(
    console: Console,
    title: str,
    tensors: Mapping[str, Array],
    times: Mapping[str, float],
) -> None:
    """A row for each tensor, a line for the times."""
    made = table(escape(title), "tensor", "shape", "dtype", "norm", numbers=("norm",))
    for name, tensor in tensors.items():
        shape = " x ".join(str(extent) for extent in tensor.shape)
        made.add_row(name, shape, tensor.dtype.name, _norm(tensor))
    console.print(made)
    parts = [f"{name} {seconds * 1000:.1f} ms" for name, seconds in times.items()]
    console.print(f"{', '.join(parts)} (one run, no warm-up)")


def _norm(tensor: Array) -> str:
    if np.issubdtype(tensor.dtype, np.integer):
        return ""
    with np.errstate(all="ignore"):
        return f"{float(np.linalg.norm(tensor.astype(np.float64, copy=False))):.6g}"
