"""Output files that are either complete or not there.

A file is written under a temporary name in the folder it will live in, flushed to the disk, and
then renamed over its destination in one step. Whatever goes wrong before that leaves the
destination as it was, and removes the temporary file.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from ruda.base.errors import MoeError


class DestinationError(MoeError, OSError):
    """A file cannot be written where it is wanted; the message names it, and why."""


def check_destination(path: Path) -> None:
    """Raise `DestinationError` where `path` cannot be written, before the work that fills it."""
    target = Path(os.path.realpath(path))
    folder = target.parent
    if not folder.is_dir():
        raise DestinationError(f"{path}: the folder {folder} does not exist")
    # Renaming over a device, a pipe or a folder would replace it or fail late.
    if target.exists() and not target.is_file():
        raise DestinationError(f"{path}: exists and is not a regular file")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise DestinationError(f"{path}: the folder {folder} is not writable")


@contextmanager
def replacing(path: Path) -> Generator[Path]:
    """Yield a temporary path to write; when the body succeeds, it becomes `path`."""
    check_destination(path)
    target = Path(os.path.realpath(path))
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(_mode(target))
        _flush(temporary)
        temporary.replace(target)
    except BaseException:
        with suppress(FileNotFoundError):
            temporary.unlink()
        raise
    _flush(target.parent)


def write_text(path: Path, text: str) -> None:
    """Replace `path` by a text file."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _mode(target: Path) -> int:
    """The permissions of the file to be replaced, or those any new file would get."""
    if target.exists():
        return stat.S_IMODE(target.stat().st_mode)
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
