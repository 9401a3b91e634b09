"""What the documents show, runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ruda
from ruda.backend import registry
from ruda.testing.kit.run import run_kit

ROOT = Path(__file__).parents[2]


def python_blocks(document: str) -> str:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
    assert blocks
    return "\n".join(blocks)


def run(document: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(python_blocks(document), document, "exec"), names)
    return names


def test_readme(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("numpy")
    names = run("README.md")
    shown = capsys.readouterr().out
    assert "MoeBackward(backend='numpy', device='cpu', input=float32[32, 64]," in shown
    assert names["grads"].down.shape == (8, 64, 48)


def test_write_a_backend(record_property: Callable[[str, object], None]) -> None:
    pytest.importorskip("array_api_strict")
    try:
        names = run("docs/write-a-backend.md")
        assert "strict" in ruda.known_backends()
        assert ruda.backend_of(names["output"]).name == "strict"
        assert names["grads"].down.shape == (4, 8, 6)
        report = run_kit(names["backend"], opened_by='ruda.get_backend("strict")')
        record_property("conformance", report.table())
        assert report.passed, report.table()
    finally:
        registry._registered.pop("strict", None)
        registry._classes.pop("strict", None)
