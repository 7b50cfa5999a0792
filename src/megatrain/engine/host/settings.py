"""The engine's settings: what they resolve to on this machine, and which combinations cannot work."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import torch

from megatrain.errors import PlanRefused, UserError
from megatrain.host_memory.available import available_host_bytes
from megatrain.models.structure import Structure
from megatrain.optim.spec import MASTER_BYTES, OptimizerSpec
from megatrain.units import DTYPE_NAMES, GIB, DtypeName, abbreviated, gib, size_lines, torch_dtype

ComputeDtype = Literal["auto", DtypeName]
LOGITS_BYTES = 3 << 30
"""Budget for the logits of one token chunk with their gradients."""
MOST_THREADS = max(256, 4 * (os.cpu_count() or 1))
"""More AdamW threads than this only take each other's core and memory."""


@dataclass(frozen=True)
class Placement:
    """What lives where, and what is kept for the backward.

    Attributes:
        resident: Names of units whose planes are on the device.
        kept, selective, offloaded, attention, mlp: Layers, by index; see `HostEngine`.
    """

    resident: frozenset[str]
    kept: frozenset[int]
    selective: frozenset[int]
    offloaded: frozenset[int]
    attention: frozenset[int]
    mlp: frozenset[int]

    @classmethod
    def of(
        cls,
        structure: Structure,
        resident: Collection[str] | Literal["all"],
        kept: Collection[int] | Literal["all"],
        selective: Collection[int] | Literal["all"],
        offloaded: Collection[int] | Literal["all"],
        attention: Collection[int] | Literal["all"] = (),
        mlp: Collection[int] | Literal["all"] = (),
    ) -> Placement:
        """Resolve `all`."""
        layers = range(len(structure.layers))
        return cls(
            frozenset((unit.name for unit in structure.units) if resident == "all" else resident),
            *(
                frozenset(layers if chosen == "all" else chosen)
                for chosen in (kept, selective, offloaded, attention, mlp)
            ),
        )


def check_settings(
    optim: OptimizerSpec,
    compute: torch.dtype,
    gradient_plane: bool,
    at_least: dict[str, tuple[int | None, int]],
    threads: int | None = None,
) -> None:
    """Raise one UserError with everything that cannot work, before a model is looked at.

    Args:
        optim: Hyper-parameters.
        compute: Compute type.
        gradient_plane: Whether gradients wait for the norm.
        at_least: Setting -> (value or None for automatic, least value). Includes `windows`.
        threads: Of AdamW, None for automatic.
    """
    problems = [f"{n} = {value} is below {least}" for n, (value, least) in at_least.items() if (value or least) < least]
    problems += [f"{n} = 0 is below {least}" for n, (value, least) in at_least.items() if value == 0]
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        problems.append(f"threads = {threads} is not between 1 and {MOST_THREADS}")
    if not gradient_plane and optim.max_grad_norm is not None:
        problems.append("gradient_plane=False cannot clip: set max_grad_norm=None")
    if not gradient_plane and (at_least["accumulation_steps"][0] or 1) > 1:
        problems.append("gradient_plane=False cannot accumulate: set accumulation_steps=1")
    if not gradient_plane and compute == torch.float16:
        problems.append("gradient_plane=False cannot skip fp16 overflows: use bf16 or fp32")
    if problems:
        raise UserError("; ".join(problems), "HostEngine")


WORDS: dict[str, tuple[object, ...]] = {
    "pin": ("auto", "all", "staged"),
    "init": (None, "random", "empty"),
    "verify": ("auto", "always", "never"),
    "compile": ("auto", "on", "off"),
}


def check_words(**given: object) -> None:
    """Raise a UserError for the first setting that is none of its `WORDS`."""
    for name, value in given.items():
        check_choice(name, value, WORDS[name])


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise a UserError where a setting is none of its words."""
    if value not in choices:
        words = ", ".join(str(choice) for choice in choices)
        raise UserError(f"{name} = {value!r} is not one of {words}", "HostEngine")


def check_placement(
    structure: Structure, placement: Placement, segment: int, compute: torch.dtype, gradient_plane: bool
) -> None:
    """Raise one UserError with everything about the placement that cannot work for this model."""
    known = {unit.name for unit in structure.units}
    problems = [f"there is no unit {name}" for name in sorted(placement.resident - known)]
    parts = placement.attention | placement.mlp
    special = placement.kept | placement.selective | placement.offloaded | parts
    if any(not 0 <= layer < len(structure.layers) for layer in special):
        problems.append(
            "kept, selective, offloaded, keep_attention or keep_mlp names layers outside "
            f"0..{len(structure.layers) - 1}"
        )
    if special and segment > 1:
        problems.append("segment excludes kept, selective and offloaded layers, and such that keep a part")
    if placement.attention & placement.mlp:
        problems.append("a layer that keeps its attention and its MLP is a kept layer: name it in kept")
    if placement.resident and not gradient_plane:
        problems.append("resident units need their gradient plane: set gradient_plane=True")
    if placement.resident and compute == torch.float16:
        problems.append("resident units compute in bf16 or fp32")
    if problems:
        raise UserError("; ".join(problems), "HostEngine")


def refuse_if_too_large(
    structure: Structure,
    optim: OptimizerSpec,
    resident: Collection[str],
    split: bool,
    grad_dtype: torch.dtype | None,
    host_gib: float | None,
) -> None:
    """Compare the host's planes with what the machine has left, before any of it is allocated.

    Raises:
        PlanRefused: With the ledger.
    """
    parameters = sum(unit.layout.numel for unit in structure.units if unit.name not in resident)
    ledger = {
        "master (hi + lo)" if split else "master": MASTER_BYTES * parameters,
        f"{optim.name} states ({' + '.join(optim.state_dtypes)})": (optim.bytes_per_parameter - MASTER_BYTES)
        * parameters,
        "gradient plane": (grad_dtype.itemsize if grad_dtype else 0) * parameters,
    }
    available = available_host_bytes() if host_gib is None else int(host_gib * GIB)
    if sum(ledger.values()) > available:
        lines = "\n".join(size_lines(ledger, smallest_bytes=0))
        raise PlanRefused(
            f"{abbreviated(structure.param_count)} parameters need {gib(sum(ledger.values()))} of host memory, "
            f"{gib(available)} are available:\n{lines}\n"
            "  -> use a machine with more memory or a smaller model"
        )


def default_threads() -> int:
    """Threads of AdamW: one core stays with the thread that drives the device."""
    return max(1, len(os.sched_getaffinity(0)) - 1)


def head_chunk_tokens_of(vocabulary: int, compiled: bool) -> int:
    """Tokens whose logits fit the budget, as a power of two: eager code holds logits and gradients in bf16 and in fp32
    (12 bytes an entry), a compiled cross entropy in bf16 alone (4 bytes)."""
    fitting = LOGITS_BYTES // ((4 if compiled else 12) * vocabulary)
    return max(64, 1 << (fitting.bit_length() - 1)) if fitting else 64


def named_device(device: str | torch.device) -> torch.device:
    """The kind of device that a setting names, with the number that it gives, if any: `auto` is a GPU if there is one."""
    if str(device) == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    found = torch.device(device)
    if found.type not in ("cpu", "cuda"):
        raise UserError(f"device {found} is not supported", "run.device", "use cpu or cuda")
    return found


def device_of(device: str | torch.device) -> torch.device:
    """The device that a setting means on this machine."""
    found = named_device(device)
    if found.type == "cuda":
        if not torch.cuda.is_available():
            raise UserError("no CUDA device is available", "run.device: cuda", "use run.device: auto or cpu")
        found = torch.device("cuda", found.index if found.index is not None else torch.cuda.current_device())
    return found


def limit_device(device: torch.device, device_gib: float | None) -> int:
    """Let this process use `device_gib` of the device's memory, or all of it. Returns how many bytes those are, 0 on a CPU."""
    if device.type != "cuda":
        return 0
    total = torch.cuda.get_device_properties(device).total_memory
    if device_gib is None:
        return total
    torch.cuda.set_per_process_memory_fraction(min(1.0, device_gib * GIB / total), device)
    return min(total, int(device_gib * GIB))


def compute_dtype_of(name: ComputeDtype, device: torch.device) -> torch.dtype:
    """What layers compute in: `auto` is bf16 on a GPU that has it, else fp32."""
    check_choice("compute_dtype", name, ("auto", *DTYPE_NAMES))
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32
    return torch_dtype(name)


def transport_dtype_of(name: str, compute: torch.dtype) -> torch.dtype:
    """What gradients travel in: `auto` is fp32 with fp32 compute, else bf16."""
    check_choice("grad_transport", name, ("auto", "bf16", "fp32"))
    if name == "auto":
        return torch.float32 if compute == torch.float32 else torch.bfloat16
    return torch_dtype(name)
