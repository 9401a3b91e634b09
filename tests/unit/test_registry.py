"""Which backends there are: nothing imported early, nothing broken believed, no name taken."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.lib.mixins import NDArrayOperatorsMixin

import ruda
from ruda.backend import Backend, registry
from ruda_backend_numpy import NumpyBackend

ROOTS = sorted(
    {
        str(Path(ruda.__file__).parents[1]),
        str(Path(sys.modules["ruda_backend_numpy"].__file__ or "").parents[1]),
    }
)
FRAMEWORKS = ("numpy", "torch", "cupy", "jax", "ml_dtypes")
SHIPPED = ("numpy", "torch", "cupy")


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers, it alone sees."""
    for name in ("_registered", "_classes", "_instances", "_name_of_type"):
        monkeypatch.setattr(registry, name, dict(getattr(registry, name)))


def python(code: str, *flags: str, first: Path | None = None, **environment: str) -> Any:
    """Run code in a fresh interpreter with `ruda` on its path, and nothing of ours in its way."""
    path = ([str(first)] if first else []) + ROOTS
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        [sys.executable, *flags, "-c", f"import sys; sys.path[:0] = {path!r}\n{code}"],
        env={**kept, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )


REPORT = """
import json, ruda
states = {}
for name, state in ruda.available_backends().items():
    try:
        ruda.get_backend(name)
    except ImportError as error:
        kind = type(error).__name__
    else:
        kind = "none"
    states[name] = [bool(state), str(state), kind]
try:
    ruda.selected_router_weights(
        [[0.0]], [[0]], ruda.RouterWeightOptions(ruda.RouterScoring.SOFTMAX, renormalize=True)
    )
except ruda.BackendMismatchError as error:
    states["a list"] = str(error)
print(json.dumps(states))
"""


def plugin(folder: Path, dist: str, points: dict[str, str], **modules: str) -> Path:
    """An installed distribution with entry points, and its modules."""
    info = folder / f"{dist}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.0\n")
    lines = [f"{name} = {target}" for name, target in points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[ruda.backends]", *lines, ""]))
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    return folder


WORKING = """
from ruda_backend_numpy import NumpyBackend

class Working(NumpyBackend):
    name = "working"
"""


# Import.


def test_importing_ruda_imports_no_array_library() -> None:
    code = f"import ruda; print([name for name in {FRAMEWORKS!r} if name in sys.modules])"
    assert python(code).stdout.strip() == "[]"


def test_importing_ruda_is_quick(tmp_path: Path) -> None:
    """Under 60 ms; on a machine that is busy just now, as much more as the standard library takes.

    Its own `dataclasses`, `typing` and `contextlib` take 17 ms where nothing else runs, in the same
    process, with bytecode cached as an installed package has it.
    """
    python("import ruda", PYTHONPYCACHEPREFIX=str(tmp_path))
    seen: list[str] = []
    for _ in range(12):
        result = python("import ruda", "-X", "importtime", PYTHONPYCACHEPREFIX=str(tmp_path))
        rows = [line.split("|") for line in result.stderr.splitlines() if line.count("|") == 2]
        took = {
            name.strip(): int(total) / 1000 for _, total, name in rows if total.strip().isdigit()
        }
        yardstick = sum(took[name] for name in ("dataclasses", "typing", "contextlib"))
        seen.append(f"{took['ruda']:.0f} ms (yardstick {yardstick:.0f} ms)")
        if took["ruda"] < 60 * max(1.0, yardstick / 17):
            return
    pytest.fail(f"import ruda took {', '.join(seen)}")


def test_no_array_library_at_all() -> None:
    states = json.loads(python(REPORT, "-I", "-S").stdout)
    for name in SHIPPED:
        available, text, kind = states[name]
        assert not available
        assert kind == "BackendUnavailableError"
        assert text.startswith("unavailable, because ModuleNotFoundError: No module named ")
        assert text.endswith(f"(pip install 'ruda[{name}]')")
    assert "got builtins.list" in states["a list"]


@pytest.mark.parametrize("error", ["ImportError", "OSError", "AttributeError", "RuntimeError"])
def test_case_147_broken_array_libraries(tmp_path: Path, error: str) -> None:
    for name in ("numpy", "torch", "cupy", "jax"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise {error}('planted in {name}')")
    states = json.loads(python(REPORT, first=tmp_path).stdout)
    for name in SHIPPED:
        because = f"unavailable, because {error}: planted in {name} (pip install 'ruda[{name}]')"
        assert states[name] == [False, because, "BackendUnavailableError"]
    assert "got builtins.list" in states["a list"]


def test_an_unavailable_backend_is_an_import_error_that_says_what_mends_it(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.12: cannot open')")
    code = """
import ruda
for attempt in range(2):
    try:
        ruda.get_backend("torch")
    except ImportError as error:
        print(error)
print(ruda.get_backend("numpy").name)
"""
    line = (
        "backend 'torch' is unavailable, because OSError: libcudart.so.12: cannot open; "
        "pip install 'ruda[torch]'"
    )
    assert python(code, first=tmp_path).stdout.splitlines() == [line, line, "numpy"]


# Names.


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(LookupError, match=r"^backend: expected one of numpy, .*, got 'mxnet'$"):
        ruda.get_backend("mxnet")
    with pytest.raises(ruda.DeviceError, match="'numpy' cannot serve 'gpu': its devices are cpu"):
        ruda.get_backend("numpy", device="gpu")


def test_listing_imports_nothing(tmp_path: Path) -> None:
    plugin(tmp_path, "listed", {"listed": "listed_mod:Listed"}, listed_mod="raise SystemExit('no')")
    code = f"""
import ruda
assert ruda.known_backends() == ('numpy', 'torch', 'cupy', 'listed'), ruda.known_backends()
print([name for name in {(*FRAMEWORKS, "listed_mod")!r} if name in sys.modules])
"""
    assert python(code, "-I", first=tmp_path).stdout.strip() == "[]"


def test_an_entry_point_is_a_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = {"working": "working_mod:Working", "broken": "broken_mod:Broken"}
    plugin(
        tmp_path, "plug", points, working_mod=WORKING, broken_mod="raise RuntimeError('planted')"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert {"working", "broken"} <= set(ruda.known_backends())
    states = ruda.available_backends()
    assert str(states["working"]) == "available"
    assert str(states["broken"]) == "unavailable, because RuntimeError: planted"
    assert ruda.get_backend("working").name == "working"
    with pytest.raises(ImportError, match="backend 'broken' is unavailable, because RuntimeError"):
        ruda.get_backend("broken")


def test_two_packages_with_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin(tmp_path, "one", {"twice": "one_mod:One", "same": "working_two:Working"})
    plugin(tmp_path, "two", {"twice": "two_mod:Two", "same": "working_two:Working"})
    (tmp_path / "working_two.py").write_text(WORKING)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(LookupError) as caught:
        ruda.get_backend("twice")
    assert type(caught.value) is ruda.UnknownBackendError
    assert "claimed by both" in str(caught.value)
    assert "one_mod:One" in str(caught.value)
    assert "two_mod:Two" in str(caught.value)
    # The quarrel is about that name alone.
    assert ruda.get_backend("same").name == "working"
    assert ruda.get_backend("numpy").name == "numpy"
    states = ruda.available_backends()
    assert states["numpy"]
    assert "claimed by both" in str(states["twice"])
    with pytest.raises(LookupError, match=r"claimed by both (one_mod:One|two_mod:Two)"):
        ruda.register_backend("twice", NumpyBackend)


def test_a_shipped_name_is_not_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LookupError, match=r"both ruda_backend_torch:TorchBackend and .*Numpy"):
        ruda.register_backend("torch", NumpyBackend)
    plugin(tmp_path, "greedy", {"numpy": "greedy_mod:Greedy"})
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_instances", {})
    with pytest.raises(LookupError, match="both ruda_backend_numpy:NumpyBackend and greedy_mod:"):
        ruda.get_backend("numpy")


# Registration.


REQUIRED: frozenset[str] = Backend.__abstractmethods__
new_class: Any = type(Backend)  # the metaclass, which knows what is abstract


def lacking(*operations: str) -> Any:
    """A backend written from the protocol, these operations forgotten."""
    body = {name: getattr(NumpyBackend, name) for name in REQUIRED - set(operations)}
    types = {f"{kind}Tensor": np.ndarray for kind in ("Float", "Int", "Bool")}
    return new_class("Lacking", (Backend,), {**body, **types, "name": "mine", "dtypes": ()})


def test_case_140_an_incomplete_class_is_refused_with_the_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(TypeError, match=r"backend 'mine': .*Lacking lacks exp, stable_argsort$"):
        ruda.register_backend("mine", lacking("stable_argsort", "exp"))
    assert "mine" not in ruda.known_backends()
    nothing_at_all = new_class("Bare", (Backend,), {})
    with pytest.raises(ruda.IncompleteBackendError) as caught:
        ruda.register_backend("mine", nothing_at_all)
    for name in (*REQUIRED, "name", "dtypes", "FloatTensor"):
        assert name in str(caught.value)

    module = importlib.util.module_from_spec(importlib.machinery.ModuleSpec("lacks_mod", None))
    module.Lacking = lacking("matmul")  # type: ignore[attr-defined]
    ruda.register_backend("later", "lacks_mod:Lacking")
    monkeypatch.setitem(sys.modules, "lacks_mod", module)
    with pytest.raises(ruda.IncompleteBackendError, match=r"lacks matmul$"):
        ruda.get_backend("later")
    assert "lacks matmul" in str(ruda.available_backends()["later"])
    with pytest.raises(ruda.IncompleteBackendError, match=r"lacks matmul$"):
        ruda.register_backend("sooner", "lacks_mod:Lacking")
    assert "sooner" not in ruda.known_backends()


class HasTheAttributes:
    name, dtypes, FloatTensor, IntTensor, BoolTensor = "mine", (), list, list, list


@pytest.mark.parametrize("target", [HasTheAttributes, NumpyBackend(), 3, None, len])
def test_what_is_no_backend_class_is_refused(target: Any) -> None:
    with pytest.raises(ruda.IncompleteBackendError, match=r"'mine': .* subclass of ruda.Backend"):
        ruda.register_backend("mine", target)


@pytest.mark.parametrize("target", ["", "module", "module:", ":Class"])
def test_a_target_without_module_and_class_is_refused(target: str) -> None:
    with pytest.raises(ruda.UnknownBackendError, match="'mine': expected 'module:Class', got"):
        ruda.register_backend("mine", target)
    assert "mine" not in ruda.known_backends()


def redefined(version: str) -> Any:
    class Mine(NumpyBackend):
        name = "mine"

        @property
        def version(self) -> str:
            return version

    # Both definitions have one qualified name, as the same notebook cell run twice gives.
    return Mine


def test_a_class_defined_anew_replaces_the_old_one() -> None:
    for version in ("first", "second"):
        ruda.register_backend("mine", redefined(version))
        assert ruda.get_backend("mine").version == version


def test_available_means_that_a_tiny_allocation_works() -> None:
    class NoMemory(NumpyBackend):
        name = "full"

        def full(self, *_: Any) -> Any:
            raise RuntimeError("no kernel image is available")

    ruda.register_backend("full", NoMemory)
    reason = "unavailable, because RuntimeError: no kernel image is available"
    assert str(ruda.available_backends()["full"]) == reason


# Tensors.


class Boxed(NDArrayOperatorsMixin):
    """Another package's tensor, built on one of NumPy's classes as many are."""


class BoxedBackend(NumpyBackend):
    name = "boxed"
    FloatTensor: Any = Boxed

    def owns(self, tensor: object, /) -> bool:
        return isinstance(tensor, Boxed)


def test_third_party_tensors_find_their_registered_backend() -> None:
    ruda.register_backend("gone", "there_is_no_such_module:Backend")  # hides nobody
    ruda.register_backend("boxed", BoxedBackend)
    boxed = vars(sys.modules[__name__])["Boxed"]()
    assert ruda.backend_of(boxed).name == "boxed"
    assert ruda.backend_of(np.ones(1)).name == "numpy"
    for nobody in ([1.0], None, 1.0, np.float32(1)):
        with pytest.raises(ruda.BackendMismatchError, match=r"known backend .*boxed.*, got "):
            ruda.backend_of(nobody)


def test_a_third_party_library_runs_a_whole_layer() -> None:
    strict = pytest.importorskip("array_api_strict")
    from ruda.backend.array_api import ArrayApiBackend

    class Strict(ArrayApiBackend[Any, Any, Any]):
        name = "strict"
        xp = strict
        dtypes = frozenset({ruda.DType.FLOAT32, ruda.DType.FLOAT64})
        FloatTensor = IntTensor = BoolTensor = type(strict.zeros(1))

        def to_numpy(self, tensor: Any, /) -> Any:
            return np.asarray(tensor)

    ruda.register_backend("strict", Strict)
    operands = layer()
    expected, _ = forward(operands)
    output, state = forward([strict.asarray(array) for array in operands])
    assert isinstance(output, Strict.FloatTensor)
    assert state.backend.name == "strict"
    np.testing.assert_allclose(np.asarray(output), expected, rtol=1e-12)


def layer() -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(s) for s in ((5, 6), (5, 4), (4, 3, 6), (4, 3, 6), (4, 6, 3))]


def forward(operands: list[Any], **more: Any) -> Any:
    options = ruda.MoeOptions(
        selection=ruda.SoftmaxSelection(2),
        weights=ruda.RouterWeightOptions(ruda.RouterScoring.SOFTMAX, renormalize=True),
    )
    return ruda.moe_forward(*operands, options=options, **more)


def test_cases_143_to_145_threads_each_use_the_backend_of_their_arrays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch")
    for cache in ("_instances", "_name_of_type"):  # so that the threads race to fill them
        monkeypatch.setattr(registry, cache, {})
    arrays = layer()
    tensors = [torch.tensor(array) for array in arrays]
    expected, _ = forward(arrays)
    start, wrong = threading.Barrier(6), []

    def work(kind: str, operands: list[Any], other: list[Any]) -> None:
        try:
            start.wait()
            for step in range(15):
                output, state = forward(operands, backend=None if step % 2 else kind)
                assert type(output) is type(operands[0])
                assert state.backend.name == kind
                np.testing.assert_allclose(np.asarray(output), expected, rtol=1e-12)
                both = rf"^gate: .*'{kind}' like input, got .* of backend "
                with pytest.raises(ruda.BackendMismatchError, match=both):
                    forward([*operands[:2], *other[2:]])
        except BaseException as error:
            wrong.append(error)

    jobs = [("numpy", arrays, tensors), ("torch", tensors, arrays)] * 3
    threads = [threading.Thread(target=work, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
