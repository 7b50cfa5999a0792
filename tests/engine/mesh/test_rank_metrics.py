"""Bubbles, exposed communication, stragglers and alerts, from plain numbers."""

from __future__ import annotations

import pytest

import families
import mesh_ranks as ranks
from megatrain.engine.mesh.comm_overlap import Kernel, shares, union
from megatrain.engine.mesh.engine import MeshEngine
from megatrain.engine.mesh.layout import SCHEDULES, Layout, MeshPlan
from megatrain.engine.mesh.rank_metrics import (
    Alerts,
    RankNumbers,
    gather,
    numbers_of_all,
    numbers_of_rank,
    proposed_split,
)


def rank(work_s: float | None = 1.0, busy: float = 1.0, **more: object) -> RankNumbers:
    plain = {"span_s": 2.0, "collectives_s": None, "messages_s": None, "peak_bytes": 100, "costs": {}}
    return RankNumbers(busy_s=busy, work_s=work_s, **{**plain, **more})  # type: ignore[arg-type]


def test_what_is_measured_is_what_torchs_table_says() -> None:
    """All schedules: each rank's measured actions are its row of the table, and the simulation plays the table to its end."""
    model = families.build(families.BY_NAME["llama"], seed=1, tie=True)
    batch = families.batch(families.BY_NAME["llama"], seed=1, rows=8, tokens=16, kind="plain")

    def work() -> dict[str, tuple[bool, float, float]]:
        found = {}
        for kind in SCHEDULES.values():
            layout = Layout(pipeline=2, virtual=kind.virtual[0], shard=1, schedule=kind.name, microbatches=4)
            with MeshEngine(model, MeshPlan(layout, compute_dtype="fp32"), device="cpu") as engine:
                engine.train_step(batch)
                mine = [t.action for t in engine.runner.clock.read()]
                same = set(mine) == set(engine.runner.table()[engine.devices.at.pipeline])
                ranks = gather(numbers_of_rank(engine.runner, engine.device, None, None))
                numbers = numbers_of_all(ranks, engine.layout, engine.runner.table(), None)
                assert numbers.bubble is not None and numbers.bubble_simulated is not None
                found[kind.name] = (same and len(set(mine)) == len(mine), numbers.bubble, numbers.bubble_simulated)
        return found

    first, second = ranks.run(2, work)
    for name in SCHEDULES:
        assert first[name][0] and second[name][0], name
        assert first[name][1:] == second[name][1:]
        assert 0.0 <= first[name][2] < 0.8 and 0.0 <= first[name][1] < 1.0


def test_exposed_is_what_no_computation_hides() -> None:
    kernels = [
        Kernel("gemm", 0.0, 4.0),
        Kernel("ncclDevKernel_AllGather_RING_LL", 3.0, 5.0),  # 1 s hidden, 1 s exposed
        Kernel("ncclDevKernel_SendRecv", 4.5, 7.0),  # 2 s with nothing else
        Kernel("elementwise", 8.0, 10.0),
    ]
    found = shares(kernels)
    assert (found.span_s, found.compute_s, found.collectives_s) == (10.0, 6.0, 1.0)
    assert (found.messages_s, found.idle_s) == (2.0, 1.0)
    assert union([(3, 4), (0, 1), (0.5, 2)]) == [(0, 2), (3, 4)]
    assert shares([]).span_s == 0.0


def test_the_straggler_is_found_among_its_peers() -> None:
    """The busiest stage is none: ranks of one stage are compared."""
    layout = Layout(pipeline=2, shard=2)
    four = [rank(1.0), rank(1.02), rank(3.0, busy=3.0), rank(4.2, busy=3.0)]
    found = numbers_of_all(four, layout, [[], []], None)
    assert (found.slowest_rank, found.slowest_excess) == (3, pytest.approx(0.4))
    assert found.stage_busy_s == (1.0, 3.0) and found.imbalance == pytest.approx(0.5)
    assert found.mfu is None and "mfu" not in found.plain()


def test_one_rank_has_no_peers() -> None:
    found = numbers_of_all([rank()], Layout(shard=1), [[]], 0.4)
    assert found.slowest_rank is None and found.bubble is None and found.plain()["mfu"] == 0.4


def test_a_split_is_proposed_from_measured_seconds() -> None:
    costs = {("F", 0): 4.0, ("F", 1): 4.0, ("F", 2): 4.0, ("F", 3): 8.0}  # the head costs as much as four layers
    assert proposed_split(costs, [4, 4, 4, 4]) == [5, 5, 5, 1]
    assert proposed_split({("F", s): 4.0 for s in range(4)}, [4, 4, 4, 4]) is None


def test_alerts_need_patience_and_are_said_once() -> None:
    layout, costs = Layout(pipeline=2, shard=1), {("F", 0): 1.0, ("F", 1): 3.0}
    bad = numbers_of_all([rank(busy=1.0), rank(busy=3.0)], layout, [[], []], 0.30)
    good = numbers_of_all([rank(), rank()], layout, [[], []], 0.50)
    alerts = Alerts(0.4, [4, 4])
    said = [alerts.look(step, bad, costs) for step in range(1, 9)]
    assert [bool(s) for s in said] == [False] * 4 + [True] + [False] * 3
    assert "MFU has been under 40.0% (watchdog.mfu_floor)" in said[4][0] and "30.0% now" in said[4][0]
    assert "try parallel.stage_layers: [7, 1]" in said[4][1]
    alerts.look(9, good, costs)
    assert [bool(alerts.look(step, bad, costs)) for step in range(10, 15)] == [False] * 4 + [True]


def test_on_a_cpu_nobody_is_called_a_straggler() -> None:
    layout = Layout(shard=2)
    uneven = numbers_of_all([rank(1.0), rank(2.0)], layout, [[], []], None)
    assert uneven.slowest_excess is not None and uneven.slowest_excess > 0.2
    for stragglers in (True, False):
        alerts = Alerts(None, [4], stragglers=stragglers)
        said = [text for step in range(1, 9) for text in alerts.look(step, uneven, {})]
        assert ["more own work than its peers" in text for text in said] == ([True] if stragglers else [])
