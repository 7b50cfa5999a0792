"""The errors a person meets. Each kind has its exit code; none of them shows a traceback on the command line."""

from __future__ import annotations


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
