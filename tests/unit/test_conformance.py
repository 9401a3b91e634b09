"""The kit itself: it passes what is right, and fails each planted fault in the right section."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ruda.backend.registry import AnyBackend
from ruda.backend.specification import replaced_stages, stage_bodies
from ruda.base.dtypes import DType
from ruda.stages.options import Intermediates
from ruda.testing.kit.report import SECTIONS, Report
from ruda.testing.kit.run import run_kit
from ruda_backend_numpy import NumpyBackend


def test_passes(backend: AnyBackend, record_property: Callable[[str, object], None]) -> None:
    report = run_kit(backend, opened_by="backend")
    record_property("conformance", report.table())
    assert report.passed, report.table()
    assert list(report.sections) == list(SECTIONS)
    empty = {name for name, section in report.sections.items() if not section.passed}
    # Where no stage is replaced, there is nothing to compare.
    assert empty == (set() if replaced_stages(type(backend)) else {"replaced kernels"})


class TieBreaker(NumpyBackend):
    """Equal keys in reverse: an unstable sort."""

    def stable_argsort(self, keys: Any, /) -> Any:
        last = keys.shape[-1] - 1
        return last - np.argsort(keys[..., ::-1], axis=-1, kind="stable") if last >= 0 else keys


class ShortCounts(NumpyBackend):
    """Counts without a minimum length: trailing experts without rows are missing."""

    def counts(self, ids: Any, length: int, /) -> Any:
        return np.bincount(ids)


class Overwriting(NumpyBackend):
    """An indexed += that keeps one of the repeated rows."""

    def add_rows(self, target: Any, rows: Any, values: Any, /) -> Any:
        target[rows] += values
        return target


class NarrowGradient(NumpyBackend):
    """A weight gradient rounded to bfloat16 on the way."""

    def expert_weight_gradient(self, dy: Any, x: Any, offsets: Any, /, **keywords: Any) -> Any:
        wide = super().expert_weight_gradient(dy, x, offsets, **keywords)
        return wide.astype(ml_dtypes.bfloat16).astype(wide.dtype)


class Swapped(NumpyBackend):
    """Gate and up exchanged."""

    def swiglu(self, gate_output: Any, up_output: Any, /) -> Any:
        return super().swiglu(up_output, gate_output)


class SlotOrder(NumpyBackend):
    """Combine in the order of slots."""

    def combine(self, expert_output: Any, routing: Any, layout: Any, /, **keywords: Any) -> Any:
        tokens, slots = routing.shape
        rows = expert_output[layout.positions.reshape(-1)].reshape(tokens, slots, -1)
        total = np.zeros((tokens, rows.shape[2]), routing.dtype)
        for slot in range(slots):
            total += routing[:, slot, None] * rows[:, slot].astype(routing.dtype)
        return self.cast(total, keywords["dtype"])


class EightBits(NumpyBackend):
    """An expert id kept in eight bits."""

    def dispatch(self, expert_ids: Any, experts: int, /) -> Any:
        return super().dispatch(expert_ids & 255, experts)


class Writing(NumpyBackend):
    """The logits are scaled in place."""

    def select_experts(self, logits: Any, *operands: Any) -> Any:
        result = super().select_experts(logits, *operands)
        if logits.flags.writeable:
            logits *= 2
        return result


class ScaleLost(NumpyBackend):
    """The scale applied only where weights are renormalized."""

    def router_weights(self, logits: Any, expert_ids: Any, options: Any, /) -> Any:
        found = super().router_weights(logits, expert_ids, options)
        return found if options.renormalize else found / options.scale


class Boastful(NumpyBackend):
    """Whatever is asked for, it says it has."""

    def unsupported(self, request: Any, /) -> str | None:
        return None


FAULTS: dict[type[NumpyBackend], tuple[str, str]] = {
    TieBreaker: ("2 choosing experts", "test_selection"),
    ShortCounts: ("4 dispatch", "test_dispatch"),
    Overwriting: ("required operations", "test_required_arithmetic"),
    NarrowGradient: ("7 backward", "test_backward"),
    Swapped: ("5 experts", "test_experts"),
    SlotOrder: ("6 combine", "test_combine"),
    EightBits: ("1 shapes and types", "test_types"),
    Writing: ("9 promises", "test_promises"),
    ScaleLost: ("3 continuous weights", "test_weights"),
    Boastful: ("8 strategies", "test_strategies"),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_fails(fault: type[NumpyBackend]) -> None:
    section, module = FAULTS[fault]
    report = _run(fault(), module)
    assert report.sections[section].failed, report.table()
    assert not report.passed


def test_a_replaced_kernel_is_compared_with_what_it_replaces() -> None:
    assert _run(SlotOrder(), "test_replaced").sections["replaced kernels"].failed


def test_a_kernel_for_every_stage_is_compared() -> None:
    def kernel(name: str) -> Any:
        return lambda self, *operands, **more: stage_bodies()[name](self, *operands, **more)

    every = type("Every", (NumpyBackend,), {name: kernel(name) for name in stage_bodies()})
    report = _run(every(), "test_replaced")
    assert report.passed, report.table()
    section = report.sections["replaced kernels"]
    assert section.passed == len(stage_bodies()) * len(DType)


def test_whole_layers_are_made_smaller_where_they_fail(capsys: pytest.CaptureFixture[str]) -> None:
    report = run_kit(Swapped(), opened_by="Swapped()", modules=("test_whole_layers",))
    assert report.sections["whole layers"].failed
    out = capsys.readouterr().out
    assert "The smallest input found, ready to paste:" in out
    assert "backend = Swapped()\nspecimen = Specimen(tokens=1, hidden=1, intermediate=1," in out


def _run(backend: NumpyBackend, module: str) -> Report:
    return run_kit(
        backend, opened_by="fault", modules=(module,), shrinks=False, arguments=("--tb=no",)
    )


def _command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ruda.testing", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_the_command_prints_its_table() -> None:
    done = _command("ruda_backend_numpy:NumpyBackend", "-k", "test_combine")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("PASSED")
    assert "6 combine                   16       0        0" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nothing",), "UnknownBackendError: backend: expected one of numpy, torch"),
        (("nowhere:Class",), "is unavailable, because ModuleNotFoundError"),
        (("numpy", "--device", "cuda:0"), "DeviceError: device: backend 'numpy' cannot serve"),
    ],
)
def test_the_command_refuses(arguments: tuple[str, ...], said: str) -> None:
    done = _command(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_nothing_that_ran_is_no_pass() -> None:
    done = _command("numpy", "-k", "no_such_check")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_a_skip_quotes_what_the_backend_declares() -> None:
    class Single(NumpyBackend):
        dtypes = frozenset({DType.FLOAT32})

    report = _run(Single(), "test_experts")
    assert report.passed
    assert report.sections["5 experts"].skipped["numpy declares no bfloat16"] >= len(Intermediates)
