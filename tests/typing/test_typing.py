"""What mypy --strict and pyright strict say of the public surface, and of mistakes made with it.

`check_types.py` must be clean; in `check_errors.py` each line marked `# error` must be reported by
each checker, and no other line. Both files are copied out of the checkout without their
`type: ignore` comments, and one run of each checker reads both.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TYPES, ERRORS = "check_types.py", "check_errors.py"
MARK = "# error"

Reports = dict[str, dict[int, str]]
"""File name to line to the first message there."""


def _source(name: str) -> str:
    return re.sub(r"  # type: ignore\[[a-z, -]+\]", "", (HERE / name).read_text("utf-8"))


def _collect(found: Iterable[tuple[str, int, str]]) -> Reports:
    reports: Reports = {TYPES: {}, ERRORS: {}}
    for path, line, message in found:
        reports.setdefault(Path(path).name, {}).setdefault(line, message)
    return reports


def _run(arguments: list[str]) -> str:
    command = [sys.executable, "-m", *arguments]
    # In the root, for the configuration and the cache of mypy: a cold one costs ten seconds.
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, f"did not run to its end:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def mypy(folder: Path) -> Reports:
    files = [str(folder / TYPES), str(folder / ERRORS)]
    output = _run(["mypy", "--strict", "--config-file", "pyproject.toml", "--no-pretty", *files])
    pattern = re.compile(r"^(.+?):(\d+)(?::\d+)?: error: (.*)$", re.MULTILINE)
    return _collect((path, int(line), text) for path, line, text in pattern.findall(output))


def pyright(folder: Path) -> Reports:
    config = {
        "include": [TYPES, ERRORS],
        "extraPaths": [str(ROOT), str(ROOT / "backends")],
        "typeCheckingMode": "strict",
        "pythonVersion": "3.11",
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(config), "utf-8")
    options = ["--outputjson", "--pythonpath", sys.executable, "--project", str(folder)]
    found = json.loads(_run(["pyright", *options]))["generalDiagnostics"]
    return _collect((d["file"], d["range"]["start"]["line"] + 1, d["message"]) for d in found)


def _listed(name: str, found: dict[int, str]) -> str:
    return "\n".join(f"{name}:{line}: {found[line]}" for line in sorted(found))


CHECKERS: dict[str, Callable[[Path], Reports]] = {"mypy": mypy, "pyright": pyright}


@pytest.mark.parametrize("name", sorted(CHECKERS))
def test_types_hold_and_mistakes_are_reported(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: `make lint` installs it")
    for file in (TYPES, ERRORS):
        (tmp_path / file).write_text(_source(file), "utf-8")
    reports = CHECKERS[name](tmp_path)

    assert not reports[TYPES], _listed(TYPES, reports[TYPES])

    lines = dict(enumerate(_source(ERRORS).splitlines(), 1))
    marked = {number: line.strip() for number, line in lines.items() if line.endswith(MARK)}
    assert len(marked) > 40
    missed = {number: line for number, line in marked.items() if number not in reports[ERRORS]}
    assert not missed, f"no error reported:\n{_listed(ERRORS, missed)}"
    extra = {number: text for number, text in reports[ERRORS].items() if number not in marked}
    assert not extra, f"not marked as an error:\n{_listed(ERRORS, extra)}"
