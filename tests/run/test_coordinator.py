"""Agreements of the ranks of a run, and of a run in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mesh_ranks as ranks
from megatrain.checkpoint.files import FolderWriter
from megatrain.checkpoint.format import FORMAT_NAME, FORMAT_VERSION, STATE_FILE
from megatrain.config.load import load_config
from megatrain.engine.mesh.watchdog import Watchdog
from megatrain.errors import UserError
from megatrain.run.coordinator import Coordinator, DistributedCoordinator
from megatrain.run.folder import RunFolder
from megatrain.run.signals import Requests, StopSignals
from tiny_run import config


def on_two_ranks(folder: Path, work: Callable[[Coordinator], Any]) -> list[Any]:
    """What `work` returns on each of two ranks."""
    run = load_config(config(folder))

    def rank() -> Any:
        return work(DistributedCoordinator(run, torch.device("cpu"), Watchdog(folder, {})))

    return ranks.run(2, rank)


def agreements(coordinator: Coordinator) -> tuple[Any, ...]:
    rank = coordinator.rank
    return (
        coordinator.any(rank == 1, False),
        coordinator.agree(rank == 0),
        coordinator.gather(rank),
        coordinator.broadcast(f"from {rank}"),
        coordinator.in_turn(lambda: 10 * rank),
    )


def test_one_process_agrees_with_itself() -> None:
    assert agreements(Coordinator()) == ((False, False), True, [0], "from 0", 0)


def test_two_ranks_agree(tmp_path: Path) -> None:
    common = ((True, False), False, [0, 1], "from 0")
    assert on_two_ranks(tmp_path, agreements) == [(*common, 0), (*common, 10)]


def test_where_rank_0_fails_first_the_others_exit_silently(tmp_path: Path) -> None:
    def work(coordinator: Coordinator) -> Any:
        def fail() -> None:
            raise UserError("the data is missing")

        with pytest.raises((UserError, SystemExit)) as caught:
            coordinator.in_turn(fail)
        return type(caught.value).__name__

    assert on_two_ranks(tmp_path, work) == ["UserError", "SystemExit"]


def test_a_request_on_one_rank_reaches_all(tmp_path: Path) -> None:
    def work(coordinator: Coordinator) -> Any:
        requests = Requests(StopSignals(), RunFolder(tmp_path, read_only=not coordinator.is_main), coordinator)
        found = [(requests.poll(), requests.take_save())]
        if coordinator.rank == 1:
            requests.request_save()
        found.append((requests.poll(), requests.take_save()))
        if coordinator.is_main:
            (tmp_path / "stop").touch()
        found.append((requests.poll(), requests.take_save()))
        return found, requests.stop

    first, second = on_two_ranks(tmp_path, work)
    assert first[0] == second[0] == [(False, False), (False, True), (True, False)]
    assert first[1] == f"the file {tmp_path / 'stop'}" and second[1] is not None


def test_the_newest_checkpoint_is_one_that_all_ranks_see(tmp_path: Path) -> None:
    for rank, steps in ((0, (2, 4)), (1, (2,))):
        for step in steps:
            with FolderWriter(tmp_path / str(rank) / "checkpoints" / f"step_{step:06d}") as writer:
                writer.write_json(STATE_FILE, {})
                writer.commit({"format": FORMAT_NAME, "version": FORMAT_VERSION, "step": step})

    def work(coordinator: Coordinator) -> Any:
        newest = coordinator.newest_checkpoint(RunFolder(tmp_path / str(coordinator.rank)))
        return newest.name if newest is not None else None

    assert on_two_ranks(tmp_path, work) == ["step_000002"] * 2

    def apart(coordinator: Coordinator) -> Any:
        with pytest.raises(UserError, match="rank 1 none"):
            coordinator.newest_checkpoint(RunFolder(tmp_path / str(2 * coordinator.rank)))

    on_two_ranks(tmp_path, apart)
