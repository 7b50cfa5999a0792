"""Rows of tokens as batches for the engine, and which rows form which step.

Legend: B rows of a batch, T tokens of a row, R rows of a group.

[Note: what a packed row holds]
    input_ids     a0 a1 a2 b0 b1 b2 b3  p  p      a, b: documents; p: padding
    labels         . a1 a2  . b1 b2  .  .  .      . is -100; here b3 is not trained
    position_ids   0  1  2  0  1  2  3  0  1
    document_ids   0  0  0  1  1  1  1  2  2
Labels are not shifted: the loss uses the label at t + 1 for the token at t. The first token of a document is never a target,
since it would be predicted from the previous document. Padding is masked by position, never by id, because the padding id
may be EOS. Rows of groups (pairs, labelled answers) also have
    sequence_ids        number of the sequence in the batch; 2p and 2p + 1 are a group, see [Note: groups] in groups.py
    reference_logprobs  the reference's log-probability of the sequence, once it is known (`with_reference`)
    desirable           whether a labelled answer is a good one

[Note: which rows form a step]
The rows of a step are a pure function of the step number: an epoch takes every group of rows `weight` times, in an order seeded
by the epoch. The two rows of a group are taken together. Nothing is remembered between steps, so the step number alone is enough
to resume, and any step is found at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from megatrain.data.groups import CHOSEN
from megatrain.data.packing import Segments, permutation
from megatrain.data.store import TokenStore
from megatrain.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

NO_TARGET = -100


@dataclass(frozen=True)
class RowStats:
    """Counts of a set of rows."""

    rows: int = 0
    samples: int = 0
    tokens: int = 0  # of samples, without padding
    padding: int = 0  # tokens
    targets: int = 0  # tokens with a label
    longest: int = 0  # tokens of the longest document

    @property
    def efficiency(self) -> float:
        """Share of all tokens that is not padding."""
        return self.tokens / max(self.tokens + self.padding, 1)

    def __add__(self, other: RowStats) -> RowStats:
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return RowStats(**{**sums, "longest": max(self.longest, other.longest)})


@dataclass(frozen=True)
class RowGroup:
    """The rows of one source."""

    name: str  # the source's path
    weight: float  # passes over the rows per epoch
    store: TokenStore
    segments: Segments
    max_tokens: int  # length limit of a row
    padded: bool  # whether rows are padded to max_tokens; otherwise to the longest row of the batch
    reference: np.ndarray | None = None  # of a store of groups: (segments,) fp32, log-probabilities by the reference

    def __len__(self) -> int:
        return len(self.segments)

    @cached_property
    def stats(self) -> RowStats:
        """Counts of all rows, each taken once."""
        segments, store = self.segments, self.store
        tokens = int(segments.lengths.sum())
        targets = tokens - len(segments.lengths)
        if store.trained is not None:
            whole = segments.lengths == store.lengths[segments.samples]
            targets = int(store.targets[segments.samples[whole]].sum())
            targets += sum(int(store.run(*self._run(cut))[1].sum()) for cut in np.flatnonzero(~whole).tolist())
        return RowStats(
            rows=len(self),
            samples=len(np.unique(segments.samples)),
            tokens=tokens,
            padding=len(self) * self.max_tokens - tokens if self.padded else 0,
            targets=targets,
            longest=int(segments.lengths.max(initial=0)),
        )

    def _run(self, segment: int) -> tuple[int, int, int]:
        """Sample, offset and length of a segment."""
        segments = self.segments
        return int(segments.samples[segment]), int(segments.offsets[segment]), int(segments.lengths[segment])

    def document_lengths(self, row: int) -> np.ndarray:
        """(D,) int64: tokens of each document of a row; padding is not a document."""
        first, last = self.segments.rows[row], self.segments.rows[row + 1]
        return self.segments.lengths[first:last]

    def write_row(self, row: int, out: dict[str, np.ndarray], first_sequence: int = 0) -> None:
        """Write a row into (T,) arrays filled with padding. See [Note: what a packed row holds].

        `first_sequence`: number of the row's first sequence in the batch.
        """
        at, document = 0, 0
        for segment in range(self.segments.rows[row], self.segments.rows[row + 1]):
            ids, trained = self.store.run(*self._run(segment))
            here = slice(at, at + len(ids))
            out["input_ids"][here], out["labels"][here] = ids, np.where(trained, ids.astype(np.int64), NO_TARGET)
            out["position_ids"][here], out["document_ids"][here] = np.arange(len(ids)), document
            if "sequence_ids" in out:
                out["sequence_ids"][here] = first_sequence + document
                if self.reference is not None:
                    out["reference_logprobs"][here] = self.reference[segment]
                if "desirable" in out:
                    out["desirable"][here] = self.store.roles[self.segments.samples[segment]] == CHOSEN
            at, document = at + len(ids), document + 1
        rest = len(out["input_ids"]) - at
        out["position_ids"][at:], out["document_ids"][at:] = np.arange(rest), document

    def places(self, row: int) -> list[str]:
        """Where the samples of a row came from."""
        first, last = self.segments.rows[row], self.segments.rows[row + 1]
        return [self.store.place(int(sample)) for sample in self.segments.samples[first:last]]


@dataclass(frozen=True)
class PackedRows:
    """All rows of a training or validation set, numbered through all groups."""

    groups: tuple[RowGroup, ...]
    max_tokens: int
    packing: bool  # samples share rows; else a batch is padded to its longest row and has no document ids
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

    @property
    def grouped(self) -> bool:
        """Whether the sequences come in groups of two."""
        return any(group.store.grouped for group in self.groups)

    @property
    def together(self) -> int:
        """Rows that are never separated, counted from the first."""
        return 2 if self.grouped and not self.packing else 1

    def with_reference(self, values: Sequence[np.ndarray]) -> PackedRows:
        """These rows with the reference's log-probabilities: an array of (segments,) for each group of rows."""
        groups = [replace(group, reference=one) for group, one in zip(self.groups, values, strict=True)]
        return replace(self, groups=tuple(groups))

    @cached_property
    def shared(self) -> bool:
        """Whether any row holds several documents."""
        return self.packing and any(np.diff(group.segments.rows).max(initial=0) > 1 for group in self.groups)

    def length_of(self, rows: Sequence[int]) -> int:
        """Tokens of each row of a batch: `max_tokens` with packing, else those of its longest row."""
        if self.packing:
            return self.max_tokens
        located = [self.locate(int(row)) for row in rows]
        return max((int(group.document_lengths(own).sum()) for group, own in located), default=0)

    def locate(self, row: int) -> tuple[RowGroup, int]:
        """The group of a row, and the row's number in that group."""
        group = int(np.searchsorted(self._firsts, row, side="right")) - 1
        return self.groups[group], row - int(self._firsts[group])

    def places(self, row: int) -> list[str]:
        group, own = self.locate(row)
        return group.places(own)

    def document_lengths(self, rows: Sequence[int]) -> np.ndarray:
        """(D,) int64: tokens of each document of some rows; padding is not a document."""
        located = [self.locate(row) for row in rows]
        return np.concatenate([np.zeros(0, np.int64), *(group.document_lengths(own) for group, own in located)])

    def arrays(self, rows: Sequence[int]) -> dict[str, np.ndarray]:
        """A batch of rows as int64 (B, T) arrays: input_ids, labels and attention_mask (1: token, 0: padding); position_ids and
        document_ids where any row of the set holds several documents, so that all its batches are alike.

        Rows of groups have further keys, of other types: see [Note: what a packed row holds]."""
        located = [self.locate(int(row)) for row in rows]
        lengths = [int(group.document_lengths(own).sum()) for group, own in located]
        width = self.max_tokens if self.packing else max(lengths, default=0)
        shape = (len(located), width)
        out: dict[str, np.ndarray] = {
            name: np.zeros(shape, dtype=np.int64) for name in ("position_ids", "document_ids")
        }
        out["input_ids"] = np.full(shape, self.pad_id, dtype=np.int64)
        out["labels"] = np.full(shape, NO_TARGET, dtype=np.int64)
        if self.grouped:
            out["sequence_ids"] = np.zeros(shape, dtype=np.int64)
            if all(group.reference is not None for group in self.groups):
                out["reference_logprobs"] = np.zeros(shape, dtype=np.float32)
            if any(group.store.kind == "labels" for group in self.groups):
                out["desirable"] = np.zeros(shape, dtype=bool)
        sequences = 0
        for i, (group, own) in enumerate(located):
            group.write_row(own, {name: array[i] for name, array in out.items()}, sequences)
            sequences += len(group.document_lengths(own))
        if not self.shared:
            del out["document_ids"], out["position_ids"]
        out["attention_mask"] = (np.arange(width)[None] < np.array(lengths)[:, None]).astype(np.int64)
        return out

    def batch(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """`arrays` as torch tensors."""
        import torch

        return {name: torch.from_numpy(array) for name, array in self.arrays(rows).items()}


class StepLoader:
    """Batches by step number. See [Note: which rows form a step].

    The last step of an epoch may be partial. Without `shuffle`, an epoch has every row once, in order, whatever the weights.

    Raises:
        UserError: A step would separate rows that belong together.
    """

    def __init__(self, rows: PackedRows, rows_per_step: int, seed: int, shuffle: bool = True):
        assert rows_per_step > 0, rows_per_step
        assert len(rows) > 0, "there are no rows"
        self.rows, self.rows_per_step = rows, rows_per_step
        self._seed, self._shuffle, self._unit = seed, shuffle, rows.together
        if rows_per_step % self._unit:
            what = f"a step of {rows_per_step} rows would separate the two sequences of a pair"
            raise UserError(what, "batch.tokens_per_step", "without packing, give an even number of rows")
        # A group keeps at least one row, so a source with a small weight does not disappear.
        units = [(g.weight, len(g) // self._unit) for g in rows.groups]
        self._takes = [max(1, round(weight * count)) if shuffle and count else count for weight, count in units]
        self.rows_per_epoch = sum(self._takes) * self._unit
        self.steps_per_epoch = -(-self.rows_per_epoch // rows_per_step)
        self._order: tuple[int, np.ndarray] | None = None  # the current epoch and its rows

    def rows_of(self, step: int) -> np.ndarray:
        """Row numbers of a step; steps count from 0."""
        epoch, own = divmod(step, self.steps_per_epoch)
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, self._order_of(epoch))
        return self._order[1][own * self.rows_per_step : (own + 1) * self.rows_per_step]

    def batch(self, step: int) -> dict[str, Tensor]:
        """The batch of a step: int64 (B, T) tensors; see `PackedRows.arrays`."""
        return self.rows.batch(self.rows_of(step).tolist())

    def places(self, step: int) -> list[str]:
        """Where the samples of a step came from."""
        return [place for row in self.rows_of(step).tolist() for place in self.rows.places(row)]

    def epoch(self, number: int = 0) -> Iterator[dict[str, Tensor]]:
        """All batches of an epoch."""
        first = number * self.steps_per_epoch
        return (self.batch(step) for step in range(first, first + self.steps_per_epoch))

    def _order_of(self, epoch: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(len(self.rows))
        parts, first = [], 0
        for number, (group, take) in enumerate(zip(self.rows.groups, self._takes, strict=True)):
            count = len(group) // self._unit
            parts.append(first + self._group_rows(number, count, epoch * take, take))
            first += count
        chosen = np.concatenate(parts)
        chosen = chosen[permutation(len(chosen), self._seed, 0, epoch)]
        return (chosen[:, None] * self._unit + np.arange(self._unit)).reshape(-1)

    def _group_rows(self, group: int, count: int, begin: int, take: int) -> np.ndarray:
        """Entries `begin..begin + take` of an endless sequence of passes over a group, each pass in a new order.

        So a weight of 0.5 takes the other half in the next epoch, and 1.5 takes every row once or twice.
        """
        if take == 0:
            return np.zeros(0, dtype=np.int64)
        passes = range(begin // count, (begin + take - 1) // count + 1)
        rows = np.concatenate([permutation(count, self._seed, 1, group, one) for one in passes])
        skip = begin - passes[0] * count
        return rows[skip : skip + take]


class Batches(Protocol):
    def batch(self, step: int, /) -> dict[str, Tensor]: ...
    def rows_of(self, step: int, /) -> Any: ...


class Prefetcher:
    """Batches of the steps `first` to `end` - 1, each built by a thread while the previous step is computed.

    An error of the thread is raised by the `next` that would have returned its batch.
    """

    def __init__(self, loader: Batches, first: int, end: int):
        self._loader, self._position, self._end = loader, first, end
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._ahead: Future[tuple[dict[str, Tensor], list[int]]] | None = None

    def __enter__(self) -> Prefetcher:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def next(self) -> tuple[dict[str, Tensor], list[int]]:
        """The next step's batch and the numbers of its rows."""
        assert self._ahead is not None, f"there is no batch {self._position} of {self._end}"
        made = self._ahead.result()
        self._position += 1
        self._start()
        return made

    def _start(self) -> None:
        more = self._position < self._end
        self._ahead = self._pool.submit(self._make, self._position) if more else None

    def _make(self, position: int) -> tuple[dict[str, Tensor], list[int]]:
        # both calls here: the loader keeps the order of the latest epoch asked for, so only one thread may ask
        return self._loader.batch(position), self._loader.rows_of(position).tolist()
