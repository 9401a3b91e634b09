"""On a machine with a GPU: the whole suite on CuPy and PyTorch CUDA, then parity and timings.

Run by `make gpu-check` with the python3 found there; installs nothing, says what is missing, and
stays under four minutes. `--backends numpy,torch` runs the same script where there is no GPU.
Exit status 1 if a test or a verdict fails, or if no backend asked for could run.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NEEDED = ("numpy", "ml_dtypes", "pytest", "hypothesis")
WELCOME = ("torch", "cupy", "array-api-strict", "pytest-xdist", "transformers")
TOOLS = ("typer", "rich", "safetensors", "matplotlib")
SUITE_SECONDS = 150
# Tests of the command and of the two type checkers need packages a GPU machine may lack.
OTHER_PACKAGES = {"tests/unit/test_cli*.py": TOOLS, "tests/typing": ("mypy", "pyright")}
TIMED = (4096, 2048, 1024, 32, 4)  # tokens, hidden, intermediate, experts, top_k


def installed(name: str) -> str | None:
    """A distribution's version; CuPy's wheels are named after the CUDA they are built for."""
    names = (name, "cupy-cuda12x", "cupy-cuda13x") if name == "cupy" else (name,)
    for one in names:
        try:
            return importlib.metadata.version(one)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def show_packages() -> bool:
    """What is here and what is not; False if the script cannot go on."""
    print(f"python {sys.version.split()[0]}")
    for name in (*NEEDED, *WELCOME, *TOOLS):
        print(f"  {name:18} {installed(name) or 'missing'}")
    missing = [name for name in NEEDED if installed(name) is None]
    if missing:
        print(f"cannot run without {', '.join(missing)}")
    return not missing


def present(specs: list[str]) -> list[str]:
    """The backends that can be used, with the reason for each that cannot."""
    import ruda

    usable: list[str] = []
    for spec in specs:
        name, _, device = spec.partition(":")
        try:
            backend = ruda.get_backend(name, device=device or None)
        except ruda.MoeError as error:
            print(f"{spec}: cannot run: {error}")
        else:
            print(f"{spec}: {backend.version} on {backend.device}")
            usable.append(spec)
    return usable


def run_suite(specs: list[str]) -> bool:
    """The test suite, in a process of its own with a limit in time."""
    command = [sys.executable, "-m", "pytest", "tests", "-q", "-p", "no:cacheprovider"]
    command += ["--backends", ",".join(specs)]
    if installed("pytest-xdist"):
        command += ["-n", str(min(8, os.cpu_count() or 1))]
    for path, packages in OTHER_PACKAGES.items():
        absent = [name for name in packages if installed(name) is None]
        if absent:
            print(f"not run: {path}, for want of {', '.join(absent)}")
            command.append(f"--ignore-glob={path}" if "*" in path else f"--ignore={path}")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    print(" ".join(command[1:]), flush=True)
    try:
        return (
            subprocess.run(
                command, cwd=ROOT, env=environment, timeout=SUITE_SECONDS, check=False
            ).returncode
            == 0
        )
    except subprocess.TimeoutExpired:
        print(f"the suite did not end within {SUITE_SECONDS} s")
        return False


def open_backend(spec: str) -> Any:
    """A backend by name, or name:device."""
    import ruda

    name, _, device = spec.partition(":")
    return ruda.get_backend(name, device=device or None)


def show_parity(specs: list[str]) -> bool:
    """Relative Frobenius error of every tensor against the float64 reference, in every type."""
    import ruda
    from ruda.testing.envelope import references
    from ruda.testing.layers import random_layer
    from ruda.testing.reference import reference_selection
    from ruda.testing.tolerance import compare

    options = ruda.MoeOptions(
        selection=ruda.SoftmaxSelection(4),
        weights=ruda.RouterWeightOptions(ruda.RouterScoring.SOFTMAX, renormalize=True),
    )
    names = ("output", "input", "logits", "gate", "up", "down")
    print(f"\n{'parity':22}" + "".join(f"{name:>11}" for name in names))
    passed = True
    for dtype in ruda.DType:
        layer = random_layer(
            tokens=64, hidden=128, intermediate=96, experts=16, options=options, dtype=dtype, seed=0
        )
        ids = reference_selection(layer.logits, None, options.selection)
        exact, plain = references(layer, ids)
        for spec in specs:
            backend = open_backend(spec)
            if dtype not in backend.dtypes:
                print(f"{spec:12}{dtype:10} not served")
                continue
            operands = (layer.input, layer.logits, layer.gate, layer.up, layer.down)
            tensors = [backend.from_numpy(array) for array in operands]
            output, state = ruda.moe_forward(*tensors, options=options, backend=backend)
            gradients = ruda.moe_backward(state, backend.from_numpy(layer.grad_output))
            cells: list[str] = []
            for name, tensor in {"output": output, **gradients.asdict()}.items():
                array = backend.to_numpy(tensor)
                kind = ruda.DType(array.dtype.name)
                verdict = compare(name, array, exact[name], plain[name], kind)
                passed &= verdict.passed
                cells.append(f"{verdict.relative_frobenius:.1e}{' ' if verdict.passed else '!'}")
            same = (backend.to_numpy(ruda.moe_route_indices(state)) == ids).all()
            passed &= bool(same)
            row = "".join(f"{cell:>11}" for cell in cells)
            print(f"{spec:12}{dtype:10}{row}{'' if same else '  other experts chosen!'}")
    print("every verdict passed" if passed else "a verdict marked ! failed")
    return passed


def median_ms(backend: Any, work: Any) -> float:
    """Median of seven runs, each waited for."""
    times: list[float] = []
    for _ in range(9):
        backend.synchronize()
        start = time.perf_counter()
        work()
        backend.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[2:])


def show_timings(specs: list[str], *, small: bool) -> None:
    """Forward and backward beside a floor: as many multiplications in plain square-ish products."""
    import numpy as np

    import ruda

    tokens, hidden, intermediate, experts, top_k = (n // 4 if small else n for n in TIMED)
    top_k = TIMED[4]
    print(f"\ntimings, T={tokens} H={hidden} I={intermediate} E={experts} k={top_k}, median ms")
    print(f"{'':22}{'forward':>10}{'backward':>10}{'floor':>10}{'ratio':>8}")
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return (rng.standard_normal(shape) * 0.05).astype(np.float32)

    options = ruda.MoeOptions(
        selection=ruda.SoftmaxSelection(top_k),
        weights=ruda.RouterWeightOptions(ruda.RouterScoring.SOFTMAX, renormalize=True),
    )

    arrays = [
        normal(tokens, hidden),
        normal(tokens, experts),
        normal(experts, intermediate, hidden),
        normal(experts, intermediate, hidden),
        normal(experts, hidden, intermediate),
        normal(tokens, hidden),
    ]
    for spec in specs:
        backend = open_backend(spec)
        for dtype in (ruda.DType.FLOAT32, ruda.DType.BFLOAT16):
            if dtype not in backend.dtypes:
                continue
            *operands, upstream = (backend.cast(backend.from_numpy(a), dtype) for a in arrays)
            _, state = ruda.moe_forward(*operands, options=options, backend=backend)
            rows, wide = (
                backend.from_numpy(a)
                for a in (normal(tokens * top_k, hidden), normal(hidden, intermediate))
            )
            forward = median_ms(
                backend,
                lambda o=operands, b=backend: ruda.moe_forward(*o, options=options, backend=b),
            )
            backward = median_ms(backend, lambda s=state, g=upstream: ruda.moe_backward(s, g))
            # Three products forward and six backward, each of rows by hidden by intermediate.
            floor = 9 * median_ms(backend, lambda b=backend, r=rows, w=wide: b.matmul(r, w))
            ratio = (forward + backward) / floor
            print(
                f"{spec:12}{dtype:10}{forward:10.2f}{backward:10.2f}{floor:10.2f}{ratio:8.2f}",
                flush=True,
            )
    print("floor: nine float32 products of all rows with one expert's matrix, no routing")


def main() -> int:
    """Everything, in order."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backends", default="cupy,torch:cuda:0")
    parser.add_argument("--small", action="store_true", help="timings at a quarter of the size")
    parser.add_argument("--no-suite", action="store_true", help="parity and timings alone")
    arguments = parser.parse_args()
    if not show_packages():
        return 1
    specs = present(arguments.backends.split(","))
    if not specs:
        print("no backend to check")
        return 1
    passed = arguments.no_suite or run_suite(specs)
    passed = show_parity(specs) and passed
    show_timings(specs, small=arguments.small)
    return 0 if passed and specs == arguments.backends.split(",") else 1


if __name__ == "__main__":
    sys.exit(main())
