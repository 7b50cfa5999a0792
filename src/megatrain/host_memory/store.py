"""The host store: the planes of every unit, in pageable or pinned host memory, or on the device.

[Note: what is pinned]
Only memory that DMA reads or writes is pinned: the hi planes (source of weight copies) and the gradient planes (destination of
gradient copies). lo and the optimizer's states are touched by host threads alone and stay pageable. Each plane kind is one arena
for all units. Units start at pages, so that registration chunks end between units and no copy crosses two of them.

[Note: exact split]
`bits(master) == (hi << 16) + lo` in wrapping int32 arithmetic, where `hi` is bf16 (its bits read as int16) and `lo` is int16.
`hi = (bits + 0x8000) >> 16` is the master rounded to the nearest bf16, so it is the compute weight as it is. Ties round away from
zero, unlike torch's cast (ties to even): rounded down, a tie would need lo = +32768, which int16 does not have.
Integer arithmetic wraps, so the pair restores every bit pattern: subnormals, infinities, NaN payloads. `hi` alone turns a finite
master above the largest bf16 into infinity, and may turn a NaN into infinity or zero; the finite guard keeps masters from both.
`optim/kernels.py` fuses the split with the update.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatrain.host_memory.arena import Arena, page_ceil
from megatrain.host_memory.layout import WHOLE, FlatLayout, Shard, elements_per_value, values_of

# Bounds the int32 temporaries to a few times 16 MiB.
_BLOCK_NUMEL = 1 << 22


def split_(master: torch.Tensor, hi: torch.Tensor, lo: torch.Tensor) -> None:
    """Write `master` (fp32) to the planes `hi` (bf16) and `lo` (int16); all contiguous, of equal size. [Note: exact split]"""
    for bits, hi_bits, lo_bits in _blocks(master, hi, lo):
        rounded = (bits + 0x8000) >> 16
        hi_bits.copy_(rounded)
        lo_bits.copy_(bits - (rounded << 16))


def join(hi: torch.Tensor, lo: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The fp32 master of two planes, in `out` or a new tensor of `hi`'s shape: the inverse of `split_`."""
    if out is None:
        out = torch.empty(hi.shape, dtype=torch.float32, device=hi.device)
    for bits, hi_bits, lo_bits in _blocks(out, hi, lo):
        bits.copy_((hi_bits.to(torch.int32) << 16) + lo_bits)
    return out


def _blocks(master: torch.Tensor, hi: torch.Tensor, lo: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Blocks of the bits of master (int32), hi and lo (int16)."""
    found, needed = (master.dtype, hi.dtype, lo.dtype), (torch.float32, torch.bfloat16, torch.int16)
    assert found == needed, found
    assert master.numel() == hi.numel() == lo.numel(), (master.numel(), hi.numel(), lo.numel())
    bits_N = master.view(-1).view(torch.int32), hi.view(-1).view(torch.int16), lo.view(-1)
    for start in range(0, hi.numel(), _BLOCK_NUMEL):
        yield tuple(bits[start : start + _BLOCK_NUMEL] for bits in bits_N)


@dataclass
class UnitPlanes:
    """The planes of one unit, or of this rank's shard of it: flat tensors; hi is (n,), the others are its first (t,) elements.

    t is n unless the unit has frozen tensors, which lie behind the trained ones: of these hi is all there is. Planes of scales
    have a value per block.

    Attributes:
        hi, lo: The master, see [Note: exact split]; hi is the compute weight. If lo is None, hi is the fp32 master itself.
        states: The optimizer's states by name (AdamW: m and v).
        grad: Gradient of the step, bf16 or fp32. None if the update is fused with the arrival of gradients; a resident unit's
            gradient exists only from its backward to its update.
        resident: The planes are on the training device instead of in host memory.
        start: Element of the layout's range that is element 0 of the planes: 0 unless they are a shard.
    """

    name: str
    layout: FlatLayout
    hi: torch.Tensor
    lo: torch.Tensor | None
    states: dict[str, torch.Tensor]
    grad: torch.Tensor | None = None
    resident: bool = False
    start: int = 0

    @classmethod
    def of(
        cls,
        name: str,
        layout: FlatLayout,
        planes: Mapping[str, torch.Tensor],
        resident: bool = False,
        start: int = 0,
    ) -> UnitPlanes:
        """A unit from planes by kind: hi, optionally lo and grad; all others are states."""
        states = {kind: plane for kind, plane in planes.items() if kind not in ("hi", "lo", "grad")}
        return cls(name, layout, planes["hi"], planes.get("lo"), states, planes.get("grad"), resident, start)

    @property
    def numel(self) -> int:
        """Elements of hi."""
        return self.hi.numel()

    @property
    def trained_numel(self) -> int:
        """Elements of each other plane."""
        return min(max(self.layout.trained_numel - self.start, 0), self.numel)

    def part(self, name: str) -> tuple[slice, slice]:
        """The part of one tensor that lies in the planes: in the flattened tensor, and in the planes. May be empty."""
        entry = self.layout.by_name[name]
        first, end = max(entry.offset, self.start), min(entry.end, self.start + self.numel)
        end = max(first, end)
        return slice(first - entry.offset, end - entry.offset), slice(first - self.start, end - self.start)

    def state_of(self, kind: str, name: str) -> torch.Tensor:
        """The part of a state's plane that belongs to one tensor: in its shape, or its scales (blocks,). For whole units."""
        if elements_per_value(kind) == 1:
            return self.layout.view(self.states[kind], name)
        entry = self.layout.by_name[name]
        return self.states[kind][values_of(kind, slice(entry.offset, entry.end))]

    def read_master(self, name: str) -> torch.Tensor:
        """The exact fp32 master of one tensor, as a new CPU tensor. The planes must hold the whole unit."""
        hi = self.layout.view(self.hi, name)
        if self.lo is not None and not self.layout.is_trained(name):
            return hi.float().cpu()
        master = hi.clone() if self.lo is None else join(hi, self.layout.view(self.lo, name))
        return master.cpu()

    def write_master(self, name: str, value: torch.Tensor) -> None:
        """Set one tensor's master, or the part that the planes hold, from any floating dtype, widened to the master's."""
        shape = self.layout.by_name[name].shape
        assert value.shape == shape, (name, tuple(value.shape), shape)
        wanted, own = self.part(name)
        hi = self.hi[own]
        value = value.detach().contiguous().view(-1)[wanted]
        if self.lo is None or not self.layout.is_trained(name):
            hi.copy_(value.to(hi.dtype))
            return
        lo, master = self.lo[own], value.to(torch.float32)
        if master.device == hi.device:
            split_(master, hi, lo)
        else:  # split on the value's device, a GPU: faster than on the CPU
            halves = torch.empty_like(master, dtype=hi.dtype), torch.empty_like(master, dtype=lo.dtype)
            split_(master, *halves)
            hi.copy_(halves[0])
            lo.copy_(halves[1])

    def state(self) -> dict[str, torch.Tensor]:
        """The planes that make up a checkpoint, by kind: hi, lo if there is one, and the optimizer's states."""
        lo = {} if self.lo is None else {"lo": self.lo}
        return {"hi": self.hi, **lo, **self.states}


class HostStore:
    """Planes of all units, or of one shard of each.

    Args:
        layouts: (unit name, layout) in forward order.
        split: Keep masters as hi (bf16) and lo (int16) instead of fp32.
        states: Storage type of each optimizer state: `OptimizerSpec.state_dtypes`.
        grad_dtype: Type of the gradient planes, None for no gradient planes.
        resident: Units whose planes live on `device`, the training device.
        shard: The part of every unit that is held here.
        whole_dtype: Type of masters that are not split.

    Attributes:
        units: Planes by unit name, in forward order.
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
        shard: Shard = WHOLE,
        whole_dtype: torch.dtype = torch.float32,
    ):
        self.shard = shard
        self.split = split
        self.grad_dtype = grad_dtype
        self._layouts = [(name, layout) for name, layout in layouts if name not in resident]
        self._arenas: dict[str, Arena] = {}
        self._moved: list[tuple[str, Arena]] = []  # (kind, arena) of single units that have left the device
        self.dtypes = {"hi": torch.bfloat16 if split else whole_dtype, **states}
        if split:
            self.dtypes["lo"] = torch.int16
        if grad_dtype is not None:
            self.dtypes["grad"] = grad_dtype
        on_host = {kind: iter(self._plane(kind)) for kind in self.dtypes}
        self.units: dict[str, UnitPlanes] = {}
        for name, layout in layouts:
            if name in resident:
                kinds = {kind: dtype for kind, dtype in self.dtypes.items() if kind != "grad"}
                planes = {
                    kind: torch.zeros(self._numel(kind, layout), dtype=dtype, device=device)
                    for kind, dtype in kinds.items()
                }
            else:
                planes = {kind: next(tensors) for kind, tensors in on_host.items()}
            self.units[name] = UnitPlanes.of(name, layout, planes, name in resident, shard.start(layout))

    def on_host(self, name: str) -> UnitPlanes:
        """The unit's planes for reading on the CPU; of a resident unit a copy."""
        planes = self.units[name]
        if not planes.resident:
            return planes
        copies = {kind: plane.cpu() for kind, plane in planes.state().items()}
        return UnitPlanes.of(name, planes.layout, copies, start=planes.start)

    @contextlib.contextmanager
    def restoring(self, name: str) -> Iterator[UnitPlanes]:
        """The unit's planes for writing on the CPU; those of a resident unit are copied to the device on exit."""
        host, planes = self.on_host(name), self.units[name]
        yield host
        if planes.resident:
            for kind, plane in host.state().items():
                planes.state()[kind].copy_(plane)

    def pin(self, planes: Sequence[str] = ("hi", "grad")) -> None:
        """Pin planes of these kinds. Raises PinRefused if the driver refuses an arena; nothing is pinned then."""
        pinned: list[Arena] = []
        wanted = [(arena, self._offsets(kind)) for kind, arena in self._arenas.items() if kind in planes]
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
        """Bytes in host memory by plane kind, page rounding included."""
        sizes = dict.fromkeys(self._arenas, 0)
        for kind, arena in self._all_arenas():
            sizes[kind] += arena.nbytes
        return sizes

    @property
    def resident_bytes(self) -> int:
        planes = [p for p in self.units.values() if p.resident]
        return sum(plane.nbytes for p in planes for plane in (*p.state().values(), p.grad) if plane is not None)

    def close(self) -> None:
        """Unpin and release the memory. The planes must not be used any more."""
        self.units = {}
        for _, arena in self._all_arenas():
            arena.close()
        self._arenas, self._moved = {}, []

    def move_to_host(self, name: str) -> None:
        """Move a resident unit to host memory. The device must be idle. The new planes are not pinned yet."""
        unit = self.units[name]
        assert unit.resident, name
        old, new = unit.state(), {}
        for kind in self.dtypes:
            new[kind] = self._own_plane(kind, unit.layout)
            if kind in old:
                new[kind].copy_(old[kind])
        vars(unit).update(vars(UnitPlanes.of(name, unit.layout, new, start=unit.start)))

    def widen_gradients(self) -> None:
        """Replace the gradient planes by fp32 ones, for accumulation. Their contents are lost; nothing may be using them."""
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
            elif not unit.resident:  # moved from the device
                unit.grad = self._own_plane("grad", unit.layout)

    def _all_arenas(self) -> list[tuple[str, Arena]]:
        return [*self._arenas.items(), *self._moved]

    def _numel(self, kind: str, layout: FlatLayout) -> int:
        """Values of a unit's plane of this kind."""
        numel = self.shard.numel(layout) if kind == "hi" else self.shard.trained_numel(layout)
        return -(-numel // elements_per_value(kind))

    def _offsets(self, kind: str) -> list[int]:
        """Page-aligned start of each unit in a kind's arena, in bytes; then the end of the last one."""
        offsets, itemsize = [0], self.dtypes[kind].itemsize
        for _, layout in self._layouts:
            offsets.append(page_ceil(offsets[-1] + self._numel(kind, layout) * itemsize))
        return offsets

    def _plane(self, kind: str) -> list[torch.Tensor]:
        """The planes of one kind of all units on the host, in a new arena."""
        dtype, offsets = self.dtypes[kind], self._offsets(kind)
        arena = self._arenas[kind] = Arena(offsets[-1])
        sizes = [self._numel(kind, layout) for _, layout in self._layouts]
        return [arena.tensor(offset, numel, dtype) for offset, numel in zip(offsets, sizes, strict=False)]

    def _own_plane(self, kind: str, layout: FlatLayout) -> torch.Tensor:
        """A plane of one unit, in a new arena."""
        numel, dtype = self._numel(kind, layout), self.dtypes[kind]
        arena = Arena(numel * dtype.itemsize)
        self._moved.append((kind, arena))
        return arena.tensor(0, numel, dtype)
