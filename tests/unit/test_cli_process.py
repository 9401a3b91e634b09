"""The `ruda` command as a process: how it starts, fails, and is interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Backends with planted faults; `ruda` runs in a process of its own that knows them.
FAULTY = """
import time
import ruda
from ruda_backend_numpy import NumpyBackend

class Wrong(NumpyBackend):
    name = "wrong"
    def swiglu(self, gate_output, up_output, /):
        return super().swiglu(gate_output, up_output) * 1.01

class OtherExperts(NumpyBackend):
    name = "other"
    def select_experts(self, logits, correction_bias, rule, /):
        return super().select_experts(logits, correction_bias, rule)[:, ::-1].copy()

class Raising(NumpyBackend):
    name = "raising"
    def swiglu(self, gate_output, up_output, /):
        raise RuntimeError("device lost")

class Wavering(NumpyBackend):
    name = "wavering"
    calls = 0
    def combine(self, *args, **options):
        Wavering.calls += 1
        return super().combine(*args, **options) * (1 + 1e-7 * (Wavering.calls % 2))

class Narrow(NumpyBackend):
    name = "narrow"
    dtypes = frozenset({ruda.DType.FLOAT64})

class Slow(NumpyBackend):
    name = "slow"
    def synchronize(self):
        print("running", flush=True)
        time.sleep(60)

for kind in (Wrong, OtherExperts, Raising, Wavering, Narrow, Slow):
    ruda.register_backend(kind.name, kind)

from ruda.cli import main
main()
"""


def environment(*first: Path) -> dict[str, str]:
    path = os.pathsep.join(str(folder) for folder in (*first, ROOT, ROOT / "backends"))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def ruda_process(*words: object, path: tuple[Path, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ruda.cli", *map(str, words)],
        capture_output=True,
        text=True,
        env=environment(*path),
        check=False,
        timeout=120,
    )


def faulty(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", FAULTY, *map(str, words)],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
        timeout=120,
    )


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("layers") / "layer.safetensors"
    words = ("--family", "mixtral", "--scale", "1/256", "--tokens", 9, "--dtype", "f32")
    made = ruda_process("make-layer", *words, "-o", path)
    assert made.returncode == 0, made.stderr
    assert made.stderr == ""
    return path


def test_version_loads_no_array_library() -> None:
    code = (
        "import sys; sys.argv = ['ruda', '--version']\n"
        "from ruda.cli import main\n"
        "try:\n    main()\n"
        "finally:\n    print(sorted({'numpy', 'torch', 'matplotlib'} & set(sys.modules)))"
    )
    made = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True
    )
    version, loaded = made.stdout.splitlines()
    assert version.startswith("ruda ")
    assert loaded == "[]"


def test_parity_in_a_process(layer: Path) -> None:
    made = ruda_process("parity", layer, "--backends", "numpy")
    assert made.returncode == 0, made.stderr
    assert made.stderr == ""
    assert "verdict: passed" in made.stdout
    assert "\x1b" not in made.stdout


def test_parity_without_unicode(layer: Path) -> None:
    made = subprocess.run(
        [sys.executable, "-m", "ruda.cli", "parity", str(layer), "--backends", "numpy"],
        capture_output=True,
        env={**environment(), "PYTHONIOENCODING": "ascii"},
        check=False,
        timeout=120,
    )
    assert made.returncode == 0, made.stderr
    assert b"verdict: passed" in made.stdout.decode("ascii").encode()


@pytest.mark.parametrize(
    ("planted", "message"),
    [
        ("wrong", "grad down: the largest error is over the allowed one"),
        ("other", "selection FAILED, differs for 9 of 9 tokens"),
        ("raising", "FAILED, RuntimeError: device lost"),
        ("wavering", "output: a second run gave other bits"),
    ],
)
def test_a_faulty_backend_fails(tmp_path: Path, layer: Path, planted: str, message: str) -> None:
    report, plot = tmp_path / "r.json", tmp_path / "p.png"
    words = ("--backends", f"numpy,{planted}", "--json", report, "--plot", plot)
    made = faulty("parity", layer, *words)
    assert made.returncode == 1, made.stderr
    assert message in made.stdout
    assert "verdict: FAILED" in made.stdout
    good, bad = json.loads(report.read_text())["backends"]
    assert (good["name"], good["passed"]) == ("numpy", True)
    assert (bad["name"], bad["passed"]) == (planted, False)
    assert plot.stat().st_size > 10_000


def test_other_experts_are_told_apart_from_wrong_numbers(tmp_path: Path, layer: Path) -> None:
    report = tmp_path / "r.json"
    faulty("parity", layer, "--backends", "numpy,other", "--json", report)
    made = json.loads(report.read_text())
    assert not made["selections_agree"]
    assert made["backends"][1]["differing_tokens"] == 9
    assert all(tensor["passed"] for tensor in made["backends"][1]["tensors"].values())


def test_a_backend_without_the_type(tmp_path: Path, layer: Path) -> None:
    made = faulty("parity", layer, "--backends", "numpy,narrow")
    assert made.returncode == 2
    assert made.stderr == "error: backend 'narrow' has no float32\n"
    made = faulty("backward", layer, "--backend", "narrow", "--dtype", "f64")
    assert made.returncode == 0, made.stderr


def test_a_fault_of_the_program(layer: Path) -> None:
    made = faulty("forward", layer, "--backend", "raising")
    assert made.returncode == 3
    assert made.stderr.startswith("error: RuntimeError: device lost")
    assert made.stderr.count("\n") == 1
    made = faulty("forward", layer, "--backend", "raising", "--debug")
    assert made.returncode == 3
    assert "in swiglu" in made.stderr


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted(tmp_path: Path, layer: Path, number: signal.Signals, status: int) -> None:
    output = tmp_path / "grads"
    output.write_text("old")
    words = ("backward", str(layer), "--backend", "slow", "-o", str(output))
    with subprocess.Popen(
        [sys.executable, "-c", FAULTY, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        time.sleep(0.1)
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == status
    assert errors == ""
    assert output.read_text() == "old"
    assert list(tmp_path.iterdir()) == [output]


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_the_packages_of_the_command(tmp_path: Path, package: str) -> None:
    _hide(tmp_path, package)
    made = ruda_process("backends", path=(tmp_path,))
    assert made.returncode == 2
    assert made.stderr == f"error: {package} is not installed; pip install 'ruda[cli]'\n"


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("safetensors", ("backward",)),
        ("ml_dtypes", ("forward",)),
        ("matplotlib", ("parity", "--plot", "p.png")),
    ],
)
def test_without_a_package_of_one_command(
    tmp_path: Path, layer: Path, package: str, words: tuple[str, ...]
) -> None:
    _hide(tmp_path, package)
    made = ruda_process(words[0], layer, *words[1:], path=(tmp_path,))
    assert made.returncode == 2
    assert made.stderr == f"error: {package} is not installed; pip install 'ruda[cli]'\n"


def _hide(folder: Path, package: str) -> None:
    """A module that fails to import as a missing one does."""
    text = f"raise ModuleNotFoundError('No module named {package}', name={package!r})\n"
    (folder / f"{package}.py").write_text(text)


def test_a_closed_pipe_is_no_fault(layer: Path) -> None:
    command = f"{sys.executable} -m ruda.cli parity {layer} --backends numpy | head -n 1"
    made = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, env=environment(), check=False
    )
    assert "Traceback" not in made.stderr
    assert "error" not in made.stderr
