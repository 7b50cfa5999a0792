"""The parity check accepts what is computed exactly, and refuses everything else with a reason."""

from __future__ import annotations

import copy
import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig

from engines import host_engine
from families import BY_NAME, CORE, FAMILIES, UNUSUAL, Family, batch, build, config
from megatrain.engine import parity_check as check
from megatrain.engine.host.engine import parity_engine
from megatrain.engine.parity_check import tiny_configs, verify_packing
from megatrain.errors import MegatrainError, UserError
from megatrain.models.shell import Shell
from reference import gradient_error, reference_loss_and_grads


def verify_family(config: PreTrainedConfig, **options: Any) -> None:
    check.verify_family(config, parity_engine, **options)


@pytest.fixture(autouse=True)
def _no_answer_is_cached() -> None:
    check.clear_cache()


def untested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "TESTED", frozenset())


# ------------------------------------------------------------------ families


@pytest.mark.parametrize("family", CORE, ids=str)
def test_an_untested_family_is_verified_and_accepted(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    untested(monkeypatch)
    verify_family(config(family))


@pytest.mark.parametrize("family", UNUSUAL, ids=str)
def test_an_unusual_family_is_computed_exactly_or_refused_with_a_reason(family: Family) -> None:
    """Plain Hugging Face confirms each answer."""
    refusal = refusal_of(lambda: verify_family(config(family)))
    if refusal is None:
        assert streaming_error(family) < 1e-5
        return
    assert refusal.where == f"model type {family.model_type}"
    assert refusal.remedy
    assert len(str(refusal)) < 700
    assert "Traceback" not in str(refusal)


@pytest.mark.parametrize("packed", [False, True])
def test_layers_with_wider_heads_than_others_are_streamed_exactly(packed: bool) -> None:
    """Gemma 4 as published: transformers refuses to read `head_dim` from its config."""
    family = BY_NAME["gemma4_text"]
    family = dataclasses.replace(family, overrides=family.overrides | {"global_head_dim": 32})
    assert streaming_error(family, "packed" if packed else "plain") < 1e-5
    verify_family(config(family))
    verify_packing(config(family))


def refusal_of(check: Callable[[], None]) -> UserError | None:
    try:
        check()
    except UserError as refusal:
        return refusal
    return None


@pytest.mark.parametrize("name", ["gemma3n_shared_kv", "gemma4_shared_kv"])
def test_a_tested_family_with_an_untested_switch_is_verified(name: str) -> None:
    """Layers that share keys and values: the published checkpoints of a tested family have them."""
    family = BY_NAME[name]
    assert family.model_type in check.TESTED
    tiny = next(tiny_configs(config(family)))
    assert 0 < tiny.num_kv_shared_layers < tiny.num_hidden_layers
    error = streaming_error(family)
    if error < 1e-5:
        verify_family(config(family))
    else:
        with pytest.raises(UserError, match="computed differently"):
            verify_family(config(family))


def streaming_error(family: Family, kind: Any = "plain") -> float:
    """Largest relative difference of any gradient from plain Hugging Face's, in two microbatches."""
    model, rows = build(family, seed=0), batch(family, seed=1, rows=3, tokens=24, kind=kind)
    want = reference_loss_and_grads(copy.deepcopy(model), rows)
    with host_engine(model, device="cpu", compute_dtype="fp32", threads=1, verify="never", microbatch_rows=2) as engine:
        result = engine.backward(rows)
        got = dict(engine.named_gradients())
    assert result.tokens == want.tokens
    wanted = {n: g if g is not None else torch.zeros_like(got[n]) for n, g in want.gradients.items()}
    return gradient_error(got, wanted)[0]


def drop_logit_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = Shell.logits
    monkeypatch.setattr(Shell, "logits", lambda self, edges, hidden: 3.0 * logits(self, edges, hidden))


def drop_residual_multiplier(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Shell.call_layer

    def broken(self: Shell, index: int, *args: Any) -> Any:
        self.layers[index].residual_multiplier = 1.0
        return call(self, index, *args)

    monkeypatch.setattr(Shell, "call_layer", broken)


def lose_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = Shell.leaves

    def broken(
        self: Shell, views: dict[str, torch.Tensor], prefix: str, requires_grad: bool
    ) -> dict[str, torch.Tensor]:
        found = leaves(self, views, prefix, requires_grad)
        return {n: t.detach() if n.endswith("q_proj.weight") and prefix.endswith("1.") else t for n, t in found.items()}

    monkeypatch.setattr(Shell, "leaves", broken)


def crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise IndexError("list index out of range\nand many lines more")

    monkeypatch.setattr(Shell, "call_layer", broken)


@pytest.mark.parametrize(
    ("breakage", "what"),
    [
        (drop_logit_scale, r"computed differently from plain Hugging Face: loss \d"),
        (drop_residual_multiplier, r"loss \d+\.\d+ instead of \d"),
        (lose_a_gradient, r"gradient of model\.layers\.1\.self_attn\.q_proj\.weight off by 1e\+00 of its norm"),
        (crash, r"cannot be streamed: IndexError: list index out of range\n  -> "),
    ],
    ids=lambda v: getattr(v, "__name__", None),
)
def test_a_broken_shell_is_refused(breakage: Any, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    untested(monkeypatch)
    verify_family(config(BY_NAME["granite"]))
    check.clear_cache()
    breakage(monkeypatch)
    with pytest.raises(UserError, match=what) as caught:
        verify_family(config(BY_NAME["granite"]))
    assert caught.value.where == "model type granite"


def test_an_error_of_the_engine_itself_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise MegatrainError("the machine is full")

    monkeypatch.setattr(Shell, "call_layer", full)
    with pytest.raises(MegatrainError, match="the machine is full"):
        verify_family(config(BY_NAME["llama"]))


def test_a_near_tie_in_one_batch_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """A difference must show in both batches."""
    plain, calls = check._plain, []

    def off_once(model: nn.Module, rows: dict[str, torch.Tensor]) -> Any:
        loss, gradients = plain(model, rows)
        calls.append(loss)
        return (loss * 1.5 if len(calls) == 2 else loss), gradients

    monkeypatch.setattr(check, "_plain", off_once)
    verify_family(config(BY_NAME["llama"]))
    assert len(calls) == 3, "once to see that the copy runs, once for each batch"


def test_answers_are_cached_per_config(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    tiny_model = check.tiny_model
    monkeypatch.setattr(check, "tiny_model", lambda c, *a: (asked.append(c), tiny_model(c, *a))[1])
    one, same, other = config(BY_NAME["llama"]), config(BY_NAME["llama"]), config(BY_NAME["llama"])
    other.attention_bias = False
    for c in (one, same, other):
        verify_family(c)
    assert len(asked) == 2
    verify_family(one, always=True)
    assert len(asked) == 3


def test_the_caller_s_random_state_and_config_are_unchanged() -> None:
    asked_for = config(BY_NAME["gpt2"], dropout=0.1)
    before, fields = torch.get_rng_state(), asked_for.to_dict()
    verify_family(asked_for)
    verify_packing(asked_for)
    assert torch.equal(torch.get_rng_state(), before)
    assert asked_for.to_dict() == fields


# ------------------------------------------------------------------ tiny copies

WITH_DEFAULTS = [
    "llama qwen3 gemma2 gemma3_text gemma4_text gpt2 gpt_neox opt bloom falcon phi3 granite smollm3 starcoder2 mixtral",
    "qwen3_moe gpt_oss deepseek_v3 deepseek_v32 glm4_moe llama4_text qwen3_next qwen3_5_text kimi_linear jamba bamba",
    "falcon_h1 granitemoehybrid nemotron_h mamba mamba2 recurrent_gemma zamba2 rwkv modernbert-decoder exaone4",
]


@pytest.mark.parametrize("name", " ".join(WITH_DEFAULTS).split())
def test_a_config_of_full_size_has_a_tiny_copy_that_runs(name: str) -> None:
    """The defaults of a config class are those of a published model."""
    full: PreTrainedConfig = CONFIG_MAPPING[name]()
    model = check.tiny_model(full, None, False)
    assert sum(p.numel() for p in model.parameters()) < 5_000_000
    kinds = getattr(full.get_text_config(), "layer_types", None)
    if isinstance(kinds, list):
        copied = model.config.get_text_config().layer_types
        assert set(copied) == set(kinds), "every kind of layer is there"
        assert copied == kinds[: len(copied)]


def test_layers_with_wider_heads_stay_wider() -> None:
    full = CONFIG_MAPPING["gemma4_text"]()
    wide = full.per_layer_config["full_attention"].head_dim / full.per_layer_config["sliding_attention"].head_dim
    tiny = next(tiny_configs(full))
    by_kind = tiny.per_layer_config
    assert by_kind["full_attention"].head_dim / by_kind["sliding_attention"].head_dim == wide > 1


def test_tables_as_wide_as_a_head_are_kept_by_a_copy_with_full_heads() -> None:
    factors = [1.0 + 0.01 * i for i in range(48)]
    full = CONFIG_MAPPING["phi3"](
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "short_factor": factors, "long_factor": factors},
        original_max_position_embeddings=64,
        max_position_embeddings=4096,
    )
    model = check.tiny_model(full, None, False)
    assert model.config.hidden_size // model.config.num_attention_heads == 96
    verify_family(full)


def test_a_config_that_does_not_scale_down_is_refused_unless_its_family_is_tested(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> None:
        raise KeyError("an unknown size")

    monkeypatch.setattr(check, "_build", fails)
    with caplog.at_level(logging.DEBUG):
        verify_family(config(BY_NAME["llama"]))
    assert "the test suite covers its parity" in caplog.text
    untested(monkeypatch)
    with pytest.raises(UserError, match=r"no tiny copy .* runs in plain Hugging Face \(KeyError: 'an unknown size'\)"):
        verify_family(config(BY_NAME["llama"]))
    with pytest.raises(UserError, match="nothing is known of packed rows"):
        verify_packing(config(BY_NAME["llama"]))


def test_a_copy_that_stays_large_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "MOST_PARAMETERS", 1000)
    with pytest.raises(check.NoTinyCopy, match="smallest copy has"):
        check.tiny_model(config(BY_NAME["llama"]), None, False)


# ------------------------------------------------------------------ packing


@pytest.mark.parametrize("family", FAMILIES + UNUSUAL, ids=str)
def test_packing_is_accepted_exactly_where_transformers_keeps_documents_apart(family: Family) -> None:
    """`packable` is measured by other code on other models and batches."""
    asked_for = config(family)
    if family.name == "deepseek_v32":
        asked_for.index_topk = (
            2048  # chooses among equal scores by their place in the row; see DOCUMENTS in parity_check.py
        )
    refusal = refusal_of(lambda: verify_packing(asked_for, attn_implementation=family.attention))
    if "packing_varies" not in family.tags:
        assert (refusal is None) == family.packable
    if refusal is not None:
        assert refusal.where == f"model type {family.model_type}"
        assert "see each other" in refusal.what
        assert refusal.remedy
        assert "data.packing: false" in refusal.remedy


def test_packing_is_verified_once_per_config_and_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    error = check._packing_error
    monkeypatch.setattr(check, "_packing_error", lambda *models: (asked.append(1), error(*models))[1])
    for attention in ("sdpa", "sdpa", "eager", None, None):
        verify_packing(config(BY_NAME["llama"]), attn_implementation=attention)
    assert len(asked) == 3


def test_packing_takes_well_under_a_second_of_a_core() -> None:
    verify_packing(config(BY_NAME["llama"]))  # imports
    started = time.process_time()
    verify_packing(config(BY_NAME["qwen3_moe"]))
    assert time.process_time() - started < 1.0


def test_an_attention_that_this_machine_lacks_is_named() -> None:
    with pytest.raises(UserError, match=r"runs in plain Hugging Face \(ImportError: FlashAttention2"):
        verify_packing(config(BY_NAME["llama"]), attn_implementation="flash_attention_2")


def test_documents_that_leak_a_little_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tolerance is far below any real leak: a thousandth of another document's states is found."""
    tiny_model = check.tiny_model

    def leaking(*args: Any) -> Any:
        model = tiny_model(*args)

        def leak(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            return output + 1e-3 * output.roll(1, dims=1)

        model.model.embed_tokens.register_forward_hook(leak)
        return model

    monkeypatch.setattr(check, "tiny_model", leaking)
    with pytest.raises(UserError, match="see each other"):
        verify_packing(config(BY_NAME["llama"]))
