"""Putting an engine's parts together from its settings: the model, its planes, the device side."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from megatrain.device.copier import Copier, DirectCopier, StagedCopier
from megatrain.device.ring import Slot, WeightRing
from megatrain.device.slabs import Slab, SlabPool
from megatrain.device.streams import Streams
from megatrain.engine.host.settings import refuse_if_too_large
from megatrain.engine.host.weights import UpdateGate, WeightStream
from megatrain.engine.parity_check import token_wise, verify_family
from megatrain.errors import UserError
from megatrain.host_memory.arena import PinRefused
from megatrain.host_memory.store import HostStore
from megatrain.models.build import (
    build_from_memory,
    build_meta_model,
    find_model_folder,
    fp32_parameter_names,
    load_model_config,
    refuse_no_causal_lm,
    refuse_router_loss,
)
from megatrain.models.shell import RunLayer, Shell
from megatrain.models.structure import Structure, Unit, dissect, persistent_buffers
from megatrain.models.weights import copy_from_memory, initialize, load_weights
from megatrain.optim.spec import OptimizerSpec, unmatched_groups

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parts:
    """A model taken apart, before it has any weights.

    Attributes:
        source: What the engine was given.
        source_folder: The model's folder, None for a model in memory.
        config: Of the whole model.
        structure: Its units.
        buffers: Every buffer by full name, on the CPU.
        persistent: Those that belong to the weights.
        fp32_names: Full names of parameters that HF keeps in fp32 whatever the compute dtype.
    """

    source: str | Path | nn.Module
    source_folder: Path | None
    config: Any
    structure: Structure
    buffers: dict[str, torch.Tensor]
    persistent: dict[str, torch.Tensor]
    fp32_names: frozenset[str]


def dissect_source(
    model: str | Path | nn.Module,
    compute: torch.dtype,
    optim: OptimizerSpec,
    verify: Literal["auto", "always", "never"],
    trust_remote_code: bool,
    attention: str | None,
) -> Parts:
    """Build a model on meta, take it apart, and verify its family. See `HostEngine`.

    Raises:
        UserError: The model is not usable, or its family is not computed exactly, or a group of `optim` has no parameter.
    """
    in_memory = isinstance(model, nn.Module)
    config = config_of(model, trust_remote_code)
    source_folder = None if in_memory else find_model_folder(model)
    meta = build_model(model, config, compute, trust_remote_code, attention)
    structure = dissect(meta)
    if verify == "always" or (verify == "auto" and not in_memory):
        verify_family(meta.config, always=verify == "always", trust_remote_code=trust_remote_code)
    refuse_unmatched_groups(structure, optim)
    return Parts(
        model,
        source_folder,
        meta.config,
        structure,
        buffers=dict(meta.named_buffers()),
        persistent=persistent_buffers(meta),
        fp32_names=frozenset(fp32_parameter_names(meta, compute)),
    )


def refuse_unmatched_groups(structure: Structure, optim: OptimizerSpec) -> None:
    """Raise a UserError for a parameter group whose pattern matches nothing."""
    for group in unmatched_groups((n for u in structure.units for _, n in u.full_names()), optim):
        raise UserError(f"no parameter matches the pattern {group.pattern!r}", "optim.groups")


def config_of(model: str | Path | nn.Module, trust_remote_code: bool) -> Any:
    """The config of a model in memory, or of a folder. Errors: see `refuse_no_causal_lm` and `load_model_config`."""
    if isinstance(model, str | Path):
        return load_model_config(model, trust_remote_code)
    refuse_no_causal_lm(model)
    return model.config


def build_model(
    model: str | Path | nn.Module, config: Any, dtype: torch.dtype, trust_remote_code: bool, attention: str | None
) -> Any:
    """The HF model with parameters of `dtype` on meta: a copy of a model in memory, or what a folder's config describes.

    Raises:
        UserError: The config asks for something that no engine gives, or transformers cannot build it.
    """
    in_memory = isinstance(model, nn.Module)
    refuse_router_loss(config, f"a {config.model_type} model in memory" if in_memory else str(model))
    if in_memory:
        return build_from_memory(model, compute_dtype=dtype)  # type: ignore[arg-type]
    return build_meta_model(
        config, compute_dtype=dtype, attn_implementation=attention, trust_remote_code=trust_remote_code
    )


def make_store(
    structure: Structure,
    optim: OptimizerSpec,
    resident: frozenset[str],
    compute: torch.dtype,
    grad_dtype: torch.dtype | None,
    device: torch.device,
    host_gib: float | None,
) -> HostStore:
    """The planes, where the host has room for them.

    Raises:
        PlanRefused: It has not.
    """
    is_split = compute == torch.bfloat16
    refuse_if_too_large(structure, optim, resident, is_split, grad_dtype, host_gib)
    units = [(unit.name, unit.layout) for unit in structure.units]
    return HostStore(
        units, split=is_split, states=optim.state_dtypes, grad_dtype=grad_dtype, resident=resident, device=device
    )


def fill(
    parts: Parts, store: HostStore, init: Literal["random", "empty"] | None, seed: int, device: torch.device
) -> None:
    """Masters and persistent buffers, from memory, from the family's own initialisation or from the folder's files."""
    if isinstance(parts.source, nn.Module):
        copy_from_memory(parts.source, parts.structure, store)
    elif init == "random":
        initialize(parts.structure, store, seed=seed, device=device)
    elif init == "empty":
        pass  # the engine refuses to compute before `load`
    else:
        assert parts.source_folder is not None
        load_weights(parts.source_folder, parts.structure, store, parts.persistent)


def make_shell(
    parts: Parts,
    device_buffers: Mapping[str, torch.Tensor],
    run_layer: RunLayer,
    *,
    flex: bool,
    compiled: bool,
    budget: float,
    mlp_chunk_tokens: int | None,
    keeps_mlps: bool,
    trust_remote_code: bool,
    attention: str | None,
) -> Shell:
    """HF's code around the layers. See `HostEngine` and `Shell`."""
    # As it is now: the shell changes the config's implementation for packed rows, and may ask in the middle of a run.
    attention = attention or parts.config._attn_implementation
    shell = Shell(
        parts.structure,
        device_buffers,
        run_layer,
        parts.fp32_names,
        compiled,
        budget,
        flex=flex,
        keeps_mlps=keeps_mlps,
        token_wise=lambda: token_wise(parts.config, attn_implementation=attention, trust_remote_code=trust_remote_code),
    )
    if mlp_chunk_tokens is not None:
        shell.compute_in_chunks(mlp_chunk_tokens)
    return shell


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
