"""When a run saves, and with what: the settings of `checkpoint` reach the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatrain.checkpoint.async_save import SaveProgress
from megatrain.config.schema import CheckpointConfig
from megatrain.run.folder import RunFolder
from megatrain.run.saves import RunSaves


class Recorder:
    """Stands for an engine: keeps what it was asked to save with."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def save(self, target: Path, **given: Any) -> None:
        self.asked.append(given)


@pytest.mark.parametrize(("buffer_gib", "buffer_bytes"), [("auto", None), (0.5, 1 << 29)])
def test_the_bound_on_copies_holds_for_weights_too(buffer_gib: Any, buffer_bytes: int | None, tmp_path: Path) -> None:
    engine: Any = Recorder()
    saves = RunSaves(engine, RunFolder(tmp_path), CheckpointConfig(buffer_gib=buffer_gib), dict, 0, None)
    saves.save_weights(1)
    saves.save(1)
    assert [given["buffer_bytes"] for given in engine.asked] == [buffer_bytes, buffer_bytes]


def test_a_save_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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
        saves.report()
    (line,) = caplog.messages
    assert line == (
        f"step 2: saved {tmp_path / 'checkpoints' / 'step_000002'} in 16.7 s: 1.50 GiB at 0.12 GiB/s, read back in 4.2 s; "
        "updates waited 2.0 s for it (a larger checkpoint.buffer_gib lets them wait less)"
    )
