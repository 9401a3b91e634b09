"""Calling one required operation, and saying which call went wrong."""

from __future__ import annotations

from typing import Any, TypeAlias, cast

import numpy as np

from ruda.backend.registry import AnyBackend
from ruda.base.dtypes import DType
from ruda.testing.layers import Array, numpy_dtype
from ruda.testing.tolerance import assert_exact, ulp

Argument: TypeAlias = "Array | list[Array] | tuple[int, ...] | float | str"


def calls(backend: AnyBackend, operation: str, *arguments: Argument, **keywords: Any) -> Any:
    """The operation's result on tensors made of the NumPy arguments, which must stay unchanged."""
    tensors = [_tensor(backend, argument) for argument in arguments]
    before = [_bytes(backend, *pair) for pair in zip(arguments, tensors, strict=True)]
    method = getattr(backend, operation)
    try:
        with backend.numerics():
            result = method(*tensors, **keywords)
    except TypeError as error:
        raise AssertionError(f"{shown(operation, arguments, keywords)}: {error}") from error
    written = (
        {0} if operation in ("add_rows", "write_rows") else set[int]()
    )  # a buffer the caller gives up
    for i, pair in enumerate(zip(arguments, tensors, strict=True)):
        changed = i not in written and _bytes(backend, *pair) != before[i]
        assert not changed, f"{shown(operation, arguments, keywords)} wrote to argument {i}"
    return result


def gives(
    backend: AnyBackend, expected: Array, operation: str, *arguments: Argument, **keywords: Any
) -> None:
    """The operation gives exactly this: values, shape, and float type."""
    result = np.asarray(backend.to_numpy(calls(backend, operation, *arguments, **keywords)))
    assert_exact(shown(operation, arguments, keywords), result, expected)


def shown(operation: str, arguments: tuple[Argument, ...], keywords: dict[str, Any]) -> str:
    """The call as code, large arrays abridged."""
    parts = [_code(argument) for argument in arguments]
    parts += [f"{name}={value!r}" for name, value in keywords.items()]
    return f"{operation}({', '.join(parts)})"


def nearest_even(values: Array, dtype: DType) -> Array:
    """Float64 rounded once to a narrower type, by scaling alone: no library's cast is trusted."""
    with np.errstate(all="ignore"):
        unit = ulp(values, dtype)
        rounded = np.where(np.isfinite(values), np.rint(values / unit) * unit, values)
        # What lies past the largest number has become a power of two that no cast takes for one.
        return rounded.astype(numpy_dtype(dtype))


def _tensor(backend: AnyBackend, argument: Argument) -> Any:
    if isinstance(argument, np.ndarray):
        return backend.from_numpy(argument)
    if isinstance(argument, list):
        return [_tensor(backend, item) for item in argument]
    return argument


def _bytes(backend: AnyBackend, argument: Argument, tensor: Any) -> bytes:
    if isinstance(argument, list):
        pairs = zip(argument, tensor, strict=True)
        return b"".join(_bytes(backend, item, part) for item, part in pairs)
    if isinstance(argument, np.ndarray):
        return np.ascontiguousarray(backend.to_numpy(tensor)).tobytes()
    return b""


def _code(value: Any) -> str:
    if not isinstance(value, np.ndarray):
        return str(value)
    array = cast("Array", value)
    text = np.array2string(array, threshold=12, separator=", ").replace("\n", "")
    return f"np.array({text}, {str(array.dtype)!r})"
