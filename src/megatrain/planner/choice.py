"""What a plan decides, and what it is given: plain data that the other modules of the planner share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from megatrain.engine.plan import Policy
from megatrain.optim.adamw import AdamW
from megatrain.optim.spec import OptimizerSpec
from megatrain.planner.model_cost import ModelShape
from megatrain.units import DtypeName

SELECTIVE_BUDGET = 0.5
"""Activation memory budget of selective layers: all matrix products but few are kept, pointwise work is done again."""


@dataclass(frozen=True)
class StepSize:
    """A whole optimizer step: rows of equal length."""

    rows: int
    tokens: int
    """Of one row."""

    @property
    def all_tokens(self) -> int:
        return self.rows * self.tokens


@dataclass(frozen=True)
class Caps:
    """Bytes that a run may use."""

    host_bytes: int
    device_bytes: int


@dataclass(frozen=True)
class Options:
    """What the user has decided. None and `auto` are left to the plan.

    Attributes:
        optim: The optimizer.
        compute: Type of forward and backward.
        transport_bytes: Of one gradient element on its way to the host.
        gradient_plane: False lets AdamW eat gradients as they arrive; no clipping then, and nothing resident.
        compiled: Whether layers are compiled; eager ones hold and cost more, and cannot be selective.
        policy: Of all layers.
        windows, microbatch_rows, head_chunk_tokens: How the step is cut.
        mlp_chunk_tokens: Tokens that an MLP computes together, where it computes each token by itself.
        segment: K keeps the input of every K-th layer only.
        weight_slots, gradient_slabs: Buffers.
        staged: Planes are not pinned; copies go through two pinned buffers.
        threads: Of AdamW.
        offload: Whether the inputs of recomputed layers wait on the host: as many as must, all, or none.
    """

    optim: OptimizerSpec = field(default_factory=AdamW)
    compute: DtypeName = "bf16"
    transport_bytes: int = 2
    gradient_plane: bool = True
    compiled: bool = True
    policy: Literal["auto"] | Policy = "auto"
    accumulation_steps: int | None = None
    microbatch_rows: int | None = None
    head_chunk_tokens: int | None = None
    mlp_chunk_tokens: int | None = None
    segment: int = 1
    weight_slots: int = 2
    gradient_slabs: int = 12
    staged: bool = False
    threads: int | None = None
    offload: Literal["auto", "on", "off"] = "auto"

    @property
    def compute_bytes(self) -> int:
        return 4 if self.compute == "fp32" else 2

    @property
    def slot_bytes(self) -> int:
        """Device bytes of a streamed weight: the plane that is copied, and with fp16 its cast."""
        return {"bf16": 2, "fp16": 6, "fp32": 4}[self.compute]

    @property
    def stream_bytes(self) -> int:
        """Bytes of a weight on the link."""
        return 2 if self.compute == "bf16" else 4

    def gradient_bytes(self, accumulation_steps: int) -> int:
        """Of one element of the gradient plane; sums over windows are fp32."""
        if not self.gradient_plane:
            return 0
        return 4 if accumulation_steps > 1 else self.transport_bytes


@dataclass(frozen=True)
class Choice:
    """One way to run a step.

    Attributes:
        resident_layers: The first so many layers live on the device.
        resident_embedding, resident_head: Likewise.
        policies: Of each layer.
        offloaded: The inputs of the first so many layers wait on the host for their backward.
        windows: Accumulation windows.
        microbatch_rows: Rows that a layer computes together.
        head_chunk_tokens: Tokens whose logits exist at the same time.
        mlp_chunk_tokens: Tokens that an MLP and the norm behind the layers compute together; None: all of a chunk of rows.
    """

    resident_layers: int
    resident_embedding: bool
    resident_head: bool
    policies: tuple[Policy, ...]
    offloaded: int
    accumulation_steps: int
    microbatch_rows: int
    head_chunk_tokens: int
    mlp_chunk_tokens: int | None = None

    def resident_elements(self, shape: ModelShape) -> int:
        edges = shape.embedding * self.resident_embedding + shape.head * self.resident_head
        return sum(shape.layers[: self.resident_layers]) + edges

    def is_resident(self, unit: str) -> bool:
        if unit == "embedding":
            return self.resident_embedding
        if unit == "head":
            return self.resident_head
        return int(unit.removeprefix("layer.")) < self.resident_layers

    def resident_names(self, shape: ModelShape) -> tuple[str, ...]:
        """Units in HBM, in forward order."""
        return tuple(name for name in shape.unit_elements if self.is_resident(name))


@dataclass(frozen=True)
class Cut:
    """A step cut into windows and chunks; sizes of the largest ones."""

    window_rows: int
    window_tokens: int
    chunks: int
    chunk_tokens: int
    head_chunks: int
    head_tokens: int

    @classmethod
    def of(cls, step: StepSize, choice: Choice) -> Cut:
        window_rows = -(-step.rows // choice.accumulation_steps)
        chunks = -(-window_rows // choice.microbatch_rows)
        microbatch_rows = -(-window_rows // chunks)
        window_tokens = window_rows * step.tokens
        return cls(
            window_rows=window_rows,
            window_tokens=window_tokens,
            chunks=chunks,
            chunk_tokens=microbatch_rows * step.tokens,
            head_chunks=-(-window_tokens // choice.head_chunk_tokens),
            head_tokens=min(choice.head_chunk_tokens, window_tokens),
        )


Lines = Mapping[str, int]
"""Bytes by purpose."""
