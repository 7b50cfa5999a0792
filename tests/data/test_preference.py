"""Pairs of answers and labelled answers: what is trained of each record, which sequences stay together, and what is rejected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_tokenizer as tiny
from megatrain.config.schema import DataConfig, SourceConfig
from megatrain.data import PackedRows, StepLoader, load_data
from megatrain.data.samples import DataKind
from megatrain.errors import UserError

TOKENIZER = tiny.make_tokenizer()
ASKED = [{"role": "user", "content": "Which number?"}]
END = TOKENIZER.eos_token


def load(tmp_path: Path, records: list[dict[str, Any]], wanted: DataKind, **settings: Any) -> tuple[PackedRows, str]:
    file, lines = tmp_path / "records.jsonl", []
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    words = {"max_tokens": 96, "cache_dir": str(tmp_path / "cache"), **settings}
    data = DataConfig(train=(SourceConfig(path=str(file)),), **words)
    rows, _ = load_data(data, TOKENIZER, vocab_size=len(TOKENIZER), seed=1, log=lines.append, wanted=wanted)
    return rows, "\n".join(lines)


def sequences_of(batch: dict[str, torch.Tensor]) -> dict[int, tuple[str, str, int]]:
    """Sequence number -> (text that is not trained, trained text, row)."""
    found: dict[int, tuple[str, str, int]] = {}
    for row, (ids, labels, mask, numbers) in enumerate(
        zip(batch["input_ids"], batch["labels"], batch["attention_mask"], batch["sequence_ids"], strict=True)
    ):
        for number in numbers[mask.bool()].unique().tolist():
            here = (numbers == number) & mask.bool()
            trained = here & (labels != -100)
            assert number not in found, "a sequence lies in two rows"
            assert torch.equal(labels[trained], ids[trained])
            found[number] = (TOKENIZER.decode(ids[here & ~trained]), TOKENIZER.decode(ids[trained]), row)
    assert sorted(found) == list(range(len(found)))
    return found


def answer(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


LAYOUTS: dict[str, dict[str, Any]] = {
    "texts": {"prompt": "Which number? ", "chosen": "one", "rejected": "two two"},
    "messages after a prompt": {"prompt": ASKED, "chosen": answer("one"), "rejected": answer("two two")},
    "whole conversations": {"chosen": ASKED + answer("one"), "rejected": ASKED + answer("two two")},
    "instruction": {"instruction": "Which number?", "input": "", "chosen": "one", "rejected": "two two"},
    "sharegpt": {
        "conversations": [{"from": "human", "value": "Which number?"}],
        "chosen": {"from": "gpt", "value": "one"},
        "rejected": {"from": "gpt", "value": "two two"},
    },
    "one text with both": {"chosen": "Which number? one", "rejected": "Which number? two two"},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_answers_are_trained_after_the_same_prompt(layout: str, tmp_path: Path) -> None:
    rows, said = load(tmp_path, [LAYOUTS[layout]], "pairs")
    (chosen, rejected) = sequences_of(rows.batch([0])).values()
    assert chosen[0] == rejected[0] and "Which number?" in chosen[0]
    assert [text.strip().removesuffix(END).strip() for text in (chosen[1], rejected[1])] == ["one", "two two"]
    assert chosen[1].strip().endswith(END)
    assert "1 pair (2 sequences)" in said


@pytest.mark.parametrize("packing", [True, False])
def test_a_pair_is_never_separated(packing: bool, tmp_path: Path) -> None:
    pairs = [{"prompt": f"{i} ", "chosen": "one " * (i % 7 + 1), "rejected": "two " * (i % 5 + 1)} for i in range(23)]
    rows, _ = load(tmp_path, pairs, "pairs", packing=packing)
    loader, prompts = StepLoader(rows, 4, seed=3), []
    for step in range(loader.steps_per_epoch):
        found = sequences_of(loader.batch(step))
        for number in range(0, len(found), 2):
            (prompt, chosen, row), (same, rejected, other) = found[number], found[number + 1]
            assert prompt == same and "one" in chosen and "two" in rejected
            assert row == other if packing else (row % 2 == 0 and other == row + 1)
            prompts.append(prompt)
    assert sorted(prompts) == sorted(f"{i} " for i in range(23))
    if not packing:
        with pytest.raises(UserError, match="would separate the two sequences of a pair"):
            StepLoader(rows, 3, seed=3)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"prompt": "a ", "chosen": "one", "rejected": None}, "no rejected answer"),
        ({"prompt": "a ", "chosen": "  ", "rejected": "two"}, "no chosen answer"),
        ({"prompt": "a ", "chosen": "one", "rejected": "one"}, "chosen and rejected are equal"),
        ({"prompt": " ", "chosen": "one", "rejected": "two"}, "an empty prompt"),
        ({"prompt": "a ", "chosen": "one", "rejected": answer("two")}, "one answer is a text and the other a message"),
        ({"chosen": ASKED + answer("one"), "rejected": answer("two")}, "no prompt"),
        (
            {"chosen": ASKED + answer("one"), "rejected": [{"role": "user", "content": "What?"}, *answer("two")]},
            "chosen and rejected answer different prompts",
        ),
        ({"messages": ASKED, "prompt": ASKED, "chosen": answer("one"), "rejected": answer("two")}, "two prompts"),
    ],
)
def test_what_is_no_pair_is_a_counted_reject(record: dict[str, Any], reason: str, tmp_path: Path) -> None:
    good = LAYOUTS["whole conversations" if isinstance(record["chosen"], list) else "texts"]
    rows, said = load(tmp_path, [good, record, good | {"chosen": good["rejected"], "rejected": good["chosen"]}], "pairs",
                      allow_rejects=0.5)  # fmt: skip
    assert rows.stats.samples == 4
    assert reason in said


def test_a_pair_that_is_too_long_is_too_long_as_a_whole(tmp_path: Path) -> None:
    pairs = [{"prompt": "a ", "chosen": "one " * n, "rejected": "two"} for n in (3, 200)]
    with pytest.raises(UserError, match="1 of 2 groups, of two sequences in one row, longer than 96 tokens"):
        load(tmp_path, pairs, "pairs")
    rows, said = load(tmp_path, pairs, "pairs", overflow="drop")
    assert rows.stats.samples == 2
    assert "1 of 2 groups (50.0%) longer than 96 tokens: drop; 1 left out" in said and "to truncate" in said
    cut = load(tmp_path, pairs, "pairs", overflow="truncate")[0]
    assert cut.stats.samples == 4 and cut.stats.longest == 91, "the longer answer is cut"
    with pytest.raises(UserError, match="cannot be split"):
        load(tmp_path, pairs, "pairs", overflow="split")


def test_labelled_answers_come_with_another_examples_answer(tmp_path: Path) -> None:
    marks = [True, False, "1", 0]
    records = [{"prompt": f"{i} ", "completion": f"say {i}", "label": mark} for i, mark in enumerate(marks)]
    rows, said = load(tmp_path, records, "labels")
    batch = rows.batch(range(len(rows)))
    found, good = sequences_of(batch), {}
    for number, (prompt, trained, row) in found.items():
        index = int(prompt)
        other = index if number % 2 == 0 else (index + 1) % len(marks)
        assert trained.removesuffix(END).strip() == f"say {other}"
        if number % 2 == 0:
            here = (batch["sequence_ids"][row] == number) & (batch["labels"][row] != -100)
            good[index] = bool(batch["desirable"][row][here].all())
    assert [good[i] for i in range(4)] == [True, False, True, False]
    assert "4 labelled answers (2 good; 8 sequences)" in said


def test_data_of_another_kind_is_refused_by_its_columns(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs pairs of answers"):
        load(tmp_path, [{"prompt": "a", "completion": "b"}], "pairs")
    with pytest.raises(UserError, match="column label"):
        load(tmp_path, [{"prompt": "a", "completion": "b"}], "labels")
    with pytest.raises(UserError, match="pairs of answers, which this objective is not trained on"):
        load(tmp_path, [LAYOUTS["texts"]], "samples")
