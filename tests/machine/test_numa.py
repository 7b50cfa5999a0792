"""Where a run's threads and memory go on a host with several nodes."""

from __future__ import annotations

import os
from pathlib import Path

from megatrain.machine.numa import Binding, bound, choose_binding, free_by_node

NODES = {0: {0, 1, 2, 3}, 1: {4, 5, 6, 7}}
FREE = {0: 100, 1: 100}


def test_one_node_binds_nothing() -> None:
    assert choose_binding({0: {0, 1}}, {0, 1}, 0, 50, {0: 100}).nodes == ()


def test_a_run_that_fits_stays_near_the_gpu() -> None:
    assert choose_binding(NODES, range(8), 1, 80, FREE) == Binding(frozenset({4, 5, 6, 7}), (1,))


def test_a_larger_run_is_spread() -> None:
    assert choose_binding(NODES, range(8), 1, 120, FREE) == Binding(frozenset(range(8)), (0, 1))


def test_without_cores_on_the_gpus_node_it_is_spread() -> None:
    found = choose_binding(NODES, {0, 1}, 1, 10, FREE)
    assert found.cpus == {0, 1}
    assert found.nodes == (0, 1)


def test_free_memory_of_nodes(tmp_path: Path) -> None:
    for node in (0, 1):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "meminfo").write_text(
            f"Node {node} MemTotal: 4000 kB\nNode {node} MemFree: {node + 1} kB\nNode {node} FilePages: 10 kB\n"
        )
    assert free_by_node(root=tmp_path) == {0: 11 * 1024, 1: 12 * 1024}


def test_binding_really_sets_the_cores() -> None:
    before = os.sched_getaffinity(0)
    one = frozenset({min(before)})
    try:
        with bound(Binding(one, (0,))):
            assert os.sched_getaffinity(0) == one
    finally:
        os.sched_setaffinity(0, before)
