"""When a run saves, and with what: the settings of `checkpoint` reach the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatrain.config.schema import CheckpointConfig
from megatrain.run_folder import RunFolder
from megatrain.saves import RunSaves


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
