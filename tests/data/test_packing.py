"""Rows contain the right tokens for any lengths, compared with slow loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.data.packing import (
    Pieces,
    Segments,
    best_fit,
    cut_samples,
    cut_stream,
    in_fraction,
    one_per_row,
    one_per_row_stream,
    pack,
    permutation,
)

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=60)
ROW = st.integers(2, 40)


def _rows(segments: Segments) -> list[list[tuple[int, int, int]]]:
    """(sample, offset, length) of each segment of each row."""
    parts = list(zip(segments.samples.tolist(), segments.offsets.tolist(), segments.lengths.tolist(), strict=True))
    return [parts[begin:end] for begin, end in zip(segments.rows[:-1], segments.rows[1:], strict=True)]


def _whole(lengths: list[int]) -> Pieces:
    sizes = np.array(lengths, np.int64)
    return Pieces(np.arange(len(lengths)), np.zeros(len(lengths), np.int64), sizes, 0, 0)


@given(LENGTHS, ROW)
@settings(max_examples=200, deadline=None)
def test_streams_fill_rows_to_the_last_token(lengths: list[int], max_tokens: int) -> None:
    chosen = np.arange(100, 100 + len(lengths)) * 2
    tokens = [(int(sample), i) for sample, n in zip(chosen, lengths, strict=True) for i in range(n)]
    want = [tokens[at : at + max_tokens] for at in range(0, len(tokens), max_tokens)]
    if len(want) > 1 and len(want[-1]) == 1:
        want.pop()
    rows = _rows(cut_stream(chosen, np.array(lengths, np.int64), max_tokens))
    assert [[(s, o + i) for s, o, n in row for i in range(n)] for row in rows] == want
    assert all(len({sample for sample, _, _ in row}) == len(row) for row in rows), "a document is one segment of a row"


@given(LENGTHS, ROW)
@settings(max_examples=100, deadline=None)
def test_unpacked_streams_begin_a_row_with_every_document(lengths: list[int], max_tokens: int) -> None:
    rows = _rows(one_per_row_stream(np.arange(len(lengths)), np.array(lengths, np.int64), max_tokens))
    want = [
        [(sample, at, min(max_tokens, n - at))]
        for sample, n in enumerate(lengths)
        for at in range(0, n, max_tokens)
        if n - at > 1
    ]
    assert rows == want


@given(st.lists(st.integers(1, 40), min_size=1, max_size=200), st.integers(0, 5))
@settings(max_examples=100, deadline=None)
def test_every_sample_is_packed_once_and_whole(lengths: list[int], seed: int) -> None:
    rows = _rows(pack(_whole(lengths), 40, seed))
    assert sorted(part for row in rows for part in row) == [(i, 0, n) for i, n in enumerate(lengths)]
    assert all(sum(n for _, _, n in row) <= 40 for row in rows)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=80))
@settings(max_examples=100, deadline=None)
def test_best_fit_equals_a_slow_reference(lengths: list[int]) -> None:
    rows: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row in rows if sum(row) + length <= 40]
        if fitting:
            max(fitting, key=sum).append(length)
        else:
            rows.append([length])
    packed = [np.array(lengths)[row].tolist() for row in best_fit(np.array(lengths), 40)]
    assert sorted(map(sum, packed)) == sorted(map(sum, rows))


def test_packing_fills_rows_well_and_by_seed() -> None:
    lengths = np.random.default_rng(0).integers(50, 900, 5000).tolist()
    first, again, other = (pack(_whole(lengths), 2048, seed) for seed in (1, 1, 2))
    assert sum(lengths) / (len(first) * 2048) > 0.99
    assert _rows(first) == _rows(again)
    assert _rows(first) != _rows(other)


@pytest.mark.parametrize(
    ("overflow", "pieces", "lost"),
    [
        ("drop", [(7, 0, 3)], 2),
        ("truncate", [(7, 0, 3), (8, 0, 4)], 1),
        ("split", [(7, 0, 3), (8, 0, 4), (8, 4, 4), (9, 4, 2)], 2),
    ],
)
def test_too_long_samples_follow_the_policy(overflow: str, pieces: list, lost: int) -> None:
    """The last piece of sample 8 and the first of sample 9 have no target."""

    def targets_in(sample: int, offset: int, length: int) -> int:
        return 0 if (sample, offset) in ((8, 8), (9, 0)) else length

    got = cut_samples(np.array([7, 8, 9]), np.array([3, 10, 6]), 4, overflow, targets_in)
    assert list(zip(got.samples.tolist(), got.offsets.tolist(), got.lengths.tolist(), strict=True)) == pieces
    assert (got.too_long, got.lost) == (2, lost)
    assert len(one_per_row(got)) == len(pieces)


def test_permutations_never_change() -> None:
    """A resumed run must see the same order in every version."""
    assert permutation(8, 3, 1).tolist() == [0, 6, 2, 1, 3, 7, 4, 5]
    assert sorted(permutation(1000, 5).tolist()) == list(range(1000))
    assert permutation(50, 1).tolist() != permutation(50, 2).tolist()


def test_fractions_depend_on_each_sample_only() -> None:
    hashes = np.random.default_rng(0).integers(0, 2**64, 20_000, dtype=np.uint64)
    held = in_fraction(hashes, 0.1)
    assert abs(held.mean() - 0.1) < 0.01
    assert in_fraction(hashes[::-1], 0.1).tolist() == held[::-1].tolist()
    assert (in_fraction(hashes, 0.2) >= held).all(), "a larger fraction holds the smaller one"
