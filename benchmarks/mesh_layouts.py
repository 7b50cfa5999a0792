"""Layouts of the mesh engine on the same batches, one after the other in the same processes, and the host engine's losses.

    torchrun --nproc-per-node 2 benchmarks/mesh_layouts.py --out FOLDER fsdp2 tp2 pp2-1f1b
    python benchmarks/mesh_layouts.py --out FOLDER host         # losses of one process
    python benchmarks/mesh_layouts.py --out FOLDER --table      # what FOLDER/rows.jsonl holds

A row that has begun is never started again: after a crash or a hang (which ends the processes, with all stacks) the same command
continues with the next row. Weights of `--shape` are random, the same in every layout and both engines. Each GPU has `--rows`
rows of `--tokens` tokens; the host engine runs all rows of two GPUs. MFU is model FLOPs (causal attention, no recompute) per
second over `--peak-tflops` per GPU.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from megatrain.engine.host.engine import HostEngine
from megatrain.engine.mesh import launch
from megatrain.engine.mesh.engine import MeshEngine
from megatrain.engine.mesh.layout import Layout, MeshPlan
from megatrain.engine.mesh.rank_metrics import Overlap, kernels_of, overlap_of
from megatrain.engine.plan import ExecutionPlan
from megatrain.optim.adamw import AdamW

SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "tiny": {
        "vocab_size": 509,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
}
# Microbatches of a step's 8 rows of 4,096 tokens on 2 GPUs: the 8B model keeps its activations, 0.85 GB per layer and 4,096
# tokens in eager layers, less in compiled ones.
ROWS: dict[str, tuple[Layout, Literal["on", "off"]]] = {
    "fsdp2": (Layout(shard=2, microbatches=4), "off"),
    "fsdp2-compiled": (Layout(shard=2, microbatches=2), "on"),
    "tp2": (Layout(tensor=2, shard=1, microbatches=4), "on"),
    "pp2-1f1b": (Layout(pipeline=2, shard=1, microbatches=8), "on"),
    "cp2": (Layout(context=2, shard=1, microbatches=4), "off"),
    "pp2-zbv": (Layout(pipeline=2, virtual=2, shard=1, schedule="zbv", microbatches=8), "off"),
}
"""Name -> (layout, whether layers are compiled). Nothing is recomputed."""
OPTIM = AdamW(learning_rate=2e-5, max_grad_norm=1.0)
LEFT_OVER_BYTES = 4 << 30
"""If a row leaves more than this on the device, the next one gets fresh processes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *ROWS, "host"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds of a row")
    parser.add_argument("--peak-tflops", type=float, default=800.0, help="the H200's measured bf16 matrix products")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    if given.table:
        print_table(given.out)
    else:
        given.out.mkdir(parents=True, exist_ok=True)
        for name in given.names:
            if not Rows(given.out).begun(name):
                one_row(name, given)


def one_row(name: str, given: argparse.Namespace) -> None:
    """Run a row within its time limit; else the process ends with the stacks of all threads."""
    rows = Rows(given.out)
    if launch.world_size() > 1:
        launch.join(launch.device_of_rank("auto"))
        dist.barrier()  # all ranks have checked whether the row has begun
    rows.add({"row": name, "state": "begun"})
    faulthandler.dump_traceback_later(given.limit, exit=True)
    try:
        if name == "host":
            found = host_row(given)
        else:
            found = mesh_row(name, given)
    except BaseException as error:
        say(f"{name} FAILED on rank {launch.rank()}: {type(error).__name__}: {str(error)[:600]}", everybody=True)
        rows.add({"row": name, "state": "failed", "why": f"{type(error).__name__}: {str(error)[:200]}"}, everybody=True)
        raise
    faulthandler.cancel_dump_traceback_later()
    rows.add({"row": name, "state": "done", **found})
    end_if_much_is_left(name)


def mesh_row(name: str, given: argparse.Namespace) -> dict[str, Any]:
    layout, compiled = ROWS[name]
    started = time.perf_counter()
    device = launch.device_of_rank("auto")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    plan = MeshPlan(layout, compile=compiled, compute_dtype="bf16")
    with MeshEngine(config_folder(given), plan, optim=OPTIM, init="random", seed=0) as engine:
        start_s = time.perf_counter() - started
        say(f"{name}: engine made in {start_s:.1f} s")
        losses, norms, seconds = [], [], []
        for number, batch in enumerate(batches(given, launch.world_size())):
            began = time.perf_counter()
            result = engine.train_step(batch)
            synchronize(device)
            seconds.append(time.perf_counter() - began)
            losses.append(result.loss)
            norms.append(result.grad_norm)
            say(f"{name}: step {number + 1} loss {result.loss:.5f} norm {result.grad_norm:.4f} {seconds[-1]:.3f} s")
        found = engine.step_over_ranks()
        assert found is not None
        peaks = gathered(engine.memory()["device_peak"] / 2**30)
        timing = timing_of(engine.config, engine.structure.param_count, seconds, given, launch.world_size())
        report = {"losses": losses, "norms": norms, "start_s": start_s, "peak_gib": peaks, **timing}
        report |= {"bubble": found.bubble, "bubble_simulated": found.bubble_simulated, "imbalance": found.imbalance}
        with kernels_of(device) as kernels:
            engine.train_step(next(batches(given, launch.world_size())))
        report["shares"] = gathered(as_shares(overlap_of(kernels)))
        return report


def host_row(given: argparse.Namespace) -> dict[str, Any]:
    """One GPU, all rows. Two thirds of the layers are resident, which is quicker to set up than pinned host memory."""
    started = time.perf_counter()
    device = launch.device_of_rank("auto")
    layers = SHAPES[given.shape]["num_hidden_layers"]
    resident = [f"layer.{i}" for i in range(2 * layers // 3)] if device.type == "cuda" else []
    plan = ExecutionPlan(placement=dict.fromkeys(resident, "device"), compute_dtype="bf16", compile="off")
    folder = config_folder(given)
    with HostEngine(folder, plan, optim=OPTIM, device=device, init="random", verify="never") as engine:
        start_s = time.perf_counter() - started
        say(f"host: engine made in {start_s:.1f} s")
        losses, norms, seconds = [], [], []
        for number, batch in enumerate(batches(given, 2)):
            began = time.perf_counter()
            result = engine.train_step(batch)
            seconds.append(time.perf_counter() - began)
            losses.append(result.loss)
            norms.append(result.grad_norm)
            say(f"host: step {number + 1} loss {result.loss:.5f} norm {result.grad_norm:.4f} {seconds[-1]:.3f} s")
            Rows(given.out).add({"row": "host", "state": "running", "losses": losses})
        timing = timing_of(engine.config, engine.structure.param_count, seconds, given, 1)
        peak = engine.memory()["device_peak"] / 2**30
        return {"losses": losses, "norms": norms, "start_s": start_s, "peak_gib": [peak], **timing}


def batches(given: argparse.Namespace, gpus: int) -> Iterator[dict[str, torch.Tensor]]:
    """The steps' batches, of a few frequent tokens, so that there is something to learn in ten steps."""
    generator = torch.Generator().manual_seed(0)
    frequent = min(4096, SHAPES[given.shape]["vocab_size"])
    for _ in range(given.steps):
        ids = torch.randint(0, frequent, (gpus * given.rows, given.tokens), generator=generator)
        yield {"input_ids": ids, "labels": ids.clone()}


def config_folder(given: argparse.Namespace) -> Path:
    folder = given.out / f"{given.shape}-{os.getpid()}"
    folder.mkdir(exist_ok=True)
    fixed = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "tie_word_embeddings": False,
        "max_position_embeddings": 1 << 20,
    }
    (folder / "config.json").write_text(json.dumps({**SHAPES[given.shape], **fixed}))
    return folder


def timing_of(
    config: Any, parameters: int, seconds: list[float], given: argparse.Namespace, gpus: int
) -> dict[str, Any]:
    """Median without the first three steps, which choose kernels and make communicators; of all steps if there are few."""
    step_s = statistics.median(seconds[3:] or seconds)
    tokens = (2 if gpus == 1 else gpus) * given.rows * given.tokens
    attention = 6 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * given.tokens
    tflops = (6 * parameters + attention) * tokens / step_s / 1e12 / gpus
    return {
        "step_s": step_s,
        "tokens_per_s": tokens / step_s,
        "tflops_per_gpu": tflops,
        "mfu": tflops / given.peak_tflops,
    }


def as_shares(found: Overlap) -> dict[str, float] | None:
    """Overlap of the span; None on a CPU, which has no kernels."""
    if found.span_s == 0.0:
        return None
    parts = {"compute": found.compute_s, "collectives": found.collectives_s, "messages": found.messages_s}
    return {name: seconds / found.span_s for name, seconds in (*parts.items(), ("idle", found.idle_s))}


def gathered(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def end_if_much_is_left(name: str) -> None:
    """Exit if a row's memory has not been freed: the caller then starts fresh processes for the next row."""
    gc.collect()
    if not torch.cuda.is_available() or not dist.is_initialized():
        return
    torch.cuda.empty_cache()
    left = max(gathered(torch.cuda.memory_allocated()))
    if left > LEFT_OVER_BYTES:
        say(f"{name}: {left / 2**30:.1f} GiB are left behind; the next row gets fresh processes")
        sys.exit(0)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def say(text: str, everybody: bool = False) -> None:
    if everybody or launch.rank() == 0:
        print(text, flush=True)


class Rows:
    """`rows.jsonl`: the rows that have begun, failed and ended."""

    def __init__(self, folder: Path):
        self.path = folder / "rows.jsonl"

    def all(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []

    def begun(self, name: str) -> bool:
        return any(row["row"] == name for row in self.all())

    def add(self, row: dict[str, Any], everybody: bool = False) -> None:
        if everybody or launch.rank() == 0:
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")


def print_table(folder: Path) -> None:
    """A short table for the end of a log."""
    newest: dict[str, dict[str, Any]] = {}
    for row in Rows(folder).all():
        if row["state"] == "failed" or newest.get(row["row"], {}).get("state") != "failed":
            newest[row["row"]] = row
    want = newest.get("host", {}).get("losses")
    print(
        f"{'row':16} step_s   tok/s    MFU  bubble  (sim)  coll. mess. idle  peak GiB     loss 1 -> last    rel. diff. to host"
    )
    for name, row in newest.items():
        if row["state"] != "done":
            print(f"{name:16} {row['state']}: {row.get('why', 'no end: killed by its time limit or with another row')}")
            continue
        losses = row["losses"]
        difference = "n/a"
        if want and name != "host":
            pairs = list(zip(losses, want, strict=False))
            difference = f"{max(abs(a - b) / abs(b) for a, b in pairs):.1e} over {len(pairs)} steps"
        bubble = f"{row['bubble']:.3f} ({row['bubble_simulated']:.3f})" if row.get("bubble") is not None else "-"
        found = [each for each in row.get("shares", []) if each]
        mean = (
            [sum(each[k] for each in found) / len(found) for k in ("collectives", "messages", "idle")] if found else []
        )
        parts = " ".join(f"{value:5.3f}" for value in mean) or "-"
        peaks = " ".join(f"{peak:.1f}" for peak in row["peak_gib"])
        print(
            f"{name:16} {row['step_s']:6.3f}  {row['tokens_per_s']:6.0f}  {row['mfu']:.3f}  {bubble:13}  {parts:17} "
            f"{peaks:12} {losses[0]:.4f} -> {losses[-1]:.4f}  {difference}"
        )
    if want:
        print("losses of host:  " + " ".join(f"{loss:.4f}" for loss in want))
    for name, row in newest.items():
        if name != "host" and row["state"] == "done":
            print(f"losses of {name}: " + " ".join(f"{loss:.4f}" for loss in row["losses"]))


if __name__ == "__main__":
    main()
