"""Errors raised on purpose. Each kind has an exit code; the command line prints them without a traceback."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class MegatrainError(Exception):
    """Base class of all errors that megatrain raises on purpose."""

    exit_code = 1


class UserError(MegatrainError):
    """Something that the user gave is wrong: a config, a file, an argument.

    Args:
        what: The problem, with the offending value.
        where: Its place: `run.yaml:14 batch.tokens_per_step`, a file, the name of a tensor.
    """

    exit_code = 2

    def __init__(self, what: str, where: str | None = None, remedy: str | None = None):
        self.what, self.where, self.remedy = what, where, remedy
        text = f"{where}: {what}" if where else what
        super().__init__(f"{text}\n  -> {remedy}" if remedy else text)


class Aftermath(UserError):
    """Failure caused by another process or by an unexpected error, so another attempt may succeed."""


class ReplicasDiffer(Aftermath):
    """Hosts that hold a replica of the state each no longer hold the same. The run cannot continue, whatever the config says."""


class WriteFailed(UserError):
    """A file of a run cannot be written: the disk is full or failing."""

    exit_code = 5


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an OSError inside the block into a WriteFailed that names `path`."""
    try:
        yield
    except OSError as error:
        raise WriteFailed(f"cannot be written: {error.strerror or error}", str(path), "make room there") from None


class PlanRefused(MegatrainError):
    """The run does not fit the machine. Raised before anything large is allocated, with the memory breakdown."""

    exit_code = 3


class NumericStop(MegatrainError):
    """Too many consecutive steps were not finite."""

    exit_code = 4


class HostMemoryLow(MegatrainError):
    """Host memory ran so low that the system would have killed the run; it was saved. Has the memory breakdown."""

    exit_code = 3


class EngineClosed(MegatrainError):
    """The engine was closed, by its owner or by an earlier error."""


class Problems:
    """Collects errors, to report them together."""

    def __init__(self) -> None:
        self.found: list[MegatrainError] = []

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Record a MegatrainError that ends the block, instead of raising it."""
        try:
            yield
        except MegatrainError as error:
            self.found.append(error)

    def raise_all(self) -> None:
        """Raise one error for all that were found, if any: a PlanRefused if all of them are, else a UserError."""
        if len(self.found) == 1:
            raise self.found[0]
        if self.found:
            items = ["  - " + str(error).replace("\n", "\n    ") for error in self.found]
            text = "\n".join([f"{len(self.found)} problems", *items])
            raise PlanRefused(text) if all(isinstance(e, PlanRefused) for e in self.found) else UserError(text)


def near_paths(path: Path) -> str:
    """A remedy for a missing path: similar names, or the contents of the nearest folder."""
    parent, name = path.parent, path.name
    while not parent.is_dir() and parent != parent.parent:
        parent, name = parent.parent, parent.name
    try:
        names = sorted(entry.name for entry in parent.iterdir() if not entry.name.startswith("."))
    except PermissionError:
        return f"check the path; {parent} cannot be listed"
    # A different suffix is a more likely mistake than letter similarity suggests.
    close = [other for other in names if name and Path(other).stem == Path(name).stem]
    close += [other for other in difflib.get_close_matches(name, names, n=3) if other not in close]
    if close:
        return "did you mean " + " or ".join(str(parent / other) for other in close[:3]) + "?"
    listing = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f"check the path; {parent} contains {listing or 'nothing'}"
