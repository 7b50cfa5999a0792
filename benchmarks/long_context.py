"""Steps of a 7B shape on one very long row: seconds, tokens/s, TFLOP/s and memory, with the plan. Random weights and tokens.

Use: python benchmarks/long_context.py TOKENS [--layers 28] [--steps 1] [--host-gib 118] [--device-gib N]
            [--machine FILE] [--plan-only] [--option NAME=VALUE ...]

The shape is Qwen2.5-7B's: 28 layers, hidden 3584, intermediate 18944, 28 heads of 128 with 4 for keys and values, vocabulary
152,064, head and embedding untied; fp32 master and moments, bf16 compute, gradients clipped. The plan uses the rate of attention
in long rows as measured now. While a step runs, a line every 20 seconds says how much device memory is in use.

FLOPs of a step = 3 x forward; forward = 2 x (elements of all matrices but the embedding) x T + layers x 2 T^2 x heads x head_dim
(causal attention: half of the square, two products). Recompute does not count.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import torch

from megatrain.commands.work import QWEN25_7B, plan_overrides, random_batch
from megatrain.device.attention import measured_backends
from megatrain.engine.host.engine import HostEngine
from megatrain.machine.machine import LONG_ROW, Machine, load_machine
from megatrain.models.build import load_model_config
from megatrain.optim.adamw import AdamW
from megatrain.planner.model_cost import ModelShape, shape_of
from megatrain.planner.plan import Caps, Plan, StepSize
from megatrain.planner.report import plan_text
from megatrain.planner.run import available_caps, caps_for, plan_step
from megatrain.planner.timeline import recomputed_flops
from megatrain.units import GIB

MACHINE = Path(__file__).parents[1] / "docs/machines/h200.yaml"


def say(text: str) -> None:
    print(text, flush=True)


def folder_of(layers: int) -> Path:
    folder = Path(tempfile.mkdtemp()) / "qwen2.5-7b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**QWEN25_7B, "num_hidden_layers": layers}))
    return folder


def with_measured_attention(machine: Machine) -> Machine:
    """The machine with the measured rate of attention in long rows, 28 heads of 128 with 4 for keys and values."""
    if not torch.cuda.is_available():
        return machine
    found = measured_backends(28, 4, 128, LONG_ROW, torch.bfloat16, torch.device("cuda", 0))
    flops = 3.5 * 2 * LONG_ROW**2 * 28 * 128
    rates = {backend.name: flops / ms / 1e9 for backend, ms in found}
    shown = ", ".join(f"{name} {rate:.0f} TFLOP/s" for name, rate in rates.items())
    say(f"attention at 32,768 tokens, forward and backward: {shown}")
    torch.cuda.empty_cache()  # planning reads how much memory is free
    return replace(machine, attention_long_tflops=max(rates.values()))


def planned(shape: ModelShape, machine: Machine, tokens: int, host_gib: float, device_gib: float | None) -> Plan:
    caps = caps_for(machine, host_gib=host_gib, device_gib=device_gib)
    if torch.cuda.is_available():
        free = available_caps(machine)
        caps = Caps(min(caps.host_bytes, free.host_bytes), min(caps.device_bytes, free.device_bytes))
    return plan_step(shape, machine, StepSize(1, tokens), caps)


def report_memory(ended: threading.Event) -> None:
    began = time.perf_counter()
    while not ended.wait(20):
        memory = torch.cuda.memory_allocated() / GIB if torch.cuda.is_available() else 0.0
        say(f"  {time.perf_counter() - began:.0f} s: {memory:.1f} GiB on the device")


def run_steps(engine: HostEngine, shape: ModelShape, made: Plan, tokens: int, steps: int) -> None:
    flops = 3 * shape.forward_flops(tokens) * tokens
    again = recomputed_flops(shape, made.step, made.choice) * tokens
    for step in range(steps):
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        ended = threading.Event()
        reporter = threading.Thread(target=report_memory, args=(ended,), daemon=True)
        reporter.start()
        try:
            result = engine.train_step(random_batch(shape.vocabulary, 1, tokens, step))
        finally:
            ended.set()
            reporter.join()
        seconds = result.seconds["step"]
        split = ", ".join(f"{name} {value:.3f}" for name, value in result.seconds.items())
        moved = ", ".join(f"{name} {size / 1e9:.1f} GB" for name, size in result.moved_bytes.items())
        memory = engine.memory()
        reserved = torch.cuda.max_memory_reserved() / GIB if torch.cuda.is_available() else 0.0
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        say(
            f"step {step}: loss {result.loss:.4f} norm {result.grad_norm:.3f} skipped {result.skipped} [{split}] {moved}\n"
            f"  {seconds:.2f} s (plan {made.seconds:.2f}), {tokens / seconds:,.0f} tokens/s, "
            f"{flops / seconds / 1e12:.0f} TFLOP/s ({flops:.3e} FLOPs, and {again:.2e} of recompute)\n"
            f"  peak HBM {memory['device_peak'] / GIB:.2f} GiB (plan {made.device_bytes / GIB:.2f}; reserved {reserved:.2f}), "
            f"RSS {rss:.1f} GiB (plan {made.host_bytes / GIB:.1f}), pinned {memory['host_pinned'] / GIB:.1f} GiB, "
            f"offloaded inputs {memory['host_inputs'] / GIB:.1f} GiB"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens", type=int)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--device-gib", type=float, default=None, help="limit of the plan (default: the machine's)")
    parser.add_argument("--host-gib", type=float, default=118.0, help="limit of the plan, with room for its errors")
    parser.add_argument("--machine", default=str(MACHINE))
    parser.add_argument("--plan-only", action="store_true")
    parser.add_argument("--option", action="append", default=[], help="field of ExecutionPlan instead of the plan's")
    given = parser.parse_args()
    folder = folder_of(given.layers)
    shape = shape_of(load_model_config(folder), name="qwen2.5-7b")
    machine = with_measured_attention(load_machine(given.machine))
    made = planned(shape, machine, given.tokens, given.host_gib, given.device_gib)
    say(plan_text(made))
    if given.plan_only:
        return
    followed = replace(made.execution, **plan_overrides(given.option))
    began = time.perf_counter()
    optim = AdamW(learning_rate=1e-5, max_grad_norm=1.0)
    with HostEngine(folder, followed, init="random", verify="never", optim=optim) as engine:
        parameters = engine.structure.param_count / 1e9
        say(f"engine made in {time.perf_counter() - began:.1f} s, {parameters:.2f} B parameters")
        run_steps(engine, shape, made, given.tokens, given.steps)


if __name__ == "__main__":
    main()
