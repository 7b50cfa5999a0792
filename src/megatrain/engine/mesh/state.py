"""The state of all ranks as a store of units, each with an fp32 master and the optimizer's states.

The host engine's readers and writers work on a store of planes. `MeshState` is a store over sharded parameters: of what
they write into it, every rank keeps its boxes; for saving, units are gathered on the ranks that write (saving.py). So both
engines share one checkpoint format, and any layout reads any other's.

[Note: who sends what]
Every element has one sender: the first replicate rank, the first tensor rank if tensor ranks share it, the first stage if it is
tied. A parameter is gathered by point-to-point messages of exactly these boxes.

[Note: many gathers at once]
Several ranks receive a unit each at the same time. There are as many turns as ranks: in turn s, rank r sends rank r - s its
boxes and receives from rank r + s. So no rank ever sends to two or receives from two at once, and hosts receive in parallel. A
rank that waits for a message has memory for it alone. It posts the receive before it sends, so that two ranks waiting for each
other do not deadlock.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatrain.engine.mesh.data_parallel import Box, Devices, local
from megatrain.engine.mesh.gradients import Gradients
from megatrain.host_memory.layout import FlatLayout
from megatrain.host_memory.store import UnitPlanes
from megatrain.models.structure import Structure, Unit


@dataclass(frozen=True)
class _Held:
    """A local parameter: an untied one, or one end of a tie."""

    parameter: nn.Parameter
    box: Box
    optimizer: torch.optim.Optimizer


class _UnitView:
    """The interface of a unit's planes that `load_weights` and `initialize` use."""

    def __init__(self, state: MeshState, unit: Unit):
        self._state, self._unit = state, unit
        self.layout: FlatLayout = unit.layout

    def write_master(self, name: str, value: torch.Tensor) -> None:
        self._state.write(self._unit.prefix + name, value)


class MeshState:
    """Masters and optimizer states of the whole model, sharded over the ranks. Construction is collective.

    Args:
        structure: The whole model.
        gradients: Holds the local parameters and optimizers.
        devices: The mesh.
    """

    def __init__(self, structure: Structure, gradients: Gradients, devices: Devices):
        self._structure, self._devices = structure, devices
        self._states = gradients.states
        self._held: dict[str, list[_Held]] = {}
        for name, parameter, box, optimizer in gradients.all():
            owner = structure.tied.get(name, name)
            self._held.setdefault(owner, []).append(_Held(parameter, box, optimizer))
        at = devices.at
        sent = {
            name: box
            for name, (_, box) in gradients.owned().items()
            if at.replicate == 0 and (box.tensor_dim is not None or at.tensor == 0) and 0 not in box.sizes
        }
        self._senders: list[dict[str, Box]] = [{}] * devices.layout.world
        dist.all_gather_object(self._senders, sent)
        self.units = {unit.name: _UnitView(self, unit) for unit in structure.units}

    @property
    def local_units(self) -> set[str]:
        """Units that this rank holds a part of."""
        return {unit.name for unit in self._structure.units for _, full in unit.full_names() if full in self._held}

    def holder(self, unit: str) -> int | None:
        """The first rank that sends a part of a unit. None for a unit without parameters."""
        return next((rank for rank in range(len(self._senders)) if self._sent_by(rank, unit)), None)

    # ---------------------------------------------------------------- in

    @torch.no_grad()
    def write(self, name: str, value: torch.Tensor) -> None:
        """Keep this rank's boxes of a whole master; none if it holds none."""
        for held in self._held.get(name, []):
            own = local(held.parameter)
            own.copy_(value[held.box.slices].reshape(own.shape))

    @contextlib.contextmanager
    def restoring(self, name: str) -> Iterator[UnitPlanes]:
        """Whole fp32 planes of a unit, to be filled; at the end of the block this rank keeps its boxes of them."""
        planes = self.empty_planes(name, 1 + len(self._states))
        yield planes
        local_names = {full: local_name for local_name, full in self._unit(name).full_names()}
        found: dict[str, list[list[torch.Tensor]]] = {}
        for full, boxes in self.boxes(name).items():
            whole = [planes.layout.view(plane, local_names[full]) for plane in (planes.hi, *planes.states.values())]
            found[full] = [[plane[box] for plane in whole] for box in boxes]
        self.write_boxes(found)

    def boxes(self, unit: str) -> dict[str, list[tuple[slice, ...]]]:
        """This rank's boxes of a unit's parameters by full name: one, or that of each end of a tie."""
        return {
            full: [h.box.slices for h in self._held[full]]
            for _, full in self._unit(unit).full_names()
            if full in self._held
        }

    @torch.no_grad()
    def write_boxes(self, found: Mapping[str, Sequence[torch.Tensor | Sequence[torch.Tensor]]]) -> None:
        """Fill masters and states from (planes, box) for every box of `boxes`."""
        for name, values in found.items():
            for held, value in zip(self._held[name], values, strict=True):
                state = held.optimizer.state[held.parameter]
                own = local(held.parameter)
                own.copy_(value[0].reshape(own.shape))
                for spec, plane in zip(self._states, value[1:], strict=True):
                    state[spec.torch_key] = torch.zeros_like(held.parameter)
                    local(state[spec.torch_key]).copy_(plane.reshape(own.shape))

    def set_updates(self, updates: int) -> None:
        """Set the number of updates that the restored states have had."""
        for held in (h for several in self._held.values() for h in several):
            if updates == 0:
                held.optimizer.state.pop(held.parameter, None)
            else:
                here = local(held.parameter).device  # the fused kernel wants the count there
                held.optimizer.state[held.parameter]["step"] = torch.tensor(float(updates), device=here)

    # ---------------------------------------------------------------- out

    def sent_names(self, unit: str) -> list[str]:
        """Parameters of a unit that this rank sends a box of. See [Note: who sends what]."""
        return self._sent_by(dist.get_rank(), unit)

    def sent_bytes(self, unit: str, planes: int) -> int:
        """Bytes of their `part`s."""
        return 4 * planes * sum(math.prod(self._senders[dist.get_rank()][name].sizes) for name in self.sent_names(unit))

    def zeros(self, name: str, planes: int) -> torch.Tensor:
        """Zeros of the shape that `part` returns."""
        return self._values(dist.get_rank(), name, planes).zero_()

    def part(self, name: str, planes: int) -> torch.Tensor:
        """(planes, box): a CPU copy of this rank's master, then of the optimizer's states, in fp32.

        No copy is made on the device, which may lack gigabytes for the planes of an embedding.
        """
        held = self._held[name][0]
        state: Mapping[str, Any] = held.optimizer.state.get(held.parameter, {})
        sources = [held.parameter.detach(), *(state.get(spec.torch_key) for spec in self._states)]
        values = self.zeros(name, planes)
        for value, source in zip(values, sources, strict=False):
            if source is not None:
                value.copy_(local(source).reshape(value.shape))
        return values

    def empty_planes(self, unit: str, planes: int) -> UnitPlanes:
        """Zeroed planes of a whole unit for `gather` to fill; with 1 plane there are no states."""
        layout = self._unit(unit).layout
        hi, *states = (torch.zeros(layout.numel, dtype=torch.float32) for _ in range(planes))
        named = {spec.name: plane for spec, plane in zip(self._states, states, strict=False)}
        return UnitPlanes(unit, layout, hi, None, named)

    def gather(
        self,
        units: Mapping[int, str],
        whole: UnitPlanes | None,
        read: Callable[[str], torch.Tensor],
        group: dist.ProcessGroup,
        planes: int,
    ) -> None:
        """Gather units, each on its rank, at the same time. Collective. See [Note: many gathers at once].

        Args:
            units: Rank -> the unit that it receives.
            whole: `empty_planes` of this rank's unit, which are filled; None if it receives none.
            read: Returns a parameter's `part`, or a copy made earlier.
            group: All ranks, with gloo.
            planes: Number of planes; 1 for masters alone.
        """
        me, world = dist.get_rank(), dist.get_world_size()
        for turn in range(world):
            source, target = (me + turn) % world, (me - turn) % world
            incoming = self._sent_by(source, units[me]) if me in units else []
            outgoing = self._sent_by(me, units[target]) if target in units else []
            if turn == 0:
                for name in incoming:
                    self._insert(whole, me, name, read(name))
                continue
            for coming, going in itertools.zip_longest(incoming, outgoing):
                values = self._values(source, coming, planes) if coming is not None else torch.empty(0)
                arrival = dist.irecv(values, src=source, group=group) if coming is not None else None
                if going is not None:
                    dist.send(read(going), dst=target, group=group)
                if coming is not None and arrival is not None:
                    arrival.wait()
                    self._insert(whole, source, coming, values)

    def _values(self, sender: int, name: str, planes: int) -> torch.Tensor:
        """Uninitialised (planes, box) for what a rank sends of a parameter."""
        return torch.empty((planes, *self._senders[sender][name].sizes), dtype=torch.float32)

    def _sent_by(self, rank: int, unit: str) -> list[str]:
        return [full for _, full in self._unit(unit).full_names() if full in self._senders[rank]]

    def _insert(self, whole: UnitPlanes | None, sender: int, name: str, values: torch.Tensor) -> None:
        """Copy a parameter's (planes, box) to its place in the unit."""
        assert whole is not None
        local_name = name.removeprefix(self._unit(whole.name).prefix)
        for plane, value in zip((whole.hi, *whole.states.values()), values, strict=True):
            whole.layout.view(plane, local_name)[self._senders[sender][name].slices] = value

    def _unit(self, name: str) -> Unit:
        return next(unit for unit in self._structure.units if unit.name == name)


def everyone(ok: bool, device: torch.device) -> bool:
    """Whether it is so on all ranks. Collective."""
    word = torch.tensor([int(ok)], device=device)
    dist.all_reduce(word, op=dist.ReduceOp.MIN)
    return bool(word.item())
