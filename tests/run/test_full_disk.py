"""A disk that is full, or fails, in the middle of a run: a clear error, exit code 5, and a state to go on from."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from io import RawIOBase
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from counting import CountingEngine, Saved
from megatrain.commands.main import main
from megatrain.errors import UserError, WriteFailed
from megatrain.metrics import logger as run_logger
from megatrain.metrics import record as step_record
from megatrain.metrics.record import read_records
from megatrain.run.loop import train
from tiny_run import config, group_ended, make, prepare

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("files"))


no_group_left = pytest.fixture(autouse=True)(group_ended)


def full_from(monkeypatch: pytest.MonkeyPatch, module: Any, call: int) -> None:
    """From the `call`-th time on, what `module` writes to its file without a buffer ends in the middle, as on a full disk."""
    real: Callable[[RawIOBase, bytes], None] = step_record.write_whole
    calls: list[int] = []

    def write(file: RawIOBase, data: bytes) -> None:
        calls.append(1)
        if len(calls) >= call:
            real(file, data[: len(data) // 2])
            raise FULL
        real(file, data)

    monkeypatch.setattr(module, "write_whole", write)


@pytest.mark.parametrize("engine", ["host", "mesh"])
def test_a_full_disk_under_the_metrics_ends_the_run_saved(
    engine: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = config(files, run={"dir": str(tmp_path / "run")}, schedule={"steps": 6})
    if engine == "mesh":
        del plain["run"]["threads"]
    YAML().dump({**plain, "engine": engine}, tmp_path / "run.yaml")
    words = ["train", str(tmp_path / "run.yaml"), "--checkpoint.every_steps=null"]
    with monkeypatch.context() as patch:
        full_from(patch, step_record, 3)
        assert main(words) == 5
    said = capsys.readouterr().err
    saved = 3
    checkpoint = tmp_path / "run" / "checkpoints" / f"step_{saved:06d}"
    assert f"{tmp_path / 'run' / 'metrics.jsonl'}: cannot be written: No space left on device\n" in said
    assert f"make room there, then resume from {checkpoint} with --resume auto" in said
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "Traceback" not in said + log and "cannot be written: No space left on device" in log
    assert [r.step for r in read_records(tmp_path / "run" / "metrics.jsonl")] == [1, 2], "half a line is no record"
    assert main([*words, "--resume", "auto"]) == 0
    assert [r.step for r in read_records(tmp_path / "run" / "metrics.jsonl")] == [1, 2, *range(saved + 1, 7)]


def test_where_the_state_cannot_be_saved_either_the_newest_checkpoint_is_named(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(CountingEngine):
        def save(self, directory: Path, *rest: Any, **more: Any) -> Saved:
            if self.step > 2:
                raise UserError("No space left on device", str(directory), "make room")
            return super().save(directory, *rest, **more)

    full_from(monkeypatch, step_record, 3)
    run = make(files, tmp_path, "--checkpoint.every_steps=2")
    newest = tmp_path / "run" / "checkpoints" / "step_000002"
    with pytest.raises(
        WriteFailed, match=rf"(?s)metrics\.jsonl.*nor could step 3 be saved: .*resume from {newest} with"
    ):
        train(run, engine=Full())


def test_a_full_disk_under_the_log_is_a_warning(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full_from(monkeypatch, run_logger, 3)
    assert train(make(files, tmp_path), engine=CountingEngine()).step == 4
    assert capsys.readouterr().out.count("warning: log.txt cannot be written: No space left on device") == 1


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "latest"])
def test_a_file_that_the_disk_refuses_is_named(
    name: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.replace

    def replace(self: Path, target: Path) -> Path:
        if target.name == name:
            raise FULL
        return real(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(
        WriteFailed, match=rf"(?s){name}: cannot be written: No space left on device\n  -> .*--resume auto"
    ):
        train(make(files, tmp_path), engine=CountingEngine())


def test_a_partial_write_is_continued() -> None:
    class Slow(RawIOBase):
        taken = b""

        def write(self, data: Any) -> int:
            part = bytes(data[:3])
            self.taken += part
            return len(part)

    file = Slow()
    step_record.write_whole(file, b"0123456789")
    assert file.taken == b"0123456789"
