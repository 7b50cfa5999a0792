"""Rows of tokens, as the engine takes them.

Legend: B rows of a batch, T tokens of a row, R rows of a group.

[Note: what a packed row holds]
    input_ids     a0 a1 a2 b0 b1 b2 b3  p  p      a, b: documents; p: padding
    labels         . a1 a2  . b1 b2  .  .  .      . is -100; here b3 is not trained
    position_ids   0  1  2  0  1  2  3  0  1
    document_ids   0  0  0  1  1  1  1  2  2
Labels are not shifted: the loss takes the label at t + 1 for the token at t. The first token of a document would be
predicted from the last of the one before it, so it never is a target. Padding is masked by its place, never by its id,
which may be EOS.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from megatrain.data.packing import Segments
from megatrain.data.store import TokenStore

if TYPE_CHECKING:
    from torch import Tensor

NO_TARGET = -100


@dataclass(frozen=True)
class RowStats:
    """Counts of a set of rows.

    Attributes:
        rows: Rows.
        samples: Samples in them.
        tokens: Tokens of samples.
        padding: Tokens that fill rows.
        targets: Tokens with a label.
        longest: Tokens of the longest document.
    """

    rows: int = 0
    samples: int = 0
    tokens: int = 0
    padding: int = 0
    targets: int = 0
    longest: int = 0

    @property
    def efficiency(self) -> float:
        """Share of the processed tokens that belong to samples."""
        return self.tokens / max(self.tokens + self.padding, 1)

    def __add__(self, other: RowStats) -> RowStats:
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return RowStats(**{**sums, "longest": max(self.longest, other.longest)})


@dataclass(frozen=True)
class RowGroup:
    """The rows of one source.

    Attributes:
        name: The source's path.
        weight: Passes over the rows per epoch.
        max_tokens: The most tokens a row has.
        padded: Rows are filled to `max_tokens`; otherwise to the longest of a batch.
    """

    name: str
    weight: float
    store: TokenStore
    segments: Segments
    max_tokens: int
    padded: bool

    def __len__(self) -> int:
        return len(self.segments)

    @cached_property
    def stats(self) -> RowStats:
        """Counts of all rows, each taken once. Reads the masks of stores that have one."""
        segments, trained = self.segments, self.store.trained
        tokens = int(segments.lengths.sum())
        targets = tokens - len(segments.lengths)
        if trained is not None:
            whole = segments.lengths == self.store.lengths[segments.samples]
            targets = int(self.store.targets[segments.samples[whole]].sum())
            begins = self.store.starts[segments.samples[~whole]] + segments.offsets[~whole]
            for begin, length in zip(begins.tolist(), segments.lengths[~whole].tolist(), strict=True):
                targets += int(trained[begin + 1 : begin + length].sum())
        return RowStats(
            rows=len(self),
            samples=len(np.unique(segments.samples)),
            tokens=tokens,
            padding=len(self) * self.max_tokens - tokens if self.padded else 0,
            targets=targets,
            longest=int(segments.lengths.max(initial=0)),
        )

    def document_lengths(self, row: int) -> np.ndarray:
        """(D,) int64: tokens of each document of a row; padding is none."""
        first, last = self.segments.rows[row], self.segments.rows[row + 1]
        return self.segments.lengths[first:last]

    def row_length(self, row: int) -> int:
        """Tokens of a row, without padding."""
        return int(self.document_lengths(row).sum())

    def write_row(self, row: int, out: dict[str, np.ndarray]) -> None:
        """Write a row into (T,) arrays that hold padding already. See [Note: what a packed row holds]."""
        at, document = 0, 0
        for segment in range(self.segments.rows[row], self.segments.rows[row + 1]):
            length = int(self.segments.lengths[segment])
            begin = int(self.store.starts[self.segments.samples[segment]] + self.segments.offsets[segment])
            ids = self.store.tokens[begin : begin + length].astype(np.int64)
            labels = ids
            if self.store.trained is not None:
                labels = np.where(self.store.trained[begin : begin + length] == 1, ids, NO_TARGET)
            here = slice(at, at + length)
            out["input_ids"][here], out["labels"][here] = ids, labels
            out["labels"][at] = NO_TARGET
            out["position_ids"][here], out["document_ids"][here] = np.arange(length), document
            at, document = at + length, document + 1
        rest = len(out["input_ids"]) - at
        out["position_ids"][at:], out["document_ids"][at:] = np.arange(rest), document

    def places(self, row: int) -> list[str]:
        """Where the samples of a row came from."""
        first, last = self.segments.rows[row], self.segments.rows[row + 1]
        return [self.store.place(int(sample)) for sample in self.segments.samples[first:last]]


@dataclass(frozen=True)
class PackedRows:
    """All rows of a training or validation set; row numbers run through the groups.

    Attributes:
        packing: Several samples share a row. Without, a batch is padded to its longest row, and has an attention mask
            instead of documents.
        pad_id: Id of padding tokens.
    """

    groups: tuple[RowGroup, ...]
    max_tokens: int
    packing: bool
    pad_id: int

    def __len__(self) -> int:
        return int(self._firsts[-1])

    @cached_property
    def _firsts(self) -> np.ndarray:
        """(G + 1,): the first row of each group, and the end."""
        return np.concatenate([[0], np.cumsum([len(group) for group in self.groups])]).astype(np.int64)

    @cached_property
    def stats(self) -> RowStats:
        return sum((group.stats for group in self.groups), RowStats())

    def locate(self, row: int) -> tuple[RowGroup, int]:
        """The group of a row, and its number there."""
        group = int(np.searchsorted(self._firsts, row, side="right")) - 1
        return self.groups[group], row - int(self._firsts[group])

    def places(self, row: int) -> list[str]:
        group, own = self.locate(row)
        return group.places(own)

    def document_lengths(self, rows: Sequence[int]) -> np.ndarray:
        """(D,) int64: tokens of each document of some rows; padding is none."""
        located = [self.locate(row) for row in rows]
        return np.concatenate([np.zeros(0, np.int64), *(group.document_lengths(own) for group, own in located)])

    def arrays(self, rows: Sequence[int]) -> dict[str, np.ndarray]:
        """A batch of rows as int64 (B, T) arrays.

        Returns:
            input_ids, labels, position_ids, and document_ids where rows are packed, else attention_mask (1: a token).
        """
        located = [self.locate(int(row)) for row in rows]
        lengths = [group.row_length(own) for group, own in located]
        width = self.max_tokens if self.packing else max(lengths, default=0)
        shape = (len(located), width)
        out = {name: np.zeros(shape, dtype=np.int64) for name in ("position_ids", "document_ids")}
        out["input_ids"] = np.full(shape, self.pad_id, dtype=np.int64)
        out["labels"] = np.full(shape, NO_TARGET, dtype=np.int64)
        for i, (group, own) in enumerate(located):
            group.write_row(own, {name: array[i] for name, array in out.items()})
        if not self.packing:
            del out["document_ids"], out["position_ids"]
            out["attention_mask"] = (np.arange(width)[None] < np.array(lengths)[:, None]).astype(np.int64)
        return out

    def batch(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """The same as torch tensors."""
        import torch

        return {name: torch.from_numpy(array) for name, array in self.arrays(rows).items()}
