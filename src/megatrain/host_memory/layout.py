"""Flat layouts: offsets of a unit's tensors in its one contiguous range, and the shard of it that a rank owns. Pure.

All planes of a unit share the layout, so one large copy moves a unit and one kernel updates it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

BLOCK_ELEMENTS = 128
"""Elements that share a scale in planes of 8-bit codes: [Note: 8-bit blocks] in optim/blocks.py."""
ALIGN_ELEMENTS = BLOCK_ELEMENTS
"""Tensors start at multiples of this: whole blocks, and 256 bytes in bf16, for matrix kernels and vector loads."""
SHARD_ELEMENTS = 256
"""Shards are multiples of this: 512 bytes in bf16, for aligned copies and collectives."""


SCALES = ".scale"
"""End of the name of a plane of scales, one for each block of the plane before it (`m`, `m.scale`)."""


def elements_per_value(kind: str) -> int:
    """Elements of the flat range for which a plane of this kind has one value."""
    return BLOCK_ELEMENTS if kind.endswith(SCALES) else 1


def values_of(kind: str, elements: slice) -> slice:
    """The values of a plane of this kind that belong to elements [start, stop) of its range; start at a block."""
    step = elements_per_value(kind)
    return slice(elements.start // step, -(-elements.stop // step))


@dataclass(frozen=True)
class Entry:
    """One tensor of a unit.

    Attributes:
        name: Name inside the unit (`self_attn.q_proj.weight` for a layer, the full name for embedding and head).
        offset: First element in the flat range.
    """

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class FlatLayout:
    """Names to offsets. Elements between two entries are padding: always zero in every plane.

    Trained tensors come first and frozen ones behind them: only the weights have a plane of the whole range; lo, optimizer states
    and gradients have one of the trained elements.
    """

    entries: tuple[Entry, ...]
    numel: int
    """Elements of the range, padding included."""
    frozen_numel: int = 0
    """Elements at the end of the range that are not trained."""

    @classmethod
    def of(cls, shapes: Iterable[tuple[str, tuple[int, ...]]], frozen: Collection[str] = ()) -> FlatLayout:
        """Lay out tensors in the order given, the frozen ones last, each aligned to `ALIGN_ELEMENTS`."""
        entries, offset, trained = [], 0, 0
        for name, shape in sorted(shapes, key=lambda named: named[0] in frozen):
            entries.append(Entry(name, tuple(shape), offset))
            offset = -(-entries[-1].end // ALIGN_ELEMENTS) * ALIGN_ELEMENTS
            trained = trained if name in frozen else offset
        return cls(tuple(entries), offset, offset - trained)

    @property
    def trained_numel(self) -> int:
        """Elements at the start of the range that are trained, padding included."""
        return self.numel - self.frozen_numel

    def is_trained(self, name: str) -> bool:
        return self.by_name[name].offset < self.trained_numel

    @cached_property
    def trained(self) -> FlatLayout:
        """The layout of the trained tensors alone."""
        if not self.frozen_numel:
            return self
        count = self.trained_numel
        return FlatLayout(tuple(entry for entry in self.entries if entry.offset < count), count)

    @cached_property
    def by_name(self) -> Mapping[str, Entry]:
        return {entry.name: entry for entry in self.entries}

    @cached_property
    def param_count(self) -> int:
        """Elements without padding."""
        return sum(entry.numel for entry in self.entries)

    @cached_property
    def _strided(self) -> tuple[tuple[str, tuple[int, ...], tuple[int, ...], int], ...]:
        """(name, shape, strides, offset) of each tensor."""
        return tuple(
            (e.name, e.shape, tuple(math.prod(e.shape[i + 1 :]) for i in range(len(e.shape))), e.offset)
            for e in self.entries
        )

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """(start, end) of the padding behind each tensor that has any."""
        starts = [entry.offset for entry in self.entries[1:]] + [self.numel]
        return tuple((e.end, start) for e, start in zip(self.entries, starts, strict=True) if e.end < start)

    def view(self, flat: torch.Tensor, name: str) -> torch.Tensor:
        """The tensor `name` inside `flat` (numel,), as a view."""
        entry = self.by_name[name]
        return flat[entry.offset : entry.end].view(entry.shape)

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """All tensors inside `flat` (numel,), as views, by name."""
        assert flat.numel() == self.numel and flat.is_contiguous(), (flat.numel(), self.numel, flat.stride())
        start = flat.storage_offset()
        return {name: flat.as_strided(shape, stride, start + offset) for name, shape, stride, offset in self._strided}


@dataclass(frozen=True)
class Shard:
    """One of `count` equal ranges of every unit's flat range, the one with this `index`. With one range it is the unit.

    A shard cuts through tensors. Layouts must be `padded`.
    """

    index: int = 0
    count: int = 1

    def padded(self, layout: FlatLayout) -> FlatLayout:
        """The layout with its last gap widened until it can be cut; unchanged for one shard."""
        if self.count == 1:
            return layout
        step = self.count * SHARD_ELEMENTS
        numel = -(-layout.numel // step) * step
        frozen = layout.frozen_numel + numel - layout.numel if layout.frozen_numel else 0
        return replace(layout, numel=numel, frozen_numel=frozen)

    def numel(self, layout: FlatLayout) -> int:
        """Elements of the shard of a unit, padding included."""
        assert layout.numel % self.count == 0, (layout.numel, self.count)
        return layout.numel // self.count

    def trained_numel(self, layout: FlatLayout) -> int:
        """Elements of the shard of a unit that are trained, padding included."""
        return min(max(layout.trained_numel - self.start(layout), 0), self.numel(layout))

    def start(self, layout: FlatLayout) -> int:
        """First element of the shard in the unit's flat range."""
        return self.index * self.numel(layout)


WHOLE = Shard()
