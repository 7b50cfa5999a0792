"""Block masks of flex attention without compiled code, for rows that are not long.

Hugging Face has `create_block_mask` compiled, whose sorting kernels take some ten seconds to compile, and again for another
number of rows. The mask of short rows is made as fast by plain operations, a few rows at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import masking_utils

BLOCK = 128
"""Queries, and keys, of a block: torch's default."""
ENTRIES = 1 << 24
"""Entries of the dense mask that exist at the same time (a byte each, and some more for intermediate results). Rows whose mask
has more are left to the compiled function, which never makes the dense mask."""


@contextlib.contextmanager
def short_block_masks() -> Iterator[None]:
    """Inside, Hugging Face's masks of flex attention come from `block_mask`."""
    module: Any = masking_utils
    original = module.create_block_mask
    module.create_block_mask = block_mask
    try:
        yield
    finally:
        module.create_block_mask = original


def block_mask(
    mask_mod: Callable[..., torch.Tensor],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Any = "cuda",
    _compile: bool = False,
) -> BlockMask:
    """`create_block_mask`, by plain operations where rows are short. The arguments are torch's.

    `mask_mod` is called once with index tensors that broadcast, as Hugging Face calls its mask functions for other kinds of
    attention, and not under `vmap`, which takes the host ten times as long.
    """
    rows_at_once = ENTRIES // (Q_LEN * KV_LEN)
    if rows_at_once == 0 or H is not None:
        return create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, device, _compile=_compile)
    rows = torch.arange(B or 1, device=device)[:, None, None, None]
    head = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device)
    q = torch.arange(-(-Q_LEN // BLOCK) * BLOCK, device=device)[:, None]
    kv = torch.arange(-(-KV_LEN // BLOCK) * BLOCK, device=device)
    inside = (q < Q_LEN) & (kv < KV_LEN)
    q, kv = q.clamp(max=Q_LEN - 1), kv.clamp(max=KV_LEN - 1)
    # A mask function need not look at the row: then its result has no such dimension.
    found = [
        _blocks((mask_mod(part, head, q, kv) & inside).expand(len(part), 1, -1, -1))
        for part in rows.split(rows_at_once)
    ]
    some, full = (torch.cat(parts) for parts in zip(*found, strict=True))
    partial = some & ~full
    return BlockMask.from_kv_blocks(
        *_ordered(partial), *_ordered(full), BLOCK_SIZE=BLOCK, mask_mod=mask_mod, seq_lengths=(Q_LEN, KV_LEN)
    )


def _blocks(mask_B1QK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether any, and whether all entries of each block are set: two (B, 1, query blocks, key blocks)."""
    blocks = mask_B1QK.unflatten(-2, (-1, BLOCK)).unflatten(-1, (-1, BLOCK))
    return blocks.any(-1).any(-2), blocks.all(-1).all(-2)


def _ordered(blocks_B1QK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The number of set blocks of each row of blocks, and their columns, set ones first. int32."""
    columns = torch.argsort(blocks_B1QK.int(), dim=-1, descending=True, stable=True)
    return blocks_B1QK.sum(-1).int(), columns.int()
