"""Bad input is refused here, before any work: named operand, what was expected, what came."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from ruda.backend import Backend
from ruda.backend.registry import AnyBackend, backend_of, describe, get_backend
from ruda.base.dtypes import INTEGER_NAMES, DType
from ruda.base.errors import (
    BackendMismatchError,
    ConfigurationError,
    DeviceError,
    DTypeError,
    HigherDerivativeUnsupportedError,
    MoeError,
    ShapeError,
    StateError,
    UnsupportedStrategyError,
)
from ruda.base.strategies import CombineGradientStrategy, ExpertStrategy, Request
from ruda.stages.experts import inner_dtype
from ruda.stages.options import (
    ExpertOptions,
    ExpertsGradientSelection,
    FixedSelection,
    MoeGradientSelection,
    MoeOptions,
    SoftmaxSelection,
)

_FLOAT_NAMES = frozenset(dtype.value for dtype in DType)


def resolve_backend(backend: object, operands: Mapping[str, object]) -> AnyBackend:
    """The one backend and device of all operands, which is the one asked for if any was."""
    first, tensor = next(iter(operands.items()))
    if backend is None or isinstance(backend, str):
        try:
            resolved = backend_of(tensor) if backend is None else _named(backend, tensor)
        except (BackendMismatchError, DeviceError) as error:
            raise type(error)(f"{first}: {error}") from None
    elif Backend in type(backend).__mro__:
        resolved = cast(AnyBackend, backend)
    else:
        raise ConfigurationError(
            f"backend: expected a backend, its name, or None, got {describe(backend)}"
        )
    for name, other in operands.items():
        if not resolved.owns(other):
            raise BackendMismatchError(
                f"{name}: expected a {'plain dense ' * _of_kind(resolved, other)}tensor "
                f"of backend {resolved.name!r}"
                f"{'' if name == first or backend is not None else f' like {first}'}, "
                f"got {describe(other)}{_claimed(other)}"
            )
        if resolved.device_of(other) != resolved.device:
            raise DeviceError(
                f"{name}: expected device {resolved.device!r}, got {resolved.device_of(other)!r}"
            )
    return resolved


def _named(name: str, tensor: object) -> AnyBackend:
    """The backend of this name, on the tensor's device where the tensor is its own."""
    backend = get_backend(name)
    if backend.owns(tensor) and backend.device_of(tensor) != backend.device:
        return get_backend(name, device=backend.device_of(tensor))
    return backend


def _of_kind(backend: AnyBackend, tensor: object) -> bool:
    """Whether this has the backend's tensor type, though not a form the operations accept."""
    return isinstance(tensor, backend.FloatTensor)


def _claimed(tensor: object) -> str:
    try:
        return f" of backend {backend_of(tensor).name!r}"
    except MoeError:
        return ""


def float_dtype(backend: AnyBackend, name: str, tensor: Any) -> DType:
    """The operand's float type."""
    text = backend.dtype_name(tensor)
    if text not in _FLOAT_NAMES:
        raise DTypeError(f"{name}: expected float16, bfloat16, float32 or float64, got {text}")
    dtype = DType(text)
    if dtype not in backend.dtypes:
        reason = backend.unsupported(Request(dtype=dtype))
        raise DTypeError(f"{name}: backend {backend.name!r} cannot serve {text}: {reason}")
    return dtype


def check_dtype(backend: AnyBackend, name: str, tensor: Any, dtype: DType, like: str) -> None:
    """The operand has exactly this type."""
    got = backend.dtype_name(tensor)
    if got != dtype.value:
        raise DTypeError(f"{name}: expected {dtype} ({like}), got {got}")


def check_shape(
    backend: AnyBackend, name: str, tensor: Any, symbols: str, expected: tuple[int | None, ...]
) -> tuple[int, ...]:
    """The operand has this rank, and these extents where one is given."""
    shape = tuple(backend.shape(tensor))
    if len(shape) != len(expected) or any(
        want is not None and want != got for want, got in zip(expected, shape, strict=True)
    ):
        letters = symbols.strip("[]").split(", ")
        known = [
            f"{letter} = {want}"
            for letter, want in zip(letters, expected, strict=True)
            if want is not None
        ]
        text = symbols + (f" with {', '.join(known)}" if known else "")
        raise ShapeError(f"{name}: expected {text}, got {list(shape)}{_hint(shape, expected)}")
    return shape


def _hint(shape: tuple[int, ...], expected: tuple[int | None, ...]) -> str:
    if len(shape) == 3 == len(expected):
        swapped = (shape[0], shape[2], shape[1])
        if all(want is None or want == got for want, got in zip(expected, swapped, strict=True)):
            return " (its last two axes look exchanged: weights are [experts, out, in])"
    return ""


def check_experts(
    backend: AnyBackend, input: Any, gate: Any, up: Any, down: Any
) -> tuple[int, int, DType]:
    """Tokens, experts and the storage type of a layer's operands."""
    storage = float_dtype(backend, "input", input)
    for name, tensor in (("gate", gate), ("up", up), ("down", down)):
        check_dtype(backend, name, tensor, storage, "the type of input")
    tokens, hidden = check_shape(backend, "input", input, "[T, H]", (None, None))
    experts, intermediate, _ = check_shape(backend, "gate", gate, "[E, I, H]", (None, None, hidden))
    check_shape(backend, "up", up, "[E, I, H]", (experts, intermediate, hidden))
    check_shape(backend, "down", down, "[E, H, I]", (experts, hidden, intermediate))
    for symbol, extent, name in (
        ("H", hidden, "input"),
        ("E", experts, "gate"),
        ("I", intermediate, "gate"),
    ):
        if extent < 1:
            raise ShapeError(f"{name}: expected {symbol} >= 1, got {extent}")
    return tokens, experts, storage


def check_logits(
    backend: AnyBackend, logits: Any, tokens: int | None, experts: int | None
) -> tuple[int, int]:
    """Tokens and experts of a router's logits."""
    float_dtype(backend, "logits", logits)
    shape = check_shape(backend, "logits", logits, "[T, E]", (tokens, experts))
    if shape[1] < 1:
        raise ShapeError(f"logits: expected E >= 1, got {shape[1]}")
    return shape[0], shape[1]


def check_ids(backend: AnyBackend, expert_ids: Any, tokens: int, experts: int) -> int:
    """Slots a token of the caller's ids; their bounds are checked where they are read."""
    got = backend.dtype_name(expert_ids)
    if got not in INTEGER_NAMES:
        raise DTypeError(f"expert_ids: expected an integer type, got {got}")
    slots = check_shape(backend, "expert_ids", expert_ids, "[T, k]", (tokens, None))[1]
    if not 1 <= slots <= experts:
        raise ConfigurationError(
            f"expert_ids: expected 1..{experts} slots a token (experts), got {slots}"
        )
    return slots


def check_selection(
    backend: AnyBackend,
    options: MoeOptions,
    logits: Any,
    correction_bias: Any,
    tokens: int,
    experts: int,
) -> None:
    """The selection can choose among these experts, with this bias or these ids."""
    selection = options.selection
    selection.check(experts)
    if isinstance(selection, FixedSelection):
        check_ids(backend, selection.expert_ids, tokens, experts)
    if correction_bias is None:
        return
    if isinstance(selection, SoftmaxSelection):
        raise ConfigurationError(
            "correction_bias: expected None with SoftmaxSelection, which orders the logits "
            "themselves; GroupedSelection takes a bias"
        )
    wanted = float_dtype(backend, "logits", logits).compute
    check_dtype(backend, "correction_bias", correction_bias, wanted, "the compute type of logits")
    check_shape(backend, "correction_bias", correction_bias, "[E]", (experts,))


def check_options(options: object, kind: type) -> None:
    """The options are of the right kind."""
    if not isinstance(options, kind):
        raise ConfigurationError(f"options: expected {kind.__name__}, got {describe(options)}")


def check_gradients(
    gradients: object, kind: type[MoeGradientSelection] | type[ExpertsGradientSelection]
) -> None:
    """The wanted gradients are named by the right kind of selection."""
    if not isinstance(gradients, kind):
        raise ConfigurationError(f"gradients: expected {kind.__name__}, got {describe(gradients)}")


def check_strategies(backend: AnyBackend, options: ExpertOptions, storage: DType) -> None:
    """The backend serves every strategy asked for, on operands of this type."""
    inner = inner_dtype(storage, options.intermediates)
    requests: tuple[tuple[str, ExpertStrategy | CombineGradientStrategy], ...] = (
        ("forward", options.forward),
        ("backward", options.backward),
        ("combine_backward", options.combine_backward),
    )
    for name, strategy in requests:
        reason = backend.unsupported(Request(strategy=strategy, dtype=inner))
        if reason is not None:
            served = [
                other.name
                for other in type(strategy)
                if backend.unsupported(Request(strategy=other, dtype=inner)) is None
            ]
            raise UnsupportedStrategyError(
                f"{name}: backend {backend.name!r} cannot serve {strategy.name} on {inner}: "
                f"{reason}; it supports {', '.join(served)}"
            )


def check_grad_output(
    backend: AnyBackend, grad_output: Any, tokens: int, hidden: int, storage: DType
) -> None:
    """The upstream gradient fits the output, and is not itself being differentiated."""
    resolve_backend(backend, {"grad_output": grad_output})
    check_dtype(backend, "grad_output", grad_output, storage, "the type of output")
    check_shape(backend, "grad_output", grad_output, "[T, H]", (tokens, hidden))
    if backend.tracks_gradients(grad_output):
        raise HigherDerivativeUnsupportedError(
            "grad_output: expected a tensor that is not being differentiated, got one that "
            "requires grad; the branch has first derivatives only"
        )


def check_state(state: object, kind: type) -> None:
    """The state is one that the forward of the same name gave."""
    if not isinstance(state, kind):
        raise StateError(f"state: expected {kind.__name__}, got {describe(state)}")


def check_kept(
    wanted: MoeGradientSelection | ExpertsGradientSelection,
    kept: MoeGradientSelection | ExpertsGradientSelection,
) -> None:
    """Every wanted gradient is one the forward was told of."""
    missing = [name for name in wanted.wanted if name not in kept.wanted]
    if missing:
        held = f"only what {', '.join(kept.wanted)} needs" if kept.wanted else "nothing"
        raise StateError(
            f"gradients: {', '.join(missing)} asked for, but the forward kept {held}; "
            "it keeps what its own argument `gradients` names"
        )


def check_unchanged(
    backend: AnyBackend, operands: Mapping[str, Any], versions: tuple[int | None, ...]
) -> None:
    """No saved operand was written to since the forward, where the framework can tell."""
    for (name, tensor), before in zip(operands.items(), versions, strict=True):
        if tensor is not None and before is not None and backend.write_version(tensor) != before:
            raise StateError(
                f"{name}: expected the values the forward saw, got a tensor changed in place since"
            )
