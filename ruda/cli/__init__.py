"""The `ruda` command: make a layer, run it on a backend, compare every backend with the reference.

Importing this package loads nothing. `main` loads typer and rich; each command loads the rest of
what it needs, and a backend's framework is loaded only by a command that runs it.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit."""
    try:
        from ruda.cli.app import app
        from ruda.cli.entry import stop_cleanly_on_sigterm
    except ModuleNotFoundError as error:
        # Only typer and rich are imported here; anything else missing is a bug to be seen.
        if (error.name or "").partition(".")[0] not in ("typer", "rich"):
            raise
        sys.stderr.write(f"error: {error.name} is not installed; pip install 'ruda[cli]'\n")
        raise SystemExit(2) from None
    stop_cleanly_on_sigterm()
    app()
