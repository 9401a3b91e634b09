"""Every backend against the reference, on one layer: what was measured, and the verdict.

Choices of experts must be equal. The output and the five gradients are judged by the tolerance
rule of `ruda.testing.tolerance`. Where a backend chose other experts it has failed already, and its
tensors are judged against a reference that made the same choice, so that the two faults can be told
apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import ruda
from ruda.backend.registry import AnyBackend
from ruda.base.dtypes import DType
from ruda.base.errors import DTypeError, MoeError, UnsupportedStrategyError
from ruda.cli.console import CliError, Steps
from ruda.testing.run import Run, run_layer
from ruda.stages.options import MoeGradientSelection
from ruda.testing.reference.envelope import references
from ruda.testing.layers import Array, Layer
from ruda.testing.reference import reference_selection
from ruda.testing.tolerance import Comparison, compare, ulp

TENSORS = ("output", *MoeGradientSelection.names())


@dataclass(frozen=True)
class TensorReport:
    """How one tensor of one backend did."""

    comparison: Comparison
    unit: float
    """A unit in the last place at the reference's largest magnitude, in the coarser of the tensor's
    type and the storage type: what the largest error is shown in."""

    @property
    def name(self) -> str:
        """``output``, or the name of a gradient."""
        return self.comparison.name

    @property
    def error_ulp(self) -> float:
        """The largest error in such units."""
        return self.comparison.error / self.unit

    @property
    def allowed_ulp(self) -> float:
        """What `error_ulp` may be."""
        return self.comparison.allowed / self.unit


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
    tensors: tuple[TensorReport, ...] = ()
    forward_seconds: float = 0.0
    """Of the second run, as is `backward_seconds`."""
    backward_seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """No fault, the same experts, the same bits twice, and every tensor within tolerance."""
        if self.fault or self.differing_tokens or self.changed:
            return False
        return all(tensor.comparison.passed for tensor in self.tensors)


@dataclass(frozen=True, eq=False)
class ParityReport:
    """All that `ruda parity` has to say about a layer."""

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
        return [ruda.get_backend(name, device=own or device) for name, _, own in parts], {}
    found: list[AnyBackend] = []
    absent: dict[str, str] = {}
    for name in ruda.known_backends():
        try:
            found.append(ruda.get_backend(name, device=device))
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
    steps: Steps,
) -> ParityReport:
    """Run the reference and every backend; takes `len(backends)` + 1 steps.

    A backend that cannot serve the layer's options or types is absent, or its error is raised where
    it `must_serve`.
    """
    with steps.step("reference"):
        reference = _Reference(layer)
    reports: list[BackendReport] = []
    absent = dict(absent)
    for backend in backends:
        with steps.step(f"{backend.name} on {backend.device}"):
            try:
                reports.append(_report(backend, reference))
            except (UnsupportedStrategyError, DTypeError) as error:
                if must_serve:
                    raise
                absent[backend.name] = str(error)
    if not reports:
        reasons = "; ".join(absent.values())
        raise CliError(f"no backend is present to compare: {reasons}")
    load = np.bincount(reference.expert_ids.reshape(-1), minlength=layer.experts)
    return ParityReport(source, layer, load, tuple(reports), absent)


def reference_bytes(layer: Layer) -> int:
    """About what `measure` needs: the reference holds six cubes of 16-byte numbers, and results."""
    return 150 * layer.experts * layer.intermediate * layer.hidden


class _Reference:
    """The exact and the plain results by name, for the reference's own choice of experts."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.expert_ids = reference_selection(
            layer.logits, layer.correction_bias, layer.options.selection
        )
        self._own = references(layer, self.expert_ids)

    def for_choice(self, expert_ids: Array) -> tuple[dict[str, Array], dict[str, Array]]:
        """Both results with these experts [T, k]."""
        if np.array_equal(expert_ids, self.expert_ids):
            return self._own
        return references(self.layer, expert_ids)


def _report(backend: AnyBackend, reference: _Reference) -> BackendReport:
    name, version, device = backend.name, backend.version, backend.device
    layer = reference.layer
    try:
        run = run_layer(backend, layer, MoeGradientSelection.all())
        again = run_layer(backend, layer, MoeGradientSelection.all())
    except MoeError:
        raise
    # Whatever a framework raises while it runs is that backend's result, not the end of the others.
    except Exception as error:
        return BackendReport(name, version, device, fault=f"{type(error).__name__}: {error}")
    got, repeated = _tensors(run), _tensors(again)
    exact, plain = reference.for_choice(run.expert_ids)
    differs_T = (run.expert_ids != reference.expert_ids).any(axis=1)
    return BackendReport(
        name,
        version,
        device,
        expert_ids=run.expert_ids,
        differing_tokens=int(differs_T.sum()),
        changed=tuple(name for name in TENSORS if got[name].tobytes() != repeated[name].tobytes()),
        tensors=tuple(
            _compare(layer, name, got[name], exact[name], plain[name]) for name in TENSORS
        ),
        forward_seconds=again.forward_seconds,
        backward_seconds=again.backward_seconds,
    )


def _compare(layer: Layer, name: str, got: Array, exact: Array, plain: Array) -> TensorReport:
    dtype = {
        "output": layer.dtype,
        "input": layer.dtype,
        "logits": layer.logits_dtype,
    }.get(name, layer.dtype.compute)
    # A float64 result made with float32 routing weights has their last place.
    unit = _coarser(dtype, layer.logits_dtype.compute)
    comparison = compare(name, got, exact, plain, dtype, unit=unit)
    magnitude = np.where(np.isfinite(exact), np.abs(exact), 0.0).max(initial=0.0)
    return TensorReport(comparison, unit=float(ulp(magnitude, _coarser(unit, layer.dtype))))


def _coarser(a: DType, b: DType) -> DType:
    order = [DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32, DType.FLOAT64]
    return min(a, b, key=order.index)


def _tensors(run: Run) -> dict[str, Array]:
    return {"output": run.output, **run.gradients}
