"""Long-context settings change what is kept and how the work is cut, and nothing in the result."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engines import host_engine
from families import BY_NAME, Family, batch, build
from megatrain.engine import parity_check
from megatrain.engine.host.engine import HostEngine
from megatrain.models.structure import dissect
from megatrain.models.templates import ATTENTION
from megatrain.planner.model_cost import layer_arguments
from reference import gradient_error

FUSED = ("llama", "qwen3", "gpt2", "bloom", "opt", "qwen3_moe", "deepseek_v3", "qwen3_next")
"""Dense models and mixtures of experts, several kinds of attention, MLPs as a module and as loose matrices."""


def family_of(name: str, **overrides: Any) -> Family:
    family = BY_NAME[name]
    return dataclasses.replace(family, overrides={**family.overrides, **overrides})


def step_of(family: Family, rows: int = 3, tokens: int = 24, kind: Any = "padded", **options: Any) -> Any:
    """Loss and gradients of one batch, by default in two microbatches."""
    data = batch(family, seed=1, rows=rows, tokens=tokens, kind=kind)
    given: dict[str, Any] = {"device": "cpu", "verify": "never", "microbatch_rows": 2, "compile": "off", **options}
    with host_engine(build(family, seed=0), **given) as engine:
        result = engine.backward(data)
        return result.loss, {name: gradient.clone() for name, gradient in engine.named_gradients()}


def assert_same_bits(got: Any, want: Any) -> None:
    assert got[0] == want[0]
    assert all(torch.equal(got[1][name], want[1][name]) for name in want[1])


# ------------------------------------------------------------------ equal results


@pytest.mark.parametrize("part", ["keep_attention", "keep_mlp"])
@pytest.mark.parametrize("name", FUSED)
def test_a_kept_part_changes_no_bit(name: str, part: str) -> None:
    assert_same_bits(step_of(BY_NAME[name], **dict[str, Any]({part: "all"})), step_of(BY_NAME[name]))


@pytest.mark.parametrize("name", [*FUSED, "gemma2", "gpt_oss", "bamba"])
def test_mlps_in_chunks_of_tokens_give_the_same_sums(name: str) -> None:
    want_loss, want = step_of(BY_NAME[name])
    loss, got = step_of(BY_NAME[name], mlp_chunk_tokens=7)
    assert loss == pytest.approx(want_loss, rel=1e-6)
    error, worst = gradient_error(got, want)
    assert error < 1e-5, f"{worst}: {error:.1e}"


def test_all_long_context_settings_together_equal_none_of_them() -> None:
    settings: dict[str, Any] = {
        "keep_attention": (1, 3),
        "keep_mlp": (2,),
        "mlp_chunk_tokens": 5,
        "offload_input": (0, 1),
        "head_chunk_tokens": 16,
        "accumulation_steps": 2,
        "weight_slots": 2,
    }
    want_loss, want = step_of(BY_NAME["llama"])
    loss, got = step_of(BY_NAME["llama"], **settings)
    assert loss == pytest.approx(want_loss, rel=1e-6)
    error, worst = gradient_error(got, want)
    assert error < 1e-5, f"{worst}: {error:.1e}"


def test_an_evaluation_in_chunks_gives_the_same_loss() -> None:
    data = batch(BY_NAME["qwen3_moe"], seed=2, rows=2, tokens=24)
    losses = []
    for chunk in (None, 5):
        with host_engine(
            build(BY_NAME["qwen3_moe"], seed=0), device="cpu", verify="never", compile="off", mlp_chunk_tokens=chunk
        ) as engine:  # fmt: skip
            losses.append(engine.eval_step(data).loss_sum)
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_a_family_without_a_tiny_copy_computes_its_mlps_whole(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_copy(*_: Any) -> Any:
        raise parity_check.NoTinyCopy("no tiny copy of this config runs")

    monkeypatch.setattr(parity_check, "tiny_model", no_copy)
    parity_check.clear_cache()
    with caplog.at_level(logging.WARNING):
        got = step_of(BY_NAME["llama"], mlp_chunk_tokens=7)
    parity_check.clear_cache()
    assert "so it is not known which modules are token-wise: MLPs are computed whole" in caplog.text
    assert_same_bits(got, step_of(BY_NAME["llama"]))


def test_dropout_of_a_kept_part_replays() -> None:
    family = family_of("gpt2", attn_pdrop=0.0, resid_pdrop=0.2)
    assert_same_bits(step_of(family, keep_attention="all"), step_of(family))


def test_a_module_that_draws_random_numbers_is_computed_whole(caplog: pytest.LogCaptureFixture) -> None:
    family = family_of("gpt2", resid_pdrop=0.2)
    with caplog.at_level(logging.DEBUG):
        chunked = step_of(family, mlp_chunk_tokens=7)
    assert "GPT2Block.mlp: not computed in chunks of tokens: draws random numbers" in caplog.text
    want = step_of(family)
    assert chunked[0] == want[0], "the norm behind the layers is computed in chunks, and its forward is the same"


# ------------------------------------------------------------------ what is computed, and what exists


class Largest(TorchDispatchMode):
    """Counts calls of fused attention, and records the largest tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = 0
        self.entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.attention += func in ATTENTION
        made = [t.numel() for t in (out if isinstance(out, tuple | list) else [out]) if isinstance(t, torch.Tensor)]
        self.entries = max([self.entries, *made])
        return out


@contextlib.contextmanager
def watched(**options: Any) -> Iterator[tuple[HostEngine, Largest]]:
    with host_engine(
        build(BY_NAME["llama"], seed=0), device="cpu", verify="never", compile="off", **options
    ) as engine, Largest() as largest:  # fmt: skip
        yield engine, largest


@pytest.mark.parametrize(("options", "times"), [({}, 2), ({"keep_attention": "all"}, 1), ({"keep_mlp": "all"}, 2)])
def test_kept_attention_is_computed_once(options: dict[str, Any], times: int) -> None:
    data = batch(BY_NAME["llama"], seed=0, rows=1, tokens=32)
    with watched(**options) as (engine, seen):
        engine.backward(data)
        assert seen.attention == times * len(engine.structure.layers)


def test_a_long_row_makes_no_tensor_of_t_x_t_and_none_as_wide_as_the_mlp() -> None:
    tokens = 1024
    data = batch(BY_NAME["llama"], seed=0, rows=1, tokens=tokens)
    with watched(keep_attention="all", mlp_chunk_tokens=64, head_chunk_tokens=64) as (engine, seen):
        config: Any = engine.config
        engine.backward(data)
    assert seen.entries <= tokens * config.hidden_size, "hidden states are the largest"
    assert config.intermediate_size > config.hidden_size and tokens > config.hidden_size
    with watched(head_chunk_tokens=64) as (engine, seen):
        engine.backward(data)
    assert seen.entries == tokens * config.intermediate_size, "without chunks the MLP's are"


def test_a_long_row_of_full_attention_gets_no_mask() -> None:
    """A base model of tiny width shows what a row of realistic length passes to its layers."""
    tokens = 1 << 15
    structure = dissect(build(family_of("llama", max_position_embeddings=tokens), seed=0))
    buffers = dict(structure.model.named_buffers())
    with Largest() as seen:
        _, kwargs = layer_arguments(structure, torch.zeros((1, tokens), dtype=torch.int64), buffers)
    assert kwargs["attention_mask"] is None
    assert seen.entries == tokens * 64, "hidden states"
