"""From a model in memory to the planes."""

from __future__ import annotations

from torch import nn

from megatrain.host_memory.store import HostStore
from megatrain.models.structure import Structure


def copy_from_memory(model: nn.Module, structure: Structure, store: HostStore) -> None:
    """Write every parameter of `model` (any floating dtype, any device) into the planes, one tensor at a time.

    Args:
        model: A model with the same parameter names as the one taken apart.
        structure: The model taken apart.
        store: Where to.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for unit in structure.units:
        for local, name in unit.full_names():
            store.units[unit.name].write_master(local, parameters[name])
