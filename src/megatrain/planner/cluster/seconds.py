"""Seconds of a stage's passes over one microbatch, by cause.

[Note: what is hidden]
As the engine runs: collectives of tensor and context parallel are in the open (`Practice.tensor_overlap` says
otherwise for engines that hide them). FSDP gathers the next layer's parameters under the current layer, so of each
layer only what is longer than the layer shows, and the first layer's. With a pipeline, parameters are gathered once a
step, under the first microbatch, and stay; gradients are summed where they are and reduced behind the last backward
of a stage, beside what other stages still do. Without one, parameters are gathered for each forward and each
backward, and gradients reduced under each backward.

[Note: shares of a tensor group]
A layer's work is that of one GPU (timeline.layer_work, fitted on an H200) divided by the tensor ranks; norms and
residuals too, for they are split by tokens. A pass of a layer takes at least its launches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatrain.engine.mesh.stage import Part
from megatrain.planner.cluster.clock import StageSeconds
from megatrain.planner.cluster.job import Job, Way
from megatrain.planner.cluster.traffic import Group, group
from megatrain.planner.model_cost import LayerCost, Line
from megatrain.planner.timeline import (
    EAGER_TIME,
    FP32_TIME,
    HEAD_FRACTION,
    LAUNCH_S,
    SHORT_CHUNK_TOKENS,
    layer_work,
)

STEP_S = 0.03
"""Batch, global norm, one decision, launches of the optimizer."""
CAUSES = ("compute", "recompute", "tensor", "context", "shard")


@dataclass(frozen=True)
class Pass:
    """Seconds of a stage for one microbatch, one way, by cause: those of `CAUSES`."""

    compute: float = 0.0
    recompute: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    shard: float = 0.0

    def __add__(self, other: Pass) -> Pass:
        return Pass(*(getattr(self, cause) + getattr(other, cause) for cause in CAUSES))

    def __mul__(self, times: float) -> Pass:
        return Pass(*(getattr(self, cause) * times for cause in CAUSES))

    @property
    def seconds(self) -> float:
        return sum(getattr(self, cause) for cause in CAUSES)


@dataclass(frozen=True)
class StageCost:
    """A stage.

    Attributes:
        forward, backward: For one microbatch.
        weight: Part of the backward that a split backward does later.
        first_forward: Of gathering parameters, once a step, what shows.
        gather: The whole of it.
        reduce: Of gradients, once a step; with a pipeline.
    """

    forward: Pass
    backward: Pass
    weight: float
    first_forward: float
    gather: float
    reduce: float


@dataclass(frozen=True)
class _Groups:
    tensor: Group
    context: Group
    fsdp: Group
    replicate: Group


def stage_cost(job: Job, way: Way, part: Part) -> StageCost:
    """Seconds of a stage; see [Note: what is hidden]."""
    layout, shape = way.layout, job.inventory.shape
    groups = _Groups(*(group(layout, job.cluster, d) for d in ("tensor", "context", "fsdp", "replicate")))
    forward, backward, weight, first, gathers, reduce = Pass(), Pass(), 0.0, 0.0, 0.0, 0.0
    for number, count in Counter(shape.groups[i] for i in part.layers).items():
        f, b, w = _layer(job, way, shape.costs[number], groups)
        whole = job.inventory.layer(number, layout.tensor, 1)
        gather, scatter = _gather(job, groups, whole), _reduce(groups, whole)
        if layout.pipeline == 1:
            f += Pass(shard=max(0.0, gather - f.seconds))
            b += Pass(shard=max(0.0, gather + scatter - b.seconds))
        else:
            first += count * max(0.0, gather - f.seconds)
            gathers += count * gather
            reduce += count * scatter
        forward, backward, weight = forward + f * count, backward + b * count, weight + w * count
    edges = job.inventory.edges(part.first, part.last, layout.tensor, 1)
    if edges:
        first += _gather(job, groups, edges)
        gathers += _gather(job, groups, edges)
        reduce += _reduce(groups, edges)
    if part.first:
        embedding = (1.0 - job.practice.tensor_overlap) * groups.tensor.all_reduce(_hidden_bytes(job, way))
        forward += Pass(tensor=embedding)
    if part.last:
        f, b, w = _head(job, way, groups)
        forward, backward, weight = forward + f, backward + b, weight + w
    if layout.pipeline == 1:  # the edges stay gathered, their gradients are reduced with every microbatch
        backward += Pass(shard=_reduce(groups, edges))
        reduce = 0.0
    return StageCost(forward, backward, weight, first, gathers, reduce)


def for_clock(job: Job, way: Way, costs: Sequence[StageCost]) -> list[StageSeconds]:
    """What the clock needs of all stages."""
    found = [
        StageSeconds(c.forward.seconds, c.backward.seconds, c.weight, c.first_forward, 0.0, c.reduce) for c in costs
    ]
    if job.practice.gathers_ahead and way.layout.pipeline > 1:
        for rank in range(way.layout.pipeline):
            at = 0.0
            for stage in way.layout.stages_of(rank):
                at += costs[stage].gather
                found[stage] = replace(found[stage], first_forward=0.0, gathered_at=at)
    return found


def _layer(job: Job, way: Way, cost: LayerCost, groups: _Groups) -> tuple[Pass, Pass, float]:
    """(forward, backward, of which weights) of one layer."""
    layout, tokens, row = way.layout, way.tokens(job.step), job.step.tokens
    if layout.context > 1:
        cost = replace(cost, attention_flops=_times(cost.attention_flops, job.practice.context_attention))
    work = layer_work(cost, row, tokens, tokens, job.cluster, job.options(layout))
    share = 1.0 / layout.tensor
    # entry and exit of attention and of the MLP; see engine/mesh/tensor_parallel.py
    tensor = 4 * groups.tensor.gather(_hidden_bytes(job, way)) * (1.0 - job.practice.tensor_overlap)
    keys_values = 2 * job.inventory.kv_width * tokens * layout.context * job.compute_bytes / layout.tensor
    context = groups.context.gather(keys_values)
    forward = Pass(max(LAUNCH_S, (work.plain if way.recompute else work.saving) * share), 0.0, tensor, context)
    backward = Pass(max(LAUNCH_S, work.backward * share), 0.0, tensor, context)
    if way.recompute:
        backward += Pass(0.0, max(LAUNCH_S, work.saving * share), tensor, context)
    return forward, backward, work.products * share


def _head(job: Job, way: Way, groups: _Groups) -> tuple[Pass, Pass, float]:
    """(forward, backward, of which weights) of final norm, logits and loss."""
    layout, tokens = way.layout, way.tokens(job.step)
    slow = (1.0 if job.compiled(layout) else EAGER_TIME) * (FP32_TIME if job.compute_bytes == 4 else 1.0)
    rate = job.cluster.matrix_tflops * 1e12 * HEAD_FRACTION * tokens / (tokens + SHORT_CHUNK_TOKENS / 4) / slow
    once = 2.0 * job.inventory.shape.head_matrix * tokens / rate / layout.tensor
    tensor = groups.tensor.gather(_hidden_bytes(job, way)) * (1.0 - job.practice.tensor_overlap)
    backward = Pass(2 * once, once if layout.tensor == 1 else 0.0, tensor)  # by chunks, each computed twice
    return Pass(once, 0.0, tensor), backward, once


def optimizer_seconds(job: Job, elements: int) -> float:
    """The update of a rank's own elements, and their norm."""
    return job.optim.update_bytes(4) * elements / (job.cluster.device_bandwidth_gbps * 1e9)


def hidden_bytes_sent(job: Job, way: Way) -> float:
    """Of one microbatch from one stage to the next: a tensor rank sends its tokens."""
    return _hidden_bytes(job, way) / way.layout.tensor


def _hidden_bytes(job: Job, way: Way) -> float:
    return way.tokens(job.step) * job.inventory.shape.hidden * job.compute_bytes


def _gather(job: Job, groups: _Groups, elements: int) -> float:
    return groups.fsdp.gather(job.compute_bytes * elements)


def _reduce(groups: _Groups, elements: int) -> float:
    """fp32 gradients: scattered over the fsdp ranks, then added up over the replicas."""
    return groups.fsdp.gather(4 * elements) + groups.replicate.all_reduce(4 * elements / groups.fsdp.size)


def _times(line: Line, factor: float) -> Line:
    return Line(line.constant * factor, line.slope * factor)
