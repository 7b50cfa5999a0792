"""Cutting a layer call into microbatches, and finding the dimension of the rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import masking_utils
from transformers.integrations import flex_attention as hf_flex

from engines import host_engine
from families import BY_NAME, Family, batch, build
from megatrain.engine.host.engine import HostEngine
from megatrain.engine.host.rows import PROBE_ROWS, UNSEEN, RowAxis, RowChunks, chunks_of, cut, row_axis, shapes_of
from megatrain.models.shell import Shell


@given(st.integers(1, 200), st.integers(1, 250))
def test_chunks_cover_all_rows_once_and_are_as_equal_as_possible(total: int, most: int) -> None:
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


def test_nothing_is_known_of_an_argument_that_is_no_tensor_or_changes_its_rank() -> None:
    assert row_axis(None, (2, 3)) is UNSEEN
    assert row_axis((2, 3), None) is UNSEEN
    assert row_axis((2, 3), (3, 3, 1)) is UNSEEN
    assert shapes_of([torch.zeros(2, 3), None, "text", 5]) == [(2, 3), None, None, None]


@pytest.mark.parametrize(("small", "large"), [((2, 2), (3, 3)), ((5, 4), (6, 4))], ids=["two grow", "not by rows"])
def test_a_size_that_grows_otherwise_than_the_rows_is_a_bug(small: tuple[int, ...], large: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError):
        row_axis(small, large)


@given(rows=st.integers(1, 12), most=st.integers(1, 12), per_row=st.integers(1, 3), dim=st.integers(0, 2))
def test_the_parts_of_an_argument_join_to_the_whole(rows: int, most: int, per_row: int, dim: int) -> None:
    shape = [3, 4, 5]
    shape[dim] = rows * per_row
    whole = torch.arange(torch.tensor(shape).prod().item()).view(shape)
    parts = [cut(whole, RowAxis(dim, per_row), chunk, rows) for chunk in chunks_of(rows, most)]
    assert torch.equal(torch.cat(parts, dim=dim), whole)


@pytest.mark.parametrize("leaf", [None, 3, "sdpa", torch.zeros(7, 4), torch.tensor(1.0)], ids=str)
def test_an_argument_shared_by_all_rows_is_not_cut(leaf: Any) -> None:
    assert cut(leaf, None, slice(2, 4), 6) is leaf


def test_a_mask_shared_by_all_rows_is_not_cut() -> None:
    mask = torch.zeros(1, 1, 5, 5)
    assert cut(mask, RowAxis(0, 1), slice(2, 4), 6) is mask


def test_a_mask_that_only_this_batch_has_is_batch_first() -> None:
    mask = torch.arange(6 * 25).view(6, 1, 5, 5)
    assert torch.equal(cut(mask, None, slice(2, 4), 6), mask[2:4])


def test_a_mask_that_was_no_tensor_during_probing_is_cut_along_its_rows() -> None:
    """A padding mask is None while no row of the probe is padded."""
    padding_BT, scale = torch.arange(6 * 5).view(6, 5), torch.zeros(6)
    assert torch.equal(cut(padding_BT, UNSEEN, slice(2, 4), 6), padding_BT[2:4])
    for leaf in (padding_BT[:1], padding_BT[:5], scale, torch.tensor(1.0), None, "sdpa"):
        assert cut(leaf, UNSEEN, slice(2, 4), 6) is leaf


def test_an_argument_with_another_number_of_entries_per_row_than_probed_is_not_taken_for_shared() -> None:
    router_NE = torch.zeros(6 * 7, 4)
    with pytest.raises(AssertionError):
        cut(router_NE, RowAxis(0, 5), slice(2, 4), 6)


def test_outputs_that_only_this_batch_has_are_joined() -> None:
    chunks = RowChunks()
    outputs: list[list[Any]] = []

    def probe(rows: int) -> None:
        chunks.begin(("plain",), rows, rows)
        chunks.saw([torch.zeros(rows, 5), None], [torch.zeros(rows, 5), None, torch.zeros(3)])

    chunks.learn(("plain",), probe)
    assert chunks.knows(("plain",)) and not chunks.knows(("packed",))
    chunks.begin(("plain",), 4, 2)
    whole, mask, shared = torch.arange(20).view(4, 5), torch.arange(28).view(4, 7), torch.arange(3)
    for rows in chunks.chunks:
        part = chunks.cut_inputs(0, [whole, mask], rows)
        outputs.append([*part, shared])
    joined = chunks.join_outputs(0, outputs)
    assert all(map(torch.equal, joined, [whole, mask, shared]))
    assert chunks.join_outputs(0, [[whole, None, shared], [whole, None, shared]])[1] is None


# ------------------------------------------------------------------ in the engine

TURNS = ("gemma2", "bloom", "qwen3_next")
"""Full and sliding windows, slopes folded into the rows, linear attention."""


def engine_of(family: Family) -> HostEngine:
    return host_engine(
        build(family, seed=0),
        device="cpu",
        compute_dtype="fp32",
        threads=1,
        verify="never",
        microbatch_rows=2,
        compile="off",
    )


@pytest.mark.parametrize("name", TURNS)
def test_row_axes_hold_for_rows_of_other_lengths(name: str) -> None:
    """Shorter and longer than the tiny windows, packed and not, trained and evaluated, by one engine."""
    family = BY_NAME[name]
    kinds: list[Any] = ["plain", "masked", *(["packed"] if family.packable else [])]
    data = [batch(family, seed=1, rows=4, tokens=tokens, kind=kind) for kind in kinds for tokens in (24, 8)]
    with engine_of(family) as engine:
        for rows in (*data, data[0]):
            evaluated = engine.eval_step(rows)
            loss = engine.backward(rows).loss
            got = {parameter: gradient.clone() for parameter, gradient in engine.named_gradients()}
            with engine_of(family) as fresh:
                assert fresh.backward(rows).loss == loss
                assert all(torch.equal(got[parameter], gradient) for parameter, gradient in fresh.named_gradients())
                assert fresh.eval_step(rows) == evaluated


@pytest.fixture
def flex_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hugging Face compiles flex attention and its masks, which takes a minute on a CPU."""

    def uncompiled(*args: Any, training: bool = False, **kwargs: Any) -> Any:
        return flex_attention(*args, **kwargs)

    def mask_uncompiled(*args: Any, _compile: bool = True, **kwargs: Any) -> Any:
        return create_block_mask(*args, **kwargs)

    monkeypatch.setattr(hf_flex, "compile_friendly_flex_attention", uncompiled)
    monkeypatch.setattr(masking_utils, "create_block_mask", mask_uncompiled)


@pytest.mark.slow
@pytest.mark.usefixtures("flex_uncompiled")
def test_row_axes_hold_for_batches_with_and_without_block_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed rows, and rows longer than a window, take flex attention, whose masks are no tensors; others have none."""
    family = BY_NAME["gemma3_text"]
    family = replace(family, overrides={**family.overrides, "sliding_window": 16})
    data = [batch(family, seed=1, rows=4, tokens=t, kind=kind) for kind in ("plain", "packed") for t in (8, 24)]
    seen, make = [], Shell.__init__
    with engine_of(family) as plain, monkeypatch.context() as patch:
        patch.setattr(Shell, "__init__", lambda *given, **words: make(*given, **{**words, "flex": True}))  # as on a GPU
        with engine_of(family) as engine:
            for rows in (*data, data[0]):
                assert engine.eval_step(rows).loss_sum == pytest.approx(plain.eval_step(rows).loss_sum, rel=1e-5)
                seen.append(engine.config._attn_implementation)
    assert set(seen) == {"sdpa", "flex_attention"}


def test_a_block_mask_is_cut_with_its_function() -> None:
    """Parts of flex attention's masks, whose function counts rows from 0."""
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


def test_a_block_mask_shared_by_all_rows_is_not_cut() -> None:
    whole = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 64, 64, device="cpu", BLOCK_SIZE=32)
    assert cut(whole, None, slice(1, 2), 4) is whole
