"""One way to run a job, judged: seconds by cause, memory of the heaviest rank, traffic, bottleneck.

[Note: many microbatches]
A schedule's table settles into rounds. Beyond `MOST_PLAYED` rounds of microbatches the clock plays a few rounds less
and less again, and the difference is added for the rest: the same seconds within a thousandth, for a fraction of the work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatrain.engine.mesh.layout import Layout
from megatrain.engine.mesh.pipeline_schedule import Table, action_table
from megatrain.planner.cluster.clock import Played, StageSeconds, play
from megatrain.planner.cluster.failures import Goodput, goodput
from megatrain.planner.cluster.job import Job, Way
from megatrain.planner.cluster.memory import DEVICE_FRACTION, RankMemory, heaviest_rank
from megatrain.planner.cluster.seconds import (
    CAUSES,
    STEP_S,
    Pass,
    StageCost,
    for_clock,
    hidden_bytes_sent,
    optimizer_seconds,
    stage_cost,
)
from megatrain.planner.cluster.traffic import DIMENSIONS, Dimension, Group, group, send_seconds

MOST_PLAYED = 5
"""Rounds of `pipeline` microbatches."""


@dataclass(frozen=True)
class Flow:
    """What one GPU sends along one dimension in a step.

    Attributes:
        nbytes: Sent by the GPU that sends most.
        link: `node` or `network`.
        per_node: Members of the group in one node, of `size`.
    """

    nbytes: float
    link: str
    per_node: int
    size: int


@dataclass(frozen=True)
class Verdict:
    """A judged way.

    Attributes:
        seconds: Of a step, by cause, of the rank that computes longest: those of `CAUSES`, `bubble` (waiting for other stages),
            `optimizer`. They add up to `step_s`.
        idle: The bubble of the schedule's table, as a share of all ranks' time.
        memory: Of the heaviest pipeline rank.
        flows: By dimension.
        mfu: Model FLOPs over what the data sheet promises.
        goodput: What failures cost.
    """

    way: Way
    seconds: Mapping[str, float]
    idle: float
    memory: RankMemory
    flows: Mapping[Dimension, Flow]
    tokens_per_s: float
    mfu: float
    goodput: Goodput

    @property
    def step_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def useful_tokens_per_s(self) -> float:
        """With failures."""
        return self.tokens_per_s * self.goodput.share

    @property
    def bottleneck(self) -> str:
        """What, beside the products themselves, takes most of the step; the products where nothing takes an eighth."""
        name, seconds = max(
            ((n, s) for n, s in self.seconds.items() if n != "compute"), key=lambda pair: pair[1], default=("", 0.0)
        )
        if seconds < self.step_s / 8:
            return "matrix products"
        return describe(name, self.flows)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        layout = self.way.layout
        sizes = ("tensor", "pipeline", "virtual", "context", "replicate", "shard", "schedule")
        return {
            "parallel": {**{n: getattr(layout, n) for n in sizes}, "microbatches": layout.microbatch_count},
            "recompute": self.way.recompute,
            "step_seconds": self.step_s,
            "seconds": dict(self.seconds),
            "bubble": self.idle,
            "tokens_per_second": self.tokens_per_s,
            "mfu": self.mfu,
            "bottleneck": self.bottleneck,
            "memory_bytes": dict(self.memory.lines),
            "heaviest_pipeline_rank": self.memory.pipeline_rank,
            "traffic": {
                name: {"bytes_per_gpu": flow.nbytes, "link": flow.link, "ranks": flow.size, "ranks_per_node": flow.per_node}
                for name, flow in self.flows.items()
            },
            "goodput": {
                "share": self.goodput.share,
                "mtbf_hours": self.goodput.mtbf_hours,
                "save_stops_seconds": self.goodput.stop_s,
                "save_written_seconds": self.goodput.write_s,
                "restart_seconds": self.goodput.restart_s,
                "save_every_steps": self.goodput.every_steps,
            },
        }  # fmt: skip


def describe(cause: str, flows: Mapping[Dimension, Flow]) -> str:
    """A cause of lost time for people."""
    where = {"node": "inside nodes", "network": "over the network"}
    if cause in ("tensor", "context"):
        flow = flows.get(cause)
        return f"{cause}-parallel collectives {where[flow.link] if flow else ''}".rstrip()
    if cause == "shard":
        flow = flows.get("fsdp")
        return f"gathering parameters and reducing gradients {where[flow.link] if flow else ''}".rstrip()
    return {
        "bubble": "the pipeline's bubble",
        "recompute": "recomputing activations",
        "optimizer": "the optimizer",
    }[cause]


def allowed_bytes(job: Job) -> int:
    return int(job.cluster.device_bytes * DEVICE_FRACTION)


def stage_costs(job: Job, way: Way) -> list[StageCost]:
    """Of all stages; those of equal layers once."""
    made: dict[Any, StageCost] = {}
    costs = []
    for part in job.inventory.parts(way.layout):
        groups = tuple(sorted(job.inventory.shape.groups[i] for i in part.layers))
        key = (part.first, part.last, groups)
        if key not in made:
            made[key] = stage_cost(job, way, part)
        costs.append(made[key])
    return costs


def estimate(job: Job, way: Way) -> float:
    """Seconds of a step without playing the table: the longest rank's work, and the textbook's bubble."""
    layout, costs = way.layout, stage_costs(job, way)
    longest = max(
        sum(costs[s].forward.seconds + costs[s].backward.seconds for s in layout.stages_of(rank))
        for rank in range(layout.pipeline)
    )
    rounds = layout.microbatch_count + (layout.pipeline - 1) / (
        layout.virtual * (3 if layout.kind.splits_backward else 1)
    )
    once = max(c.first_forward + c.reduce for c in costs)
    return longest * rounds + once


def judge(job: Job, way: Way, memory: RankMemory | None = None) -> Verdict:
    """Play a way through.

    Args:
        memory: Of its heaviest rank, if known.
    """
    layout = way.layout
    costs, parts = stage_costs(job, way), job.inventory.parts(layout)
    clocked = for_clock(job, way, costs)
    played = _play(layout, clocked, send_seconds(layout, job.cluster, hidden_bytes_sent(job, way)))
    longest = max(range(layout.pipeline), key=lambda rank: played.busy[rank])
    work = Pass()
    for stage in layout.stages_of(longest):
        work += (costs[stage].forward + costs[stage].backward) * layout.microbatch_count
        work += Pass(shard=clocked[stage].first_forward)
    own = max(
        sum(job.inventory.stage(parts[s], layout.tensor, layout.fsdp) for s in layout.stages_of(rank))
        for rank in range(layout.pipeline)
    )
    seconds = {cause: getattr(work, cause) for cause in CAUSES}
    seconds["bubble"] = max(0.0, played.computed - work.seconds)
    seconds["shard"] += played.seconds - played.computed
    seconds["optimizer"] = optimizer_seconds(job, own) + STEP_S
    step_s = sum(seconds.values())
    tokens = job.step.all_tokens
    flops = 3.0 * job.inventory.shape.forward_flops(job.step.tokens) * tokens
    return Verdict(
        way=way,
        seconds={name: s for name, s in seconds.items() if s > 0},
        idle=played.idle if layout.pipeline > 1 else 0.0,
        memory=memory or heaviest_rank(job, way),
        flows=flows(job, way),
        tokens_per_s=tokens / step_s,
        mfu=flops / (step_s * job.world * job.cluster.peak_tflops * 1e12),
        goodput=goodput(job.cluster, job.world, job.inventory.units, own, step_s, job.background),
    )


def _table(layout: Layout, microbatches: int) -> Table:
    return action_table(layout.schedule, layout.pipeline, layout.virtual, microbatches)


def _play(layout: Layout, stages: list[StageSeconds], transfer_s: float) -> Played:
    """See [Note: many microbatches]."""
    pipeline, pieces = layout.pipeline, layout.microbatch_count
    rounds = pieces // pipeline
    if pieces <= MOST_PLAYED * pipeline:
        return play(_table(layout, pieces), stages, transfer_s)
    rest = pieces % pipeline if not layout.kind.rounds else 0
    few, more = ((MOST_PLAYED - n) * pipeline + rest for n in (2, 0))
    short = play(_table(layout, few), stages, transfer_s)
    long = play(_table(layout, more), stages, transfer_s)
    times = (rounds * pipeline + rest - more) / (more - few)
    busy = tuple(b + times * (b - a) for a, b in zip(short.busy, long.busy, strict=True))
    seconds, computed = (
        getattr(long, name) + times * (getattr(long, name) - getattr(short, name)) for name in ("seconds", "computed")
    )
    return Played(seconds, computed, busy)


def flows(job: Job, way: Way) -> dict[Dimension, Flow]:
    """Bytes that the busiest GPU sends in a step, by dimension; see
    engine/mesh/tensor_parallel.py and context_parallel.py."""
    layout, inventory = way.layout, job.inventory
    parts, pieces = inventory.parts(layout), layout.microbatch_count
    hidden = hidden_bytes_sent(job, way) * layout.tensor
    passes = 3 if way.recompute else 2
    layers = max(sum(len(parts[s].layers) for s in layout.stages_of(r)) for r in range(layout.pipeline))
    whole = max(
        sum(inventory.stage(parts[s], layout.tensor, 1) for s in layout.stages_of(r)) for r in range(layout.pipeline)
    )
    groups: dict[Dimension, Group] = {name: group(layout, job.cluster, name) for name in DIMENSIONS}
    times = 1 if layout.pipeline > 1 else pieces
    keys_values = 2 * inventory.kv_width * way.tokens(job.step) * layout.context * job.compute_bytes / layout.tensor
    gathers = (1 if layout.pipeline > 1 else 2 * pieces) * job.compute_bytes
    sent: dict[Dimension, float] = {
        "tensor": 4 * passes * layers * pieces * groups["tensor"].moved(hidden),
        "context": passes * layers * pieces * groups["context"].moved(keys_values),
        "fsdp": groups["fsdp"].moved((gathers + 4 * times) * whole),
        "replicate": times * 2 * groups["replicate"].moved(4 * whole / layout.fsdp),
        "pipeline": 2 * layout.virtual * pieces * hidden / layout.tensor,
    }
    found: dict[Dimension, Flow] = {}
    for name, ring in groups.items():
        if ring.size > 1:
            link = "node" if (ring.per_node > 1 if name == "pipeline" else ring.inside) else "network"
            found[name] = Flow(sent[name], link, ring.per_node, ring.size)
    return found
