"""`python -m ruda.testing NAME | module:Class [-k EXPRESSION] [--device NAME]`: prove a backend."""

from __future__ import annotations

import argparse
import sys

from ruda.backend.registry import AnyBackend, get_backend, load_backend
from ruda.base.errors import MoeError


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m ruda.testing",
        description="Check a backend against the contract: every required operation, each "
        "replaced kernel against the written body, then the contract section by section.",
        epilog="Exit status: 0 if everything that applies passed, 1 if not, 2 if nothing ran.",
    )
    parser.add_argument(
        "backend", help="a backend's name (numpy, torch, ...), or its class as module:Class"
    )
    parser.add_argument("-k", metavar="EXPRESSION", default="", help="only checks named like this")
    parser.add_argument("--device", help="a device of the backend (its default one if not given)")
    return parser.parse_args(argv)


def open_backend(text: str, device: str | None) -> tuple[AnyBackend, str]:
    """The backend meant by a name or `module:Class`, and the code that makes it."""
    if ":" in text:
        kind = load_backend(text)
        argument = repr(device) if device else ""
        code = f'ruda.backend.registry.load_backend("{text}")({argument})'
        backend: AnyBackend = kind(device) if device else kind()  # type: ignore[call-arg]
        return backend, code
    argument = f", device={device!r}" if device else ""
    return get_backend(text, device=device), f'ruda.get_backend("{text}"{argument})'


def main(argv: list[str] | None = None) -> int:
    """Run the kit and print its table."""
    arguments = _arguments(argv)
    try:
        from ruda.testing.kit.run import run_kit
    except ImportError as error:
        sys.stderr.write(f"the kit needs {error.name}: pip install 'ruda[test]'\n")
        return 2
    try:
        backend, code = open_backend(arguments.backend, arguments.device)
    except MoeError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 2
    report = run_kit(backend, opened_by=code, keyword=arguments.k)
    sys.stdout.write(f"\n{report.table()}\n")
    if not report.ran:
        sys.stderr.write("nothing ran\n")
        return 2
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
