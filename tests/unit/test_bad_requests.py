"""Bad options, strategies, states and backend names: refused by name, the operands left alone.

Operands that are wrong by themselves: `test_bad_input.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ruda
from ruda.backend.registry import AnyBackend
from ruda.base.strategies import CombineGradientStrategy, ExpertStrategy, Request
from ruda.stages.options import (
    CombineAccumulation,
    ExpertOptions,
    ExpertsGradientSelection,
    FixedSelection,
    GroupedSelection,
    Intermediates,
    MoeGradientSelection,
    MoeOptions,
    RouterScoring,
    RouterWeightOptions,
    SoftmaxSelection,
)

T, E, K, H, I = 5, 4, 2, 6, 3
SOFTMAX = RouterScoring.SOFTMAX
WEIGHTS = RouterWeightOptions(SOFTMAX, renormalize=True)
TWO = SoftmaxSelection(K)
GOOD = MoeOptions(selection=TWO, weights=WEIGHTS)
NAN, INF, HUGE = math.nan, math.inf, 10**400

TENSORS = ("input", "logits", "gate", "up", "down", "grad_output", "weights", "expert_ids")


def operands(backend: AnyBackend) -> Any:
    rng = np.random.default_rng(1)
    shapes = ((T, H), (T, E), (E, I, H), (E, I, H), (E, H, I), (T, H), (T, K))
    made = (backend.from_numpy(rng.standard_normal(shape).astype(np.float32)) for shape in shapes)
    found = SimpleNamespace(**dict(zip(TENSORS, made, strict=False)), backend=backend)
    found.expert_ids = backend.from_numpy(rng.integers(0, E, (T, K)))
    return found


def moe(o: Any, options: Any = GOOD, **more: Any) -> Any:
    return ruda.moe_forward(o.input, o.logits, o.gate, o.up, o.down, options=options, **more)


def experts(o: Any, options: Any = None, **more: Any) -> Any:
    return ruda.experts_forward(
        *(o.input, o.expert_ids, o.weights, o.gate, o.up, o.down), options=options, **more
    )


def refused(call: Callable[[], Any], error: type[ruda.MoeError], built_in: type, text: str) -> None:
    """One line, with these words in this order."""
    with pytest.raises(ruda.MoeError) as caught:
        call()
    assert type(caught.value) is error
    assert isinstance(caught.value, built_in)
    message = str(caught.value)
    assert re.fullmatch(".*".join(re.escape(word) for word in text.split(" ")) + ".*", message), (
        message
    )


def unharmed(o: Any, call: Callable[[], Any], *expected: Any) -> None:
    """As `refused`, and every operand keeps its bytes."""
    before = [o.backend.to_numpy(getattr(o, name)).tobytes() for name in TENSORS]
    refused(call, *expected)
    assert [o.backend.to_numpy(getattr(o, name)).tobytes() for name in TENSORS] == before


def weights(**more: Any) -> Callable[[], Any]:
    return lambda: RouterWeightOptions(**{"scoring": SOFTMAX, "renormalize": True, **more})


def grouped(**more: Any) -> Callable[[], Any]:
    return lambda: GroupedSelection(**{"top_k": K, **more})


def whole(**more: Any) -> Callable[[], Any]:
    return lambda: MoeOptions(**{"selection": TWO, "weights": WEIGHTS, **more})


CONSTRUCTORS: list[tuple[Callable[[], Any], str]] = [
    (lambda: SoftmaxSelection(0), "SoftmaxSelection.top_k: integer >= 1, got 0"),
    (lambda: SoftmaxSelection(-1), "SoftmaxSelection.top_k: integer >= 1, got -1"),
    (lambda: SoftmaxSelection(2.0), "SoftmaxSelection.top_k: integer got 2.0"),  # type: ignore[arg-type]
    (lambda: SoftmaxSelection(True), "SoftmaxSelection.top_k: integer got True"),
    (lambda: SoftmaxSelection("2"), "SoftmaxSelection.top_k: integer got '2'"),  # type: ignore[arg-type]
    (lambda: SoftmaxSelection(None), "SoftmaxSelection.top_k: integer got None"),  # type: ignore[arg-type]
    (grouped(top_k=0), "GroupedSelection.top_k: integer >= 1, got 0"),
    (grouped(groups=0), "GroupedSelection.groups: integer >= 1, got 0"),  # case 006
    (grouped(groups=None), "GroupedSelection.groups: integer got None"),
    (grouped(groups=4, selected_groups=0), "GroupedSelection.selected_groups: >= 1, got 0"),
    (grouped(groups=4, selected_groups=5), "GroupedSelection.selected_groups: 1..4 got 5"),
    (grouped(selected_groups=2), "GroupedSelection.selected_groups: 1..1 got 2"),
    (grouped(scoring="tanh"), "GroupedSelection.scoring: one of sigmoid, RouterScoring got 'tanh'"),
    (grouped(group_top_two=1), "GroupedSelection.group_top_two: True or False, got 1"),
    (weights(scoring="Softmax"), "RouterWeightOptions.scoring: sqrt_softplus got 'Softmax'"),
    (weights(scoring=None), "RouterWeightOptions.scoring: RouterScoring got None"),
    (weights(renormalize=1), "RouterWeightOptions.renormalize: True or False, got 1"),
    (weights(renormalize=None), "RouterWeightOptions.renormalize: True or False, got None"),
    *(
        (weights(scale=bad), f"RouterWeightOptions.scale: expected a finite number > 0, got {bad}")
        for bad in (0, 0.0, -0.0, -2.5)
    ),
    (weights(epsilon=-1e-20), "RouterWeightOptions.epsilon: finite number >= 0, got -1e-20"),
    *(
        (weights(**{name: bad}), f"RouterWeightOptions.{name}: finite number got {bad!r:.150}")
        for name in ("scale", "epsilon")
        for bad in (NAN, INF, -INF, HUGE, -HUGE, True, False, "1", None, 1j, [1.0])
    ),
    (whole(selection=2), "MoeOptions.selection: SoftmaxSelection GroupedSelection got 2"),
    (whole(selection=SoftmaxSelection), "MoeOptions.selection: FixedSelection got <class"),
    (whole(weights=None), "MoeOptions.weights: RouterWeightOptions, got None"),
    (whole(weights={"scale": 1.0}), "MoeOptions.weights: RouterWeightOptions, got {'scale'"),
    (whole(forward="fast"), "MoeOptions.forward: one of scalar, auto ExpertStrategy got 'fast'"),
    (whole(backward=None), "MoeOptions.backward: ExpertStrategy got None"),
    (
        whole(combine_backward=ExpertStrategy.SCALAR),
        "MoeOptions.combine_backward: CombineGradientStrategy got <ExpertStrategy.SCALAR",
    ),
    (
        whole(combine=Intermediates.STORAGE),
        "MoeOptions.combine: CombineAccumulation got <Intermediates.STORAGE",
    ),
    (
        lambda: ExpertOptions(intermediates=CombineAccumulation.COMPUTE),  # type: ignore[arg-type]
        "ExpertOptions.intermediates: Intermediates got <CombineAccumulation.COMPUTE",
    ),
    (lambda: MoeGradientSelection(input=1), "MoeGradientSelection.input: True or False, got 1"),  # type: ignore[arg-type]
    (
        lambda: ExpertsGradientSelection(weights=None),  # type: ignore[arg-type]
        "ExpertsGradientSelection.weights: True or False, got None",
    ),
]


@pytest.mark.parametrize("row", CONSTRUCTORS, ids=[row[1][:70] for row in CONSTRUCTORS])
def test_options_refuse_at_construction(row: tuple[Callable[[], Any], str]) -> None:
    refused(row[0], ruda.ConfigurationError, ValueError, row[1])


def test_options_at_the_edge_are_taken() -> None:
    RouterWeightOptions(SOFTMAX, renormalize=False, scale=1, epsilon=0)
    RouterWeightOptions(SOFTMAX, renormalize=False, scale=5e-324, epsilon=1e300)
    GroupedSelection(top_k=1, groups=4, selected_groups=4)


CONFIG = (ruda.ConfigurationError, ValueError)
OPTIONS: list[tuple[str, Callable[[Any], Any], str]] = [
    ("none", lambda o: moe(o, None), "options: MoeOptions, got NoneType"),
    ("dict", lambda o: moe(o, {"top_k": 2}), "options: MoeOptions, got dict"),
    ("expert-options", lambda o: moe(o, ExpertOptions()), "options: MoeOptions, got ExpertOptions"),
    ("selection", lambda o: moe(o, TWO), "options: MoeOptions, got SoftmaxSelection"),
    ("weights", lambda o: experts(o, WEIGHTS), "options: ExpertOptions, got RouterWeightOptions"),
    (
        "router",
        lambda o: ruda.selected_router_weights(o.logits, o.expert_ids, TWO),  # type: ignore[arg-type]
        "options: RouterWeightOptions, got SoftmaxSelection",
    ),
    (
        "router-backward",
        lambda o: ruda.selected_router_weights_backward(o.logits, o.expert_ids, o.weights, None),  # type: ignore[arg-type]
        "options: RouterWeightOptions, got NoneType",
    ),
    ("gradients-bool", lambda o: moe(o, gradients=True), "gradients: MoeGradientSelection, bool"),
    (
        "gradients-names",
        lambda o: experts(o, gradients=("input",)),
        "gradients: ExpertsGradientSelection, got tuple",
    ),
    (
        "gradients-of-experts",
        lambda o: moe(o, gradients=ExpertsGradientSelection.all()),
        "gradients: MoeGradientSelection, got ExpertsGradientSelection",
    ),
    (
        "wanted",
        lambda o: ruda.moe_backward_selected(moe(o)[1], o.grad_output, None),  # type: ignore[arg-type]
        "gradients: MoeGradientSelection, got NoneType",
    ),
    (
        "wanted-of-moe",
        lambda o: ruda.experts_backward_selected(
            experts(o)[1],
            o.grad_output,
            MoeGradientSelection.all(),  # type: ignore[arg-type]
        ),
        "gradients: ExpertsGradientSelection, got MoeGradientSelection",
    ),
    ("backend-number", lambda o: moe(o, backend=3), "backend: its name, got int"),
    ("backend-class", lambda o: moe(o, backend=type(o.backend)), "backend: its name, got Meta"),
    ("backend-module", lambda o: experts(o, backend=np), "backend: its name, got module"),
]


@pytest.mark.parametrize("row", OPTIONS, ids=[row[0] for row in OPTIONS])
def test_the_wrong_kind_of_options(backend: AnyBackend, row: Any) -> None:
    o = operands(backend)
    unharmed(o, lambda: row[1](o), *CONFIG, row[2])


def test_an_unknown_backend_name_lists_the_known(backend: AnyBackend) -> None:
    o = operands(backend)
    for call in (moe, experts):
        unharmed(
            o,
            lambda call=call: call(o, backend="tensorflow"),  # type: ignore[misc]
            *(ruda.UnknownBackendError, LookupError),
            "backend: numpy torch cupy got 'tensorflow'",
        )


@pytest.mark.parametrize("named", [True, False], ids=["name", "instance"])
def test_a_backend_that_is_not_the_arrays_names_both(backend: AnyBackend, named: bool) -> None:
    o = operands(backend)
    own = ruda.backend_of(o.input).name
    other = "torch" if own == "numpy" else "numpy"
    pytest.importorskip(other)
    passed = other if named else ruda.get_backend(other)
    text = f"input: '{other}' got '{own}'"
    unharmed(o, lambda: moe(o, backend=passed), ruda.BackendMismatchError, TypeError, text)


STRATEGIES = [
    ("forward", ExpertStrategy.TENSOR_CORE, "SCALAR, AUTO"),
    ("backward", ExpertStrategy.TENSOR_CORE, "SCALAR, AUTO"),
    ("combine_backward", CombineGradientStrategy.PLANE, "SERIAL"),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("field", "wish", "served"), STRATEGIES, ids=[s[0] for s in STRATEGIES])
def test_a_strategy_the_backend_lacks(
    backend: AnyBackend, field: str, wish: Any, served: str, dtype: str
) -> None:
    reason = backend.unsupported(Request(strategy=wish, dtype=ruda.DType(dtype)))
    if reason is None:
        pytest.skip(f"{backend.name} serves {wish.name} on {backend.device}")
    o = operands(backend)
    for name in ("input", "gate", "up", "down"):
        setattr(o, name, backend.cast(getattr(o, name), ruda.DType(dtype)))
    text = f"{field}: '{backend.name}' {wish.name} {dtype}: {reason}; it supports {served}"
    options = MoeOptions(selection=TWO, weights=WEIGHTS, **{field: wish})
    expected = (ruda.UnsupportedStrategyError, ValueError, text)
    unharmed(o, lambda: moe(o, options, backend=backend), *expected)
    alone = ExpertOptions(**{field: wish})
    unharmed(o, lambda: experts(o, alone, backend=backend), *expected)


STATE = (ruda.StateError, ValueError)


def test_a_gradient_that_was_not_kept_names_what_was(backend: AnyBackend) -> None:
    o = operands(backend)
    logits = MoeGradientSelection(logits=True)
    _, state = moe(o, gradients=logits)
    ruda.moe_backward_selected(state, o.grad_output, logits)
    text = "gradients: input, gate, up, down asked kept only logits"
    unharmed(o, lambda: ruda.moe_backward(state, o.grad_output), *STATE, text)
    wanted = MoeGradientSelection(logits=True, down=True)
    unharmed(
        o,
        lambda: ruda.moe_backward_selected(state, o.grad_output, wanted),
        *STATE,
        "gradients: down asked kept only logits",
    )
    _, kept = experts(o, gradients=ExpertsGradientSelection(input=True, up=True))
    text = "gradients: weights, gate, down asked kept only input, up"
    unharmed(o, lambda: ruda.experts_backward(kept, o.grad_output), *STATE, text)


NOTHING = "gradients: input, gate, up, down asked kept nothing"


def test_nothing_kept(backend: AnyBackend) -> None:
    o = operands(backend)
    _, state = moe(o, gradients=MoeGradientSelection.none())
    _, kept = experts(o, gradients=ExpertsGradientSelection.none())
    unharmed(o, lambda: ruda.moe_backward(state, o.grad_output), *STATE, NOTHING)
    unharmed(o, lambda: ruda.experts_backward(kept, o.grad_output), *STATE, NOTHING)


def test_something_else_for_a_state(backend: AnyBackend) -> None:
    o = operands(backend)
    state, kept = moe(o)[1], experts(o)[1]
    grad: Any = o.grad_output
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: ruda.moe_backward(kept, grad), "state: MoeState, got ExpertsState"),
        (lambda: ruda.experts_backward(state, grad), "state: ExpertsState, got MoeState"),
        (lambda: ruda.moe_backward(None, grad), "state: MoeState, got NoneType"),  # type: ignore[arg-type]
        (lambda: ruda.moe_route_indices(kept), "state: MoeState, got ExpertsState"),
    ]
    for call, text in calls:
        unharmed(o, call, *STATE, text)


class TestTorchOnly:
    """What PyTorch alone can tell: in-place changes, and being differentiated."""

    @pytest.fixture
    def o(self) -> Any:
        pytest.importorskip("torch")
        return operands(ruda.get_backend("torch"))

    @pytest.mark.parametrize("name", ["input", "logits", "gate", "up", "down"])
    def test_a_saved_operand_changed_in_place(self, o: Any, name: str) -> None:
        _, state = moe(o)
        getattr(o, name).add_(1)
        text = f"{name}: expected the values the forward saw, got changed in place"
        unharmed(o, lambda: ruda.moe_backward(state, o.grad_output), *STATE, text)

    @pytest.mark.parametrize("name", ["input", "weights", "gate", "up", "down"])
    def test_a_saved_operand_of_the_experts_changed_in_place(self, o: Any, name: str) -> None:
        _, state = experts(o)
        getattr(o, name)[0].mul_(2)
        text = f"{name}: expected the values the forward saw, got changed in place"
        unharmed(o, lambda: ruda.experts_backward(state, o.grad_output), *STATE, text)

    def test_what_is_not_saved_may_change(self, o: Any) -> None:
        _, state = moe(o, gradients=MoeGradientSelection(logits=True))
        o.input.add_(1)
        o.expert_ids.zero_()
        wanted = MoeGradientSelection(logits=True)
        ruda.moe_backward_selected(state, o.grad_output, wanted)

    def test_the_ids_are_copied(self, o: Any) -> None:
        selection = FixedSelection(o.expert_ids)
        _, state = moe(o, MoeOptions(selection=selection, weights=WEIGHTS))
        before = ruda.moe_route_indices(state).clone()
        o.expert_ids.zero_()
        assert bool((ruda.moe_route_indices(state) == before).all())

    def test_a_second_derivative(self, o: Any) -> None:
        state, kept = moe(o)[1], experts(o)[1]
        plain = o.grad_output
        grad = plain.clone().requires_grad_()
        expected = (ruda.HigherDerivativeUnsupportedError, ValueError, "grad_output: requires grad")
        unharmed(o, lambda: ruda.moe_backward(state, grad), *expected)
        unharmed(o, lambda: ruda.experts_backward(kept, grad), *expected)
        unharmed(o, lambda: ruda.experts_backward(kept, grad * 1), *expected)
        import torch

        with torch.no_grad():
            ruda.moe_backward(state, grad)
