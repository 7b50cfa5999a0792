"""Dissecting a model by its shape: the layer stack, the units, embedding and head."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig

from families import BY_NAME, CORE, FAMILIES, Family, build, config
from megatrain.errors import UserError
from megatrain.models.build import build_meta_model
from megatrain.models.structure import Structure, attention_shape, dissect, persistent_buffers, with_submodule


def dissected(name: str, tie: bool | None = None) -> Structure:
    return dissect(build(BY_NAME[name], seed=0, tie=tie))


def names(structure: Structure, unit: int) -> list[str]:
    return [full for _, full in structure.units[unit].full_names()]


EMBEDDING = {
    "llama": ["model.embed_tokens.weight"],
    "gpt2": ["transformer.wte.weight", "transformer.wpe.weight"],
    "opt": ["model.decoder.embed_tokens.weight", "model.decoder.embed_positions.weight"],
    # registered after the layers, read before them
    "gemma3n_text": [
        "model.embed_tokens.weight",
        "model.embed_tokens_per_layer.weight",
        "model.per_layer_model_projection.weight",
        "model.per_layer_projection_norm.weight",
        "model.altup_projections.0.weight",
        "model.altup_projections.1.weight",
        "model.altup_projections.2.weight",
    ],
    "bloom": [
        "transformer.word_embeddings.weight",
        "transformer.word_embeddings_layernorm.weight",
        "transformer.word_embeddings_layernorm.bias",
    ],
}
HEAD = {
    "llama": ["model.norm.weight", "lm_head.weight"],
    "gpt2": ["transformer.ln_f.weight", "transformer.ln_f.bias", "lm_head.weight"],
    "opt": ["model.decoder.final_layer_norm.weight", "model.decoder.final_layer_norm.bias", "lm_head.weight"],
}


@pytest.mark.parametrize("name", EMBEDDING)
def test_parameters_read_before_the_first_layer_are_the_embedding(name: str) -> None:
    """[Note: embedding or head]"""
    assert sorted(names(dissected(name, tie=False), 0)) == sorted(EMBEDDING[name])


@pytest.mark.parametrize("name", HEAD)
def test_the_other_parameters_of_the_shell_are_the_head(name: str) -> None:
    assert sorted(names(dissected(name, tie=False), -1)) == sorted(HEAD[name])


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3n_text"])
def test_a_tied_head_is_kept_once_under_the_embedding_s_name(name: str) -> None:
    structure = dissected(name, tie=True)
    embedding = EMBEDDING[name][0]
    assert structure.tied == {"lm_head.weight": embedding}
    assert "lm_head.weight" not in names(structure, -1)
    assert embedding in names(structure, 0)


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_every_parameter_of_every_family_is_in_exactly_one_unit(family: Family) -> None:
    model = build_meta_model(config(family), compute_dtype=torch.float32)
    structure = dissect(model)
    found = [full for unit in structure.units for _, full in unit.full_names()]
    assert len(found) == len(set(found))
    aliases = {n for n, _ in model.named_parameters(remove_duplicate=False)}
    assert set(found) | set(structure.tied) == aliases
    assert structure.param_count == sum(p.numel() for p in model.parameters())
    assert [unit.layer for unit in structure.layers] == list(range(len(structure.layer_stack())))
    assert structure.frozen == {n for n, p in model.named_parameters() if not p.requires_grad}
    for unit in structure.units:
        for local, full in unit.full_names():
            assert tuple(model.get_parameter(full).shape) == unit.layout.by_name[local].shape


@pytest.mark.parametrize("family", CORE, ids=str)
def test_dissecting_changes_nothing(family: Family) -> None:
    model = build(family, seed=0)
    before = {name: (id(t), t._version) for name, t in model.state_dict(keep_vars=True).items()}
    modules = [id(m) for m in model.modules()]
    dissect(model)
    assert {name: (id(t), t._version) for name, t in model.state_dict(keep_vars=True).items()} == before
    assert [id(m) for m in model.modules()] == modules


def test_only_persistent_buffers_belong_to_the_weights() -> None:
    buffers = persistent_buffers(build(BY_NAME["deepseek_v3"], seed=0))
    assert buffers
    assert all(name.endswith("e_score_correction_bias") for name in buffers)
    assert persistent_buffers(build(BY_NAME["llama"], seed=0)) == {}


# ------------------------------------------------------------------ refusals


class Toy(nn.Module):
    """A causal language model reduced to its module tree."""

    def __init__(self, base: nn.Module, layers: int, prefix: str = "model"):
        super().__init__()
        self.base_model_prefix = prefix
        self.config = SimpleNamespace(num_hidden_layers=layers)
        self.model, self.lm_head = base, nn.Linear(4, 7)


class Base(nn.Module):
    def __init__(self, **modules: nn.Module):
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> torch.Tensor:
        raise NotImplementedError


def linears(count: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(4, 4) for _ in range(count))


def test_a_model_without_a_stack_is_refused() -> None:
    with pytest.raises(UserError, match="Toy: no stack of 3 decoder layers found under 'model'"):
        dissect(Toy(Base(blocks=linears(2)), layers=3))


def test_a_list_inside_a_layer_is_not_the_stack() -> None:
    """Longcat's layers contain lists of two; the length of its stack is not `num_hidden_layers`."""
    inside = nn.ModuleList(Base(experts=linears(2)) for _ in range(3))
    with pytest.raises(UserError, match="no stack of 2 decoder layers"):
        dissect(Toy(Base(layers=inside), layers=2))
    with pytest.raises(UserError, match="no stack of 4 decoder layers"):
        dissect(build(BY_NAME["longcat_flash"], seed=0))


def test_the_outermost_stack_is_taken() -> None:
    same_length_inside = nn.ModuleList(Base(experts=linears(3)) for _ in range(3))
    assert dissect(Toy(Base(layers=same_length_inside), layers=3)).layers_name == "model.layers"


def test_a_model_without_a_base_is_refused() -> None:
    with pytest.raises(UserError, match="no base model that can be separated from its head"):
        dissect(Toy(nn.Linear(4, 4), layers=2, prefix="transformer"))


def test_layers_that_share_parameters_are_refused() -> None:
    layers = linears(3)
    layers[2].weight = layers[0].weight
    with pytest.raises(
        UserError, match=r"layers share parameters \(model\.layers\.2\.weight = model\.layers\.0\.weight\)"
    ):
        dissect(Toy(Base(layers=layers), layers=3))
    with pytest.raises(UserError, match="layers share parameters"):
        dissect(build(BY_NAME["zamba2"], seed=0))


def test_a_base_whose_forward_fails_belongs_to_the_embedding() -> None:
    """The device then keeps more parameters during the step; the result is the same."""
    structure = dissect(Toy(Base(embed=nn.Embedding(7, 4), layers=linears(2), norm=nn.LayerNorm(4)), layers=2))
    assert names(structure, 0) == ["model.embed.weight", "model.norm.weight", "model.norm.bias"]
    assert names(structure, -1) == ["lm_head.weight", "lm_head.bias"]


def test_with_submodule_does_not_change_the_original() -> None:
    root = Base(a=Base(b=Base(c=nn.Linear(2, 2)), d=nn.Linear(3, 3)))
    replacement = nn.Linear(5, 5)
    twin = with_submodule(root, "a.b.c", replacement)
    assert twin.get_submodule("a.b.c") is replacement
    assert root.get_submodule("a.b.c") is not replacement
    assert twin.get_submodule("a.d") is root.get_submodule("a.d"), "modules off the path are shared"


@pytest.mark.parametrize(
    ("name", "shape"), [("llama", (4, 2, 16)), ("gpt2", (4, 4, 16)), ("bloom", (4, 4, 16)), ("mamba", None)]
)
def test_attention_shape(name: str, shape: tuple[int, int, int] | None) -> None:
    assert attention_shape(config(BY_NAME[name])) == shape


def test_layers_with_different_head_sizes_have_no_attention_shape() -> None:
    """As in Gemma 4's published configs, where reading `head_dim` raises."""
    assert attention_shape(wide_heads()) is None


def wide_heads() -> PreTrainedConfig:
    family = BY_NAME["gemma4_text"]
    return config(dataclasses.replace(family, overrides=family.overrides | {"global_head_dim": 32}))
