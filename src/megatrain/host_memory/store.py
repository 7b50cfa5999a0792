"""The host store: the planes of every unit, in ordinary or pinned host memory.

[Note: what is pinned]
Only what a DMA engine reads or writes needs pinned memory: the hi planes (source of weight copies) and the gradient planes
(destination of gradient copies). lo and the optimizer's states are touched by host threads alone and stay pageable. Each
plane kind is one arena for all units; a unit starts at a page, so that registration chunks end between units and no copy
crosses two of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatrain.host_memory import planes as plane_math
from megatrain.host_memory.arena import Arena
from megatrain.host_memory.layout import FlatLayout

PAGE_BYTES = 4096


@dataclass
class UnitPlanes:
    """The state of one unit: flat tensors (layout.numel,) on the host.

    Attributes:
        name: The unit's name.
        layout: Names to offsets, the same for every plane.
        hi: bf16, the master rounded to nearest and the compute weight; or fp32, the master itself, when lo is None.
        lo: int16, the rest: `bits(master) = (hi << 16) + lo`.
        states: What the optimizer keeps of every element, by name (AdamW: m and v).
        grad: bf16 or fp32 gradients of the step; None where AdamW eats gradients as they arrive, and between the steps of a
            resident unit, whose gradient exists only from its backward to its update.
    """

    name: str
    layout: FlatLayout
    hi: torch.Tensor
    lo: torch.Tensor | None
    states: dict[str, torch.Tensor]
    grad: torch.Tensor | None = None
    resident: bool = False
    """The planes are on the training device, not in the host's arenas."""

    @classmethod
    def of(
        cls, name: str, layout: FlatLayout, planes: Mapping[str, torch.Tensor], resident: bool = False
    ) -> UnitPlanes:
        """From planes by kind: hi, lo where there is one, grad where there is one, and all others are states."""
        states = {kind: plane for kind, plane in planes.items() if kind not in ("hi", "lo", "grad")}
        return cls(name, layout, planes["hi"], planes.get("lo"), states, planes.get("grad"), resident)

    def read_master(self, name: str) -> torch.Tensor:
        """The exact fp32 master of one tensor, as a new CPU tensor of its shape."""
        hi = self.layout.view(self.hi, name)
        master = hi.clone() if self.lo is None else plane_math.join(hi, self.layout.view(self.lo, name))
        return master.cpu()

    def write_master(self, name: str, value: torch.Tensor) -> None:
        """Set one tensor's master from any floating dtype (widened to fp32: exact for bf16, fp16 and fp32)."""
        hi = self.layout.view(self.hi, name)
        assert value.shape == hi.shape, (name, tuple(value.shape), tuple(hi.shape))
        master = value.detach().to(torch.float32).contiguous()
        if self.lo is None:
            hi.copy_(master)
        elif master.device == hi.device:
            plane_math.split_(master, hi, self.layout.view(self.lo, name))
        else:  # split where the value is: a GPU does it in no time, and the two halves are copied instead of the whole
            halves = torch.empty_like(master, dtype=hi.dtype), torch.empty_like(master, dtype=self.lo.dtype)
            plane_math.split_(master, *halves)
            hi.copy_(halves[0])
            self.layout.view(self.lo, name).copy_(halves[1])

    def state(self) -> dict[str, torch.Tensor]:
        """The planes that a checkpoint holds, by kind: hi, lo where there is one, and the optimizer's states."""
        lo = {} if self.lo is None else {"lo": self.lo}
        return {"hi": self.hi, **lo, **self.states}


class HostStore:
    """Planes of all units, in forward order.

    Args:
        layouts: (unit name, layout) in forward order.
        split: True keeps hi (bf16) and lo (int16); False keeps the fp32 master in `hi`.
        states: Type of each state's plane by name: `OptimizerSpec.state_dtypes`.
        grad_dtype: Type of the gradient plane, None for no gradient plane.
        resident: Names of units whose planes live on `device` instead of in host memory.
        device: The training device.
    """

    def __init__(
        self,
        layouts: Sequence[tuple[str, FlatLayout]],
        *,
        split: bool,
        states: Mapping[str, torch.dtype],
        grad_dtype: torch.dtype | None,
        resident: Collection[str] = (),
        device: torch.device | None = None,
    ):
        self.split = split
        self.grad_dtype = grad_dtype
        self._layouts = [(name, layout) for name, layout in layouts if name not in resident]
        self._arenas: dict[str, Arena] = {}
        self._moved: list[tuple[str, Arena]] = []
        """(kind, arena of one unit), for units that have left the device."""
        self.dtypes = {"hi": torch.bfloat16 if split else torch.float32, **states}
        """Type of each plane kind."""
        if split:
            self.dtypes["lo"] = torch.int16
        if grad_dtype is not None:
            self.dtypes["grad"] = grad_dtype
        on_host = {kind: iter(self._plane(kind)) for kind in self.dtypes}
        self.units: dict[str, UnitPlanes] = {}
        for name, layout in layouts:
            if name in resident:
                kinds = {kind: dtype for kind, dtype in self.dtypes.items() if kind != "grad"}
                planes = {k: torch.zeros(layout.numel, dtype=t, device=device) for k, t in kinds.items()}
            else:
                planes = {kind: next(tensors) for kind, tensors in on_host.items()}
            self.units[name] = UnitPlanes.of(name, layout, planes, resident=name in resident)

    def on_host(self, name: str) -> UnitPlanes:
        """The unit's state for reading on the CPU: its own planes, or a copy of them where they are on a device."""
        planes = self.units[name]
        if not planes.resident:
            return planes
        return UnitPlanes.of(name, planes.layout, {kind: plane.cpu() for kind, plane in planes.state().items()})

    @contextlib.contextmanager
    def restoring(self, name: str) -> Iterator[UnitPlanes]:
        """The unit's state for writing on the CPU; copied back to the device at the end where it lives there."""
        host, planes = self.on_host(name), self.units[name]
        yield host
        if planes.resident:
            for kind, plane in host.state().items():
                planes.state()[kind].copy_(plane)

    def pin(self, planes: Sequence[str] = ("hi", "grad")) -> None:
        """Pin plane kinds that exist. Raises PinRefused from the first arena the driver refuses; nothing stays pinned then."""
        pinned: list[Arena] = []
        wanted = [(arena, self._cuts(kind)) for kind, arena in self._arenas.items() if kind in planes]
        wanted += [(arena, [0]) for kind, arena in self._moved if kind in planes]
        try:
            for arena, cuts in wanted:
                if not arena.pinned_bytes:
                    pinned.append(arena)
                    arena.register(cuts)
        except BaseException:
            for arena in pinned:
                arena.unregister()
            raise

    @property
    def pinned_bytes(self) -> int:
        return sum(arena.pinned_bytes for _, arena in self._all_arenas())

    def plane_bytes(self) -> dict[str, int]:
        """Bytes of each plane kind in host memory, page rounding included."""
        sizes = dict.fromkeys(self._arenas, 0)
        for kind, arena in self._all_arenas():
            sizes[kind] += arena.nbytes
        return sizes

    @property
    def resident_bytes(self) -> int:
        """Bytes of planes on the device."""
        planes = [p for p in self.units.values() if p.resident]
        return sum(plane.nbytes for p in planes for plane in (*p.state().values(), p.grad) if plane is not None)

    def close(self) -> None:
        """Unpin and give the memory back. The planes must not be used any more."""
        self.units = {}
        for _, arena in self._all_arenas():
            arena.close()
        self._arenas, self._moved = {}, []

    def move_to_host(self, name: str) -> None:
        """A resident unit leaves the device, which must be idle. Its planes are new, and not pinned yet."""
        unit = self.units[name]
        assert unit.resident, name
        old, new = unit.state(), {}
        for kind, dtype in self.dtypes.items():
            arena = Arena(max(unit.layout.numel * dtype.itemsize, PAGE_BYTES))
            self._moved.append((kind, arena))
            new[kind] = arena.tensor(0, unit.layout.numel, dtype)
            if kind in old:
                new[kind].copy_(old[kind])
        vars(unit).update(vars(UnitPlanes.of(name, unit.layout, new)))

    def widen_gradients(self) -> None:
        """Gradient planes become fp32, as sums over windows need. What they hold is lost; nothing may use them."""
        if self.grad_dtype is None or self.grad_dtype == torch.float32:
            return
        self.dtypes["grad"] = self.grad_dtype = torch.float32
        for unit in self.units.values():
            unit.grad = None
        for kind, arena in self._all_arenas():
            if kind == "grad":
                arena.close()
        self._moved = [(kind, arena) for kind, arena in self._moved if kind != "grad"]
        planes = dict(zip((name for name, _ in self._layouts), self._plane("grad"), strict=True))
        for unit in self.units.values():
            if unit.name in planes:
                unit.grad = planes[unit.name]
            elif not unit.resident:  # it came from the device
                arena = Arena(max(4 * unit.layout.numel, PAGE_BYTES))
                self._moved.append(("grad", arena))
                unit.grad = arena.tensor(0, unit.layout.numel, torch.float32)

    def _all_arenas(self) -> list[tuple[str, Arena]]:
        return [*self._arenas.items(), *self._moved]

    def _offsets(self, itemsize: int) -> list[int]:
        """Start of each unit in an arena of that item size, in bytes, page aligned; the end of the last one is appended."""
        offsets = [0]
        for _, layout in self._layouts:
            offsets.append(-(-(offsets[-1] + layout.numel * itemsize) // PAGE_BYTES) * PAGE_BYTES)
        return offsets

    def _plane(self, kind: str) -> list[torch.Tensor]:
        dtype = self.dtypes[kind]
        offsets = self._offsets(dtype.itemsize)
        arena = self._arenas[kind] = Arena(max(offsets[-1], PAGE_BYTES))
        return [
            arena.tensor(offset, layout.numel, dtype)
            for offset, (_, layout) in zip(offsets, self._layouts, strict=False)
        ]

    def _cuts(self, kind: str) -> list[int]:
        return self._offsets(self.dtypes[kind].itemsize)
