"""Background saves hold one consistent step, whatever room there is for copies, and end the same way on every rank."""

from __future__ import annotations

import errno
import filecmp
import os
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import families
import mesh_ranks as ranks
from megatrain.checkpoint import manager, shared_write
from megatrain.checkpoint.files import FilesWriter, FolderWriter
from megatrain.checkpoint.shared_write import first_of_hosts, rounds, shares
from megatrain.engine.mesh.engine import MeshEngine
from megatrain.engine.mesh.layout import Layout, MeshPlan
from megatrain.engine.mesh.state import MeshState
from megatrain.errors import MegatrainError, UserError
from megatrain.optim.adamw import AdamW

FAMILY = families.BY_NAME["llama"]
BATCHES = [families.batch(FAMILY, seed=s, rows=4, tokens=16, kind="packed") for s in range(4)]
LAYOUTS = {"pipeline": Layout(pipeline=2, shard=1), "copies": Layout(replicate=2, shard=1)}


def engine(layout: Layout) -> MeshEngine:
    model = families.build(FAMILY, seed=1, tie=True)
    return MeshEngine(model, MeshPlan(layout, compute_dtype="fp32"), optim=AdamW(learning_rate=1e-2), device="cpu")


def what_training_says(trained: MeshEngine, enough: Callable[[], bool] = lambda: False) -> str:
    """Train until a step raises, and return its error's text; empty if none does before `enough`."""
    for batch in BATCHES * 50:
        try:
            trained.train_step(batch)
        except UserError as error:
            return str(error)
        if enough():
            break
    return ""


def slow_writing(seconds: float) -> None:
    write = FilesWriter.write_tensors

    def slow(self: FilesWriter, name: str, tensors: Any) -> None:
        time.sleep(seconds)
        write(self, name, tensors)

    FilesWriter.write_tensors = slow  # type: ignore[method-assign]


@pytest.mark.parametrize("name", ["pipeline", pytest.param("copies", marks=pytest.mark.slow)])
def test_the_checkpoint_is_of_one_step_whatever_room_there_is(name: str, tmp_path: Path) -> None:
    """Room for all units, for some, for none: the same files, while training is steps ahead. One writer, then two."""

    def work() -> list[tuple[int, int, bool]]:
        with engine(LAYOUTS[name]) as trained:
            trained.train_step(BATCHES[0])
            trained.save(tmp_path / "at-rest", extra={"a": 1})
            everything = sum(trained.state.sent_bytes(unit, 3) for unit in trained.state.units)
            slow_writing(0.02)
            found = []
            for number, room in enumerate((everything, everything // 3, 0)):
                trained.load(tmp_path / "at-rest")
                trained.checkpoint_policy.writers = [0] if number == 0 else [0, 1]
                save = trained.save(tmp_path / f"ahead-{number}", extra={"a": 1}, background=True, buffer_bytes=room)
                for batch in BATCHES[1:3]:
                    trained.train_step(batch)
                ahead = not save.done()
                trained.wait_saved()
                found.append((save.progress().copied_bytes, room, ahead))
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
    """Only rank 0 knows at first. Nothing of the save is left, and the older checkpoint is complete."""

    def work() -> tuple[int, str]:
        with engine(LAYOUTS["pipeline"]) as trained:
            trained.save(tmp_path / "older")

            def full(self: FolderWriter, name: str, tensors: Any) -> None:
                raise UserError("cannot be written: no space left on device", name)

            FolderWriter.write_tensors = full  # type: ignore[method-assign]
            trained.save(tmp_path / "newer", background=True, on_error=on_error)
            warnings: list[str] = []
            manager.logger.warning = lambda text, *values: warnings.append(text % values)  # type: ignore[method-assign]
            said = what_training_says(trained, lambda: bool(warnings))
            return trained.step, said + "".join(warnings)

    (step, first), (other_step, second) = ranks.run(2, work)
    assert step == other_step < 200
    assert "no space left" in first and "rank 0 could not write" in second
    assert [said.startswith("the checkpoint was not saved") for said in (first, second)] == [on_error == "warn"] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["older"]


# ---------------------------------------------------------------- several writers


def assert_equal_folders(one: Path, other: Path) -> None:
    """The same files with the same bytes."""
    names = [sorted(str(p.relative_to(each)) for p in each.rglob("*") if p.is_file()) for each in (one, other)]
    assert names[0] == names[1] and len(names[0]) > 5
    _, differing, failed = filecmp.cmpfiles(one, other, names[0], shallow=False)
    assert not differing and not failed, (differing, failed)


def written_names() -> list[str]:
    """Names of the files that this process writes from now on."""
    names: list[str] = []
    write = FilesWriter.write_tensors

    def noted(self: FilesWriter, name: str, tensors: Any) -> None:
        names.append(name)
        write(self, name, tensors)

    FilesWriter.write_tensors = noted  # type: ignore[method-assign]
    return names


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tensor=2, pipeline=2, shard=1),
        pytest.param(Layout(shard=4), marks=pytest.mark.slow),
        pytest.param(Layout(replicate=2, shard=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_any_number_of_writers_makes_the_same_bytes(layout: Layout, tmp_path: Path) -> None:
    """From the live state, from copies with room for some, and weights only; each writer writes its share."""

    def work() -> list[list[str]]:
        names = written_names()
        found = []
        with engine(layout) as trained:
            trained.train_step(BATCHES[0])
            for writers in ([0], [0, 2], [0, 1, 2, 3]):
                trained.checkpoint_policy.writers = writers
                names.clear()
                trained.save(tmp_path / f"full-{len(writers)}", extra={"a": 1}, buffer_bytes=20_000)
                found.append(list(names))
                trained.save(tmp_path / f"weights-{len(writers)}", weights_only=True)
        return found

    by_rank = ranks.run(4, work)
    for kind in ("full", "weights"):
        for count in (2, 4):
            assert_equal_folders(tmp_path / f"{kind}-1", tmp_path / f"{kind}-{count}")
    for number, writers in enumerate(([0], [0, 2], [0, 1, 2, 3])):
        assert [rank for rank in range(4) if by_rank[rank][number]] == writers
        everything = sorted(name for rank in range(4) for name in by_rank[rank][number])
        assert everything == sorted(by_rank[0][0])
    assert not list(tmp_path.glob("*.tmp-*"))


def test_units_are_assigned_by_size() -> None:
    sizes = {"embedding": 24, "layer.0": 10, "layer.1": 10, "layer.2": 10, "layer.3": 10, "head": 25}
    assert shares(sizes, [0, 8]) == {0: ["head", "layer.1", "layer.3"], 8: ["embedding", "layer.0", "layer.2"]}
    assert rounds(sizes, [0, 8]) == [
        {0: "head", 8: "embedding"}, {0: "layer.1", 8: "layer.0"}, {0: "layer.3", 8: "layer.2"},
    ]  # fmt: skip
    assert rounds(sizes, range(100))[1:] == []
    assert [list(units) for units in rounds(sizes, [0])] == [[0]] * 6


def test_the_first_rank_of_every_host_writes() -> None:
    def work(local_ranks: Sequence[int | None]) -> list[int]:
        local = local_ranks[dist.get_rank()]
        if local is not None:
            os.environ["LOCAL_RANK"] = str(local)
        group = dist.group.WORLD
        assert group is not None
        return first_of_hosts(group)

    assert ranks.run(4, work, (0, 1, 0, 1)) == [[0, 2]] * 4
    assert ranks.run(2, work, (None, None)) == [[0]] * 2


def test_rank_0_writes_alone_if_a_writer_does_not_see_the_folder(tmp_path: Path) -> None:
    """Hosts without a shared file system: the same bytes from rank 0, and one warning that says why."""

    def work() -> tuple[list[str], list[str]]:
        warnings: list[str] = []
        shared_write.logger.warning = lambda text, *values: warnings.append(text % values)  # type: ignore[method-assign]
        names = written_names()
        with engine(LAYOUTS["pipeline"]) as trained:
            trained.save(tmp_path / "one")
            names.clear()
            trained.checkpoint_policy.writers = [0, 1]
            trained.save(tmp_path / f"disk-of-{dist.get_rank()}" / "two")
        return warnings, names

    (said, names), (said_by_1, names_of_1) = ranks.run(2, work)
    assert len(said) == 1 and "rank 1 does not see" in said[0] and said_by_1 == []
    assert names and not names_of_1
    assert_equal_folders(tmp_path / "one", tmp_path / "disk-of-0" / "two")
    assert not (tmp_path / "disk-of-1").exists()


def full_disk(part: str) -> None:
    """Writes to files with `part` in their path find no space after some bytes."""
    write = os.write

    def refused(fd: int, piece: Any) -> int:
        if part in str(Path(f"/proc/self/fd/{fd}").readlink()):
            write(fd, piece[: len(piece) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, piece)

    os.write = refused


def failing_read(part: str) -> None:
    read = MeshState.part

    def failed(self: MeshState, name: str, planes: int) -> torch.Tensor:
        if part in name:
            raise RuntimeError("the device does not answer")
        return read(self, name, planes)

    MeshState.part = failed  # type: ignore[method-assign]


def flipped_byte(part: str) -> None:
    """Change a byte on disk that only this process reads back."""
    settle = FilesWriter.settle

    def disturbed(self: FilesWriter) -> None:
        name = next(name for name in self.records if part in name)
        data = bytearray((self.temp / name).read_bytes())
        data[-3] ^= 1
        (self.temp / name).write_bytes(data)
        settle(self)

    FilesWriter.settle = disturbed  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("fault", "part", "reason"),
    [
        (full_disk, "state/", "No space left on device"),
        (failing_read, "layers.", "the device does not answer"),
        pytest.param(flipped_byte, "state/", "was not read back as it was written", marks=pytest.mark.slow),
    ],
)
def test_a_fault_at_another_writer_ends_the_save_everywhere(fault: Any, part: str, reason: str, tmp_path: Path) -> None:
    """Every rank reports it, nothing of the save is left, the older checkpoint is complete, and training continues."""

    def work() -> tuple[int, str, float | None, int]:
        with engine(Layout(pipeline=2, shard=2)) as trained:
            trained.checkpoint_policy.writers = [0, 1, 2]
            trained.save(tmp_path / "older")
            if dist.get_rank() == 2:
                fault(part)
            trained.save(tmp_path / "newer", background=True, buffer_bytes=0)
            said = what_training_says(trained)
            ended = trained.step
            loss = trained.train_step(BATCHES[0]).loss
            return ended, said, loss, trained.load(tmp_path / "older").get("step", 0)

    found = ranks.run(4, work)
    assert len({step for step, *_ in found}) == 1 and found[0][0] < 200
    assert [reason in said for _, said, *_ in found] == [False, False, True, False], found
    assert all("rank 2 could not write" in said for _, said, *_ in found if reason not in said)
    assert len({loss for *_, loss, _ in found}) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["older"]


@pytest.mark.parametrize("canceller", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_save_that_any_rank_cancels_ends_everywhere(canceller: int, tmp_path: Path) -> None:
    def work() -> str:
        with engine(LAYOUTS["pipeline"]) as trained:
            trained.checkpoint_policy.writers = [0, 1]
            slow_writing(0.2)
            save = trained.save(tmp_path / "newer", background=True)
            dist.barrier()
            assert not save.done()
            if dist.get_rank() == canceller:
                save.cancel()
            with pytest.raises(MegatrainError) as error:
                save.result()
            return str(error.value)

    found = ranks.run(2, work)
    assert "newer: cancelled" in found[canceller]
    assert f"rank {canceller} could not write" in found[1 - canceller]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("writers", [[0], [0, 1]], ids=str)
def test_training_continues_once_everything_is_read(writers: list[int], tmp_path: Path) -> None:
    """When `save` returns, the live state is not read any more, whatever room there is for copies."""

    def work() -> list[bool]:
        slow_writing(0.05)
        read = MeshState.part
        names: set[str] = set()

        def noted(self: MeshState, name: str, planes: int) -> torch.Tensor:
            values = read(self, name, planes)
            names.add(name)
            return values

        MeshState.part = noted  # type: ignore[method-assign]
        found = []
        with engine(LAYOUTS["pipeline"]) as trained:
            trained.checkpoint_policy.writers = writers
            sent = {name for unit in trained.state.units for name in trained.state.sent_names(unit)}
            everything = sum(trained.state.sent_bytes(unit, 3) for unit in trained.state.units)
            for number, room in enumerate((0, everything // 4)):
                names.clear()
                trained.save(tmp_path / str(number), background=True, buffer_bytes=room)
                found.append(names == sent)
                trained.wait_saved()
        return found

    assert ranks.run(2, work) == [[True, True]] * 2


def test_writers_write_in_parallel_and_gather_meanwhile(tmp_path: Path) -> None:
    """By order and not by clocks: each writer's first unit waits until the other writes, too, and the next one is gathered."""

    def work() -> None:
        gathers = 0
        gather, write = MeshState.gather, FilesWriter.write_tensors

        def counted(self: MeshState, *arguments: Any) -> None:
            nonlocal gathers
            gathers += 1
            gather(self, *arguments)

        def waiting(self: FilesWriter, name: str, tensors: Any) -> None:
            (tmp_path / f"writes-{dist.get_rank()}").touch()
            until = time.monotonic() + 30
            while gathers < 2 or len(list(tmp_path.glob("writes-*"))) < 2:
                assert time.monotonic() < until, (gathers, list(tmp_path.iterdir()))
                time.sleep(0.002)
            write(self, name, tensors)

        MeshState.gather, FilesWriter.write_tensors = counted, waiting  # type: ignore[method-assign]
        with engine(LAYOUTS["pipeline"]) as trained:
            trained.checkpoint_policy.writers = [0, 1]
            trained.save(tmp_path / "one")

    ranks.run(2, work)
    assert (tmp_path / "one/manifest.json").exists()


def test_a_writer_holds_two_units_at_most(tmp_path: Path) -> None:
    """One is written and one is gathered; on a slow disk the next one waits."""

    def work() -> int:
        alive: list[weakref.ref[Any]] = []
        most = 0
        make = MeshState.empty_planes

        def counted(self: MeshState, unit: str, planes: int) -> Any:
            nonlocal most
            made = make(self, unit, planes)
            alive.append(weakref.ref(made))
            most = max(most, sum(each() is not None for each in alive))
            return made

        MeshState.empty_planes = counted  # type: ignore[method-assign]
        with engine(LAYOUTS["pipeline"]) as trained:
            slow_writing(0.02)
            trained.save(tmp_path / "one")
        return most

    assert ranks.run(2, work)[0] == 2


def test_progress_counts_all_writers(tmp_path: Path) -> None:
    """At the end the bytes of all writers; before, an estimate from rank 0's own share."""

    def work() -> tuple[int, int, list[int]]:
        with engine(LAYOUTS["pipeline"]) as trained:
            trained.checkpoint_policy.writers = [0, 1]
            slow_writing(0.03)
            save = trained.save(tmp_path / "two", background=True)
            seen = []
            while not save.done():
                seen.append(save.progress().written_bytes)
                time.sleep(0.01)
            return save.result().written_bytes, save.progress().total_bytes, seen

    (written, total, seen), _ = ranks.run(2, work)
    assert seen == sorted(seen) and max(seen) > 0.8 * written
    on_disk = sum(path.stat().st_size for path in (tmp_path / "two").rglob("*") if path.is_file())
    assert on_disk - (tmp_path / "two/manifest.json").stat().st_size <= written <= on_disk <= total


def test_a_late_file_does_not_bring_back_a_removed_folder(tmp_path: Path) -> None:
    """A writer of another host outlives the removal of the folder."""
    with FolderWriter(tmp_path / "one") as folder:
        late = FilesWriter(folder.temp, folder.target)
    for name in ("a.safetensors", "state/a.safetensors"):
        with pytest.raises(UserError, match="cannot be written"):
            late.write_tensors(name, {"x": torch.zeros(2)})
    late.close_files()
    assert list(tmp_path.iterdir()) == []
