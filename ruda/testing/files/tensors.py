"""Named NumPy arrays and text in a safetensors file, bfloat16 included."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file  # pyright: ignore[reportUnknownVariableType]

from ruda.base.errors import MoeError
from ruda.testing.files.atomic import replacing
from ruda.testing.layers import Array


class LayerFileError(MoeError, ValueError):
    """A tensor file that cannot be used; the message names the file, and the key at fault."""


def read_tensors(path: Path) -> tuple[dict[str, Array], dict[str, str]]:
    """All tensors and the metadata of a file; `LayerFileError` for a damaged one."""
    if not path.exists():
        raise LayerFileError(f"{path}: no such file")
    if not path.is_file():
        raise LayerFileError(f"{path}: expected a regular file")
    if not os.access(path, os.R_OK):
        raise LayerFileError(f"{path}: not readable")
    # Any: safetensors has no annotations here. Its bfloat16 is that of ml_dtypes, which must have
    # been imported; `ruda.testing.layers` has.
    opener: Any = safe_open
    try:
        with opener(path, framework="np") as opened:
            metadata = dict(opened.metadata() or {})
            keys: list[str] = list(opened.keys())
            return {key: _tensor(path, opened, key) for key in keys}, metadata
    except (SafetensorError, OSError) as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        raise LayerFileError(
            f"{path}: not a safetensors file, or a damaged one: {reason}"
        ) from None


def write_tensors(path: Path, tensors: Mapping[str, Array], metadata: Mapping[str, str]) -> None:
    """Replace `path` by a file with these tensors, once it is complete."""
    dense = {key: np.ascontiguousarray(tensor) for key, tensor in tensors.items()}
    with replacing(path) as temporary:
        try:
            save_file(dense, temporary, dict(metadata))
        except SafetensorError as error:
            raise LayerFileError(f"{path}: cannot be written: {error}") from None


def _tensor(path: Path, opened: Any, key: str) -> Array:
    try:
        tensor: Array = opened.get_tensor(key)
    # An element type NumPy lacks, such as an 8-bit float, fails in more than one way.
    except (SafetensorError, TypeError, ValueError, AttributeError) as error:
        raise LayerFileError(f"{path}: {key}: cannot be read: {error}") from None
    return tensor
