"""The host engine on all ranks of torchrun: seconds of a step, memory, and the losses, beside those of one GPU.

    torchrun --nproc-per-node 2 benchmarks/host_ranks.py --out FOLDER --shape qwen3-8b
    python benchmarks/host_ranks.py --out FOLDER --shape qwen3-8b          # one GPU
    python benchmarks/host_ranks.py --out FOLDER --table

Each run appends a line to FOLDER/ranks.jsonl. Rows are packed (two documents each), weights random and equal in all runs, AdamW
with fp32 masters and moments, clip 1.0; the plan is the planner's. `--host-gib` and `--device-gib` limit memory, `--trace FILE`
writes the spans of rank 0's last step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatrain.commands.work import folder_of, structure_of
from megatrain.engine.batches import BatchShape
from megatrain.engine.host.engine import HostEngine
from megatrain.engine.mesh import launch
from megatrain.engine.parity_check import token_wise
from megatrain.engine.plan import ExecutionPlan
from megatrain.host_memory.available import available_host_bytes
from megatrain.machine.probe import probe
from megatrain.optim.adamw import AdamW
from megatrain.planner.model_cost import shape_of_structure
from megatrain.planner.plan import Options, StepSize
from megatrain.planner.report import plan_text
from megatrain.planner.run import caps_for, plan_step
from megatrain.units import GIB

FILE = "ranks.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--host-gib", type=float)
    parser.add_argument("--device-gib", type=float)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.table:
        table(given.out / FILE)
        return
    device = launch.device_of_rank(given.device)
    launch.join(device)
    row = run(given, device)
    if dist.get_rank() == 0:
        with (given.out / FILE).open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(text_of(row), flush=True)
    dist.destroy_process_group()


def run(given: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    world, rank = dist.get_world_size(), dist.get_rank()
    with tempfile.TemporaryDirectory() as scratch:
        folder = folder_of(given.shape, Path(scratch))
        structure = structure_of(folder, torch.bfloat16)
        config: Any = structure.model.config
        plan, text, predicted_s = planned(given, structure, device, world) if rank == 0 else (None, "", None)
        said = [plan, predicted_s]
        dist.broadcast_object_list(said, src=0)
        if text:
            print(text, flush=True)
        shape = BatchShape(given.rows, (given.tokens,), packed=True)
        started = time.perf_counter()
        engine = HostEngine(
            folder,
            replace(said[0], train_shape=shape),
            device=device,
            optim=AdamW(learning_rate=1e-5, max_grad_norm=1.0),
            verify="never",
            init="random",
            group=dist.group.WORLD if world > 1 else None,
        )
        start_s = time.perf_counter() - started
        losses, seconds, waits = [], [], []
        for step in range(given.warmup + given.steps):
            if given.trace is not None and step == given.warmup + given.steps - 1:
                engine.begin_trace()
            began = time.perf_counter()
            result = engine.train_step(packed(config.vocab_size, given.rows, given.tokens, step))
            took = time.perf_counter() - began
            losses.append(result.loss)
            if step >= given.warmup:
                seconds.append(took)
                waits.append(result.pipeline.waited_s if result.pipeline else {})
        spans = engine.end_trace() if given.trace is not None else []
        if given.trace is not None:
            given.trace.with_suffix(f".{rank}.json").write_text(json.dumps([asdict(span) for span in spans]))
        memory = [None] * world
        dist.all_gather_object(memory, engine.memory())
        engine.close()
    step_s = statistics.median(seconds)
    return {
        "shape": given.shape,
        "gpus": world,
        "rows": given.rows,
        "tokens": given.tokens,
        "step_s": step_s,
        "predicted_s": said[1],
        "tokens_per_s": given.rows * given.tokens / step_s,
        "start_s": start_s,
        "waits": waits[-1] if waits else {},
        "losses": losses,
        "host_gib": sum(v for m in memory for k, v in (m or {}).items() if k.startswith("host_") and "pinned" not in k)
        / GIB,
        "device_peak_gib": max((m or {}).get("device_peak", 0) for m in memory) / GIB,
        "placement": sum(place == "device" for place in said[0].placement.values())
        if not isinstance(said[0].placement, str)
        else said[0].placement,
    }


def planned(
    given: argparse.Namespace, structure: Any, device: torch.device, world: int
) -> tuple[ExecutionPlan, str, float | None]:
    """(plan, its text, predicted seconds of a step); on a CPU the default plan."""
    if device.type == "cpu":
        return ExecutionPlan(), "", None
    machine = probe("cuda")
    model = shape_of_structure(structure, given.shape, token_wise(structure.model.config))
    free_gib = available_host_bytes() / GIB
    caps = caps_for(
        machine, host_gib=min(free_gib, given.host_gib or free_gib) - 8, device_gib=given.device_gib
    )  # 8 GiB as memory.host_reserve_gib does
    made = plan_step(model, machine, StepSize(given.rows, given.tokens), caps, Options(ranks=world))
    return replace(made.execution, device_gib=given.device_gib), plan_text(made), made.seconds


def packed(vocabulary: int, rows: int, tokens: int, step: int) -> dict[str, torch.Tensor]:
    """Rows of two documents of random tokens from a small part of the vocabulary, so that the loss falls."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, min(vocabulary, 1000), (rows, tokens), generator=generator)
    documents = (torch.arange(tokens) >= tokens // 3).long().expand(rows, tokens).contiguous()
    return {"input_ids": ids, "labels": ids.clone(), "document_ids": documents}


def text_of(row: dict[str, Any]) -> str:
    predicted = "" if row["predicted_s"] is None else f" ({row['predicted_s']:.3f} predicted)"
    return (
        f"{row['shape']}: {row['gpus']} GPUs, {row['rows']} x {row['tokens']}: {row['step_s']:.3f} s{predicted}, "
        f"{row['tokens_per_s']:,.0f} tokens/s; host {row['host_gib']:.1f} GiB in all, device peak "
        f"{row['device_peak_gib']:.1f} GiB, resident {row['placement']}; first losses "
        + " ".join(f"{loss:.5f}" for loss in row["losses"][:4])
    )


def table(file: Path) -> None:
    """All rows, and of each the largest difference of a loss from that of one GPU."""
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    one = {(row["shape"], row["rows"], row["tokens"]): row for row in rows if row["gpus"] == 1}
    for row in rows:
        print(text_of(row))
        alone = one.get((row["shape"], row["rows"], row["tokens"]))
        if alone is not None and alone is not row:
            pairs = list(zip(row["losses"], alone["losses"], strict=False))
            worst = max(abs(a - b) / abs(b) for a, b in pairs)
            print(
                f"    {row['tokens_per_s'] / alone['tokens_per_s']:.2f} x one GPU, "
                f"host memory {row['host_gib'] / alone['host_gib']:.2f} x, losses differ by {worst:.1e} at most"
            )


if __name__ == "__main__":
    main()
