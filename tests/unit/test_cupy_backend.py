"""What can be said of the CuPy backend without a GPU: its words, its manners, its fallbacks."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

import ruda
from ruda.backend import array_api
from ruda.backend.registry import AnyBackend
from ruda.base.strategies import CombineGradientStrategy, ExpertStrategy, Request
from ruda_backend_cupy import operations

ROOT = Path(__file__).parents[2]
ENVIRONMENT_PATH = [str(ROOT), str(ROOT / "backends"), str(ROOT / "tests" / "support")]


def _calls() -> Iterator[tuple[str, str, frozenset[str]]]:
    """Where, which name of the namespace, and with which keywords: all that CuPy's methods say."""
    for module in (array_api, operations):
        for kind in ast.parse(inspect.getsource(module)).body:
            if not isinstance(kind, ast.ClassDef):
                continue
            for method in kind.body:
                if not isinstance(method, ast.FunctionDef):
                    continue
                used = getattr(operations.CupyOperations, method.name)
                if getattr(used, "__qualname__", "").partition(".")[0] != kind.name:
                    continue  # overridden: CuPy never runs it
                for node in ast.walk(method):
                    if isinstance(node, ast.Call) and _is_namespace(node.func):
                        assert isinstance(node.func, ast.Attribute)
                        words = frozenset(word.arg for word in node.keywords if word.arg)
                        yield f"{kind.name}.{method.name}", node.func.attr, words


def _is_namespace(function: ast.expr) -> bool:
    if not isinstance(function, ast.Attribute):
        return False
    owner = function.value
    return (isinstance(owner, ast.Attribute) and owner.attr == "xp") or (
        isinstance(owner, ast.Name) and owner.id == "xp"
    )


def test_the_scan_below_sees_calls() -> None:
    assert {name for _, name, _ in _calls()} >= {"matmul", "argsort", "where", "searchsorted"}
    assert all("stable" not in words for _, name, words in _calls() if name == "argsort")


@pytest.mark.parametrize(("where", "name", "words"), sorted(_calls(), key=repr))
def test_cupy_has_the_words_the_backend_uses(where: str, name: str, words: frozenset[str]) -> None:
    cupy = pytest.importorskip("cupy")
    function = getattr(cupy, name)
    if isinstance(function, cupy.ufunc):
        assert not words
        return
    assert words <= set(inspect.signature(function).parameters), (where, name, words)


def test_cupy_has_what_the_device_needs() -> None:
    cupy = pytest.importorskip("cupy")
    for path in ("RawModule", "ndarray", "asnumpy", "from_dlpack", "cuda.Device"):
        found = cupy
        for name in path.split("."):
            found = getattr(found, name)
    assert cupy.cuda.runtime.getDeviceCount
    for method in ("__enter__", "__exit__", "synchronize"):
        assert hasattr(cupy.cuda.Device, method)
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert cupy.dtype(ml_dtypes.bfloat16) == np.dtype(ml_dtypes.bfloat16)


def test_a_backend_is_made_without_a_driver() -> None:
    pytest.importorskip("cupy")
    from ruda_backend_cupy import CupyBackend

    assert CupyBackend().device == "cuda:0"
    assert CupyBackend("cuda").device == "cuda:0"
    assert CupyBackend("cuda:3").device == "cuda:3"
    assert CupyBackend().version
    assert not CupyBackend().owns(np.ones(1))


def test_without_a_driver_it_is_unavailable_and_says_so() -> None:
    cupy = pytest.importorskip("cupy")
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        with pytest.raises(ruda.BackendUnavailableError, match=str(error)[:40]):
            ruda.get_backend("cupy")
    else:
        pytest.skip("there is a CUDA driver here")


BLOCKED = """
import sys
sys.path[:0] = {path!r}
sys.modules["cupy"] = None  # importing it is an ImportError
"""


def run(code: str) -> str:
    text = BLOCKED.format(path=ENVIRONMENT_PATH) + code
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_cupy_the_backend_is_an_import_error() -> None:
    code = """
import ruda
try:
    from ruda_backend_cupy import CupyBackend
except ImportError as error:
    print("ImportError:", error)
try:
    ruda.get_backend("cupy")
except ruda.BackendUnavailableError as error:
    print(error)
"""
    first, second = run(code).splitlines()
    assert "ImportError:" in first
    assert "cupy" in first
    assert "pip install 'ruda[cupy]'" in second


def test_the_stand_in_needs_no_cupy() -> None:
    code = """
from cupy_stand_in import CupyStandIn
print(CupyStandIn().version)
print("cupy_backends" in sys.modules)
"""
    version, imported = run(code).splitlines()
    assert "standing in for CuPy" in version
    assert imported == "False"


def test_it_claims_planes_but_no_matrix_units() -> None:
    from cupy_stand_in import CupyStandIn

    backend = CupyStandIn()
    assert backend.unsupported(Request(strategy=CombineGradientStrategy.PLANE)) is None
    assert backend.unsupported(Request(strategy=CombineGradientStrategy.SERIAL)) is None
    assert backend.unsupported(Request(strategy=ExpertStrategy.AUTO)) is None
    refused = backend.unsupported(Request(strategy=ExpertStrategy.TENSOR_CORE))
    assert refused is not None
    assert "matrix units" in refused


# The device's part, on a CuPy that is NumPy under another name and counts what it is asked.


class FakeDevice:
    entered: ClassVar[list[int]] = []

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal

    def __enter__(self) -> None:
        self.entered.append(self.ordinal)

    def __exit__(self, *error: object) -> None:
        self.entered.append(-self.ordinal)


class FakeArray(np.ndarray):
    device = SimpleNamespace(id=1)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`ruda_backend_cupy.backend`, made anew on the fake; and what it compiled and launched."""
    import cupy_host_kernels

    if cupy_host_kernels.compiler() is None:
        pytest.skip("no host C++ compiler on Linux to compile the kernels with")
    from ruda_backend_cupy.source import every_kernel

    kernel_of_code = {(kernel.code, kernel.name): kernel for kernel in every_kernel()}
    compiled: list[tuple[str, ...]] = []
    launched: list[str] = []

    class RawModule:
        def __init__(self, *, code: str, options: tuple[str, ...]) -> None:
            self.code = code
            compiled.append(options)

        def get_function(self, name: str) -> Any:
            kernel = kernel_of_code[self.code, name]

            def function(grid: tuple[int], block: tuple[int], args: tuple[Any, ...]) -> None:
                assert all(isinstance(one, (np.ndarray, np.int64)) for one in args)
                assert block[0] % 32 == 0
                launched.append(name)
                plain = [int(one) if isinstance(one, np.int64) else np.asarray(one) for one in args]
                cupy_host_kernels.launch(kernel, *grid, *block, *plain)

            return function

    cupy = ModuleType("cupy")
    for name in dir(np):
        if not name.startswith("__"):
            setattr(cupy, name, getattr(np, name))
    FakeDevice.entered = []
    runtime = SimpleNamespace(getDeviceCount=lambda: 2)
    additions = {
        "RawModule": RawModule,
        "asnumpy": np.array,
        "cuda": SimpleNamespace(Device=FakeDevice, runtime=runtime),
    }
    for name, value in additions.items():
        setattr(cupy, name, value)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    path = ROOT / "backends" / "ruda_backend_cupy" / "backend.py"
    spec = importlib.util.spec_from_file_location("cupy_backend_on_a_fake", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return SimpleNamespace(kind=module.CupyBackend, compiled=compiled, launched=launched)


def test_a_pass_compiles_each_kernel_once_and_stays_on_its_device(
    fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend: AnyBackend = fake.kind("cuda:1")
    monkeypatch.setattr(type(backend), "device_of", lambda self, tensor: "cuda:1")
    rng = np.random.default_rng(0)

    def floats(*shape: int) -> Any:
        return backend.from_numpy(rng.standard_normal(shape).astype(np.float16))

    operands = floats(9, 6), floats(9, 4), floats(4, 5, 6), floats(4, 5, 6), floats(4, 6, 5)
    options = ruda.MoeOptions(
        selection=ruda.SoftmaxSelection(2),
        weights=ruda.RouterWeightOptions(ruda.RouterScoring.SOFTMAX, renormalize=True),
    )
    for strategy in CombineGradientStrategy:
        options = ruda.MoeOptions(
            selection=options.selection, weights=options.weights, combine_backward=strategy
        )
        with np.errstate(all="ignore"):
            output, state = ruda.moe_forward(*operands, options=options, backend=backend)
            ruda.moe_backward(state, output)
    used = {"add_rows", "swiglu", "swiglu_backward", "order_slots", "combine", "copy_backward"}
    used |= {"weight_gradient_serial", "weight_gradient_plane"}
    assert set(fake.launched) == used
    assert len(fake.compiled) == len(used)
    assert all("--fmad=false" in options for options in fake.compiled)
    assert set(FakeDevice.entered) == {1, -1}
    assert sum(FakeDevice.entered) == 0


def test_devices_and_places(fake: Any) -> None:
    backend = fake.kind("cuda:1")
    assert backend.devices() == ["cuda:0", "cuda:1"]
    assert backend.device_of(np.ones(2).view(FakeArray)) == "cuda:1"
    assert backend.unsupported(Request(device="cuda:1")) is None
    assert "cuda:0, cuda:1" in backend.unsupported(Request(device="cuda:2"))
    assert backend.unsupported(Request(device="cpu"))
    assert not FakeDevice.entered


def test_dlpack_is_for_the_same_device_alone(fake: Any) -> None:
    backend = fake.kind("cuda:1")

    def tensor(place: tuple[int, int], dtype: str = "float32") -> Any:
        return SimpleNamespace(__dlpack_device__=lambda: place, dtype=dtype)

    assert backend.from_dlpack(tensor((1, 0))) is None
    assert backend.from_dlpack(tensor((2, 0))) is None
    assert backend.from_dlpack(tensor((2, 1), "torch.bfloat16")) is None
    assert backend.from_dlpack([1.0]) is None
