"""What all ranks together say of a step, and what is wrong with it: pure functions of plain numbers, and one gathering of them.

[Note: who is slow]
Ranks that wait for each other all take the same time, so step times name nobody. A rank's own work does: on a GPU the time in
which its kernels other than NCCL's run, sampled by profiling a step now and then (exposed.py); on a CPU the processor time
of the process, because gloo's waits take none. A straggler's own work is above that of the ranks with the same stages.
"""

from __future__ import annotations

import math
import resource
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megatrain.engine.mesh.comm_overlap import Shares
from megatrain.engine.mesh.layout import Layout, split_layers
from megatrain.engine.mesh.pipeline import Runner
from megatrain.engine.mesh.pipeline_schedule import Action, bubble, simulated_bubble

IMBALANCE = 0.2
"""Share by which the busiest stage may exceed the mean before another split of the layers is proposed."""
STRAGGLER = 0.2
"""Share by which a rank's own work may exceed the median of its peers'."""
PATIENCE = 5
"""An alert needs so many steps in a row."""


@dataclass(frozen=True)
class RankNumbers:
    """One rank's step.

    Attributes:
        busy_s: In actions of the pipeline, waits of collectives inside them included.
        span_s: From the step's start to the end of its last action.
        work_s: Its own work, see [Note: who is slow]; None where this step was not sampled.
        collectives_s, messages_s: Exposed communication, where sampled.
        peak_bytes: Of the device; on a CPU of the process.
        costs: Mean seconds of each (kind, stage).
    """

    busy_s: float
    span_s: float
    work_s: float | None
    collectives_s: float | None
    messages_s: float | None
    peak_bytes: int
    costs: Mapping[Any, float] = field(default_factory=dict)


@dataclass(frozen=True)
class MeshNumbers:
    """All ranks' step, as `metrics.jsonl` keeps it. None: not known of this step.

    Attributes:
        mfu: Model FLOPs (nothing recomputed) per second over the measured matrix peak of all devices.
        bubble, bubble_simulated: See [Note: bubble] in pipeline_schedule.py; without a pipeline None.
        stage_busy_s: Of each pipeline rank, the mean of its ranks.
        imbalance: Largest of them over their mean, less one.
        stage_peak_bytes: Of each pipeline rank, the largest of its ranks.
        exposed_collectives_s, exposed_messages_s: Mean over the ranks.
        slowest_rank: With the most own work beside its peers.
        slowest_excess: That work over the median of its peers', less one.
    """

    mfu: float | None
    bubble: float | None
    bubble_simulated: float | None
    stage_busy_s: tuple[float, ...]
    imbalance: float | None
    stage_peak_bytes: tuple[int, ...]
    exposed_collectives_s: float | None
    exposed_messages_s: float | None
    slowest_rank: int | None
    slowest_excess: float | None

    def plain(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


class RankClock:
    """This rank's own work in a step, on a CPU."""

    def __init__(self, device: torch.device):
        self._cpu = device.type == "cpu"
        self._began = time.process_time()

    def start(self) -> None:
        self._began = time.process_time()

    def work_s(self) -> float | None:
        return time.process_time() - self._began if self._cpu else None


def numbers_of_rank(runner: Runner, device: torch.device, work_s: float | None, sampled: Shares | None) -> RankNumbers:
    """Behind a synchronisation of the step."""
    timed = runner.clock.read()
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return RankNumbers(
        busy_s=sum(t.seconds for t in timed),
        span_s=max((t.end_s for t in timed), default=0.0),
        work_s=sampled.compute_s if sampled is not None else work_s,
        collectives_s=sampled.collectives_s if sampled is not None else None,
        messages_s=sampled.messages_s if sampled is not None else None,
        peak_bytes=peak,
        costs=_means(((t.action.kind, t.action.stage), t.seconds) for t in timed),
    )


def gather(mine: RankNumbers) -> list[RankNumbers]:
    """Of all ranks. Collective."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def numbers_of_all(
    ranks: Sequence[RankNumbers], layout: Layout, table: Sequence[Sequence[Action]], mfu: float | None
) -> MeshNumbers:
    """Put the ranks' numbers together.

    Args:
        ranks: In order.
        layout: The resolved layout.
        table: The actions of each pipeline rank.
        mfu: Of the step, if known.
    """
    by_stage = [[r for r in range(layout.world) if layout.coordinate(r).pipeline == p] for p in range(layout.pipeline)]
    busy = tuple(statistics.fmean(ranks[r].busy_s for r in members) for members in by_stage)
    measured = simulated = imbalance = None
    if layout.pipeline > 1:
        measured = bubble([r.busy_s for r in ranks], max(r.span_s for r in ranks))
        simulated = simulated_bubble(table, mean_over_ranks(ranks), layout.stages)
        imbalance = max(busy) / statistics.fmean(busy) - 1.0 if sum(busy) > 0 else None
    slowest, excess = straggler(ranks, by_stage)
    return MeshNumbers(
        mfu=mfu,
        bubble=measured,
        bubble_simulated=simulated,
        stage_busy_s=busy,
        imbalance=imbalance,
        stage_peak_bytes=tuple(max(ranks[r].peak_bytes for r in members) for members in by_stage),
        exposed_collectives_s=_mean([r.collectives_s for r in ranks]),
        exposed_messages_s=_mean([r.messages_s for r in ranks]),
        slowest_rank=slowest,
        slowest_excess=excess,
    )


def mean_over_ranks(ranks: Sequence[RankNumbers]) -> dict[Any, float]:
    """Mean seconds of each (kind, stage) over the ranks that ran it."""
    return _means(item for rank in ranks for item in rank.costs.items())


def _means(items: Iterable[tuple[Any, float]]) -> dict[Any, float]:
    """Mean of the values of each key."""
    found: dict[Any, list[float]] = {}
    for key, value in items:
        found.setdefault(key, []).append(value)
    return {key: statistics.fmean(values) for key, values in found.items()}


def straggler(ranks: Sequence[RankNumbers], by_stage: Sequence[Sequence[int]]) -> tuple[int | None, float | None]:
    """(rank, excess) of the rank whose own work is furthest above the median of the others with the same stages."""
    worst: tuple[float, int] | None = None
    for members in by_stage:
        works = {r: work for r in members if (work := ranks[r].work_s) is not None}
        for rank, work in works.items():
            others = [w for r, w in works.items() if r != rank]
            if others and (median := statistics.median(others)) > 0:
                worst = max(worst or (-math.inf, rank), (work / median - 1.0, rank))
    return (None, None) if worst is None else (worst[1], worst[0])


def proposed_split(costs: Mapping[Any, float], counts: Sequence[int]) -> list[int] | None:
    """Layers of each stage that would be even, from the measured seconds of the stages.

    Args:
        costs: Mean seconds of each (kind, stage).
        counts: Layers of each stage now.

    Returns:
        None where the measurement says nothing better.
    """
    stages = len(counts)
    totals = [sum(seconds for (_, stage), seconds in costs.items() if stage == s) for s in range(stages)]
    # The cheapest stage per layer has the least of what is no layer; embedding and head are what the ends have above it.
    layer = min(total / count for total, count in zip(totals, counts, strict=True))
    first, last = (max(0.0, totals[s] - counts[s] * layer) for s in (0, stages - 1))
    found = [len(part) for part in split_layers(sum(counts), stages, layer, first, last)]
    return found if found != list(counts) else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


class Alerts:
    """Says once what has been wrong for `PATIENCE` steps, and again only after it was right in between.

    Args:
        mfu_floor: None: no floor.
        counts: Layers of each stage.
        stragglers: Whether a rank with more own work than its peers is one. Not on a CPU, where it says little of the machine:
            ranks of one host share its processors, and threads that wait for work take processor time too.
    """

    def __init__(self, mfu_floor: float | None, counts: Sequence[int], stragglers: bool = True):
        self._mfu_floor, self._counts, self._stragglers = mfu_floor, list(counts), stragglers
        self._in_a_row: dict[str, int] = {}

    def look(self, step: int, numbers: MeshNumbers, costs: Mapping[Any, float]) -> list[str]:
        """What is to be said behind a step."""
        found = []
        floor, mfu = self._mfu_floor, numbers.mfu
        if self._due("mfu", None if mfu is None or floor is None else mfu < floor):
            found.append(
                f"step {step}: MFU has been under {floor:.1%} (watchdog.mfu_floor) for {PATIENCE} steps, {mfu:.1%} now"
            )
        if self._due("imbalance", None if numbers.imbalance is None else numbers.imbalance > IMBALANCE):
            split = proposed_split(costs, self._counts)
            way = f"try parallel.stage_layers: {split}" if split else "no other split of the layers is better"
            found.append(
                f"step {step}: the busiest stage has taken {numbers.imbalance:.0%} more than the mean for {PATIENCE} "
                f"steps (layers {self._counts}); {way}"
            )
        slow = numbers.slowest_excess if self._stragglers else None
        if self._due("straggler", None if slow is None else slow > STRAGGLER):
            found.append(
                f"step {step}: rank {numbers.slowest_rank} has done {slow:.0%} more own work than its peers for {PATIENCE} "
                "sampled steps: look at its machine (clocks, other processes)"
            )
        return found

    def _due(self, name: str, wrong: bool | None) -> bool:
        """Exactly at the step that makes it `PATIENCE` in a row; steps that say nothing (None) do not count."""
        if wrong is None:
            return False
        self._in_a_row[name] = self._in_a_row.get(name, 0) + 1 if wrong else 0
        return self._in_a_row[name] == PATIENCE
