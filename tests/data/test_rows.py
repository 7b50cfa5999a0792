"""Packed rows separate documents; batches are a pure function of the step number."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from megatrain.data.packing import Pieces, Segments, cut_stream, one_per_row
from megatrain.data.rows import NO_TARGET, PackedRows, RowGroup, StepLoader
from megatrain.data.store import StoreWriter, TokenStore

PAD = 9


def _store(folder: Path, samples: list[list[int]], trained: list[list[int]] | None = None) -> TokenStore:
    folder.mkdir()
    writer = StoreWriter(folder, "stream" if trained is None else "samples")
    for i, ids in enumerate(samples):
        if trained is None:
            writer.extend(np.array(ids))
            writer.end_document(0, i + 1, i)
        else:
            writer.add(np.array(ids), np.array(trained[i]), 0, i + 1, i)
    writer.finish({"files": [{"path": "file.jsonl", "unit": "line"}]})
    store = TokenStore.open(folder)
    assert store is not None
    return store


def _numbered(folder: Path, counts: list[int], weights: list[float]) -> PackedRows:
    """Groups of rows with two tokens each; the first token identifies the row."""
    groups, first = [], 0
    for number, (count, weight) in enumerate(zip(counts, weights, strict=True)):
        store = _store(folder / str(number), [[first + i, 0] for i in range(count)])
        segments = cut_stream(np.arange(count), np.full(count, 2), 2)
        groups.append(RowGroup(str(number), weight, store, segments, 2, padded=True))
        first += count
    return PackedRows(tuple(groups), 2, packing=True, pad_id=PAD)


def _seen(loader: StepLoader, step: int) -> list[int]:
    return loader.batch(step)["input_ids"][:, 0].tolist()


def test_packed_rows_separate_documents(tmp_path: Path) -> None:
    """Positions restart, and the first token of a document is never a target."""
    store = _store(tmp_path / "s", [[1, 2, 3], [4, 5, 6, 7], [8, 8]], [[1, 1, 1], [0, 1, 1, 0], [0, 1]])
    segments = Segments(np.array([0, 2, 3]), np.array([0, 1, 2]), np.zeros(3, np.int64), np.array([3, 4, 2]))
    rows = PackedRows((RowGroup("file", 1.0, store, segments, 9, padded=True),), 9, packing=True, pad_id=PAD)
    batch = {name: array.tolist() for name, array in rows.arrays([0, 1]).items()}
    x = NO_TARGET
    assert batch == {
        "input_ids": [[1, 2, 3, 4, 5, 6, 7, PAD, PAD], [8, 8] + [PAD] * 7],
        "labels": [[x, 2, 3, x, 5, 6, x, x, x], [x, 8] + [x] * 7],
        "position_ids": [[0, 1, 2, 0, 1, 2, 3, 0, 1], [0, 1, 0, 1, 2, 3, 4, 5, 6]],
        "document_ids": [[0, 0, 0, 1, 1, 1, 1, 2, 2], [0, 0, 1, 1, 1, 1, 1, 1, 1]],
        "attention_mask": [[1, 1, 1, 1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0, 0, 0, 0]],
    }
    assert rows.places(0) == ["file.jsonl:1", "file.jsonl:2"]
    stats = rows.stats
    assert (stats.rows, stats.samples, stats.tokens, stats.padding, stats.targets) == (2, 3, 9, 9, 5)


def test_a_stream_document_continues_in_the_next_row_as_a_new_one(tmp_path: Path) -> None:
    """The previous row cannot be attended to, so positions restart and the first token is not a target."""
    store = _store(tmp_path / "s", [[1, 2, 3, 4, 5], [6, 7, 8]])
    segments = cut_stream(np.arange(2), store.lengths, 4)
    rows = PackedRows((RowGroup("file", 1.0, store, segments, 4, padded=True),), 4, packing=True, pad_id=PAD)
    batch = {name: array.tolist() for name, array in rows.arrays([0, 1]).items()}
    assert batch["input_ids"] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert batch["labels"] == [[NO_TARGET, 2, 3, 4], [NO_TARGET, NO_TARGET, 7, 8]]
    assert batch["position_ids"] == [[0, 1, 2, 3], [0, 0, 1, 2]]
    assert batch["document_ids"] == [[0, 0, 0, 0], [0, 1, 1, 1]]
    assert rows.stats.targets == (rows.arrays([0, 1])["labels"] != NO_TARGET).sum()


def test_unpacked_rows_are_padded_to_the_longest_of_the_batch(tmp_path: Path) -> None:
    store = _store(tmp_path / "s", [[1, 2], [3, 4, 5], [6, PAD, 6, PAD, 6]], [[0, 1], [0, 1, 1], [0, 1, 1, 1, 1]])
    segments = one_per_row(Pieces(np.arange(3), np.zeros(3, np.int64), np.asarray(store.lengths), 0, 0))
    rows = PackedRows((RowGroup("file", 1.0, store, segments, 8, padded=False),), 8, packing=False, pad_id=PAD)
    batch = rows.batch([0, 1])
    assert set(batch) == {"input_ids", "labels", "attention_mask"}
    assert all(tensor.dtype == torch.int64 and tensor.is_contiguous() for tensor in batch.values())
    assert batch["input_ids"].tolist() == [[1, 2, PAD], [3, 4, 5]]
    assert batch["labels"].tolist() == [[NO_TARGET, 2, NO_TARGET], [NO_TARGET, 4, 5]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert rows.batch([2])["labels"].tolist() == [[NO_TARGET, PAD, 6, PAD, 6]], "pad ids inside a sample are targets"
    assert rows.stats.padding == 0


def test_the_last_partial_step_of_an_epoch_is_kept(tmp_path: Path) -> None:
    loader = StepLoader(_numbered(tmp_path, [10], [1.0]), rows_per_step=4, seed=0)
    assert loader.steps_per_epoch == 3
    steps = [_seen(loader, step) for step in range(6)]
    assert [len(step) for step in steps] == [4, 4, 2, 4, 4, 2]
    assert all(sorted(row for step in epoch for row in step) == list(range(10)) for epoch in (steps[:3], steps[3:]))
    assert steps[:3] != steps[3:], "another order in another epoch"
    assert [len(batch["labels"]) for batch in loader.epoch(1)] == [4, 4, 2]


def test_the_step_number_alone_determines_the_batch(tmp_path: Path) -> None:
    """A new loader gives the same batches in any order."""
    rows = _numbered(tmp_path, [23, 17], [1.0, 0.5])
    want = {step: _seen(StepLoader(rows, 4, seed=7), step) for step in range(40)}
    loader = StepLoader(rows, 4, seed=7)
    order = list(range(40)) * 2
    random.Random(0).shuffle(order)
    assert all(_seen(loader, step) == want[step] for step in order)
    assert want[0] != _seen(StepLoader(rows, 4, seed=8), 0)


def test_a_distant_step_costs_no_more_than_ordering_one_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier steps are not iterated over."""
    loader = StepLoader(_numbered(tmp_path, [23], [1.0]), 4, seed=7)
    calls: list[int] = []
    original = loader._order_of
    monkeypatch.setattr(loader, "_order_of", lambda epoch: calls.append(epoch) or original(epoch))
    loader.batch(6_000_000)
    loader.batch(6_000_001)
    assert calls == [1_000_000]


def test_weights_are_passes_per_epoch(tmp_path: Path) -> None:
    rows = _numbered(tmp_path, [10, 10, 10], [1.0, 0.5, 1.5])
    loader = StepLoader(rows, 30, seed=3)
    assert (loader.rows_per_epoch, loader.steps_per_epoch) == (30, 1)
    first, second = (Counter(_seen(loader, epoch)) for epoch in (0, 1))
    counts = [[sum(seen[row] for row in range(at, at + 10)) for at in (0, 10, 20)] for seen in (first, second)]
    assert counts == [[10, 5, 15]] * 2
    assert all(first[row] + second[row] == times for row in range(30) for times in [(2, 1, 3)[row // 10]])


def test_without_shuffling_rows_come_once_and_in_order(tmp_path: Path) -> None:
    loader = StepLoader(_numbered(tmp_path, [3, 2], [2.0, 0.5]), 2, seed=3, shuffle=False)
    assert [_seen(loader, step) for step in range(loader.steps_per_epoch)] == [[0, 1], [2, 3], [4]]


def test_places_name_the_samples_of_a_step(tmp_path: Path) -> None:
    loader = StepLoader(_numbered(tmp_path, [5], [1.0]), 2, seed=0)
    assert loader.places(1) == [f"file.jsonl:{row + 1}" for row in _seen(loader, 1)]
