"""The pytest plugin of one run: gives tests their backend, gathers results by section."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, NoReturn

import pytest

from ruda.backend.registry import AnyBackend
from ruda.base.dtypes import DType
from ruda.testing.kit.report import Report, Section
from ruda.testing.layers import Array
from ruda.testing.placement import LayoutUnavailableError
from ruda.testing.specimens.run import expected
from ruda.testing.specimens.shrink import smallest
from ruda.testing.specimens.specimen import Specimen
from ruda.testing.tolerance import Comparison, compare
from ruda.testing.verdict import judge


class Checker:
    """What a test of the kit has in hand: the backend, and where verdicts go."""

    def __init__(self, backend: AnyBackend, opened_by: str, section: Section, *, shrinks: bool):
        self.backend = backend
        self._opened_by = opened_by
        self._section = section
        self._shrinks = shrinks

    def needs(self, *dtypes: DType) -> None:
        """Skip where the backend declares that it lacks one of these types."""
        for dtype in dtypes:
            if dtype not in self.backend.dtypes:
                pytest.skip(f"{self.backend.name} declares no {dtype}")

    def verdict(self, found: Comparison) -> None:
        """Note how far off a result is; fail where that is not allowed."""
        self._section.note(found)
        assert found.passed, str(found)

    def compare(
        self,
        name: str,
        got: Array,
        exact: Array,
        plain: Array,
        dtype: DType,
        *,
        unit: DType | None = None,
    ) -> None:
        """`ruda.testing.tolerance.compare`, noted."""
        self.verdict(compare(name, got, exact, plain, dtype, unit=unit))

    def specimen(
        self,
        specimen: Specimen,
        run: Callable[[AnyBackend, Specimen], dict[str, Array]],
        names: tuple[str, ...] | None = None,
    ) -> None:
        """Run a specimen and judge its results (those named); fail with the smallest like it."""
        self.needs(specimen.dtype, specimen.router_dtype)

        def check(candidate: Specimen) -> str | None:
            try:
                results = run(self.backend, candidate)
                wanted = {name: results[name] for name in (names or results)}
                verdicts = judge(expected(candidate), wanted)
            except LayoutUnavailableError as error:
                pytest.skip(str(error))
            except AssertionError as error:
                return str(error)
            if candidate is specimen:
                for verdict in verdicts:
                    self._section.note(verdict)
            return "; ".join(str(verdict) for verdict in verdicts if not verdict.passed) or None

        self.holds(specimen, check, show=f"{run.__module__}:{run.__name__}")

    def holds(
        self, specimen: Specimen, check: Callable[[Specimen], str | None], *, show: str
    ) -> None:
        """The check finds nothing wrong; else fail with the smallest specimen like it."""
        reason = check(specimen)
        if reason is None:
            return
        if self._shrinks:
            specimen, reason = smallest(specimen, check)
        self.fails(specimen, reason, show=show)

    def fails(self, specimen: Specimen, reason: str, *, show: str) -> NoReturn:
        """Fail, with the code that shows it: `show` is a ``module:function`` of both."""
        pytest.fail(f"{reason}\n\n{self._paste(specimen, show)}", pytrace=False)

    def _paste(self, specimen: Specimen, show: str) -> str:
        module, _, function = show.partition(":")
        return (
            "The smallest input found, ready to paste:\n\n"
            "import ruda\n"
            "from ruda.testing.specimens.specimen import *\n"
            f"from {module} import {function}\n\n"
            f"backend = {self._opened_by}\n"
            f"specimen = {specimen!r}\n"
            f"print(specimen.layer())\n"
            f"print({function}(backend, specimen))\n"
        )


class Plugin:
    """One run: a backend in, a `Report` out."""

    def __init__(self, backend: AnyBackend, opened_by: str, *, shrinks: bool = True) -> None:
        self.backend = backend
        self.report = Report(f"{backend.name} {backend.version} on {backend.device}")
        self._opened_by = opened_by
        self._shrinks = shrinks

    @pytest.fixture
    def checker(self, request: pytest.FixtureRequest) -> Checker:
        """The backend with what notes and judges its results."""
        section = self.report.sections[_section_of(request)]
        return Checker(self.backend, self._opened_by, section, shrinks=self._shrinks)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, Any, None]:
        """Count each test once, in its section."""
        outcome = yield
        found: pytest.TestReport = outcome.get_result()
        section = self.report.sections[_section_of(item)]
        if found.failed:
            section.failed += 1
        elif found.skipped:
            section.skipped[_skip_reason(found)] += 1
        elif found.when == "call":
            section.passed += 1


def _section_of(item: Any) -> str:
    return str(item.module.SECTION)


def _skip_reason(found: pytest.TestReport) -> str:
    where = found.longrepr
    text = where[2] if isinstance(where, tuple) else str(where)
    return text.removeprefix("Skipped: ")
