"""Bytes by formula: what a run needs of host memory, device memory and disk, and what the machine has.

Pure functions of a model's shape and the config; nothing is allocated. The ledger holds what is sure to be needed: a run
that does not fit is refused before it allocates anything, with the entries and the ways down.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Literal

from megatrain.config.schema import RunConfig
from megatrain.errors import PlanRefused, UserError
from megatrain.host_memory.available import available_host_bytes
from megatrain.optim.adamw import AdamW
from megatrain.units import DTYPE_BYTES, GIB, DtypeName, counted, gib, size_lines

STATE_BYTES = AdamW().bytes_per_parameter


@dataclass(frozen=True)
class ModelShape:
    """Sizes that decide memory, in elements."""

    params: int  # distinct parameters; tied ones count once
    largest_layer: int
    edges: int  # embedding and head together
    layers: int
    hidden_size: int


@dataclass(frozen=True)
class Ledger:
    """Bytes by purpose."""

    host: Mapping[str, int]
    device: Mapping[str, int]  # empty on the CPU, where the same buffers are entries of `host`

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())


def memory_ledger(
    shape: ModelShape, run: RunConfig, *, device: Literal["cpu", "cuda"], compute_dtype: DtypeName
) -> Ledger:
    """What the run needs of host and device memory at least.

    Args:
        device: The device that computes.
        compute_dtype: The resolved format of forward and backward.
    """
    compute_bytes, grad_bytes = DTYPE_BYTES[compute_dtype], DTYPE_BYTES[_transport(run, compute_dtype)]
    largest_unit = max(shape.largest_layer, shape.edges)
    host = {f"master weights and moments, {STATE_BYTES} bytes a parameter": STATE_BYTES * shape.params}
    if run.memory.gradient_plane:  # sums over windows are kept in fp32
        plane_bytes = 4 if run.batch.accumulation_steps > 1 else grad_bytes
        host[f"gradients, {plane_bytes} bytes a parameter"] = plane_bytes * shape.params
    staged = device == "cuda" and run.memory.pin == "staged"
    if staged:
        host["staging buffers"] = 2 * largest_unit * (2 if compute_dtype == "bf16" else 4)
    if staged or run.batch.accumulation_steps > 1 or not run.memory.gradient_plane:
        slabs = min(run.memory.gradient_slabs, shape.layers)
        host[f"{counted(slabs, 'gradient slab')}"] = (slabs * shape.largest_layer + shape.edges) * grad_bytes

    rows = ceil(run.rows_per_step / run.batch.accumulation_steps)
    segment = run.activations.segment or 1
    kept_inputs = ceil(shape.layers / segment) + segment - 1
    row_bytes = run.data.max_tokens * shape.hidden_size * compute_bytes
    microbatch_rows = min(run.batch.microbatch_rows or 1, rows)
    buffers = {
        f"{run.memory.weight_slots} weight slots": run.memory.weight_slots * shape.largest_layer * compute_bytes,
        "weights of embedding and head": shape.edges * compute_bytes,
        "gradients of embedding, head and one layer": (shape.largest_layer + shape.edges) * grad_bytes,
        f"layer inputs of {counted(rows, 'row')}": rows * row_bytes * kept_inputs,
        # about thirty tensors of (tokens, hidden) live in the backward of one decoder layer
        f"one layer's activations for {counted(microbatch_rows, 'row')}": 30 * microbatch_rows * row_bytes,
    }
    if device == "cpu":
        return Ledger({**host, **buffers}, {})
    return Ledger(host, buffers)


def _transport(run: RunConfig, compute_dtype: DtypeName) -> Literal["bf16", "fp32"]:
    if run.precision.grad_transport != "auto":
        return run.precision.grad_transport
    return "fp32" if compute_dtype == "fp32" else "bf16"


def checkpoint_bytes(shape: ModelShape) -> int:
    """Bytes of one checkpoint: bf16 weights that transformers loads, lo and the optimizer's states."""
    return STATE_BYTES * shape.params


def checkpoints_at_once(run: RunConfig, total_steps: int) -> int:
    """How many checkpoints are on disk at the worst moment: an old one goes only when the new one is complete."""
    every = run.checkpoint.every_steps
    made = (total_steps // every if every else 0) + (
        1 if run.checkpoint.at_end and not (every and total_steps % every == 0) else 0
    )
    return made if run.checkpoint.keep is None else min(made, run.checkpoint.keep + 1)


def refuse_if_too_large(ledger: Ledger, *, host_available: int, device_available: int | None, run: RunConfig) -> None:
    """Compare with what the machine has.

    Raises:
        PlanRefused: It does not fit; the message is the ledger with the ways down.
    """
    parts: list[str] = []
    if ledger.host_bytes > host_available:
        ways = ["a machine with more memory", "a smaller model"]
        if run.memory.gradient_plane:
            ways.insert(0, "memory.gradient_plane: false (it needs optim.max_grad_norm: null and one window)")
        if not ledger.device and run.batch.accumulation_steps == 1:
            ways.insert(0, "batch.accumulation_steps: 2 or more keeps fewer layer inputs")
        parts.append(_refusal("host", ledger.host, host_available, run.memory.host_gib, ways))
    if device_available is not None and ledger.device_bytes > device_available:
        ways = [
            "batch.accumulation_steps: 2 or more keeps fewer layer inputs",
            "activations.segment: 4 keeps every 4th",
            "batch.microbatch_rows: 1",
            "shorter rows (data.max_tokens)",
        ]
        parts.append(_refusal("device", ledger.device, device_available, run.memory.device_gib, ways))
    if parts:
        raise PlanRefused("\n".join(parts))


def _refusal(place: str, entries: Mapping[str, int], available: int, cap: float | str, ways: list[str]) -> str:
    lines = [f"not enough {place} memory: {gib(sum(entries.values()))} needed, {gib(available)} available"]
    if cap != "auto":
        lines[0] += f" (memory.{place}_gib: {cap:g})"
    lines += size_lines(entries, smallest_bytes=0)
    lines.append(f"  -> {'; or '.join(ways)}")
    return "\n".join(lines)


def refuse_if_disk_too_small(run: RunConfig, one_bytes: int, count: int) -> None:
    """Compare the checkpoints with the free space where the run's folder is, or will be.

    Raises:
        UserError: There is not enough space.
    """
    from megatrain.checkpoint.writer import SLACK_BYTES  # here, because it brings transformers

    place = nearest_existing(Path(run.run.dir))
    free = shutil.disk_usage(place).free
    if count and count * one_bytes + SLACK_BYTES > free:  # each save asks for so much more, for its small files
        raise UserError(
            f"not enough space for {counted(count, 'checkpoint')} of {gib(one_bytes)} ({STATE_BYTES} bytes a parameter); "
            f"{gib(free)} free, of which {gib(SLACK_BYTES)} must stay",
            str(place),
            "free some space, set run.dir to another disk, or keep fewer (checkpoint.keep, checkpoint.every_steps)",
        )


def nearest_existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def host_available_bytes(cap_gib: float | Literal["auto"] = "auto") -> int:
    """Host memory that this process can still take: the least of free memory, container limits and the user's cap.

    Args:
        cap_gib: `memory.host_gib`.
    """
    available = available_host_bytes()
    return available if cap_gib == "auto" else min(available, int(cap_gib * GIB))
