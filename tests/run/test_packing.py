"""Several documents in a row stay several documents.

    files --> load_data (packed, and one sample per row) --> StepLoader --> HostEngine

Both ways hold the same tokens, so that the loss must be the same; and a document must not know what else is in its row.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from ruamel.yaml import YAML

import families
import tiny_tokenizer as tiny
from engines import host_engine
from families import BY_NAME, CORE, VOCAB, Family, build
from megatrain.commands.main import main
from megatrain.config.schema import DataConfig, SourceConfig
from megatrain.data import PackedRows, load_data
from megatrain.engine.host.engine import HostEngine
from megatrain.engine.objective import cross_entropy_sum
from tiny_run import config, write_model, write_texts

MAX_TOKENS = 48
LOSS = 1e-6

# Dense, sliding window and mixtures of experts, plain and with everything that the core families have
# (deepseek_v32 chooses keys by scores that are often equal, and which of them it takes depends on the row).
PACKED = [
    *(family for family in CORE if family.packable and family.name != "deepseek_v32"),
    *(BY_NAME[name] for name in ("mistral", "qwen2", "qwen3", "gemma3_text", "mixtral", "qwen2_moe", "olmoe")),
]


def engine_of(family: Family) -> HostEngine:
    model = build(family, seed=0)
    return host_engine(model, device="cpu", compute_dtype="fp32", threads=1, verify="never", microbatch_rows=2)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> tuple[PackedRows, PackedRows]:
    """The same samples packed and one per row."""
    folder = tmp_path_factory.mktemp("packing")
    rng = random.Random(0)
    with (folder / "a.jsonl").open("w") as file:
        for _ in range(24):
            ids = [rng.randrange(3, VOCAB) for _ in range(rng.randint(2, 30))]
            labels = [token if rng.random() < 0.8 else -100 for token in ids[:-1]] + ids[-1:]
            file.write(json.dumps({"input_ids": ids, "labels": labels}) + "\n")

    def load(packing: bool) -> PackedRows:
        data = DataConfig(
            train=(SourceConfig(path=str(folder / "a.jsonl")),),
            max_tokens=MAX_TOKENS,
            packing=packing,
            cache_dir=str(folder / "cache"),
        )
        return load_data(data, tiny.make_tokenizer(), vocab_size=VOCAB, log=lambda line: None)[0]

    return load(True), load(False)


def batch_of(rows: PackedRows) -> dict[str, torch.Tensor]:
    return rows.batch(range(len(rows)))


def test_the_rows_are_several_documents_long(rows: tuple[PackedRows, PackedRows]) -> None:
    packed, alone = rows
    assert packed.stats.samples == alone.stats.samples == len(alone) == 24
    assert packed.stats.targets == alone.stats.targets
    assert len(packed) < 12
    assert len(set(batch_of(alone)["attention_mask"].sum(1).tolist())) > 5


@pytest.mark.parametrize("family", PACKED, ids=str)
def test_packed_loss_equals_separate_losses(family: Family, rows: tuple[PackedRows, PackedRows]) -> None:
    with engine_of(family) as engine:
        packed, alone = (engine.eval_step(batch_of(one)) for one in rows)
    assert packed.tokens == alone.tokens == rows[0].stats.targets
    assert packed.loss_sum == pytest.approx(alone.loss_sum, rel=LOSS)


@pytest.mark.parametrize("family", PACKED, ids=str)
def test_a_changed_document_leaves_the_others_logits_bit_equal(
    family: Family, rows: tuple[PackedRows, PackedRows], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = batch_of(rows[0])
    row, document = 0, 1
    changed = (before["document_ids"] == document) & (torch.arange(len(before["input_ids"]))[:, None] == row)
    assert 1 < changed.sum() < MAX_TOKENS - 2, "the row's other documents must be there to be watched"
    after = {name: tensor.clone() for name, tensor in before.items()}
    after["input_ids"][changed] = (after["input_ids"][changed] + 7) % (VOCAB - 3) + 3
    first, second = (logits_of(family, one, monkeypatch) for one in (before, after))
    target = torch.zeros_like(changed)
    target[:, :-1] = before["labels"][:, 1:] != -100  # the tokens that predict
    own = changed[target]
    assert not torch.equal(first[own], second[own]), "the change must be seen where it was made"
    assert torch.equal(first[~own], second[~own])


def logits_of(family: Family, batch: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """(N, V) logits of the tokens that predict, in the order of the rows, as the engine computes them for its loss."""
    seen: list[torch.Tensor] = []

    def keep(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen.append(logits.detach().clone())
        return cross_entropy_sum(logits, labels)

    with monkeypatch.context() as patch:
        patch.setattr("megatrain.engine.host.head.cross_entropy_sum", keep)
        with engine_of(family) as engine:
            engine.eval_step(batch)
    return torch.cat(seen)


def test_the_list_has_every_kind() -> None:
    tags = [tag for family in PACKED for tag in family.tags]
    assert min(tags.count("dense"), tags.count("sliding"), tags.count("moe")) >= 3


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("refused")
    write_model(folder / "model", weights=False)
    write_texts(folder / "texts.jsonl", 20)
    return folder


def check(files: Path, family: Family, **data: Any) -> int:
    """`megatrain check` of a random model of the family, with the tiny tokenizer."""
    model = families.config(family)
    model.vocab_size = len(tiny.make_tokenizer())
    model.save_pretrained(files / "model")
    sections = config(files, model={"init": "random"}, data=data)
    YAML().dump(sections, files / "run.yaml")
    return main(["check", str(files / "run.yaml")])


@pytest.mark.parametrize("name", ["bloom", "mpt", "bamba", "qwen3_next"])
def test_a_model_that_cannot_keep_documents_apart_is_refused(
    files: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert not BY_NAME[name].packable
    assert check(files, BY_NAME[name]) == 2
    said = capsys.readouterr().err
    assert f"model type {BY_NAME[name].model_type}: " in said
    assert "would see each other" in said or "see each other in transformers" in said
    assert "-> set data.packing: false" in said
    assert check(files, BY_NAME[name], packing=False) == 0


def test_a_model_that_can_is_not(files: Path) -> None:
    assert check(files, BY_NAME["qwen3"]) == 0
