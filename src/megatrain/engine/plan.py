"""`ExecutionPlan`: how an engine computes its steps. Changes memory and speed, never the result.

    run config or `megatrain.plan`  -->  ExecutionPlan  --resolved for a model and a device-->  StepShape of one batch

The planner returns a plan, the report prints it, `HostEngine` follows it, and recovery from device OOM is `plan.reduced`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

import torch

from megatrain.engine.batches import BatchShape
from megatrain.errors import PlanRefused, UserError
from megatrain.models.structure import Structure
from megatrain.optim.spec import OptimizerSpec
from megatrain.units import DTYPE_NAMES, GIB, DtypeName, dtype_name, torch_dtype

Place = Literal["host", "device"]
"""Where a unit's planes live; units on the device are called resident."""
Policy = Literal["keep", "selective", "keep_attention", "keep_mlp", "recompute"]
"""What a layer holds between forward and backward; see `ExecutionPlan.activations`."""

MICROBATCH_TOKENS = 16384
LOGITS_BYTES = 3 * GIB
"""Budget for the logits of one head chunk with their gradients."""
LEAST_HEAD_TOKENS, LEAST_MLP_TOKENS = 64, 1024
"""OOM recovery makes chunks no smaller: below that they need little memory beside the row's hidden states."""
MOST_THREADS = max(256, 4 * (os.cpu_count() or 1))
"""More AdamW threads than this only compete for cores and memory."""


@dataclass(frozen=True)
class StepShape:
    """How one batch is cut into accumulation steps, microbatches and head chunks.

    Attributes:
        accumulation_steps: Passes over the layers, each with an equal share of the rows.
        microbatch_rows: Rows that a layer computes together.
        head_tokens: Target tokens whose logits exist at the same time.
        segment: 1 keeps the input of every layer; K keeps every K-th and computes a layer's forward a third time.
        policies: Policy by layer, of the layers that are not recomputed from their input alone.
    """

    accumulation_steps: int
    microbatch_rows: int
    head_tokens: int
    segment: int
    policies: Mapping[int, Policy]


@dataclass(frozen=True)
class Shortage:
    """A step that ran out of device memory, and what could be moved to make room.

    Attributes:
        shape: How the step was cut.
        rows, tokens: Shape of the batch.
        training: False in an evaluation, which holds no activations and accumulates nothing.
        inputs_fit_host: Whether the host has room for the inputs of all layers.
        sums_fit_host: Whether the host has room for gradient planes in fp32, which accumulation needs.
        mlps_in_chunks: Whether some MLP can be computed in chunks of tokens.
    """

    shape: StepShape
    rows: int
    tokens: int
    training: bool
    inputs_fit_host: bool
    sums_fit_host: bool
    mlps_in_chunks: bool


@dataclass(frozen=True)
class ExecutionPlan:
    """How an engine computes its steps.

    Attributes:
        placement: Where units live: one word for all, or by unit name (`embedding`, `layer.0`, `head`); units left out live
            on the host. Resident units are updated on the device.
        activations: What layers hold for the backward, one word for all or by layer index (layers left out recompute):
            `keep`: all activations; `selective`: as many as `selective_budget` allows (compiled layers only);
            `keep_attention`: the output of the fused attention; `keep_mlp`: the products of the MLP's matrices;
            `recompute`: the layer's input. What is not held is computed again.
        offload_input: Offload the inputs of recomputed layers to pinned host memory until the backward: of all or of some layers.
        selective_budget: Share of a selective layer's activations that is held (0..1); the compiler recomputes what is cheap.
            0.5 holds all matrix products and the attention.
        mlp_chunk_tokens: Compute token-wise MLPs (and the norm behind the layers) in chunks of this many tokens; None: whole.
            Layers that hold MLP activations compute theirs whole. See [Note: chunks of tokens] in models/chunked_mlp.py.
        segment: K keeps the input of every K-th layer only and computes layers a third time; 1 keeps every input.
        microbatch_rows: Rows that a layer computes together; None: as many as hold 16,384 tokens.
        accumulation_steps: Passes over the layers per step; their gradients are summed in fp32 on the host.
        head_chunk_tokens: Target tokens whose logits exist at the same time; None: as many as fit 3 GiB.
        weight_slots: Device buffers that layers stream through (>= 2); `all`: one for each layer, so that weights are loaded, or
            gathered from the ranks, once after each update. With resident units on several ranks it is a replica of the model.
        gradient_slabs: Pinned host buffers for gradients that do not go straight into a gradient plane.
        gradient_plane: Hold a step's gradients on the host until their norm is known. False fuses AdamW with their arrival:
            2 bytes a parameter less, but no clipping, no accumulation, and a non-finite step stops the run.
        pin: `all` pins the hi and gradient planes, `staged` copies through small pinned buffers, `auto` falls back from the
            first to the second with a warning.
        compute_dtype: `auto` is bf16 on a GPU that computes it, else fp32. fp16 scales the loss dynamically. fp64 is for tests:
            everything is fp64, masters and gradients too.
        grad_transport: Type in which gradients travel to the host; `auto` is fp32 with fp32 compute, else bf16.
        attn_implementation: HF's name of an attention implementation; None: sdpa where the family has it.
        compile: `auto` compiles layers on a GPU (a family that cannot be compiled runs eager, with a warning), `on` everywhere.
        deterministic: Use only kernels that give the same bits every time (on a GPU).
        train_shape, eval_shape: Shapes that batches of training and of evaluation are padded to where layers are compiled, and
            that are compiled while the weights are read; None: batches as they come. See [Note: one shape] in engine/batches.py.
        threads: AdamW threads; None: the cores this process may use, less one.
        host_gib: Limit on host memory; None: what the system says is available.
        device_gib: Limit on this process's device memory, enforced; None: all of it.
        replicas: Equal groups of consecutive ranks, usually the hosts of a job, each of which holds the whole state and updates
            it; their processors should be equal. 1: all ranks share one copy.

    Raises:
        UserError: From the constructor, with every field that no model could use.
    """

    placement: Place | Mapping[str, Place] = "host"
    activations: Policy | Mapping[int, Policy] = "recompute"
    offload_input: bool | frozenset[int] = False
    selective_budget: float = 0.5
    mlp_chunk_tokens: int | None = None
    segment: int = 1
    microbatch_rows: int | None = None
    accumulation_steps: int = 1
    head_chunk_tokens: int | None = None
    weight_slots: int | Literal["all"] = 2
    gradient_slabs: int = 12
    gradient_plane: bool = True
    pin: Literal["auto", "all", "staged"] = "auto"
    compute_dtype: Literal["auto", "fp64", DtypeName] = "auto"
    grad_transport: Literal["auto", "bf16", "fp32", "fp64"] = "auto"
    attn_implementation: str | None = None
    compile: Literal["auto", "on", "off"] = "auto"
    deterministic: bool = False
    train_shape: BatchShape | None = None
    eval_shape: BatchShape | None = None
    threads: int | None = None
    host_gib: float | None = None
    device_gib: float | None = None
    replicas: int = 1

    def __post_init__(self) -> None:
        problems = [
            f"{name} = {value} is below {least}"
            for name, least in _LEAST.items()
            if (value := getattr(self, name)) not in (None, "all") and value < least
        ]
        if self.threads is not None and not 1 <= self.threads <= MOST_THREADS:
            problems.append(f"threads = {self.threads} is not between 1 and {MOST_THREADS}")
        for name, words in _WORDS.items():
            value = getattr(self, name)
            given = value.values() if isinstance(value, Mapping) else [value]
            problems += [f"{name} = {word!r} is not one of {', '.join(words)}" for word in given if word not in words]
        if not self.gradient_plane and self.accumulation_steps > 1:
            problems.append("gradient_plane=False cannot accumulate: set accumulation_steps=1")
        _refuse(problems)

    # ---------------------------------------------------------------- resolving

    def for_device(self, device: torch.device, optim: OptimizerSpec, cores: int | None = None) -> ExecutionPlan:
        """The plan with everything resolved that depends on the device and this process's `cores` alone; None: all it may use.

        Raises:
            UserError: The plan cannot compute in this type, or with this optimizer.
        """
        compute = compute_dtype_of(self.compute_dtype, device)
        transport = self.grad_transport
        if transport == "auto":
            transport = {torch.float32: "fp32", torch.float64: "fp64"}.get(compute, "bf16")
        problems = []
        if not self.gradient_plane and optim.max_grad_norm is not None:
            problems.append("gradient_plane=False cannot clip: set max_grad_norm=None")
        if not self.gradient_plane and compute == torch.float16:
            problems.append("gradient_plane=False cannot skip fp16 overflows: use bf16 or fp32")
        _refuse(problems)
        return replace(
            self,
            compute_dtype="fp64" if compute == torch.float64 else dtype_name(compute),
            grad_transport=transport,
            compile=("on" if device.type == "cuda" else "off") if self.compile == "auto" else self.compile,
            # one core stays with the launching thread
            threads=self.threads or max(1, (cores or len(os.sched_getaffinity(0))) - 1),
        )

    def for_model(self, structure: Structure, vocabulary: int) -> ExecutionPlan:
        """The plan of `for_device`, with an entry for each unit and layer of a model.

        Raises:
            UserError: The plan names what the model does not have, or combines what excludes each other.
        """
        units, layers = [unit.name for unit in structure.units], range(len(structure.layers))
        placement = self.placement if isinstance(self.placement, Mapping) else dict.fromkeys(units, self.placement)
        policies = (
            self.activations if isinstance(self.activations, Mapping) else dict.fromkeys(layers, self.activations)
        )
        offload = frozenset(layers) if self.offload_input is True else frozenset(self.offload_input or ())
        held = {layer for layer, policy in policies.items() if policy != "recompute"}
        problems = [f"there is no unit {name}" for name in sorted(placement.keys() - set(units))]
        if any(layer not in layers for layer in [*policies, *offload]):
            problems.append(f"activations or offload_input names layers outside 0..{len(layers) - 1}")
        if self.segment > 1 and (held or offload):
            problems.append("segment excludes offloaded inputs and layers that hold activations")
        if "device" in placement.values() and not self.gradient_plane:
            problems.append("resident units need their gradient plane: set gradient_plane=True")
        if "device" in placement.values() and self.compute == torch.float16:
            problems.append("resident units compute in bf16 or fp32")
        _refuse(problems)
        return replace(
            self,
            placement={name: placement.get(name, "host") for name in units},
            activations={layer: policies.get(layer, "recompute") for layer in layers},
            offload_input=offload,
            weight_slots=max(2, len(layers)) if self.weight_slots == "all" else self.weight_slots,
            head_chunk_tokens=self.head_chunk_tokens or head_chunk_tokens_of(vocabulary, self.compiled),
        )

    @property
    def compute(self) -> torch.dtype:
        """`compute_dtype` of a resolved plan."""
        return torch_dtype(self.compute_dtype)

    @property
    def transport(self) -> torch.dtype:
        """`grad_transport` of a resolved plan."""
        return torch_dtype(self.grad_transport)

    @property
    def gradient_dtype(self) -> torch.dtype | None:
        """Type of the gradient planes: sums over accumulation steps are fp32. None without planes."""
        if not self.gradient_plane:
            return None
        return torch.promote_types(self.transport, torch.float32) if self.accumulation_steps > 1 else self.transport

    @property
    def compiled(self) -> bool:
        """Whether layers are compiled. Of a resolved plan."""
        return self.compile == "on"

    @property
    def resident(self) -> tuple[str, ...]:
        """Units on the device, in forward order. Of a resolved plan."""
        assert isinstance(self.placement, Mapping), self.placement
        return tuple(name for name, place in self.placement.items() if place == "device")

    # ---------------------------------------------------------------- steps

    def step_shape(self, rows: int, tokens: int) -> StepShape:
        """How a resolved plan cuts a batch of this shape."""
        assert isinstance(self.activations, Mapping) and self.head_chunk_tokens is not None, "not resolved for a model"
        return StepShape(
            accumulation_steps=min(self.accumulation_steps, rows),
            microbatch_rows=self.microbatch_rows or max(1, MICROBATCH_TOKENS // tokens),
            head_tokens=self.head_chunk_tokens,
            segment=self.segment,
            policies={layer: policy for layer, policy in self.activations.items() if policy != "recompute"},
        )

    def reduced(self, shortage: Shortage) -> ExecutionPlan | None:
        """The next plan that computes the same sums with less device memory; None where there is none.

        What costs least comes first: two weight slots; recompute instead of held activations; half the rows per microbatch; half
        the tokens per head chunk; MLPs in chunks of tokens (a quarter of the row, then halves); inputs offloaded; twice the
        accumulation steps; half as many resident units.
        """
        shape, rows = shortage.shape, shortage.rows
        if self.weight_slots != 2:
            return replace(self, weight_slots=2)
        if shortage.training and shape.policies:
            assert isinstance(self.activations, Mapping)
            return replace(self, activations=dict.fromkeys(self.activations, "recompute"))
        together = min(shape.microbatch_rows, -(-rows // shape.accumulation_steps) if shortage.training else rows)
        if together > 1:
            return replace(self, microbatch_rows=together // 2)
        if shape.head_tokens > LEAST_HEAD_TOKENS:
            return replace(self, head_chunk_tokens=max(LEAST_HEAD_TOKENS, shape.head_tokens // 2))
        if shortage.mlps_in_chunks and (smaller := _smaller_mlp_chunk(shortage.tokens, self.mlp_chunk_tokens)):
            return replace(self, mlp_chunk_tokens=smaller)
        layers = frozenset(self.activations) if isinstance(self.activations, Mapping) else frozenset()
        if shortage.inputs_fit_host and self.segment == 1 and self.offload_input != layers:
            return replace(self, offload_input=layers)
        if shortage.sums_fit_host and shape.accumulation_steps < rows:
            return replace(self, accumulation_steps=min(2 * shape.accumulation_steps, rows))
        if self.resident:
            return self.with_resident(len(self.resident) // 2)
        return None

    def reduced_by_steps(self, times: int, rows: int, tokens: int) -> ExecutionPlan:
        """The plan reduced several times for steps of this shape, by what needs no measuring.

        Raises:
            PlanRefused: It cannot be reduced as often.
        """
        plan = self
        for _ in range(times):
            shape = plan.step_shape(rows, tokens)
            smaller = plan.reduced(
                Shortage(shape, rows, tokens, True, inputs_fit_host=False, sums_fit_host=True, mlps_in_chunks=False)
            )
            if smaller is None:
                raise PlanRefused(
                    "out of device memory, and no plan needs less\n  -> use shorter rows, or more devices"
                )
            plan = smaller
        return plan

    def with_resident(self, most: int) -> ExecutionPlan:
        """The plan with only the first `most` of its resident units on the device."""
        stay = self.resident[:most]
        assert isinstance(self.placement, Mapping)
        return replace(self, placement={name: "device" if name in stay else "host" for name in self.placement})

    # ---------------------------------------------------------------- reports

    def summary(self, shape: StepShape) -> str:
        """How a step of this shape is computed, in one line."""
        assert isinstance(self.activations, Mapping) and isinstance(self.offload_input, frozenset), "not resolved"
        held = Counter(shape.policies.values())
        counts = {
            **held,
            "recompute": len(self.activations) - held.total(),
            "accumulation": shape.accumulation_steps,
            "microbatch_rows": shape.microbatch_rows,
            "head_chunk_tokens": shape.head_tokens,
            "mlp_chunk_tokens": self.mlp_chunk_tokens,
            "segment": shape.segment if shape.segment > 1 else 0,
            "offloaded": len(self.offload_input),
        }
        parts = [f"{name} {count}" for name, count in counts.items() if count]
        return ", ".join([*parts, f"resident {len(self.resident)} of {len(self.placement)}"])

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in plain.items():
            if isinstance(value, frozenset):
                plain[name] = sorted(value)
            elif isinstance(value, BatchShape):
                plain[name] = asdict(value)
            elif isinstance(value, Mapping):
                plain[name] = {str(key): word for key, word in value.items()}
        return plain


_LEAST = {
    "replicas": 1,
    "weight_slots": 2,
    "gradient_slabs": 1,
    "accumulation_steps": 1,
    "segment": 1,
    "microbatch_rows": 1,
    "head_chunk_tokens": 1,
    "mlp_chunk_tokens": 1,
}
_WORDS: dict[str, tuple[str, ...]] = {
    "placement": get_args(Place),
    "activations": get_args(Policy),
    "pin": ("auto", "all", "staged"),
    "compute_dtype": ("auto", "fp64", *DTYPE_NAMES),
    "grad_transport": ("auto", "bf16", "fp32", "fp64"),
    "compile": ("auto", "on", "off"),
}


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        raise UserError("; ".join(problems), "ExecutionPlan")


def _smaller_mlp_chunk(row: int, chunk: int | None) -> int | None:
    """Tokens of the next smaller MLP chunk, None at the end.

    Args:
        row: Tokens of one row.
        chunk: Tokens of a chunk now; None: whole rows.
    """
    chunk = min(chunk or row, row)
    quarter = 1 << (max(4, row) // 4).bit_length() - 1
    smaller = max(LEAST_MLP_TOKENS, chunk // 2 if chunk < row else quarter)
    return smaller if smaller < chunk else None


# ---------------------------------------------------------------- what `auto` means on this machine


def named_device(device: str | torch.device) -> torch.device:
    """The device that a setting names, with its index if one is given; `auto` is a GPU if there is one."""
    if str(device) == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    found = torch.device(device)
    if found.type not in ("cpu", "cuda"):
        raise UserError(f"device {found} is not supported", "run.device", "use cpu or cuda")
    return found


def device_of(device: str | torch.device) -> torch.device:
    """The device that a setting means on this machine, with its index."""
    found = named_device(device)
    if found.type == "cuda":
        if not torch.cuda.is_available():
            raise UserError("no CUDA device is available", "run.device: cuda", "use run.device: auto or cpu")
        found = torch.device("cuda", found.index if found.index is not None else torch.cuda.current_device())
    return found


def head_chunk_tokens_of(vocabulary: int, compiled: bool) -> int:
    """Tokens whose logits fit `LOGITS_BYTES`, as a power of two: eager code holds logits and gradients in bf16 and in fp32
    (12 bytes an entry), a compiled cross entropy in bf16 alone (4 bytes)."""
    fitting = LOGITS_BYTES // ((4 if compiled else 12) * vocabulary)
    return max(64, 1 << (fitting.bit_length() - 1)) if fitting else 64


def compute_dtype_of(name: Literal["auto", "fp64", DtypeName], device: torch.device) -> torch.dtype:
    """Type of forward and backward: `auto` is bf16 on a GPU that computes it, else fp32."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32
    return torch_dtype(name)
