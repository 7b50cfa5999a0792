"""Model shapes and machines for the planner's tests."""

from __future__ import annotations

import functools
from pathlib import Path

from transformers import Qwen3Config

from megatrain.bench import QWEN3
from megatrain.machine.machine import Machine, load_machine
from megatrain.planner.shape import ModelShape, shape_of

MACHINES = Path(__file__).parents[2] / "docs/machines"


@functools.cache
def shape(name: str, layers: int | None = None) -> ModelShape:
    """A named shape of the benchmark."""
    hidden, intermediate, depth, heads, kv_heads, tied = QWEN3[name]
    config = Qwen3Config(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers or depth, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=128, vocab_size=151936, tie_word_embeddings=tied,
        max_position_embeddings=1 << 17,
    )  # fmt: skip
    return shape_of(config, name=name)


@functools.cache
def machine(name: str = "h200") -> Machine:
    return load_machine(MACHINES / f"{name}.yaml")
