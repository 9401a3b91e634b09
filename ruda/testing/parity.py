"""Every backend against the reference, on one layer: what was measured, and the verdict.

Choices of experts must be equal. The output and the five gradients are judged by the tolerance
rule of contract 11. Where a backend chose other experts it has failed already, and its
tensors are judged against a reference that made the same choice, so that the two faults can be told
apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np

from ruda.backend.registry import AnyBackend, get_backend, known_backends
from ruda.base.errors import (
    BackendUnavailableError,
    DTypeError,
    MoeError,
    UnsupportedStrategyError,
)
from ruda.stages.options import MoeGradientSelection
from ruda.testing.layers import Array, Layer
from ruda.testing.reference.expected import Expected, expect
from ruda.testing.run import Run, run_layer
from ruda.testing.tolerance import Comparison
from ruda.testing.verdict import judge

TENSORS = ("output", *MoeGradientSelection.names())


@dataclass(frozen=True, eq=False)
class BackendReport:
    """How one backend did."""

    name: str
    version: str
    device: str
    fault: str = ""
    """What it raised, if it did not get through; then there is nothing below."""
    expert_ids: Array | None = None
    """[T, k]"""
    differing_tokens: int = 0
    """Tokens for which it chose other experts than the reference, or in another order."""
    changed: tuple[str, ...] = ()
    """Tensors whose bits a second run did not repeat."""
    tensors: tuple[Comparison, ...] = ()
    forward_seconds: float = 0.0
    """Of the second run, as is `backward_seconds`."""
    backward_seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """No fault, the same experts, the same bits twice, and every tensor within tolerance."""
        if self.fault or self.differing_tokens or self.changed:
            return False
        return all(tensor.passed for tensor in self.tensors)


@dataclass(frozen=True, eq=False)
class ParityReport:
    """All there is to say about a layer on several backends."""

    source: str
    layer: Layer
    load: Array
    """Tokens per expert by the reference's choice, [E]"""
    backends: tuple[BackendReport, ...]
    absent: dict[str, str]
    """Backends that did not take part, and why."""

    @property
    def selections_agree(self) -> bool:
        """Whether all backends chose the same experts as one another."""
        chosen = [r.expert_ids for r in self.backends if r.expert_ids is not None]
        return all(np.array_equal(ids, chosen[0]) for ids in chosen)

    @property
    def passed(self) -> bool:
        """Every backend that took part passed."""
        return all(report.passed for report in self.backends)


def present_backends(
    named: Sequence[str] | None, device: str | None
) -> tuple[list[AnyBackend], dict[str, str]]:
    """The backends to compare, and why others are absent.

    A backend that was named has to be there; its error is raised. A name may carry a device of its
    own, as in ``torch:cuda:0``. With none named, every known one that can be used (on `device`, if
    given) takes part.
    """
    if named is not None:
        parts = [spec.partition(":") for spec in named]
        return [get_backend(name, device=own or device) for name, _, own in parts], {}
    found: list[AnyBackend] = []
    absent: dict[str, str] = {}
    for name in known_backends():
        try:
            found.append(get_backend(name, device=device))
        except MoeError as error:
            absent[name] = str(error)
    return found, absent


def measure(
    source: str,
    layer: Layer,
    backends: Sequence[AnyBackend],
    absent: dict[str, str],
    *,
    must_serve: bool,
    step: Callable[[str], AbstractContextManager[object]] = nullcontext,
) -> ParityReport:
    """Run the reference and every backend, each inside a `step` that names it.

    A backend that cannot serve the layer's options or types is absent, or its error is raised where
    it `must_serve`.
    """
    with step("reference"):
        expected = expect(layer)
    reports: list[BackendReport] = []
    absent = dict(absent)
    for backend in backends:
        with step(f"{backend.name} on {backend.device}"):
            try:
                reports.append(_report(backend, expected))
            except (UnsupportedStrategyError, DTypeError) as error:
                if must_serve:
                    raise
                absent[backend.name] = str(error)
    if not reports:
        reasons = "; ".join(absent.values())
        raise BackendUnavailableError(f"no backend is present to compare: {reasons}")
    load = np.bincount(expected.expert_ids.reshape(-1), minlength=layer.experts)
    return ParityReport(source, layer, load, tuple(reports), absent)


def reference_bytes(layer: Layer) -> int:
    """About what `measure` needs: the reference holds six cubes of 16-byte numbers, and results."""
    return 150 * layer.experts * layer.intermediate * layer.hidden


def _report(backend: AnyBackend, expected: Expected) -> BackendReport:
    name, version, device = backend.name, backend.version, backend.device
    layer = expected.layer
    try:
        run = run_layer(backend, layer, MoeGradientSelection.all())
        again = run_layer(backend, layer, MoeGradientSelection.all())
    except MoeError:
        raise
    # Whatever a framework raises while it runs is that backend's result, not the end of the others.
    except Exception as error:
        return BackendReport(name, version, device, fault=f"{type(error).__name__}: {error}")
    got, repeated = _tensors(run), _tensors(again)
    differs_T = (run.expert_ids != expected.expert_ids).any(axis=1)
    chosen = expect(layer, run.expert_ids) if differs_T.any() else expected
    return BackendReport(
        name,
        version,
        device,
        expert_ids=run.expert_ids,
        differing_tokens=int(differs_T.sum()),
        changed=tuple(name for name in TENSORS if got[name].tobytes() != repeated[name].tobytes()),
        tensors=tuple(judge(chosen, got)),
        forward_seconds=again.forward_seconds,
        backward_seconds=again.backward_seconds,
    )


def _tensors(run: Run) -> dict[str, Array]:
    return {"output": run.output, **run.gradients}
