"""Chunks of rows: cutting a layer call along the batch, and putting its outputs together again.

[Note: which argument goes with the rows]
HF's loop calls a layer with the hidden states of the whole window and with whatever else the family passes: masks, rotary
tables, positions, ALiBi slopes folded into the batch dimension. Which dimension of which argument grows with the rows is not
guessed from sizes (rows may equal tokens): the shell is run twice without gradients, on 2 and on 3 rows of the batch, and the
sizes are compared. A dimension that grows from 2k to 3k carries k entries per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

Shape = tuple[int, ...]
PROBE_ROWS = (2, 3)


@dataclass(frozen=True)
class RowAxis:
    """A dimension that grows with the rows, by `per_row` entries each."""

    dim: int
    per_row: int


def row_axis(small: Shape | None, large: Shape | None) -> RowAxis | None:
    """The dimension that grows with the rows between two probes (2 and 3 rows), None when none does."""
    if small is None or large is None or len(small) != len(large):
        return None
    grown = [d for d in range(len(small)) if small[d] != large[d]]
    if not grown:
        return None
    dim = grown[0]
    per_row = large[dim] - small[dim]
    assert len(grown) == 1 and small[dim] == per_row * PROBE_ROWS[0], (small, large)
    return RowAxis(dim, per_row)


def shapes_of(leaves: Sequence[Any]) -> list[Shape | None]:
    """Shape of each tensor leaf, None for anything else."""
    return [tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]


@dataclass(frozen=True)
class CallAxes:
    """Row axes of one layer call: of each argument leaf and of each output leaf."""

    inputs: tuple[RowAxis | None, ...]
    outputs: tuple[RowAxis | None, ...]


def cut(leaf: Any, axis: RowAxis | None, rows: slice, total: int) -> Any:
    """The part of an argument that belongs to `rows`, of `total` rows; the argument itself where it has no row axis.

    An argument that was not a tensor in the probe (a mask that only some rows need) has its rows in dimension 0, if anywhere.
    """
    if isinstance(leaf, BlockMask):
        return _cut_block_mask(leaf, rows)
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if axis is None:
        if leaf.ndim != 4 or leaf.shape[0] != total:
            return leaf
        axis = RowAxis(0, 1)
    if leaf.shape[axis.dim] != total * axis.per_row:
        return leaf
    return leaf.narrow(axis.dim, rows.start * axis.per_row, (rows.stop - rows.start) * axis.per_row)


def _cut_block_mask(mask: BlockMask, rows: slice) -> BlockMask:
    """The part of a block mask that belongs to `rows`. Its mask function counts rows from 0, so it is shifted; the shift
    is a tensor, because code would be compiled again for every number."""
    if mask.kv_num_blocks.shape[0] == 1:
        return mask
    first = torch.tensor(rows.start, device=mask.kv_num_blocks.device)
    whole = mask.mask_mod

    def shifted(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return whole(b + first, h, q, kv)

    full = mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None
    return BlockMask.from_kv_blocks(
        mask.kv_num_blocks[rows],
        mask.kv_indices[rows],
        mask.full_kv_num_blocks[rows] if full else None,  # type: ignore[index]
        mask.full_kv_indices[rows] if full else None,  # type: ignore[index]
        BLOCK_SIZE=mask.BLOCK_SIZE,
        mask_mod=shifted,
        seq_lengths=mask.seq_lengths,
    )


def chunks_of(total_rows: int, chunk_rows: int) -> list[slice]:
    """Consecutive slices of at most `chunk_rows` rows, as equal as can be."""
    count = -(-total_rows // chunk_rows)
    base, extra = divmod(total_rows, count)
    slices, start = [], 0
    for i in range(count):
        stop = start + base + (i < extra)
        slices.append(slice(start, stop))
        start = stop
    return slices
