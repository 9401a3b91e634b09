"""The `ruda` command: what each of its commands makes of good input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import ruda
from ruda.backend.registry import AnyBackend
from ruda.base.dtypes import DType
from ruda.cli.app import app
from ruda.families.table import FAMILIES, get_family
from ruda.testing.files.layers import cast_layer, read_layer
from ruda.testing.files.options import load_options
from ruda.testing.files.tensors import read_tensors
from ruda.testing.layers import dtype_of, numpy_dtype
from ruda.testing.reference import Arithmetic, reference_layer
from ruda.testing.tolerance import assert_exact
from ruda_backend_numpy import NumpyBackend

GRADIENTS = ("input", "logits", "gate", "up", "down")


def run(*words: object, status: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == status, result.output
    return result


@pytest.fixture(scope="module")
def layer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("layers") / "layer.safetensors"
    run("make-layer", "--family", "mixtral", "--scale", "1/256", "--tokens", 9, "-o", path)
    return path


def test_version() -> None:
    assert run("--version").stdout == f"ruda {ruda.__version__}\n"


def test_help_names_every_command() -> None:
    text = run("--help").stdout
    for command in ("backends", "make-layer", "forward", "backward", "parity", "fuzz"):
        assert command in text
    assert "make-layer" in run(status=2).stdout


def test_backends_lists_every_known_one() -> None:
    text = run("backends").stdout
    for name, availability in ruda.available_backends().items():
        assert name in text
        if availability:
            assert ruda.get_backend(name).version.split()[0] in text
        else:
            assert availability.reason.splitlines()[0][:40] in text
            assert availability.install in text


@pytest.mark.parametrize("name", list(FAMILIES))
def test_make_layer(tmp_path: Path, name: str) -> None:
    family, path = get_family(name), tmp_path / "layer.safetensors"
    text = run("make-layer", "--family", name, "--scale", "1/128", "--tokens", 40, "-o", path)
    assert name in text.stdout
    layer = read_layer(path)
    assert layer.options == family.options
    assert (layer.tokens, layer.experts) == (40, family.experts)
    assert (layer.hidden, layer.intermediate) == (
        round(family.hidden / 128),
        round(family.intermediate / 128),
    )
    assert layer.dtype is DType.BFLOAT16
    assert layer.logits_dtype is family.logits_dtype(DType.BFLOAT16)
    assert (layer.correction_bias is not None) == family.has_correction_bias
    rms = np.sqrt(np.mean(layer.input.astype(np.float64) ** 2, axis=1))
    np.testing.assert_allclose(rms, 1, atol=0.01)
    # Two tokens share something, as those of a real model do, so experts are not equally liked.
    mean_E = layer.logits.astype(np.float64).mean(axis=0)
    assert mean_E.std() > 0.3


def test_make_layer_is_determined_by_its_seed(tmp_path: Path, layer_file: Path) -> None:
    words = ("make-layer", "--family", "mixtral", "--scale", "0.00390625", "--tokens", 9)
    run(*words, "-o", tmp_path / "same")
    run(*words, "--seed", 1, "-o", tmp_path / "other")
    assert (tmp_path / "same").read_bytes()[-1000:] == layer_file.read_bytes()[-1000:]
    assert_exact("gate", read_layer(tmp_path / "same").gate, read_layer(layer_file).gate)
    assert (read_layer(tmp_path / "other").gate != read_layer(layer_file).gate).any()


@pytest.mark.parametrize("dtype", ["f16", "bfloat16", "fp32", "float64"])
def test_make_layer_in_every_type(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "layer.safetensors"
    run(
        *("make-layer", "--family", "deepseek_v3", "--scale", "1/512"),
        *("--tokens", 3, "--dtype", dtype, "-o", path),
    )
    layer = read_layer(path)
    assert layer.dtype is ruda.parse_dtype(dtype)
    assert layer.logits_dtype is layer.dtype.compute
    assert layer.correction_bias is not None
    assert dtype_of(layer.correction_bias) is layer.dtype.compute


def test_backward_writes_the_five_gradients(
    tmp_path: Path, layer_file: Path, backend: AnyBackend
) -> None:
    path = tmp_path / "grads.safetensors"
    words = ("backward", layer_file, "--backend", backend.name, "--device", backend.device)
    words = (*words, "--dtype", "f64")
    text = run(*words, "-o", path).stdout
    tensors, metadata = read_tensors(path)
    assert sorted(tensors) == sorted(GRADIENTS)
    layer = cast_layer(read_layer(layer_file), DType.FLOAT64)
    exact = reference_layer(layer, Arithmetic.exact()).grads
    for name in GRADIENTS:
        assert name in text
        assert tensors[name].dtype == np.float64
        np.testing.assert_allclose(tensors[name], getattr(exact, name), rtol=1e-9, atol=1e-12)
    assert metadata["backend"] == backend.name
    assert metadata["backend_version"] == backend.version
    assert metadata["device"] == backend.device
    assert metadata["dtype"] == "float64"
    assert metadata["layer"] == layer_file.name
    assert metadata["ruda_version"] == ruda.__version__
    assert load_options(metadata["options"]) == layer.options


def test_backward_keeps_the_types_of_the_contract(tmp_path: Path, layer_file: Path) -> None:
    run("backward", layer_file, "-o", tmp_path / "grads")
    tensors, _ = read_tensors(tmp_path / "grads")
    bfloat16 = numpy_dtype(DType.BFLOAT16)
    wanted = {"input": bfloat16, "logits": bfloat16, "gate": "f4", "up": "f4", "down": "f4"}
    assert {name: tensor.dtype for name, tensor in tensors.items()} == wanted


def test_backward_writes_only_what_is_wanted(tmp_path: Path, layer_file: Path) -> None:
    path = tmp_path / "grads"
    text = run("backward", layer_file, "--gradients", "logits, input", "-o", path).stdout
    assert sorted(read_tensors(path)[0]) == ["input", "logits"]
    assert "gate" not in text


def test_backward_without_an_output_prints(layer_file: Path) -> None:
    before = set(layer_file.parent.iterdir())
    assert "backward" in run("backward", layer_file).stdout
    assert set(layer_file.parent.iterdir()) == before


def test_forward(tmp_path: Path, layer_file: Path) -> None:
    run("forward", layer_file, "--dtype", "f64", "-o", tmp_path / "out")
    tensors, metadata = read_tensors(tmp_path / "out")
    exact = reference_layer(cast_layer(read_layer(layer_file), DType.FLOAT64), Arithmetic.exact())
    assert sorted(tensors) == ["expert_ids", "output", "weights"]
    assert_exact("expert_ids", tensors["expert_ids"], exact.expert_ids)
    np.testing.assert_allclose(tensors["output"], exact.output, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(tensors["weights"], exact.weights, rtol=1e-12)
    assert metadata["backend"] == "numpy"


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tmp_path: Path, tokens: int) -> None:
    path, report = tmp_path / "layer", tmp_path / "report.json"
    words = ("--family", "olmoe", "--scale", "1/256", "--tokens", tokens, "-o", path)
    run("make-layer", *words)
    run("forward", path)
    run("backward", path)
    run("parity", path, "--backends", "numpy", "--json", report, "--plot", tmp_path / "p.png")
    made = json.loads(report.read_text())
    assert sum(made["load"]) == 8 * tokens


def test_parity(tmp_path: Path, layer_file: Path) -> None:
    plot, report = tmp_path / "parity.png", tmp_path / "parity.json"
    text = run("parity", layer_file, "--plot", plot, "--json", report).stdout
    assert "verdict: passed" in text
    assert plot.read_bytes().startswith(b"\x89PNG\r\n")
    made = json.loads(report.read_text())
    assert made["passed"] is True
    assert made["selections_agree"] is True
    assert sum(made["load"]) == made["tokens"] * made["top_k"] == 18
    present = {name for name, found in ruda.available_backends().items() if found}
    assert {backend["name"] for backend in made["backends"]} == present
    assert set(made["absent"]) == set(ruda.known_backends()) - present
    for backend in made["backends"]:
        assert backend["passed"] is True
        assert backend["differing_tokens"] == 0
        assert list(backend["tensors"]) == ["output", *GRADIENTS]
        for tensor in backend["tensors"].values():
            assert tensor["relative_frobenius"] <= tensor["allowed_frobenius"]
            assert tensor["error_ulp"] <= tensor["allowed_ulp"]
            assert tensor["max_ulp"] is not None
    for reason in made["absent"].values():
        assert reason.split("\n")[0][:60] in text


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32", "f64"])
def test_parity_in_every_type(tmp_path: Path, layer_file: Path, dtype: str) -> None:
    report = tmp_path / "parity.json"
    run("parity", layer_file, "--backends", "numpy", "--dtype", dtype, "--json", report)
    made = json.loads(report.read_text())
    assert made["dtype"] == ruda.parse_dtype(dtype).value
    assert [backend["name"] for backend in made["backends"]] == ["numpy"]
    assert made["absent"] == {}


def test_parity_takes_a_device_with_the_name(layer_file: Path) -> None:
    assert "numpy" in run("parity", layer_file, "--backends", "numpy:cpu").stdout


@pytest.mark.parametrize("suffix", ["svg", "pdf"])
def test_parity_draws_other_formats(tmp_path: Path, layer_file: Path, suffix: str) -> None:
    path = tmp_path / f"parity.{suffix}"
    run("parity", layer_file, "--backends", "numpy", "--plot", path)
    assert path.stat().st_size > 5000


def test_outputs_are_replaced(tmp_path: Path, layer_file: Path) -> None:
    path = tmp_path / "grads"
    path.write_text("old")
    path.chmod(0o640)
    run("backward", layer_file, "--gradients", "input", "-o", path)
    assert list(read_tensors(path)[0]) == ["input"]
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_fuzz(tmp_path: Path) -> None:
    words = ("fuzz", "--backends", "numpy", "--rounds", 1, "--seed", 3, "-o", tmp_path)
    text = run(*words).stdout
    assert "numpy, seed 3: 100 examples passed" in text
    assert "verdict: passed, 100 examples" in text
    assert not list(tmp_path.iterdir())


def test_fuzz_saves_what_fails(tmp_path: Path) -> None:
    class Swapped(NumpyBackend):
        """Gate and up exchanged."""

        name = "swapped"

        def swiglu(self, gate_output: Any, up_output: Any, /) -> Any:
            return super().swiglu(up_output, gate_output)

    ruda.register_backend("swapped", Swapped)
    words = ("fuzz", "--backends", "swapped", "--rounds", 1, "-o", tmp_path)
    text = run(*words, status=1).stdout
    assert "swapped gets this wrong: branch:" in text
    path = tmp_path / "fuzz-swapped-0.safetensors"
    layer = read_layer(path)
    assert (layer.tokens, layer.input.shape) == (1, (1, 1))
    assert "FAILED" in run("parity", path, "--backends", "swapped", status=1).stdout
    assert "passed" in run("parity", path, "--backends", "numpy").stdout
    # The code it prints shows the fault.
    code = text.split("ready to paste:")[1].split("print(specimen.layer())")[0]
    assert 'ruda.get_backend("swapped")' in code


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--minutes", 0), "--minutes: expected a number above 0, got 0"),
        (("--backends", "numpy,numpy"), "--backends: expected each once, got numpy, numpy"),
        (("-o", "nowhere/at/all"), "nowhere/at/all"),
    ],
)
def test_fuzz_refuses(words: tuple[object, ...], said: str) -> None:
    assert said in run("fuzz", "--backends", "numpy", *words, status=2).output
