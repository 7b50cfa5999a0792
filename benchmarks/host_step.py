"""One training step of a Qwen3 shape from host memory: seconds, tokens/s, time split, peaks. Random weights and tokens.

Use: python benchmarks/host_step.py SIZE ROWS TOKENS STEPS [option=value ...]
     python benchmarks/host_step.py 8B 32 1024 6 host_gib=124
Options are HostEngine's.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from megatrain.engine.host.engine import HostEngine
from megatrain.optim.adamw import AdamW

SHAPES = {  # hidden, intermediate, layers, heads, kv heads, tied
    "0.6B": (1024, 3072, 28, 16, 8, True),
    "4B": (2560, 9728, 36, 32, 8, True),
    "8B": (4096, 12288, 36, 32, 8, False),
    "14B": (5120, 17408, 40, 40, 8, False),
}


def config_folder(size: str, layers: int | None = None) -> Path:
    hidden, intermediate, depth, heads, kv_heads, tied = SHAPES[size]
    config = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers or depth,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 1 << 20,
    }
    folder = Path(tempfile.mkdtemp()) / f"qwen3-{size}"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def parsed(value: str) -> Any:
    """A number, a list given as JSON, or a word."""
    return json.loads(value) if value[0] in "0123456789[" else value


def main(size: str, rows: int, tokens: int, steps: int, options: dict[str, Any]) -> None:
    started = time.perf_counter()
    layers = options.pop("layers", None)
    engine = HostEngine(
        config_folder(size, layers), init="random", optim=AdamW(learning_rate=1e-5, max_grad_norm=1.0), **options
    )
    print(
        f"init {time.perf_counter() - started:.1f} s, {engine.structure.param_count / 1e9:.2f} B parameters", flush=True
    )
    seconds = []
    for step in range(steps):
        ids = torch.randint(0, 151936, (rows, tokens), generator=torch.Generator().manual_seed(step))
        result = engine.train_step({"input_ids": ids, "labels": ids.clone()})
        seconds.append(result.seconds["step"])
        split = ", ".join(f"{name} {value:.3f}" for name, value in result.seconds.items())
        print(f"step {step}: loss {result.loss:.4f} norm {result.grad_norm:.3f} [{split}]", flush=True)
    median = statistics.median(seconds[2:])
    memory = engine.memory()
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{size} {rows}x{tokens} {options}: {median:.3f} s/step, {rows * tokens / median:.0f} tokens/s, "
        f"peak HBM {memory['device_peak'] / 2**30:.1f} GiB, RSS {rss:.1f} GiB, pinned {memory['host_pinned'] / 2**30:.1f} GiB",
        flush=True,
    )
    engine.close()


if __name__ == "__main__":
    given = dict(argument.split("=", 1) for argument in sys.argv[5:])
    main(sys.argv[1], *map(int, sys.argv[2:5]), {name: parsed(value) for name, value in given.items()})
