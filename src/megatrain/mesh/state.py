"""The state of all ranks in the shape that loading and saving expect: units with a fp32 master and moments m, v.

The host engine's readers and writers work on a store of planes. `MeshState` is such a store over sharded parameters:
what they write into it, every rank cuts its boxes from; for saving, a unit is gathered on rank 0 (saving.py). So both engines
share one checkpoint format, and any layout reads any other's.

[Note: who sends what]
Every element has one sender: the first replicate rank, the first tensor rank of what tensor ranks share, the first stage of what
is tied. A parameter is gathered by point-to-point messages of exactly these boxes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatrain.host.layout import FlatLayout
from megatrain.host.store import UnitPlanes
from megatrain.mesh.data_parallel import Box, local
from megatrain.mesh.devices import Devices
from megatrain.mesh.gradients import Gradients
from megatrain.models.structure import Structure, Unit


@dataclass(frozen=True)
class _Held:
    """A local parameter: the first or the second end of a tie, or an untied one."""

    parameter: nn.Parameter
    box: Box
    optimizer: torch.optim.Optimizer


class _UnitView:
    """What `load_weights` and `initialize` need of a unit's planes."""

    def __init__(self, state: MeshState, unit: Unit):
        self._state, self._unit = state, unit
        self.layout: FlatLayout = unit.layout

    def write_master(self, name: str, value: torch.Tensor) -> None:
        self._state.write(self._unit.prefix + name, value)


class MeshState:
    """Masters and moments of the whole model, spread over the ranks. Construction is collective.

    Args:
        structure: The whole model.
        gradients: Holds the local parameters and optimizers.
        devices: The mesh.
    """

    def __init__(self, structure: Structure, gradients: Gradients, devices: Devices):
        self._structure, self._devices = structure, devices
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
        self._sent = sent
        self.units = {unit.name: _UnitView(self, unit) for unit in structure.units}

    @property
    def local_units(self) -> set[str]:
        """Units of which this rank holds a part."""
        return {unit.name for unit in self._structure.units for _, full in unit.full_names() if full in self._held}

    # ---------------------------------------------------------------- in

    @torch.no_grad()
    def write(self, name: str, value: torch.Tensor) -> None:
        """Cut this rank's boxes of a whole master. Names that it does not hold are passed over."""
        for held in self._held.get(name, []):
            own = local(held.parameter)
            own.copy_(value[held.box.slices].reshape(own.shape))

    @contextlib.contextmanager
    def restoring(self, name: str) -> Iterator[UnitPlanes]:
        """Whole fp32 planes of a unit to be filled; this rank's boxes are cut from them at the end."""
        unit = self._unit(name)
        planes = _empty_planes(unit)
        yield planes
        for entry_name, full in unit.full_names():
            self.write(full, unit.layout.view(planes.hi, entry_name))
            for held in self._held.get(full, []):
                state = held.optimizer.state[held.parameter]
                for key, plane in (("exp_avg", planes.m), ("exp_avg_sq", planes.v)):
                    state[key] = torch.zeros_like(held.parameter)
                    own = local(state[key])
                    own.copy_(unit.layout.view(plane, entry_name)[held.box.slices].reshape(own.shape))

    def boxes(self, unit: str) -> dict[str, list[tuple[slice, ...]]]:
        """What this rank holds of a unit's parameters: name -> the box of each end of a tie, or of the one there is."""
        return {
            full: [h.box.slices for h in self._held[full]]
            for _, full in self._unit(unit).full_names()
            if full in self._held
        }

    @torch.no_grad()
    def write_boxes(self, found: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Fill masters and moments from the (3, box) of every box of `boxes`."""
        for name, values in found.items():
            for held, value in zip(self._held[name], values, strict=True):
                state = held.optimizer.state[held.parameter]
                own = local(held.parameter)
                own.copy_(value[0].reshape(own.shape))
                for key, moment in (("exp_avg", value[1]), ("exp_avg_sq", value[2])):
                    state[key] = torch.zeros_like(held.parameter)
                    local(state[key]).copy_(moment.reshape(own.shape))

    def set_updates(self, updates: int) -> None:
        """The number of updates behind the moments that were restored."""
        for held in (h for several in self._held.values() for h in several):
            if updates == 0:
                held.optimizer.state.pop(held.parameter, None)
            else:
                here = local(held.parameter).device  # where the fused kernel wants the count
                held.optimizer.state[held.parameter]["step"] = torch.tensor(float(updates), device=here)

    # ---------------------------------------------------------------- out

    def sent_names(self, unit: str) -> list[str]:
        """Parameters of a unit of which this rank sends a box. See [Note: who sends what]."""
        return [full for _, full in self._unit(unit).full_names() if full in self._sent]

    def sent_bytes(self, unit: str, planes: int) -> int:
        """Of what `part` gives for them."""
        return 4 * planes * sum(math.prod(self._sent[name].sizes) for name in self.sent_names(unit))

    def part(self, name: str, planes: int) -> torch.Tensor:
        """(planes, box): this rank's master, and with 3 planes m and v, in fp32: a copy on the CPU, made when it returns.

        The device holds no copy in between: three planes of an embedding are gigabytes, which a save may not find there.
        """
        held = self._held[name][0]
        state: Mapping[str, Any] = held.optimizer.state.get(held.parameter, {})
        sources = [held.parameter.detach(), *(state.get(key) for key in ("exp_avg", "exp_avg_sq"))]
        values = torch.zeros((planes, *held.box.sizes), dtype=torch.float32)
        for value, source in zip(values, sources, strict=False):
            if source is not None:
                value.copy_(local(source).reshape(value.shape))
        return values

    def gather(
        self, name: str, read: Callable[[str], torch.Tensor], group: dist.ProcessGroup, planes: int
    ) -> UnitPlanes:
        """A unit's planes. Collective: rank 0 gets them, the other ranks get empty ones.

        Args:
            name: The unit.
            read: Gives what `part` gives, now or from a copy.
            group: All ranks, with gloo.
            planes: 3, or 1 for masters alone: m and v are zero then.
        """
        unit, me = self._unit(name), dist.get_rank()
        whole = _empty_planes(unit) if me == 0 else _no_planes(unit)
        for entry_name, full in unit.full_names():
            for rank, boxes in enumerate(self._senders):
                if full not in boxes or me not in (rank, 0):
                    continue
                if rank != me:
                    values = torch.empty((planes, *boxes[full].sizes), dtype=torch.float32)
                    dist.recv(values, src=rank, group=group)
                else:
                    values = read(full)
                if me != 0:
                    dist.send(values, dst=0, group=group)
                    continue
                for plane, value in zip((whole.hi, whole.m, whole.v), values, strict=False):
                    unit.layout.view(plane, entry_name)[boxes[full].slices] = value
        return whole

    def _unit(self, name: str) -> Unit:
        return next(unit for unit in self._structure.units if unit.name == name)


def _empty_planes(unit: Unit) -> UnitPlanes:
    hi, m, v = (torch.zeros(unit.layout.numel, dtype=torch.float32) for _ in range(3))
    return UnitPlanes(unit.name, unit.layout, hi, None, m, v)


def _no_planes(unit: Unit) -> UnitPlanes:
    nothing = torch.empty(0)
    return UnitPlanes(unit.name, unit.layout, nothing, None, nothing, nothing)


def agree(ok: bool, device: torch.device) -> bool:
    """Rank 0's word, on every rank. Collective."""
    word = torch.tensor([int(ok)], device=device)
    dist.broadcast(word, src=0)
    return bool(word.item())


def everyone(ok: bool, device: torch.device) -> bool:
    """Whether all ranks say yes. Collective."""
    word = torch.tensor([int(ok)], device=device)
    dist.all_reduce(word, op=dist.ReduceOp.MIN)
    return bool(word.item())
