"""Hugging Face's code around layers without weights computes Hugging Face's numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

from families import BY_NAME, CORE, Family, batch, build
from megatrain.engine.parity_check import token_wise
from megatrain.errors import UserError
from megatrain.models.chunked_mlp import TokenChunks
from megatrain.models.shell import Shell, StreamedLayer
from megatrain.models.structure import dissect

SCALED = (
    "gemma2 gemma gemma3n_text granite cohere cohere2 falcon_h1 recurrent_gemma hyperclovax minicpm3 afmoe nanochat"
)
"""Families with soft caps on logits, embedding or logit multipliers."""


class World:
    """A shell over a real model whose layers are computed from the model's own weights."""

    def __init__(self, model: Any, **options: Any):
        self.model = model.eval()
        self.calls: list[int] = []
        self.structure = dissect(model)
        self.shell = Shell(self.structure, dict(model.named_buffers()), self.run_layer, **options)
        self.shell.train(False)

    def weights(self, *units: int) -> dict[str, torch.Tensor]:
        names = [full for unit in units for _, full in self.structure.units[unit].full_names()]
        return {name: self.model.get_parameter(name).detach() for name in names}

    def run_layer(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.calls.append(index)
        unit = self.structure.layers[index]
        own = {local: self.model.get_parameter(full).detach() for local, full in unit.full_names()}
        return self.shell.call_layer(index, "forward", own, args, kwargs)

    def logits(self, inputs: dict[str, torch.Tensor], chunk: int = 5) -> torch.Tensor:
        """Base model through the shell, then the head on a few tokens at a time. (B, T, V)"""
        edges = self.weights(0, -1)
        with torch.no_grad():
            hidden_BTD = self.shell.hidden_states(edges, inputs)
            flat = hidden_BTD.reshape(-1, hidden_BTD.shape[-1])
            parts = [self.shell.logits(edges, flat[i : i + chunk]) for i in range(0, len(flat), chunk)]
        return torch.cat(parts).view(*hidden_BTD.shape[:2], -1)

    def plain(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            return self.model(**inputs, use_cache=False).logits


def inputs_of(family: Family, kind: Any = "plain") -> dict[str, torch.Tensor]:
    rows = batch(family, seed=1, rows=2, tokens=20, kind=kind)
    return {name: rows[name] for name in ("input_ids", "position_ids", "attention_mask") if name in rows}


@pytest.mark.parametrize("name", sorted({f.name for f in CORE} | set(SCALED.split())))
def test_logits_equal_those_of_hugging_face(name: str) -> None:
    """With soft caps, embedding, residual and logit multipliers, windows and NoPE layers."""
    world, inputs = World(build(BY_NAME[name], seed=0)), inputs_of(BY_NAME[name], "masked")
    torch.testing.assert_close(world.logits(inputs), world.plain(inputs), rtol=1e-4, atol=1e-5)
    assert world.calls == list(range(len(world.structure.layers))), "each layer once, in order"


@pytest.mark.parametrize("name", [f.name for f in CORE if f.packable])
def test_packed_positions_are_passed_to_every_layer(name: str) -> None:
    world, inputs = World(build(BY_NAME[name], seed=0)), inputs_of(BY_NAME[name], "packed")
    torch.testing.assert_close(world.logits(inputs), world.plain(inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "opt", "gemma3n_text"])
@pytest.mark.parametrize("tie", [True, False])
def test_the_head_reads_a_tied_weight_under_the_name_it_is_kept_under(name: str, tie: bool) -> None:
    world, inputs = World(build(BY_NAME[name], seed=0, tie=tie)), inputs_of(BY_NAME[name])
    torch.testing.assert_close(world.logits(inputs), world.plain(inputs), rtol=1e-4, atol=1e-5)
    embedding = world.model.get_input_embeddings().weight
    tied_name = next(n for n, p in world.model.named_parameters() if p is embedding)
    assert (tied_name in world.shell.head_names) == tie
    assert ("lm_head.weight" in world.shell.head_names) == (not tie)


def test_head_names_are_the_trained_parameters_of_the_head_alone() -> None:
    """The final norm belongs to the base model; a frozen parameter gets no gradient."""
    assert World(build(BY_NAME["phimoe"], seed=0, tie=False)).shell.head_names == ["lm_head.weight", "lm_head.bias"]
    model = build(BY_NAME["llama"], seed=0, tie=False)
    model.lm_head.weight.requires_grad_(False)
    assert World(model).shell.head_names == []


@pytest.mark.parametrize("name", ["bloom", "mamba"])
def test_a_family_without_position_ids_refuses_packed_rows(name: str) -> None:
    world, inputs = World(build(BY_NAME[name], seed=0)), inputs_of(BY_NAME[name])
    inputs["position_ids"] = torch.zeros_like(inputs["input_ids"])
    with pytest.raises(UserError, match=r"takes no position_ids\n  -> .*data\.packing: false"):
        world.logits(inputs)


def test_an_unknown_input_is_refused_by_name() -> None:
    world, inputs = World(build(BY_NAME["llama"], seed=0)), inputs_of(BY_NAME["llama"])
    with pytest.raises(UserError, match="LlamaModel takes no token_type_ids"):
        world.logits({**inputs, "token_type_ids": torch.zeros_like(inputs["input_ids"])})


# ------------------------------------------------------------------ no weights, no changes to the model


def test_the_model_is_not_changed() -> None:
    model = build(BY_NAME["qwen3_moe"], seed=0)
    before = {name: (id(t), t._version) for name, t in model.state_dict(keep_vars=True).items()}
    world = World(model)
    world.logits(inputs_of(BY_NAME["qwen3_moe"]))
    assert {name: (id(t), t._version) for name, t in model.state_dict(keep_vars=True).items()} == before
    assert not any(isinstance(m, StreamedLayer) for m in model.modules())
    assert all(p.grad is None for p in model.parameters())


def test_a_streamed_layer_has_its_layer_s_attributes_but_no_tensors() -> None:
    model = build(BY_NAME["gemma3_text"], seed=0)
    layer = StreamedLayer(3, model.model.layers[3], lambda *call: call)
    assert list(layer.parameters()) == []
    assert list(layer.modules()) == [layer]
    assert layer.self_attn is model.model.layers[3].self_attn
    assert layer(1, key=2) == (3, (1,), {"key": 2})
    with pytest.raises(AttributeError):
        layer.no_such_attribute  # noqa: B018


def test_layers_compute_with_the_weights_they_are_given() -> None:
    model = build(BY_NAME["llama"], seed=0).eval()
    world, hidden = World(model), torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(0))
    positions = model.model.rotary_emb(hidden, torch.arange(4)[None])
    weights = {
        local: model.get_parameter(full).detach() * 0.5 for local, full in world.structure.layers[2].full_names()
    }
    with torch.no_grad():
        got = world.shell.call_layer(2, "forward", weights, (hidden,), {"position_embeddings": positions})
        want = functional_call(model.model.layers[2], weights, (hidden,), {"position_embeddings": positions})
    assert torch.equal(got, want)


def test_training_mode_reaches_the_shell_and_the_layers() -> None:
    world = World(build(BY_NAME["gpt2"], seed=0, dropout=0.5))
    world.shell.train(True)
    assert all(layer.training for layer in world.shell.layers)
    inputs = inputs_of(BY_NAME["gpt2"])
    assert not torch.equal(world.logits(inputs), world.logits(inputs)), "dropout"
    world.shell.train(False)
    assert torch.equal(world.logits(inputs), world.logits(inputs))


# ------------------------------------------------------------------ leaves


def test_leaves_are_views_of_the_slot_and_require_gradients_unless_frozen() -> None:
    world = World(build(BY_NAME["ernie4_5_moe"], seed=0), fp32_names=frozenset())
    unit = world.structure.layers[1]
    slot = torch.zeros(unit.layout.numel)
    leaves = world.shell.leaves(unit.layout.views(slot), unit.prefix, requires_grad=True)
    frozen = {local for local, full in unit.full_names() if full in world.structure.frozen}
    assert frozen
    assert {name for name, leaf in leaves.items() if not leaf.requires_grad} == frozen
    assert all(leaf.is_leaf for leaf in leaves.values())
    slot.fill_(3.0)
    assert all((leaf == 3.0).all() for leaf in leaves.values())
    still = world.shell.leaves(unit.layout.views(slot), unit.prefix, requires_grad=False)
    assert not any(leaf.requires_grad for leaf in still.values())


def test_parameters_that_the_family_keeps_in_fp32_have_fp32_leaves() -> None:
    structure = dissect(build(BY_NAME["llama"], seed=0))
    unit = structure.layers[0]
    name = unit.prefix + "input_layernorm.weight"
    world = World(structure.model, fp32_names=frozenset({name}))
    leaves = world.shell.leaves(
        unit.layout.views(torch.zeros(unit.layout.numel, dtype=torch.bfloat16)), unit.prefix, requires_grad=True
    )
    assert leaves["input_layernorm.weight"].dtype == torch.float32
    assert {leaf.dtype for local, leaf in leaves.items() if local != "input_layernorm.weight"} == {torch.bfloat16}


def test_buffers_are_bound_to_the_module_that_reads_them() -> None:
    """Rotary tables to the base model, router corrections to their layer."""
    world = World(build(BY_NAME["deepseek_v3"], seed=0))
    routers = [set(buffers) for buffers in world.shell._layer_buffers]
    assert any(any(name.endswith("e_score_correction_bias") for name in found) for found in routers)
    assert any(name.endswith("inv_freq") for name in world.shell._base_buffers)
    found = sum(len(b) for b in (*world.shell._layer_buffers, world.shell._base_buffers, world.shell._head_buffers))
    assert found == len(dict(world.model.named_buffers()))


def test_a_streamed_stack_is_a_module_list() -> None:
    world = World(build(BY_NAME["llama"], seed=0))
    assert isinstance(world.shell._base.layers, nn.ModuleList)
    assert len(world.shell._base.layers) == 4


@pytest.mark.parametrize(
    ("name", "packed"), [("llama", "flex_attention"), ("gemma2", "eager"), ("youtu", "sdpa")], ids=lambda v: v
)
def test_packed_rows_use_flex_attention_if_the_family_supports_it(name: str, packed: str) -> None:
    """Gemma 2 runs with eager attention here; Youtu's head size does not suit flex kernels."""
    plain = BY_NAME[name].attention
    for flex, wanted in ((True, packed), (False, plain)):
        world = World(build(BY_NAME[name], seed=0), flex=flex)
        world.shell.choose_attention(packed=True, tokens=4)
        assert world.model.config._attn_implementation == wanted
        world.shell.choose_attention(packed=False, tokens=4)
        assert world.model.config._attn_implementation == plain


@pytest.mark.parametrize(("name", "window"), [("mistral", 8), ("olmo3", 8), ("llama", None)])
def test_rows_longer_than_a_layer_s_window_use_flex_attention(name: str, window: int | None) -> None:
    """sdpa would need a mask of T x T entries."""
    world = World(build(BY_NAME[name], seed=0), flex=True)
    for tokens, wanted in ((7, "sdpa"), (1 << 18, "sdpa" if window is None else "flex_attention")):
        world.shell.choose_attention(packed=False, tokens=tokens)
        assert world.model.config._attn_implementation == wanted


def test_compiled_layers_are_compiled_again_for_smaller_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every smaller chunk size gets a new code object, because the compiler gives up after a few versions of one."""
    compile = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda f, dynamic: compile(f, dynamic=dynamic, backend="aot_eager", fullgraph=True)
    )
    torch._dynamo.reset()
    family = BY_NAME["llama"]
    model = build(family, seed=0)
    places = token_wise(model.config)
    world = World(model, compiled=True, token_wise=lambda: places)
    sizes: list[int] = []
    real = TokenChunks.parts
    monkeypatch.setattr(TokenChunks, "parts", lambda chunks, count: sizes.append(chunks.tokens) or real(chunks, count))
    inputs, layers = inputs_of(family), len(world.structure.layers)
    want = world.plain(inputs)
    assert world.shell.can_chunk_mlps
    for chunk, rows in ((None, 0), (20, 1), (10, 1), (5, 1)):  # 2 rows of 20 tokens
        if chunk is not None:
            world.shell.compute_in_chunks(chunk)
        with torch._dynamo.config.patch(recompile_limit=1):
            torch.testing.assert_close(world.logits(inputs), want, rtol=1e-4, atol=1e-4)
        assert sizes == [chunk] * rows * (layers + 1), "each MLP, and the norm after the layers"
        assert world.shell.compiled(0)
        sizes.clear()
