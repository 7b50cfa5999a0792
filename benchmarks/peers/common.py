"""Common parts of the peers: command line, model shapes, batches and timing. One GPU, random weights.

The work equals `megatrain bench --shape qwen3-4b --rows 32 --tokens 1024`: bf16 compute, fp32 master weights and moments in
host memory, AdamW, gradients clipped to norm 1.0, activations recomputed. The loss is Hugging Face's own.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import time
from collections.abc import Callable

import torch
from transformers import Qwen3Config

SHAPES = {  # hidden, intermediate, layers, heads, kv heads, tied
    "0.6b": (1024, 3072, 28, 16, 8, True),
    "4b": (2560, 9728, 36, 32, 8, True),
    "8b": (4096, 12288, 36, 32, 8, False),
}


def arguments(what: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--size", choices=sorted(SHAPES), default="4b")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=4, help="measured steps")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the measured ones")
    return parser.parse_args()


def config(size: str) -> Qwen3Config:
    hidden, intermediate, layers, heads, kv_heads, tied = SHAPES[size]
    made = Qwen3Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=tied,
        max_position_embeddings=1 << 15,
        use_cache=False,
    )
    made._attn_implementation = "sdpa"
    return made


def one_process(port: int) -> None:
    """Set the environment of a process group of one, unless a launcher has set it."""
    for name, value in {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
    }.items():
        os.environ.setdefault(name, value)


def measure(name: str, given: argparse.Namespace, parameters: int, step: Callable[[torch.Tensor], float]) -> None:
    """Time `step(ids)` and print every step and the median.

    Args:
        name: Name of the peer.
        given: The command line.
        parameters: Parameters of the model.
        step: Takes ids (rows, tokens), returns the loss when the step is complete.
    """
    print(f"{name}: {parameters / 1e9:.2f} B parameters, {given.rows} x {given.tokens} tokens a step", flush=True)
    seconds: list[float] = []
    for number in range(given.warmup + given.steps):
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(0, 151936, (given.rows, given.tokens), generator=generator).cuda()
        torch.cuda.synchronize()
        started = time.perf_counter()
        loss = step(ids)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        print(f"step {number}: {seconds[-1]:.3f} s, loss {loss:.4f}", flush=True)
    median = statistics.median(seconds[given.warmup :])
    rss_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{name} {given.size} {given.rows}x{given.tokens}: median {median:.3f} s a step, "
        f"{given.rows * given.tokens / median:.0f} tokens/s, peak HBM {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB, "
        f"RSS {rss_gib:.1f} GiB",
        flush=True,
    )
