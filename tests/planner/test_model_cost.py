"""Saved bytes and FLOPs of a layer, counted on meta tensors, compared with counts by hand."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig, Qwen3Config, Qwen3MoeConfig

from megatrain.planner.model_cost import Line, shape_of


def qwen3(**changes: object) -> Qwen3Config:
    fields = {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
        "max_position_embeddings": 1 << 17,
    }
    return Qwen3Config(**{**fields, **changes})


def test_a_dense_layer_saves_the_inputs_and_outputs_of_its_products_and_attention() -> None:
    cost = shape_of(qwen3()).costs[0]
    d, q, kv, mlp, heads = 4096, 4096, 1024, 12288, 32
    # norm -> q, k, v -> rotary q, k -> attention -> o -> norm -> gate, up -> product -> down; the kernel's log-sum-exp is fp32
    elements = d + (q + 2 * kv) + (q + kv) + q + d + d + 3 * mlp + d
    assert cost.saved_bytes.at(1024) == 2 * elements + 4 * heads
    assert cost.saved_bytes.slope == 0


def test_the_count_agrees_with_what_a_compiled_layer_held_on_a_gpu() -> None:
    measured_bytes = 4.20 * 2**30 / (32 * 1024)
    assert shape_of(qwen3()).costs[0].saved_bytes.at(1024) == pytest.approx(measured_bytes, rel=0.01)


def test_flops_of_a_dense_layer() -> None:
    shape = shape_of(qwen3())
    matrices = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 12288
    assert shape.costs[0].product_flops.at(512) == 2 * matrices
    # causal: half of Q K^T and half of P V, 2 T d each per head and token
    assert shape.costs[0].attention_flops.at(2048) == 32 * 2 * 2048 * 128


def test_experts_count_once_per_routed_token() -> None:
    def moe(top_k: int) -> Qwen3MoeConfig:
        return Qwen3MoeConfig(
            hidden_size=64, intermediate_size=128, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=top_k,
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=128,
            max_position_embeddings=512,
        )  # fmt: skip

    one, three = (shape_of(moe(k)).costs[0] for k in (1, 3))
    expert = 3 * 64 * 32
    assert three.product_flops.at(64) - one.product_flops.at(64) == 2 * 2 * expert
    assert three.saved_bytes.at(64) - one.saved_bytes.at(64) == 2 * 2 * ((64 + 2 * 32) + (32 + 64))


def test_eager_attention_saves_its_scores() -> None:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=128,
        max_position_embeddings=512,
    )  # fmt: skip
    plain, fused = (shape_of(config, attn_implementation=name).costs[0] for name in ("eager", "sdpa"))
    assert fused.saved_bytes.slope == 0
    assert plain.saved_bytes.slope >= 2 * 2 * 4  # scores and probabilities of 4 heads, bf16


def test_a_line_passes_through_its_points() -> None:
    line = Line.through((128, 256), (10.0, 12.0))
    assert (line.at(128), line.at(256), line.at(0)) == (10.0, 12.0, 8.0)


def test_tied_and_untied_shapes() -> None:
    tied, untied = shape_of(qwen3(num_hidden_layers=2, tie_word_embeddings=True)), shape_of(qwen3(num_hidden_layers=2))
    assert tied.tied
    assert not untied.tied
    assert untied.head - tied.head == pytest.approx(151936 * 4096, rel=1e-6)
    assert list(tied.unit_elements) == ["embedding", "layer.0", "layer.1", "head"]
    assert tied.parameters == sum(tied.unit_elements.values())
