"""What the planner knows of a model: element counts and costs of its units, from its config alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig

from megatrain.engine.parity_check import token_wise
from megatrain.models.build import build_meta_model
from megatrain.models.chunked_mlp import Place, modules_in_chunks
from megatrain.models.structure import Structure, dissect
from megatrain.models.templates import template_groups
from megatrain.planner.layer_trace import LayerCost, layer_arguments, trace_layer


@dataclass(frozen=True)
class ModelShape:
    """A causal language model as the planner sees it.

    Attributes:
        name: For people.
        embedding, head: Elements of the edge units, padding included. A tied head is a final norm, or nothing.
        layers: Elements of each layer.
        groups: Template group of each layer.
        costs: What a layer of each group computes and saves, in bf16.
        hidden: Width of the hidden states.
        vocabulary: Rows of embedding and head.
        tied: Whether embedding and head are one tensor.
        norm_in_chunks: Whether the norm behind the layers may be computed in chunks of tokens.
    """

    name: str
    embedding: int
    layers: tuple[int, ...]
    head: int
    groups: tuple[int, ...]
    costs: tuple[LayerCost, ...]
    hidden: int
    vocabulary: int
    tied: bool
    norm_in_chunks: bool = False

    @property
    def parameters(self) -> int:
        return self.embedding + sum(self.layers) + self.head

    @property
    def depth(self) -> int:
        return len(self.layers)

    @cached_property
    def sizes(self) -> np.ndarray:
        """`layers` as (L,) floats."""
        return np.array(self.layers, dtype=np.float64)

    @cached_property
    def group_index(self) -> np.ndarray:
        """`groups` as (L,) integers."""
        return np.array(self.groups, dtype=np.int64)

    @cached_property
    def unit_elements(self) -> dict[str, int]:
        """Elements of each unit by name, in forward order."""
        layers = {f"layer.{i}": elements for i, elements in enumerate(self.layers)}
        return {"embedding": self.embedding, **layers, "head": self.head}

    @property
    def head_matrix(self) -> int:
        """Elements of the matrix that makes logits."""
        return self.vocabulary * self.hidden

    def cost(self, layer: int) -> LayerCost:
        return self.costs[self.groups[layer]]

    def forward_flops(self, tokens: float) -> float:
        """FLOPs of a forward per token, head included, in rows of `tokens` tokens."""
        layers = sum(
            self.cost(i).product_flops.at(tokens) + self.cost(i).attention_flops.at(tokens) for i in range(self.depth)
        )
        return layers + 2.0 * self.head_matrix


def shape_of(
    config: PreTrainedConfig,
    *,
    name: str | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> ModelShape:
    """The shape of a model from its config; builds it on meta and reads no weights.

    Raises:
        UserError: The model cannot be built or has no layer stack that could be streamed.
    """
    model = build_meta_model(
        config,
        compute_dtype=torch.bfloat16,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
    )
    places = token_wise(config, attn_implementation=attn_implementation, trust_remote_code=trust_remote_code)
    return shape_of_structure(dissect(model), name or str(config.model_type), places)


def shape_of_structure(structure: Structure, name: str, places: Mapping[Place, str] | None = None) -> ModelShape:
    """The shape of a model that was built on meta for bf16 compute and taken apart.

    Args:
        structure: The model.
        name: For people.
        places: Its token-wise modules, from `gate.token_wise`; without it nothing is computed in chunks of tokens.
    """
    places = places or {}
    config: Any = structure.model.config
    text = config.get_text_config()
    groups = template_groups(list(structure.layer_stack()))
    buffers = dict(structure.model.named_buffers())

    def arguments(length: int) -> Any:
        return layer_arguments(structure, torch.zeros((1, length), dtype=torch.int64), buffers)

    costs = [
        trace_layer(structure, structure.layers[groups.index(group)], arguments, places)
        for group in sorted(set(groups))
    ]
    return ModelShape(
        name=name,
        embedding=structure.embedding.layout.numel,
        layers=tuple(unit.layout.numel for unit in structure.layers),
        head=structure.head.layout.numel,
        groups=tuple(groups),
        costs=tuple(costs),
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
        tied=any(not alias.startswith(structure.base_name + ".") for alias in structure.tied),
        norm_in_chunks=bool(modules_in_chunks(structure.model.get_submodule(structure.base_name), places, ())),
    )
