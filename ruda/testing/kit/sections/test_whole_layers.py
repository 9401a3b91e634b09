"""Whole layers, drawn at random: everything the contract allows, together."""

from __future__ import annotations

import pytest

from ruda.stages.options import RouterScoring
from ruda.testing.kit.plugin import Checker
from ruda.testing.specimens.fuzz import hunt
from ruda.testing.specimens.run import run_moe
from ruda.testing.specimens.specimen import Choice, Routing, Specimen

SECTION = "whole layers"


@pytest.mark.parametrize("seed", range(4))
def test_random_layers(checker: Checker, seed: int) -> None:
    """The same layers every time: `make fuzz` draws others."""
    finding = hunt(checker.backend, seed, examples=25)
    if finding is not None:
        checker.fails(
            finding.specimen,
            str(finding.fault),
            show="ruda.testing.specimens.properties:first_fault",
        )


LARGER = (
    Specimen(tokens=129, hidden=64, intermediate=48, experts=8, top_k=2),
    Specimen(tokens=64, hidden=32, intermediate=24, experts=64, top_k=8, routing=Routing.SKEWED),
    Specimen(
        tokens=48,
        hidden=40,
        intermediate=16,
        experts=32,
        top_k=6,
        choice=Choice.GROUPED,
        scoring=RouterScoring.SIGMOID,
        groups=8,
        selected_groups=4,
        group_top_two=True,
        bias=True,
        scale=2.5,
        epsilon=1e-20,
    ),
)


@pytest.mark.parametrize("specimen", LARGER, ids=repr)
def test_larger_layers(checker: Checker, specimen: Specimen) -> None:
    checker.specimen(specimen, run_moe)
