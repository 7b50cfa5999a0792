"""Bytes of a pipeline rank on its GPU, line by line: as the engine holds them.

[Note: activations]
A layer that is recomputed holds its input. Any other holds what its eager backward reads: 1.7 times what a compiled
one would save (planner/memory.py), split over the tensor ranks, but for the two gathered inputs of its column-wise
products, which torch keeps whole. With context parallel there are gathered keys and values, and the mask in the
compute type. How many microbatches are in flight is counted from the schedule's table. torch's stages own a receive
buffer for each microbatch, forward and backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatrain.engine.mesh import memory as mesh
from megatrain.engine.mesh.layout import Layout
from megatrain.engine.mesh.pipeline_schedule import Action, action_table, peak_in_flight
from megatrain.engine.mesh.stage import HEAD_CHUNK_TOKENS, Part
from megatrain.planner.cluster.job import Job, Way
from megatrain.planner.memory import BACKWARD_FACTOR, EAGER_FACTOR
from megatrain.units import GIB

PROCESS_BYTES = 3 * GIB
"""CUDA context, NCCL's buffers, workspaces of kernels."""
LOGIT_BYTES = 16
"""Of a logit at the loss's worst moment: bf16 and fp32 values, probabilities, and both gradients."""
DEVICE_FRACTION = 0.95
"""Of a GPU's memory; the rest is for the allocator's gaps."""


@dataclass(frozen=True)
class RankMemory:
    """The memory of one pipeline rank."""

    pipeline_rank: int
    lines: Mapping[str, float]

    @property
    def nbytes(self) -> int:
        return int(sum(self.lines.values()))


def heaviest_rank(job: Job, way: Way) -> RankMemory:
    """The pipeline rank that needs most. See [Note: what a rank holds] in engine/mesh/memory.py, and [Note: activations]."""
    layout, parts = way.layout, job.inventory.parts(way.layout)
    table = action_table(layout.schedule, layout.pipeline, layout.virtual, _enough(layout))
    saved = [saved_by_layer(job, way, group) for group in range(len(job.inventory.groups))]
    ranks = (
        RankMemory(
            rank, {**state_lines(job, way, parts, rank), **_activation_lines(job, way, parts, rank, actions, saved)}
        )
        for rank, actions in enumerate(table)
    )
    worst = max(ranks, key=lambda memory: memory.nbytes)
    return RankMemory(worst.pipeline_rank, {name: int(size) for name, size in worst.lines.items() if size >= 1})


def state_bytes(job: Job, way: Way) -> float:
    """What the heaviest pipeline rank needs at least: its state without any activation. Needs no table."""
    parts = job.inventory.parts(way.layout)
    return max(sum(state_lines(job, way, parts, rank).values()) for rank in range(way.layout.pipeline))


def _enough(layout: Layout) -> int:
    """So many microbatches that no more of them are ever in flight."""
    return min(layout.microbatch_count, max(2 * layout.pipeline, layout.min_microbatches))


def state_lines(job: Job, way: Way, parts: Sequence[Part], rank: int) -> dict[str, float]:
    """What is there whatever the batch: parameters, gradients, moments, and the process."""
    layout, inventory = way.layout, job.inventory
    own = [parts[stage] for stage in layout.stages_of(rank)]
    sharded = sum(inventory.stage(part, layout.tensor, layout.fsdp) for part in own)
    whole = sum(inventory.stage(part, layout.tensor, 1) for part in own)
    largest = max(inventory.layer(g, layout.tensor, 1) for g in range(len(inventory.groups)))
    edges = sum(inventory.edges(part.first, part.last, layout.tensor, 1) for part in own)
    lines = mesh.state_lines(
        layout.pipeline > 1, mesh.Held(whole, sharded, edges, largest), job.compute_bytes, job.optim
    )
    lines["process, NCCL"] = PROCESS_BYTES
    return lines


def _activation_lines(
    job: Job, way: Way, parts: Sequence[Part], rank: int, actions: Sequence[Action], saved: Sequence[float]
) -> dict[str, float]:
    """What comes with the batch. See [Note: activations].

    Args:
        parts: Of all stages.
        actions: The rank's row of the schedule's table.
        saved: By template group, what a layer saves of a microbatch.
    """
    layout, shape = way.layout, job.inventory.shape
    own = [parts[stage] for stage in layout.stages_of(rank)]
    tokens = way.tokens(job.step)
    sent = tokens * shape.hidden * job.compute_bytes / layout.tensor
    left = [0.0] * layout.stages  # by a microbatch's forward
    for part in own:
        kept = sent * len(part.layers) if way.recompute else sum(saved[shape.groups[i]] for i in part.layers)
        left[part.index] = kept
    lines = {"activations of microbatches in flight": peak_in_flight(actions, left)}
    backward = BACKWARD_FACTOR * max(saved[shape.groups[i]] for part in own for i in part.layers)
    if not way.recompute:  # its own share is among those in flight
        backward *= 1.0 - 1.0 / BACKWARD_FACTOR
    lines["one layer's backward"] = backward + 2 * sent
    if any(part.last for part in own):
        lines["logits"] = LOGIT_BYTES * _logits_at_once(job, way)
    if layout.pipeline > 1:
        ends = sum((not part.first) + (not part.last) for part in own)
        lines["receive buffers of the pipeline"] = ends * layout.microbatch_count * sent
    lines["tokens and labels of a step"] = 2 * 8 * 2 * tokens * layout.microbatch_count
    return lines


def saved_by_layer(job: Job, way: Way, group: int) -> float:
    """Bytes that a layer saves for its backward, of one microbatch on one rank. See [Note: activations]."""
    layout, shape, tokens = way.layout, job.inventory.shape, way.tokens(job.step)
    eager = 1.0 if job.compiled(layout) else EAGER_FACTOR
    width = shape.hidden * job.compute_bytes
    saved = shape.costs[group].saved_bytes.at(job.step.tokens) * job.compute_bytes / 2 * eager * tokens
    gathered = 2 * width * tokens * (1.0 - 1.0 / layout.tensor)
    total = saved / layout.tensor + gathered
    if layout.context > 1:
        row_tokens = tokens * layout.context // way.rows(job.step)
        total += 2 * job.inventory.kv_width * tokens * layout.context * job.compute_bytes / layout.tensor
        if job.practice.context_attention > 1.0:
            total += tokens * row_tokens * job.compute_bytes
    return total


def _logits_at_once(job: Job, way: Way) -> float:
    layout, tokens = way.layout, way.tokens(job.step)
    if layout.tensor == 1:
        tokens = min(tokens, HEAD_CHUNK_TOKENS)
    return tokens * job.inventory.shape.vocabulary / layout.tensor
