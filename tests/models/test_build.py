"""A model built on meta computes what plain transformers computes, with the same buffers and dtypes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.func import functional_call
from transformers import AutoConfig, AutoModelForCausalLM

from megatrain.errors import UserError
from megatrain.models.build import (
    build_from_memory,
    build_meta_model,
    find_model_folder,
    fp32_parameter_names,
    load_model_config,
    restore_buffers,
)

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LONG = [1.0, 1.5, 2.0, 3.0]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32, "rope_theta": 10000.0}  # fmt: skip
LONGROPE = {"rope_type": "longrope", "short_factor": LONG, "long_factor": LONG[::-1], "rope_theta": 10000.0,
            "original_max_position_embeddings": 16}  # fmt: skip
MLA = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
FAMILIES = {
    "llama": ("llama", {}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "phi3-longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16}),
    "gemma2": ("gemma2", {"sliding_window": 8}),
    "gemma3_text": ("gemma3_text", {"sliding_window": 8}),
    "gpt2": ("gpt2", {"n_embd": 32, "n_head": 4, "n_layer": 2}),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}),
    "deepseek_v3": ("deepseek_v3", MLA),
}


def tiny_config(family: str):
    kind, extra = FAMILIES[family]
    return AutoConfig.for_model(kind, **{**SMALL, **extra})


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def saved(family: str, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family))
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.uniform_(-0.1, 0.1)
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_same_buffers_and_logits_as_from_pretrained(saved: Path, dtype: torch.dtype):
    plain = AutoModelForCausalLM.from_pretrained(saved, dtype=dtype).eval()
    meta = build_meta_model(load_model_config(saved), compute_dtype=dtype).eval()

    weights = dict(plain.named_parameters())
    assert all(p.is_meta and p.dtype == weights[n].dtype for n, p in meta.named_parameters())
    assert weights.keys() == dict(meta.named_parameters()).keys(), "ties must be kept"
    expected = dict(plain.named_buffers())
    persistent = set(meta.state_dict())
    for name, buffer in meta.named_buffers():
        assert (buffer.dtype, buffer.device.type) == (expected[name].dtype, "cpu"), name
        if name in persistent:
            assert not buffer.any(), f"{name} is filled when weights are loaded"
            buffer.copy_(expected[name])
        assert torch.equal(buffer, expected[name]), name

    ids = torch.randint(3, 97, (2, 48), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = plain(input_ids=ids, use_cache=False).logits
        got = functional_call(meta, weights, kwargs={"input_ids": ids}).logits
    assert torch.equal(got, want)


def test_rotary_table_stays_fp32_and_exact_at_long_positions():
    """In bf16, inv_freq would be wrong by more than a full turn at position 32k."""
    config = AutoConfig.for_model("llama", **{**SMALL, "max_position_embeddings": 32768})
    meta = build_meta_model(config, compute_dtype=torch.bfloat16)
    inv_freq = dict(meta.named_buffers())["model.rotary_emb.inv_freq"]
    assert inv_freq.dtype == torch.float32
    exact = 1.0 / 10000.0 ** (torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    angle_error = ((inv_freq.double() - exact) * 32767).abs().max()
    assert angle_error < 1e-2


def test_the_config_is_not_changed():
    config = AutoConfig.for_model("llama", **SMALL)
    before = config.to_dict()
    model = build_meta_model(config, compute_dtype=torch.bfloat16)
    assert config.to_dict() == before
    assert model.config.use_cache is False


def test_attention_defaults_to_sdpa_if_supported():
    assert build_meta_model(tiny_config("llama"), compute_dtype=torch.float32).config._attn_implementation == "sdpa"
    assert build_meta_model(tiny_config("gpt_oss"), compute_dtype=torch.float32).config._attn_implementation == "eager"
    eager = build_meta_model(tiny_config("llama"), compute_dtype=torch.float32, attn_implementation="eager")
    assert eager.config._attn_implementation == "eager"


def test_unknown_attention_is_refused():
    with pytest.raises(UserError, match=r"llama: the model cannot be built: .*no_such_attention"):
        build_meta_model(tiny_config("llama"), compute_dtype=torch.float32, attn_implementation="no_such_attention")


def test_fp32_parameters_follow_the_family():
    deepseek = build_meta_model(tiny_config("deepseek_v3"), compute_dtype=torch.bfloat16)
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in fp32_parameter_names(deepseek, torch.bfloat16)
    assert not [name for name in fp32_parameter_names(deepseek, torch.bfloat16) if "experts" in name]
    assert fp32_parameter_names(deepseek, torch.float32) == set()
    gpt_oss = build_meta_model(tiny_config("gpt_oss"), compute_dtype=torch.float16)
    names = fp32_parameter_names(gpt_oss, torch.float16)
    assert "model.layers.0.input_layernorm.weight" in names, "kept in fp32 under fp16"
    assert {n for n, p in gpt_oss.named_parameters() if p.dtype == torch.float32} == names
    assert fp32_parameter_names(gpt_oss, torch.bfloat16) == set(), "only under fp16"


def test_parameters_that_a_family_always_creates_in_fp32_are_found():
    config = AutoConfig.for_model("hunyuan_v1_moe", **{**SMALL, "num_experts": 4, "moe_topk": 2})
    router = "model.layers.0.mlp.gate.wg.weight"
    meta = build_meta_model(config, compute_dtype=torch.bfloat16)
    assert router in fp32_parameter_names(meta, torch.bfloat16)
    real = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    twin = build_from_memory(real, compute_dtype=torch.bfloat16)
    for model in (meta, twin):
        assert fp32_parameter_names(model, torch.bfloat16) == fp32_parameter_names(meta, torch.bfloat16)
        assert {n for n, p in model.named_parameters() if p.dtype == torch.float32} <= fp32_parameter_names(
            model, torch.bfloat16
        )
    assert fp32_parameter_names(build_meta_model(config, compute_dtype=torch.float32), torch.bfloat16) == set()


def test_from_memory_copies_no_parameter_and_leaves_the_model_alone():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("llama-llama3")).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    use_cache = model.config.use_cache
    twin = build_from_memory(model, compute_dtype=torch.bfloat16)

    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in twin.parameters())
    assert twin.lm_head.weight is twin.model.embed_tokens.weight
    assert all(torch.equal(before[n], t) and not t.is_meta for n, t in model.state_dict().items())
    assert model.config.use_cache == use_cache
    mine = {name: (buffer.data_ptr(), buffer) for name, buffer in model.named_buffers()}
    for name, buffer in twin.named_buffers():
        assert torch.equal(buffer, mine[name][1])
        assert buffer.data_ptr() != mine[name][0], "a separate buffer"
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        logits = functional_call(twin, dict(model.named_parameters()), kwargs={"input_ids": ids}).logits
        assert torch.equal(logits, model(input_ids=ids).logits)


def test_restore_buffers_changes_only_the_given_names():
    config = AutoConfig.for_model("minimax", **{**SMALL, "num_local_experts": 4})
    model = build_meta_model(config, compute_dtype=torch.float32)
    buffers = dict(model.named_buffers())
    one, other = "model.layers.1.self_attn.slope_rate", "model.layers.1.self_attn.query_decay"
    assert not buffers[one].any(), "persistent: filled when weights are loaded"
    restore_buffers(model, [one])
    assert buffers[one].all()
    assert not buffers[other].any()


def test_restore_buffers_raises_if_the_family_does_not_set_one():
    model = build_meta_model(AutoConfig.for_model("apertus", **SMALL), compute_dtype=torch.float32)
    with pytest.raises(UserError, match=r"does not set model\.layers\.0\.mlp\.act_fn\.beta"):
        restore_buffers(model, ["model.layers.0.mlp.act_fn.beta"])


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ({"model_type": "llamma"}, "did you mean llama"),
        ({}, "no model_type"),
        ({"model_type": "t5"}, "encoder-decoder"),
        ({"model_type": "bert"}, "is an encoder"),
        ({"model_type": "vit"}, "no causal language model"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized (gptq)"),
        ({"model_type": "llama", "hidden_size": 30, "num_attention_heads": 4}, "not a valid llama config"),
        ({"model_type": "odd", "auto_map": {"AutoConfig": "configuration_odd.OddConfig"}}, "trust_remote_code"),
    ],
)
def test_refused_configs(tmp_path: Path, raw: dict, says: str):
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UserError) as caught:
        load_model_config(tmp_path)
    assert says in str(caught.value)
    assert "config.json" in str(caught.value)


def test_refused_folders(tmp_path: Path):
    (tmp_path / "smollm2").mkdir()
    with pytest.raises(UserError, match=r"did you mean .*smollm2"):
        load_model_config(tmp_path / "smollm")
    (tmp_path / "Qwen9-135M-Instruct").mkdir()
    with pytest.raises(UserError, match=r"did you mean .*Qwen9-135M-Instruct"):
        load_model_config(tmp_path / "qwen9")
    with pytest.raises(UserError, match=r"nothing is downloaded: run `hf download nobody/nothing`"):
        load_model_config("nobody/nothing")
    with pytest.raises(UserError, match=r"give a folder with config\.json"):
        load_model_config(tmp_path / "other")
    (tmp_path / "smollm2" / "config.jsn").touch()
    with pytest.raises(UserError, match=r"did you mean config\.jsn"):
        load_model_config(tmp_path / "smollm2")
    (tmp_path / "outer" / "inner").mkdir(parents=True)
    (tmp_path / "outer" / "inner" / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"did you mean .*inner"):
        load_model_config(tmp_path / "outer")
    with pytest.raises(UserError, match="not JSON"):
        load_model_config(tmp_path / "outer" / "inner")
    with pytest.raises(UserError, match="is a file"):
        find_model_folder(tmp_path / "outer" / "inner" / "config.json")
