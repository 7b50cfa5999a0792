"""What a rank holds whatever the batch is: parameters, gradients, moments. Pure; said before anything is allocated.

[Note: what a rank holds]
Masters, both moments and reduced gradients in fp32, sharded over the fsdp ranks: 16 bytes an element. With a pipeline, parameters
stay gathered in the compute type from the first forward to the last backward, and gradients of all microbatches are summed
unreduced in fp32. These sums give way to the reduced gradients unit by unit, so that at the worst moment, before the first is
reduced, masters and moments alone are sharded. Without a pipeline, the edges (embedding, final norm, head) stay gathered, and
beside them at most three layers: the one in work, the next, and the one just left.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.engine.mesh.layout import Layout
from megatrain.engine.mesh.stage import plan_parts
from megatrain.models.structure import Structure
from megatrain.optim.spec import OptimizerSpec
from megatrain.units import GIB


@dataclass(frozen=True)
class Held:
    """Elements of a rank, after tensor parallel.

    Attributes:
        whole: Before FSDP shards them.
        sharded: Afterwards.
        edges: Of the embedding, the final norm and the head that it holds, before FSDP.
        largest: Of the largest layer, before FSDP.
    """

    whole: float
    sharded: float
    edges: float
    largest: float


def state_lines(pipeline: bool, held: Held, compute_bytes: int, optim: OptimizerSpec) -> dict[str, float]:
    """Bytes by purpose; see [Note: what a rank holds].

    Args:
        pipeline: Whether there are pipeline ranks.
        compute_bytes: Of an element in forward and backward.
        optim: The optimizer.
    """
    state_bytes = optim.bytes_per_parameter
    lines: dict[str, float] = {}
    if pipeline:
        lines[f"masters, moments ({state_bytes} bytes, sharded)"] = state_bytes * held.sharded
        lines["gathered weights"] = compute_bytes * held.whole
        lines["gradient sums of gathered weights (fp32)"] = 4 * held.whole
        lines["gradients being reduced"] = (compute_bytes + 4) * held.largest
    else:
        lines[f"masters, moments, gradients ({state_bytes + 4} bytes, sharded)"] = (state_bytes + 4) * held.sharded
        lines["gathered weights"] = compute_bytes * (held.edges + 3 * held.largest)
        lines["gradients being reduced"] = (compute_bytes + 4) * (held.edges + 2 * held.largest)
    return lines


def least_held(structure: Structure, layout: Layout) -> list[Held]:
    """Of each pipeline rank, as if tensor parallel and FSDP divided everything evenly: never more than the truth."""
    sizes = [unit.layout.param_count for unit in structure.layers]
    parts = plan_parts(structure, layout)
    found = []
    for rank in range(layout.pipeline):
        own = [parts[stage] for stage in layout.stages_of(rank)]
        edges = sum(
            structure.embedding.layout.param_count * part.first + structure.head.layout.param_count * part.last
            for part in own
        )
        whole = (edges + sum(sizes[i] for part in own for i in part.layers)) / layout.tensor
        largest = max(sizes[i] for part in own for i in part.layers) / layout.tensor
        found.append(Held(whole, whole / layout.fsdp, edges / layout.tensor, largest))
    return found


def memory_problem(
    structure: Structure, layout: Layout, device_bytes: int, compute_bytes: int, optim: OptimizerSpec
) -> str | None:
    """Why a layout cannot fit devices of a size, activations not even counted, and what would; None if its state fits.

    Args:
        layout: Resolved.
        device_bytes: Of one GPU.
        optim: The optimizer.
    """
    held = least_held(structure, layout)
    ledgers = [state_lines(layout.pipeline > 1, each, compute_bytes, optim) for each in held]
    rank = max(range(layout.pipeline), key=lambda r: sum(ledgers[r].values()))
    needed = sum(ledgers[rank].values())
    if needed <= device_bytes:
        return None
    lines = ", ".join(f"{name} {size / GIB:.1f}" for name, size in ledgers[rank].items())
    sharded = next(size for name, size in ledgers[rank].items() if "sharded" in name)
    fixed = needed - sharded
    if fixed < device_bytes:
        times = -(-sharded // (device_bytes - fixed))
        fits = f"shard {int(layout.fsdp * times // layout.context)} or more would fit the state"
    else:
        fits = "more tensor or pipeline ranks are needed: what is gathered does not fit however much is sharded"
    return (
        f"pipeline rank {rank} needs {needed / GIB:.1f} GiB before any activation, a GPU has {device_bytes / GIB:.1f}: "
        f"{lines} GiB; {fits}"
    )
