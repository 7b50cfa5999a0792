"""Groups of two sequences in a token store: the answers of a pair; or a labelled answer, and another's answer to its prompt.

[Note: groups]
The samples of such a store come in twos: sample 2p and 2p + 1 are a group and stay together wherever samples are chosen, cut and
laid into rows. `TokenStore.roles` says what each is. With packing both lie in one row, one after the other, and a group that is
longer than a row is too long as a whole; without packing they lie in the rows 2n and 2n + 1.

[Note: answers to other prompts]
KTO compares each answer with the model's divergence from the reference, estimated on answers that do not belong to their prompts
(arXiv 2402.01306, section 4.1). Each example is followed by its prompt with the next example's answer (the last one's with the
first's). They are built here, once, so that their reference is computed once, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatrain.data.samples import SampleRejected
from megatrain.data.store import StoreWriter
from megatrain.errors import UserError

CHOSEN, REJECTED, OTHER = 0, 1, 2
"""Roles: the preferred answer, or one labelled good; the other, or one labelled bad; the answer of another example."""


@dataclass(frozen=True)
class Encoded:
    """A sequence: ids (N,) uint32, which of them are trained (N,) bool, and where it came from."""

    ids: np.ndarray
    trained: np.ndarray
    file: int
    line: int
    content: int  # hash of the record's sample

    @property
    def answer_from(self) -> int:
        """Where the answer begins; the first token is never part of it."""
        return max(1, int(np.argmax(self.trained)))

    def check(self) -> None:
        if not self.trained[1:].any():
            raise SampleRejected("no token of an answer is trained")


class GroupWriter:
    """Writes groups into a store.

    Args:
        writer: Of a store of pairs or labels.
        reject: Takes a problem, and the file and line of its record.
    """

    def __init__(self, writer: StoreWriter, reject: Callable[[SampleRejected, int, int], None]):
        self._writer, self._reject = writer, reject
        self._first: tuple[Encoded, bool] | None = None
        self._before: tuple[Encoded, bool] | None = None

    def pair(self, chosen: Encoded, rejected: Encoded) -> None:
        """Write a pair, or reject it."""
        try:
            chosen.check()
            rejected.check()
            if np.array_equal(chosen.ids, rejected.ids):
                raise SampleRejected("chosen and rejected are equal")
        except SampleRejected as problem:
            self._reject(problem, chosen.file, chosen.line)
            return
        self._write(chosen, CHOSEN)
        self._write(rejected, REJECTED)

    def example(self, example: Encoded, good: bool) -> None:
        """Write the example before this one, whose partner is now known. See [Note: answers to other prompts]."""
        try:
            example.check()
        except SampleRejected as problem:
            self._reject(problem, example.file, example.line)
            return
        if self._before is None:
            self._first = example, good
        else:
            self._write_example(*self._before, example)
        self._before = example, good

    def finish(self, path: str) -> None:
        """Write the last example. UserError if it is the only one of the source `path`."""
        if self._before is None or self._first is None:
            return
        if self._before is self._first:
            what = "one labelled answer alone cannot be trained: answers to other prompts are needed, too"
            raise UserError(what, path, "give at least two records")
        self._write_example(*self._before, self._first[0])

    def _write_example(self, example: Encoded, good: bool, following: Encoded) -> None:
        self._write(example, CHOSEN if good else REJECTED)
        end, begin = example.answer_from, following.answer_from
        ids = np.concatenate([example.ids[:end], following.ids[begin:]])
        trained = np.concatenate([example.trained[:end], following.trained[begin:]])
        self._write(Encoded(ids, trained, example.file, example.line, example.content), OTHER)

    def _write(self, one: Encoded, role: int) -> None:
        self._writer.add(one.ids, one.trained, one.file, one.line, one.content, role)
