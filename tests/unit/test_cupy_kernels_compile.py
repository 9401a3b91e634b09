"""Every device kernel of the CuPy backend, in every combination of types, compiles with NVRTC.

NVRTC needs no GPU: it makes machine code for an architecture it is told. Skipped where there is no
NVRTC library, which pip brings as `nvidia-cuda-nvrtc-cu12`.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest

from ruda.base.dtypes import DType
from ruda_backend_cupy.source import OPTIONS, Kernel, combine, every_kernel, swiglu, weight_gradient

# What CuPy adds to every kernel it compiles, ours too.
ADDED = ("-ftz=true", "--device-as-default-execution-space")
ARCHITECTURES = ("compute_75", "sm_80", "sm_90")


def _candidates() -> list[str]:
    found: list[str] = []
    package = importlib.util.find_spec("nvidia")
    for root in (package.submodule_search_locations or []) if package else []:
        found += [str(path) for path in sorted(Path(root).glob("*/lib/libnvrtc.so.*"))]
        found += [str(path) for path in sorted(Path(root).glob("*/bin/**/nvrtc64_*.dll"))]
    system = ctypes.util.find_library("nvrtc")
    found += [system] if system else []
    found += [str(path) for path in Path("/usr/local").glob("cuda*/lib64/libnvrtc.so")]
    return [path for path in found if ".alt." not in path]


@cache
def _nvrtc() -> ctypes.CDLL | str:
    """The library, or why there is none."""
    reason = "no NVRTC library found (pip install nvidia-cuda-nvrtc-cu12)"
    for path in _candidates():
        try:
            return ctypes.CDLL(path)
        except OSError as error:
            reason = f"{path} does not load: {error}"
    return reason


@pytest.fixture
def nvrtc() -> ctypes.CDLL:
    library = _nvrtc()
    if isinstance(library, str):
        pytest.skip(library)
    return library


def compiled(nvrtc: ctypes.CDLL, kernel: Kernel, architecture: str) -> tuple[bytes, str]:
    """The PTX or the machine code, and the compiler's log."""
    program = ctypes.c_void_p()
    text = kernel.code.encode()
    assert not nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, b"k.cu", 0, None, None)
    try:
        options = [*OPTIONS, *ADDED, f"--gpu-architecture={architecture}"]
        arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        failed = nvrtc.nvrtcCompileProgram(program, len(options), arguments)
        log = _read(nvrtc, program, "ProgramLog").rstrip(b"\0").decode()
        kind = "CUBIN" if architecture.startswith("sm_") else "PTX"
        return (b"" if failed else _read(nvrtc, program, kind)), log
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _read(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    assert not getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    assert not getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
    return buffer.raw


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "kernel",
    every_kernel(),
    ids=lambda kernel: "-".join([kernel.name, *(dtype for _, dtype in kernel.types)]),
)
def test_compiles_without_a_word(nvrtc: ctypes.CDLL, kernel: Kernel, architecture: str) -> None:
    code, log = compiled(nvrtc, kernel, architecture)
    assert code, log
    assert not log.strip()
    if architecture.startswith("compute_"):
        assert f".entry {kernel.name}(" in code.decode()


@pytest.mark.parametrize(
    "kernel",
    [kernel for kernel in every_kernel() if kernel.family != "swiglu"],
    ids=lambda kernel: "-".join([kernel.name, *(dtype for _, dtype in kernel.types)]),
)
def test_no_product_is_fused_with_a_sum(nvrtc: ctypes.CDLL, kernel: Kernel) -> None:
    """Nor may the driver fuse one later: it leaves alone what says `.rn`."""
    ptx = compiled(nvrtc, kernel, "compute_75")[0].decode()
    assert not re.findall(r"\bfma\.\S+f\d\d", ptx)
    assert not re.findall(r"\b(?:mul|add|sub)\.(?:ftz\.)?f\d\d", ptx)


def test_the_check_above_finds_a_fused_product(
    nvrtc: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused = tuple(option for option in OPTIONS if "fmad" not in option)
    monkeypatch.setitem(compiled.__globals__, "OPTIONS", fused)
    kernel = weight_gradient(DType.FLOAT32, DType.FLOAT32, plane=False)
    assert "fma.rn.ftz.f32" in compiled(nvrtc, kernel, "compute_75")[0].decode()


def test_swiglu_fuses_only_inside_the_exponential(nvrtc: ctypes.CDLL) -> None:
    """The one function that is not ours: its own fused steps are written as such."""
    kernel = swiglu(DType.FLOAT32)
    ptx = compiled(nvrtc, kernel, "compute_75")[0].decode()
    assert not re.findall(r"\b(?:mul|add|sub)\.(?:ftz\.)?f\d\d", ptx)


def test_indices_are_64_bit(nvrtc: ctypes.CDLL) -> None:
    """56000 tokens of 8 slots and 7168 columns pass 2^31 (case 088)."""
    kernel = combine(DType.BFLOAT16, DType.FLOAT32, DType.BFLOAT16)
    ptx = compiled(nvrtc, kernel, "compute_75")[0].decode()
    signature = ptx.partition(".entry combine(")[2].partition(")")[0]
    assert signature.count(".param .u64") == 8
    assert ".param .u32" not in signature
