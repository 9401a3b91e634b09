"""What must hold of any layer on any backend: the contract's numbers, and its promises (9).

One function, `first_fault`, puts a specimen through all of it: for a fuzzer, which asks only
whether something is wrong, and shrinks what is.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace

import numpy as np

from ruda.backend.registry import AnyBackend
from ruda.branch.moe import moe_backward, moe_route_indices
from ruda.stages.options import FixedSelection
from ruda.testing.layers import Array
from ruda.testing.placement import Layout, LayoutUnavailableError
from ruda.testing.run import Placed, on_host
from ruda.testing.specimens.run import expected, placed, run_experts, run_moe
from ruda.testing.specimens.specimen import Choice, Flaw, Specimen
from ruda.testing.tolerance import assert_same_bits
from ruda.testing.verdict import judge


@dataclass(frozen=True)
class Fault:
    """What does not hold."""

    check: str
    reason: str

    def __str__(self) -> str:
        return f"{self.check}: {self.reason}"


def first_fault(backend: AnyBackend, specimen: Specimen) -> Fault | None:
    """The first thing wrong with a backend's results for a specimen, or `None`.

    A layout the library cannot hold is left out, not the specimen.
    """
    specimen = placeable(backend, specimen)
    expected(specimen)  # whatever the reference has to warn of, it says out here
    check = "branch"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            on = placed(backend, specimen)
            before = operand_bytes(on)
            output, state = on.forward()
            gradients = moe_backward(state, on.grad_output).asdict()
            ids = moe_route_indices(state)
            branch = on_host(backend, {"expert_ids": ids, "output": output, **gradients})
            _within_tolerance(specimen, branch)
            check = "experts alone"
            _within_tolerance(specimen, run_experts(backend, specimen))
            check = "second backward"
            again = moe_backward(state, on.grad_output).asdict()
            _same(on_host(backend, again), branch)
            check = "inference"
            inferred = on.inference()
            _same(on_host(backend, {"output": inferred}), branch)
            check = "operands unchanged"
            after = operand_bytes(on)
            assert after == before, ", ".join(n for n in before if before[n] != after[n])
            check = "second run"
            _same(run_moe(backend, specimen), branch)
            check = "one bad token"
            bad_token_stays_alone(backend, specimen, math.nan)
    except AssertionError as error:
        return Fault(check, str(error))
    # Whatever a framework raises while it runs is its result.
    except Exception as error:
        return Fault(check, f"{type(error).__name__}: {error}")
    return None


def placeable(backend: AnyBackend, specimen: Specimen) -> Specimen:
    """The specimen without the layouts this backend's library cannot hold."""
    if not specimen.layouts:
        return specimen
    kept: list[tuple[str, Layout]] = []
    for item in specimen.layouts:
        try:
            placed(backend, replace(specimen, layouts=(item,)))
        except LayoutUnavailableError:
            continue
        kept.append(item)
    return replace(specimen, layouts=tuple(kept))


def _within_tolerance(specimen: Specimen, results: dict[str, Array]) -> None:
    failed = [str(verdict) for verdict in judge(expected(specimen), results) if not verdict.passed]
    assert not failed, "; ".join(failed)


def _same(got: dict[str, Array], wanted: dict[str, Array]) -> None:
    for name, array in got.items():
        assert_same_bits(name, array, wanted[name])


def operand_bytes(on: Placed) -> dict[str, bytes]:
    """The values of every operand, by name."""
    tensors = {**on.tensors, "grad_output": on.grad_output}
    if isinstance(on.options.selection, FixedSelection):
        tensors["expert_ids"] = on.options.selection.expert_ids
    if on.correction_bias is not None:
        tensors["correction_bias"] = on.correction_bias
    return {name: array.tobytes() for name, array in on_host(on.backend, tensors).items()}


def bad_token_stays_alone(backend: AnyBackend, specimen: Specimen, value: float) -> None:
    """A NaN or inf in one token changes no bit of another's output, input or logits gradient.

    It may not change who goes where: then rows would be counted, and summed, otherwise.
    """
    if specimen.tokens < 2:
        return
    spread = Layout.BROADCAST
    layouts = tuple(item for item in specimen.layouts if item[1] is not spread)
    sound = replace(specimen, layouts=layouts)
    token = specimen.seed % specimen.tokens
    widths = {"input": specimen.hidden, "grad_output": specimen.hidden}
    if specimen.choice is Choice.FIXED:
        widths["logits"] = specimen.experts
    flaws: list[Flaw] = [
        (name, token * width + specimen.seed % width, value) for name, width in widths.items()
    ]
    flawed = replace(sound, flaws=(*sound.flaws, *flaws))
    others = np.arange(specimen.tokens) != token
    wanted, got = run_moe(backend, sound), run_moe(backend, flawed)
    for name in ("expert_ids", "output", "input", "logits"):
        assert_same_bits(
            f"{name} of the tokens other than {token}", got[name][others], wanted[name][others]
        )
