"""Chunks of rows: cutting a layer call along the batch, and putting its outputs together again.

[Note: which argument goes with the rows]
HF's loop calls a layer with the hidden states of the whole window and with whatever else the family passes: masks, rotary
tables, positions, ALiBi slopes folded into the batch dimension. Which dimension of which argument grows with the rows is not
guessed from sizes (rows may equal tokens): the shell is run twice without gradients, on 2 and on 3 rows of the batch, and the
sizes are compared. A dimension that grows from 2k to 3k carries k entries per row. What is found holds for rows
of any length: no tested family hands on more entries per row for longer ones, and `cut` would refuse it. Masks come and go with
padding and length, though: of an argument that was no tensor in the probe it is known that its rows, if it has any, come first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

Shape = tuple[int, ...]
PROBE_ROWS = (2, 3)


@dataclass(frozen=True)
class RowAxis:
    """A dimension that grows with the rows, by `per_row` entries each.

    Attributes:
        seen: False of what was no tensor in the probe: these are its rows if they are as many as the window's.
    """

    dim: int
    per_row: int
    seen: bool = True


UNSEEN = RowAxis(0, 1, seen=False)


def row_axis(small: Shape | None, large: Shape | None) -> RowAxis | None:
    """The dimension that grows with the rows between two probes (2 and 3 rows), None when none does."""
    if small is None or large is None or len(small) != len(large):
        return UNSEEN
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
    """The part of an argument that belongs to `rows`, of `total` rows; the argument itself where all rows share it."""
    if isinstance(leaf, BlockMask):
        return _cut_block_mask(leaf, rows)
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if axis is None:
        if leaf.ndim != 4 or leaf.shape[0] != total:
            return leaf
        axis = UNSEEN  # a mask that was one for all rows of the probe
    size = leaf.shape[axis.dim] if leaf.ndim > axis.dim else 1
    if size == axis.per_row or (not axis.seen and (leaf.ndim < 2 or size != total)):
        return leaf
    assert size == total * axis.per_row, (tuple(leaf.shape), axis, total)
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


def chunks_of(total_rows: int, microbatch_rows: int) -> list[slice]:
    """Consecutive slices of at most `microbatch_rows` rows, as equal as can be."""
    count = -(-total_rows // microbatch_rows)
    base, extra = divmod(total_rows, count)
    slices, start = [], 0
    for i in range(count):
        stop = start + base + (i < extra)
        slices.append(slice(start, stop))
        start = stop
    return slices


class RowChunks:
    """The chunks of a window's rows: cuts what goes into a layer call, and joins what comes out of it.

    Attributes:
        chunks: The rows of each.
    """

    def __init__(self) -> None:
        self.chunks: list[slice] = []
        self._known: dict[tuple[str, ...], list[CallAxes]] = {}
        self._axes: list[CallAxes] | None = None  # of the layer calls of this window; None: it is one chunk
        self._seen: list[tuple[list[Shape | None], list[Shape | None]]] | None = (
            None  # of each layer call, while learning
        )

    def knows(self, kind: tuple[str, ...]) -> bool:
        """Whether windows of this kind can have several chunks."""
        return kind in self._known

    def learn(self, kind: tuple[str, ...], probe: Callable[[int], None]) -> None:
        """Find out which arguments go with the rows. See [Note: which argument goes with the rows].

        Args:
            kind: Of the batch.
            probe: Runs all layers on so many rows, as one chunk; each call is shown to `saw`.
        """
        found = []
        for count in PROBE_ROWS:
            self._seen = []
            probe(count)
            found.append(self._seen)
            self._seen = None
        self._known[kind] = [
            CallAxes(
                tuple(row_axis(a, b) for a, b in zip(small[0], large[0], strict=True)),
                tuple(row_axis(a, b) for a, b in zip(small[1], large[1], strict=True)),
            )
            for small, large in zip(*found, strict=True)
        ]

    def saw(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Argument and output leaves of the next layer call."""
        if self._seen is not None:
            self._seen.append((shapes_of(inputs), shapes_of(outputs)))

    def begin(self, kind: tuple[str, ...], rows: int, microbatch_rows: int) -> None:
        """A window of so many rows comes, in chunks of at most `microbatch_rows`."""
        self.chunks = chunks_of(rows, microbatch_rows)
        self._axes = self._known[kind] if len(self.chunks) > 1 else None

    def abandon(self) -> None:
        """After an error in the middle of a window."""
        self.chunks, self._axes, self._seen = [], None, None

    def cut_inputs(self, layer: int, leaves: Sequence[Any], rows: slice) -> list[Any]:
        """The part of a layer call's arguments that belongs to `rows`."""
        return self._cut(leaves, self._axes[layer].inputs, rows) if self._axes else list(leaves)

    def cut_gradients(self, layer: int, gradients: Sequence[Any], rows: slice) -> list[Any]:
        """The part of the gradients of a layer call's outputs that belongs to `rows`."""
        return self._cut(gradients, self._axes[layer].outputs, rows) if self._axes else list(gradients)

    def _cut(self, leaves: Sequence[Any], axes: Sequence[RowAxis | None], rows: slice) -> list[Any]:
        total = self.chunks[-1].stop
        return [cut(leaf, axis, rows, total) for leaf, axis in zip(leaves, axes, strict=True)]

    def join_outputs(self, layer: int, parts: Sequence[Sequence[Any]]) -> list[Any]:
        """A layer call's outputs from those of its chunks."""
        if len(parts) == 1:
            return list(parts[0])
        assert self._axes is not None
        joined = []
        for axis, *pieces in zip(self._axes[layer].outputs, *parts, strict=True):
            if axis is None or not isinstance(pieces[0], torch.Tensor):
                joined.append(pieces[0])
            else:
                joined.append(torch.cat(pieces, dim=axis.dim))
        return joined

    def join_gradient(self, layer: int, position: int, parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """Gradient of a whole argument from those of its chunks: side by side along the rows, summed where all share it."""
        present = [part for part in parts if part is not None]
        if len(present) <= 1 and len(parts) == 1:
            return parts[0]
        if not present:
            return None
        assert self._axes is not None and len(present) == len(parts)
        axis = self._axes[layer].inputs[position]
        return torch.cat(present, dim=axis.dim) if axis is not None else torch.stack(present).sum(0)
