"""Microbatches: cutting a layer call along the rows of the batch, and joining its outputs.

[Note: which argument goes with the rows]
HF's loop calls a layer with the hidden states of all rows and with whatever else the family passes: masks, rotary tables,
positions, ALiBi slopes folded into the batch dimension. Which dimension of which argument grows with the rows cannot be told
from sizes (there may be as many rows as tokens), so the shell is run twice without gradients, on 2 and on 3 rows of the batch,
and the sizes are compared. A dimension that grows from 2k to 3k has k entries per row. This holds for rows of any length: no
tested family passes more entries per row for longer rows, and `cut` would refuse it. Masks come and go with padding and length,
though, so arguments that were not tensors during probing are assumed to be batch-first.
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
    """A dimension that grows with the rows.

    Attributes:
        dim: The dimension.
        per_row: Entries per row.
        seen: False for an argument that was no tensor during probing: the dimension is rows only if its size is their number.
    """

    dim: int
    per_row: int
    seen: bool = True


UNSEEN = RowAxis(0, 1, seen=False)


def row_axis(small: Shape | None, large: Shape | None) -> RowAxis | None:
    """The dimension that grew between the two probes (2 and 3 rows), None if none did."""
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
    """Row axes of one layer call, by argument leaf and by output leaf; None: shared by all rows."""

    inputs: tuple[RowAxis | None, ...]
    outputs: tuple[RowAxis | None, ...]


def cut(leaf: Any, axis: RowAxis | None, rows: slice, total: int) -> Any:
    """The part of an argument that belongs to `rows`, out of `total` rows; the argument itself if all rows share it."""
    if isinstance(leaf, BlockMask):
        return _cut_block_mask(leaf, rows)
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if axis is None:
        if leaf.ndim != 4 or leaf.shape[0] != total:
            return leaf
        axis = UNSEEN  # a mask that all rows of the probe shared
    size = leaf.shape[axis.dim] if leaf.ndim > axis.dim else 1
    if size == axis.per_row or (not axis.seen and (leaf.ndim < 2 or size != total)):
        return leaf
    assert size == total * axis.per_row, (tuple(leaf.shape), axis, total)
    return leaf.narrow(axis.dim, rows.start * axis.per_row, (rows.stop - rows.start) * axis.per_row)


def _cut_block_mask(mask: BlockMask, rows: slice) -> BlockMask:
    """The part of a block mask that belongs to `rows`. Its mask function counts rows from 0, so it is shifted, by a tensor:
    compiled code would be specialised to each number."""
    if mask.kv_num_blocks.shape[0] == 1:
        return mask
    # Filled on the device: a copy would wait for it.
    first = torch.full((), rows.start, device=mask.kv_num_blocks.device)
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
    """Consecutive slices of at most `microbatch_rows` rows, as equal as possible."""
    count = -(-total_rows // microbatch_rows)
    base, extra = divmod(total_rows, count)
    slices, start = [], 0
    for i in range(count):
        stop = start + base + (i < extra)
        slices.append(slice(start, stop))
        start = stop
    return slices


class RowChunks:
    """The microbatches of an accumulation step: cuts the inputs of a layer call, and joins its outputs.

    Attributes:
        chunks: The rows of each microbatch.
    """

    def __init__(self) -> None:
        self.chunks: list[slice] = []
        self._known: dict[tuple[str, ...], list[CallAxes]] = {}
        self._axes: list[CallAxes] | None = None
        """Axes of each layer call of this accumulation step; None: it is one microbatch."""
        self._masks: dict[tuple[int, int], tuple[BlockMask, BlockMask]] = {}
        """(id of a block mask, first row) -> (the mask, which keeps its id taken; the part of it)."""
        self._seen: list[tuple[list[Shape | None], list[Shape | None]]] | None = None
        """Shapes of each layer call, while probing."""

    def knows(self, kind: tuple[str, ...]) -> bool:
        """Whether row axes are known for batches of this kind."""
        return kind in self._known

    def learn(self, kind: tuple[str, ...], probe: Callable[[int], None]) -> None:
        """Find the row axes of all layer calls. See [Note: which argument goes with the rows].

        Args:
            kind: Kind of the batch.
            probe: Runs all layers on a given number of rows, as one microbatch; each call is reported to `saw`.
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
        """Report the argument and output leaves of the next layer call, if probing."""
        if self._seen is not None:
            self._seen.append((shapes_of(inputs), shapes_of(outputs)))

    def begin(self, kind: tuple[str, ...], rows: int, microbatch_rows: int) -> None:
        """Start an accumulation step of `rows` rows, in microbatches of at most `microbatch_rows`."""
        self._masks = {}
        self.chunks = chunks_of(rows, microbatch_rows)
        self._axes = self._known[kind] if len(self.chunks) > 1 else None

    def abandon(self) -> None:
        """Reset after an error in the middle of a step."""
        self.chunks, self._axes, self._seen, self._masks = [], None, None, {}

    def cut_inputs(self, layer: int, leaves: Sequence[Any], rows: slice) -> list[Any]:
        """The parts of a layer call's arguments that belong to `rows`."""
        return self._cut(leaves, self._axes[layer].inputs, rows) if self._axes else list(leaves)

    def cut_gradients(self, layer: int, gradients: Sequence[Any], rows: slice) -> list[Any]:
        """The parts of the gradients of a layer call's outputs that belong to `rows`."""
        return self._cut(gradients, self._axes[layer].outputs, rows) if self._axes else list(gradients)

    def _cut(self, leaves: Sequence[Any], axes: Sequence[RowAxis | None], rows: slice) -> list[Any]:
        total = self.chunks[-1].stop
        return [
            self._cut_block_mask(leaf, rows) if isinstance(leaf, BlockMask) else cut(leaf, axis, rows, total)
            for leaf, axis in zip(leaves, axes, strict=True)
        ]

    def _cut_block_mask(self, mask: BlockMask, rows: slice) -> BlockMask:
        """The part of a block mask that belongs to `rows`; cut once for all layers that share it."""
        key = id(mask), rows.start
        if key not in self._masks:
            self._masks[key] = mask, _cut_block_mask(mask, rows)
        return self._masks[key][1]

    def join_outputs(self, layer: int, parts: Sequence[Sequence[Any]]) -> list[Any]:
        """A layer call's outputs from those of its microbatches."""
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
        """Gradient of a whole argument from those of the microbatches: concatenated along the rows, or summed if all share it."""
        present = [part for part in parts if part is not None]
        if len(present) <= 1 and len(parts) == 1:
            return parts[0]
        if not present:
            return None
        assert self._axes is not None and len(present) == len(parts)
        axis = self._axes[layer].inputs[position]
        return torch.cat(present, dim=axis.dim) if axis is not None else torch.stack(present).sum(0)
