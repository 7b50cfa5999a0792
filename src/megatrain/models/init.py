"""Random weights from a config alone, straight into the host store.

The initialisation is transformers' own `_init_weights`, run unit by unit: one unit's parameters become real, the modules that
can reach them are walked, the result goes into the planes, and the parameters are back on meta. Memory beside the planes is one
unit in fp32. Each unit has a seed of its own, so its values do not depend on the other units or on their order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from megatrain.host_memory.store import HostStore
from megatrain.models.build import mark_unfilled, refuse_unfilled, restore_buffers
from megatrain.models.structure import Structure, Unit, persistent_buffers


def initialize(structure: Structure, store: HostStore, *, seed: int, device: torch.device | str = "cpu") -> None:
    """Fill the masters of all units, and the model's persistent buffers, with the family's own initialisation.

    Values are drawn in fp32. The same seed gives the same bits on the same kind of device.

    Args:
        structure: A model with parameters on meta; they are on meta again afterwards.
        store: Receives the masters. Moments are left alone.
        seed: Seed of the run.
        device: Where the numbers are drawn; a GPU is far faster than the CPU for billions of them.

    Raises:
        UserError: The family does not initialise one of its tensors in `_init_weights`.
    """
    restore_buffers(_hf(structure), persistent_buffers(structure.model).keys())
    for unit in structure.units:
        if not unit.layout.entries:
            continue
        with _seeded(_unit_seed(seed, unit), torch.device(device)), _materialised(structure, unit, device) as real:
            for owner, module in _walk(structure, unit):
                owner._init_weights(module)
            refuse_unfilled(structure.model, real)
            for local, full in unit.full_names():
                store.units[unit.name].write_master(local, real[full])


def _hf(structure: Structure) -> PreTrainedModel:
    assert isinstance(structure.model, PreTrainedModel), type(structure.model)
    return structure.model


def _unit_seed(seed: int, unit: Unit) -> int:
    """63 bits from seed and name: `seed + index` would give unit 1 of seed 0 the values of unit 0 of seed 1."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{unit.name}".encode(), digest_size=8).digest(), "little") >> 1


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's global generators, which `_init_weights` draws from, and put them back afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(seed)
        yield


@contextmanager
def _materialised(structure: Structure, unit: Unit, device: torch.device | str) -> Iterator[dict[str, nn.Parameter]]:
    """The unit's parameters, real on `device` in fp32 and not yet filled; inside, the model's modules hold them.

    Aliases of a tied parameter stay on meta, so that only its owner's module initialises it, as in transformers, which ties
    after initialisation.
    """
    slots = {}
    real: dict[str, nn.Parameter] = {}
    try:
        for _, full in unit.full_names():
            path, _, leaf = full.rpartition(".")
            module = structure.model.get_submodule(path)
            meta = module._parameters[leaf]
            assert meta is not None, full
            slots[full] = (module, leaf, meta)
            empty = torch.empty(meta.shape, dtype=torch.float32, device=device)
            real[full] = module._parameters[leaf] = nn.Parameter(empty, requires_grad=False)
        mark_unfilled(real.values())
        yield real
    finally:
        for module, leaf, meta in slots.values():
            module._parameters[leaf] = meta


def _walk(structure: Structure, unit: Unit) -> Iterator[tuple[PreTrainedModel, nn.Module]]:
    """(owning PreTrainedModel, module) of all modules that can set the unit's parameters, children first.

    These are the unit's own modules and everything above them: `_init_weights` may set a parameter through its module, or
    through a parent (GPT-2 scales `c_proj` when it meets the attention block).
    """
    stack = structure.layers_name + "."
    root = _hf(structure)

    def visit(name: str, module: nn.Module, owner: PreTrainedModel) -> Iterator[tuple[PreTrainedModel, nn.Module]]:
        owner = module if isinstance(module, PreTrainedModel) else owner
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}" if name else child_name
            if unit.layer is None:
                inside = not path.startswith(stack)
            else:
                inside = (path + ".").startswith(unit.prefix) or unit.prefix.startswith(path + ".")
            if inside:
                yield from visit(path, child, owner)
        yield owner, module

    return visit("", root, root)
