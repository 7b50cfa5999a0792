"""Measuring the ranks of a step: pipeline bubble, communication overlap, stragglers.

[Note: own work]
Ranks that wait for each other all take the same time, so step times single nobody out. A rank's own work does: on a GPU the time
in which kernels other than NCCL's run, sampled by profiling a step now and then; on a CPU the processor time of the process,
because gloo's waits take none. A straggler's own work exceeds that of the ranks with the same stages.

[Note: communication overlap]
A kernel of NCCL is communication, everything else on the device (copies too) is computation. Communication is exposed where no
computation runs at the same time. A receive between stages also spins while the sender is not ready, so a pipeline's bubble shows
up as exposed messages; exposed collectives (parameters, gradients, sequence parallel) are listed separately.
"""

from __future__ import annotations

import math
import resource
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._C._autograd import DeviceType

from megatrain.engine.mesh.layout import Layout, split_layers
from megatrain.engine.mesh.pipeline import Runner
from megatrain.engine.mesh.pipeline_schedule import Action, bubble, simulated_bubble
from megatrain.metrics.record import MeshRecord
from megatrain.metrics.spans import length, union

GATHER_EVERY_STEP_RANKS, GATHER_EVERY = 64, 16
"""More ranks than this exchange their figures only at every sixteenth step, and at sampled ones."""
FIRST_SAMPLE = 10
"""The tenth step is sampled first: earlier ones choose kernels and create communicators."""


@dataclass(frozen=True)
class Kernel:
    """A kernel or copy that ran on the device."""

    name: str
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Overlap:
    """Where the time of a step went on one device."""

    span_s: float  # from the start of the first kernel to the end of the last
    compute_s: float  # at least one computation ran
    collectives_s: float  # collectives ran, and nothing else
    messages_s: float  # messages between stages ran, and nothing else
    idle_s: float  # nothing ran


def overlap_of(kernels: Sequence[Kernel]) -> Overlap:
    """See [Note: communication overlap]."""
    compute, collectives, messages = [], [], []
    for kernel in kernels:
        name = kernel.name.lower()
        kind = compute if "nccl" not in name else messages if "sendrecv" in name else collectives
        kind.append((kernel.begin_s, kernel.end_s))
    everything = union([*compute, *collectives, *messages])
    if not everything:
        return Overlap(0.0, 0.0, 0.0, 0.0, 0.0)
    compute_s, with_collectives_s = length(union(compute)), length(union([*compute, *collectives]))
    span_s, busy = everything[-1][1] - everything[0][0], length(everything)
    return Overlap(span_s, compute_s, with_collectives_s - compute_s, busy - with_collectives_s, span_s - busy)


@contextmanager
def kernels_of(device: torch.device) -> Iterator[list[Kernel]]:
    """Fill the list with what ran on a CUDA device inside the block; on a CPU it stays empty. Takes a second or two."""
    found: list[Kernel] = []
    if device.type != "cuda":
        yield found
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        yield found
        torch.cuda.synchronize(device)
    results = profile.profiler
    assert results is not None and results.kineto_results is not None
    for event in results.kineto_results.events():
        if event.device_type() == DeviceType.CUDA and event.duration_ns() > 0 and not _annotation(event):
            begin = event.start_ns() / 1e9
            found.append(Kernel(event.name(), begin, begin + event.duration_ns() / 1e9))


def _annotation(event: object) -> bool:
    """Whether the event is a range that the host has named: it covers kernels and runs nothing itself."""
    kind = getattr(event, "activity_type", None)
    return kind is not None and "annotation" in str(kind())


# ---------------------------------------------------------------- one rank, all ranks


@dataclass(frozen=True)
class RankStep:
    """One rank's step."""

    busy_s: float  # in actions of the pipeline, collectives inside them included
    span_s: float  # from the step's start to the end of its last action
    work_s: float | None  # see [Note: own work]; None where the step was not sampled
    collectives_s: float | None  # exposed collectives, where sampled
    messages_s: float | None  # exposed messages, where sampled
    peak_bytes: int  # of the device; on a CPU of the process
    costs: Mapping[Any, float] = field(default_factory=dict)  # mean seconds of each (kind, stage)


class RankMeter:
    """Measures the steps of this rank and gathers the figures of all ranks.

    Args:
        layout: Resolved.
        stage_layers: Number of layers of each stage.
        runner: Runs this rank's stages.
        device: This rank's device.
        sample_every_steps: Profile every N-th step, on GPUs; None: never.
    """

    def __init__(
        self,
        layout: Layout,
        stage_layers: Sequence[int],
        runner: Runner,
        device: torch.device,
        sample_every_steps: int | None = None,
    ):
        self._layout, self._stage_layers, self._runner, self._device = layout, stage_layers, runner, device
        self._sample_every = sample_every_steps if device.type == "cuda" else None
        self._steps = 0  # of this process
        self._profiling: ExitStack | None = None
        self._kernels: list[Kernel] = []
        self._began_s = 0.0
        self._work_s: float | None = None

    def begin_step(self) -> None:
        """Call when a step starts."""
        self._steps += 1
        self._end_profile()
        every = self._sample_every
        if every is not None and self._steps % every == min(FIRST_SAMPLE, every - 1):
            self._profiling = ExitStack()
            self._kernels = self._profiling.enter_context(kernels_of(self._device))
        self._began_s = time.process_time()

    def end_step(self) -> None:
        """Call when the step's loss and norm are known."""
        self._work_s = time.process_time() - self._began_s if self._device.type == "cpu" else None

    def gather(self) -> MeshRecord | None:
        """The figures of the step over all ranks; None at the steps that are left out. Collective."""
        sampled = self._profiling is not None
        self._end_profile()
        if self._layout.world > GATHER_EVERY_STEP_RANKS and not sampled and self._steps % GATHER_EVERY:
            return None
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, self._this_rank(overlap_of(self._kernels) if sampled else None))
        return combined(ranks, self._layout, self._stage_layers, self._runner.table(), sampled=sampled)

    def _end_profile(self) -> None:
        if self._profiling is not None:
            self._profiling.close()
            self._profiling = None

    def _this_rank(self, overlap: Overlap | None) -> RankStep:
        timed = self._runner.clock.read()
        if self._device.type == "cuda":
            peak_bytes = torch.cuda.max_memory_allocated(self._device)
        else:
            peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return RankStep(
            busy_s=sum(t.seconds for t in timed),
            span_s=max((t.end_s for t in timed), default=0.0),
            work_s=overlap.compute_s if overlap is not None else self._work_s,
            collectives_s=overlap.collectives_s if overlap is not None else None,
            messages_s=overlap.messages_s if overlap is not None else None,
            peak_bytes=peak_bytes,
            costs=_means(((t.action.kind, t.action.stage), t.seconds) for t in timed),
        )


def combined(
    ranks: Sequence[RankStep],
    layout: Layout,
    stage_layers: Sequence[int],
    table: Sequence[Sequence[Action]],
    *,
    sampled: bool = False,
) -> MeshRecord:
    """The figures of a step over all ranks.

    Args:
        ranks: By rank.
        layout: Resolved.
        stage_layers: Number of layers of each stage.
        table: Actions of each pipeline rank.
        sampled: Whether the step was profiled.
    """
    by_stage = [[r for r in range(layout.world) if layout.coordinate(r).pipeline == p] for p in range(layout.pipeline)]
    busy = tuple(statistics.fmean(ranks[r].busy_s for r in members) for members in by_stage)
    measured = simulated = imbalance = better = None
    if layout.pipeline > 1:
        costs = _means(item for rank in ranks for item in rank.costs.items())
        measured = bubble([r.busy_s for r in ranks], max(r.span_s for r in ranks))
        simulated = simulated_bubble(table, costs, layout.stages)
        imbalance = max(busy) / statistics.fmean(busy) - 1.0 if sum(busy) > 0 else None
        better = proposed_split(costs, stage_layers)
    slowest, excess = straggler(ranks, by_stage)
    return MeshRecord(
        bubble=measured,
        bubble_simulated=simulated,
        stage_busy_s=busy,
        imbalance=imbalance,
        stage_peak_bytes=tuple(max(ranks[r].peak_bytes for r in members) for members in by_stage),
        exposed_collectives_s=_mean([r.collectives_s for r in ranks]),
        exposed_messages_s=_mean([r.messages_s for r in ranks]),
        slowest_rank=slowest,
        slowest_excess=excess,
        sampled=sampled,
        stage_layers=tuple(stage_layers),
        better_stage_layers=tuple(better) if better else None,
    )


def _means(items: Iterable[tuple[Any, float]]) -> dict[Any, float]:
    """Mean of the values of each key."""
    found: dict[Any, list[float]] = {}
    for key, value in items:
        found.setdefault(key, []).append(value)
    return {key: statistics.fmean(values) for key, values in found.items()}


def straggler(ranks: Sequence[RankStep], by_stage: Sequence[Sequence[int]]) -> tuple[int | None, float | None]:
    """(rank, excess) of the rank whose own work most exceeds the median of the others with the same stages."""
    worst: tuple[float, int] | None = None
    for members in by_stage:
        works = {r: work for r in members if (work := ranks[r].work_s) is not None}
        for rank, work in works.items():
            others = [w for r, w in works.items() if r != rank]
            if others and (median := statistics.median(others)) > 0:
                worst = max(worst or (-math.inf, rank), (work / median - 1.0, rank))
    return (None, None) if worst is None else (worst[1], worst[0])


def proposed_split(costs: Mapping[Any, float], stage_layers: Sequence[int]) -> list[int] | None:
    """Number of layers of each stage that would balance the stages, from their measured seconds.

    Args:
        costs: Mean seconds of each (kind, stage).
        stage_layers: Number of layers of each stage now.

    Returns:
        None if the measurement proposes no other split.
    """
    stages = len(stage_layers)
    if not costs:
        return None
    totals = [sum(seconds for (_, stage), seconds in costs.items() if stage == s) for s in range(stages)]
    # The stage that is cheapest per layer has the least besides layers; what the ends take above that is embedding and head.
    layer = min(total / count for total, count in zip(totals, stage_layers, strict=True))
    first, last = (max(0.0, totals[s] - stage_layers[s] * layer) for s in (0, stages - 1))
    found = [len(part) for part in split_layers(sum(stage_layers), stages, layer, first, last)]
    return found if found != list(stage_layers) else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
