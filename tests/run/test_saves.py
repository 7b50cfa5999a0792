"""The settings of `checkpoint` reach the engine, and the disk space for checkpoints is known before the start."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from counting import CountingEngine, Saved
from megatrain.checkpoint.async_save import SaveProgress
from megatrain.checkpoint.writer import SLACK_BYTES, refuse_if_no_room
from megatrain.config.load import load_config
from megatrain.config.schema import CheckpointConfig, RunConfig
from megatrain.errors import UserError
from megatrain.run import saves as saves_module
from megatrain.run.folder import RunFolder
from megatrain.run.saves import RunSaves, checkpoints_at_once, refuse_if_disk_too_small, weights_to_come
from megatrain.units import GIB


class Recorder:
    """Stands for an engine: keeps what it was asked to save with."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def save(self, target: Path, **given: Any) -> None:
        self.asked.append(given)


@pytest.mark.parametrize(("buffer_gib", "buffer_bytes"), [("auto", None), (0.5, 1 << 29)])
def test_the_bound_on_copies_holds_for_weights_too(buffer_gib: Any, buffer_bytes: int | None, tmp_path: Path) -> None:
    engine: Any = Recorder()
    saves = RunSaves(
        engine,
        RunFolder(tmp_path),
        CheckpointConfig(buffer_gib=buffer_gib, every_steps=1, weights_every_steps=1),
        dict,
        0,
        None,
    )
    saves.save_if_due(1)
    assert [given["buffer_bytes"] for given in engine.asked] == [buffer_bytes, buffer_bytes]


@pytest.mark.parametrize(
    ("reserve", "free", "expected"),
    [(GIB, [], None), (16 * GIB, [20 * GIB], 4 * GIB), (2 * GIB, [20 * GIB], 10 * GIB), (8 * GIB, [3 * GIB], 0)],
)
def test_copies_of_a_save_leave_a_large_reserve_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reserve: int, free: list[int], expected: int | None
) -> None:
    """Below memory.host_reserve_gib the run would end. Asked once for each save: memory that is prepared is no longer free."""
    asked: list[int | None] = []

    class Asked(CountingEngine):
        def prepare_save(self, buffer_bytes: int | None = None) -> None:
            asked.append(buffer_bytes)

        def save(self, *arguments: Any, **named: Any) -> Saved:
            asked.append(named["buffer_bytes"])
            return Saved()

    left = [*free]
    monkeypatch.setattr(saves_module, "available_host_bytes", lambda: left.pop(0))
    saves = RunSaves(
        Asked(), RunFolder(tmp_path), CheckpointConfig(every_steps=2), dict, 0, None, reserve_bytes=reserve
    )
    saves.after_step(1, 1.0)
    saves.save_if_due(2)
    assert asked == [expected, expected]


def test_a_save_logs_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Said when it has ended, in the thread that wrote it; a step that ends later has nothing to add."""
    progress = SaveProgress(3 << 29, 3 << 29, 16.7, 2.0, 0, 4.2)

    class Done:
        def done(self) -> bool:
            return True

        def progress(self) -> SaveProgress:
            return progress

    class Engine:
        def save(self, target: Path, *, then: Callable[[SaveProgress], object], **_: Any) -> Done:
            then(progress)
            return Done()

    (tmp_path / "checkpoints").mkdir()
    saves = RunSaves(Engine(), RunFolder(tmp_path), CheckpointConfig(), dict, 0, None)
    with caplog.at_level(logging.INFO, "megatrain.run.saves"):
        saves.save(2)
        saves.after_step(3, 1.0)
    (line,) = caplog.messages
    assert line == (
        f"step 2: saved {tmp_path / 'checkpoints' / 'step_000002'} in 16.7 s: 1.50 GiB at 0.12 GiB/s, read back in 4.2 s, "
        "updates waited 2.0 s (a larger checkpoint.buffer_gib shortens it)"
    )


# ------------------------------------------------------------------ disk space


def run(*overrides: str) -> RunConfig:
    sections = {"model": {"path": "m"}, "data": {"train": "a", "max_tokens": 16}, "batch": {"tokens_per_step": 64}}
    return load_config({**sections, "run": {"dir": "r"}}, overrides)


@pytest.mark.parametrize(
    ("overrides", "steps", "count"),
    [
        (("--checkpoint.every_steps=10", "--checkpoint.keep=2"), 100, 3),
        (("--checkpoint.every_steps=10", "--checkpoint.keep=null"), 100, 10),
        (("--checkpoint.every_steps=10", "--checkpoint.keep=null"), 105, 11),
        (("--checkpoint.every_steps=null",), 100, 1),
        (("--checkpoint.every_steps=60",), 100, 2),
        (("--checkpoint.every_steps=null", "--checkpoint.at_end=false"), 100, 0),
    ],
)
def test_checkpoints_on_disk_at_the_worst_moment(overrides: tuple[str, ...], steps: int, count: int) -> None:
    assert checkpoints_at_once(run(*overrides), steps) == count


@pytest.mark.parametrize(
    ("overrides", "start", "there", "count"),
    [
        (("--checkpoint.every_steps=10", "--checkpoint.keep=2"), 20, [10, 20], 3),
        (("--checkpoint.every_steps=10", "--checkpoint.keep=2"), 100, [90, 100], 2),  # nothing left to save
        (("--checkpoint.every_steps=10", "--checkpoint.keep=2"), 95, [90, 95], 3),
        (("--checkpoint.every_steps=10", "--checkpoint.keep=2"), 20, [], 3),  # from another run's checkpoint
        (("--checkpoint.every_steps=10", "--checkpoint.keep=2"), 40, [10, 20, 30, 40], 5),  # more were kept before
        (("--checkpoint.every_steps=10", "--checkpoint.keep=null"), 50, [10, 20, 30, 40, 50], 10),
        (("--checkpoint.every_steps=null",), 60, [60], 2),
        (("--checkpoint.every_steps=null", "--checkpoint.at_end=false"), 60, [60], 1),
        (("--checkpoint.every_steps=10", "--checkpoint.keep=1", "--checkpoint.keep_every=50"), 0, [], 3),
        (("--checkpoint.every_steps=10", "--checkpoint.keep=1", "--checkpoint.keep_every=20"), 60, [20, 40, 60], 6),
    ],
)
def test_checkpoints_on_disk_after_a_resume(
    overrides: tuple[str, ...], start: int, there: list[int], count: int
) -> None:
    assert checkpoints_at_once(run(*overrides), 100, start, there) == count


def test_folders_of_weights_take_space_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run("--checkpoint.weights_every_steps=10", "--run.dir", str(tmp_path))
    assert [weights_to_come(config, 100), weights_to_come(config, 100, 55), weights_to_come(run(), 100)] == [10, 5, 0]
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10**6 + SLACK_BYTES))
    refuse_if_disk_too_small(config, 10**5, 5, 5 * 10**5)
    with pytest.raises(UserError, match=r"5 checkpoints of .* and .* of weights \(checkpoint.weights_every_steps\)"):
        refuse_if_disk_too_small(config, 10**5, 5, 5 * 10**5 + 1)


def test_missing_disk_space_is_reported_before_the_start(tmp_path: Path) -> None:
    config = run("--run.dir", str(tmp_path / "not" / "yet"))
    refuse_if_disk_too_small(config, 10, 3)
    with pytest.raises(UserError, match="not enough space for 3 checkpoints") as caught:
        refuse_if_disk_too_small(config, 1 << 60, 3)
    assert str(tmp_path) in str(caught.value)


def test_space_that_a_save_would_refuse_is_refused_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at the first checkpoint, when the steps before it would be lost."""
    config, usage = run("--run.dir", str(tmp_path / "run")), shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=(3 * 10**6) + SLACK_BYTES - 1))
    with pytest.raises(UserError, match="not enough space for 3 checkpoints"):
        refuse_if_disk_too_small(config, 10**6, 3)
    with pytest.raises(UserError, match="no room for a checkpoint"):
        refuse_if_no_room(tmp_path / "run", 3 * 10**6 + SLACK_BYTES)
    refuse_if_disk_too_small(config, 10**6, 2)
    refuse_if_disk_too_small(config, 10**9, 0)
