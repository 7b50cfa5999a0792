"""Which tokens of a store form which row. Pure functions of arrays; no token is read.

A row is a sequence of segments. A segment is a run of tokens of one sample and a separate document, with positions from 0.

Streams (plain text) fill rows to the last token: a document that does not fit continues in the next row, as a new document.
Samples (chats) stay whole. They are packed best-fit decreasing within windows of samples taken in a seeded order: windows mix
the samples and bound the work. Each window fills at least `_WINDOW_ROWS` rows, so its last, partly filled row hardly counts.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

_WINDOW_SAMPLES = 4096
_WINDOW_ROWS = 64


@dataclass(frozen=True)
class Segments:
    """Rows as runs of tokens."""

    rows: np.ndarray  # (R + 1,) int64: the segments of row r are `rows[r]:rows[r + 1]`
    samples: np.ndarray  # (S,) int64: the sample of each segment
    offsets: np.ndarray  # (S,) int64: its first token, relative to the sample
    lengths: np.ndarray  # (S,) int64: its number of tokens

    def __len__(self) -> int:
        return len(self.rows) - 1


@dataclass(frozen=True)
class Pieces:
    """Samples cut to the length of a row, as (P,) int64 arrays."""

    samples: np.ndarray
    offsets: np.ndarray
    lengths: np.ndarray
    too_long: int  # samples longer than a row
    lost: int  # pieces left out: dropped by the policy, or without a target


def cut_stream(chosen: np.ndarray, lengths: np.ndarray, max_tokens: int) -> Segments:
    """Rows of exactly `max_tokens` tokens, except the last, of the (C,) samples `chosen`; their lengths (C,) are > 0."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    if total % max_tokens == 1 and total > 1:
        total -= 1  # a row of one token has no target
    begins = np.unique(np.concatenate([[0], ends[ends < total], np.arange(0, total, max_tokens)])).astype(np.int64)
    begins = begins[begins < total]
    which = np.searchsorted(ends, begins, side="right")
    return Segments(
        rows=np.append(np.searchsorted(begins, np.arange(0, total, max_tokens)), len(begins)).astype(np.int64),
        samples=chosen[which],
        offsets=begins - (ends[which] - lengths[which]),
        lengths=np.diff(np.append(begins, total)),
    )


def cut_samples(
    chosen: np.ndarray, lengths: np.ndarray, max_tokens: int, overflow: str, targets_in: Callable[[int, int, int], int]
) -> Pieces:
    """Cut those of the (C,) samples `chosen`, of (C,) `lengths`, that are longer than a row.

    `overflow`: drop | truncate | split; under `error` the caller has already refused long samples.
    `targets_in`: (sample, offset, length) -> number of targets in that run of tokens.
    """
    long = lengths > max_tokens
    samples, offsets, sizes = [chosen[~long]], [np.zeros((~long).sum(), np.int64)], [lengths[~long]]
    lost = 0
    for sample, length in zip(chosen[long].tolist(), lengths[long].tolist(), strict=True):
        begins = {"drop": [], "truncate": [0], "split": list(range(0, length, max_tokens))}[overflow]
        pieces = [(at, min(max_tokens, length - at)) for at in begins]
        kept = [(at, size) for at, size in pieces if targets_in(sample, at, size) > 0]
        lost += max(len(pieces), 1) - len(kept)
        samples.append(np.full(len(kept), sample, np.int64))
        offsets.append(np.array([at for at, _ in kept], np.int64))
        sizes.append(np.array([size for _, size in kept], np.int64))
    return Pieces(*map(np.concatenate, (samples, offsets, sizes)), too_long=int(long.sum()), lost=lost)


def cut_groups(
    chosen: np.ndarray,
    lengths: np.ndarray,
    max_tokens: int,
    overflow: str,
    targets_in: Callable[[int, int, int], int],
    together: bool,
) -> Pieces:
    """Cut or drop the groups of two consecutive samples that are too long: pieces 2p and 2p + 1 are a group.

    Args:
        chosen, lengths, max_tokens, targets_in: As for `cut_samples`.
        overflow: drop | truncate; under `error` the caller has already refused long groups.
        together: Whether both lie in one row, so that the sum of their lengths counts. Truncated is the longer of the two.
    """
    first, second = lengths[0::2], lengths[1::2]
    long = (first + second if together else np.maximum(first, second)) > max_tokens
    samples, sizes = chosen.reshape(-1, 2), lengths.reshape(-1, 2).copy()
    kept = ~long
    for group in np.flatnonzero(long).tolist() if overflow == "truncate" else ():
        a, b = (int(size) for size in sizes[group])
        half = max_tokens // 2
        limits = (max(half, max_tokens - b), max(half, max_tokens - a)) if together else (max_tokens, max_tokens)
        a, b = min(a, limits[0]), min(b, limits[1])
        if together:
            b = min(b, max_tokens - a)
        sizes[group] = a, b
        kept[group] = all(targets_in(int(one), 0, size) > 0 for one, size in zip(samples[group], (a, b), strict=True))
    return Pieces(
        samples[kept].reshape(-1),
        np.zeros(2 * int(kept.sum()), np.int64),
        sizes[kept].reshape(-1),
        too_long=int(long.sum()),
        lost=int((~kept).sum()),
    )


def pack(pieces: Pieces, max_tokens: int, seed: int, of: int = 1) -> Segments:
    """Pack pieces into rows, several to a row, without cutting any. The same seed gives the same rows.

    `of`: this many consecutive pieces stay together.
    """
    lengths = pieces.lengths.reshape(-1, of).sum(axis=1)
    count = len(lengths)
    order = permutation(count, seed)
    mean = max(lengths.mean(), 1) if count else max_tokens
    window = max(_WINDOW_SAMPLES, int(_WINDOW_ROWS * max_tokens / mean))
    rows: list[list[int]] = []
    for begin in range(0, count, window):
        part = order[begin : begin + window]
        rows += [part[row].tolist() for row in best_fit(lengths[part], max_tokens)]
    if of > 1:
        rows = [[of * group + own for group in row for own in range(of)] for row in rows]
    return _of_rows(pieces, rows)


def one_per_row(pieces: Pieces) -> Segments:
    return _of_rows(pieces, [[i] for i in range(len(pieces.lengths))])


def one_per_row_stream(chosen: np.ndarray, lengths: np.ndarray, max_tokens: int) -> Segments:
    """Start a row at every document; long ones continue in the next row. Pieces of one token have no target and are dropped."""
    counts = -(-lengths // max_tokens)
    samples = np.repeat(chosen, counts)
    offsets = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * max_tokens
    sizes = np.minimum(np.repeat(lengths, counts) - offsets, max_tokens)
    kept = sizes > 1
    return Segments(np.arange(kept.sum() + 1, dtype=np.int64), samples[kept], offsets[kept], sizes[kept])


def best_fit(lengths: np.ndarray, max_tokens: int) -> list[np.ndarray]:
    """Best-fit decreasing: the longest piece first, each into the fullest row with room for it.

    `lengths`: (P,), all in 1..max_tokens. Returns the indices of the pieces of each row.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), sorted, without full rows
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        at = bisect_left(room, (length, -1))
        if at < len(room):
            left, row = room.pop(at)
        else:
            left, row = max_tokens, len(rows)
            rows.append([])
        rows[row].append(piece)
        if left > length:
            insort(room, (left - length, row))
    return [np.array(row, dtype=np.int64) for row in rows]


def permutation(count: int, *seed: int) -> np.ndarray:
    """A permutation, (count,) int64, that depends only on the seed.

    A run resumed under another numpy version must see the same order. numpy guarantees the raw stream of a bit generator
    across versions, but not the result of `Generator.permutation`.
    """
    bits = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(count)
    return np.argsort(bits, kind="stable")


def in_fraction(hashes: np.ndarray, fraction: float) -> np.ndarray:
    """(S,) bool: the samples that belong to a fraction, decided by each sample's content hash alone."""
    return hashes < np.uint64(min(int(fraction * 2.0**64), 2**64 - 1))


def _of_rows(pieces: Pieces, rows: list[list[int]]) -> Segments:
    sizes = np.array([len(row) for row in rows], dtype=np.int64)
    order = np.array([piece for row in rows for piece in row], dtype=np.int64)
    return Segments(
        rows=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        samples=pieces.samples[order],
        offsets=pieces.offsets[order],
        lengths=pieces.lengths[order],
    )
