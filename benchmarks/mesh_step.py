"""The mesh engine on one GPU: seconds, tokens/s and losses of a few steps of Qwen3-4B's shape with random weights.

    python benchmarks/mesh_step.py [--rows 32] [--tokens 1024] [--steps 5] [--compile on] [--host]

`--host` runs the host engine on the same batches from the same initial weights, to compare losses.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from typing import Any

import torch
from transformers import Qwen3Config

from megatrain.engine.host.engine import HostEngine
from megatrain.engine.mesh.engine import MeshEngine
from megatrain.engine.mesh.layout import Layout, MeshPlan
from megatrain.engine.plan import ExecutionPlan
from megatrain.optim.adamw import AdamW

QWEN3_4B = {
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--compile", choices=("on", "off"), default="off")
    parser.add_argument("--host", action="store_true")
    arguments = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    shape = (arguments.rows, arguments.tokens)
    batches = []
    for _ in range(arguments.steps):
        # Only a few thousand tokens, so that there is something to learn in a few steps.
        ids = torch.randint(0, 4096, shape, generator=generator)
        batches.append({"input_ids": ids, "labels": ids.clone()})
    optim = AdamW(learning_rate=1e-4)
    with tempfile.TemporaryDirectory() as folder:
        Qwen3Config(**QWEN3_4B, architectures=["Qwen3ForCausalLM"]).save_pretrained(folder)
        started = time.perf_counter()
        plan = MeshPlan(Layout(microbatches=arguments.microbatches), True, arguments.compile, "bf16")
        common: dict[str, Any] = {"device": "cuda", "optim": optim, "init": "random", "seed": 0}
        with MeshEngine(folder, plan, **common) as engine:
            report("mesh", engine, batches, time.perf_counter() - started)
            del engine
        torch.cuda.empty_cache()
        if arguments.host:
            started = time.perf_counter()
            with HostEngine(folder, ExecutionPlan(compute_dtype="bf16"), **common) as engine:
                report("host", engine, batches, time.perf_counter() - started)


def report(name: str, engine: Any, batches: list[dict[str, torch.Tensor]], start_s: float) -> None:
    parameters = engine.structure.param_count
    config = engine.config
    for number, batch in enumerate(batches, start=1):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        result = engine.train_step(batch)
        torch.cuda.synchronize()
        step_s = time.perf_counter() - begun
        rows, tokens = batch["input_ids"].shape
        attention = 6 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * tokens  # causal: half
        flops = (6 * parameters + attention) * rows * tokens
        line = {
            "engine": name, "step": number, "loss": round(result.loss, 5), "grad_norm": round(result.grad_norm, 4),
            "step_s": round(step_s, 3), "tokens_per_s": round(rows * tokens / step_s),
            "model_tflops": round(flops / step_s / 1e12, 1),
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1), "start_s": round(start_s, 1),
        }  # fmt: skip
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
