"""Layer files: the operands of one branch as tensors, its options as JSON in the metadata.

Keys: `input`, `logits`, `gate`, `up`, `down`, `grad_output`; `correction_bias` where there is one;
`expert_ids` where the selection is fixed. Shapes and types are those of contract 1, and are checked
here, so that an error can name the file and the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ruda.base.dtypes import DType
from ruda.base.errors import DTypeError, MoeError
from ruda.testing.files.options import dump_options, load_options
from ruda.testing.files.tensors import LayerFileError, read_tensors, write_tensors
from ruda.stages.options import FixedSelection, SoftmaxSelection
from ruda.testing.layers import Array, Layer, dtype_of, numpy_dtype

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
        _check_types(layer)
        _check_shapes(layer)
        _check_selection(layer)
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


def _check_types(layer: Layer) -> None:
    for key in _REQUIRED:
        _float_type(key, getattr(layer, key))
    for key in _STORED:
        _expect_type(key, getattr(layer, key), layer.dtype, "the type of input")
    if layer.correction_bias is not None:
        compute = layer.logits_dtype.compute
        _expect_type("correction_bias", layer.correction_bias, compute, "the logits' compute type")


def _float_type(key: str, tensor: Array) -> None:
    try:
        dtype_of(tensor)
    except DTypeError:
        raise LayerFileError(
            f"{key}: expected {', '.join(DType)}, got {tensor.dtype.name}"
        ) from None


def _expect_type(key: str, tensor: Array, dtype: DType, why: str) -> None:
    if tensor.dtype != numpy_dtype(dtype):
        raise LayerFileError(f"{key}: expected {dtype} ({why}), got {tensor.dtype.name}")


def _check_shapes(layer: Layer) -> None:
    for key, rank in (("input", 2), ("logits", 2), ("gate", 3)):
        tensor = getattr(layer, key)
        if tensor.ndim != rank:
            raise LayerFileError(f"{key}: expected {rank} axes, got shape {list(tensor.shape)}")
    T, H, E, I = layer.tokens, layer.hidden, layer.experts, layer.intermediate
    for axis, size in (("H", H), ("E", E), ("I", I)):
        if size < 1:
            raise LayerFileError(f"{'logits' if axis == 'E' else 'gate'}: {axis} is 0")
    expected = {
        "logits": ("[T, E]", [T, E]),
        "gate": ("[E, I, H]", [E, I, H]),
        "up": ("[E, I, H]", [E, I, H]),
        "down": ("[E, H, I]", [E, H, I]),
        "grad_output": ("[T, H]", [T, H]),
        "correction_bias": ("[E]", [E]),
    }
    for key, (axes, shape) in expected.items():
        tensor = getattr(layer, key)
        if tensor is not None and list(tensor.shape) != shape:
            raise LayerFileError(
                f"{key}: expected shape {axes} = {shape}, got {list(tensor.shape)}"
            )


def _check_selection(layer: Layer) -> None:
    selection = layer.options.selection
    selection.check(layer.experts)
    if isinstance(selection, SoftmaxSelection) and layer.correction_bias is not None:
        raise LayerFileError("correction_bias: given, but a softmax selection has no place for it")
    if isinstance(selection, FixedSelection):
        _check_ids(selection.expert_ids, layer.tokens, layer.experts)


def _check_ids(ids: Any, tokens: int, experts: int) -> None:
    if not np.issubdtype(ids.dtype, np.integer):
        raise LayerFileError(f"expert_ids: expected an integer type, got {ids.dtype.name}")
    if ids.ndim != 2 or ids.shape[0] != tokens or not 1 <= ids.shape[1] <= experts:
        raise LayerFileError(
            f"expert_ids: expected shape [{tokens}, 1..{experts}], got {list(ids.shape)}"
        )
    outside = (ids < 0) | (ids >= experts)
    if outside.any():
        raise LayerFileError(f"expert_ids: expected 0..{experts - 1}, got {int(ids[outside][0])}")
