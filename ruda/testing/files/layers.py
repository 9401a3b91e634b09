"""Layer files: the operands of one branch as tensors, its options as JSON in the metadata.

Keys: `input`, `logits`, `gate`, `up`, `down`, `grad_output`; `correction_bias` where there is one;
`expert_ids` where the selection is fixed. Shapes and types are those of contract 1; an error names
the file and the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from ruda.backend.registry import get_backend
from ruda.base.dtypes import DType
from ruda.base.errors import MoeError
from ruda.branch import validation
from ruda.stages.options import FixedSelection
from ruda.stages.selection import select_fixed
from ruda.testing.files.options import dump_options, load_options
from ruda.testing.files.tensors import LayerFileError, read_tensors, write_tensors
from ruda.testing.layers import Layer, numpy_dtype

__all__ = ["LayerFileError", "cast_layer", "read_layer", "write_layer"]

_STORED = ("input", "gate", "up", "down", "grad_output")
_REQUIRED = ("input", "logits", "gate", "up", "down", "grad_output")
_OPTIONAL = ("correction_bias", "expert_ids")


def read_layer(path: Path) -> Layer:
    """The layer in a file; `LayerFileError` names what is wrong with it."""
    tensors, metadata = read_tensors(path)
    for key in _REQUIRED:
        if key not in tensors:
            raise LayerFileError(f"{path}: {key}: missing")
    for key in tensors:
        if key not in (*_REQUIRED, *_OPTIONAL):
            raise LayerFileError(f"{path}: {key}: unknown key")
    if "options" not in metadata:
        raise LayerFileError(f"{path}: options: missing from the metadata")
    try:
        options = load_options(metadata["options"], tensors.pop("expert_ids", None))
        layer = Layer(options=options, **tensors)
        _check(layer)
    except MoeError as error:
        raise LayerFileError(f"{path}: {error}") from None
    return layer


def write_layer(path: Path, layer: Layer, metadata: Mapping[str, str]) -> None:
    """Write a layer, with more metadata of the caller's."""
    tensors = {key: getattr(layer, key) for key in _REQUIRED}
    if layer.correction_bias is not None:
        tensors["correction_bias"] = layer.correction_bias
    if isinstance(layer.options.selection, FixedSelection):
        tensors["expert_ids"] = np.asarray(layer.options.selection.expert_ids)
    write_tensors(path, tensors, {**metadata, "options": dump_options(layer.options)})


def cast_layer(layer: Layer, dtype: DType) -> Layer:
    """The layer in another storage type.

    Logits follow if they had the storage type; a router that works in a type of its own keeps it.
    """
    follows = layer.logits_dtype is layer.dtype
    logits_dtype = dtype if follows else layer.logits_dtype
    bias = layer.correction_bias
    with np.errstate(all="ignore"):
        storage = {key: getattr(layer, key).astype(numpy_dtype(dtype)) for key in _STORED}
        return replace(
            layer,
            **storage,
            logits=layer.logits.astype(numpy_dtype(logits_dtype)),
            correction_bias=(
                None if bias is None else bias.astype(numpy_dtype(logits_dtype.compute))
            ),
        )


def _check(layer: Layer) -> None:
    """What the branch would refuse is refused here, by the same checks."""
    backend = get_backend("numpy")
    tokens, experts, storage = validation.check_experts(
        backend, layer.input, layer.gate, layer.up, layer.down
    )
    validation.check_logits(backend, layer.logits, tokens, experts)
    selection, bias = layer.options.selection, layer.correction_bias
    validation.check_selection(backend, layer.options, layer.logits, bias, tokens, experts)
    if isinstance(selection, FixedSelection):
        select_fixed(backend, selection.expert_ids, experts)
    validation.check_grad_output(backend, layer.grad_output, tokens, layer.hidden, storage)
