"""Putting an engine's parts together from its settings: the model, its planes, the device side."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from megatrain.engine.base import build_model, config_of
from megatrain.engine.parity_check import token_wise
from megatrain.engine.plan import ExecutionPlan
from megatrain.errors import PlanRefused
from megatrain.host_memory.available import available_host_bytes
from megatrain.host_memory.store import HostStore
from megatrain.models.build import (
    find_model_folder,
    fp32_parameter_names,
)
from megatrain.models.shell import RunLayer, Shell
from megatrain.models.structure import Structure, dissect, persistent_buffers
from megatrain.models.weights import copy_from_memory, initialize, load_weights
from megatrain.optim.spec import MASTER_BYTES, OptimizerSpec
from megatrain.units import GIB, abbreviated, gib, size_lines

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
    trust_remote_code: bool,
    attention: str | None,
) -> Parts:
    """Build a model on meta and take it apart. See `HostEngine`.

    Raises:
        UserError: The model is not usable.
    """
    in_memory = isinstance(model, nn.Module)
    config = config_of(model, trust_remote_code)
    source_folder = None if in_memory else find_model_folder(model)
    meta = build_model(model, config, compute, trust_remote_code, attention)
    structure = dissect(meta)
    return Parts(
        model,
        source_folder,
        meta.config,
        structure,
        buffers=dict(meta.named_buffers()),
        persistent=persistent_buffers(meta),
        fp32_names=frozenset(fp32_parameter_names(meta, compute)),
    )


def make_store(structure: Structure, optim: OptimizerSpec, plan: ExecutionPlan, device: torch.device) -> HostStore:
    """The planes, in host memory and on the device.

    Raises:
        PlanRefused: The host has no room for its planes. The message lists them.
    """
    is_split, grad_dtype, resident = plan.compute == torch.bfloat16, plan.gradient_dtype, frozenset(plan.resident)
    parameters = sum(unit.layout.numel for unit in structure.units if unit.name not in resident)
    states = f"{optim.name} states ({' + '.join(optim.state_dtypes)})"
    planes = {
        "master (hi + lo)" if is_split else "master": MASTER_BYTES * parameters,
        states: (optim.bytes_per_parameter - MASTER_BYTES) * parameters,
        "gradient plane": (grad_dtype.itemsize if grad_dtype else 0) * parameters,
    }
    needed = sum(planes.values())
    available = available_host_bytes() if plan.host_gib is None else int(plan.host_gib * GIB)
    if needed > available:
        lines = "\n".join(size_lines(planes, smallest_bytes=0))
        raise PlanRefused(
            f"{abbreviated(structure.param_count)} parameters need {gib(needed)} of host memory, "
            f"{gib(available)} are available:\n{lines}\n"
            "  -> use a machine with more memory or a smaller model"
        )
    units = [(unit.name, unit.layout) for unit in structure.units]
    return HostStore(
        units, split=is_split, states=optim.state_dtypes, grad_dtype=grad_dtype, resident=resident, device=device
    )


def limit_device(device: torch.device, device_gib: float | None) -> int:
    """Limit this process to `device_gib` of the device's memory. Returns the bytes it may use, 0 on a CPU."""
    if device.type != "cuda":
        return 0
    total = torch.cuda.get_device_properties(device).total_memory
    if device_gib is None:
        return total
    torch.cuda.set_per_process_memory_fraction(min(1.0, device_gib * GIB / total), device)
    return min(total, int(device_gib * GIB))


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
    plan: ExecutionPlan,
    *,
    flex: bool,
    trust_remote_code: bool,
) -> Shell:
    """HF's code around the layers. See `HostEngine` and `Shell`."""
    assert isinstance(plan.activations, Mapping), "not resolved for a model"
    # As it is now: the shell changes the config's implementation for packed rows, and may ask in the middle of a run.
    attention = plan.attn_implementation or parts.config._attn_implementation
    shell = Shell(
        parts.structure,
        device_buffers,
        run_layer,
        parts.fp32_names,
        plan.compiled,
        plan.selective_budget,
        flex=flex,
        keeps_mlps="keep_mlp" in plan.activations.values(),
        token_wise=lambda: token_wise(parts.config, attn_implementation=attention, trust_remote_code=trust_remote_code),
    )
    if plan.mlp_chunk_tokens is not None:
        shell.compute_in_chunks(plan.mlp_chunk_tokens)
    return shell
