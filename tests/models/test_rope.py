"""A document has the rotary frequencies of its own length, whatever shares its row, its step or its padding."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, Phi3Config, PreTrainedConfig

from engines import host_engine
from megatrain.engine import parity_check
from megatrain.engine.parity_check import verify_packing, verify_padding
from megatrain.errors import UserError
from megatrain.models import rope
from megatrain.models.build import build_from_memory, build_meta_model
from megatrain.models.rope import document_lengths, scaling_by_length, separate_lengths
from megatrain.run.loop import train
from tiny_run import config, load_config, records, write_model

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "initializer_range": 0.2,
}  # fmt: skip
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [1.0, 4.0, 7.0, 10.0, 13.0, 16.0, 19.0, 22.0]}
LENGTHS = (5, 20, 8, 9, 3, 31)
"""Tokens of documents, on both sides of the original length 8; together, and shuffled, they are the test's steps."""


def _config(kind: str) -> PreTrainedConfig:
    if kind == "phi3":
        scaling = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 8, **FACTORS}
        sizes = {**SIZES, "max_position_embeddings": 64, "original_max_position_embeddings": 8}
        return Phi3Config(**sizes, rope_parameters=scaling)
    scaling = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    if kind == "dynamic":
        return LlamaConfig(**SIZES, max_position_embeddings=8, rope_parameters=scaling)
    return Gemma3TextConfig(
        **{**SIZES, "head_dim": 16, "sliding_window": 64},
        max_position_embeddings=8,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": scaling,
        },
    )


KINDS = ("phi3", "dynamic", "by layer")


def _model(kind: str) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(_config(kind), dtype=torch.float32, attn_implementation="sdpa").eval()


def _documents() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 97, (n,), generator=generator) for n in LENGTHS]


def _loss_alone(kind: str, ids: torch.Tensor) -> float:
    """By plain transformers, in a model that has seen no other document."""
    logits = _model(kind)(input_ids=ids[None], use_cache=False).logits[0]
    return torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="sum").item()


def _packed(documents: list[torch.Tensor], width: int) -> dict[str, torch.Tensor]:
    """One row of all documents, and padding."""
    rest = width - sum(map(len, documents))
    ids = torch.cat([*documents, torch.zeros(rest, dtype=torch.long)])
    labels = torch.cat([*(torch.cat([torch.tensor([-100]), d[1:]]) for d in documents), torch.full((rest,), -100)])
    number = torch.cat(
        [torch.full((len(d),), i) for i, d in enumerate(documents)] + [torch.full((rest,), len(documents))]
    )
    return {"input_ids": ids[None], "labels": labels[None], "document_ids": number[None]}


def _padded(documents: list[torch.Tensor], width: int) -> dict[str, torch.Tensor]:
    """A row for each document."""
    shape = (len(documents), width)
    ids, labels = torch.zeros(shape, dtype=torch.long), torch.full(shape, -100)
    mask = torch.zeros(shape, dtype=torch.long)
    for row, document in enumerate(documents):
        ids[row, : len(document)] = labels[row, : len(document)] = document
        mask[row, : len(document)] = 1
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_of_documents_is_that_of_each_alone(kind: str) -> None:
    """In steps that follow one another: `dynamic` would remember the longest document."""
    documents = _documents()
    steps = [documents, documents[::-1], documents[:1], documents[2:4], documents[4:]]
    with host_engine(_model(kind), device="cpu", compute_dtype="fp32", threads=1, verify="never") as engine:
        for step in steps:
            want = sum(_loss_alone(kind, ids) for ids in step)
            for batch in (_packed(step, 100), _padded(step, 40)):
                result = engine.eval_step(batch)
                assert result.tokens == sum(len(ids) - 1 for ids in step)
                assert result.loss_sum == pytest.approx(want, rel=2e-5)
            assert engine.backward(_packed(step, 128)).loss == pytest.approx(want / result.tokens, rel=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_plain_transformers_lets_lengths_change_each_other(kind: str) -> None:
    """So the test above compares something."""
    documents = _documents()
    batch = _packed(documents, 100)
    positions = torch.cat([*(torch.arange(len(d)) for d in documents), torch.arange(100 - sum(LENGTHS))])
    logits = _model(kind)(input_ids=batch["input_ids"], position_ids=positions[None], use_cache=False).logits[0]
    loss = torch.nn.functional.cross_entropy(logits[:-1], batch["labels"][0, 1:], reduction="sum").item()
    assert loss != pytest.approx(sum(_loss_alone(kind, ids) for ids in documents), rel=5e-5)


def test_a_run_pads_rows_of_one_document_each_without_a_difference(tmp_path: Path) -> None:
    """From the files on: rows that no documents share have no positions of their own."""
    losses = set()
    model = write_model(tmp_path / "model", weights=False)
    phi = json.loads(_config("phi3").to_json_string())
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    (model / "config.json").write_text(
        json.dumps({**phi, "vocab_size": vocabulary, "architectures": ["Phi3ForCausalLM"]})
    )
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": "1 2 3"}) + "\n")
    for number, data in enumerate(({"max_tokens": 8}, {"max_tokens": 64}, {"max_tokens": 64, "packing": False})):
        sections = config(tmp_path, data=data, batch={"tokens_per_step": data["max_tokens"]}, schedule={"steps": 1})
        sections |= {"model": {"path": str(model), "init": "random"}}
        sections["run"]["dir"] = str(tmp_path / f"run{number}")
        run = load_config(sections, ())
        train(run)
        losses.add(round(records(run)[0].loss or 0.0, 5))
    assert len(losses) == 1


def test_lengths_of_documents_are_found_by_their_positions() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 0, 1, 0], [0, 1, 2, 3, 4, 5, 6], [4, 5, 5, 5, 0, 1, 2]])
    want = torch.tensor([[3, 3, 3, 1, 2, 2, 1], [7] * 7, [6, 6, 6, 6, 3, 3, 3]])
    assert torch.equal(document_lengths(positions), want)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (_config("phi3"), ("longrope", 8)),
        (_config("dynamic"), ("dynamic", 8)),
        (_config("by layer"), ("dynamic", 8)),
        (LlamaConfig(**SIZES), None),
        (LlamaConfig(**SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}), None),
        (LlamaConfig(**SIZES, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}), None),
    ],
)
def test_scalings_that_depend_on_the_length_are_known(config: PreTrainedConfig, found: tuple[str, int] | None) -> None:
    assert scaling_by_length(config) == found


def test_models_without_them_are_left_as_they_are() -> None:
    model = build_meta_model(LlamaConfig(**SIZES), compute_dtype=torch.float32)
    assert "forward" not in vars(model.model.rotary_emb)
    assert not model.model._forward_pre_hooks


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_of_a_model_uses_its_own_frequencies(kind: str) -> None:
    model = build_from_memory(_model(kind))
    rotary = copy.deepcopy(model).model.rotary_emb
    assert rotary.forward.__self__ is rotary


# ---------------------------------------------------------------- the parity check


@pytest.fixture(autouse=True)
def _no_answer_is_cached() -> None:
    parity_check.clear_cache()


def _published(kind: str) -> PreTrainedConfig:
    """With the length at which frequencies change as in published models, which no tiny copy reaches."""
    large = _config(kind)
    large.max_position_embeddings = 131_072 if kind == "phi3" else 4096
    if kind == "phi3":
        large.original_max_position_embeddings = large.rope_parameters["original_max_position_embeddings"] = 4096
    assert scaling_by_length(large) == ("longrope" if kind == "phi3" else "dynamic", 4096)
    return large


@pytest.mark.parametrize("kind", KINDS)
def test_tiny_copies_have_documents_on_both_sides_of_the_original_length(kind: str) -> None:
    large = _published(kind)
    assert (scaling_by_length(parity_check.tiny_model(large, None, False).config) or ("", 0))[1] == 8
    verify_packing(large)
    verify_padding(large)


@pytest.mark.parametrize("verify", [verify_packing, verify_padding])
@pytest.mark.parametrize("kind", KINDS)
def test_a_family_that_cannot_be_separated_is_refused_by_name(
    kind: str, verify: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as code of a model's own, which does not use transformers' embeddings. Shorter rows are accepted."""
    monkeypatch.setattr(parity_check, "separate_lengths", lambda model: None)
    with pytest.raises(UserError, match=r"the rotary embedding \((longrope|dynamic)\) of a document") as refusal:
        verify(_published(kind))
    wanted = "set data.max_tokens to 4096 or less: up to there its frequencies are the same for every length"
    assert refusal.value.remedy == wanted
    with pytest.raises(UserError):
        verify(_published(kind), max_tokens=4097)
    verify(_published(kind), max_tokens=4096)


def test_padding_alone_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Embeddings that are right for positions that restart need positions: padded rows have none."""
    monkeypatch.setattr(rope, "_give_positions", lambda module, args, kwargs: (args, kwargs))
    with pytest.raises(UserError, match="logits of padded documents"):
        verify_padding(_config("phi3"))


def test_a_model_in_memory_is_not_changed() -> None:
    model = _model("dynamic")
    separate_lengths(build_from_memory(model))
    assert "forward" not in vars(model.model.rotary_emb)
