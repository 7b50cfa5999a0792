"""What is planned: `Request` (a model, a step, a cluster) and `Candidate` (one way to run it)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megatrain.engine.mesh.layout import Layout
from megatrain.engine.mesh.tensor_parallel import splits_experts
from megatrain.machine.machine import Cluster
from megatrain.optim.adamw import AdamW
from megatrain.optim.spec import OptimizerSpec
from megatrain.planner.cluster.inventory import Inventory
from megatrain.planner.plan import Options, StepSize


@dataclass(frozen=True)
class Overheads:
    """How an engine computes a layer, where engines differ. The defaults are the mesh engine's.

    Attributes:
        compiled: Layers whose pointwise work is fused: `all`, `none`, or `plain`: layers without context parallel, without
            experts shared by tensor ranks, and with a whole backward.
        tensor_overlap: Share of the tensor collectives that is hidden under matrix products.
        gathers_ahead: With a pipeline, gather all stages' parameters from the start of the step, not when the first
            microbatch arrives.
        context_attention: Work of context-parallel attention as a multiple of the causal half; 2 with a dense mask.
    """

    compiled: Literal["all", "plain", "none"] = "plain"
    tensor_overlap: float = 0.0
    gathers_ahead: bool = False
    context_attention: float = 2.0


@dataclass(frozen=True)
class Candidate:
    """One way to run a request: a resolved layout with its microbatches, layers recomputed or kept."""

    layout: Layout
    recompute: bool

    def rows(self, step: StepSize) -> int:
        """Rows of one microbatch on one data rank, padding included."""
        return -(-step.rows // self.layout.row_multiple)

    def tokens(self, step: StepSize) -> int:
        """Tokens of one microbatch on one rank; tensor ranks share them."""
        multiple = self.layout.token_multiple
        return self.rows(step) * (-(-step.tokens // multiple) * multiple) // self.layout.context

    def __str__(self) -> str:
        """The candidate in one line."""
        layout, names = self.layout, ("tensor", "pipeline", "context", "replicate", "shard")
        words = [f"{name} {size}" for name in names if (size := getattr(layout, name)) != 1]
        if layout.pipeline > 1:
            words.append(layout.schedule + (f" x{layout.virtual}" if layout.virtual > 1 else ""))
        words.append(f"{(count := layout.microbatch_count)} microbatch{'es' if count > 1 else ''}")
        words.append("recompute" if self.recompute else "keep")
        return ", ".join(words)


@dataclass(frozen=True)
class Request:
    """A model, an optimizer step of it, and a cluster.

    Attributes:
        world: Number of GPUs.
        compute_bytes: Bytes of an element in forward and backward: 2 for bf16, 4 for fp32.
        background: Checkpoints are written while training continues.
    """

    inventory: Inventory
    cluster: Cluster
    world: int
    step: StepSize
    overheads: Overheads = Overheads()
    compute_bytes: int = 2
    background: bool = True
    optim: OptimizerSpec = field(default_factory=AdamW)

    def compiled(self, layout: Layout) -> bool:
        """Whether the layers of a layout are fused."""
        mixture = layout.tensor > 1 and splits_experts(self.inventory.structure.model)
        plain = layout.context == 1 and not layout.splits_backward and not mixture
        return self.overheads.compiled == "all" or (self.overheads.compiled == "plain" and plain)

    def options(self, layout: Layout) -> Options:
        """The settings that the cost formulas of a single GPU take."""
        compute = "fp32" if self.compute_bytes == 4 else "bf16"
        return Options(compute=compute, compiled=self.compiled(layout), optim=self.optim)

    def hidden_bytes(self, candidate: Candidate) -> int:
        """Bytes of one microbatch's hidden states, of all ranks of a tensor group together."""
        return candidate.tokens(self.step) * self.inventory.shape.hidden * self.compute_bytes

    def key_value_bytes(self, candidate: Candidate) -> float:
        """Bytes of one layer's gathered keys and values of one microbatch, on one rank."""
        layout = candidate.layout
        tokens = candidate.tokens(self.step) * layout.context
        return 2 * self.inventory.kv_width * tokens * self.compute_bytes / layout.tensor
