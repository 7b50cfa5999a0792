"""Tensor and context parallel accept exactly the families that are tested here; others are refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import families
import mesh_ranks as ranks
from megatrain.engine.mesh.data_parallel import modules_in_fp32
from megatrain.engine.mesh.engine import MeshEngine
from megatrain.engine.mesh.layout import CONTEXT_FAMILIES, TENSOR_FAMILIES, Layout, MeshPlan
from megatrain.errors import UserError
from mesh_cases import Case
from mesh_parity import differences, on_ranks, plain


@pytest.mark.parametrize("family", sorted(TENSOR_FAMILIES))
def test_tensor_and_context_parallel_compute_the_family(family):
    case = Case(family, Layout(tensor=2, context=2, shard=1), 4, tied=True, kind="packed")
    assert not differences(on_ranks(case), plain(case))


@pytest.mark.parametrize("family", sorted(CONTEXT_FAMILIES - TENSOR_FAMILIES))
def test_context_parallel_computes_the_family(family):
    case = Case(family, Layout(context=2, shard=1), 4, tied=True, kind="packed")
    assert not differences(on_ranks(case), plain(case))


@pytest.mark.parametrize(
    ("family", "heads"), [("qwen3", (3, 3)), pytest.param("llama", (4, 1), marks=pytest.mark.slow)]
)
def test_heads_that_do_not_divide_are_computed_whole(family, heads):
    """As SmolLM2-135M's 9 heads of 3 key-value heads on 2 tensor ranks; qwen3 norms queries and keys."""
    layout = Layout(tensor=2, pipeline=2, shard=1)
    case = Case(family, layout, 4, tied=True, kind="packed", heads=heads)
    assert not differences(on_ranks(case), plain(case))


OFTEN = ("deepseek_v3", "ernie4_5_moe", "hunyuan_v1_moe")
SELDOM = ("deepseek_v2", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "dots1", "exaone_moe", "solar_open", "hy_v3")
SELDOM += ("mimo_v2_flash", "olmo_hybrid", "kimi_linear", "nemotron_h")


@pytest.mark.parametrize("family", [*OFTEN, *(pytest.param(name, marks=pytest.mark.slow) for name in SELDOM)])
def test_families_with_parts_in_fp32_are_computed(family):
    """Their code builds routers in fp32 whatever dtype is asked for."""
    case = Case(family, Layout(shard=2, microbatches=2), families.BY_NAME[family].overrides.get("num_hidden_layers", 4))
    case = replace(case, tied=families.BY_NAME[family].ties[0], kind="plain")
    assert not differences(on_ranks(case), plain(case))


@pytest.mark.parametrize(
    "layout", [Layout(shard=2), Layout(pipeline=2, virtual=2, shard=1, schedule="zbv")], ids=["shard", "zbv"]
)
def test_routers_compute_in_fp32_beside_bf16(layout):
    """With bf16 compute such a router's weights stay fp32, as in transformers, and are gathered when they are read."""
    family = families.BY_NAME["ernie4_5_moe"]
    model = families.build(family, seed=1, dtype=torch.float32, tie=False)
    batch = families.batch(family, seed=0, rows=8, tokens=16, kind="plain")

    def work():
        trained = MeshEngine(model, MeshPlan(layout, compute_dtype="bf16"))
        seen = set()

        def look(block, *_):
            seen.add((block.gate.weight.dtype, block.experts.down_proj.dtype, type(block.gate.weight).__name__))

        for stage in trained.stages:
            for layer in stage.own_layers():
                if hasattr(layer.mlp, "gate"):
                    layer.mlp.register_forward_pre_hook(look)
        losses = [trained.train_step(batch, 1e-2).loss for _ in range(3)]
        return seen, losses

    alone = ranks.run(1, lambda: MeshEngine(model, MeshPlan(Layout(), compute_dtype="fp32")).train_step(batch).loss)[0]
    for seen, losses in ranks.run(2, work):
        assert seen == {(torch.float32, torch.bfloat16, "Parameter")}
        assert losses[0] == pytest.approx(alone, rel=5e-3) and losses[2] < losses[0]


def test_a_parameter_in_fp32_beside_others_is_refused_by_name():
    model = families.build(families.BY_NAME["llama"], seed=1, dtype=torch.float32, tie=False)
    layer = model.model.layers[0]
    up = {"layer.mlp.up_proj.weight", "layer.mlp.up_proj.bias"}
    assert modules_in_fp32(layer, up, "layer") == [layer.mlp.up_proj]
    whole = {f"layer.mlp.{name}" for name, _ in layer.mlp.named_parameters()}
    assert modules_in_fp32(layer, whole, "layer") == [layer.mlp]
    with pytest.raises(UserError, match=r"layer\.mlp\.up_proj\.weight must stay in fp32"):
        modules_in_fp32(layer, up - {"layer.mlp.up_proj.bias"}, "layer")


def test_untested_families_are_refused_by_name():
    config = families.config(families.BY_NAME["olmo"])
    for layout, word in ((Layout(tensor=2), "tensor"), (Layout(context=2), "context")):
        assert any(f"olmo is not tested with {word} parallel" in p for p in layout.problems(config, world=2))
