"""Every test that takes `backend` runs on every backend present; the summary says which were not.

`--backends numpy,torch:cuda:0` chooses them by name and device; `--require-backend numpy,torch`
turns an absent one from a skip into a failure.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import ruda
from ruda.backend.registry import AnyBackend

# Helpers several test files share; never shipped.
sys.path.insert(0, str(Path(__file__).parent / "support"))
ruda.register_backend("cupy-stand-in", "cupy_stand_in:CupyStandIn")

DEFAULT = ("numpy", "torch", "cupy", "cupy-stand-in")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backends",
        default=",".join(DEFAULT),
        help="backends to test: name or name:device, separated by commas",
    )
    parser.addoption(
        "--require-backend",
        default="",
        help="backends whose absence is a failure, separated by commas",
    )


def _names(config: pytest.Config, option: str) -> list[str]:
    return [name for name in str(config.getoption(option)).split(",") if name]


def _open(spec: str) -> AnyBackend:
    name, _, device = spec.partition(":")
    return ruda.get_backend(name, device=device or None)


def _absent(config: pytest.Config) -> dict[str, str]:
    reasons: dict[str, str] = {}
    for spec in _names(config, "--backends"):
        try:
            _open(spec)
        except ruda.MoeError as error:
            reasons[spec] = str(error)
    return reasons


def pytest_configure(config: pytest.Config) -> None:
    named = _names(config, "--backends") + _names(config, "--require-backend")
    for spec in named:
        if spec.partition(":")[0] not in ruda.known_backends():
            raise pytest.UsageError(f"unknown backend {spec!r}")
    absent = _absent(config)
    missing = [spec for spec in _names(config, "--require-backend") if spec in absent]
    if missing:
        raise pytest.UsageError("; ".join(absent[spec] for spec in missing))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" not in metafunc.fixturenames:
        return
    absent = _absent(metafunc.config)
    parameters = [
        pytest.param(
            spec,
            id=spec,
            marks=[pytest.mark.skip(reason=absent[spec])] if spec in absent else [],
        )
        for spec in _names(metafunc.config, "--backends")
    ]
    metafunc.parametrize("backend", parameters, indirect=True)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> AnyBackend:
    return _open(request.param)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, text in report.user_properties:
            if name == "conformance":
                terminalreporter.write_line(f"\n{text}\n")
    absent = _absent(config)
    for spec in _names(config, "--backends"):
        status = f"absent: {absent[spec]}" if spec in absent else f"ran, {_open(spec).version}"
        terminalreporter.write_line(f"backend {spec}: {status}")
