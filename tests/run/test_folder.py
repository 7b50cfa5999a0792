"""The run's folder: who may start there, where a run resumes, and what is removed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatrain.checkpoint.files import FolderWriter, writer_identity
from megatrain.checkpoint.format import FORMAT_NAME, FORMAT_VERSION, MARKER_FILE, STATE_FILE
from megatrain.errors import UserError
from megatrain.run.folder import RunFolder, RunLock


def make(folder: Path, *steps: int, complete: bool = True) -> RunFolder:
    run = RunFolder(folder)
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    run.config.write_text("model: {}\n")
    for step in steps:
        if complete:
            with FolderWriter(run.checkpoint(step)) as writer:
                writer.write_json(STATE_FILE, {})
                writer.commit({"format": FORMAT_NAME, "version": FORMAT_VERSION, "step": step})
        else:
            run.checkpoint(step).mkdir()
    return run


@pytest.mark.parametrize("exists", [True, False])
def test_a_new_run_takes_an_empty_or_missing_folder(tmp_path: Path, exists: bool) -> None:
    folder = tmp_path / "run"
    if exists:
        folder.mkdir()
    assert RunFolder(folder).resume_point(None) is None
    assert RunFolder(folder).resume_point("auto") is None
    assert folder.exists() == exists


def test_a_run_does_not_start_in_a_folder_that_is_not_empty(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    for resume, message in ((None, "is not empty"), ("auto", "holds files but no run")):
        with pytest.raises(UserError, match=message):
            RunFolder(tmp_path).resume_point(resume)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
    with pytest.raises(UserError, match="--resume auto"):
        make(tmp_path / "run", 1).resume_point(None)
    with pytest.raises(UserError, match="is a file"):
        RunFolder(tmp_path / "thesis.tex").resume_point(None)


def test_resume_takes_the_newest_complete_checkpoint_and_says_what_it_ignores(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = make(tmp_path / "run", 5, 900_000, 1_000_000)
    make(run.path, 1_000_005, complete=False)
    (run.checkpoints / "step_2000000.tmp-1").mkdir()
    for resume in ("auto", "latest"):
        assert run.resume_point(resume) == run.checkpoint(1_000_000)
    assert "step_1000005: is not a complete checkpoint" in caplog.text
    assert "step_2000000.tmp-1" in caplog.text


def test_without_a_complete_checkpoint_auto_starts_and_latest_fails(tmp_path: Path) -> None:
    run = make(tmp_path / "run", 5, complete=False)
    assert run.resume_point("auto") is None
    with pytest.raises(UserError, match="no complete checkpoint"):
        run.resume_point("latest")


@pytest.mark.parametrize("left", [["checkpoints"], ["config.yaml.new"], ["checkpoints", "config.yaml.new"]])
def test_a_start_killed_at_once_leaves_no_run(tmp_path: Path, left: list[str]) -> None:
    """Killed between creating the folder and writing the config that marks it as a run's."""
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    for name in left:
        (run.path / name).mkdir()
    assert run.resume_point("auto") is None
    (run.path / "notes.txt").touch()
    with pytest.raises(UserError, match="holds files but no run"):
        run.resume_point("auto")


def test_a_folder_with_checkpoints_and_no_config_is_not_taken_for_a_new_one(tmp_path: Path) -> None:
    run = make(tmp_path / "run", 5)
    run.config.unlink()
    with pytest.raises(UserError, match="holds files but no run"):
        run.resume_point("auto")


def test_resume_from_a_path(tmp_path: Path) -> None:
    run = make(tmp_path / "run", 5, 10)
    other = make(tmp_path / "other", 7)
    assert run.resume_point(str(run.checkpoint(5))) == run.checkpoint(5)
    assert RunFolder(tmp_path / "third").resume_point(str(other.checkpoint(7))) == other.checkpoint(7)
    with pytest.raises(UserError, match="holds another run"):
        run.resume_point(str(other.checkpoint(7)))
    with pytest.raises(UserError, match="no such checkpoint"):
        run.resume_point(str(run.checkpoint(6)))
    with pytest.raises(
        UserError,
        match=r"not a complete checkpoint: it has no manifest.json\n.*its newest is .*run/checkpoints/step_000010",
    ):
        run.resume_point(str(run.path))
    with pytest.raises(UserError, match="give a folder like RUN/checkpoints/step_000100"):
        run.resume_point(str(tmp_path))


def test_only_old_checkpoints_are_removed(tmp_path: Path) -> None:
    run = make(tmp_path / "run", 1, 2, 3)
    make(run.path, 4, complete=False)
    (run.checkpoints / "my_favourite").mkdir()
    run.remove_old_checkpoints(None)
    assert len(list(run.checkpoints.iterdir())) == 5
    run.remove_old_checkpoints(2)
    left = {path.name for path in run.checkpoints.iterdir()}
    assert left == {"step_000002", "step_000003", "step_000004", "my_favourite"}


def test_checkpoints_of_an_abandoned_history_are_set_aside(tmp_path: Path) -> None:
    run = make(tmp_path / "run", 5, 10)
    make(run.path, 15, complete=False)
    run.set_aside(after_step=5)
    assert run.resume_point("latest") == run.checkpoint(5)
    make(run.path, 10)
    run.set_aside(after_step=5)
    assert [path.name for path in run.checkpoints.iterdir()] == ["step_000005"]
    assert {path.name for path in run.aside.iterdir()} == {"step_000010", "step_000010_2", "step_000015"}


def test_latest_names_the_newest(tmp_path: Path) -> None:
    run = make(tmp_path / "run", 1, 2)
    for step in (1, 2):
        run.mark_latest(run.checkpoint(step))
        assert (run.checkpoints / "latest").read_text() == f"step_{step:06d}\n"


def test_only_leftovers_of_dead_processes_are_removed(tmp_path: Path) -> None:
    run = make(tmp_path / "run", 1, 2)
    dead = json.dumps({**writer_identity(), "started": 1.0})
    half = run.checkpoints / "step_000003.tmp-1"
    half.mkdir()
    for folder in (half, run.checkpoint(2)):  # killed while it wrote one, and between the rename and the end of another
        (folder / MARKER_FILE).write_text(dead)
    (run.checkpoints / "mine.tmp-1").mkdir()
    run.tidy()
    assert {path.name for path in run.checkpoints.iterdir()} == {"step_000001", "step_000002", "mine.tmp-1"}
    assert not (run.checkpoint(2) / MARKER_FILE).exists()
    assert run.resume_point("latest") == run.checkpoint(2)


@pytest.mark.parametrize(
    "name", ["lock", "log.txt", "config.yaml", "metrics.jsonl.new", "loss.png", "checkpoints/latest.new"]
)
def test_a_run_writes_through_no_link(name: str, tmp_path: Path) -> None:
    """Somebody else's run folder, which is resumed, must not make us overwrite a file elsewhere."""
    run = make(tmp_path / "run", 5)
    precious = tmp_path / "precious"
    precious.write_text("years of work")
    (run.path / name).unlink(missing_ok=True)
    (run.path / name).symlink_to(precious)
    with (
        pytest.raises(UserError, match=rf"{name}: is a symbolic link, and the run would write to .*precious"),
        RunLock(run.path),
    ):
        pass
    assert precious.read_text() == "years of work"


def test_the_checkpoints_may_be_on_another_disk(tmp_path: Path) -> None:
    run = make(tmp_path / "run", 5)
    run.checkpoints.rename(tmp_path / "large_disk")
    run.checkpoints.symlink_to(tmp_path / "large_disk")
    with RunLock(run.path):
        assert run.resume_point("auto") == run.checkpoint(5)
