"""Parity check: families that no test covers are verified on a tiny copy of the model's config before a run starts.

    verify_family    loss and every gradient, as an engine computes them, against plain Hugging Face
    verify_packing   documents packed into one row against the same documents alone, in plain Hugging Face
    verify_padding   documents of different lengths in one batch against the same documents alone
    token_wise       which modules of the family compute each token by itself, so that long rows may be computed in chunks

All in fp32 on the CPU, in a fraction of a second each. The first two raise a `UserError` for what differs or cannot run, so that
nothing is silently trained wrong.

[Note: tiny copies]
A tiny copy has the family's own code, switches and kinds of layers, but small widths, few layers and a small vocabulary.
Sizes depend on each other in ways that only the family knows (rotary tables as wide as a head, groups of experts), so there are
several recipes, from the smallest on, and the copy is the first model that plain Hugging Face can run. A recipe that gives a
model of more than `MOST_PARAMETERS` is not built. Where rotary frequencies depend on the length of a document, the length from
which on they change is shortened too, so that documents of the check lie on both sides; see `models/rope.py`.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from megatrain.engine.base import Engine
from megatrain.errors import MegatrainError, UserError
from megatrain.models import routers
from megatrain.models.chunked_mlp import ModuleKey, find_token_wise
from megatrain.models.folder import offline
from megatrain.models.rope import by_length, rope_parameters_of, scaling_by_length, separate_lengths
from megatrain.models.structure import dissect

logger = logging.getLogger(__name__)

MakeEngine = Callable[[nn.Module], Engine]

LOSS_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4
"""Relative, in fp32. Rounding alone causes 1e-7, a missing multiplier or mask 1e-2."""
PACKING_TOLERANCE = 1e-4
"""Of logits, relative to the largest. Documents that see each other change them by more than 1e-2."""
MOST_PARAMETERS = 50_000_000
TOKENS, ROWS = 24, 3
SEEDS = (0, 1)
"""Seeds of batches. Two, because a router's near tie may fall either way in another cut; a real error shows in both."""
DOCUMENTS = ((7, 9, 8), (10, 14))
"""Lengths of the documents in each packed row, shorter and longer than the tiny sliding window. None is longer than the tiny
`index_topk`: sparse attention picks among keys of equal score by their place in the row."""
TESTED: frozenset[str] = frozenset(
    """
    afmoe apertus arcee aria_text bamba biogpt bitnet bloom codegen cohere cohere2 cohere2_moe ctrl cwm deepseek_v2
    deepseek_v3 deepseek_v32 diffllama doge dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon falcon_h1 falcon_mamba
    flex_olmo gemma gemma2 gemma3_text gemma3n_text gemma4_text glm glm4 glm4_moe glm4_moe_lite gpt2 gpt_bigcode gpt_neo
    gpt_neox gpt_neox_japanese gpt_oss gptj granite granite_swa granitemoe granitemoe_swa granitemoehybrid
    granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax jais2 jamba jetmoe kimi_linear laguna lfm2
    lfm2_moe llama llama4_text mamba mamba2 mimo_v2_flash minicpm3 minimax minimax_m2 ministral ministral3 mistral
    mixtral modernbert-decoder mpt nanochat nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe openai-gpt opt
    persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next recurrent_gemma
    rwkv seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma xglm youtu
    """.split()
)
"""Families whose parity with plain Hugging Face is tested; tests/engine/test_parity.py checks the list."""


def _sizes(names: Mapping[int, str]) -> dict[str, int]:
    """Config field -> its size in a tiny copy."""
    return {name: size for size, fields in names.items() for name in fields.split()}


WIDTHS = _sizes({
    64: "hidden_size word_embed_proj_dim embedding_size lru_width",
    96: "intermediate_size ffn_dim intermediate_size_mlp ffn_hidden_size",
    32: "moe_intermediate_size expert_ffn_hidden_size "
        "shared_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size",
    8: "hidden_size_per_layer_input",
    128: "mamba_d_ssm",
})  # fmt: skip
HEADS = _sizes({
    16: "head_dim global_head_dim kv_channels index_head_dim "
        "linear_key_head_dim linear_value_head_dim linear_head_dim mamba_head_dim",
    8: "rotary_dim qk_rope_head_dim mamba_num_heads",
    20: "q_lora_rank",
    24: "kv_lora_rank",
    12: "qk_nope_head_dim v_head_dim",
    4: "index_n_heads linear_num_value_heads linear_num_heads",
    2: "linear_num_key_heads",
})  # fmt: skip
LENGTHS = _sizes({
    97: "vocab_size vocab_size_per_layer_input",
    128: "max_position_embeddings n_ctx",
    8: "sliding_window attention_window_size window_size attention_chunk_size chunk_size "
        "mamba_chunk_size block_size mamba_d_state ssm_state_size state_size",
    16: "local_attention index_topk",
})  # fmt: skip
EXPERTS = _sizes({
    16: "num_experts num_local_experts n_routed_experts moe_num_experts",
    4: "num_experts_per_tok num_experts_per_token top_k_experts moe_topk moe_k n_group zero_expert_num",
    2: "topk_group",
})  # fmt: skip
ORIGINAL_LENGTH = 8
"""Tokens from which on rotary frequencies change in a tiny copy: some of `DOCUMENTS` are shorter, one as long, some longer."""
DENSE_FIRST = ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers", "n_dense_layers")
"""Config fields: the number of layers at the bottom that are of another kind than those above."""
LAYER_LISTS = ("layer_types", "layers_block_type", "mlp_layer_types", "no_rope_layers", "attention_layers")
"""Config fields: the kind of each layer; in some families derived from other fields."""


def verify_family(
    config: PreTrainedConfig,
    make_engine: MakeEngine,
    *,
    always: bool = False,
    trust_remote_code: bool = False,
    router_loss: bool = False,
) -> None:
    """Compare a tiny copy of the family with plain Hugging Face. The answer is cached per config.

    Tested families are compared, too, because a config may have switches that the tests do not cover (layers that share keys and
    values, for example). If no tiny copy can be made, a tested family is accepted.

    Args:
        config: The config of the model to be trained; not changed.
        make_engine: Makes the engine to verify from a tiny model: fp32 on the CPU, rows cut into microbatches.
        always: Ignore cached answers, and require a comparison of tested families, too.
        trust_remote_code: Whether the family's own code may run.
        router_loss: Whether to compare with the auxiliary loss of the routers, too.

    Raises:
        UserError: The engine cannot run the family, or computes something else.
    """
    if always:
        clear_cache()
    refusal = _family_refusal(
        _Key.of(config), make_engine, trust_remote_code, config.model_type in TESTED and not always, router_loss
    )
    if refusal is not None:
        raise UserError(*refusal)


def verify_packing(
    config: PreTrainedConfig,
    *,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    max_tokens: int | None = None,
) -> None:
    """Check that plain Hugging Face keeps packed documents apart: each must get the logits that it gets alone.

    This differs between families and releases of transformers. The answer is cached per config.

    Args:
        config: The config of the model to be trained on packed rows; not changed.
        attn_implementation: The attention implementation that the model will use; None: the family's default.
        trust_remote_code: Whether the family's own code may run.
        max_tokens: Length of a row; None: any. It matters only where rotary frequencies depend on the length.

    Raises:
        UserError: Documents would see each other, or no tiny copy of the config runs.
    """
    _verify_lengths(config, attn_implementation, trust_remote_code, max_tokens)
    crosses = _crosses(config, max_tokens)
    what = _packing_refusal(_Key.of(config), attn_implementation, trust_remote_code, crosses)
    if what is not None:
        raise UserError(
            what, f"model type {config.model_type}", "set data.packing: false, which gives a document per row"
        )


def verify_padding(
    config: PreTrainedConfig,
    *,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    max_tokens: int | None = None,
) -> None:
    """As `verify_packing`, for one document per row: a longer neighbour in the batch, and padding, must change no logits.

    Only models whose rotary frequencies depend on the length are computed; for all others nothing is done.
    """
    _verify_lengths(config, attn_implementation, trust_remote_code, max_tokens)


def _verify_lengths(
    config: PreTrainedConfig, attention: str | None, trust_remote_code: bool, max_tokens: int | None
) -> None:
    """Raise a UserError if the lengths of other documents change the rotary frequencies of a document."""
    found = scaling_by_length(config)
    if found is None or not _crosses(config, max_tokens):
        return
    what = _lengths_refusal(_Key.of(config), attention, trust_remote_code)
    if what is not None:
        kind, original = found
        raise UserError(
            f"the rotary embedding ({kind}) of a document would depend on the lengths of other documents of the step: {what}",
            f"model type {config.model_type}",
            f"set data.max_tokens to {original} or less: up to there its frequencies are the same for every length",
        )


def _crosses(config: PreTrainedConfig, max_tokens: int | None) -> bool:
    """Whether documents of `max_tokens` may be so long that their rotary frequencies change."""
    found = scaling_by_length(config)
    return found is not None and (max_tokens is None or max_tokens > found[1])


def token_wise(
    config: PreTrainedConfig, *, attn_implementation: str | None = None, trust_remote_code: bool = False
) -> Mapping[ModuleKey, str]:
    """Modules that may be computed in chunks of tokens, each with its objection; see `find_token_wise`.

    Empty, with a warning, if no tiny copy of the config runs. The answer is cached per config.
    """
    return _token_wise(_Key.of(config), attn_implementation, trust_remote_code)


def clear_cache() -> None:
    """Forget all cached answers."""
    for remembered in (_family_refusal, _packing_refusal, _lengths_refusal, _token_wise):
        remembered.cache_clear()


@dataclass(frozen=True)
class _Key:
    """Makes a config hashable; two are equal if all their fields are."""

    fields: str
    config: PreTrainedConfig = field(compare=False)

    @classmethod
    def of(cls, config: PreTrainedConfig) -> _Key:
        return cls(json.dumps(config.to_dict(), sort_keys=True, default=str), config)


Refusal = tuple[str, str, str | None]
"""Arguments of a UserError: what, where, remedy."""


@functools.lru_cache(maxsize=64)
def _family_refusal(
    key: _Key, make_engine: MakeEngine, trust_remote_code: bool, tested: bool, router_loss: bool
) -> Refusal | None:
    """Why the family cannot be trained; None if it can."""
    where = f"model type {key.config.model_type}"
    logger.debug("parity check of model type %s on a tiny copy", key.config.model_type)
    try:
        model = tiny_model(key.config, None, trust_remote_code)
    except NoTinyCopy as error:
        if tested:
            logger.debug("%s: %s; accepted, since the test suite covers its parity", where, error)
            return None
        return f"{error}, so the family cannot be verified", where, "it is not supported by the host engine yet"
    # A large coefficient, so that its gradient counts beside that of the cross entropy.
    found = routers.router_loss(model, 1.0) if router_loss else None
    return _difference(routers.with_router_loss(model, found), make_engine, where)


@functools.lru_cache(maxsize=64)
def _packing_refusal(key: _Key, attention: str | None, trust_remote_code: bool, shortened: bool) -> str | None:
    """Why packed rows cannot be trained; None if they can. `shortened`: as for `tiny_configs`."""
    try:
        model = tiny_model(key.config, attention, trust_remote_code, shortened)
    except NoTinyCopy as error:
        return f"{error}, so nothing is known of packed rows"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return f"{type(model).__name__} takes no position_ids, so documents in one row would see each other"
    model = model.eval()
    plain = copy.deepcopy(model)
    separate_lengths(model)
    error = _packing_error(model, plain)
    if error <= PACKING_TOLERANCE:
        return None
    used = getattr(model.config, "_attn_implementation", None) or "its own"
    return (
        f"documents in one row see each other in transformers {transformers.__version__} with {used} attention "
        f"(logits off by {error:.0e})"
    )


@functools.lru_cache(maxsize=64)
def _lengths_refusal(key: _Key, attention: str | None, trust_remote_code: bool) -> str | None:
    """How the logits of a document depend on the lengths of others; None if they do not."""
    try:
        model = tiny_model(key.config, attention, trust_remote_code).eval()
    except NoTinyCopy as error:
        return str(error)
    plain = copy.deepcopy(model)
    separate_lengths(model)
    for name, error in (("packed", _packing_error(model, plain)), ("padded", _padding_error(model, plain))):
        if error > PACKING_TOLERANCE:
            return f"logits of {name} documents are off by {error:.0e} in transformers {transformers.__version__}"
    return None


@functools.lru_cache(maxsize=64)
def _token_wise(key: _Key, attention: str | None, trust_remote_code: bool) -> Mapping[ModuleKey, str]:
    try:
        model = tiny_model(key.config, attention, trust_remote_code).eval()
    except NoTinyCopy as error:
        logger.warning("%s, so it is not known which modules are token-wise: MLPs are computed whole", error)
        return {}
    structure = dissect(model)
    ids_BT = _batch(model, seed=0)["input_ids"]
    return find_token_wise(
        model.get_submodule(structure.base_name),
        list(structure.layer_stack()),
        lambda: model(input_ids=ids_BT, use_cache=False),
    )


def _packing_error(model: Any, plain: Any) -> float:
    """Largest relative difference between the logits of packed documents and those of the same documents alone in `plain`."""
    generator = torch.Generator().manual_seed(0)
    length = sum(DOCUMENTS[0])
    ids_BT = torch.randint(3, _vocabulary(model), (len(DOCUMENTS), length), generator=generator)
    positions_BT = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in DOCUMENTS])
    worst = 0.0
    with torch.no_grad():
        for rows in (slice(0, 2), slice(0, 1)):  # some families have another path for a single row
            packed_BTV = model(input_ids=ids_BT[rows], position_ids=positions_BT[rows], use_cache=False).logits
            for row, documents in enumerate(DOCUMENTS[rows]):
                start = 0
                for n in documents:
                    alone_1TV = _alone(plain, ids_BT[row : row + 1, start : start + n])
                    worst = max(worst, _off(packed_BTV[row, start : start + n], alone_1TV[0]))
                    start += n
    return worst


def _padding_error(model: Any, plain: Any) -> float:
    """As `_packing_error`, for documents that are rows of a padded batch."""
    lengths = [n for row in DOCUMENTS for n in row]
    width = max(lengths)
    ids_BT = torch.randint(3, _vocabulary(model), (len(lengths), width), generator=torch.Generator().manual_seed(0))
    mask_BT = (torch.arange(width)[None] < torch.tensor(lengths)[:, None]).long()
    with torch.no_grad():
        padded_BTV = model(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).logits
        return max(
            _off(padded_BTV[row, :n], _alone(plain, ids_BT[row : row + 1, :n])[0]) for row, n in enumerate(lengths)
        )


def _alone(plain: Any, ids_1T: torch.Tensor) -> torch.Tensor:
    """Logits of one document, by a model that has seen no other: some rotary embeddings remember the longest."""
    if scaling_by_length(plain.config) is not None:
        plain = copy.deepcopy(plain)
    return plain(input_ids=ids_1T, use_cache=False).logits


def _off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference, relative to the largest value."""
    difference = (found - wanted).abs().max() / wanted.abs().max()
    return math.inf if difference.isnan() else difference.item()


# ---------------------------------------------------------------- tiny copies


class NoTinyCopy(Exception):
    """No tiny copy of a config runs in plain Hugging Face."""


def tiny_configs(config: PreTrainedConfig, shortened: bool = True) -> Iterator[PreTrainedConfig]:
    """Small copies of a config, from the smallest to one that only lowers the vocabulary. See [Note: tiny copies].

    `shortened`: with the length lowered from which on rotary frequencies change.
    """
    recipes: tuple[Callable[[Any], Mapping[str, int]], ...] = (
        lambda part: WIDTHS | HEADS | LENGTHS | EXPERTS | _few_heads(part) | _in_proportion(part),
        lambda part: WIDTHS | LENGTHS | EXPERTS | _few_heads(part) | _heads_of_full_size(part),
        lambda part: LENGTHS | EXPERTS,
        lambda part: {"vocab_size": LENGTHS["vocab_size"]},
    )
    for recipe in recipes:
        tiny = copy.deepcopy(config)
        for part in _parts(tiny):
            _shrink(part, recipe(part))
            if shortened:
                _shorten_original_length(part)
        yield tiny


def _parts(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """A config and the configs inside it (of a text model, of a vision tower)."""
    inner = [part for value in vars(config).values() if isinstance(value, PreTrainedConfig) for part in _parts(value)]
    return [config, *inner]


def _few_heads(config: Any) -> dict[str, int]:
    """Four heads, and as many key-value heads if the family has as many, else two."""
    heads, before, kv_before = 4, _size(config, "num_attention_heads"), _size(config, "num_key_value_heads")
    kv_heads = heads if kv_before == before else heads // 2
    return {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "num_kv_heads": heads // 2}


def _in_proportion(config: Any) -> dict[str, int]:
    """Sizes that families derive from other sizes when a config is made, and then store."""
    sizes = {}
    width, small_width = _size(config, "hidden_size"), WIDTHS["hidden_size"]
    latent = _size(config, "qk_rope_head_dim")
    if latent and latent == _size(config, "head_dim"):  # latent attention calls the rotary part of a head `head_dim`
        sizes["head_dim"] = HEADS["qk_rope_head_dim"]
    attention_width = _size(config, "attention_hidden_size")
    if width and attention_width:
        sizes["attention_hidden_size"] = small_width * attention_width // width
        sizes["attention_head_dim"] = sizes["attention_hidden_size"] // 4
    for heads, head_size in (
        ("mamba_n_heads", "mamba_d_head"),
        ("n_mamba_heads", "mamba_headdim"),
        ("num_heads", "head_dim"),
    ):
        if heads in vars(config) and (_size(config, "mamba_expand") or _size(config, "expand")):
            inner = small_width * (_size(config, "mamba_expand") or _size(config, "expand") or 1)
            sizes[head_size] = min(16, _size(config, head_size) or 16)
            sizes[heads] = inner // sizes[head_size]
    return sizes


def _heads_of_full_size(config: Any) -> dict[str, int]:
    """Four heads of the original size, so that tables as wide as a head (long-context factors, rotary sections) still fit."""
    heads, width = _size(config, "num_attention_heads"), _size(config, "hidden_size")
    return {"hidden_size": 4 * (width // heads)} if heads and width else {}


def _get(config: Any, name: str) -> Any:
    """A field, None if it does not exist. If it differs between layers, the value of most of them."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers refuses to read such a field from the whole model's config
        return config.to_dict()[name]


def _size(config: Any, name: str) -> int | None:
    value = _get(config, name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _set(config: Any, name: str, value: Any) -> None:
    """Set a field, unless the family derives it from other fields."""
    attribute = getattr(type(config), name, None)
    if not (isinstance(attribute, property) and attribute.fset is None):
        setattr(config, name, value)


def _shrink(config: Any, sizes: Mapping[str, int]) -> None:
    """Lower a config's sizes to the given ones, and its number of layers as far as every kind of layer remains."""
    by_layer = config.to_dict().get("per_layer_config") or {}
    ratios = {
        int(layer): {name: value / size for name, value in fields.items() if (size := _size(config, name))}
        for layer, fields in by_layer.items()
    }
    for name, value in sizes.items():
        present = _get(config, name)
        if isinstance(present, list) and all(type(size) is int for size in present):  # one size per layer
            _set(config, name, [min(size, value) for size in present])
        elif (_size(config, name) or 0) > value:
            _set(config, name, value)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        present = _get(config, name)
        largest = max(present, default=0) if isinstance(present, list) else present
        if isinstance(largest, int) and largest >= (_size(config, "vocab_size") or 0):
            _set(config, name, 0)
    for name, value in list(vars(config).items()):
        if isinstance(value, float) and ("dropout" in name or "pdrop" in name or "jitter" in name):
            _set(config, name, 0.0)
    _keep_first_layers(config)
    if by_layer:  # heads that are twice as wide in some layers stay so
        config.per_layer_config = {
            layer: {name: int(ratio * (_size(config, name) or 0)) for name, ratio in fields.items()}
            for layer, fields in ratios.items()
            if layer < config.num_hidden_layers
        }


def _shorten_original_length(config: Any) -> None:
    """Let rotary frequencies that depend on the length change within the documents of the check."""
    for rope in rope_parameters_of(config):
        kind = str(rope.get("rope_type", rope.get("type")))
        if not by_length(kind):
            continue
        if "dynamic" in kind:
            _set(config, "max_position_embeddings", ORIGINAL_LENGTH)
        for holder in (rope, vars(config)):
            if "original_max_position_embeddings" in holder:
                holder["original_max_position_embeddings"] = ORIGINAL_LENGTH


def _keep_first_layers(config: Any) -> None:
    count = _size(config, "num_hidden_layers")
    if not count:
        return
    shared = _size(config, "num_kv_shared_layers")
    often = 1 if shared else 2  # two of each kind, because layers of the same kind may share something
    lists = [value for name in LAYER_LISTS if isinstance(value := _get(config, name), list)]
    places = [[i for i, one in enumerate(kinds) if one == kind][:often] for kinds in lists for kind in set(kinds)]
    layers = max([2, *(found[-1] + 1 for found in places)])
    layers = max([layers, *((_size(config, name) or 0) + often for name in DENSE_FIRST)])
    if shared:  # the upper half of the copy uses keys and values of the lower half
        config.num_kv_shared_layers = shared = min(shared, layers)
        layers += shared
    layers = min(count, layers)
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == count:  # one entry per layer
            _set(config, name, value[:layers])
    config.num_hidden_layers = layers


def tiny_model(config: PreTrainedConfig, attention: str | None, trust_remote_code: bool, shortened: bool = True) -> Any:
    """The first tiny copy that plain Hugging Face can run. Restores the random state.

    Raises:
        NoTinyCopy: None does.
    """
    state, problems = torch.get_rng_state(), []
    try:
        for tiny in tiny_configs(config, shortened):
            torch.manual_seed(0)
            try:
                model = _build(tiny, attention, trust_remote_code)
                _plain(model, _batch(model, seed=0))
                return model
            except Exception as error:
                # A config that does not scale down is not the user's fault: try the next recipe, whatever this one raised.
                problems.append(error)
                logger.debug("a tiny copy of %s does not run", config.model_type, exc_info=error)
    finally:
        torch.set_rng_state(state)
    raise NoTinyCopy(f"no tiny copy of this config runs in plain Hugging Face ({_first_line(problems[0])})")


def _build(config: PreTrainedConfig, attention: str | None, trust_remote_code: bool) -> nn.Module:
    """A tiny random model without neutral values: norms differ from 1, biases and router corrections from 0."""
    extra: dict[str, Any] = {"attn_implementation": attention} if attention else {}
    options = {"dtype": torch.float32, "trust_remote_code": trust_remote_code, **extra}
    with offline(), torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(copy.deepcopy(config), **options).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"its smallest copy has {size / 1e6:.0f} M parameters")
    with offline():
        model = AutoModelForCausalLM.from_config(config, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
        for name, buffer in model.named_buffers():
            if "bias" in name and buffer.is_floating_point():
                buffer.add_(torch.randn_like(buffer), alpha=0.05)
    for module in model.modules():
        if isinstance(module, nn.Dropout):  # some are made from constants instead of config fields
            module.p = 0.0
    return model.train()


def _vocabulary(model: Any) -> int:
    return int(model.config.get_text_config().vocab_size)


def _batch(model: Any, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, _vocabulary(model), (ROWS, TOKENS), generator=generator)
    labels = ids.clone()
    labels[0, :5] = -100
    batch = {"input_ids": ids, "labels": labels}
    if getattr(model.config, "output_router_logits", False):  # routers do not count padding
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][1, -4:] = 0
        labels[1, -4:] = -100
    return batch


def _plain(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients by plain Hugging Face.

    Raises:
        ValueError: They are not finite, so nothing can be compared.
    """
    model = copy.deepcopy(model)  # some families leave state of the sequence in their modules
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    output = model(**inputs, use_cache=False)
    logits = output.logits.float()
    labels = batch["labels"][:, 1:].reshape(-1)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(len(labels), -1), labels)
    found = routers.router_loss(model, None)
    if found is not None:
        loss = loss + found.coefficient * output.aux_loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    if not all(bool(g.isfinite().all()) for g in gradients.values()):
        raise ValueError("its gradients are not finite")
    return loss.item(), gradients


# ---------------------------------------------------------------- the comparison


def _difference(model: Any, make_engine: MakeEngine, where: str) -> Refusal | None:
    """Compare loss and every gradient of a batch between an engine and plain Hugging Face."""
    differences: list[str] = []
    for seed in SEEDS:
        batch = _batch(model, seed)
        try:
            with make_engine(model) as engine:
                result = engine.backward(batch)
                found = dict(engine.named_gradients())
        except UserError as error:
            return f"this family cannot be streamed: {error.what}", where, error.remedy
        except MegatrainError:
            raise
        except Exception as error:
            # The family's code may fail in any way; that is an answer, too, and nothing is trained.
            logger.debug("%s cannot be streamed", where, exc_info=error)
            what = f"this family cannot be streamed: {_first_line(error)}"
            return what, where, "it is not supported by the host engine yet"
        loss, gradients = _plain(model, batch)
        assert result.loss is not None
        extra = routers.router_loss(model, None)
        mine = result.loss + (extra.coefficient * result.routing.get("aux_loss", 0.0) if extra is not None else 0.0)
        differences = find_differences(mine, loss, found, gradients)
        if not differences:
            return None
    more = f"; and {len(differences) - 3} more" if len(differences) > 3 else ""
    return (
        f"computed differently from plain Hugging Face: {'; '.join(differences[:3])}{more}",
        where,
        "this model is not supported by the host engine; nothing was trained",
    )


def find_differences(
    loss: float,
    wanted_loss: float,
    found: Mapping[str, torch.Tensor],
    wanted: Mapping[str, torch.Tensor],
    loss_tolerance: float = LOSS_TOLERANCE,
    gradient_tolerance: float = GRADIENT_TOLERANCE,
) -> list[str]:
    """A line for the loss and each gradient that is off. Small gradients may be pure rounding, so the largest counts too."""
    largest = max((g.norm().item() for g in wanted.values()), default=0.0)
    differences = []
    if not abs(loss - wanted_loss) <= loss_tolerance * abs(wanted_loss):
        differences.append(f"loss {loss:.6f} instead of {wanted_loss:.6f}")
    for name, gradient in wanted.items():
        if name not in found:
            differences.append(f"no gradient of {name}")
            continue
        norm, error = gradient.norm().item(), (found[name] - gradient).norm().item()
        if not error <= gradient_tolerance * (norm + 1e-3 * largest):
            differences.append(f"gradient of {name} off by {error / max(norm, 1e-30):.0e} of its norm")
    return differences


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
