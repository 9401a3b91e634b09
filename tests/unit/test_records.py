"""Contract 7 and 9: what is returned, that nothing is written to, that strides do not matter."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest

import ruda
from ruda.backend.registry import AnyBackend
from ruda.base.dtypes import DType
from ruda.stages.options import GroupedSelection, RouterScoring, SoftmaxSelection
from ruda.testing.layers import Array, random_layer

DTYPES = list(DType)
NAMES = ["input", "logits", "gate", "up", "down"]  # of operands, and of their gradients
OPTIONS = ruda.MoeOptions(
    selection=SoftmaxSelection(2),
    weights=ruda.RouterWeightOptions(RouterScoring.SOFTMAX, renormalize=False, scale=2.5),
)
GROUPED = ruda.MoeOptions(
    selection=GroupedSelection(3, groups=2, selected_groups=1),
    weights=ruda.RouterWeightOptions(RouterScoring.SIGMOID, renormalize=True),
)


def arrays(dtype: DType, slots: int = 2, tokens: int = 12) -> dict[str, Array]:
    layer = random_layer(
        tokens=tokens,
        hidden=6,
        intermediate=10,
        experts=6,
        options=OPTIONS,
        dtype=dtype,
        seed=slots,
    )
    return {name: getattr(layer, name) for name in (*NAMES, "grad_output")}


def tensors(backend: AnyBackend, dtype: DType, slots: int = 2, tokens: int = 12) -> dict[str, Any]:
    made = arrays(dtype, slots, tokens)
    return {name: backend.from_numpy(array) for name, array in made.items()}


def passes(
    backend: AnyBackend, given: dict[str, Any], options: ruda.MoeOptions = OPTIONS
) -> tuple[Any, Any, Any]:
    x, logits, gate, up, down = (given[name] for name in NAMES)
    output, state = ruda.moe_forward(x, logits, gate, up, down, options=options, backend=backend)
    return output, state, ruda.moe_backward(state, given["grad_output"])


def bits(array: Any) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def results(backend: AnyBackend, given: dict[str, Any], **more: Any) -> dict[str, Array]:
    output, state, grads = passes(backend, given, **more)
    found = {"output": output, "ids": ruda.moe_route_indices(state), **grads.asdict()}
    return {name: backend.to_numpy(tensor) for name, tensor in found.items()}


def same_bits(one: dict[str, Array], other: dict[str, Array]) -> None:
    assert one.keys() == other.keys()
    for name, array in one.items():
        assert array.dtype == other[name].dtype, name
        assert bits(array) == bits(other[name]), name


# --- what a record is --------------------------------------------------------------------------


def test_a_repr_has_shapes_and_types_and_no_values(backend: AnyBackend) -> None:
    given = tensors(backend, DType.BFLOAT16, tokens=5)
    given["input"] = backend.from_numpy(
        np.full_like(arrays(DType.BFLOAT16, tokens=5)["input"], 987)
    )
    _, state, grads = passes(backend, given)
    assert repr(grads) == (
        f"MoeBackward(backend={backend.name!r}, device={backend.device!r}, input=bfloat16[5, 6], "
        "logits=bfloat16[5, 6], gate=float32[6, 10, 6], up=float32[6, 10, 6], "
        "down=float32[6, 6, 10])"
    )
    some = ruda.moe_backward_selected(
        state, given["grad_output"], ruda.MoeGradientSelection(logits=True)
    )
    assert "input=None, logits=bfloat16[5, 6], gate=None" in repr(some)
    for record in (state, state.experts):
        text = repr(record)
        assert text.startswith(f"{type(record).__name__}(backend={backend.name!r}")
        assert not any(part in text for part in ("987", "tensor(", "array(", "\n"))
    assert "input=bfloat16[5, 6]" in repr(state.experts)


def test_asdict_names_every_gradient_in_order(backend: AnyBackend) -> None:
    given = tensors(backend, DType.FLOAT32)
    _, state, grads = passes(backend, given)
    assert list(grads.asdict()) == NAMES
    assert all(tensor is getattr(grads, name) for name, tensor in grads.asdict().items())
    wanted = ruda.MoeGradientSelection(input=True, down=True)
    some = ruda.moe_backward_selected(state, given["grad_output"], wanted).asdict()
    assert list(some) == NAMES
    assert [name for name, tensor in some.items() if tensor is not None] == ["input", "down"]
    experts = ruda.experts_backward(state.experts, given["grad_output"]).asdict()
    assert list(experts) == ["input", "weights", "gate", "up", "down"]


def test_records_are_frozen(backend: AnyBackend) -> None:
    given = tensors(backend, DType.FLOAT32)
    _, state, grads = passes(backend, given)
    some = ruda.moe_backward_selected(state, given["grad_output"], ruda.MoeGradientSelection.all())
    for record in (grads, some, state, state.experts):
        for name in ("backend", *record.asdict()):
            with pytest.raises(FrozenInstanceError):
                setattr(record, name, None)
            with pytest.raises(FrozenInstanceError):
                delattr(record, name)


# --- moving a record ---------------------------------------------------------------------------


def others() -> list[AnyBackend]:
    return [ruda.get_backend(name) for name, found in ruda.available_backends().items() if found]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [12, 0])
def test_to_moves_every_gradient_bit_for_bit(
    backend: AnyBackend, dtype: DType, tokens: int
) -> None:
    """There and back; bfloat16, which NumPy has no DLPack code for, goes by the host."""
    given = tensors(backend, dtype, tokens=tokens)
    _, state, grads = passes(backend, given)
    wanted = ruda.MoeGradientSelection(input=True, gate=True)
    some = ruda.moe_backward_selected(state, given["grad_output"], wanted)
    experts = ruda.experts_backward(state.experts, given["grad_output"])
    for target in others():
        for record in (grads, some, experts):
            moved = record.to(target)
            assert type(moved) is type(record)
            assert moved.backend is target
            back = moved.to(backend)
            for name, tensor in record.asdict().items():
                if tensor is None:
                    assert moved.asdict()[name] is None
                    continue
                there, here = moved.asdict()[name], back.asdict()[name]
                assert target.owns(there)
                assert target.device_of(there) == target.device
                assert target.dtype_name(there) == backend.dtype_name(tensor)
                assert target.shape(there) == backend.shape(tensor) == backend.shape(here)
                for kind, copy in ((target, there), (backend, here)):
                    assert bits(kind.to_numpy(copy)) == bits(backend.to_numpy(tensor))


def test_to_goes_by_the_host_where_a_pair_has_no_dlpack(
    backend: AnyBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, grads = passes(backend, tensors(backend, DType.FLOAT32))
    for target in others():
        monkeypatch.setattr(type(target), "from_dlpack", lambda self, tensor, /: None)
        moved = grads.to(target)
        for name, tensor in grads.asdict().items():
            there = moved.asdict()[name]
            assert bits(target.to_numpy(there)) == bits(backend.to_numpy(tensor)), name


def test_to_takes_what_dlpack_refuses() -> None:
    """A read-only NumPy array is one thing it may refuse."""
    source = ruda.get_backend("numpy")
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    array.flags.writeable = False
    fields: dict[str, Any] = dict.fromkeys(NAMES, array)
    record = ruda.MoeBackward(backend=source, **fields)
    for target in others():
        assert target.to_numpy(record.to(target).gate).tolist() == array.tolist()


# --- states and repetition ---------------------------------------------------------------------


@pytest.mark.parametrize("options", [OPTIONS, GROUPED], ids=["softmax", "grouped"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_bits_every_time(
    backend: AnyBackend, dtype: DType, options: ruda.MoeOptions
) -> None:
    """Forward again; backward again on one state; one gradient alone; inference; other memory."""
    given = tensors(backend, dtype)
    output, state, grads = passes(backend, given, options)
    first = results(backend, given, options=options)
    same_bits(first, results(backend, tensors(backend, dtype), options=options))
    again = ruda.moe_backward(state, given["grad_output"])
    for name in NAMES:
        wanted = ruda.MoeGradientSelection(**{name: True})
        alone = ruda.moe_backward_selected(state, given["grad_output"], wanted)
        for record in (grads, again, alone):
            assert bits(backend.to_numpy(record.asdict()[name])) == bits(first[name]), name
    forward = [given[name] for name in NAMES]
    inferred = ruda.moe_inference(*forward, options=options, backend=backend)
    assert bits(backend.to_numpy(inferred)) == bits(backend.to_numpy(output))


@pytest.mark.parametrize("name", NAMES)
def test_a_state_made_for_one_gradient_gives_the_same_bits(backend: AnyBackend, name: str) -> None:
    given = tensors(backend, DType.BFLOAT16)
    forward = [given[each] for each in NAMES]
    wanted = ruda.MoeGradientSelection(**{name: True})
    output, state = ruda.moe_forward(*forward, options=OPTIONS, gradients=wanted, backend=backend)
    alone = ruda.moe_backward_selected(state, given["grad_output"], wanted).asdict()
    whole = results(backend, given)
    assert bits(backend.to_numpy(output)) == bits(whole["output"])
    assert bits(backend.to_numpy(alone[name])) == bits(whole[name])
    assert [each for each, tensor in alone.items() if tensor is not None] == [name]
    with pytest.raises(ruda.StateError, match=f"kept only what {name} needs"):
        ruda.moe_backward(state, given["grad_output"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inputs_are_never_written_to(backend: AnyBackend, dtype: DType) -> None:
    """NumPy arrays are made read-only; others are compared, by version too where there is one."""
    given = tensors(backend, dtype)
    weights = backend.from_numpy(np.ones((12, 2), np.float32))
    ids = backend.from_numpy(np.tile([[0, 5]], (12, 1)))
    bias = backend.from_numpy(np.zeros(6, np.float64 if dtype is DType.FLOAT64 else np.float32))
    kept = {**given, "weights": weights, "ids": ids, "bias": bias}
    for tensor in kept.values():
        if isinstance(tensor, np.ndarray):
            tensor.flags.writeable = False
    before = {name: bits(backend.to_numpy(tensor)) for name, tensor in kept.items()}
    versions = {name: backend.write_version(tensor) for name, tensor in kept.items()}
    passes(backend, given)
    forward = [given[name] for name in NAMES]
    ruda.moe_inference(*forward, options=GROUPED, correction_bias=bias, backend=backend)
    x, _, gate, up, down = forward
    _, state = ruda.experts_forward(x, ids, weights, gate, up, down, backend=backend)
    ruda.experts_backward(state, given["grad_output"])
    ruda.selected_router_weights(given["logits"], ids, OPTIONS.weights, backend=backend)
    for name, tensor in kept.items():
        assert bits(backend.to_numpy(tensor)) == before[name], name
        assert backend.write_version(tensor) == versions[name], name


def test_writing_to_routing_weights_after_the_forward_is_noticed(backend: AnyBackend) -> None:
    given = tensors(backend, DType.FLOAT32)
    weights = backend.from_numpy(np.ones((12, 2), np.float32))
    if backend.write_version(weights) is None:
        pytest.skip(f"{backend.name} cannot tell that a tensor was written to")
    ids = backend.from_numpy(np.tile([[0, 5]], (12, 1)))
    cubes = given["gate"], given["up"], given["down"]
    _, state = ruda.experts_forward(given["input"], ids, weights, *cubes, backend=backend)
    weights *= 2
    with pytest.raises(ruda.StateError, match="weights"):
        ruda.experts_backward(state, given["grad_output"])


# --- strides -----------------------------------------------------------------------------------


def transposed(backend: AnyBackend, array: Array) -> Any:
    turned = np.ascontiguousarray(np.swapaxes(array, -1, -2))
    return backend.from_numpy(turned).swapaxes(-1, -2)


def every_second_row(backend: AnyBackend, array: Array) -> Any:
    return backend.from_numpy(np.repeat(array, 2, axis=0))[::2]


def every_second_column(backend: AnyBackend, array: Array) -> Any:
    return backend.from_numpy(np.repeat(array, 2, axis=-1))[..., ::2]


def inside_another(backend: AnyBackend, array: Array) -> Any:
    wide = np.full([extent + 3 for extent in array.shape], math.nan).astype(array.dtype)
    inside = tuple(slice(1, 1 + extent) for extent in array.shape)
    wide[inside] = array
    return backend.from_numpy(wide)[inside]


def reversed_rows(backend: AnyBackend, array: Array) -> Any:
    try:
        return backend.from_numpy(np.ascontiguousarray(array[::-1]))[::-1]
    except ValueError:
        pytest.skip(f"{backend.name} has no negative strides")


LAYOUTS = [transposed, every_second_row, every_second_column, inside_another, reversed_rows]


def agree(found: dict[str, Array], want: dict[str, Array], step: float) -> None:
    """The same experts; numbers equal but for the rounding of another order of sums."""
    assert np.array_equal(found["ids"], want["ids"])
    for name, array in want.items():
        exact, got = array.astype(np.float64), found[name].astype(np.float64)
        assert np.abs(got - exact).max(initial=0) <= 8 * step * np.abs(exact).max(initial=0), name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("slots", [1, 2, 3, 4, 5])
def test_case_096_strided_operands(
    backend: AnyBackend, slots: int, layout: Callable[[AnyBackend, Array], Any]
) -> None:
    """All six at once, for every k; in float64, bfloat16 and float32."""
    options = ruda.MoeOptions(selection=SoftmaxSelection(slots), weights=OPTIONS.weights)
    steps = {DType.FLOAT64: 2.0**-52, DType.FLOAT32: 2.0**-23, DType.BFLOAT16: 2.0**-7}
    for dtype, step in steps.items():
        made = arrays(dtype, slots)
        strided = {name: layout(backend, array) for name, array in made.items()}
        for name, array in made.items():
            assert bits(backend.to_numpy(strided[name])) == bits(array)
        plain = results(backend, tensors(backend, dtype, slots), options=options)
        agree(results(backend, strided, options=options), plain, step)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_case_094_a_gradient_of_stride_zero(backend: AnyBackend, dtype: DType) -> None:
    """What `y.sum().backward()` hands over; and inputs that are one row, repeated."""
    given = tensors(backend, dtype)
    shape = backend.shape(given["grad_output"])

    def spread(array: Array) -> Any:
        tensor: Any = backend.from_numpy(array)
        return tensor.expand(shape) if backend.name == "torch" else np.broadcast_to(tensor, shape)

    one = np.ones((1, 1), arrays(dtype)["input"].dtype)
    row = arrays(dtype)["input"][:1]
    given |= {"grad_output": spread(one), "input": spread(row)}
    full = {"grad_output": np.ones(shape, one.dtype), "input": np.repeat(row, shape[0], axis=0)}
    plain = given | {name: backend.from_numpy(array) for name, array in full.items()}
    same_bits(results(backend, given), results(backend, plain))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_case_099_gate_and_up_of_one_packed_tensor(backend: AnyBackend, dtype: DType) -> None:
    """Taken as views, kept as views: a copy would cost as much as all the experts."""
    made = arrays(dtype)
    packed = backend.from_numpy(np.concatenate([made["gate"], made["up"]], axis=1))
    views = {"gate": packed[:, :10], "up": packed[:, 10:]}
    given = {**tensors(backend, dtype), **views}
    _, state, _ = passes(backend, given)
    assert state.experts.gate is views["gate"]
    assert state.experts.up is views["up"]
    same_bits(results(backend, given), results(backend, tensors(backend, dtype)))
