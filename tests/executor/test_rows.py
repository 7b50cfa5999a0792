"""Cutting a layer call along the rows, and which dimension that is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from megatrain.executor.rows import PROBE_ROWS, RowAxis, chunks_of, cut, row_axis, shapes_of


@given(st.integers(1, 200), st.integers(1, 250))
def test_chunks_cover_all_rows_once_and_are_as_equal_as_can_be(total: int, most: int) -> None:
    chunks = chunks_of(total, most)
    assert [row for c in chunks for row in range(c.start, c.stop)] == list(range(total))
    sizes = [c.stop - c.start for c in chunks]
    assert max(sizes) <= most
    assert max(sizes) - min(sizes) <= 1
    assert len(chunks) == -(-total // most)


@given(st.lists(st.integers(1, 6), max_size=3), st.lists(st.integers(1, 6), max_size=3), st.integers(1, 5))
def test_the_row_axis_is_the_dimension_that_grows(before: list[int], after: list[int], per_row: int) -> None:
    small, large = ((*before, per_row * rows, *after) for rows in PROBE_ROWS)
    assert row_axis(small, large) == RowAxis(len(before), per_row)
    assert row_axis(small, small) is None


def test_what_is_no_tensor_or_has_another_rank_has_no_row_axis() -> None:
    assert row_axis(None, (2, 3)) is None
    assert row_axis((2, 3), None) is None
    assert row_axis((2, 3), (3, 3, 1)) is None
    assert shapes_of([torch.zeros(2, 3), None, "text", 5]) == [(2, 3), None, None, None]


@pytest.mark.parametrize(("small", "large"), [((2, 2), (3, 3)), ((5, 4), (6, 4))], ids=["two grow", "not by rows"])
def test_a_shape_that_follows_no_rows_is_a_bug(small: tuple[int, ...], large: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError):
        row_axis(small, large)


@given(rows=st.integers(1, 12), most=st.integers(1, 12), per_row=st.integers(1, 3), dim=st.integers(0, 2))
def test_the_parts_of_an_argument_make_it_again(rows: int, most: int, per_row: int, dim: int) -> None:
    shape = [3, 4, 5]
    shape[dim] = rows * per_row
    whole = torch.arange(torch.tensor(shape).prod().item()).view(shape)
    parts = [cut(whole, RowAxis(dim, per_row), chunk, rows) for chunk in chunks_of(rows, most)]
    assert torch.equal(torch.cat(parts, dim=dim), whole)


@pytest.mark.parametrize("leaf", [None, 3, "sdpa", torch.zeros(7, 4), torch.tensor(1.0)], ids=str)
def test_an_argument_that_all_rows_share_goes_to_each_chunk_as_it_is(leaf: Any) -> None:
    assert cut(leaf, None, slice(2, 4), 6) is leaf


def test_a_mask_of_one_row_for_all_is_not_cut() -> None:
    mask = torch.zeros(1, 1, 5, 5)
    assert cut(mask, RowAxis(0, 1), slice(2, 4), 6) is mask


def test_a_mask_that_only_this_batch_has_is_cut_along_its_first_dimension() -> None:
    mask = torch.arange(6 * 25).view(6, 1, 5, 5)
    assert torch.equal(cut(mask, None, slice(2, 4), 6), mask[2:4])


def test_a_block_mask_is_cut_with_its_function() -> None:
    """Chunks of flex attention's masks, whose function counts rows from 0."""
    documents_BT = torch.arange(4)[:, None] * 3 + torch.arange(256)[None] // torch.tensor([[100], [256], [70], [130]])

    def same_document(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return (documents_BT[b, q] == documents_BT[b, kv]) & (q >= kv)

    whole = create_block_mask(same_document, 4, None, 256, 256, device="cpu", BLOCK_SIZE=32)
    for rows in (slice(0, 1), slice(1, 3), slice(3, 4)):
        part = cut(whole, None, rows, 4)
        count = rows.stop - rows.start
        assert torch.equal(part.to_dense(), whole.to_dense()[rows])
        b, h, q, kv = (torch.tensor(v) for v in (count - 1, 0, 210, 205))
        assert bool(part.mask_mod(b, h, q, kv)) == bool(same_document(b + rows.start, h, q, kv))


def test_a_block_mask_for_all_rows_is_not_cut() -> None:
    whole = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 64, 64, device="cpu", BLOCK_SIZE=32)
    assert cut(whole, None, slice(1, 2), 4) is whole
