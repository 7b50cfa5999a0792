"""One process trains in a run's folder: a second one is refused before it reads or writes anything of the run."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from counting import CountingEngine
from megatrain.config.load import load_config
from megatrain.errors import UserError
from megatrain.run.folder import RunFolder, RunLock
from megatrain.run.loop import train
from megatrain.run.prepare import check
from tiny_run import config, group_ended, make, prepare


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("files"))


no_group_left = pytest.fixture(autouse=True)(group_ended)


@pytest.mark.parametrize("engine", ["host", "mesh"])
@pytest.mark.parametrize("resume", [None, "auto"])
def test_a_second_process_is_refused_and_the_first_goes_on(
    engine: str, resume: str | None, files: Path, tmp_path: Path
) -> None:
    refusals: list[UserError] = []
    second = make(files, tmp_path)
    if engine == "mesh":
        plain = config(files, run={"dir": str(tmp_path / "run")})
        del plain["run"]["threads"]
        second = load_config({**plain, "engine": "mesh"})

    def intrude(step: int) -> None:
        if step == 2:
            before = (tmp_path / "run" / "log.txt").read_text()
            with pytest.raises(UserError) as caught:
                train(second, resume=resume)
            refusals.append(caught.value)
            assert (tmp_path / "run" / "log.txt").read_text() == before
            check(make(files, tmp_path), resume="auto")  # it only reads

    summary = train(make(files, tmp_path), engine=CountingEngine(intrude))
    assert summary.step == 4
    (refused,) = refusals
    assert refused.exit_code == 2
    pattern = rf"is being trained by process {os.getpid()} on \S+ since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d"
    assert re.fullmatch(pattern, refused.what) and refused.where == str(tmp_path / "run")
    assert not (tmp_path / "run" / "lock").exists()


def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from megatrain.run.folder import RunLock\n"
        "with RunLock(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    with pytest.raises(UserError, match=f"process {holder.pid} on "), RunLock(tmp_path / "run"):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    assert (tmp_path / "run" / "lock").exists()
    assert RunFolder(tmp_path / "run").resume_point(None) is None, "what it left is no run"
    with RunLock(tmp_path / "run"):
        pass
    assert not (tmp_path / "run" / "lock").exists()


def test_a_start_that_is_refused_leaves_no_folder(files: Path, tmp_path: Path) -> None:
    run = load_config(
        config(files, run={"dir": str(tmp_path / "a" / "b")}, data={"train": str(tmp_path / "none.jsonl")})
    )
    with pytest.raises(UserError, match="does not exist"):
        train(run)
    assert list(tmp_path.iterdir()) == []


def test_a_lock_on_a_removed_file_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder ends between another process's opening and locking of its file."""
    real, holder = fcntl.flock, RunLock(tmp_path)
    holder.__enter__()

    def late(file: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", real)
        holder.__exit__()
        real(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with RunLock(tmp_path), pytest.raises(UserError, match="is being trained by"), RunLock(tmp_path):
        pass


def test_a_file_system_without_locks_is_a_warning(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert train(make(files, tmp_path), engine=CountingEngine()).step == 4
    assert "cannot be locked (No locks available)" in (tmp_path / "run" / "log.txt").read_text()


def test_a_restart_waits_for_the_attempt_before(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from megatrain.run.folder import RunLock\n"
        "with RunLock(Path(sys.argv[1])): print('held', flush=True); time.sleep(0.5)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    with RunLock(tmp_path, wait_s=30.0):
        assert (tmp_path / "lock").exists()
    holder.communicate()
