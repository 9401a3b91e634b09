"""Bad input to the `ruda` command: one line that names it, exit status 2, nothing written."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import ruda
from ruda.base.dtypes import DType
from ruda.base.strategies import ExpertStrategy
from ruda.cli.app import app
from ruda.stages.options import MoeOptions, RouterScoring, RouterWeightOptions
from ruda.testing.files.layers import write_layer
from ruda.testing.files.options import dump_options
from ruda.testing.files.tensors import read_tensors, write_tensors
from ruda.testing.layers import random_layer

OPTIONS = MoeOptions(
    selection=ruda.SoftmaxSelection(2),
    weights=RouterWeightOptions(RouterScoring.SOFTMAX, renormalize=True),
)
MAKE = ("make-layer", "--family", "mixtral", "--scale", "1/512", "--tokens", "3")


def fail(*words: object) -> str:
    """Run what must fail as bad input; the one line it says."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr
    return result.stderr


@pytest.fixture
def layer(tmp_path: Path) -> Path:
    made = random_layer(
        tokens=3,
        hidden=4,
        intermediate=5,
        experts=4,
        options=OPTIONS,
        dtype=DType.FLOAT32,
        seed=1,
    )
    path = tmp_path / "layer.safetensors"
    write_layer(path, made, {})
    return path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("make-layer", "-o", "x"), "Missing option '--family'"),
        (("make-layer", "--family", "mixtral"), "Missing option '--output'"),
        ((*MAKE, "--family", "gpt", "-o", "x"), "family: expected one of qwen3_moe, mixtral"),
        ((*MAKE, "--dtype", "int8", "-o", "x"), "dtype: expected one of float16, bfloat16"),
        ((*MAKE, "--scale", "big", "-o", "x"), "--scale: expected a number > 0"),
        ((*MAKE, "--scale", "1/0", "-o", "x"), "--scale: expected a number > 0"),
        ((*MAKE, "--scale", "0", "-o", "x"), "--scale: expected a number > 0"),
        ((*MAKE, "--scale", "-1/4", "-o", "x"), "--scale: expected a number > 0"),
        ((*MAKE, "--scale", "nan", "-o", "x"), "--scale: expected a number > 0"),
        ((*MAKE, "--scale", "1e-9", "-o", "x"), "leaves nothing of mixtral"),
        ((*MAKE, "--scale", "10000", "-o", "x"), "this layer needs about"),
        ((*MAKE, "--tokens", "-1", "-o", "x"), "--tokens"),
        ((*MAKE, "--tokens", "many", "-o", "x"), "--tokens"),
        ((*MAKE, "--seed", "-1", "-o", "x"), "--seed"),
        ((*MAKE, "--experts", "3", "-o", "x"), "No such option"),
        ((*MAKE, "-o", "missing/x"), "missing does not exist"),
        ((*MAKE, "-o", "."), "exists and is not a regular file"),
        ((*MAKE, "-o", "/dev/null"), "/dev/null: exists and is not a regular file"),
        (("paritty", "x"), "No such command 'paritty'"),
        (("--colour",), "No such option"),
        (("backward",), "Missing argument"),
        (("backward", "missing.safetensors"), "missing.safetensors: no such file"),
        (("forward", "."), "expected a regular file"),
        (("parity", "missing.safetensors"), "missing.safetensors: no such file"),
        (("parity", "/dev/null"), "/dev/null: expected a regular file"),
    ],
)
def test_without_a_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in fail(*words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("backward", "--backend", "tensorflow"), "backend: expected one of"),
        (("backward", "--device", "tpu:7"), "'tpu:7'"),
        (("backward", "--dtype", "q4"), "dtype: expected one of"),
        (("backward", "--gradients", "input,bias"), "--gradients: expected names among"),
        (("backward", "--gradients", ""), "--gradients: expected names among"),
        (("backward", "-o", "missing/x"), "missing does not exist"),
        (("backward", "-o", "layer.safetensors"), "is the layer file itself"),
        (("backward", "extra"), "extra"),
        (("forward", "--backend", "numpy", "--device", "cuda:0"), "'cuda:0'"),
        (("forward", "--gradients", "input"), "No such option"),
        (("parity", "--backends", "numpy,"), "backend: expected one of"),
        (("parity", "--backends", "numpy,tensorflow"), "got 'tensorflow'"),
        (("parity", "--backends", "numpy:cuda:3"), "'cuda:3'"),
        (("parity", "--device", "tpu:0"), "no backend is present to compare"),
        (("parity", "--dtype", "float8"), "dtype: expected one of"),
        (("parity", "--plot", "picture.bmp"), "--plot: expected a name ending in .png, .svg, .pdf"),
        (("parity", "--plot", "missing/p.png"), "missing does not exist"),
        (("parity", "--json", "."), "exists and is not a regular file"),
    ],
)
def test_with_a_good_layer(
    monkeypatch: pytest.MonkeyPatch, layer: Path, words: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(layer.parent)
    before = layer.read_bytes()
    assert message in fail(words[0], layer.name, *words[1:])
    assert layer.read_bytes() == before
    assert list(layer.parent.iterdir()) == [layer]


def test_an_unavailable_backend_is_an_error_only_if_named(layer: Path) -> None:
    absent = [name for name, found in ruda.available_backends().items() if not found]
    if not absent:
        pytest.skip("every backend is available here")
    assert f"backend {absent[0]!r} is unavailable" in fail(
        "backward", layer, "--backend", absent[0]
    )
    assert "is unavailable" in fail("parity", layer, "--backends", f"numpy,{absent[0]}")


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def _replace_by_text(path: Path) -> None:
    path.write_text("not a layer\n" * 20)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _rewrite(tensors: dict[str, Any], **metadata: str) -> Callable[[Path], None]:
    def rewrite(path: Path) -> None:
        old, described = read_tensors(path)
        new = {name: tensor for name, tensor in {**old, **tensors}.items() if tensor is not None}
        write_tensors(path, new, {**described, **metadata})

    return rewrite


def _with_options(**changes: Any) -> str:
    return json.dumps({**json.loads(dump_options(OPTIONS)), **changes})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_truncate, "not a safetensors file, or a damaged one"),
        (_replace_by_text, "not a safetensors file, or a damaged one"),
        (_empty, "not a safetensors file, or a damaged one"),
        (_rewrite({"down": None}), "down: missing"),
        (_rewrite({"w1": np.ones(3)}), "w1: unknown key"),
        (_rewrite({"up": np.ones((4, 5, 4))}), "up: expected float32"),
        (
            _rewrite({"up": np.ones((4, 5, 3), "f4")}),
            "up: expected [E, I, H] with E = 4, I = 5, H = 4",
        ),
        (_rewrite({"logits": np.ones((3, 4), "i8")}), "logits: expected float16"),
        (_rewrite({}, options="{}"), "options.version: expected 1"),
        (_rewrite({}, options="?"), "options: not valid JSON"),
        (
            _rewrite({}, options=_with_options(combine="atomic")),
            "MoeOptions.combine: expected one of",
        ),
        (_rewrite({}, options=_with_options(dropout=0.1)), "options: unknown key 'dropout'"),
        (
            _rewrite({}, options=_with_options(selection={"kind": "softmax", "top_k": 5})),
            "SoftmaxSelection.top_k: expected 1..4 (experts), got 5",
        ),
    ],
)
def test_a_bad_layer(layer: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(layer)
    output = layer.parent / "out"
    output.write_text("old")
    for command in ("forward", "backward"):
        line = fail(command, layer, "-o", output)
        assert line.startswith(f"error: {layer}: ")
        assert message in line
    assert message in fail("parity", layer, "--json", output)
    assert output.read_text() == "old"
    assert sorted(layer.parent.iterdir()) == [layer, output]


@pytest.fixture
def demanding(layer: Path) -> Path:
    """A layer that asks for matrix units, which no CPU backend has."""
    tensors, _ = read_tensors(layer)
    options = replace(OPTIONS, forward=ExpertStrategy.TENSOR_CORE)
    write_tensors(layer, tensors, {"options": dump_options(options)})
    return layer


def test_an_existing_output_outlives_a_run_that_fails(demanding: Path) -> None:
    output = demanding.parent / "grads"
    output.write_text("old")
    line = fail("backward", demanding, "--backend", "numpy", "-o", output)
    assert "numpy" in line
    assert "TENSOR_CORE" in line
    assert output.read_text() == "old"
    assert sorted(demanding.parent.iterdir()) == [output, demanding]


def test_parity_with_a_request_nobody_serves(demanding: Path) -> None:
    assert "TENSOR_CORE" in fail("parity", demanding, "--backends", "numpy")
    assert "no backend is present to compare" in fail("parity", demanding, "--device", "cpu")


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_debug_shows_the_traceback_wherever_it_stands(tmp_path: Path, place: int) -> None:
    words = ["backward", str(tmp_path / "missing"), "--dtype=f32"]
    words.insert(place, "--debug")
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: ")
