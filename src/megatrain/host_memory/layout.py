"""Flat layouts: offsets of a unit's tensors in its one contiguous range. Pure.

All planes of a unit share the layout, so one large copy moves a unit and one kernel updates it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

ALIGN_ELEMENTS = 64
"""Tensors start at multiples of this: 128 bytes in bf16, for matrix kernels and vector loads."""


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
    """Names to offsets. Elements between two entries are padding: always zero in every plane."""

    entries: tuple[Entry, ...]
    numel: int
    """Elements of the range, padding included."""

    @classmethod
    def of(cls, shapes: Iterable[tuple[str, tuple[int, ...]]]) -> FlatLayout:
        """Lay out tensors in the order given, each aligned to `ALIGN_ELEMENTS`."""
        entries, offset = [], 0
        for name, shape in shapes:
            entries.append(Entry(name, tuple(shape), offset))
            offset = -(-entries[-1].end // ALIGN_ELEMENTS) * ALIGN_ELEMENTS
        return cls(tuple(entries), offset)

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
