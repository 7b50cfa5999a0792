"""Validation of batches, and the form in which engines compute them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Config, LlamaConfig

from megatrain.engine.batches import checked, most_positions
from megatrain.errors import UserError

VOCABULARY = 50


def rows(count: int = 2, tokens: int = 6, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    ids = torch.arange(count * tokens).view(count, tokens) % VOCABULARY
    return {"input_ids": ids, "labels": ids.clone(), **more}


def test_a_plain_batch_passes_unchanged_and_its_targets_are_counted() -> None:
    data = rows()
    data["labels"][0, :3] = -100
    out, tokens = checked(data, VOCABULARY)
    assert out.keys() == {"input_ids", "labels"}
    assert torch.equal(out["input_ids"], data["input_ids"])
    assert tokens == 2 * 5 - 2, "the first token of a row is no target"


def test_none_counts_as_left_out() -> None:
    out, _ = checked({**rows(), "position_ids": None, "attention_mask": None}, VOCABULARY)  # type: ignore[dict-item]
    assert out.keys() == {"input_ids", "labels"}


def test_default_positions_and_masks_are_dropped() -> None:
    data = rows(position_ids=torch.arange(6).expand(2, 6), attention_mask=torch.ones(2, 6, dtype=torch.int64))
    assert checked(data, VOCABULARY)[0].keys() == {"input_ids", "labels"}


def test_a_mask_that_hides_only_padding_at_the_end_is_dropped() -> None:
    mask = torch.ones(2, 6, dtype=torch.int64)
    mask[1, 4:] = 0
    data = rows(attention_mask=mask)
    assert "attention_mask" in checked(data, VOCABULARY)[0], "it hides targets"
    data["labels"] = torch.where(mask == 1, data["labels"], -100)
    assert "attention_mask" not in checked(data, VOCABULARY)[0]


def test_other_positions_and_masks_are_kept() -> None:
    positions, mask = torch.arange(6).expand(2, 6) + 3, torch.ones(2, 6, dtype=torch.int64)
    mask[1, :2] = 0
    out, _ = checked(rows(position_ids=positions, attention_mask=mask), VOCABULARY)
    assert torch.equal(out["position_ids"], positions)
    assert torch.equal(out["attention_mask"], mask)


def test_document_ids_become_positions_that_restart() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 1, 2], [7, 7, 7, 7, 7, 7]])
    out, _ = checked(rows(document_ids=documents), VOCABULARY)
    assert "document_ids" not in out
    assert out["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]]


def test_where_lengths_matter_padding_is_a_document_in_every_batch() -> None:
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1]])
    out, _ = checked(rows(attention_mask=mask), VOCABULARY, by_length=True)
    assert "attention_mask" not in out
    assert out["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1], [0, 0, 1, 2, 3, 4]]
    out, _ = checked(rows(), VOCABULARY, by_length=True)
    assert out["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    positions = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 0]])
    out, _ = checked(rows(position_ids=positions), VOCABULARY, by_length=True)
    assert torch.equal(out["position_ids"], positions)
    holes = torch.tensor([[1, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    out, _ = checked(rows(attention_mask=holes), VOCABULARY, by_length=True)
    assert torch.equal(out["attention_mask"], holes)


def test_rows_of_one_document_keep_the_positions_that_follow_from_document_ids() -> None:
    out, _ = checked(rows(document_ids=torch.zeros(2, 6, dtype=torch.int64)), VOCABULARY)
    assert out["position_ids"].tolist() == [list(range(6))] * 2


@given(st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=5), min_size=1, max_size=3))
def test_positions_count_from_zero_in_each_document(lengths: list[list[int]]) -> None:
    width = max(2, *(sum(row) for row in lengths))
    documents = torch.zeros(len(lengths), width, dtype=torch.int64)
    want = []
    for row, sizes in enumerate(lengths):
        sizes = [*sizes, width - sum(sizes)]
        documents[row] = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        want.append([i for size in sizes for i in range(size)])
    out, _ = checked(rows(len(lengths), width, document_ids=documents), VOCABULARY)
    plain = [list(range(width))] * len(lengths)
    assert (out["position_ids"].tolist() if "position_ids" in out else plain) == want


def test_the_caller_s_batch_is_not_changed() -> None:
    data = rows(document_ids=torch.tensor([[0, 0, 1, 1, 1, 1]] * 2))
    before = {name: tensor.clone() for name, tensor in data.items()}
    checked(data, VOCABULARY)
    assert data.keys() == before.keys()
    assert all(torch.equal(data[name], before[name]) for name in before)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"labels": None}, r"missing keys \['labels'\]"),
        ({"tokens": torch.zeros(2, 6)}, r"unknown keys \['tokens'\]"),
        ({"labels": torch.zeros(2, 5, dtype=torch.int64)}, r"batch\['labels'\]: is torch.int64 \(2, 5\)"),
        ({"input_ids": torch.zeros(2, 6)}, r"float32"),
        ({"input_ids": torch.zeros(6, dtype=torch.int64), "labels": torch.zeros(6, dtype=torch.int64)}, r"\(6,\)"),
        ({"input_ids": torch.full((2, 6), VOCABULARY)}, r"batch\['input_ids'\]\[0, 0\]: holds 50, outside"),
        ({"labels": torch.full((2, 6), -1)}, r"batch\['labels'\]\[0, 0\]: holds -1"),
        (
            {"position_ids": torch.arange(6).expand(2, 6), "document_ids": torch.tensor([[0, 0, 0, 1, 1, 1]] * 2)},
            "restart",
        ),
        (
            {
                "document_ids": torch.tensor([[0, 0, 0, 1, 1, 1]] * 2),
                "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0]] * 2),
            },
            "document_ids and attention_mask together",
        ),
        ({"position_ids": torch.full((2, 6), -1)}, r"batch\['position_ids'\]\[0, 0\]: holds -1, which is negative"),
        ({"position_ids": torch.arange(6).expand(2, 6) + 15}, r"\[0, 5\]: holds 20, beyond the model's 20 positions"),
        ({"position_ids": torch.zeros(2, 6)}, r"batch\['position_ids'\]: is torch.float32"),
        ({"attention_mask": torch.full((2, 6), 2)}, r"batch\['attention_mask'\]\[0, 0\]: holds 2, neither 0 nor 1"),
        ({"attention_mask": torch.ones(2, 6, dtype=torch.bool)}, r"batch\['attention_mask'\]: is torch.bool"),
        ({"attention_mask": torch.ones(2, 1, 6, 6, dtype=torch.int64)}, r"is torch.int64 \(2, 1, 6, 6\)"),
        ({"attention_mask": torch.tensor([[1] * 6, [0] * 6])}, r"batch\['attention_mask'\]\[1\]: hides every token"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_wrong_value_is_refused_with_its_place(change: dict[str, Any], what: str) -> None:
    with pytest.raises(UserError, match=what) as caught:
        checked({**rows(), **change}, VOCABULARY, 20)
    assert caught.value.where is not None


@pytest.mark.parametrize("shape", [(0, 6), (2, 1)])
def test_too_small_batches_are_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(UserError, match="at least one row of two tokens"):
        checked(rows(*shape), VOCABULARY)


def test_only_a_table_of_positions_limits_them() -> None:
    assert most_positions(GPT2Config(n_positions=77)) == 77
    assert most_positions(LlamaConfig(max_position_embeddings=77)) is None
