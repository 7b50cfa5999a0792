"""Model shapes and machines by name, for the planner's tests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import Qwen3Config

from megatrain.commands.work import QWEN3
from megatrain.machine.machine import Machine, load_machine
from megatrain.planner.model_cost import ModelShape, shape_of

MACHINES = Path(__file__).parents[2] / "docs/machines"


SHAPES = {**QWEN3, "dense-120b": (12288, 28672, 84, 96, 8, False)}


@functools.cache
def make_shape(name: str, layers: int | None = None) -> ModelShape:
    """A named shape of `megatrain bench`; one layer is built and counted several times."""
    hidden, intermediate, depth, heads, kv_heads, tied = SHAPES[name]
    config = Qwen3Config(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=1, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=128, vocab_size=151936, tie_word_embeddings=tied,
        max_position_embeddings=1 << 17,
    )  # fmt: skip
    one = shape_of(config, name=name)
    count = layers or depth
    return replace(one, layers=one.layers * count, groups=(0,) * count)


@functools.cache
def read_machine(name: str = "h200") -> Machine:
    return load_machine(MACHINES / f"{name}.yaml")


@pytest.fixture
def shape() -> Callable[..., ModelShape]:
    return make_shape


@pytest.fixture
def machine() -> Callable[..., Machine]:
    return read_machine
