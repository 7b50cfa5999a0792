"""Watch which files Python opens: `watching` collects the paths, by an audit hook."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_found: list[str] | None = None


def _note(event: str, arguments: tuple) -> None:
    if event == "open" and _found is not None and isinstance(arguments[0], (str, bytes, os.PathLike)):
        _found.append(os.fsdecode(arguments[0]))


sys.addaudithook(_note)  # a hook cannot be removed; outside of `watching` it does nothing


@contextmanager
def watching() -> Iterator[list[str]]:
    """The paths of files that any thread opens inside the block, as they were given."""
    global _found
    _found = found = []
    try:
        yield found
    finally:
        _found = None


def outside(opened: list[str], folder: Path) -> list[str]:
    """Those of the paths that do not lead into a folder, links followed."""
    root = str(folder.resolve()) + os.sep
    return [path for path in opened if not (os.path.realpath(path) + os.sep).startswith(root)]
