"""Full disks, killed writers, damaged files: an incomplete checkpoint is never seen as one."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from hosted import BY_NAME, Hosted, as_bits, assert_same_state, host_folder, load, save, save_family, trained
from megatrain.checkpoint import files, writer
from megatrain.checkpoint.format import MARKER_FILE
from megatrain.checkpoint.reader import is_complete, latest_complete
from megatrain.errors import UserError

CALLS = ("write", "fsync", "open", "mkdir", "rename")
"""The system calls of a save. `mkdir` and `rename` are those of `pathlib`, which looks them up in `os`."""


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    small = replace(BY_NAME["llama"], overrides={**BY_NAME["llama"].overrides, "num_hidden_layers": 2})
    save_family(small, tmp_path / "llama")
    (tmp_path / "llama" / "tokenizer.json").write_text('{"a": 1}')
    return tmp_path / "llama"


def inject(monkeypatch: pytest.MonkeyPatch, at: int, fault: Callable[[], None], calls: tuple[str, ...] = CALLS) -> list:
    """Run `fault` at the n-th system call. Returns the list of calls so far."""
    seen: list[str] = []

    def wrap(name: str, real: Callable) -> Callable:
        def wrapped(*args, **kwargs):
            if name == "open" and isinstance(args[0], (str, Path)) and not args[1] & (os.O_CREAT | os.O_DIRECTORY):
                return real(*args, **kwargs)  # a read
            if name == "mkdir" and Path(args[0]).is_dir():
                return real(*args, **kwargs)  # it exists already, and pathlib ignores the error
            seen.append(name)
            if len(seen) == at + 1:
                fault()
            return real(*args, **kwargs)

        return wrapped

    for name in calls:
        monkeypatch.setattr(os, name, wrap(name, getattr(os, name)))
    return seen


def count_calls(monkeypatch: pytest.MonkeyPatch, hosted: Hosted, target: Path, source: Path) -> list[str]:
    target.parent.mkdir()
    with monkeypatch.context() as patch:
        seen = inject(patch, -1, lambda: None)
        save(hosted, target, source)
    return list(seen)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def still_open(folder: Path) -> list[str]:
    """Files below a folder that this process holds open, including removed ones."""
    held = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return [path for path in held if path.startswith(str(folder))]


def moments(calls: list[str], stride: int) -> list[int]:
    """Every `stride`-th call, as most write one of many tensors, and each of the last ones, which end the save."""
    return sorted({*range(0, len(calls), stride), *range(len(calls) - 10, len(calls))})


@pytest.mark.parametrize(("code", "stride"), [(errno.ENOSPC, 3), (errno.EIO, 8)], ids=["ENOSPC", "EIO"])
def test_fault_at_a_system_call_of_a_save(
    code: int, stride: int, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(files, "FLUSH_BYTES", 1 << 12)  # as in files of many GiB
    runs = tmp_path / "runs"
    hosted = trained(llama)
    before = {key: tensor.clone() for key, tensor in hosted.planes().items()}
    calls = count_calls(monkeypatch, hosted, runs / "step_1", llama)
    assert {"write", "fsync", "open", "mkdir", "rename"} <= set(calls)

    def fail() -> None:
        raise OSError(code, os.strerror(code))

    renamed = len(calls) - 1 - calls[::-1].index("rename")
    for at in moments(calls, stride):
        with monkeypatch.context() as patch:
            inject(patch, at, fail)
            with pytest.raises(UserError, match=os.strerror(code)) as caught:
                save(hosted, runs / "step_2", llama, step=2)
        assert str(runs) in str(caught.value), f"call {at}, {calls[at]}"
        if at > renamed:  # the folder has its name; only its durability is in doubt
            assert is_complete(runs / "step_2")
            shutil.rmtree(runs / "step_2")
        assert names(runs) == {"step_1"}, f"call {at}, {calls[at]}: something was left behind"
        assert not still_open(runs), f"call {at}, {calls[at]}: the room on the disk is not free again"
        assert latest_complete(runs) == runs / "step_1"
    assert all(bool((as_bits(before[key]) == as_bits(tensor)).all()) for key, tensor in hosted.planes().items())
    save(hosted, runs / "step_2", llama, step=2)
    assert latest_complete(runs) == runs / "step_2"


def test_a_writer_killed_at_any_moment_leaves_no_incomplete_checkpoint(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    runs = tmp_path / "runs"
    hosted = trained(llama)
    calls = count_calls(monkeypatch, hosted, runs / "step_1", llama)
    for at in moments(calls, stride=5):
        pid = os.fork()
        if pid == 0:  # the writer, which kills itself; it must never return into pytest
            try:
                with pytest.MonkeyPatch.context() as patch:
                    inject(patch, at, lambda: os.kill(os.getpid(), signal.SIGKILL))
                    save(hosted, runs / "step_2", llama, step=2)
            finally:
                os._exit(1)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status), f"call {at}: the writer was not killed"
        newest = latest_complete(runs)
        if newest == runs / "step_2":
            again = host_folder(llama)
            load(newest, again)
            assert_same_state(hosted, again)
            shutil.rmtree(newest)
        else:
            assert newest == runs / "step_1"
            assert not (runs / "step_2").exists()
    save(hosted, runs / "step_3", llama, step=3)
    assert names(runs) == {"step_1", "step_3"}, "the next writer removes what dead ones left"


def test_temporary_folders_of_others_are_left_alone(llama: Path, tmp_path: Path):
    runs = tmp_path / "runs"
    alive, elsewhere, foreign = runs / "a.tmp-1", runs / "b.tmp-999999", runs / "c.tmp-999999"
    for folder in (alive, elsewhere, foreign):
        folder.mkdir(parents=True)
    identity = files.writer_identity()
    (alive / MARKER_FILE).write_text(json.dumps(identity))
    (elsewhere / MARKER_FILE).write_text(json.dumps(identity | {"host": "another", "pid": 999999}))
    save(trained(llama), runs / "step_1", llama)
    assert names(runs) == {"a.tmp-1", "b.tmp-999999", "c.tmp-999999", "step_1"}
    (alive / MARKER_FILE).write_text(json.dumps(identity | {"started": 1.0}))  # another process has the pid now
    save(trained(llama), runs / "step_2", llama)
    assert "a.tmp-1" not in names(runs)


def test_a_full_disk_is_found_before_anything_is_written(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hosted = trained(llama)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=12345))
    with pytest.raises(UserError, match=r"needs .* \([\d,]+ bytes\), .* \(12,345 bytes\) are free"):
        save(hosted, tmp_path / "new" / "ckpt", llama)
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_made_is_named(llama: Path, tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        save(trained(llama), tmp_path / "file" / "ckpt", llama)


def flip(path: Path, position: int) -> None:
    with path.open("r+b") as stream:
        stream.seek(position)
        byte = stream.read(1)[0]
        stream.seek(position)
        stream.write(bytes([byte ^ 0x10]))


def test_a_flipped_bit_in_any_file_is_found_and_named(llama: Path, tmp_path: Path):
    runs = tmp_path / "runs"
    hosted = trained(llama)
    good, bad = save(hosted, runs / "step_1", llama), save(hosted, runs / "step_2", llama, step=2)
    again = host_folder(llama)
    for file in sorted(path for path in bad.rglob("*") if path.is_file()):
        size = file.stat().st_size
        for position in {0, 9, size // 2, size - 1} & set(range(size)):
            flip(file, position)
            with pytest.raises(UserError) as caught:
                load(bad, again)
            assert str(file) in str(caught.value), f"{file.name} at {position}: {caught.value}"
            if file.suffix == ".safetensors" and position >= size // 2:
                assert "tensor " in caught.value.what, caught.value.what
                assert f"the newest other one is {good}" in str(caught.value)
            flip(file, position)
    load(bad, again)
    assert_same_state(hosted, again)


def test_truncated_and_missing_files_are_named(llama: Path, tmp_path: Path):
    hosted = trained(llama)
    target = save(hosted, tmp_path / "ckpt", llama)
    for name in ("model-00002-of-00004.safetensors", "state/layer.1.safetensors", "state.json", "tokenizer.json"):
        whole = (target / name).read_bytes()
        (target / name).write_bytes(whole[:-1])
        with pytest.raises(UserError, match=f"{name}: the checkpoint is damaged: has {len(whole) - 1} bytes"):
            load(target, hosted)
        (target / name).unlink()
        with pytest.raises(UserError, match=f"{name}: the checkpoint is damaged: the file is missing"):
            load(target, hosted)
        assert not is_complete(target)
        (target / name).write_bytes(whole)
    load(target, hosted)


def test_a_newer_format_is_refused(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(writer, "FORMAT_VERSION", 99)
    hosted = trained(llama)
    target = save(hosted, tmp_path / "ckpt", llama)
    with pytest.raises(UserError, match="format version 99"):
        load(target, hosted)
