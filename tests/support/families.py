"""Model families of the parity tests: one tiny, random model per architecture of transformers.

A family is a model type with the config values that make it small but keep every kind of its layers. `build` makes a model
whose weights leave no part of it negligible, `batch` makes rows for it; both depend on their arguments alone. `FAMILIES` are
those whose layers pass on hidden states and nothing else; in `UNUSUAL` ones layers share weights, keys or values, or are not a
stack of `num_hidden_layers` entries.

Run this file to see which families build and run under the installed transformers:

    python tests/support/families.py [name ...]

Legend: B rows, T tokens per row.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

PAD, BOS, EOS = 0, 1, 2
VOCAB = 251  # prime, so that no split into equal parts fits
NO_TARGET = -100

Kind = Literal["plain", "padded", "masked", "packed"]
KINDS: tuple[Kind, ...] = ("plain", "padded", "masked", "packed")

TAGS = {
    "dense": "one MLP per layer",
    "moe": "routed experts",
    "sliding": "some layers attend to a window of a few tokens",
    "nope": "some layers have no positions",
    "absolute": "learnt or sinusoidal positions added to the embedding",
    "alibi": "positions as an attention bias",
    "softcap": "attention scores or logits pass through tanh",
    "multiplier": "embedding, residual or logits are scaled",
    "linear": "linear attention, state space or convolution layers",
    "dropout": "dropout on embedding or residual (nearly all families have it on attention)",
    "jitter": "noise on the router's input during training",
    "idle_expert": "no token reaches expert 0 of any router",
    "frozen": "has parameters with requires_grad=False",
    "no_gradient": "has trainable parameters that autograd never reaches",
    "packing_varies": "keeps packed documents apart only in some releases of transformers",
    "shared_weights": "layers share modules with each other",
    "shared_kv": "layers use keys and values of earlier layers",
    "no_stack": "no ModuleList of num_hidden_layers entries",
}


@dataclass(frozen=True)
class Family:
    """One architecture at toy size.

    Attributes:
        name: Unique; the pytest id.
        model_type: Key of `transformers.CONFIG_MAPPING`.
        overrides: Config values that override those of `SMALL`.
        packable: Whether plain transformers keeps packed documents apart when it gets restarting `position_ids` and no mask, in
            every supported release; verified by `test_reference.py`.
        tags: Properties by which tests select families, see `TAGS`.
        attention: Attention implementation; `eager` only where transformers has no sdpa for the family.
        ties: Values of `tie_word_embeddings` that the family honours.
    """

    name: str
    model_type: str
    overrides: dict[str, Any]
    packable: bool
    tags: frozenset[str]
    attention: str
    ties: tuple[bool, ...]

    def __str__(self) -> str:
        return self.name


def _family(
    name: str,
    tags: str,
    *,
    of: str | None = None,
    packable: bool = True,
    attention: str = "sdpa",
    ties: tuple[bool, ...] = (False, True),
    **overrides: Any,
) -> Family:
    words = frozenset(tags.split())
    assert words <= TAGS.keys(), f"{name}: unknown tags {words - TAGS.keys()}"
    return Family(name, of or name, overrides, packable, words, attention, ties)


# Each family uses the keys that its config class declares.
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "sliding_window": 8,
    "initializer_range": 0.08,
    "init_std": 0.08,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "use_cache": False,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "layerdrop": 0.0,
}
DROPOUT_KEYS = (
    "attention_dropout",
    "attention_probs_dropout_prob",
    "attn_pdrop",
    "activation_dropout",
    "dropout",
    "emb_pdrop",
    "embd_pdrop",
    "embed_dropout",
    "embedding_dropout",
    "hidden_dropout",
    "hidden_dropout_prob",
    "mlp_dropout",
    "resid_dropout",
    "resid_pdrop",
    "residual_dropout",
)
JITTER_KEYS = ("router_jitter_noise", "input_jitter_noise")
# What routers add to the scores before they choose; a buffer in some families, a frozen parameter in others.
ROUTER_BIASES = ("e_score_correction_bias", "expert_bias", "router.bias")

SLIDING_FULL = ["sliding_attention", "full_attention"] * 2
LINEAR_FULL: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
CONV_FULL: dict[str, Any] = {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3}
MULTIPLIERS: dict[str, Any] = {
    "embedding_multiplier": 2.0,
    "logits_scaling": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
}
MLA: dict[str, Any] = {
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
DELTA_NET: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MAMBA2: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8}
GEMMA_PER_LAYER: dict[str, Any] = {
    "layer_types": SLIDING_FULL,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
}
GEMMA3N: dict[str, Any] = GEMMA_PER_LAYER | {
    "laurel_rank": 8,
    "num_kv_shared_layers": 0,
    "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
}
GEMMA4: dict[str, Any] = GEMMA_PER_LAYER | {"global_head_dim": 16}
ZAMBA2: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "hybrid"] * 2,
    "n_mamba_heads": 8,
    "mamba_d_state": 8,
    "chunk_size": 8,
}

DENSE: tuple[Family, ...] = (
    _family("llama", "dense", attention_bias=True, mlp_bias=True),
    _family("qwen2", "dense sliding", use_sliding_window=True, max_window_layers=2),
    _family("qwen3", "dense"),
    _family("mistral", "dense sliding"),
    _family("ministral", "dense sliding", layer_types=SLIDING_FULL),
    _family("ministral3", "dense"),
    _family("phi", "dense dropout", qk_layernorm=True),
    _family("phi3", "dense sliding dropout"),
    _family("stablelm", "dense dropout", use_qkv_bias=True, qk_layernorm=True),
    _family("stablelm_parallel", "dense dropout", of="stablelm", use_parallel_residual=True),
    _family("olmo", "dense", clip_qkv=0.5),
    _family("olmo2", "dense"),
    _family("olmo3", "dense sliding"),
    _family("starcoder2", "dense sliding dropout"),
    _family("granite", "dense multiplier", **MULTIPLIERS),
    _family("granite_swa", "dense sliding multiplier", attention="eager", **MULTIPLIERS),
    _family("gemma", "dense multiplier"),
    _family(
        "gemma2",
        "dense sliding softcap multiplier",
        attention="eager",
        query_pre_attn_scalar=16,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
        layer_types=SLIDING_FULL,
    ),
    _family("gemma3_text", "dense sliding multiplier", query_pre_attn_scalar=16, layer_types=SLIDING_FULL),
    _family("gemma3n_text", "dense sliding softcap multiplier", **GEMMA3N),
    _family("gemma4_text", "dense sliding multiplier", **GEMMA4),
    _family("vaultgemma", "dense sliding softcap multiplier", attention="eager", layer_types=SLIDING_FULL),
    _family("cohere", "dense multiplier", logit_scale=0.25, use_qk_norm=True),
    _family("cohere2", "dense sliding nope multiplier", logit_scale=0.25),
    _family("glm", "dense"),
    _family("glm4", "dense"),
    _family("smollm3", "dense nope", no_rope_layers=[1, 1, 1, 0]),
    _family("nemotron", "dense"),
    _family("helium", "dense"),
    _family("ernie4_5", "dense"),
    _family("seed_oss", "dense dropout"),
    _family("exaone4", "dense sliding nope"),
    _family("hunyuan_v1_dense", "dense"),
    _family("apertus", "dense"),
    _family("arcee", "dense"),
    _family("bitnet", "dense"),
    _family("diffllama", "dense", attention_dropout=0.0),  # it refuses any other value
    _family("doge", "dense dropout packing_varies", packable=False),
    _family("cwm", "dense sliding"),
    _family("nanochat", "dense softcap"),
    _family("minicpm3", "dense multiplier", scale_emb=3, dim_model_base=32, **MLA),
    _family("youtu", "dense", **MLA),
    _family("jais2", "dense"),
    _family("hyperclovax", "dense multiplier", **MULTIPLIERS),
    _family("modernbert-decoder", "dense sliding dropout", local_attention=16),
)

GPT_STYLE: tuple[Family, ...] = (
    _family("gpt2", "dense absolute dropout"),
    _family(
        "gpt_neo",
        "dense absolute sliding dropout",
        attention="eager",
        attention_types=[[["global", "local"], 2]],
        window_size=8,
    ),
    _family("gpt_neox", "dense dropout"),
    _family("gpt_neox_sequential", "dense dropout", of="gpt_neox", use_parallel_residual=False),
    _family("gpt_neox_japanese", "dense dropout", attention="eager"),
    _family("gptj", "dense dropout", attention="eager", rotary_dim=8),
    _family("codegen", "dense dropout", attention="eager", rotary_dim=8),
    _family("gpt_bigcode", "dense absolute dropout"),
    _family("opt", "dense absolute dropout", packable=False, ffn_dim=96),
    _family(
        "opt_post_norm",
        "dense absolute dropout",
        of="opt",
        packable=False,
        ffn_dim=96,
        do_layer_norm_before=False,
        word_embed_proj_dim=48,
    ),
    _family("xglm", "dense absolute dropout", packable=False, attention="eager", ffn_dim=96),
    _family("biogpt", "dense absolute dropout", packable=False),
    _family("openai-gpt", "dense absolute dropout", packable=False, attention="eager"),
    _family("ctrl", "dense absolute dropout", dff=96),
    _family("bloom", "dense alibi dropout", packable=False, attention="eager"),
    _family("falcon", "dense dropout packing_varies", packable=False, bias=True),
    _family(
        "falcon_new",
        "dense dropout packing_varies",
        of="falcon",
        packable=False,
        new_decoder_architecture=True,
        num_kv_heads=2,
    ),
    _family(
        "falcon_alibi",
        "dense alibi dropout packing_varies",
        of="falcon",
        packable=False,
        alibi=True,
        multi_query=False,
        parallel_attn=False,
    ),
    _family("mpt", "dense alibi", packable=False, attention="eager"),
    _family("persimmon", "dense dropout"),
)

MIXTURES: tuple[Family, ...] = (
    _family("mixtral", "moe sliding jitter"),
    _family("qwen2_moe", "moe", mlp_only_layers=[0]),
    _family("qwen3_moe", "moe", decoder_sparse_step=2),
    _family("olmoe", "moe"),
    _family("flex_olmo", "moe"),
    _family("granitemoe", "moe multiplier", **MULTIPLIERS),
    _family("granitemoeshared", "moe multiplier", shared_intermediate_size=40, **MULTIPLIERS),
    _family("granitemoe_swa", "moe sliding multiplier", attention="eager", **MULTIPLIERS),
    _family("gpt_oss", "moe sliding idle_expert", packable=False, attention="eager", layer_types=SLIDING_FULL),
    _family("gemma4_moe", "moe sliding", of="gemma4_text", enable_moe_block=True, top_k_experts=2, **GEMMA4),
    _family("deepseek_v2", "moe", first_k_dense_replace=1, n_shared_experts=1, **MLA),
    _family(
        "deepseek_v3",
        "moe idle_expert",
        first_k_dense_replace=1,
        n_routed_experts=6,
        n_group=2,
        topk_group=1,
        **MLA,
    ),
    _family(
        "deepseek_v32",
        "moe idle_expert no_gradient",
        index_topk=8,
        index_head_dim=16,
        index_n_heads=4,
        n_group=1,
        topk_group=1,
        **MLA,
    ),
    _family("glm4_moe", "moe idle_expert", use_qk_norm=True),
    _family("glm4_moe_lite", "moe idle_expert", **MLA),
    _family("ernie4_5_moe", "moe idle_expert frozen", moe_num_experts=4, moe_k=2, moe_num_shared_experts=1),
    _family("dots1", "moe sliding idle_expert", n_shared_experts=1, first_k_dense_replace=1, layer_types=SLIDING_FULL),
    _family("phimoe", "moe sliding jitter", lm_head_bias=True),
    _family("hunyuan_v1_moe", "moe", moe_topk=2),
    _family("jetmoe", "moe", kv_channels=16),
    _family("afmoe", "moe sliding multiplier idle_expert frozen", packable=False, mup_enabled=True),
    _family("minimax_m2", "moe idle_expert jitter"),
    _family(
        "llama4_text",
        "moe sliding nope packing_varies",
        packable=False,
        intermediate_size_mlp=96,
        moe_layers=[1, 3],
        attention_chunk_size=8,
    ),
    _family("exaone_moe", "moe sliding nope idle_expert"),
    _family("solar_open", "moe idle_expert"),
    _family("cohere2_moe", "moe sliding nope"),
    _family("aria_text", "moe", moe_num_experts=4),
    _family("hy_v3", "moe idle_expert"),
    _family("laguna", "moe sliding idle_expert frozen", layer_types=SLIDING_FULL),
    _family("mimo_v2_flash", "moe sliding idle_expert", attention="eager"),
)

LINEAR: tuple[Family, ...] = (
    _family("qwen3_next", "moe linear", packable=False, **DELTA_NET, **LINEAR_FULL),
    _family("qwen3_5_text", "dense linear", packable=False, **DELTA_NET, **LINEAR_FULL),
    _family("qwen3_5_moe_text", "moe linear", packable=False, **DELTA_NET, **LINEAR_FULL),
    _family("olmo_hybrid", "dense linear", packable=False, **DELTA_NET, **LINEAR_FULL),
    _family(
        "kimi_linear",
        "moe linear nope idle_expert",
        packable=False,
        ties=(False,),
        linear_head_dim=16,
        linear_num_heads=4,
        **MLA,
        **LINEAR_FULL,
    ),
    _family("minimax", "moe linear jitter", packable=False, block_size=8),
    _family("lfm2", "dense linear", packable=False, **CONV_FULL),
    _family("lfm2_moe", "moe linear idle_expert", packable=False, **CONV_FULL),
    _family("recurrent_gemma", "dense linear sliding softcap", packable=False, num_hidden_layers=3, lru_width=64),
    _family("mamba", "dense linear", packable=False, attention="eager", num_hidden_layers=2, state_size=8),
    _family("falcon_mamba", "dense linear", packable=False, attention="eager", num_hidden_layers=2, state_size=8),
    _family(
        "mamba2",
        "dense linear",
        packable=False,
        attention="eager",
        num_hidden_layers=2,
        num_heads=8,
        state_size=8,
        n_groups=2,
        chunk_size=8,
    ),
    _family("jamba", "moe linear nope", packable=False, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8),
    _family("bamba", "dense linear", packable=False, attn_layer_indices=[1], num_hidden_layers=2, **MAMBA2),
    _family(
        "falcon_h1",
        "dense linear multiplier",
        packable=False,
        num_hidden_layers=2,
        mamba_d_ssm=128,
        embedding_multiplier=2.0,
        lm_head_multiplier=0.5,
        key_multiplier=0.7,
        **MAMBA2,
    ),
    _family(
        "granitemoehybrid",
        "moe linear multiplier",
        packable=False,
        shared_intermediate_size=40,
        **MAMBA2,
        **MULTIPLIERS,
        **LINEAR_FULL,
    ),
    _family(
        "nemotron_h",
        "moe linear idle_expert",
        packable=False,
        ties=(False,),
        mamba_num_heads=8,
        mamba_head_dim=16,
        ssm_state_size=8,
        n_groups=2,
        chunk_size=8,
        moe_shared_expert_intermediate_size=40,
    ),
    _family("rwkv", "dense linear", packable=False, attention="eager", num_hidden_layers=2),
)

FAMILIES: tuple[Family, ...] = DENSE + GPT_STYLE + MIXTURES + LINEAR

UNUSUAL: tuple[Family, ...] = (
    # untied, transformers unties the blocks that its layers share as well
    _family("zamba2", "dense linear shared_weights", packable=False, ties=(True,), **ZAMBA2),
    _family("gemma3n_shared_kv", "dense shared_kv", of="gemma3n_text", **GEMMA3N | {"num_kv_shared_layers": 2}),
    _family("gemma4_shared_kv", "dense shared_kv", of="gemma4_text", **GEMMA4 | {"num_kv_shared_layers": 2}),
    _family("hrm_text", "dense no_stack frozen"),
    _family("longcat_flash", "moe no_stack", num_layers=2, zero_expert_num=2, **MLA | {"head_dim": 8}),
)

BY_NAME: dict[str, Family] = {family.name: family for family in FAMILIES + UNUSUAL}
assert len(BY_NAME) == len(FAMILIES + UNUSUAL), "two families of one name"

# One of each trait, for tests that cross families with something else.
CORE: tuple[Family, ...] = tuple(
    BY_NAME[name]
    for name in (
        "llama gemma2 gemma3n_text granite smollm3 gpt2 gpt_neox bloom opt "
        "qwen3_moe gpt_oss deepseek_v3 deepseek_v32 ernie4_5_moe phimoe qwen3_next bamba"
    ).split()
)


def config(family: Family, tie: bool | None = None, dropout: float = 0.0, jitter: float = 0.0) -> PreTrainedConfig:
    """The family's toy config; the arguments are those of `build`."""
    assert tie is None or tie in family.ties, f"{family} does not honour tie_word_embeddings={tie}"
    config_class = CONFIG_MAPPING[family.model_type]
    known = {f.name for f in dataclasses.fields(config_class)} | set(config_class.attribute_map)
    values = SMALL | dict.fromkeys(DROPOUT_KEYS, dropout) | dict.fromkeys(JITTER_KEYS, jitter)
    if tie is not None:
        values["tie_word_embeddings"] = tie
    return config_class(**{key: value for key, value in values.items() if key in known} | family.overrides)


def build(
    family: Family,
    seed: int,
    dtype: torch.dtype = torch.float32,
    tie: bool | None = None,
    dropout: float = 0.0,
    jitter: float = 0.0,
) -> PreTrainedModel:
    """A model in train mode whose weights leave no part of it negligible; depends on its arguments alone.

    Args:
        family: The family.
        seed: Seed of all random numbers; the global generator is restored.
        dtype: Type of the parameters; buffers keep the model's.
        tie: `tie_word_embeddings`, one of `family.ties`; None: the family's default.
        dropout: Probability of every dropout on embedding, residual, attention and activation.
        jitter: Width of the routers' noise. If both are zero, the forward is deterministic.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config(family, tie, dropout, jitter), attn_implementation=family.attention, dtype=dtype
        )
        _roughen(model, idle_expert="idle_expert" in family.tags)
    return model.train()


@torch.no_grad()
def _roughen(model: PreTrainedModel, idle_expert: bool) -> None:
    """Perturb everything that transformers initialises to a constant (norms and scales to one, biases to zero), so that leaving
    any of it out changes the loss."""
    state = model.state_dict(keep_vars=True)  # persistent buffers only, not rotary tables
    scalars = {name: b for name, b in model.named_buffers() if name in state and name.endswith(("bias", "scalar"))}
    for name, tensor in [*model.named_parameters(), *scalars.items()]:
        if tensor.ndim < 2 or not tensor.any():
            tensor += 0.1 * torch.randn_like(tensor)
        if name.endswith("A_log"):
            tensor -= 2.0  # slow decay: a token's state still matters at the end of a short row
        if tensor.shape[:1] == (VOCAB,) and tensor.ndim == 2:
            # Families that divide by a magnitude get NaN gradients from a padding row of zeros.
            tensor[PAD] = 0.1 * torch.randn_like(tensor[PAD])
        if idle_expert and name.endswith(ROUTER_BIASES):
            tensor[..., 0] = -30.0


def batch(family: Family, seed: int, rows: int, tokens: int, kind: Kind = "plain") -> dict[str, Tensor]:
    """Rows of random tokens, some of them without a target; depends on its arguments alone.

    Args:
        family: Its vocabulary is used.
        seed: Seed of all random numbers; the global generator is not used.
        rows: B.
        tokens: T, at least 8.
        kind: `plain` full rows; `padded` rows of unequal length, padded on the right; `masked` the same rows with an
            `attention_mask`; `packed` several documents per row with `document_ids` and restarting `position_ids`, the tail of
            each row a document of padding.

    Returns:
        int64 tensors of shape (B, T): `input_ids`, `labels` (unshifted, -100 = no target) and those of the kind.
    """
    assert tokens >= 8, tokens
    generator = torch.Generator().manual_seed(seed)

    def randint(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    vocabulary = family.overrides.get("vocab_size", VOCAB)
    ids = torch.randint(EOS + 1, vocabulary, (rows, tokens), generator=generator)
    labels = ids.clone()
    labels[torch.rand(rows, tokens, generator=generator) < 0.1] = NO_TARGET
    result = {"input_ids": ids, "labels": labels}
    if kind == "packed":
        result |= {"document_ids": torch.zeros_like(ids), "position_ids": torch.zeros_like(ids)}
        for row in range(rows):
            end = tokens - randint(1, 3)
            starts = [0]
            while starts[-1] < end:
                starts.append(min(end, starts[-1] + randint(1, tokens // 2)))
            for document, (start, stop) in enumerate(zip(starts, [*starts[1:], tokens], strict=True)):
                result["document_ids"][row, start:stop] = document
                result["position_ids"][row, start:stop] = torch.arange(stop - start)
                labels[row, start] = NO_TARGET  # the token before it belongs to another document
            ids[row, end:], labels[row, end:] = PAD, NO_TARGET
        return result
    for row in range(rows):
        labels[row, : randint(1, tokens // 4)] = NO_TARGET
        if kind != "plain" and row > 0:  # the first row stays full: T is the length of the longest
            end = randint(tokens // 2, tokens - 1)
            ids[row, end:], labels[row, end:] = PAD, NO_TARGET
    if kind == "masked":
        result["attention_mask"] = (ids != PAD).long()
    return result


def main(names: Sequence[str]) -> None:
    """Print one line per family: its size, and whether and how fast it builds and runs."""
    transformers.logging.set_verbosity_error()
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")
    failed = 0
    for family in [BY_NAME[name] for name in names] or BY_NAME.values():
        start = time.perf_counter()
        try:
            model = build(family, seed=0)
            built = time.perf_counter()
            model(**batch(family, seed=0, rows=2, tokens=24), use_cache=False).loss.backward()
        except Exception as error:
            failed += 1
            print(f"{family.name:20s} FAILS  {type(error).__name__}: {str(error).splitlines()[0][:90]}")
            continue
        parameters = sum(p.numel() for p in model.parameters())
        seconds = f"build {built - start:.2f} s, step {time.perf_counter() - built:.2f} s"
        print(f"{family.name:20s} {parameters:7d} parameters, {seconds}: {' '.join(sorted(family.tags))}", flush=True)
    print(f"{len(names or BY_NAME) - failed} families run, {failed} fail")


if __name__ == "__main__":
    main(sys.argv[1:])
