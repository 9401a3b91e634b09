"""`make gpu-check`: on a machine with a GPU, whether `ruda` works there, and how fast.

For a machine where nothing can be installed: it uses the python3 that runs it, says what that one
lacks, and goes on without. Three parts, each a process with a time limit, under four minutes
altogether: the test suite on CuPy and on PyTorch CUDA; parity with the float64 reference; forward
and backward beside a floor, the same expert products alone. Plain text; the exit status is 0 if
all went well.

    python3 benchmarks/gpu_check.py
    python3 benchmarks/gpu_check.py --cpu             the script itself, without a GPU
    python3 benchmarks/gpu_check.py --parts parity,timing --backends torch:cuda:0
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import importlib.util
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PATHS = [str(ROOT), str(ROOT / "backends"), str(ROOT / "tests" / "support")]
sys.path[:0] = PATHS

PARTS = ("tests", "parity", "timing")
# What a part may take at most, in seconds; the tests get what the others leave.
RESERVED = {"parity": 40, "timing": 40}
NEEDED = {
    "numpy": "everything",
    "ml_dtypes": "bfloat16 on CuPy and NumPy, parity",
    "torch": "PyTorch",
    "cupy": "CuPy",
    "pytest": "the tests",
    "xdist": "tests in several processes (slower without)",
    "array_api_strict": "the test of docs/write-a-backend.md",
    "transformers": "tests against the blocks of transformers",
    "typer": "tests of the command",
    "rich": "tests of the command",
    "safetensors": "tests of the command and of layer files",
    "cattrs": "tests of the command and of layer files",
    "psutil": "tests of the command",
}


@dataclass(frozen=True)
class Size:
    """A layer: tokens, experts, slots a token, hidden and intermediate width."""

    tokens: int
    experts: int
    slots: int
    hidden: int
    intermediate: int

    def __str__(self) -> str:
        return (
            f"T={self.tokens} E={self.experts} k={self.slots} H={self.hidden} I={self.intermediate}"
        )


PARITY = Size(48, 8, 3, 64, 48)
TIMING = Size(4096, 32, 8, 2048, 768)  # a Qwen3-MoE layer with a quarter of its experts
TIMING_CPU = Size(256, 8, 2, 256, 96)


def main() -> int:
    """Run the parts asked for; the number of those that failed."""
    arguments = _arguments()
    if arguments.inside:
        return {"parity": parity, "timing": timing}[arguments.inside](arguments)
    started = time.monotonic()
    report_versions()
    failed = report_backends(arguments)
    parts = [part for part in PARTS if part in arguments.parts.split(",")]
    for part in parts:
        left = arguments.budget - (time.monotonic() - started)
        later = sum(RESERVED.get(other, 0) for other in parts[parts.index(part) + 1 :])
        limit = min(left - later, RESERVED.get(part, left))
        print(f"\n=== {part} (at most {max(limit, 0):.0f} s)", flush=True)
        if limit <= 0:
            print("not run: no time left")
            failed.append(part)
        elif not run_part(part, limit, arguments):
            failed.append(part)
    print(f"\n=== {time.monotonic() - started:.0f} s", end="")
    print(f"; FAILED: {', '.join(failed)}" if failed else "; all passed")
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="See the top of this file.")
    parser.add_argument("--cpu", action="store_true", help="no GPU: NumPy and PyTorch, small sizes")
    parser.add_argument("--backends", help="names, or name:device, separated by commas")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--budget", type=float, default=225.0, help="seconds, all together")
    parser.add_argument("--tests", default="tests", help="what pytest is given")
    parser.add_argument("--inside", choices=("parity", "timing"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.backends is None:
        arguments.backends = "numpy,torch" if arguments.cpu else "cupy,torch:cuda:0"
    return arguments


def report_versions() -> None:
    """What there is, and what cannot run because something is not there."""
    print(f"Python {sys.version.split()[0]} at {sys.executable}")
    for module, what in NEEDED.items():
        if importlib.util.find_spec(module) is None:
            print(f"  {module:18} missing; without it: no {what}")
        else:
            print(f"  {module:18} {_version(module)}")
    try:
        query = [
            "nvidia-smi",
            "--query-gpu=name,memory.total,driver_version",
            "--format=csv,noheader",
        ]
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        print("  GPU                " + "; ".join(done.stdout.strip().splitlines()))
    except (OSError, subprocess.SubprocessError) as error:
        print(f"  GPU                nvidia-smi says nothing ({type(error).__name__})")


def _version(module: str) -> str:
    distributions = importlib.metadata.packages_distributions().get(module, [module])
    for name in distributions:
        try:
            return f"{importlib.metadata.version(name)} ({name})"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of unknown version"


def report_backends(arguments: argparse.Namespace) -> list[str]:
    """Which backends work; the names of those that do not."""
    failed: list[str] = []
    for spec in arguments.backends.split(","):
        try:
            backend = _open(spec)
            print(f"  backend {spec:14} {backend.version}, {', '.join(sorted(backend.dtypes))}")
        except Exception as error:  # any way a framework fails is worth its own line
            print(f"  backend {spec:14} UNAVAILABLE: {error}")
            failed.append(f"backend {spec}")
    return failed


def _open(spec: str) -> Any:
    import ruda

    name, _, device = spec.partition(":")
    if name == "cupy-stand-in" and name not in ruda.known_backends():
        ruda.register_backend(name, "cupy_stand_in:CupyStandIn")
    return ruda.get_backend(name, device=device or None)


def _opened(arguments: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """The backends that work; the others have been reported."""
    for spec in arguments.backends.split(","):
        try:
            yield spec, _open(spec)
        except Exception as error:
            print(f"{spec}: skipped, {error}")


def run_part(part: str, limit: float, arguments: argparse.Namespace) -> bool:
    """Run a part in a process of its own; whether it went well."""
    if part == "tests":
        command = _pytest_command(arguments)
        if command is None:
            return False
    else:
        command = [sys.executable, str(Path(__file__).resolve()), "--inside", part]
        command += ["--backends", arguments.backends] + (["--cpu"] if arguments.cpu else [])
    inherited = os.environ.get("PYTHONPATH")
    paths = os.pathsep.join([*PATHS[:2], *([inherited] if inherited else [])])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        return process.wait(timeout=limit) == 0
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its session is its own: pytest's workers go too
        process.wait()
        print(f"\nstopped: {part} took more than {limit:.0f} s")
        return False


def _pytest_command(arguments: argparse.Namespace) -> list[str] | None:
    if importlib.util.find_spec("pytest") is None:
        print("not run: no pytest")
        return None
    # The types are the linters' business, and look the same on every machine.
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]
    command += ["--backends", arguments.backends, "--ignore=tests/typing"]
    # Warnings of this machine's versions of other packages are shown, not failures.
    command += ["-W", "default", "--continue-on-collection-errors", "--maxfail=50"]
    if importlib.util.find_spec("xdist") is not None:
        workers = max(1, min(8, (os.cpu_count() or 2) // 2))
        command += ["-n", str(workers)]
    for path, missing in _cannot_run():
        print(f"not run: {path} needs {missing}")
        command.append(f"--ignore={path}")
    return [*command, *arguments.tests.split()]


def _cannot_run() -> Iterator[tuple[str, str]]:
    """Test files that import, at their top, what is not there."""
    local = {path.stem for path in (ROOT / "tests").rglob("*.py")}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        wanted: set[str] = set()
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Import):
                wanted |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                wanted.add(node.module.partition(".")[0])
        missing = {name for name in wanted - local if importlib.util.find_spec(name) is None}
        if missing:
            yield str(path.relative_to(ROOT)), ", ".join(sorted(missing))


def _layer(size: Size, dtype: Any) -> Any:
    import ruda
    from ruda.testing.layers import random_layer

    return random_layer(
        tokens=size.tokens,
        hidden=size.hidden,
        intermediate=size.intermediate,
        experts=size.experts,
        options=ruda.MoeOptions(
            selection=ruda.SoftmaxSelection(size.slots),
            weights=ruda.RouterWeightOptions(ruda.RouterScoring.SOFTMAX, renormalize=True),
        ),
        dtype=dtype,
        logits_dtype=ruda.DType.FLOAT32 if dtype.itemsize == 2 else dtype,
        seed=0,
    )


def parity(arguments: argparse.Namespace) -> int:
    """The relative Frobenius error of each result, and whether the tolerance rule allows it."""
    import ruda
    from ruda.base.strategies import CombineGradientStrategy, Request
    from ruda.testing.reference.expected import expect
    from ruda.testing.run import on_host, place_layer
    from ruda.testing.verdict import judge

    names = ("output", "input", "logits", "gate", "up", "down")
    print(f"{PARITY}; relative Frobenius error against the float64 reference, ! is over what is")
    print(f"allowed\n{'':38}" + "".join(f"{name:>11}" for name in names))
    backends = list(_opened(arguments))
    over = 0 if backends else 1
    for dtype in ruda.DType:
        layer = _layer(PARITY, dtype)
        expected = expect(layer)
        for spec, backend in backends:
            if dtype not in backend.dtypes:
                print(f"{spec:18}{dtype:10} it has no {dtype}")
                continue
            for strategy in CombineGradientStrategy:
                if backend.unsupported(Request(strategy=strategy, dtype=dtype)) is not None:
                    continue
                options = replace(layer.options, combine_backward=strategy)
                on = replace(place_layer(backend, layer), options=options)
                output, state = on.forward()
                gradients = ruda.moe_backward(state, on.grad_output).asdict()
                ids = ruda.moe_route_indices(state)
                verdicts = judge(
                    expected,
                    on_host(backend, {"expert_ids": ids, "output": output, **gradients}),
                )
                over += any(not verdict.passed for verdict in verdicts)
                cells = "".join(
                    f"{one.relative_frobenius:10.2e}{' ' if one.passed else '!'}"
                    for one in verdicts
                )
                # With other experts chosen, that is all there is to say.
                note = "" if len(verdicts) > 1 else f"  {verdicts[0]}"
                print(f"{spec:18}{dtype:10}{strategy.name:10}{cells}{note}", flush=True)
    return 1 if over else 0


def timing(arguments: argparse.Namespace) -> int:
    """Median milliseconds of forward and backward, and over the same products alone."""
    import ruda

    size = TIMING_CPU if arguments.cpu else TIMING
    wanted = (ruda.DType.FLOAT32,) if arguments.cpu else (ruda.DType.BFLOAT16, ruda.DType.FLOAT32)
    print(
        f"{size}; median milliseconds; the floor: the expert products alone, in the storage type,"
    )
    print("3 a row forward and 6 backward, so a ratio is what all the rest costs")
    header = ("forward", "floor", "ratio", "backward", "floor", "ratio")
    print(f"{'':28}" + "".join(f"{name:>10}" for name in header))
    backends = list(_opened(arguments))
    for dtype in wanted:
        layer = _layer(size, dtype)
        for spec, backend in backends:
            if dtype not in backend.dtypes:
                continue
            cells = _timed(backend, layer)
            print(f"{spec:18}{dtype:10}{cells}", flush=True)
    return 0 if backends else 1


def _timed(backend: Any, layer: Any) -> str:
    import ruda
    from ruda.testing.run import place_layer

    on = place_layer(backend, layer)
    _, state = on.forward()
    ahead = _median(backend, on.forward)
    back = _median(backend, lambda: ruda.moe_backward(state, on.grad_output))
    try:
        products = _products(backend, state, list(on.tensors.values()), on.grad_output)
        floors = [_median(backend, product) for product in products]
    except Exception as error:  # a framework without this product has no floor, and a time still
        print(f"  no floor: {type(error).__name__}: {error}")
        floors = [float("nan")] * 2
    cells = ((ahead, floors[0]), (back, floors[1]))
    return "".join(f"{took:10.2f}{floor:10.2f}{took / floor:10.2f}" for took, floor in cells)


def _products(
    backend: Any, state: Any, operands: list[Any], grad_output: Any
) -> list[Callable[[], None]]:
    """The expert products of a forward and of a backward pass, nothing else."""
    from ruda.stages.dispatch import row_tokens
    from ruda.stages.products import segments

    layout = state.experts.layout
    input, _, gate, up, down = operands
    with backend.numerics():
        tokens = row_tokens(backend, layout)
        x, dout = backend.take_rows(input, tokens), backend.take_rows(grad_output, tokens)
        every = segments(backend, layout.expert_offsets)
        rows = [(expert, start, stop) for expert, start, stop in every if start < stop]
        a = backend.take_rows(gate[0].T, tokens * 0)  # of the right shape; values do not matter

    def forward() -> None:
        with backend.numerics():
            for expert, start, stop in rows:
                x[start:stop] @ gate[expert].T
                x[start:stop] @ up[expert].T
                a[start:stop] @ down[expert].T

    def backward() -> None:
        with backend.numerics():
            for expert, start, stop in rows:
                dout[start:stop] @ down[expert]
                a[start:stop] @ gate[expert]
                a[start:stop] @ up[expert]
                dout[start:stop].T @ a[start:stop]
                a[start:stop].T @ x[start:stop]
                a[start:stop].T @ x[start:stop]

    return [forward, backward]


def _median(backend: Any, call: Callable[[], Any], *, repeats: int = 7) -> float:
    times: list[float] = []
    for number in range(repeats + 2):
        backend.synchronize()
        before = time.perf_counter()
        call()
        backend.synchronize()
        if number >= 2:
            times.append(1000 * (time.perf_counter() - before))
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())
