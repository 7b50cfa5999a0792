"""Seconds of a stage's passes over one microbatch by cause, and of a whole step from the schedule's table.

[Note: overlap with compute]
As the engine runs: collectives of tensor and context parallel are not overlapped (`Overheads.tensor_overlap` describes engines
that hide them). FSDP gathers the next layer's parameters under the current layer, so each layer shows only the part that takes
longer than the layer, and the first layer shows all of it. With a pipeline, parameters are gathered once a step, under the first
microbatch, and stay; gradients are summed in place and reduced after the last backward of a stage, beside the actions of other
stages. Without one, parameters are gathered for each forward and each backward, and gradients are reduced under each backward.

[Note: shares of a tensor group]
A layer's work is that of one GPU (timeline.layer_work, fitted on an H200) divided by the tensor ranks; norms and residuals too,
because they are split by tokens. A pass of a layer takes at least its kernel launches, or FSDP's own work in Python.

[Note: where a dimension lies]
Ranks count tensor fastest, then context, shard, replicate, pipeline (engine/mesh/layout.py), and fill nodes one after the other.
A group's members are `stride` ranks apart, so `gpus_per_node / stride` of them share a node. A group inside one node uses the
node's link. A group that spans nodes is a ring that leaves each node through the network ports of its members there: k members
have k ports, and the slower of the node's link and those ports decides.

[Note: the ring]
Gathering or scattering S bytes over n ranks moves S (n - 1) / n through each; an all-reduce does both. Each step of the ring
costs one latency; the steps are one for each member inside a node, then one for each further node.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megatrain.engine.mesh.layout import Layout
from megatrain.engine.mesh.pipeline_schedule import Action, Table, bubble, simulate
from megatrain.engine.mesh.stage import Part
from megatrain.machine.machine import Cluster
from megatrain.planner.cluster.candidate import Candidate, Request
from megatrain.planner.model_cost import LayerCost, Line
from megatrain.planner.timeline import EAGER_TIME, FP32_TIME, HEAD_FRACTION, LAUNCH_S, SHORT_CHUNK_TOKENS, layer_work

STEP_S = 0.03
"""Batch, global norm, one decision, launches of the optimizer."""
SHARDED_LAUNCH_S = 0.0012
"""Least time of one layer call whose parameters FSDP gathers and frees: its hooks run in Python. Derived from one measurement:
Qwen3-0.6B on two H200, 105,000 tokens/s, taken for steps of 16 rows x 1,024 tokens."""
CAUSES = ("compute", "recompute", "tensor", "context", "shard")


@dataclass(frozen=True)
class Pass:
    """Seconds of a stage for one microbatch in one direction, by cause: `CAUSES`."""

    compute: float = 0.0
    recompute: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    shard: float = 0.0

    def __add__(self, other: Pass) -> Pass:
        return Pass(*(getattr(self, cause) + getattr(other, cause) for cause in CAUSES))

    def __mul__(self, times: float) -> Pass:
        return Pass(*(getattr(self, cause) * times for cause in CAUSES))

    @functools.cached_property
    def seconds(self) -> float:
        return sum(getattr(self, cause) for cause in CAUSES)


@dataclass(frozen=True)
class StageTime:
    """Seconds of a stage.

    Attributes:
        forward, backward: Whole passes over one microbatch; recompute belongs to the backward.
        weight: The part of `backward` that a split backward defers.
        first_forward: Added to the first microbatch's forward: the visible part of gathering parameters, once a step.
        gather: Gathering parameters once, hidden or not.
        gathered_at: No action of the stage starts earlier in the step: its parameters are being gathered ahead.
        reduce: Reducing gradients over the data ranks, once a step; only with a pipeline.
    """

    forward: Pass
    backward: Pass
    weight: float = 0.0
    first_forward: float = 0.0
    gather: float = 0.0
    gathered_at: float = 0.0
    reduce: float = 0.0

    def of(self, action: Action) -> float:
        """Seconds of an action."""
        match action.kind:
            case "F":
                return self.forward.seconds + (self.first_forward if action.microbatch == 0 else 0.0)
            case "B":
                return self.backward.seconds
            case "I":
                return self.backward.seconds - self.weight
            case "W":
                return self.weight


@dataclass(frozen=True)
class StepTime:
    """A table played through.

    Attributes:
        seconds: When the last rank is done, reductions included.
        computed: When the last rank has ended its last forward or backward.
        busy: Seconds of each rank's forwards and backwards.
    """

    seconds: float
    computed: float
    busy: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """The share of all ranks' time, up to the last backward, in which they wait."""
        return bubble(self.busy, self.computed)


def play(table: Table, stages: Sequence[StageTime], transfer_s: float = 0.0) -> StepTime:
    """Play a schedule's table; see [Note: assumptions of the simulation] in engine/mesh/pipeline_schedule.py.

    A stage's gradients are reduced after its last backward, beside the actions that follow. `transfer_s`: seconds to send one
    microbatch's hidden states from one rank to another.
    """
    found = simulate(
        table,
        len(stages),
        lambda action: stages[action.stage].of(action),
        transfer_s=transfer_s,
        not_before=lambda stage: stages[stage].gathered_at,
    )
    reduced = [_reduced_at(row, ends, stages) for row, ends in zip(table, found.ends, strict=True)]
    return StepTime(max(reduced), found.span_s, found.busy)


def _reduced_at(row: Sequence[Action], ends: Sequence[float], stages: Sequence[StageTime]) -> float:
    """When a rank's gradients are reduced: each stage's after its last action, one stage after the other."""
    last: dict[int, float] = {}
    for action, end in zip(row, ends, strict=True):
        last.pop(action.stage, None)  # keeps the stages in the order in which they end
        last[action.stage] = end
    reduced = 0.0
    for stage, end in last.items():
        reduced = max(reduced, end) + stages[stage].reduce
    return reduced


def stage_times(request: Request, candidate: Candidate) -> list[StageTime]:
    """Times of all stages; those with equal layers are computed once."""
    made: dict[tuple[bool, bool, tuple[int, ...]], StageTime] = {}
    times = []
    for part in request.inventory.parts(candidate.layout):
        key = part.first, part.last, tuple(sorted(request.inventory.shape.groups[i] for i in part.layers))
        if key not in made:
            made[key] = _stage_time(request, candidate, part)
        times.append(made[key])
    return times


def gathered_ahead(request: Request, candidate: Candidate, times: list[StageTime]) -> list[StageTime]:
    """The same times with parameters gathered from the start of the step on, for engines that do so."""
    layout = candidate.layout
    if not request.overheads.gathers_ahead or layout.pipeline == 1:
        return times
    found = list(times)
    for rank in range(layout.pipeline):
        at = 0.0
        for stage in layout.stages_of(rank):
            at += times[stage].gather
            found[stage] = replace(times[stage], first_forward=0.0, gathered_at=at)
    return found


@dataclass(frozen=True)
class _Groups:
    tensor: Group
    context: Group
    fsdp: Group
    replicate: Group

    def reduce_s(self, elements: int) -> float:
        """Reduce fp32 gradients: scatter them over the fsdp ranks, then sum over the replicas."""
        return self.fsdp.gather_s(4 * elements) + self.replicate.all_reduce_s(4 * elements / self.fsdp.size)


def _stage_time(request: Request, candidate: Candidate, part: Part) -> StageTime:
    """See [Note: overlap with compute]."""
    layout, shape, inventory = candidate.layout, request.inventory.shape, request.inventory
    groups = _Groups(*(group_of(layout, request.cluster, d) for d in ("tensor", "context", "fsdp", "replicate")))
    forward, backward, weight, first, gathers, reduce = Pass(), Pass(), 0.0, 0.0, 0.0, 0.0
    for number, count in Counter(shape.groups[i] for i in part.layers).items():
        f, b, w = _layer(request, candidate, shape.costs[number], groups)
        whole = inventory.layer(number, layout.tensor, 1)
        gather, scatter = groups.fsdp.gather_s(request.compute_bytes * whole), groups.reduce_s(whole)
        if layout.pipeline == 1:
            f += Pass(shard=max(0.0, gather - f.seconds))
            b += Pass(shard=max(0.0, gather + scatter - b.seconds))
        else:
            first += count * max(0.0, gather - f.seconds)
            gathers += count * gather
            reduce += count * scatter
        forward, backward, weight = forward + f * count, backward + b * count, weight + w * count
    edges = inventory.edges(part.first, part.last, layout.tensor, 1)
    if edges:
        gather = groups.fsdp.gather_s(request.compute_bytes * edges)
        first, gathers, reduce = first + gather, gathers + gather, reduce + groups.reduce_s(edges)
    if part.first:
        embedding = groups.tensor.all_reduce_s(request.hidden_bytes(candidate))
        forward += Pass(tensor=(1.0 - request.overheads.tensor_overlap) * embedding)
    if part.last:
        f, b, w = _head(request, candidate, groups)
        forward, backward, weight = forward + f, backward + b, weight + w
    if layout.pipeline == 1:  # the edges stay gathered; their gradients are reduced with every microbatch
        backward += Pass(shard=groups.reduce_s(edges))
        reduce = 0.0
    return StageTime(forward, backward, weight, first, gathers, reduce=reduce)


def _layer(request: Request, candidate: Candidate, cost: LayerCost, groups: _Groups) -> tuple[Pass, Pass, float]:
    """(forward, backward, its weight part) of one layer."""
    layout, tokens, overheads = candidate.layout, candidate.tokens(request.step), request.overheads
    if layout.context > 1:
        flops, factor = cost.attention_flops, overheads.context_attention
        cost = replace(cost, attention_flops=Line(flops.constant * factor, flops.slope * factor))
    work = layer_work(cost, request.step.tokens, tokens, tokens, request.cluster, request.options(layout))
    share = 1.0 / layout.tensor
    # Entry and exit of attention and of the MLP; see engine/mesh/tensor_parallel.py.
    tensor = 4 * groups.tensor.gather_s(request.hidden_bytes(candidate)) * (1.0 - overheads.tensor_overlap)
    context = groups.context.gather_s(request.key_value_bytes(candidate))
    plain = work.plain if candidate.recompute else work.saving
    # with a pipeline, parameters stay gathered
    least = SHARDED_LAUNCH_S if layout.fsdp > 1 and layout.pipeline == 1 else LAUNCH_S
    forward = Pass(max(least, plain * share), 0.0, tensor, context)
    backward = Pass(max(least, work.backward * share), 0.0, tensor, context)
    if candidate.recompute:
        backward += Pass(0.0, max(least, work.saving * share), tensor, context)
    return forward, backward, work.products * share


def _head(request: Request, candidate: Candidate, groups: _Groups) -> tuple[Pass, Pass, float]:
    """(forward, backward, its deferred part) of final norm, logits and loss."""
    layout, tokens = candidate.layout, candidate.tokens(request.step)
    slow = (1.0 if request.compiled(layout) else EAGER_TIME) * (FP32_TIME if request.compute_bytes == 4 else 1.0)
    rate = request.cluster.matrix_tflops * 1e12 * HEAD_FRACTION * tokens / (tokens + SHORT_CHUNK_TOKENS / 4) / slow
    once = 2.0 * request.inventory.shape.head_matrix * tokens / rate / layout.tensor
    tensor = groups.tensor.gather_s(request.hidden_bytes(candidate)) * (1.0 - request.overheads.tensor_overlap)
    # Logits and their gradient are computed together, see engine/mesh/head.py; the backward scatters the hidden states'.
    return Pass(3 * once, 0.0, tensor), Pass(0.0, 0.0, tensor), 0.0


Dimension = Literal["tensor", "context", "fsdp", "replicate", "pipeline"]
DIMENSIONS: tuple[Dimension, ...] = ("tensor", "context", "fsdp", "replicate", "pipeline")


@dataclass(frozen=True)
class Group:
    """The ranks along one dimension.

    Attributes:
        per_node: Ranks that share a node, of `size`.
        gbps: Rate at which one of them sends and receives [GB/s].
        latency_s: Latency of one collective.
        inside: Whether the group lies inside one node.
    """

    size: int
    per_node: int
    gbps: float
    latency_s: float
    inside: bool

    def moved(self, nbytes: float) -> float:
        """Bytes through each rank for one gather or scatter of `nbytes`."""
        return nbytes * (self.size - 1) / self.size

    def gather_s(self, nbytes: float) -> float:
        """Seconds to gather or scatter `nbytes`, all ranks' parts together."""
        return self.moved(nbytes) / (self.gbps * 1e9) + self.latency_s if self.size > 1 else 0.0

    def all_reduce_s(self, nbytes: float) -> float:
        """Seconds to sum `nbytes` of each rank."""
        return 2 * self.gather_s(nbytes)


def group_of(layout: Layout, cluster: Cluster, dimension: Dimension) -> Group:
    """The group along a dimension of a resolved layout; see [Note: where a dimension lies]."""
    _, replicate, shard, context, tensor = layout.sizes
    stride, size = {
        "tensor": (1, tensor),
        "context": (tensor, context),
        "fsdp": (tensor, shard * context),
        "replicate": (tensor * context * shard, replicate),
        "pipeline": (tensor * context * shard * replicate, layout.pipeline),
    }[dimension]
    per_node = min(size, max(1, cluster.gpus_per_node // max(1, stride)))
    nodes = -(-size // per_node)
    inside = nodes == 1
    gbps = cluster.node_gbps if inside else min(cluster.node_gbps, per_node * cluster.network_gbps)
    latency_us = (per_node - 1) * cluster.node_latency_us + (nodes - 1) * cluster.network_latency_us
    return Group(size, per_node, gbps, latency_us * 1e-6, inside)


def send_s(layout: Layout, cluster: Cluster, nbytes: float) -> float:
    """Seconds to send `nbytes` from one pipeline rank to the next."""
    if group_of(layout, cluster, "pipeline").per_node > 1:
        return nbytes / (cluster.node_gbps * 1e9) + cluster.node_latency_us * 1e-6
    return nbytes / (cluster.network_gbps * 1e9) + cluster.network_latency_us * 1e-6


@dataclass(frozen=True)
class Traffic:
    """Bytes that the busiest GPU sends along one dimension in a step, over the `node` link or the `network`."""

    nbytes: float
    link: str
    per_node: int
    size: int


def traffic(request: Request, candidate: Candidate) -> dict[Dimension, Traffic]:
    """Traffic of the busiest GPU in a step, by dimension; see engine/mesh/tensor_parallel.py and context_parallel.py."""
    layout, inventory, count = candidate.layout, request.inventory, candidate.layout.microbatch_count
    hidden = request.hidden_bytes(candidate)
    passes = 3 if candidate.recompute else 2
    ranks = range(layout.pipeline)
    layers = max(sum(len(part.layers) for part in inventory.own_parts(layout, rank)) for rank in ranks)
    whole = max(inventory.rank(layout, rank, fsdp=1) for rank in ranks)
    groups: dict[Dimension, Group] = {name: group_of(layout, request.cluster, name) for name in DIMENSIONS}
    reductions = 1 if layout.pipeline > 1 else count
    gathers = 1 if layout.pipeline > 1 else 2 * count
    sent: dict[Dimension, float] = {
        "tensor": 4 * passes * layers * count * groups["tensor"].moved(hidden),
        "context": passes * layers * count * groups["context"].moved(request.key_value_bytes(candidate)),
        "fsdp": groups["fsdp"].moved((gathers * request.compute_bytes + 4 * reductions) * whole),
        "replicate": reductions * 2 * groups["replicate"].moved(4 * whole / layout.fsdp),
        "pipeline": 2 * layout.virtual * count * hidden / layout.tensor,
    }
    found: dict[Dimension, Traffic] = {}
    for name, group in groups.items():
        if group.size > 1:
            inside = group.per_node > 1 if name == "pipeline" else group.inside
            found[name] = Traffic(sent[name], "node" if inside else "network", group.per_node, group.size)
    return found
