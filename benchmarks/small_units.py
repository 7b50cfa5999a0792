"""Many small units: SmolLM2-135M's shape, all resident, compared with a plain loop (Hugging Face + fused AdamW on the GPU).

Use: python benchmarks/small_units.py ROWS TOKENS STEPS
The plain loop runs twice: weights in bf16 (no fp32 master), and fp32 weights under bf16 autocast.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Literal

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megatrain.engine.host.engine import HostEngine
from megatrain.engine.plan import ExecutionPlan
from megatrain.optim.adamw import AdamW

COMPILED: tuple[tuple[str, Literal["off", "auto"]], ...] = (
    ("megatrain, eager", "off"),
    ("megatrain, compiled", "auto"),
)
CONFIG = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}


def plain(model: LlamaForCausalLM, autocast: bool, rows: int, tokens: int, steps: int) -> tuple[float, float]:
    """(median seconds of a step, peak GiB)."""
    model = model.cuda() if autocast else model.cuda().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for step in range(steps):
        ids = torch.randint(0, 49152, (rows, tokens), generator=torch.Generator().manual_seed(step)).cuda()
        torch.cuda.synchronize()
        started = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[3:]), torch.cuda.max_memory_allocated() / 2**30


def main(rows: int, tokens: int, steps: int) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(**CONFIG)
    model = LlamaForCausalLM(config)
    for name, compiled in COMPILED:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        optim = AdamW(learning_rate=1e-5)
        plan = ExecutionPlan(placement="device", activations="keep", microbatch_rows=rows, compile=compiled)
        with HostEngine(model, plan, optim=optim) as engine:
            seconds = []
            for step in range(steps):
                ids = torch.randint(0, 49152, (rows, tokens), generator=torch.Generator().manual_seed(step))
                result = engine.train_step({"input_ids": ids, "labels": ids})
                seconds.append(result.seconds["step"])
            split = ", ".join(f"{k} {v:.3f}" for k, v in result.seconds.items())
        median, peak = statistics.median(seconds[3:]), torch.cuda.max_memory_allocated() / 2**30
        print(
            f"{name}: {median * 1e3:.1f} ms, {rows * tokens / median:.0f} tokens/s, peak {peak:.1f} GiB [{split}]",
            flush=True,
        )
    for name, autocast in (("plain, bf16 weights", False), ("plain, fp32 weights, autocast", True)):
        torch.cuda.empty_cache()
        torch.manual_seed(0)
        median, peak = plain(LlamaForCausalLM(config), autocast, rows, tokens, steps)
        print(f"{name}: {median * 1e3:.1f} ms, {rows * tokens / median:.0f} tokens/s, peak {peak:.1f} GiB", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
