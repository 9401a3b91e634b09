"""Bad operands get the contract's error, naming operand, what was expected and what came.

A row of the table spoils one good set of operands and says what must come of it. Every row goes to
every backend present, once with the arrays deciding the backend and once with it passed; no operand
may change. Bad options, strategies, states and backend names: `test_bad_requests.py`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import pytest

import ruda
from ruda.backend.registry import AnyBackend
from ruda.stages.options import (
    FixedSelection,
    GroupedSelection,
    MoeOptions,
    RouterScoring,
    RouterWeightOptions,
    SoftmaxSelection,
)

T, E, K, H, I = 5, 4, 2, 6, 3
BF16, F16, F32, F64 = ml_dtypes.bfloat16, np.float16, np.float32, np.float64
WEIGHTS = RouterWeightOptions(RouterScoring.SOFTMAX, renormalize=True)
SIGMOID = RouterScoring.SIGMOID

BUILT_IN = {
    ruda.ShapeError: ValueError,
    ruda.DTypeError: TypeError,
    ruda.DeviceError: ValueError,
    ruda.BackendMismatchError: TypeError,
    ruda.ConfigurationError: ValueError,
    ruda.SelectionError: ValueError,
}

# What the operations take, by the names they give it.
Operands: TypeAlias = SimpleNamespace
Call: TypeAlias = Callable[[Operands], Any]
Change: TypeAlias = Callable[[Operands], None]


def good_operands(backend: AnyBackend) -> Operands:
    rng = np.random.default_rng(0)

    def floats(*shape: int) -> Any:
        return backend.from_numpy(rng.standard_normal(shape).astype(F32))

    return Operands(
        backend=backend,
        input=floats(T, H),
        logits=floats(T, E),
        gate=floats(E, I, H),
        up=floats(E, I, H),
        down=floats(E, H, I),
        grad_output=floats(T, H),
        weights=floats(T, K),
        dweights=floats(T, K),
        expert_ids=backend.from_numpy(rng.integers(0, E, (T, K))),
        correction_bias=None,
        selection=SoftmaxSelection(K),
        passed=None,  # the argument `backend`
    )


def forward(o: Operands) -> Any:
    return ruda.moe_forward(
        *(o.input, o.logits, o.gate, o.up, o.down),
        options=MoeOptions(selection=o.selection, weights=WEIGHTS),
        correction_bias=o.correction_bias,
        backend=o.passed,
    )


def inference(o: Operands) -> Any:
    options = MoeOptions(selection=o.selection, weights=WEIGHTS)
    tensors = (o.input, o.logits, o.gate, o.up, o.down)
    return ruda.moe_inference(*tensors, options=options, backend=o.passed)


def experts(o: Operands) -> Any:
    tensors = (o.input, o.expert_ids, o.weights, o.gate, o.up, o.down)
    return ruda.experts_forward(*tensors, backend=o.passed)


def router(o: Operands) -> Any:
    return ruda.selected_router_weights(o.logits, o.expert_ids, WEIGHTS, backend=o.passed)


def router_backward(o: Operands) -> Any:
    tensors = (o.logits, o.expert_ids, o.dweights)
    return ruda.selected_router_weights_backward(*tensors, WEIGHTS, backend=o.passed)


def backward(o: Operands) -> Any:
    return ruda.moe_backward(forward(o)[1], o.grad_output)


def selected(o: Operands) -> Any:
    wanted = ruda.MoeGradientSelection(logits=True)
    return ruda.moe_backward_selected(forward(o)[1], o.grad_output, wanted)


def experts_backward(o: Operands) -> Any:
    return ruda.experts_backward(experts(o)[1], o.grad_output)


def say(**values: Any) -> Change:
    """These values, or what these functions make of the operands."""

    def change(o: Operands) -> None:
        for name, value in values.items():
            setattr(o, name, value(o) if callable(value) else value)

    return change


def put(shape: tuple[int, ...], dtype: Any, *names: str) -> Change:
    """Tensors of ones in place of operands."""
    return say(**dict.fromkeys(names, lambda o: o.backend.from_numpy(np.ones(shape, dtype))))


def cast(dtype: Any, *names: str) -> Change:
    """The same values in another type."""

    def change(o: Operands) -> None:
        for name in names:
            values = np.array(o.backend.to_numpy(getattr(o, name)))
            with warnings.catch_warnings(action="ignore"):
                setattr(o, name, o.backend.from_numpy(values.astype(dtype)))

    return change


def both(*changes: Change) -> Change:
    def change(o: Operands) -> None:
        for part in changes:
            part(o)

    return change


def ids(values: Any, dtype: Any = np.int64) -> Change:
    """Every token's ids, both as the operand and as a fixed selection."""

    def change(o: Operands) -> None:
        o.expert_ids = o.backend.from_numpy(np.array([values] * T, dtype))
        o.selection = FixedSelection(o.expert_ids)

    return change


def groups(groups: int, selected: int, top_k: int, *, top_two: bool = False) -> Change:
    return say(selection=GroupedSelection(top_k, SIGMOID, groups, selected, top_two))


def bias(*shape: int, dtype: Any = F32) -> Change:
    return both(say(selection=GroupedSelection(K)), put(shape, dtype, "correction_bias"))


def foreign(name: str) -> Change:
    """The operand as another library's array."""

    def value(o: Operands) -> Any:
        array = o.backend.to_numpy(getattr(o, name))
        return pytest.importorskip("torch").tensor(array) if o.backend.owns(array) else array

    return say(**{name: value})


def numpy_matrix(o: Operands) -> None:
    with warnings.catch_warnings(action="ignore"):
        o.input = np.matrix(o.input)


def masked(name: str) -> Change:
    return say(**{name: lambda o: np.ma.masked_array(getattr(o, name))})


def by(method: str, *arguments: Any) -> Callable[[str], Change]:
    """What a method of the tensor makes of the operand."""
    return lambda name: say(**{name: lambda o: getattr(getattr(o, name), method)(*arguments)})


meta, sparse = by("to", "meta"), by("to_sparse")
turned = by("swapaxes", 1, 2)  # as a checkpoint with [in, out] weights has them


def only(name: str, *rows: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Rows that one backend alone can be sent."""
    return [(*row, name) for row in rows]


SHAPE, DTYPE, CONFIG = ruda.ShapeError, ruda.DTypeError, ruda.ConfigurationError
CHOICE, MIXED, DEVICE = ruda.SelectionError, ruda.BackendMismatchError, ruda.DeviceError
ONE_OF = "expected float16, bfloat16, float32 or float64"
LAYER = ("input", "gate", "up", "down")
IHE, HINT = "[E, I, H]", "last two axes look exchanged"
GATE_UP = ("gate", "up")

NO_HIDDEN = both(
    put((T, 0), F32, "input"), put((E, I, 0), F32, *GATE_UP), put((E, 0, I), F32, "down")
)
NO_INNER = both(put((E, 0, H), F32, *GATE_UP), put((E, H, 0), F32, "down"))
NO_EXPERTS = both(put((0, I, H), F32, *GATE_UP), put((0, H, I), F32, "down"))
BF16_X_F16 = both(cast(BF16, "input"), cast(F16, *GATE_UP, "down"))
F16_X_BF16 = both(cast(F16, "input", *GATE_UP), cast(BF16, "down"))
NARROW_BIAS = both(cast(F64, "logits"), bias(E))
BARE_BIAS = put((E,), F32, "correction_bias")
BIAS_LIST = both(bias(E), say(correction_bias=[0.0]))

SHAPES = [
    ("input-1d", forward, put((H,), F32, "input"), SHAPE, "input: [T, H] [6]"),
    ("input-3d", experts, put((T, 1, H), F32, "input"), SHAPE, "input: [T, H] [5, 1, 6]"),
    ("input-0d", inference, put((), F32, "input"), SHAPE, "input: [T, H] got []"),
    ("input-width", forward, put((T, 7), F32, "input"), SHAPE, f"gate: {IHE} H = 7 [4, 3, 6]"),
    ("input-tokens", forward, put((9, H), F32, "input"), SHAPE, "logits: [T, E] T = 9 [5, 4]"),
    ("logits-1d", forward, put((E,), F32, "logits"), SHAPE, "logits: [T, E] [4]"),
    ("logits-3d", inference, put((1, T, E), F32, "logits"), SHAPE, "logits: [T, E] [1, 5, 4]"),
    ("logits-experts", forward, put((T, 9), F32, "logits"), SHAPE, "logits: E = 4 [5, 9]"),
    ("logits-turned", forward, put((E, T), F32, "logits"), SHAPE, "logits: T = 5, E = 4 [4, 5]"),
    ("logits-1d-alone", router, put((E,), F32, "logits"), SHAPE, "logits: [T, E] [4]"),
    ("gate-2d", forward, put((I, H), F32, "gate"), SHAPE, f"gate: {IHE} [3, 6]"),
    ("gate-packed", forward, put((E, 2 * I, H), F32, "gate"), SHAPE, "up: I = 6 [4, 3, 6]"),
    ("gate-experts", forward, put((9, I, H), F32, "gate"), SHAPE, "up: E = 9 [4, 3, 6]"),
    ("up-experts", forward, put((9, I, H), F32, "up"), SHAPE, "up: E = 4 [9, 3, 6]"),
    ("up-4d", experts, put((1, E, I, H), F32, "up"), SHAPE, f"up: {IHE} [1, 4, 3, 6]"),
    ("up-width", experts, put((E, I, 1), F32, "up"), SHAPE, "up: H = 6 [4, 3, 1]"),
    ("down-2d", forward, put((H, I), F32, "down"), SHAPE, "down: [E, H, I] [6, 3]"),
    ("down-experts", experts, put((1, H, I), F32, "down"), SHAPE, "down: E = 4 [1, 6, 3]"),
    ("down-inner", forward, put((E, H, 9), F32, "down"), SHAPE, "down: I = 3 [4, 6, 9]"),
    ("all-turned", forward, both(*map(turned, LAYER[1:])), SHAPE, f"gate: [4, 6, 3] {HINT}"),
    ("up-turned", forward, turned("up"), SHAPE, f"up: {IHE} [4, 6, 3] {HINT}"),
    ("down-turned", experts, turned("down"), SHAPE, f"down: [E, H, I] [4, 3, 6] {HINT}"),
    ("weights-1d", experts, put((T * K,), F32, "weights"), SHAPE, "weights: [T, k] [10]"),
    ("weights-slots", experts, put((T, 3), F32, "weights"), SHAPE, "weights: k = 2 [5, 3]"),
    ("ids-1d", experts, ids(0), SHAPE, "expert_ids: [T, k] [5]"),
    ("ids-1d-fixed", forward, ids(0), SHAPE, "expert_ids: [T, k] [5]"),
    ("ids-tokens", router, put((9, K), np.int64, "expert_ids"), SHAPE, "expert_ids: T = 5 [9, 2]"),
    ("dweights-slots", router_backward, put((T, 3), F32, "dweights"), SHAPE, "dweights: [5, 3]"),
    ("dout-tokens", backward, put((9, H), F32, "grad_output"), SHAPE, "grad_output: T = 5 [9, 6]"),
    ("dout-width", selected, put((T, 1), F32, "grad_output"), SHAPE, "grad_output: H = 6"),
    ("dout-0d", experts_backward, put((), F32, "grad_output"), SHAPE, "grad_output: [T, H] []"),
    ("bias-2d", forward, bias(1, E), SHAPE, "correction_bias: [E] [1, 4]"),
    ("bias-experts", forward, bias(9), SHAPE, "correction_bias: [E] E = 4 [9]"),
    ("no-hidden", forward, NO_HIDDEN, SHAPE, "input: H >= 1 got 0"),
    ("no-inner", forward, NO_INNER, SHAPE, "gate: I >= 1 got 0"),
    ("no-experts", experts, NO_EXPERTS, SHAPE, "gate: E >= 1 got 0"),
    ("no-experts-router", router, put((T, 0), F32, "logits"), SHAPE, "logits: E >= 1 got 0"),
]

TYPES = [
    ("input-int", forward, cast(np.int32, *LAYER), DTYPE, f"input: {ONE_OF} got int32"),
    ("input-bool", inference, cast(bool, *LAYER), DTYPE, f"input: {ONE_OF} got bool"),
    ("input-complex", experts, cast(complex, *LAYER), DTYPE, f"input: {ONE_OF} got complex128"),
    ("gate-half", forward, cast(F16, "gate"), DTYPE, "gate: float32 type of input got float16"),
    ("up-double", experts, cast(F64, "up"), DTYPE, "up: float32 type of input got float64"),
    ("down-int", forward, cast(np.int64, "down"), DTYPE, "down: float32 got int64"),
    ("case_080-bf16-fp16", forward, BF16_X_F16, DTYPE, "gate: bfloat16 got float16"),
    ("case_080-fp16-bf16", experts, F16_X_BF16, DTYPE, "down: float16 got bfloat16"),
    ("logits-int", forward, cast(np.int8, "logits"), DTYPE, f"logits: {ONE_OF} got int8"),
    ("logits-complex", router, cast(complex, "logits"), DTYPE, f"logits: {ONE_OF} got complex128"),
    ("weights-int", experts, cast(np.int64, "weights"), DTYPE, f"weights: {ONE_OF} got int64"),
    ("dweights-half", router_backward, cast(F16, "dweights"), DTYPE, "dweights: float32 float16"),
    ("dweights-wide", router_backward, cast(F64, "dweights"), DTYPE, "dweights: float32 float64"),
    ("dout-half", backward, cast(BF16, "grad_output"), DTYPE, "grad_output: float32 bfloat16"),
    ("dout-int", experts_backward, cast(int, "grad_output"), DTYPE, "grad_output: float32 int64"),
    ("bias-half", forward, bias(E, dtype=BF16), DTYPE, "correction_bias: float32 bfloat16"),
    ("bias-int", forward, bias(E, dtype=np.int32), DTYPE, "correction_bias: float32 int32"),
    ("bias-narrow", forward, NARROW_BIAS, DTYPE, "correction_bias: float64 of logits got float32"),
    ("ids-float", experts, ids([0, 1], F32), DTYPE, "expert_ids: an integer type got float32"),
    ("ids-float-fixed", forward, ids([0, 1], F64), DTYPE, "expert_ids: integer got float64"),
    ("ids-bool", router, ids([0, 1], bool), DTYPE, "expert_ids: integer got bool"),
    ("ids-complex", router_backward, ids([0, 1], complex), DTYPE, "expert_ids: got complex128"),
]

CHOICES = [
    *(
        (f"case_090-{label}-{call.__name__}", call, ids([0, bad], dtype), CHOICE, text)
        for label, bad, dtype, text in (
            ("minus-one", -1, np.int64, "expert_ids: [0, 4) got -1 token 0 slot 1"),
            ("minus-one-int8", -1, np.int8, "expert_ids: [0, 4) got -1 token 0 slot 1"),
            ("as-many", E, np.int32, "expert_ids: [0, 4) got 4 token 0 slot 1"),
            ("huge", 2**64 - 4, np.uint64, "expert_ids: [0, 4) got 18446744073709551612"),
            ("past-int64", 2**63, np.uint64, "expert_ids: [0, 4) got 9223372036854775808"),
            ("wraps-in-32", 2**32 + 1, np.int64, "expert_ids: [0, 4) got 4294967297"),
        )
        for call in (forward, inference, experts)
    ),
    ("top-k", forward, say(selection=SoftmaxSelection(5)), CONFIG, "SoftmaxSelection.top_k 1..4 5"),
    ("top-k-grouped", inference, groups(1, 1, 5), CONFIG, "GroupedSelection.top_k 1..4 got 5"),
    ("slots", forward, ids([0, 1, 2, 3, 0]), CONFIG, "expert_ids: 1..4 slots got 5"),
    ("slots-experts", experts, ids([0, 1, 2, 3, 0]), CONFIG, "expert_ids: 1..4 slots got 5"),
    ("no-slots", experts, ids([]), CONFIG, "expert_ids: 1..4 slots got 0"),
    ("no-slots-router", router, ids([]), CONFIG, "expert_ids: 1..4 slots got 0"),
    ("groups-uneven", forward, groups(3, 1, 1), CONFIG, "GroupedSelection.groups divisor 4 got 3"),
    ("groups-many", forward, groups(8, 8, 2), CONFIG, "GroupedSelection.groups divisor 4 got 8"),
    ("groups-few-kept", forward, groups(2, 1, 3), CONFIG, "GroupedSelection.top_k most 2 got 3"),
    (
        "case_005",
        forward,
        groups(4, 2, 2, top_two=True),
        CONFIG,
        "GroupedSelection.group_top_two two 4",
    ),
    ("bias-softmax", forward, BARE_BIAS, CONFIG, "correction_bias: None SoftmaxSelection"),
]

ARRAYS = [
    ("input-list", forward, say(input=[[0.0] * H] * T), MIXED, "input: builtins.list"),
    ("logits-list", router, say(logits=[[0.0] * E] * T), MIXED, "logits: builtins.list"),
    ("up-list", experts, say(up=[[[0.0]]]), MIXED, "up: '{name}' builtins.list"),
    ("down-none", forward, say(down=None), MIXED, "down: '{name}' builtins.NoneType"),
    ("dout-none", backward, say(grad_output=None), MIXED, "grad_output: '{name}' NoneType"),
    ("dweights-scalar", router_backward, say(dweights=1.0), MIXED, "dweights: '{name}' float"),
    ("ids-list", experts, say(expert_ids=[[0, 1]] * T), MIXED, "expert_ids: '{name}' list"),
    ("ids-none", forward, say(selection=FixedSelection(None)), MIXED, "expert_ids: '{name}' None"),
    ("bias-list", forward, BIAS_LIST, MIXED, "correction_bias: '{name}' list"),
    ("case_145-gate", forward, foreign("gate"), MIXED, "gate: '{name}' '{other}'"),
    ("case_145-logits", inference, foreign("logits"), MIXED, "logits: '{name}' '{other}'"),
    ("case_145-ids", experts, foreign("expert_ids"), MIXED, "expert_ids: '{name}' '{other}'"),
    ("case_145-dout", backward, foreign("grad_output"), MIXED, "grad_output: '{name}' '{other}'"),
    ("case_145-dw", router_backward, foreign("dweights"), MIXED, "dweights: '{name}' '{other}'"),
    *only(
        "numpy",
        ("masked-input", forward, masked("input"), MIXED, "input: numpy MaskedArray"),
        ("masked-gate", experts, masked("gate"), MIXED, "gate: plain dense 'numpy' MaskedArray"),
        ("matrix", forward, numpy_matrix, MIXED, "input: numpy matrix"),
        ("scalar", router, say(logits=F32(1)), MIXED, "logits: numpy numpy.float32"),
    ),
    *only(
        "torch",
        ("sparse-input", forward, sparse("input"), MIXED, "input: dense 'torch' torch.Tensor"),
        ("sparse-up", experts, sparse("up"), MIXED, "up: plain dense tensor 'torch' torch.Tensor"),
        ("meta-input", forward, meta("input"), DEVICE, "input: 'meta'"),
        ("meta-down", experts, meta("down"), DEVICE, "down: '{device}' 'meta'"),
        ("meta-logits", router, meta("logits"), DEVICE, "logits: 'meta'"),
        ("meta-dout", backward, meta("grad_output"), DEVICE, "grad_output: 'meta'"),
    ),
]

ROWS = [*SHAPES, *TYPES, *CHOICES, *ARRAYS]
TENSORS = (*LAYER, "logits", "grad_output", "weights", "dweights", "expert_ids", "correction_bias")


def snapshot(o: Operands, name: str) -> object:
    """An operand's bytes, or what else there is to compare."""
    value = getattr(o, name)
    if not o.backend.owns(value) or o.backend.device_of(value) != o.backend.device:
        return repr(value)
    array = o.backend.to_numpy(value)
    return str(array.dtype), array.shape, array.tobytes()


def test_there_are_enough_rows_and_no_two_share_a_name() -> None:
    names = [row[0] for row in ROWS]
    assert len(names) >= 100
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("call", [forward, inference, experts, router, router_backward, backward])
def test_the_good_operands_are_good(backend: AnyBackend, call: Call) -> None:
    call(good_operands(backend))


@pytest.mark.parametrize("passed", [False, True], ids=["arrays-decide", "backend-passed"])
@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_bad_operands(backend: AnyBackend, row: tuple[Any, ...], passed: bool) -> None:
    _, call, change, error, text, *alone = row
    if alone and backend.name not in alone:
        pytest.skip(f"only {alone[0]} has such tensors")
    o = good_operands(backend)
    if not passed and ruda.backend_of(o.input) is not backend:
        pytest.skip(f"its arrays alone do not mean {backend.name}")
    o.passed = backend if passed else None
    change(o)
    before = {name: snapshot(o, name) for name in TENSORS}

    with pytest.raises(ruda.MoeError) as caught:
        call(o)

    assert type(caught.value) is error
    assert isinstance(caught.value, BUILT_IN[error])
    message = str(caught.value)
    other = "torch" if backend.owns(np.ones(1)) else "numpy"
    text = text.format(name=backend.name, other=other, device=backend.device)
    in_order = ".*".join(re.escape(part) for part in text.split(" "))
    assert re.fullmatch(in_order + ".*", message), message
    assert {name: snapshot(o, name) for name in TENSORS} == before
