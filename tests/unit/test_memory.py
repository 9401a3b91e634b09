"""What is not asked for is not allocated, and a state keeps what the contract lets it keep.

Two measures, since neither sees everything. The allocator's own account: `tracemalloc` for NumPy
(NumPy reports to it), the profiler's memory events for PyTorch on the CPU, the allocator's peak on
CUDA. And the resident set of the process, which also sees what a library allocates behind our back.
Each is shown to catch a backend that makes one copy of the weights.
"""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

import ruda
from ruda.backend import Backend
from ruda.backend.registry import AnyBackend
from ruda.base.dtypes import DType
from ruda.stages.options import (
    ExpertsGradientSelection,
    FixedSelection,
    GroupedSelection,
    MoeGradientSelection,
    MoeOptions,
    RouterScoring,
    RouterWeightOptions,
    Selection,
    SoftmaxSelection,
)

WEIGHTS = RouterWeightOptions(RouterScoring.SOFTMAX, renormalize=True)
OPTIONS = MoeOptions(selection=SoftmaxSelection(2), weights=WEIGHTS)
FROZEN = MoeGradientSelection(input=True, logits=True)
E, I, H = 64, 512, 512
CUBE = E * I * H * 4


@dataclass
class Measured:
    """Bytes above those at the start: at the worst moment, and at the end."""

    peak: int
    kept: int
    result: Any


def allocated(backend: AnyBackend, call: Callable[[], Any]) -> Measured:
    """By the account of the framework's allocator."""
    gc.collect()
    tensor: Any = backend.full((1,), 0.0, DType.FLOAT32)
    if isinstance(tensor, np.ndarray):
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            result = call()
            gc.collect()
            now, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        return Measured(peak - before, now - before, result)
    if backend.name != "torch":
        pytest.skip(f"no account of what {backend.name} allocates")
    import torch

    if backend.device != "cpu":
        torch.cuda.synchronize(backend.device)
        before = torch.cuda.memory_allocated(backend.device)
        torch.cuda.reset_peak_memory_stats(backend.device)
        result = call()
        peak = torch.cuda.max_memory_allocated(backend.device)
        return Measured(peak - before, torch.cuda.memory_allocated(backend.device) - before, result)
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True, acc_events=True) as profile:
        result = call()
    events = [
        event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return Measured(peak, now, result)


def resident(backend: AnyBackend, call: Callable[[], Any]) -> Measured:
    """By the pages of the process: Linux alone, and for tensors of the host."""
    if not sys.platform.startswith("linux") or not backend.device.startswith("cpu"):
        pytest.skip("needs Linux and tensors on the host")
    try:
        Path("/proc/self/clear_refs").write_text("5")  # forget the old high-water mark
    except OSError as error:
        pytest.skip(f"the high-water mark cannot be reset here: {error}")
    before = _status("VmRSS")
    result = call()
    return Measured(_status("VmHWM") - before, _status("VmRSS") - before, result)


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


MEASURES = [allocated, resident]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Many small products on a busy machine: more threads would wait for each other."""
    with threadpool_limits(1):
        yield


def operands(
    backend: AnyBackend, tokens: int, hidden: int, inner: int, experts: int, dtype: DType
) -> list[Any]:
    rng = np.random.default_rng(0)

    def floats(*shape: int) -> Any:
        return backend.from_numpy(rng.standard_normal(shape).astype(np.float32))

    weights = [(experts, inner, hidden), (experts, inner, hidden), (experts, hidden, inner)]
    return [
        backend.cast(floats(tokens, hidden), dtype),
        floats(tokens, experts),
        *(backend.full(shape, 0.01, dtype) for shape in weights),
    ]


def forward(backend: AnyBackend, tensors: list[Any], **more: Any) -> Any:
    return ruda.moe_forward(*tensors, **{"options": OPTIONS, "backend": backend, **more})


# What is frozen.


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
@pytest.mark.parametrize("measure", MEASURES)
def test_frozen_weights_cost_no_cube(backend: AnyBackend, dtype: DType, measure: Any) -> None:
    tensors = operands(backend, 128, H, I, E, dtype)
    _, state = forward(backend, tensors, gradients=FROZEN)
    grad_output = backend.full((128, H), 1.0, dtype)
    ruda.moe_backward_selected(state, grad_output, FROZEN)  # what is made once is made here
    found = measure(backend, lambda: ruda.moe_backward_selected(state, grad_output, FROZEN))
    assert found.peak < CUBE / 2


@pytest.mark.parametrize("measure", MEASURES)
def test_the_measures_see_what_all_five_gradients_cost(backend: AnyBackend, measure: Any) -> None:
    tensors = operands(backend, 128, H, I, E, DType.BFLOAT16)
    _, state = forward(backend, tensors)
    grad_output = backend.full((128, H), 1.0, DType.BFLOAT16)
    found = measure(backend, lambda: ruda.moe_backward(state, grad_output))
    assert found.peak > 2.9 * CUBE
    assert found.kept > 2.9 * CUBE
    assert found.result.down is not None


@pytest.mark.parametrize("measure", MEASURES)
def test_the_measures_catch_a_backend_that_widens_all_weights_at_once(
    backend: AnyBackend, measure: Any
) -> None:
    class Wasteful(type(backend)):  # type: ignore[misc]
        def grouped_matmul_transposed(self, x: Any, weight: Any, *rest: Any, **more: Any) -> Any:
            wide = self.cast(weight, DType.FLOAT32)
            return super().grouped_matmul_transposed(x, wide, *rest, **more)

    wasteful = Wasteful(backend.device)
    tensors = operands(backend, 128, H, I, E, DType.BFLOAT16)
    _, state = forward(wasteful, tensors, gradients=FROZEN)
    grad_output = backend.full((128, H), 1.0, DType.BFLOAT16)
    found = measure(wasteful, lambda: ruda.moe_backward_selected(state, grad_output, FROZEN))
    assert found.peak > 0.9 * CUBE


@pytest.mark.parametrize("measure", MEASURES)
def test_case_099_views_of_one_packed_tensor_are_not_copied(
    backend: AnyBackend, measure: Any
) -> None:
    x, logits, _, _, down = operands(backend, 64, 256, 256, E, DType.FLOAT32)
    packed: Any = backend.full((E, 512, 256), 0.01, DType.FLOAT32)
    tensors = [x, logits, packed[:, :256], packed[:, 256:], down]

    def both_ways() -> Any:
        _, state = forward(backend, tensors)
        return ruda.moe_backward_selected(state, x, FROZEN)

    both_ways()
    assert measure(backend, both_ways).peak < E * 256 * 256 * 4 / 2


# What a state keeps.


def own_tensors(backend: AnyBackend, value: Any) -> Iterator[Any]:
    """Every tensor that is reachable from a state."""
    if backend.owns(value):
        yield value
    elif is_dataclass(value) and not isinstance(value, type):
        for part in vars(value).values():
            yield from own_tensors(backend, part)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from own_tensors(backend, part)


def storage(tensor: Any) -> tuple[int, int]:
    """Which memory a tensor keeps alive, and how much: a small view may hold a large tensor."""
    if hasattr(tensor, "untyped_storage"):
        whole = tensor.untyped_storage()
        return whole.data_ptr(), whole.nbytes()
    while isinstance(tensor.base, type(tensor)):
        tensor = tensor.base
    return id(tensor), tensor.nbytes


def held(backend: AnyBackend, state: Any, operands: list[Any]) -> int:
    """Bytes of the memory a state keeps alive beyond the operands."""
    given = {storage(tensor) for tensor in operands}
    return sum(size for _, size in {storage(t) for t in own_tensors(backend, state)} - given)


T, K, HID, INNER, EXPERTS = 512, 4, 32, 48, 64
ROWS = T * K
SELECTIONS: dict[str, Selection | None] = {
    "softmax": SoftmaxSelection(K),
    "grouped": GroupedSelection(K, groups=8, selected_groups=3, group_top_two=True),
    "biased": GroupedSelection(K),
    "fixed": None,
}


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("wanted", ["all", "none", "logits"])
def test_what_a_state_keeps(backend: AnyBackend, selection: str, wanted: str) -> None:
    dtype = DType.BFLOAT16 if selection == "softmax" else DType.FLOAT32
    tensors = operands(backend, T, HID, INNER, EXPERTS, dtype)
    ids = backend.from_numpy(np.random.default_rng(1).integers(0, EXPERTS, (T, K)))
    options = MoeOptions(selection=SELECTIONS[selection] or FixedSelection(ids), weights=WEIGHTS)
    gradients = {
        "all": MoeGradientSelection.all(),
        "none": MoeGradientSelection.none(),
        "logits": MoeGradientSelection(logits=True),
    }[wanted]

    def made() -> Any:
        return forward(backend, tensors, options=options, gradients=gradients)[1]

    state = made()

    x, logits, gate, up, down = tensors
    assert state.logits is logits
    assert state.experts.gate is gate
    assert state.experts.up is up
    assert state.experts.down is down
    assert state.experts.input is (x if wanted == "all" else None)

    kept = state.experts.kept
    both = ROWS * 2 * INNER * dtype.itemsize
    activations = {"all": both, "none": 0, "logits": both // 2}[wanted]
    names = {"all": ["gate_output", "up_output"], "none": [], "logits": ["activation"]}[wanted]
    assert [name for name, value in kept._asdict().items() if value is not None] == names
    assert sum(storage(value)[1] for value in own_tensors(backend, kept)) == activations
    assert activations <= held(backend, state, [*tensors, ids]) <= activations + ROWS * 64
    if selection == "softmax":
        # By the allocator's account, which a hidden cache could not escape; objects are small.
        assert allocated(backend, made).kept <= activations + ROWS * 64 + 2**15


def test_the_walk_sees_a_view_that_holds_a_large_tensor(backend: AnyBackend) -> None:
    large: Any = backend.full((T, EXPERTS), 0.0, DType.FLOAT32)
    assert storage(large[:, :K])[1] == T * EXPERTS * 4


def test_a_state_of_the_experts_keeps_no_more(backend: AnyBackend) -> None:
    x, _, gate, up, down = tensors = operands(backend, T, HID, INNER, EXPERTS, DType.FLOAT32)
    rng = np.random.default_rng(1)
    ids = backend.from_numpy(rng.integers(0, EXPERTS, (T, K)))
    weights = backend.from_numpy(rng.random((T, K)).astype(np.float32))
    _, state = ruda.experts_forward(x, ids, weights, gate, up, down, backend=backend)
    assert held(backend, state, [*tensors, ids, weights]) <= ROWS * 2 * INNER * 4 + ROWS * 64
    _, state = ruda.experts_forward(
        *(x, ids, weights, gate, up, down),
        gradients=ExpertsGradientSelection(weights=True),
        backend=backend,
    )
    assert held(backend, state, [*tensors, ids, weights]) <= ROWS * INNER * 4 + ROWS * 64


# Growth.


def test_case_137_forwards_without_gradient_leave_nothing(backend: AnyBackend) -> None:
    _, _, *weights = operands(backend, 1, HID, INNER, 8, DType.FLOAT32)
    layers = [operands(backend, t, HID, INNER, 8, DType.FLOAT32)[:2] for t in range(1, 221)]

    def forwards(some: list[list[Any]]) -> None:
        for x, logits in some:
            ruda.moe_inference(x, logits, *weights, options=OPTIONS, backend=backend)

    forwards(layers[:20])  # what is made once is made here; every later T is a new one
    gc.collect()
    tensors = _live_tensors(backend)
    tracemalloc.start()
    try:
        forwards(layers[20:])
        gc.collect()
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert _live_tensors(backend) <= tensors
    assert grown < 2**15, "more than the interpreter's own odds and ends"


def _live_tensors(backend: AnyBackend) -> int:
    """For frameworks whose tensors the garbage collector tracks; NumPy's arrays it does not."""
    return sum(type(one) is backend.FloatTensor for one in gc.get_objects())


# What is not wanted.

STAGES = (
    "grouped_matmul_transposed",
    "expert_weight_gradient",
    "routing_weight_gradient",
    "swiglu_backward",
    "router_weights_backward",
    "copy_backward",
)
COSTS = {  # calls of each stage, in that order
    "input": (3, 0, 0, 1, 0, 1),
    "logits": (1, 0, 1, 0, 1, 0),
    "gate": (1, 1, 0, 1, 0, 0),
    "up": (1, 1, 0, 1, 0, 0),
    "down": (0, 1, 0, 0, 0, 0),
    "": (0, 0, 0, 0, 0, 0),
}


def counting(backend: AnyBackend) -> tuple[AnyBackend, Counter[str]]:
    """The same backend, which counts the stages it runs."""
    calls: Counter[str] = Counter()

    def counted(name: str) -> Any:
        def stage(self: Any, *arguments: Any, **more: Any) -> Any:
            calls[name] += 1
            return getattr(super(counts, self), name)(*arguments, **more)

        return stage

    metaclass: Any = type(type(backend))
    counts = metaclass("Counting", (type(backend),), {name: counted(name) for name in STAGES})
    return counts(backend.device), calls


@pytest.mark.parametrize("kept", ["all", "that"])
@pytest.mark.parametrize("name", COSTS)
def test_what_is_not_wanted_is_none_and_not_computed(
    backend: AnyBackend, name: str, kept: str
) -> None:
    if type(backend).expert_rows_backward is not Backend.expert_rows_backward:
        pytest.skip(f"{backend.name} has a kernel for the whole pass")
    counts, calls = counting(backend)
    tensors = operands(backend, 8, HID, INNER, 8, DType.FLOAT32)
    wanted = MoeGradientSelection(**{name: True} if name else {})
    told = MoeGradientSelection.all() if kept == "all" else wanted
    _, state = forward(counts, tensors, gradients=told)
    calls.clear()
    grads = ruda.moe_backward_selected(state, backend.full((8, HID), 1.0, DType.FLOAT32), wanted)
    found = grads.asdict()
    assert list(found) == list(MoeGradientSelection.names())
    assert [key for key, value in found.items() if value is not None] == [name] * bool(name)
    assert tuple(calls[stage] for stage in STAGES) == COSTS[name]
