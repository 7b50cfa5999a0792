"""What the planner is asked and what it answers: plain data that its modules share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from megatrain.engine.plan import ExecutionPlan, Place, Policy
from megatrain.machine.machine import Machine
from megatrain.optim.adamw import AdamW
from megatrain.optim.spec import OptimizerSpec
from megatrain.planner.model_cost import ModelShape
from megatrain.units import GIB, DtypeName

if TYPE_CHECKING:
    from megatrain.planner.timeline import Timeline

SELECTIVE_BUDGET = 0.5
"""Activation memory budget of selective layers: keeps nearly all matrix products and recomputes pointwise operations."""

Lines = Mapping[str, int]
"""Bytes by purpose."""


@dataclass(frozen=True)
class StepSize:
    """An optimizer step: `rows` rows of `tokens` tokens each."""

    rows: int
    tokens: int

    @property
    def all_tokens(self) -> int:
        return self.rows * self.tokens


@dataclass(frozen=True)
class Caps:
    """Bytes that a run may use."""

    host_bytes: int
    device_bytes: int


@dataclass(frozen=True)
class Limits:
    """What the caps of a run follow from: memory of the machine, and the config's section `memory`."""

    host_bytes: int  # available
    device_bytes: int  # free
    host_reserve_gib: float
    host_gib: float | Literal["auto"] = "auto"
    device_gib: float | Literal["auto"] = "auto"
    device_fraction: float | Literal["auto"] = "auto"

    @property
    def caps(self) -> Caps:
        host = self.host_bytes - int(self.host_reserve_gib * GIB)
        if self.host_gib != "auto":
            host = min(host, int(self.host_gib * GIB))
        device = self.device_bytes
        if self.device_gib != "auto":
            device = min(device, int(self.device_gib * GIB))
        return Caps(host, usable_device_bytes(device, self.device_fraction))


UNPLANNED_SHARE, UNPLANNED_BYTES, UNPLANNED_SMALL_SHARE = 0.035, 3 * GIB // 2, 0.08
"""Device memory that `memory.device_fraction: auto` leaves to allocations that the formulas do not cover: the first share of the
device, at least the bytes, and at most the second share."""


def usable_device_bytes(device_bytes: int, fraction: float | Literal["auto"] = "auto") -> int:
    """Device memory that a plan may fill: a share of it, or by `UNPLANNED_SHARE` and its siblings."""
    if fraction != "auto":
        return int(device_bytes * fraction)
    least = min(UNPLANNED_BYTES, UNPLANNED_SMALL_SHARE * device_bytes)
    return int(device_bytes - max(UNPLANNED_SHARE * device_bytes, least))


@dataclass(frozen=True)
class Options:
    """Decisions of the user. None and `auto` leave a decision to the planner."""

    optim: OptimizerSpec = field(default_factory=AdamW)
    compute: DtypeName = "bf16"  # dtype of forward and backward
    transport_bytes: int = 2  # per gradient element on the link to the host
    gradient_plane: bool = True  # False updates weights as gradients arrive: no clipping, and no resident units
    compiled: bool = True  # eager layers hold and cost more, and cannot be selective
    policy: Literal["auto"] | Policy = "auto"  # activation policy of all layers
    accumulation_steps: int | None = None
    microbatch_rows: int | None = None
    head_chunk_tokens: int | None = None
    mlp_chunk_tokens: int | None = None  # tokens that a token-wise MLP computes together
    segment: int = 1  # K keeps the input of every K-th layer only
    weight_slots: int | Literal["auto", "all"] = "auto"  # all: one for each layer
    gradient_slabs: int = 12
    staged: bool = False  # planes are not pinned; copies go through two pinned buffers
    threads: int | None = None  # AdamW threads of a rank
    ranks: int = 1  # processes, one GPU each; step, choice and bytes are those of one
    hosts: int = 1  # equal hosts of these ranks
    replicas: int = 1  # copies of the state, one on each host, or one for all ranks
    replicate_hosts: Literal["auto"] | bool = "auto"  # auto: the faster number of copies
    offload_input: Literal["auto", "on", "off"] = (
        "auto"  # inputs of recomputed layers: as many as necessary, all, or none
    )

    @property
    def shards(self) -> int:
        """Ranks that share one copy of the state."""
        return self.ranks // self.replicas

    @property
    def local_ranks(self) -> int:
        """Ranks of one host."""
        return self.ranks // self.hosts

    @property
    def compute_bytes(self) -> int:
        return 4 if self.compute == "fp32" else 2

    @property
    def staging_bytes(self) -> float:
        """Device bytes per element of a gradient that leaves the device; ranks sum it in fp32, and round their shard."""
        return self.transport_bytes if self.ranks == 1 else 4 + (4 + self.transport_bytes) / self.shards

    def passes(self, is_resident: bool) -> bool:
        """Whether a unit passes through a weight slot: resident units do, too, where each rank holds a shard of them."""
        return self.ranks > 1 or not is_resident

    def slots(self, choice: Choice, passing: int) -> int:
        """Weight slots where `passing` layers pass through them."""
        most = self.weight_slots if isinstance(self.weight_slots, int) else 2
        return max(2, passing) if choice.replicated else min(most, max(2, passing))

    @property
    def slot_bytes(self) -> int:
        """Device bytes of a streamed weight: the copied plane, and with fp16 also its cast."""
        return {"bf16": 2, "fp16": 6, "fp32": 4}[self.compute]

    @property
    def stream_bytes(self) -> int:
        """Bytes of a weight on the link."""
        return 2 if self.compute == "bf16" else 4

    def gradient_bytes(self, accumulation_steps: int) -> int:
        """Bytes per element of the gradient plane; sums over accumulation steps are fp32."""
        if not self.gradient_plane:
            return 0
        return 4 if accumulation_steps > 1 else self.transport_bytes

    def execution(self) -> ExecutionPlan:
        """The decisions as a plan, with the engine's defaults for everything that is left to the planner."""
        return ExecutionPlan(
            activations="recompute" if self.policy == "auto" or self.segment > 1 else self.policy,
            offload_input=self.offload_input == "on",
            selective_budget=SELECTIVE_BUDGET,
            mlp_chunk_tokens=self.mlp_chunk_tokens,
            segment=self.segment,
            microbatch_rows=self.microbatch_rows,
            accumulation_steps=self.accumulation_steps or 1,
            head_chunk_tokens=self.head_chunk_tokens,
            weight_slots=2 if self.weight_slots == "auto" else self.weight_slots,
            gradient_slabs=self.gradient_slabs,
            gradient_plane=self.gradient_plane,
            compile="auto" if self.compiled else "off",
            threads=self.threads,
            replicas=self.replicas,
        )


@dataclass(frozen=True)
class PlanRequest:
    """Everything that a plan depends on."""

    shape: ModelShape
    machine: Machine
    step: StepSize
    caps: Caps
    options: Options
    limits: Limits | None = None  # what the caps follow from, if that is a run's config
    all_rows: int | None = None  # of a step, of all ranks; None: those of `step`


@dataclass(frozen=True)
class Choice:
    """One way to run a step."""

    resident_layers: int  # number of layers on the device, counted from the first
    resident_embedding: bool
    resident_head: bool
    policies: tuple[Policy, ...]  # of each layer
    offloaded: int  # number of layers whose input is offloaded, counted from the first
    accumulation_steps: int  # passes over the layers
    microbatch_rows: int  # rows that a layer computes together
    head_chunk_tokens: int  # tokens whose logits exist at the same time
    mlp_chunk_tokens: int | None = (
        None  # tokens that an MLP and the final norm compute together; None: a whole microbatch
    )

    replicated: bool = False  # a weight slot for each layer: weights are loaded or gathered once after an update

    def resident_elements(self, shape: ModelShape) -> int:
        edges = shape.embedding * self.resident_embedding + shape.head * self.resident_head
        return sum(shape.layers[: self.resident_layers]) + edges

    def trained_elements(self, shape: ModelShape, resident: bool) -> int:
        """Trained elements of the units that are resident, or of those that are not."""
        return sum(n for unit, n in shape.trained_elements.items() if self.is_resident(unit) == resident)

    def is_resident(self, unit: str) -> bool:
        if unit == "embedding":
            return self.resident_embedding
        if unit == "head":
            return self.resident_head
        return int(unit.removeprefix("layer.")) < self.resident_layers


@dataclass(frozen=True)
class Cut:
    """A step cut into accumulation steps, microbatches and head chunks; sizes of the largest ones."""

    rows: int  # of one accumulation step, as are all others
    tokens: int
    microbatches: int
    microbatch_tokens: int  # of one microbatch
    head_chunks: int
    head_tokens: int  # of one head chunk

    @classmethod
    def of(cls, step: StepSize, choice: Choice) -> Cut:
        rows = -(-step.rows // choice.accumulation_steps)
        microbatches = -(-rows // choice.microbatch_rows)
        tokens = rows * step.tokens
        return cls(
            rows=rows,
            tokens=tokens,
            microbatches=microbatches,
            microbatch_tokens=-(-rows // microbatches) * step.tokens,
            head_chunks=-(-tokens // choice.head_chunk_tokens),
            head_tokens=min(choice.head_chunk_tokens, tokens),
        )


@dataclass(frozen=True)
class Plan:
    """How a run's steps are computed, with their predicted memory and time."""

    model: str
    machine: str
    parameters: int  # of the model
    step: StepSize
    options: Options
    choice: Choice
    threads: int  # AdamW threads of a rank
    placement: Mapping[str, Place]  # of each unit, in forward order
    host: Lines
    device: Lines  # at its worst moment
    disk: Lines  # of one checkpoint
    device_moment: str  # the device's worst moment
    caps: Caps
    timeline: Timeline
    steps: int | None = None  # length of the run, None if unknown
    scaling: Mapping[int, float | None] = field(default_factory=dict)  # tokens/s by number of GPUs; None: does not fit
    warnings: tuple[str, ...] = ()  # reasons why a run with this plan would be refused
    remarks: tuple[str, ...] = ()  # differences from the plan of the checkpoint that the run resumes from

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())

    @property
    def all_resident(self) -> bool:
        return set(self.placement.values()) == {"device"}

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step."""
        return self.timeline.step

    @property
    def tokens_per_s(self) -> float:
        return self.step.all_tokens / self.seconds

    @property
    def total_seconds(self) -> float | None:
        """Predicted seconds of the run, None if its length is unknown."""
        return None if self.steps is None else self.steps * self.seconds

    def layers_with(self, policy: Policy) -> tuple[int, ...]:
        return tuple(i for i, p in enumerate(self.choice.policies) if p == policy)

    @property
    def execution(self) -> ExecutionPlan:
        """The part that the engine follows."""
        choice = self.choice
        return replace(
            self.options.execution(),
            placement=self.placement,
            activations=dict(enumerate(choice.policies)),
            offload_input=frozenset(range(choice.offloaded)),
            mlp_chunk_tokens=choice.mlp_chunk_tokens,
            microbatch_rows=choice.microbatch_rows,
            accumulation_steps=choice.accumulation_steps,
            head_chunk_tokens=choice.head_chunk_tokens,
            threads=self.threads,
            **({"weight_slots": "all"} if choice.replicated else {}),
        )

    def as_dict(self) -> dict[str, Any]:
        """The plan as JSON data."""
        caps = self.caps
        return {
            **{name: getattr(self, name) for name in ("model", "machine", "parameters", "threads", "steps")},
            "rows": self.step.rows,
            "gpus": self.options.ranks,
            "hosts": self.options.hosts,
            "replicas": self.options.replicas,
            "tokens_per_row": self.step.tokens,
            "execution": self.execution.as_dict(),
            "host_bytes": {**self.host, "total": self.host_bytes, "allowed": caps.host_bytes},
            "device_bytes": {
                **self.device, "total": self.device_bytes, "allowed": caps.device_bytes, "moment": self.device_moment
            },
            "disk_bytes": {**self.disk, "total": sum(self.disk.values())},
            "seconds": {"step": self.seconds, **self.timeline.phases, "gpu_compute": self.timeline.compute},
            "busy_seconds": self.timeline.busy,
            "bottleneck": self.timeline.bottleneck,
            "tokens_per_second": self.tokens_per_s,
            "total_seconds": self.total_seconds,
            "options": asdict(self.options),
            "tokens_per_second_by_gpus": dict(self.scaling),
            "warnings": list(self.warnings),
        }  # fmt: skip
