"""Putting the engine's device side together from its settings."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from megatrain.device.copier import Copier, DirectCopier, StagedCopier
from megatrain.device.ring import Slot, WeightRing
from megatrain.device.slabs import Slab, SlabPool
from megatrain.device.streams import Streams
from megatrain.errors import UserError
from megatrain.executor.weights import UpdateGate, WeightStream
from megatrain.host.arena import PinRefused
from megatrain.host.store import HostStore
from megatrain.models.build import build_from_memory, build_meta_model, load_model_config
from megatrain.models.structure import Structure, Unit

logger = logging.getLogger(__name__)


def build_model(
    model: str | Path | nn.Module, compute: torch.dtype, trust_remote_code: bool, attention: str | None
) -> Any:
    """The HF model with parameters on meta, from a folder's config or from a model in memory.

    Raises:
        UserError: The config asks for something that a streamed layer cannot give.
    """
    if isinstance(model, nn.Module):
        return build_from_memory(model, compute_dtype=compute)  # type: ignore[arg-type]
    config = load_model_config(model, trust_remote_code)
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        if getattr(part, "output_router_logits", False):
            raise UserError(
                "the router's auxiliary loss is not supported",
                f"{model}: output_router_logits",
                "set output_router_logits to false in config.json to train without it",
            )
    return build_meta_model(
        config, compute_dtype=compute, attn_implementation=attention, trust_remote_code=trust_remote_code
    )


def pin_planes(store: HostStore, streams: Streams, pin: Literal["auto", "all", "staged"]) -> bool:
    """Pin the planes that copies touch. Returns whether they are (on a CPU nothing needs to be)."""
    if not streams.cuda:
        return True
    if pin == "staged":
        return False
    try:
        store.pin()
    except PinRefused as refusal:
        if pin == "all":
            raise UserError(str(refusal), "memory.pin: all", "use memory.pin: staged, or raise the limit") from refusal
        logger.warning("%s; asked for memory.pin: auto, going on with memory.pin: staged (slower copies)", refusal)
        return False
    return True


def make_copier(store: HostStore, streams: Streams, pinned: bool) -> Copier:
    """Copies straight from pinned planes, or through staging buffers of the largest streamed unit's size."""
    if pinned:
        return DirectCopier(streams)
    streamed = [planes.hi.nbytes for planes in store.units.values() if not planes.resident]
    return StagedCopier(streams, max(streamed, default=0))


def make_weight_stream(
    structure: Structure,
    store: HostStore,
    streams: Streams,
    copier: Copier,
    compute: torch.dtype,
    count: int,
    gate: UpdateGate,
) -> WeightStream:
    """The ring for the streamed layers and a slot for each streamed edge."""

    def slot(numel: int) -> Slot:
        return Slot(streams, copier, numel, store.dtypes["hi"], compute)

    layers = _streamed(store, structure.layers)
    widest = max((unit.layout.numel for unit in layers), default=0)
    ring = WeightRing([slot(widest) for _ in range(min(count, max(2, len(layers))))])
    edges = [
        (unit, None if store.units[unit.name].resident else slot(unit.layout.numel))
        for unit in (structure.embedding, structure.head)
    ]
    return WeightStream(store, structure.layers, ring, edges, gate)


def make_slabs(
    structure: Structure, store: HostStore, streams: Streams, count: int, transport: torch.dtype
) -> tuple[SlabPool, dict[str, Slab]]:
    """The pool for the streamed layers' gradients, and one slab for each streamed edge by unit name."""
    layers = _streamed(store, structure.layers)
    widest = max((unit.layout.numel for unit in layers), default=0)
    pool = SlabPool(streams, max(1, min(count, len(layers))), widest, transport)
    edges = _streamed(store, (structure.embedding, structure.head))
    return pool, {unit.name: Slab(streams, unit.layout.numel, transport) for unit in edges}


def _streamed(store: HostStore, units: tuple[Unit, ...]) -> list[Unit]:
    return [unit for unit in units if not store.units[unit.name].resident]
