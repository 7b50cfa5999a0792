"""The errors a person meets. Each kind has its exit code; none of them shows a traceback on the command line."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class MegatrainError(Exception):
    """Root of all errors that megatrain raises on purpose."""

    exit_code = 1


class UserError(MegatrainError):
    """Something given to megatrain is wrong.

    Args:
        what: What is wrong, with the offending value.
        where: The place: `run.yaml:14 batch.tokens_per_step`, a file, a tensor name.
        remedy: What to do about it.
    """

    exit_code = 2

    def __init__(self, what: str, where: str | None = None, remedy: str | None = None):
        self.what, self.where, self.remedy = what, where, remedy
        text = f"{where}: {what}" if where else what
        super().__init__(f"{text}\n  -> {remedy}" if remedy else text)


class Aftermath(UserError):
    """Something ends because of another process's error, or of one that nobody foresaw: another attempt may do better."""


class WriteFailed(UserError):
    """The system refused to write a file of a run: the disk is full, or failing."""

    exit_code = 5


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """An error of the system inside the block is said as one of writing `path`.

    Raises:
        WriteFailed: Names the file.
    """
    try:
        yield
    except OSError as error:
        raise WriteFailed(f"cannot be written: {error.strerror or error}", str(path), "make room there") from None


class PlanRefused(MegatrainError):
    """The run does not fit the machine; raised before anything large is allocated. The message is the ledger."""

    exit_code = 3


class NumericStop(MegatrainError):
    """Too many steps in a row were not finite."""

    exit_code = 4


class HostMemoryLow(MegatrainError):
    """A run came so near to the end of the host's memory that the system would have killed it; its state was saved.

    The message is the ledger.
    """

    exit_code = 3


class EngineClosed(MegatrainError):
    """The engine was closed, by its owner or by an earlier error, and cannot compute any more."""


class Problems:
    """Collects what is wrong, to say it all at once."""

    def __init__(self) -> None:
        self.found: list[MegatrainError] = []

    @contextmanager
    def collect(self) -> Iterator[None]:
        """An error of ours inside the block becomes an entry; the block ends there."""
        try:
            yield
        except MegatrainError as error:
            self.found.append(error)

    def raise_all(self) -> None:
        """Raise one error for everything found, or return if there is nothing.

        Raises:
            PlanRefused: The run does not fit the machine, and nothing else is wrong.
            UserError: Anything else.
        """
        if len(self.found) == 1:
            raise self.found[0]
        if self.found:
            text = "\n".join([f"{len(self.found)} problems", *(_indented(str(error)) for error in self.found)])
            raise PlanRefused(text) if all(isinstance(e, PlanRefused) for e in self.found) else UserError(text)


def near_paths(path: Path) -> str:
    """A remedy: what the user may have meant instead of a path that is not there."""
    parent, name = path.parent, path.name
    while not parent.is_dir() and parent != parent.parent:
        parent, name = parent.parent, parent.name
    try:
        names = sorted(entry.name for entry in parent.iterdir() if not entry.name.startswith("."))
    except PermissionError:
        return f"check the path; {parent} cannot be listed"
    # A wrong suffix or a shared stem is closer to what was meant than the ratio of letters says.
    close = [other for other in names if name and Path(other).stem == Path(name).stem]
    close += [other for other in difflib.get_close_matches(name, names, n=3) if other not in close]
    if close:
        return "did you mean " + " or ".join(str(parent / other) for other in close[:3]) + "?"
    listing = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f"check the path; {parent} holds {listing or 'nothing'}"


def _indented(text: str) -> str:
    return "\n".join(("  - " if number == 0 else "    ") + line for number, line in enumerate(text.splitlines()))
