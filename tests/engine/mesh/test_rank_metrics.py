"""Bubbles, exposed communication, stragglers and alerts, from plain numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import families
import mesh_ranks as ranks
from megatrain.config.load import load_config
from megatrain.engine.mesh import rank_metrics
from megatrain.engine.mesh.engine import MeshEngine
from megatrain.engine.mesh.layout import SCHEDULES, Layout, MeshPlan
from megatrain.engine.mesh.rank_metrics import Kernel, RankMeter, RankStep, combined, overlap_of, proposed_split
from megatrain.metrics.alerts import AlertWatch
from megatrain.metrics.record import MeshRecord
from megatrain.run.health import RunHealth
from step_records import record
from tiny_run import config


def rank(work_s: float | None = 1.0, busy: float = 1.0, **more: object) -> RankStep:
    plain = {"span_s": 2.0, "collectives_s": None, "messages_s": None, "peak_bytes": 100, "costs": {}}
    return RankStep(busy_s=busy, work_s=work_s, **{**plain, **more})  # type: ignore[arg-type]


def test_measured_actions_are_those_of_the_schedules() -> None:
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
                numbers = engine.step_over_ranks()
                assert numbers is not None and numbers.bubble is not None and numbers.bubble_simulated is not None
                found[kind.name] = (same and len(set(mine)) == len(mine), numbers.bubble, numbers.bubble_simulated)
        return found

    first, second = ranks.run(2, work)
    for name in SCHEDULES:
        assert first[name][0] and second[name][0], name
        assert first[name][1:] == second[name][1:]
        assert 0.0 <= first[name][2] < 0.8 and 0.0 <= first[name][1] < 1.0


def test_every_nth_step_is_profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of them is the tenth step of the process, or the last but one of N."""

    @contextmanager
    def kernels_of(device: torch.device) -> Iterator[list[Kernel]]:
        found: list[Kernel] = []
        yield found
        found += [Kernel("gemm", 0.0, 3.0), Kernel("ncclDevKernel_AllGather", 2.0, 4.0)]

    monkeypatch.setattr(rank_metrics, "kernels_of", kernels_of)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7)
    runner: Any = SimpleNamespace(clock=SimpleNamespace(read=list), table=lambda: [[]])

    def work() -> list[tuple[bool, float | None, tuple[int, ...]]]:
        meter = RankMeter(Layout(shard=1), [4], runner, torch.device("cuda"), sample_every_steps=4)
        found = []
        for _ in range(8):
            meter.begin_step()
            meter.end_step()
            step = meter.gather()
            assert step is not None
            found.append((step.sampled, step.exposed_collectives_s, step.stage_peak_bytes))
        return found

    (found,) = ranks.run(1, work)
    assert [number for number, step in enumerate(found, start=1) if step[0]] == [3, 7]
    assert [step[1:] for step in found] == [((1.0 if step[0] else None), (7,)) for step in found]


def test_communication_is_exposed_where_no_computation_hides_it() -> None:
    kernels = [
        Kernel("gemm", 0.0, 4.0),
        Kernel("ncclDevKernel_AllGather_RING_LL", 3.0, 5.0),  # 1 s hidden, 1 s exposed
        Kernel("ncclDevKernel_SendRecv", 4.5, 7.0),  # 2 s with nothing else
        Kernel("elementwise", 8.0, 10.0),
    ]
    found = overlap_of(kernels)
    assert (found.span_s, found.compute_s, found.collectives_s) == (10.0, 6.0, 1.0)
    assert (found.messages_s, found.idle_s) == (2.0, 1.0)
    assert overlap_of([]).span_s == 0.0


def test_the_straggler_is_found_among_its_peers() -> None:
    """The busiest stage is none: ranks of one stage are compared."""
    layout = Layout(pipeline=2, shard=2)
    four = [rank(1.0), rank(1.02), rank(3.0, busy=3.0), rank(4.2, busy=3.0)]
    found = combined(four, layout, [4, 4], [[], []])
    assert (found.slowest_rank, found.slowest_excess) == (3, pytest.approx(0.4))
    assert found.stage_busy_s == (1.0, 3.0) and found.imbalance == pytest.approx(0.5)
    assert "bubble_simulated" in found.plain(None) and "exposed_messages_s" not in found.plain(None)


def test_one_rank_has_no_peers() -> None:
    found = combined([rank()], Layout(shard=1), [4], [[]])
    assert found.slowest_rank is None and found.bubble is None


def test_a_split_is_proposed_from_measured_seconds() -> None:
    costs = {("F", 0): 4.0, ("F", 1): 4.0, ("F", 2): 4.0, ("F", 3): 8.0}  # the head costs as much as four layers
    assert proposed_split(costs, [4, 4, 4, 4]) == [5, 5, 5, 1]
    assert proposed_split({("F", s): 4.0 for s in range(4)}, [4, 4, 4, 4]) is None


def watch(mfu_floor: float | None = None, straggler: float | None = 0.2) -> AlertWatch:
    return AlertWatch({"mfu_floor": mfu_floor, "imbalance": 0.2, "straggler": straggler}, 10, 0.9)


def alerts(watcher: AlertWatch, step: int, mfu: float | None, ranks: MeshRecord) -> list[str]:
    return [alert.text for alert in watcher.check(record(step, mfu=mfu), ranks)]


def test_alerts_need_five_steps_in_a_row_and_are_said_once() -> None:
    layout = Layout(pipeline=2, shard=1)
    costs = {("F", 0): 1.0, ("F", 1): 3.0}
    bad = combined([rank(busy=1.0, costs=costs), rank(busy=3.0, costs=costs)], layout, [4, 4], [[], []])
    good = combined([rank(), rank()], layout, [4, 4], [[], []])
    watcher = watch(0.4)
    said = [alerts(watcher, step, 0.30, bad) for step in range(1, 9)]
    assert [bool(s) for s in said] == [False] * 4 + [True] + [False] * 3
    assert "MFU under 40.0% (watchdog.mfu_floor)" in said[4][0] and "30.0% now" in said[4][0]
    assert "try parallel.stage_layers: [7, 1]" in said[4][1]
    alerts(watcher, 9, 0.50, good)
    assert [bool(alerts(watcher, step, 0.30, bad)) for step in range(10, 15)] == [False] * 4 + [True]


def test_a_profiled_step_says_nothing_of_the_mfu() -> None:
    watcher, profiled = watch(0.4), combined([rank()], Layout(shard=1), [4], [[]], sampled=True)
    assert [alerts(watcher, step, 0.30, profiled) for step in range(1, 9)] == [[]] * 8


def test_a_straggler_is_named_unless_the_rule_is_off() -> None:
    uneven = combined([rank(1.0), rank(2.0)], Layout(shard=2), [4], [[], []])
    assert uneven.slowest_excess is not None and uneven.slowest_excess > 0.2
    for limit in (0.2, None):
        watcher = watch(straggler=limit)
        said = [text for step in range(1, 9) for text in alerts(watcher, step, None, uneven)]
        assert ["more own work than its peers" in text for text in said] == ([True] if limit else [])


def test_on_a_cpu_nobody_is_called_a_straggler(tmp_path: Path) -> None:
    """Ranks of one host share its processors there."""
    uneven = combined([rank(1.0), rank(2.0)], Layout(shard=2), [4], [[], []])
    health = RunHealth(load_config(config(tmp_path)), tmp_path / "model", 2)
    assert [alert for step in range(1, 9) for alert in health.alerts(record(step), uneven)] == []
