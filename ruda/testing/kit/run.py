"""One run of the kit: one pytest call over the modules of this package."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ruda.backend.registry import AnyBackend
from ruda.testing.kit.plugin import Plugin
from ruda.testing.kit.report import Report

_MODULES = Path(__file__).parent


def run_kit(
    backend: AnyBackend,
    *,
    opened_by: str,
    keyword: str = "",
    modules: tuple[str, ...] = (),
    shrinks: bool = True,
    arguments: tuple[str, ...] = (),
) -> Report:
    """Check a backend; `opened_by` is the code that makes it, for failures to quote.

    `keyword` is pytest's `-k`; `modules` names some of the kit's modules (all if empty). Failing
    specimens are made smaller unless `shrinks` is false.
    """
    plugin = Plugin(backend, opened_by, shrinks=shrinks)
    paths = [str(path) for name in modules for path in _MODULES.rglob(f"{name}.py")]
    command = [
        *(paths or [str(_MODULES)]),
        # Nothing of the place it is started from enters: no configuration, no conftest, no cache.
        f"-c{os.devnull}",
        f"--rootdir={_MODULES}",
        f"--confcutdir={_MODULES}",
        "-pno:cacheprovider",
        "-pno:xdist",
        "--import-mode=importlib",
        "-q",
        "--tb=short",
        *(["-k", keyword] if keyword else []),
        *arguments,
    ]
    code = pytest.main(command, plugins=[plugin])
    ran = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
    if code not in ran:
        raise RuntimeError(f"pytest could not run the kit: {pytest.ExitCode(code).name}")
    return plugin.report
