"""Block masks made by plain operations are those that torch makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from transformers import masking_utils

from megatrain.models import block_masks
from megatrain.models.block_masks import block_mask, short_block_masks


def documents(rows: int, tokens: int) -> Any:
    """The mask function of packed rows whose documents differ from row to row."""
    lengths = torch.arange(rows)[:, None] * 37 + 90
    number_BT = torch.arange(tokens)[None] // lengths

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & (number_BT[b, q] == number_BT[b, kv])

    return mask


def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


@pytest.mark.parametrize("rows", [None, 3])
def test_a_mask_that_is_the_same_in_all_rows_has_the_dimensions_of_torch_s(rows: int | None) -> None:
    want = create_block_mask(causal, rows, None, 300, 300, "cpu")
    found = block_mask(causal, rows, None, 300, 300, "cpu")
    assert found.shape == want.shape
    assert torch.equal(found.to_dense(), want.to_dense())
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks"):
        assert torch.equal(getattr(found, name), getattr(want, name)), name


@pytest.mark.parametrize(("at_once", "tokens"), [(1, 512), (2, 200), (5, 640), (100, 48)])
def test_the_mask_does_not_depend_on_how_many_rows_are_made_at_once(
    at_once: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = 5
    monkeypatch.setattr(block_masks, "ENTRIES", at_once * tokens * tokens)
    want = create_block_mask(documents(rows, tokens), rows, None, tokens, tokens, "cpu")
    found = block_mask(documents(rows, tokens), rows, None, tokens, tokens, "cpu", _compile=True)
    assert found.shape == want.shape
    assert torch.equal(found.to_dense(), want.to_dense())
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "q_indices"):
        assert torch.equal(getattr(found, name), getattr(want, name)), name


def test_hugging_face_makes_masks_with_it_inside_and_with_its_own_function_afterwards() -> None:
    original = masking_utils.create_block_mask
    with short_block_masks():
        assert masking_utils.create_block_mask is block_mask
    assert masking_utils.create_block_mask is original
