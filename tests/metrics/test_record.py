"""`metrics.jsonl`: what is written is read, and a resumed run's file tells its history once."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from megatrain.errors import UserError, WriteFailed
from megatrain.metrics.record import MetricsWriter, read_records
from step_records import record


def write(path: Path, steps: range, resume_step: int = 0) -> MetricsWriter:
    with MetricsWriter(path, resume_step) as writer:
        for step in steps:
            writer.write(record(step))
    return writer


def test_records_read_back_equal_and_names_carry_units(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written = [record(1), record(2, loss=None, skipped="gradient norm is inf", val_loss=2.25, val_tokens=7)]
    with MetricsWriter(path) as writer:
        for one in written:
            writer.write(one)
    assert read_records(path) == written
    first = orjson.loads(path.read_bytes().splitlines()[0])
    assert first["processed_tokens_per_s"] == 2000.0
    assert first["split_s"] == {"forward": 0.5}


def test_each_line_is_in_the_file_when_its_step_ends(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(record(1))
        assert [found.step for found in read_records(path)] == [1]


def test_resume_drops_records_of_steps_to_be_repeated(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(8))
    writer = write(path, range(6, 9), resume_step=5)
    assert writer.dropped == 2
    assert [found.step for found in writer.history] == [0, 1, 2, 3, 4, 5]
    assert [found.step for found in read_records(path)] == list(range(9))


def test_a_start_from_the_beginning_keeps_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(4))
    assert write(path, range(2)).dropped == 4
    assert [found.step for found in read_records(path)] == [0, 1]


def test_the_old_file_stays_whole_until_the_new_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(4))
    before = path.read_bytes()

    def crash(self: Path, target: Path) -> None:
        raise OSError("the machine stopped here")

    monkeypatch.setattr(Path, "replace", crash)
    with pytest.raises(WriteFailed, match="stopped here"):
        MetricsWriter(path, 2)
    assert path.read_bytes() == before


def test_a_line_cut_off_by_a_crash_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 4))
    path.write_bytes(path.read_bytes()[:-10])
    assert [found.step for found in read_records(path)] == [1, 2]
    write(path, range(3, 4), resume_step=2)
    assert [found.step for found in read_records(path)] == [1, 2, 3]


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 4))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b'{"step": \n' + lines[2])
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: is no step record"):
        read_records(path)


def test_unknown_names_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 2))
    path.write_bytes(path.read_bytes().replace(b'{"step"', b'{"mfu":0.5,"step"'))
    assert read_records(path) == [record(1)]
