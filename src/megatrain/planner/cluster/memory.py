"""GPU memory of a rank by purpose: the planner's estimate with activations, and the lower bound that `check` refuses by.

[Note: state of a rank]
Masters, the optimizer's states and reduced gradients in fp32, sharded over the fsdp ranks: 16 bytes an element with AdamW. With
a pipeline, parameters stay gathered in the compute dtype from the first forward to the last backward, and gradients of all
microbatches are summed unreduced in fp32. These sums give way to the reduced gradients unit by unit, so at the worst moment,
before the first reduction, only masters and moments are sharded. Without a pipeline, the edges (embedding, final norm, head)
stay gathered, and beside them at most three layers: the current one, the next, and the one just left.

[Note: activations]
A recomputed layer holds its input. Any other holds what its eager backward reads: 1.7 times what a compiled one would save
(planner/memory.py), split over the tensor ranks, except for the two gathered inputs of its column-wise products, which torch
keeps whole. Context parallel adds gathered keys and values, and the mask in the compute dtype. The number of microbatches in
flight comes from the schedule's table. torch's stages own a receive buffer for each microbatch, forward and backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatrain.engine.mesh.head import HEAD_CHUNK_TOKENS
from megatrain.engine.mesh.layout import Layout
from megatrain.engine.mesh.pipeline_schedule import Action, action_table, peak_in_flight
from megatrain.engine.mesh.stage import plan_parts
from megatrain.models.structure import Structure
from megatrain.optim.spec import OptimizerSpec
from megatrain.planner.cluster.candidate import Candidate, Request
from megatrain.planner.memory import BACKWARD_FACTOR, EAGER_FACTOR
from megatrain.units import GIB

PROCESS_BYTES = 3 * GIB
"""CUDA context, NCCL's buffers, kernel workspaces."""
DEVICE_FRACTION = 0.95
"""Usable share of a GPU's memory; the rest is lost to fragmentation."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one pipeline rank, by purpose."""

    pipeline_rank: int
    lines: Mapping[str, float]

    @property
    def nbytes(self) -> int:
        return int(sum(self.lines.values()))


@dataclass(frozen=True)
class Elements:
    """Elements of a rank, after tensor parallel.

    Attributes:
        whole: Before FSDP shards them.
        sharded: After it.
        edges: Embedding, final norm and head on this rank, before FSDP.
        largest: The largest layer, before FSDP.
    """

    whole: float
    sharded: float
    edges: float
    largest: float


def state_lines(pipeline: bool, held: Elements, compute_bytes: int, optim: OptimizerSpec) -> dict[str, float]:
    """Bytes of parameters, gradients and optimizer states by purpose; see [Note: state of a rank].

    `compute_bytes`: of an element in forward and backward. `pipeline`: whether there are pipeline ranks.
    """
    state_bytes = optim.bytes_per_parameter
    if pipeline:
        return {
            f"masters, moments ({state_bytes} bytes, sharded)": state_bytes * held.sharded,
            "gathered weights": compute_bytes * held.whole,
            "gradient sums of gathered weights (fp32)": 4 * held.whole,
            "gradients being reduced": (compute_bytes + 4) * held.largest,
        }
    return {
        f"masters, moments, gradients ({state_bytes + 4} bytes, sharded)": (state_bytes + 4) * held.sharded,
        "gathered weights": compute_bytes * (held.edges + 3 * held.largest),
        "gradients being reduced": (compute_bytes + 4) * (held.edges + 2 * held.largest),
    }


def least_elements(structure: Structure, layout: Layout) -> list[Elements]:
    """Elements of each pipeline rank if tensor parallel and FSDP divided everything evenly: a lower bound."""
    sizes = [unit.layout.param_count for unit in structure.layers]
    embedding, head = structure.embedding.layout.param_count, structure.head.layout.param_count
    parts = plan_parts(structure, layout)
    found = []
    for rank in range(layout.pipeline):
        own = [parts[stage] for stage in layout.stages_of(rank)]
        layers = [sizes[i] for part in own for i in part.layers]
        edges = sum(embedding * part.first + head * part.last for part in own)
        whole = (edges + sum(layers)) / layout.tensor
        found.append(Elements(whole, whole / layout.fsdp, edges / layout.tensor, max(layers) / layout.tensor))
    return found


def memory_problem(
    structure: Structure, layout: Layout, device_bytes: int, compute_bytes: int, optim: OptimizerSpec
) -> str | None:
    """Why the state of a resolved layout cannot fit, activations not even counted, and what would; None if it fits.

    `device_bytes`: memory of one GPU; `compute_bytes`: of an element in forward and backward.
    """
    ranks = [state_lines(layout.pipeline > 1, held, compute_bytes, optim) for held in least_elements(structure, layout)]
    rank = max(range(layout.pipeline), key=lambda r: sum(ranks[r].values()))
    needed = sum(ranks[rank].values())
    if needed <= device_bytes:
        return None
    lines = ", ".join(f"{name} {size / GIB:.1f}" for name, size in ranks[rank].items())
    sharded = next(size for name, size in ranks[rank].items() if "sharded" in name)
    fixed = needed - sharded
    if fixed < device_bytes:
        times = -(-sharded // (device_bytes - fixed))
        fits = f"shard {int(layout.fsdp * times // layout.context)} or more would fit the state"
    else:
        fits = (
            "use more tensor or pipeline ranks: the gathered parameters do not fit, however many ranks share the rest"
        )
    return (
        f"pipeline rank {rank} needs {needed / GIB:.1f} GiB before any activation, a GPU has {device_bytes / GIB:.1f}: "
        f"{lines} GiB; {fits}"
    )


def state_bytes(request: Request, candidate: Candidate) -> float:
    """Bytes of the heaviest pipeline rank without any activation: a lower bound that needs no table."""
    ranks = range(candidate.layout.pipeline)
    return max(sum(_held_lines(request, candidate, rank).values()) for rank in ranks)


def heaviest_rank(request: Request, candidate: Candidate) -> RankMemory:
    """Memory of the pipeline rank that needs the most. See [Note: state of a rank] and [Note: activations]."""
    layout = candidate.layout
    # With this many microbatches, as many are in flight as ever are.
    count = min(layout.microbatch_count, max(2 * layout.pipeline, layout.min_microbatches))
    table = action_table(layout.schedule, layout.pipeline, layout.virtual, count)
    saved = [saved_by_layer(request, candidate, group) for group in range(len(request.inventory.groups))]
    ranks = []
    for rank, actions in enumerate(table):
        activations = _activation_lines(request, candidate, rank, actions, saved)
        ranks.append(RankMemory(rank, {**_held_lines(request, candidate, rank), **activations}))
    worst = max(ranks, key=lambda memory: memory.nbytes)
    return RankMemory(worst.pipeline_rank, {name: int(size) for name, size in worst.lines.items() if size >= 1})


def _held_lines(request: Request, candidate: Candidate, rank: int) -> dict[str, float]:
    """Bytes that do not depend on the batch: parameters, gradients, optimizer states, and the process."""
    layout, inventory = candidate.layout, request.inventory
    own = inventory.own_parts(layout, rank)
    held = Elements(
        whole=inventory.rank(layout, rank, fsdp=1),
        sharded=inventory.rank(layout, rank, layout.fsdp),
        edges=sum(inventory.edges(part.first, part.last, layout.tensor, 1) for part in own),
        largest=max(inventory.layer(g, layout.tensor, 1) for g in range(len(inventory.groups))),
    )
    lines = state_lines(layout.pipeline > 1, held, request.compute_bytes, request.optim)
    return {**lines, "process, NCCL": PROCESS_BYTES}


def _activation_lines(
    request: Request, candidate: Candidate, rank: int, actions: Sequence[Action], saved: Sequence[float]
) -> dict[str, float]:
    """Bytes that depend on the batch. See [Note: activations].

    `actions`: the rank's row of the schedule's table; `saved`: bytes a layer saves of a microbatch, by template group.
    """
    layout, shape = candidate.layout, request.inventory.shape
    own = request.inventory.own_parts(layout, rank)
    tokens = candidate.tokens(request.step)
    sent = request.hidden_bytes(candidate) / layout.tensor
    held = [0.0] * layout.stages  # by one microbatch between its forward and its backward
    for part in own:
        kept = sent * len(part.layers) if candidate.recompute else sum(saved[shape.groups[i]] for i in part.layers)
        held[part.index] = kept
    lines = {"activations of microbatches in flight": peak_in_flight(actions, held)}
    backward = BACKWARD_FACTOR * max(saved[shape.groups[i]] for part in own for i in part.layers)
    if not candidate.recompute:  # its own share is among those in flight
        backward *= 1.0 - 1.0 / BACKWARD_FACTOR
    lines["one layer's backward"] = backward + 2 * sent
    if any(part.last for part in own):
        # See [Note: forward and backward of a chunk] in engine/mesh/head.py.
        logits = min(tokens, HEAD_CHUNK_TOKENS) * shape.vocabulary / layout.tensor
        lines["logits"] = (request.compute_bytes + 4) * logits
        lines["gradient of the head"] = (request.compute_bytes + 4) * shape.head_matrix / layout.tensor
    if layout.pipeline > 1:
        ends = sum((not part.first) + (not part.last) for part in own)
        lines["receive buffers of the pipeline"] = ends * layout.microbatch_count * sent
    lines["tokens and labels of a step"] = 2 * 8 * 2 * tokens * layout.microbatch_count
    return lines


def saved_by_layer(request: Request, candidate: Candidate, group: int) -> float:
    """Bytes that a layer saves for its backward, of one microbatch on one rank. See [Note: activations]."""
    layout, shape, tokens = candidate.layout, request.inventory.shape, candidate.tokens(request.step)
    eager = 1.0 if request.compiled(layout) else EAGER_FACTOR
    saved = shape.costs[group].saved_bytes.at(request.step.tokens) * request.compute_bytes / 2 * eager * tokens
    gathered = 2 * (shape.hidden * request.compute_bytes) * tokens * (1.0 - 1.0 / layout.tensor)
    total = saved / layout.tensor + gathered
    if layout.context > 1:
        total += request.key_value_bytes(candidate)
        if request.overheads.context_attention > 1.0:
            row_tokens = tokens * layout.context // candidate.rows(request.step)
            total += tokens * row_tokens * request.compute_bytes
    return total
