"""Saves in the background: of one consistent step whatever room there is for copies, and with the same end on every rank."""

from __future__ import annotations

import filecmp
import time
from pathlib import Path
from typing import Any

import pytest

import families
import mesh_ranks as ranks
from megatrain.checkpoint.files import FolderWriter
from megatrain.errors import UserError
from megatrain.mesh.engine import MeshEngine
from megatrain.mesh.layout import Layout
from megatrain.optim.adamw import AdamW

FAMILY = families.BY_NAME["llama"]
BATCHES = [families.batch(FAMILY, seed=s, rows=4, tokens=16, kind="packed") for s in range(4)]
LAYOUTS = {"pipeline": Layout(pipeline=2, shard=1), "copies": Layout(replicate=2, shard=1)}


def engine(layout: Layout) -> MeshEngine:
    model = families.build(FAMILY, seed=1, tie=True)
    return MeshEngine(model, layout, compute_dtype="fp32", optim=AdamW(learning_rate=1e-2), device="cpu")


def slow_writing(seconds: float) -> None:
    write = FolderWriter.write_tensors

    def slow(self: FolderWriter, name: str, tensors: Any) -> None:
        time.sleep(seconds)
        write(self, name, tensors)

    FolderWriter.write_tensors = slow  # type: ignore[method-assign]


@pytest.mark.parametrize("name", ["pipeline", pytest.param("copies", marks=pytest.mark.slow)])
def test_the_checkpoint_is_of_one_step_whatever_room_there_is(name: str, tmp_path: Path) -> None:
    """Room for everything, for some units, for nothing: the same files, while training is steps ahead."""

    def work() -> list[tuple[int, int, bool]]:
        with engine(LAYOUTS[name]) as trained:
            trained.train_step(BATCHES[0])
            trained.save(tmp_path / "at-rest", extra={"a": 1})
            everything = sum(trained.state.sent_bytes(unit, 3) for unit in trained.state.units)
            slow_writing(0.02)
            found = []
            for number, room in enumerate((everything, everything // 3, 0)):
                trained.load(tmp_path / "at-rest")
                save = trained.save(tmp_path / f"ahead-{number}", extra={"a": 1}, wait=False, buffer_bytes=room)
                for batch in BATCHES[1:3]:
                    trained.train_step(batch)
                ahead = not save.done()
                trained.wait_saved()
                found.append((save.copied_bytes, room, ahead))
            return found

    for rank in ranks.run(2, work):
        assert all(copied <= room for copied, room, _ in rank)
        assert rank[0][0] == rank[0][1] and rank[2][0] == 0
        assert rank[0][2], "training waited for the whole save"
    for number in range(3):
        names = [p.relative_to(tmp_path / "at-rest") for p in (tmp_path / "at-rest").rglob("*") if p.is_file()]
        both = tmp_path / "at-rest", tmp_path / f"ahead-{number}"
        _, differing, failed = filecmp.cmpfiles(*both, [str(n) for n in names], shallow=False)
        assert not differing and not failed, (number, differing, failed)


@pytest.mark.parametrize("on_error", ["stop", "warn"])
def test_a_failure_in_the_background_reaches_every_rank_at_the_same_step(on_error: Any, tmp_path: Path) -> None:
    """Case 24: rank 0 alone knows at first; nothing of the save is left, and the older checkpoint is whole."""

    def work() -> tuple[int, str]:
        with engine(LAYOUTS["pipeline"]) as trained:
            trained.save(tmp_path / "older")

            def full(self: FolderWriter, name: str, tensors: Any) -> None:
                raise UserError("cannot be written: no space left on device", name)

            FolderWriter.write_tensors = full  # type: ignore[method-assign]
            said = ""
            trained.save(tmp_path / "newer", wait=False, on_error=on_error)
            for batch in BATCHES * 50:
                try:
                    trained.train_step(batch)
                except UserError as error:
                    said = str(error)
                    break
                if on_error == "warn" and trained._desk.saving is None:
                    break
            return trained.step, said

    (step, first), (other_step, second) = ranks.run(2, work)
    assert step == other_step < 200
    if on_error == "stop":
        assert "no space left" in first and "rank 0 could not write" in second
    else:
        assert first == second == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["older"]
