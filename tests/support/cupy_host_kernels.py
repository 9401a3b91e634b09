"""The CuPy backend's device kernels, compiled for the CPU by a host C++ compiler.

The very same source text: a shim gives the words of CUDA a meaning on the host. Blocks and threads
are loops; the lanes of a plane are fibers that change at every shuffle, so `__shfl_down_sync` is
emulated too. What this cannot show is what a GPU adds: its own `exp`, its scheduling, its memory.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ruda_backend_cupy.source import Kernel, every_kernel, read

FLAGS = ("-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-w")

SHIM = r"""
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>
#include <ucontext.h>
#ifdef __SSE2__
#include <xmmintrin.h>
#endif

struct Index { unsigned x; };
static thread_local Index threadIdx, blockIdx, blockDim, gridDim;
#define __device__
#define KERNEL static void

static inline unsigned __float_as_uint(float x) { unsigned b; std::memcpy(&b, &x, 4); return b; }
static inline float __uint_as_float(unsigned b) { float x; std::memcpy(&x, &b, 4); return x; }
static inline long long __double_as_longlong(double x) {
    long long b; std::memcpy(&b, &x, 8); return b;
}

struct Plane {
    ucontext_t scheduler, lanes[32];
    bool done[32];
    unsigned base, current;
    double values[32];
};
static thread_local Plane *plane;

static inline void change_lane() {
    swapcontext(&plane->lanes[plane->current], &plane->scheduler);
}

template <class T> static inline T __shfl_down_sync(unsigned, T value, unsigned distance) {
    unsigned lane = plane->current;
    plane->values[lane] = value;
    change_lane();  // every lane has written
    T other = (T)plane->values[lane + distance < 32 ? lane + distance : lane];
    change_lane();  // every lane has read
    return other;
}

struct Call { void (*run)(void *, void **); void *kernel; void **arguments; };
static thread_local Call *call;

static void lane_body() {
    call->run(call->kernel, call->arguments);
    plane->done[plane->current] = true;
}

static void run_block_by_planes(unsigned threads) {
    static thread_local std::vector<char> stacks(32 * 65536);
    Plane now;
    plane = &now;
    for (now.base = 0; now.base < threads; now.base += 32) {
        for (unsigned lane = 0; lane < 32; ++lane) {
            now.done[lane] = false;
            getcontext(&now.lanes[lane]);
            now.lanes[lane].uc_stack.ss_sp = &stacks[lane * 65536];
            now.lanes[lane].uc_stack.ss_size = 65536;
            now.lanes[lane].uc_link = &now.scheduler;
            makecontext(&now.lanes[lane], lane_body, 0);
        }
        for (bool alive = true; alive;) {
            alive = false;
            for (now.current = 0; now.current < 32; ++now.current) {
                if (now.done[now.current]) continue;
                threadIdx.x = now.base + now.current;
                swapcontext(&now.scheduler, &now.lanes[now.current]);
                alive = alive || !now.done[now.current];
            }
        }
    }
    plane = nullptr;
}

template <class... A, std::size_t... N>
static void apply(void (*kernel)(A...), void **arguments, std::index_sequence<N...>) {
    kernel(*static_cast<A *>(arguments[N])...);
}

template <class... A>
static void launch(
    void (*kernel)(A...), unsigned blocks, unsigned threads, int planes, void **arguments) {
    Call now = {
        [](void *k, void **a) {
            apply(reinterpret_cast<void (*)(A...)>(k), a, std::index_sequence_for<A...>{});
        },
        reinterpret_cast<void *>(kernel), arguments};
    call = &now;
    gridDim.x = blocks;
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
        if (planes) {
            run_block_by_planes(threads);
            continue;
        }
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x)
            now.run(now.kernel, arguments);
    }
}
"""

# For tests that want the written bodies to use the kernels' own exponential.
EXPONENTIALS = r"""
extern "C" int flush_subnormals(int on) {  // 1 if this processor can
#ifdef __SSE2__
    _mm_setcsr(on ? _mm_getcsr() | 0x8040u : _mm_getcsr() & ~0x8040u);
    return 1;
#else
    return 0;
#endif
}
extern "C" void exponential_float32(const float *x, float *y, i64 size) {
    for (i64 i = 0; i < size; ++i) y[i] = expf(x[i]);
}
extern "C" void exponential_float64(const double *x, double *y, i64 size) {
    for (i64 i = 0; i < size; ++i) y[i] = exp(x[i]);
}
extern "C" void round_to_bfloat16(const double *x, bfloat16 *y, i64 size) {
    for (i64 i = 0; i < size; ++i) narrow(x[i], y[i]);
}
extern "C" void round_to_float16(const double *x, float16 *y, i64 size) {
    for (i64 i = 0; i < size; ++i) narrow(x[i], y[i]);
}
extern "C" void round_float_to_bfloat16(const float *x, bfloat16 *y, i64 size) {
    for (i64 i = 0; i < size; ++i) narrow(x[i], y[i]);
}
extern "C" void round_float_to_float16(const float *x, float16 *y, i64 size) {
    for (i64 i = 0; i < size; ++i) narrow(x[i], y[i]);
}
extern "C" void widen_bfloat16(const bfloat16 *x, float *y, i64 size) {
    for (i64 i = 0; i < size; ++i) y[i] = widen(x[i]);
}
extern "C" void widen_float16(const float16 *x, float *y, i64 size) {
    for (i64 i = 0; i < size; ++i) y[i] = widen(x[i]);
}
"""


def compiler() -> str | None:
    """The host's C++ compiler; `None` where there is none, or no fibers to emulate a plane with."""
    if not sys.platform.startswith("linux"):
        return None
    names = (os.environ.get("CXX", ""), "g++", "c++", "clang++")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def _mangled(kernel: Kernel) -> str:
    return "_".join([kernel.name, *(f"{name}_{dtype}" for name, dtype in kernel.types)])


def _program(kernels: tuple[Kernel, ...]) -> str:
    families: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        families.setdefault(kernel.body, []).append(kernel)
    parts = [SHIM, read("storage.cuh"), EXPONENTIALS]
    for number, (body, members) in enumerate(families.items()):
        parts.append(f"namespace family_{number} {{\n{body}\n}}\n")
        for kernel in members:
            parts.append(
                f'extern "C" void {_mangled(kernel)}(unsigned blocks, unsigned threads, '
                "int planes, void **arguments) {\n"
                f"    launch(family_{number}::{kernel.name}, blocks, threads, planes, arguments);\n"
                "}\n"
            )
    return "".join(parts)


@cache
def library(kernels: tuple[Kernel, ...] = tuple(every_kernel())) -> ctypes.CDLL:
    """The compiled kernels; kept between runs under the hash of everything that made them."""
    program, tool = compiler_and_program(kernels)
    digest = hashlib.sha256("\0".join([tool, *FLAGS, program]).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"ruda-host-kernels-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    result = folder / f"{digest}.so"
    if not result.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            text, built = Path(scratch) / "kernels.cpp", Path(scratch) / "kernels.so"
            text.write_text(program, encoding="utf-8")
            done = subprocess.run(
                [tool, *FLAGS, "-o", str(built), str(text)], capture_output=True, text=True
            )
            if done.returncode:
                raise RuntimeError(f"{tool} failed:\n{done.stderr}")
            built.replace(result)
    return ctypes.CDLL(str(result))


def compiler_and_program(kernels: tuple[Kernel, ...]) -> tuple[str, str]:
    """What `library` compiles, and with what."""
    tool = compiler()
    if tool is None:
        raise RuntimeError("no host C++ compiler")
    return _program(kernels), tool


def launch(kernel: Kernel, blocks: int, threads: int, /, *arguments: Any) -> None:
    """Run a kernel on NumPy arrays, as `CupyBackend.launch` does on the GPU's."""
    function = _function(kernel)
    values: list[Any] = []
    for argument in arguments:
        if isinstance(argument, int):
            values.append(ctypes.c_longlong(argument))
        else:
            assert isinstance(argument, np.ndarray)
            assert argument.flags.c_contiguous
            values.append(ctypes.c_void_p(argument.ctypes.data))
    pointers = (ctypes.c_void_p * len(values))(
        *(ctypes.cast(ctypes.pointer(value), ctypes.c_void_p) for value in values)
    )
    function(blocks, threads, int(kernel.name.endswith("_plane")), pointers)


def call(name: str, *arguments: Any) -> None:
    """Run one of the plain functions of `EXPONENTIALS` on arrays and a size."""
    function = getattr(library(), name)
    function.restype = None
    function(
        *(
            ctypes.c_longlong(one) if isinstance(one, int) else ctypes.c_void_p(one.ctypes.data)
            for one in arguments
        )
    )


@contextmanager
def flushed_subnormals() -> Iterator[bool]:
    """Subnormals are zero in every operation of this thread, as in what CuPy compiles.

    False where the processor cannot. Float64 subnormals go too, which on a GPU they do not.
    """
    able = bool(library().flush_subnormals(1))
    try:
        yield able
    finally:
        library().flush_subnormals(0)


@cache
def _function(kernel: Kernel) -> Any:
    known = kernel in set(every_kernel())
    function = getattr(library() if known else library((kernel,)), _mangled(kernel))
    function.restype = None
    function.argtypes = [ctypes.c_uint, ctypes.c_uint, ctypes.c_int, ctypes.c_void_p]
    return function
