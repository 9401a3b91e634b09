"""Moving an array to a backend, to lie in its memory as asked."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ruda.backend.registry import AnyBackend
from ruda.testing.layers import Array


class Layout(Enum):
    """How a tensor lies in memory; the values are the same."""

    CONTIGUOUS = "contiguous"
    TRANSPOSED = "transposed"
    """Its last two axes are stored the other way round."""
    STRIDED = "strided"
    """Every second element of a wider tensor whose other elements are NaN."""
    REVERSED = "reversed"
    """Stored backwards, where the library has negative strides."""
    BROADCAST = "broadcast"
    """Stride 0 along the first axis: all of it equal."""
    READ_ONLY = "read_only"
    """Not writable, where the library knows such a thing."""


class LayoutUnavailableError(Exception):
    """This library has no tensors that lie like this."""


def place(backend: AnyBackend, array: Array, layout: Layout) -> Any:
    """The array as a tensor of the backend that lies in memory as asked.

    Raises `LayoutUnavailableError` where the library cannot hold such a tensor.
    """
    vector = array.ndim < 2 and layout is Layout.TRANSPOSED
    if layout is Layout.CONTIGUOUS or array.size == 0 or vector:
        return backend.from_numpy(array)
    if layout is Layout.TRANSPOSED:
        return _seen(backend, np.ascontiguousarray(np.swapaxes(array, -1, -2)), lambda t: t.mT)
    if layout is Layout.STRIDED:
        return _seen(backend, _spread(array), lambda t: t[..., ::2])
    if layout is Layout.REVERSED:
        return _seen(backend, np.ascontiguousarray(array[::-1]), lambda t: t[::-1, ...])
    if layout is Layout.BROADCAST:
        row = np.ascontiguousarray(array[:1])
        return _shared(backend, as_strided(row, array.shape, (0, *row.strides[1:])))
    read_only = np.array(array)
    read_only.flags.writeable = False
    return _shared(backend, read_only)


def _spread(array: Array) -> Array:
    """Twice as wide, with the values at every second place and NaN or -1 between."""
    # Ids that no expert has: -1, or for unsigned types the largest.
    filler = np.array(-1).astype(array.dtype) if array.dtype.kind in "iu" else np.nan
    wide = np.full((*array.shape[:-1], 2 * array.shape[-1]), filler, array.dtype)
    wide[..., ::2] = array
    return wide


def _seen(backend: AnyBackend, stored: Array, view: Callable[[Any], Any]) -> Any:
    """A view of a tensor that holds `stored`."""
    try:
        return view(backend.from_numpy(stored))
    except Exception as error:
        raise LayoutUnavailableError(f"{backend.name} refuses it: {error}") from error


def _shared(backend: AnyBackend, view: Array) -> Any:
    """A tensor over the memory of a NumPy view."""
    try:
        tensor = view if backend.owns(view) else backend.from_dlpack(view)
    except Exception as error:
        raise LayoutUnavailableError(f"{backend.name} refuses it: {error}") from error
    if tensor is None:
        raise LayoutUnavailableError(f"{backend.name} does not share memory with NumPy")
    return tensor
