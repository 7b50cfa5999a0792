"""Requests for the tests of cluster plans."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import LlamaConfig, PreTrainedConfig

import families
from megatrain.machine.machine import Cluster, load_cluster
from megatrain.planner.cluster.candidate import Request
from megatrain.planner.cluster.plan import make_request
from megatrain.planner.plan import StepSize

FILE = Path(__file__).parents[3] / "docs/machines/h100-cluster.yaml"


@functools.cache
def read_cluster() -> Cluster:
    return load_cluster(FILE)


@functools.cache
def make_config(name: str) -> PreTrainedConfig:
    """The tiny config of a family, or `8b`: Llama 3's shape with 8 B parameters."""
    if name != "8b":
        return families.config(families.BY_NAME[name])
    return LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, tie_word_embeddings=False, max_position_embeddings=131072,
    )  # fmt: skip


@functools.cache
def request_of(name: str, world: int = 64, rows: int = 256, tokens: int = 4096) -> Request:
    return make_request(make_config(name), read_cluster(), world, StepSize(rows, tokens), name=name)


@pytest.fixture
def cluster() -> Cluster:
    return read_cluster()


@pytest.fixture
def config() -> Callable[[str], PreTrainedConfig]:
    return make_config


@pytest.fixture
def requests() -> Callable[..., Request]:
    return request_of
