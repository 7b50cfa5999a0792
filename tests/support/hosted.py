"""Models of the family table in a host store, for tests of weights, initialisation and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from families import FAMILIES, Family, build
from megatrain.checkpoint.reader import OpenCheckpoint
from megatrain.checkpoint.writer import SavePlan, plan_save, plan_units, write_planned
from megatrain.host_memory.store import HostStore
from megatrain.models.build import build_meta_model, load_model_config
from megatrain.models.structure import Structure, dissect, persistent_buffers
from megatrain.models.weights import load_weights
from megatrain.optim.adamw import AdamW

BY_NAME = {family.name: family for family in FAMILIES}


@dataclass
class Hosted:
    """A model on meta with empty planes."""

    structure: Structure
    store: HostStore
    buffers: dict[str, torch.Tensor]

    def masters(self) -> dict[str, torch.Tensor]:
        return {
            full: self.store.units[unit.name].read_master(local)
            for unit in self.structure.units
            for local, full in unit.full_names()
        }

    def planes(self) -> dict[str, torch.Tensor]:
        """Every plane of every unit, for comparisons bit by bit."""
        return {
            f"{name}.{plane}": tensor
            for name, unit in self.store.units.items()
            for plane, tensor in unit.state().items()
        }

    def randomise(self, seed: int) -> None:
        """Masters with all their bits in use, and moments, as after some steps of training."""
        generator = torch.Generator().manual_seed(seed)
        for unit in self.structure.units:
            planes = self.store.units[unit.name]
            for entry in unit.layout.entries:
                planes.write_master(entry.name, torch.randn(entry.shape, generator=generator) * 0.3)
                planes.layout.view(planes.states["m"], entry.name).normal_(generator=generator)
                planes.layout.view(planes.states["v"], entry.name).uniform_(generator=generator)


def host(model: PreTrainedModel, split: bool) -> Hosted:
    structure = dissect(model)
    store = HostStore(
        [(unit.name, unit.layout) for unit in structure.units],
        split=split,
        states=AdamW().state_dtypes,
        grad_dtype=None,
    )
    return Hosted(structure, store, persistent_buffers(model))


def host_folder(folder: Path, split: bool = True) -> Hosted:
    """The folder's model without its weights."""
    dtype = torch.bfloat16 if split else torch.float32
    return host(build_meta_model(load_model_config(folder), compute_dtype=dtype), split)


def save_family(family: str | Family, folder: Path, tie: bool | None = None, dtype: torch.dtype = torch.float32):
    """Save a model of the family as transformers does, and return it."""
    model = build(BY_NAME[family] if isinstance(family, str) else family, seed=0, tie=tie).to(dtype)
    model.save_pretrained(folder)
    return model


def trained(folder: Path, split: bool = True, seed: int = 1) -> Hosted:
    """The folder's model with a state as after training."""
    hosted = host_folder(folder, split)
    load_weights(folder, hosted.structure, hosted.store, hosted.buffers)
    hosted.randomise(seed)
    for buffer in hosted.buffers.values():
        if buffer.is_floating_point():
            buffer.add_(0.125)
    return hosted


def save(hosted: Hosted, target: Path, source: Path | None, **state) -> Path:
    return save_as(hosted, target, {"step": 1, **state}, source)


def plan_of(
    hosted: Hosted,
    target: Path,
    state: dict[str, Any],
    source: Path | None,
    *,
    weights_only: bool = False,
    **options: Any,
) -> SavePlan:
    units = plan_units(hosted.structure, hosted.buffers, AdamW(), weights_only)
    return plan_save(target, hosted.structure, units, state, source, **options)


def save_as(hosted: Hosted, target: Path, state: dict[str, Any], source: Path | None, **options: Any) -> Path:
    """With further options of `plan_of`."""
    state = {"step": 0, "updates": 0, "seed": 0, "extra": {}, **state}
    plan = plan_of(hosted, target, state, source, **options)
    write_planned(plan, ((unit, hosted.store.on_host(unit.name)) for unit in plan.units))
    return target


def load(target: Path, hosted: Hosted) -> dict:
    """Restore everything and return the state it was saved with."""
    with OpenCheckpoint(target, hosted.structure, AdamW()) as opened:
        for unit in hosted.structure.units:
            opened.restore(unit, hosted.store, hosted.buffers)
        return opened.state


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def assert_same_state(a: Hosted, b: Hosted) -> None:
    mine, other = a.planes(), b.planes()
    assert mine.keys() == other.keys()
    assert all(torch.equal(as_bits(mine[key]), as_bits(other[key])) for key in mine)
    assert all(torch.equal(a.buffers[key], b.buffers[key]) for key in a.buffers)
