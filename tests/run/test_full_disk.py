"""A disk that is full, or fails, in the middle of a run: a clear error, exit code 5, and a state to go on from."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from io import RawIOBase
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from counting import CountingEngine, Saved
from megatrain.checkpoint.files import writer_identity
from megatrain.checkpoint.format import MARKER_FILE
from megatrain.commands.main import main
from megatrain.errors import UserError, WriteFailed
from megatrain.metrics import logger as run_logger
from megatrain.metrics import record as step_record
from megatrain.metrics.record import read_records
from megatrain.run import prepare as prepare_module
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


# ------------------------------------------------------------------ saves


def small_disk(monkeypatch: pytest.MonkeyPatch, folder: Path, capacity_bytes: int) -> None:
    """Let the disk seem to hold `capacity_bytes`, of which what is below `folder` takes its part."""
    usage = shutil.disk_usage(folder)

    def free(path: Path) -> Any:
        taken = sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file())
        return usage._replace(free=capacity_bytes - taken)

    monkeypatch.setattr(shutil, "disk_usage", free)


def test_a_run_that_a_disk_has_room_for_is_resumed_on_it(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it has saved already counts: on the disk that is just large enough every resume is accepted, and every save."""
    YAML().dump(config(files, run={"dir": str(tmp_path / "run")}), tmp_path / "run.yaml")
    words = [str(tmp_path / "run.yaml"), "--checkpoint.every_steps=1", "--checkpoint.keep=2", "--schedule.steps=8"]
    low, high = 0, 1 << 30  # the smallest disk that the whole run is accepted on
    while high - low > 1:
        middle = (low + high) // 2
        with monkeypatch.context() as patch:
            small_disk(patch, tmp_path, middle)
            code = main(["check", *words])
        assert code == 0 or "not enough space for 3 checkpoints of" in capsys.readouterr().err
        low, high = (low, middle) if code == 0 else (middle, high)
    small_disk(monkeypatch, tmp_path, high)
    for steps in (1, 2, 3, 5, 8):
        more = [f"--schedule.steps={steps}", "--resume=auto"]
        assert main(["train", *words, *more]) == 0, capsys.readouterr().err
        assert main(["check", *words, "--resume=auto"]) == 0, f"after {steps} steps"
    assert "of them there already" in capsys.readouterr().out
    # what a killed writer left is removed at the start, so it counts too
    left = tmp_path / "run" / "checkpoints" / "step_000009.tmp-999999"
    left.mkdir()
    (left / MARKER_FILE).write_text(json.dumps(writer_identity() | {"pid": 999999}))
    (left / "half").write_bytes(b"x" * 100_000)
    longer = [*words, "--schedule.steps=9", "--resume=auto"]
    assert main(["check", *longer]) == 0
    (tmp_path / "something_else").write_bytes(b"x" * 100_000)
    assert main(["check", *longer]) == 2
    assert "are there already" in capsys.readouterr().err


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("at", ["first byte", "last bytes", "before it starts"])
def test_a_save_on_a_full_disk_ends_the_run_with_5(
    at: str,
    background: bool,
    files: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    YAML().dump(config(files, run={"dir": str(tmp_path / "run")}), tmp_path / "run.yaml")
    words = [str(tmp_path / "run.yaml"), "--checkpoint.every_steps=2", f"--checkpoint.background={background}"]
    assert main(["train", *words, "--schedule.steps=2"]) == 0
    capsys.readouterr()
    with monkeypatch.context() as patch:
        if at == "before it starts":
            usage = shutil.disk_usage(tmp_path)
            patch.setattr(prepare_module, "refuse_if_disk_too_small", lambda *_: None)  # others fill the disk later
            patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
        else:
            left = [0 if at == "first byte" else 100_000]
            real = os.write

            def write(fd: int, data: Any) -> int:
                left[0] -= len(data)
                if left[0] < 0:
                    raise FULL
                return real(fd, data)

            patch.setattr(os, "write", write)
        assert main(["train", *words, "--resume=auto"]) == 5
    said = capsys.readouterr().err
    newest = tmp_path / "run" / "checkpoints" / "step_000002"
    assert "No space left on device" in said or "no room for a checkpoint" in said
    assert f"then resume from {newest} with --resume auto" in said
    assert "Traceback" not in said
    assert [path.name for path in newest.parent.iterdir() if path.is_dir()] == [newest.name], (
        "nothing is left of the save"
    )
    assert main(["train", *words, "--resume=auto"]) == 0


def test_an_export_on_a_full_disk_ends_with_5(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train(make(files, tmp_path, "--schedule.steps=1"))

    def write(fd: int, data: Any) -> int:
        raise FULL

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 5
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 5
    assert "no room" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("code", "exits"), [(errno.ENOSPC, 5), (errno.EDQUOT, 5), (errno.EIO, 5), (errno.EACCES, 2)])
def test_a_disk_that_is_full_anywhere_else_ends_with_5_too(
    code: int,
    exits: int,
    files: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Below the token cache, for example."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code), "some/file")

    monkeypatch.setattr(prepare_module, "load_data", refuse)
    YAML().dump(config(files, run={"dir": str(tmp_path / "run")}), tmp_path / "run.yaml")
    assert main(["check", str(tmp_path / "run.yaml")]) == exits
    assert f"some/file: {os.strerror(code)}" in capsys.readouterr().err


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
