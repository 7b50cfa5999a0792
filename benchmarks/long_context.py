"""One step of a 7B shape on one very long row: seconds, tokens/s, TFLOP/s, peaks, beside the plan. Random weights and tokens.

Use: python benchmarks/long_context.py TOKENS [--layers 28] [--steps 1] [--host-gib 118] [--device-gib N]
            [--attention cudnn|flash] [--machine FILE] [--plan-only] [--skip-layer] [--option NAME=VALUE ...]

The shape is Qwen2.5-7B's: 28 layers, hidden 3584, intermediate 18944, 28 heads of 128 with 4 for keys and values, vocabulary
152,064, head and embedding apart; fp32 master and moments, bf16 compute, gradients clipped.
What is known is printed as soon as it is known: the plan; then one layer alone (its code is compiled here, outside of any step);
then each step, with a line every 20 seconds while it runs.

FLOPs of a step = 3 x forward; forward = 2 x (elements of all matrices but the embedding) x T + layers x 2 T^2 x heads x head_dim
(causal attention: half of the square, two products). What is computed again does not count.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import resource
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend
from torch.utils import _pytree as pytree

from megatrain.commands.bench import QWEN25_7B, plan_overrides
from megatrain.device.attention import fastest_attention, measured_backends
from megatrain.engine.host.engine import HostEngine
from megatrain.machine.machine import LONG_ROW, Machine, load_machine
from megatrain.models.build import load_model_config
from megatrain.models.templates import Variant
from megatrain.optim.adamw import AdamW
from megatrain.planner.choice import Caps, Options, Policy, StepSize
from megatrain.planner.memory import working_bytes
from megatrain.planner.model_cost import ModelShape, layer_arguments, shape_of
from megatrain.planner.plan import Plan, caps_for, plan
from megatrain.planner.report import plan_text
from megatrain.planner.run import available_caps
from megatrain.planner.timeline import recomputed_flops
from megatrain.units import GIB

MACHINE = Path(__file__).parents[1] / "docs/machines/h200.yaml"
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def say(text: str) -> None:
    print(text, flush=True)


def folder_of(layers: int) -> Path:
    folder = Path(tempfile.mkdtemp()) / "qwen2.5-7b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**QWEN25_7B, "num_hidden_layers": layers}))
    return folder


def with_measured_attention(machine: Machine, forced: str | None) -> Machine:
    """The machine with attention's rate in long rows as measured now, 28 heads of 128 with 4 for keys and values."""
    if not torch.cuda.is_available():
        return machine
    found = measured_backends(28, 4, 128, LONG_ROW, torch.bfloat16, torch.device("cuda", 0))
    flops = 3.5 * 2 * LONG_ROW**2 * 28 * 128
    rates = {backend: flops / ms / 1e9 for backend, ms in found}
    say(
        "attention at 32,768 tokens, forward and backward: "
        + ", ".join(f"{b.name} {r:.0f} TFLOP/s" for b, r in rates.items())
    )
    torch.cuda.empty_cache()  # the plan asks how much is free
    rate = rates.get(BACKENDS[forced]) if forced else max(rates.values())
    return replace(machine, attention_long_tflops=rate)


def planned(shape: ModelShape, machine: Machine, tokens: int, host_gib: float, device_gib: float | None) -> Plan:
    caps = caps_for(machine, host_gib=host_gib, device_gib=device_gib)
    if torch.cuda.is_available():
        free = available_caps(machine)
        caps = Caps(min(caps.host_bytes, free.host_bytes), min(caps.device_bytes, free.device_bytes))
    return plan(shape, machine, StepSize(1, tokens), caps, Options())


def clock_a_layer(engine: HostEngine, shape: ModelShape, made: Plan, tokens: int) -> None:
    """Compile and time the first layer's code alone, in each variant that the plan uses, and say what a step comes to."""
    device, runner = engine.device, engine._flows.runner
    unit = engine.structure.layers[0]
    flat = (torch.randn(unit.layout.numel, device=device) * 0.02).bfloat16()
    weights = {name: view.requires_grad_() for name, view in unit.layout.views(flat).items()}
    buffers = {name: buffer.to(device) for name, buffer in engine.buffers.items()}
    args, kwargs = layer_arguments(
        engine.structure, torch.zeros((1, tokens), dtype=torch.int64, device=device), buffers
    )
    leaves, spec = pytree.tree_flatten((args, kwargs))
    at = next(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.ndim == 3)
    hidden_BTD = leaves[at] = torch.randn(1, tokens, shape.hidden, device=device, dtype=torch.bfloat16).requires_grad_()
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    gradient_BTD = torch.randn_like(hidden_BTD).detach()

    def forward(variant: Variant, bound: dict[str, torch.Tensor] = weights) -> torch.Tensor:
        out = runner.shell.call_layer(0, variant, bound, args, kwargs)
        return out[0] if isinstance(out, tuple) else out

    constant = {name: weight.detach() for name, weight in weights.items()}

    def plain() -> None:
        with torch.no_grad():
            forward("forward", constant)

    def both(variant: Variant) -> tuple[float, int, int]:
        """(seconds of the backward, bytes held, peak of the backward on top)."""
        start = torch.cuda.memory_allocated()
        out = forward(variant)
        held = torch.cuda.memory_allocated() - start
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        torch.autograd.grad(out, [hidden_BTD, *weights.values()], gradient_BTD)
        torch.cuda.synchronize()
        return time.perf_counter() - began, held, torch.cuda.max_memory_allocated() - start

    policies: list[Policy] = sorted(set(made.choice.policies))
    step_s = 0.0
    for policy in policies:
        count = made.choice.policies.count(policy)
        began = time.perf_counter()
        if policy == "recompute":
            plain()
        both(policy)
        say(f"a layer, {policy}: compiled and run once in {time.perf_counter() - began:.1f} s")
        saving_s = seconds_of(functools.partial(forward, policy))
        first_s, whole_s = (seconds_of(plain), saving_s) if policy == "recompute" else (saving_s, 0.0)
        backward_s, held, peak = both(policy)
        say(
            f"a layer, {policy}: forward {first_s:.3f} s, backward {whole_s + backward_s:.3f} s; held {held / GIB:.2f} GiB with "
            f"its output, at the worst moment of its backward {peak / GIB:.2f} GiB "
            f"(plan: {working_bytes(shape, made.step, made.options, made.choice)[0] / GIB:.2f} and weights' gradients)"
        )
        step_s += count * (first_s + whole_s + backward_s)
    say(f"{len(made.choice.policies)} such layers: {step_s:.1f} s, without head and waits")


def seconds_of(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def watch(engine: HostEngine, ended: threading.Event) -> None:
    """A line every 20 seconds: visits of layers that were launched, device memory now."""
    began = time.perf_counter()
    while not ended.wait(20):
        stream = engine._flows.weights
        memory = torch.cuda.memory_allocated() / GIB if torch.cuda.is_available() else 0.0
        say(
            f"  {time.perf_counter() - began:.0f} s: {stream._position} of {len(stream._visits)} visits launched, "
            f"{memory:.1f} GiB on the device"
        )


def run_steps(engine: HostEngine, shape: ModelShape, made: Plan, tokens: int, steps: int) -> None:
    flops = 3 * shape.forward_flops(tokens) * tokens
    again = recomputed_flops(shape, made.step, made.choice) * tokens
    for step in range(steps):
        ids = torch.randint(0, shape.vocabulary, (1, tokens), generator=torch.Generator().manual_seed(step))
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        ended = threading.Event()
        watcher = threading.Thread(target=watch, args=(engine, ended), daemon=True)
        watcher.start()
        try:
            result = engine.train_step({"input_ids": ids, "labels": ids.clone()})
        finally:
            ended.set()
            watcher.join()
        seconds = result.seconds["step"]
        split = ", ".join(f"{name} {value:.3f}" for name, value in result.seconds.items())
        moved = ", ".join(f"{name} {size / 1e9:.1f} GB" for name, size in result.moved_bytes.items())
        memory = engine.memory()
        reserved = torch.cuda.max_memory_reserved() / GIB if torch.cuda.is_available() else 0.0
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        say(
            f"step {step}: loss {result.loss:.4f} norm {result.grad_norm:.3f} skipped {result.skipped} [{split}] {moved}\n"
            f"  {seconds:.2f} s (plan {made.seconds:.2f}), {tokens / seconds:,.0f} tokens/s, "
            f"{flops / seconds / 1e12:.0f} TFLOP/s ({flops:.3e} FLOPs; and {again:.2e} computed again)\n"
            f"  peak HBM {memory['device_peak'] / GIB:.2f} GiB (plan {made.device_bytes / GIB:.2f}; reserved {reserved:.2f}), "
            f"RSS {rss:.1f} GiB (plan {made.host_bytes / GIB:.1f}), pinned {memory['host_pinned'] / GIB:.1f} GiB, "
            f"offloaded inputs {memory['host_inputs'] / GIB:.1f} GiB"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens", type=int)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument(
        "--device-gib", type=float, default=None, help="that the plan counts on; default: the machine's"
    )
    parser.add_argument("--host-gib", type=float, default=118.0, help="likewise; what is above is room for its errors")
    parser.add_argument("--attention", choices=tuple(BACKENDS), default=None, help="instead of the fastest")
    parser.add_argument("--machine", default=str(MACHINE))
    parser.add_argument("--plan-only", action="store_true")
    parser.add_argument("--skip-layer", action="store_true", help="do not run a layer alone first")
    parser.add_argument("--option", action="append", default=[], help="field of ExecutionPlan instead of the plan's")
    given = parser.parse_args()
    # before the first use of the device: tensors of many sizes, each a hundredth of its memory, leave no gaps between them
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    folder = folder_of(given.layers)
    shape = shape_of(load_model_config(folder), name="qwen2.5-7b")
    machine = with_measured_attention(load_machine(given.machine), given.attention)
    made = planned(shape, machine, given.tokens, given.host_gib, given.device_gib)
    say(plan_text(made))
    if given.plan_only:
        return
    followed = replace(made.execution, **plan_overrides(given.option))
    began = time.perf_counter()
    optim = AdamW(learning_rate=1e-5, max_grad_norm=1.0)
    with HostEngine(folder, followed, init="random", verify="never", optim=optim) as engine:
        say(
            f"engine made in {time.perf_counter() - began:.1f} s, {engine.structure.param_count / 1e9:.2f} B parameters"
        )
        if given.attention:
            engine._attention_order = lambda batch: (BACKENDS[given.attention],)  # type: ignore[method-assign]
        if torch.cuda.is_available() and not given.skip_layer:
            order = engine._attention_order({"input_ids": torch.zeros((1, given.tokens), dtype=torch.int64)})
            with fastest_attention(order):
                clock_a_layer(engine, shape, made, given.tokens)
            gc.collect()
            torch.cuda.empty_cache()
        run_steps(engine, shape, made, given.tokens, given.steps)


if __name__ == "__main__":
    main()
