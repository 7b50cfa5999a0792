"""Links of all GPUs at once, and the cores of a rank."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import mesh_ranks
from megatrain.machine.gpus import cpus_of_rank, link_rates, local_cpus, on_cpus, stay_on
from megatrain.machine.machine import load_machine, machine_from

MACHINES = Path(__file__).parents[2] / "docs/machines"


class Copies:
    """Notes what is called."""

    def __init__(self, name: str, log: list[str]):
        self._name, self._log = name, log

    def begin(self) -> None:
        self._log.append(f"begin {self._name}")

    def wait(self) -> None:
        self._log.append(f"wait {self._name}")


def test_links_are_measured_alone_and_then_all_at_once() -> None:
    log: list[str] = []
    alone, together = link_rates({0: Copies("a", log), 1: Copies("b", log)}, 10**6)
    assert set(alone) == {0, 1} and together > 0 and all(rate > 0 for rate in alone.values())
    assert log[:2] == ["begin a", "wait a"]
    assert log[-4:] == ["begin a", "begin b", "wait a", "wait b"]


def test_ranks_have_what_all_links_reach_together() -> None:
    """Four GPUs that reach 20 GB/s each together: two of them 40, one its own rate."""
    machine = replace(load_machine(MACHINES / "h200x8-2tib.yaml"), gpus=4, h2d_gbps=60.0, both_gbps=50.0)
    assert machine.link_gbps(4) == (60.0, 50.0), "not measured"
    machine = replace(machine, all_gpus_gbps=20.0)
    assert machine.link_gbps(1) == (60.0, 50.0)
    assert machine.link_gbps(2) == pytest.approx((48.0, 40.0))
    assert machine.link_gbps(4) == pytest.approx((24.0, 20.0))
    assert machine_from(
        {"name": "m", "device_gib": 80, "host_gib": 512, "cores": 64, "gpus": 2, "gpu_link_gbps": {"0": 50.0}}, "m"
    ).gpu_link_gbps


ALL = set(range(8))


@pytest.mark.parametrize(
    ("near", "found"),
    [
        ([{0, 1, 2, 3}, {4, 5, 6, 7}], [{0, 1, 2, 3}, {4, 5, 6, 7}]),
        ([{0, 1, 2, 3}, {0, 1, 2, 3}], [None, None]),  # half of the cores would be left over
        ([set(), {4, 5, 6, 7}], [None, None]),  # the system does not tell
        ([ALL, ALL], [None, None]),  # one node
        ([{0, 1, 2, 3, 8, 9}, {4, 5, 6, 7, 10}], [{0, 1, 2, 3}, {4, 5, 6, 7}]),  # cores outside the container
        ([ALL, {8, 9}], [None, None]),  # nothing of a node is allowed
    ],
)
def test_ranks_stay_near_their_gpus_if_no_core_is_left_over(near: list[set[int]], found: list[set[int] | None]) -> None:
    assert [cpus_of_rank(near, rank, ALL) for rank in range(2)] == found


def test_local_cores_are_read_from_the_system(tmp_path: Path) -> None:
    folder = tmp_path / "bus/pci/devices/0000:17:00.0"
    folder.mkdir(parents=True)
    assert local_cpus("0000:17:00.0", root=tmp_path) == set()
    (folder / "local_cpulist").write_text("0-3,8\n")
    (folder / "numa_node").write_text("-1\n")
    assert local_cpus("0000:17:00.0", root=tmp_path) == set(), "a virtual machine without nodes"
    (folder / "numa_node").write_text("1\n")
    assert local_cpus("0000:17:00.0", root=tmp_path) == {0, 1, 2, 3, 8}


def moved() -> tuple[set[int], set[int]]:
    allowed = sorted(os.sched_getaffinity(0))
    near = [set(allowed[: len(allowed) // 2]), set(allowed[len(allowed) // 2 :])]
    with on_cpus({allowed[0]}):
        assert os.sched_getaffinity(0) == {allowed[0]}
    assert os.sched_getaffinity(0) == set(allowed)
    with on_cpus(set()):
        pass
    stay_on(near, 1, torch.device("cpu"))
    return near[1] if near[0] else set(allowed), os.sched_getaffinity(0)


def test_a_rank_moves_to_its_cores() -> None:
    ((wanted, found),) = mesh_ranks.run(1, moved)
    assert found == wanted
