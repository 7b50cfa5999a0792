"""`evaluate`: seconds by cause, memory of the heaviest rank, traffic, bottleneck and goodput of a candidate.

[Note: many microbatches]
A schedule's table settles into rounds. Beyond `MAX_PLAYED` rounds of microbatches, a table of that length and a shorter one are
played, and their difference is added for the remaining rounds: the same seconds to within a thousandth, for a fraction of the
work.

[Note: checkpoint interval]
How often to save, and the share of a run's time that failures and saves leave, is Young's and Daly's optimum.
A failure anywhere stops the whole job. With M the mean time between failures of the job and C the seconds for which a save stops
training, saving every t seconds loses C / t of the time to saves, and each failure loses t / 2, the writing W of the unfinished
save, and the restart R. The best t is near sqrt(2 C M) (J. Young, 1974); J. Daly's higher order (2006) is used:
sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + C / 18M) - C. One save is written at a time, so t is at least W.

[Note: seconds of a save]
One process of each host writes, in whole units (checkpoint/shared_write.py). A host gathers its next unit while it writes one,
so the slower of the two counts, plus the gathering of its first unit; then it reads everything back. All wait for the host with
the most bytes. The file system may have a limit for all hosts together. At a restart all hosts together read the checkpoint twice
(`MeshEngine.load`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatrain.checkpoint.shared_write import shares
from megatrain.engine.mesh.layout import Layout
from megatrain.engine.mesh.pipeline_schedule import action_table
from megatrain.machine.machine import Cluster
from megatrain.planner.cluster.candidate import Candidate, Request
from megatrain.planner.cluster.memory import DEVICE_FRACTION, RankMemory, heaviest_rank
from megatrain.planner.cluster.step_time import (
    CAUSES,
    STEP_S,
    Dimension,
    Pass,
    StageTime,
    StepTime,
    Traffic,
    gathered_ahead,
    play,
    send_s,
    stage_times,
    traffic,
)

MAX_PLAYED = 5
"""Rounds of `pipeline` microbatches."""


@dataclass(frozen=True)
class Estimate:
    """An evaluated candidate.

    Attributes:
        candidate: The candidate.
        seconds: Seconds of a step by cause, of the rank that computes longest: those of `CAUSES`, `bubble` (waiting for other
            stages), `optimizer`. They add up to `step_s`.
        bubble: The bubble of the schedule's table, as a share of all ranks' time.
        memory: Memory of the heaviest pipeline rank.
        traffic: Traffic by dimension.
        tokens_per_s: Without failures.
        mfu: Model FLOPs per second over the data sheet's peak.
        goodput: The cost of failures.
    """

    candidate: Candidate
    seconds: Mapping[str, float]
    bubble: float
    memory: RankMemory
    traffic: Mapping[Dimension, Traffic]
    tokens_per_s: float
    mfu: float
    goodput: Goodput

    @property
    def step_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def useful_tokens_per_s(self) -> float:
        """Tokens per second with failures."""
        return self.tokens_per_s * self.goodput.share

    @property
    def bottleneck(self) -> str:
        """The largest cause beside the matrix products; the products if no cause takes an eighth of the step."""
        others = {name: seconds for name, seconds in self.seconds.items() if name != "compute"}
        name = max(others, key=others.__getitem__, default=None)
        if name is None or others[name] < self.step_s / 8:
            return "matrix products"
        return describe_cause(name, self.traffic)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        layout, goodput = self.candidate.layout, self.goodput
        sizes = ("tensor", "pipeline", "virtual", "context", "replicate", "shard", "schedule")
        return {
            "parallel": {**{n: getattr(layout, n) for n in sizes}, "microbatches": layout.microbatch_count},
            "recompute": self.candidate.recompute,
            "step_seconds": self.step_s,
            "seconds": dict(self.seconds),
            "bubble": self.bubble,
            "tokens_per_second": self.tokens_per_s,
            "mfu": self.mfu,
            "bottleneck": self.bottleneck,
            "memory_bytes": dict(self.memory.lines),
            "heaviest_pipeline_rank": self.memory.pipeline_rank,
            "traffic": {
                name: {"bytes_per_gpu": one.nbytes, "link": one.link, "ranks": one.size, "ranks_per_node": one.per_node}
                for name, one in self.traffic.items()
            },
            "goodput": {
                "share": goodput.share,
                "mtbf_hours": goodput.mtbf_hours,
                "save_stops_seconds": goodput.stop_s,
                "save_written_seconds": goodput.write_s,
                "restart_seconds": goodput.restart_s,
                "save_every_steps": goodput.every_steps,
            },
        }  # fmt: skip


def describe_cause(cause: str, traffic: Mapping[Dimension, Traffic]) -> str:
    """A cause of lost time in words."""

    def where(dimension: Dimension) -> str:
        links = {"node": " inside nodes", "network": " over the network"}
        return links[traffic[dimension].link] if dimension in traffic else ""

    if cause in ("tensor", "context"):
        return f"{cause}-parallel collectives{where(cause)}"
    if cause == "shard":
        return f"gathering parameters and reducing gradients{where('fsdp')}"
    names = {"bubble": "the pipeline's bubble", "recompute": "recomputing activations", "optimizer": "the optimizer"}
    return names[cause]


def allowed_bytes(request: Request) -> int:
    """GPU memory that a rank may use."""
    return int(request.cluster.device_bytes * DEVICE_FRACTION)


def quick_step_s(request: Request, candidate: Candidate) -> float:
    """Seconds of a step without playing the table: the longest rank's work, and the textbook's bubble."""
    layout, times = candidate.layout, stage_times(request, candidate)
    longest = max(
        sum(times[s].forward.seconds + times[s].backward.seconds for s in layout.stages_of(rank))
        for rank in range(layout.pipeline)
    )
    split = 3 if layout.kind.splits_backward else 1
    rounds = layout.microbatch_count + (layout.pipeline - 1) / (layout.virtual * split)
    return longest * rounds + max(time.first_forward + time.reduce for time in times)


def evaluate(request: Request, candidate: Candidate, memory: RankMemory | None = None) -> Estimate:
    """Evaluate a candidate by playing its schedule's table; `memory` is its heaviest rank's, if known."""
    layout, inventory, cluster = candidate.layout, request.inventory, request.cluster
    times = gathered_ahead(request, candidate, stage_times(request, candidate))
    transfer_s = send_s(layout, cluster, request.hidden_bytes(candidate) / layout.tensor)
    played = _play(layout, times, transfer_s)
    longest = max(range(layout.pipeline), key=lambda rank: played.busy[rank])
    work = Pass()
    for stage in layout.stages_of(longest):
        work += (times[stage].forward + times[stage].backward) * layout.microbatch_count
        work += Pass(shard=times[stage].first_forward)
    own = max(inventory.rank(layout, rank, layout.fsdp) for rank in range(layout.pipeline))
    seconds = {cause: getattr(work, cause) for cause in CAUSES}
    seconds["bubble"] = max(0.0, played.computed - work.seconds)
    seconds["shard"] += played.seconds - played.computed
    update_s = request.optim.update_bytes(4) * own / (cluster.device_bandwidth_gbps * 1e9)
    seconds["optimizer"] = update_s + STEP_S
    step_s = sum(seconds.values())
    units = {unit.name: unit.layout.param_count for unit in inventory.structure.units}
    tokens = request.step.all_tokens
    flops = 3.0 * inventory.shape.forward_flops(request.step.tokens) * tokens
    return Estimate(
        candidate=candidate,
        seconds={name: s for name, s in seconds.items() if s > 0},
        bubble=played.bubble if layout.pipeline > 1 else 0.0,
        memory=memory or heaviest_rank(request, candidate),
        traffic=traffic(request, candidate),
        tokens_per_s=tokens / step_s,
        mfu=flops / (step_s * request.world * cluster.peak_tflops * 1e12),
        goodput=goodput(
            cluster, request.world, units, own, step_s, request.background, request.optim.bytes_per_parameter
        ),
    )


def _play(layout: Layout, stages: list[StageTime], transfer_s: float) -> StepTime:
    """See [Note: many microbatches]."""

    def played(microbatches: int) -> StepTime:
        return play(action_table(layout.schedule, layout.pipeline, layout.virtual, microbatches), stages, transfer_s)

    pipeline, count = layout.pipeline, layout.microbatch_count
    if count <= MAX_PLAYED * pipeline:
        return played(count)
    rest = count % pipeline if not layout.kind.rounds else 0
    few, more = ((MAX_PLAYED - n) * pipeline + rest for n in (2, 0))
    short, long = played(few), played(more)
    times = (count // pipeline * pipeline + rest - more) / (more - few)

    def extended(a: float, b: float) -> float:
        return b + times * (b - a)

    busy = tuple(extended(a, b) for a, b in zip(short.busy, long.busy, strict=True))
    return StepTime(extended(short.seconds, long.seconds), extended(short.computed, long.computed), busy)


@dataclass(frozen=True)
class Goodput:
    """The cost of failures.

    Attributes:
        mtbf_hours: Mean time between failures of the whole job.
        stop_s: Seconds for which a save stops training.
        write_s: Seconds until a save is on the disk and verified.
        restart_s: From a failure to the first step, reading included.
        every_s: Seconds between saves.
        every_steps: Steps between saves.
        share: Share of the time that ends up as training.
    """

    mtbf_hours: float
    stop_s: float
    write_s: float
    restart_s: float
    every_s: float
    every_steps: int
    share: float


def goodput(
    cluster: Cluster,
    world: int,
    units: Mapping[str, int],
    own: int,
    step_s: float,
    background: bool,
    parameter_bytes: float,
) -> Goodput:
    """The cost of failures in a run of `world` GPUs.

    Args:
        units: Parameters of the model's units, by name.
        own: Elements that the fullest rank copies to its host for a save.
        background: Saves are written while training continues.
        parameter_bytes: Bytes of a parameter in a checkpoint.
    """
    mtbf_s = cluster.mtbf_hours * 3600 / world
    hosts = math.ceil(world / cluster.gpus_per_node)
    write_s = save_seconds(cluster, hosts, units, parameter_bytes)
    stop_s = parameter_bytes * own / (cluster.to_host_gbps * 1e9) if background else write_s
    twice = 2 * parameter_bytes * sum(units.values())
    read_s = _slower(twice / hosts, cluster.storage_read_gbps, twice, cluster.storage_read_limit_gbps)
    restart_s = cluster.restart_minutes * 60 + read_s
    wanted_s = best_interval(stop_s, mtbf_s)
    steps = max(1, round(wanted_s / step_s), math.ceil(write_s / step_s) if background else 1)
    every_s = steps * step_s
    unwritten_s = write_s if background else 0.0
    lost = stop_s / every_s + (every_s / 2 + unwritten_s + restart_s) / mtbf_s
    return Goodput(mtbf_s / 3600, stop_s, write_s, restart_s, every_s, steps, 1.0 / (1.0 + lost))


def save_seconds(cluster: Cluster, hosts: int, units: Mapping[str, int], parameter_bytes: float) -> float:
    """Seconds until a checkpoint is on the disk and verified; see [Note: seconds of a save]. Arguments as for `goodput`."""
    most = max(shares(units, range(hosts)).values(), key=lambda names: sum(units[name] for name in names))
    nbytes = parameter_bytes * sum(units[name] for name in most)
    total = parameter_bytes * sum(units.values())
    gather_s = nbytes / (cluster.gather_gbps * 1e9)
    write_s = _slower(nbytes, cluster.storage_write_gbps, total, cluster.storage_write_limit_gbps)
    read_s = _slower(nbytes, cluster.storage_read_gbps, total, cluster.storage_read_limit_gbps)
    return gather_s * units[most[0]] / sum(units[name] for name in most) + max(gather_s, write_s) + read_s


def _slower(nbytes: float, gbps: float, total: float, limit_gbps: float | None) -> float:
    """Seconds for one host's bytes, or for all bytes if the file system's limit takes longer."""
    return max(nbytes / (gbps * 1e9), 0.0 if limit_gbps is None else total / (limit_gbps * 1e9))


def best_interval(stop_s: float, mtbf_s: float) -> float:
    """Seconds of training between two saves, by Daly's formula; the MTBF itself if a save takes longer than twice the MTBF."""
    if stop_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = stop_s / (2 * mtbf_s)
    return math.sqrt(2 * stop_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stop_s
