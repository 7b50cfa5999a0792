"""The host store: the planes of every unit, in ordinary or pinned host memory.

[Note: what is pinned]
Only what a DMA engine reads or writes needs pinned memory: the hi planes (source of weight copies) and the gradient planes
(destination of gradient copies). lo, m and v are touched by CPU AdamW alone and stay pageable. Each plane kind is one
arena for all units; a unit starts at a page, so that registration chunks end between units and no copy crosses two of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatrain.host import planes as plane_math
from megatrain.host.arena import Arena
from megatrain.host.layout import FlatLayout

PAGE_BYTES = 4096


@dataclass
class UnitPlanes:
    """The state of one unit: flat tensors (layout.numel,) on the host.

    Attributes:
        name: The unit's name.
        layout: Names to offsets, the same for every plane.
        hi: bf16, the master rounded to nearest and the compute weight; or fp32, the master itself, when lo is None.
        lo: int16, the rest: `bits(master) = (hi << 16) + lo`.
        m, v: fp32 AdamW moments.
        grad: bf16 or fp32 gradients of the step, None where AdamW eats gradients as they arrive.
    """

    name: str
    layout: FlatLayout
    hi: torch.Tensor
    lo: torch.Tensor | None
    m: torch.Tensor
    v: torch.Tensor
    grad: torch.Tensor | None = None

    def read_master(self, name: str) -> torch.Tensor:
        """The exact fp32 master of one tensor, as a new tensor of its shape."""
        hi = self.layout.view(self.hi, name)
        return hi.clone() if self.lo is None else plane_math.join(hi, self.layout.view(self.lo, name))

    def write_master(self, name: str, value: torch.Tensor) -> None:
        """Set one tensor's master from any floating dtype (widened to fp32: exact for bf16, fp16 and fp32)."""
        hi = self.layout.view(self.hi, name)
        assert value.shape == hi.shape, (name, tuple(value.shape), tuple(hi.shape))
        master = value.detach().to(device="cpu", dtype=torch.float32)
        if self.lo is None:
            hi.copy_(master)
        else:
            plane_math.split_(master.contiguous(), hi, self.layout.view(self.lo, name))


class HostStore:
    """Planes of all units, in forward order.

    Args:
        layouts: (unit name, layout) in forward order.
        split: True keeps hi (bf16) and lo (int16); False keeps the fp32 master in `hi`.
        grad_dtype: Type of the gradient plane, None for no gradient plane.
    """

    def __init__(self, layouts: Sequence[tuple[str, FlatLayout]], *, split: bool, grad_dtype: torch.dtype | None):
        self.split = split
        self.grad_dtype = grad_dtype
        self._layouts = list(layouts)
        hi_dtype = torch.bfloat16 if split else torch.float32
        self._arenas: dict[str, Arena] = {}
        hi = self._plane("hi", hi_dtype)
        lo = self._plane("lo", torch.int16) if split else [None] * len(layouts)
        m, v = self._plane("m", torch.float32), self._plane("v", torch.float32)
        grad = self._plane("grad", grad_dtype) if grad_dtype else [None] * len(layouts)
        self.units: dict[str, UnitPlanes] = {
            name: UnitPlanes(name, layout, hi[i], lo[i], m[i], v[i], grad[i])  # type: ignore[arg-type]
            for i, (name, layout) in enumerate(layouts)
        }

    def add_gradient_plane(self, dtype: torch.dtype) -> None:
        """Give every unit a gradient plane, if it has none yet (gradients asked for without an update)."""
        if self.grad_dtype is not None:
            return
        self.grad_dtype = dtype
        for planes, grad in zip(self.units.values(), self._plane("grad", dtype), strict=True):
            planes.grad = grad

    def pin(self, planes: Sequence[str] = ("hi", "grad")) -> None:
        """Pin plane kinds that exist. Raises PinRefused from the first arena the driver refuses; nothing stays pinned then."""
        pinned = []
        try:
            for kind in planes:
                if kind in self._arenas and not self._arenas[kind].pinned_bytes:
                    pinned.append(self._arenas[kind])
                    self._arenas[kind].register(self._cuts(kind))
        except BaseException:
            for arena in pinned:
                arena.unregister()
            raise

    @property
    def pinned_bytes(self) -> int:
        return sum(arena.pinned_bytes for arena in self._arenas.values())

    def plane_bytes(self) -> dict[str, int]:
        """Bytes of each plane kind, page rounding included."""
        return {kind: arena.nbytes for kind, arena in self._arenas.items()}

    def close(self) -> None:
        """Unpin and give the memory back. The planes must not be used any more."""
        self.units = {}
        for arena in self._arenas.values():
            arena.close()
        self._arenas = {}

    def _offsets(self, itemsize: int) -> list[int]:
        """Start of each unit in an arena of that item size, in bytes, page aligned; the end of the last one is appended."""
        offsets = [0]
        for _, layout in self._layouts:
            offsets.append(-(-(offsets[-1] + layout.numel * itemsize) // PAGE_BYTES) * PAGE_BYTES)
        return offsets

    def _plane(self, kind: str, dtype: torch.dtype) -> list[torch.Tensor]:
        offsets = self._offsets(dtype.itemsize)
        arena = self._arenas[kind] = Arena(max(offsets[-1], PAGE_BYTES))
        return [
            arena.tensor(offset, layout.numel, dtype)
            for offset, (_, layout) in zip(offsets, self._layouts, strict=False)
        ]

    def _cuts(self, kind: str) -> list[int]:
        itemsize = {"hi": 2 if self.split else 4, "lo": 2, "m": 4, "v": 4, "grad": 0}[kind]
        if kind == "grad":
            assert self.grad_dtype is not None
            itemsize = self.grad_dtype.itemsize
        return self._offsets(itemsize)
