"""Looking for a layer a backend gets wrong: rounds of random specimens, each from its own seed.

A round is the same whenever it is run: hypothesis draws from the seed alone, keeps no database and
leaves no folder behind. What fails is shrunk to the smallest specimen that does.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis.configuration import set_hypothesis_home_dir
from hypothesis.errors import Flaky

from ruda.backend.registry import AnyBackend
from ruda.testing.specimens.properties import Fault, first_fault, placeable
from ruda.testing.specimens.specimen import Specimen
from ruda.testing.specimens.strategies import ANY_SIZES, Sizes, features, specimens


@dataclass(frozen=True)
class Finding:
    """A specimen a backend gets wrong, as small as it could be made."""

    specimen: Specimen
    fault: Fault
    is_repeatable: bool = True


@dataclass
class Tally:
    """What was tried on a backend."""

    examples: int = 0
    seconds: float = 0.0
    features: Counter[str] = field(default_factory=Counter[str])

    def add(self, specimen: Specimen) -> None:
        """Count one specimen."""
        self.examples += 1
        self.features.update(features(specimen))


class _FaultFound(Exception):  # noqa: N818  (hypothesis shrinks whatever is raised; this is no error)
    pass


def hunt(
    backend: AnyBackend,
    seed_: int,
    *,
    examples: int,
    sizes: Sizes = ANY_SIZES,
    until: float | None = None,
    tally: Tally | None = None,
) -> Finding | None:
    """One round: the smallest failing specimen of `examples` drawn from a seed, or `None`.

    `until` is a time of `time.monotonic` after which nothing more is tried; shrinking goes on.
    """
    counted = Tally() if tally is None else tally
    found: list[Finding] = []

    @seed(seed_)
    @settings(
        max_examples=examples,
        phases=(Phase.generate, Phase.shrink),
        deadline=None,
        database=None,
        derandomize=False,
        print_blob=False,
        report_multiple_bugs=False,
        # An example takes as long as a whole layer does.
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        verbosity=Verbosity.quiet,
    )
    @given(specimens(backend.dtypes, sizes))
    def round_(specimen: Specimen) -> None:
        if not found:
            if until is not None and time.monotonic() > until:
                return
            counted.add(placeable(backend, specimen))
        fault = first_fault(backend, specimen)
        if fault is not None:
            found.append(Finding(placeable(backend, specimen), fault))
            raise _FaultFound

    started = time.monotonic()
    is_repeatable = True
    try:
        with _no_traces():
            round_()
    except _FaultFound:
        pass
    except Flaky:
        is_repeatable = False
    finally:
        counted.seconds += time.monotonic() - started
    if not found:
        return None
    # Hypothesis runs the smallest once more at the end.
    return Finding(found[-1].specimen, found[-1].fault, is_repeatable)


@contextmanager
def _no_traces() -> Generator[None]:
    """Hypothesis keeps what it caches in a folder that goes away."""
    with tempfile.TemporaryDirectory(prefix="ruda-fuzz-") as folder:
        set_hypothesis_home_dir(folder)
        try:
            yield
        finally:
            set_hypothesis_home_dir(None)
