"""What is planned: a model, a step and a cluster; and one way to run it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megatrain.engine.mesh.layout import Layout
from megatrain.engine.mesh.tensor_parallel import splits_experts
from megatrain.machine.machine import Cluster
from megatrain.optim.adamw import AdamW
from megatrain.optim.spec import OptimizerSpec
from megatrain.planner.choice import Options, StepSize
from megatrain.planner.cluster.shards import Inventory


@dataclass(frozen=True)
class Practice:
    """How an engine computes a layer, where engines differ.

    Attributes:
        compiled: In which layers pointwise work is fused: `all`, `none`, or `plain` ones, whose attention sees no tokens of other
            ranks, whose experts are not shared by tensor ranks, and whose backward is whole.
        tensor_overlap: Share of the tensor collectives that is hidden under matrix products.
        gathers_ahead: With a pipeline, all stages' parameters are gathered from the start of the step on, not when the first
            microbatch arrives.
        context_attention: Work of context-parallel attention as a multiple of the causal half. A dense mask is 2.
    """

    compiled: Literal["all", "plain", "none"] = "plain"
    tensor_overlap: float = 0.0
    gathers_ahead: bool = False
    context_attention: float = 2.0


ENGINE = Practice()
"""The mesh engine: compiled layers where it can, collectives in the open, parameters gathered at need, a dense mask with
context parallel."""


@dataclass(frozen=True)
class Job:
    """A model, an optimizer step of it, and where it is to run.

    Attributes:
        inventory: The model's shape and its parameters.
        cluster: Its figures.
        world: GPUs.
        step: Rows and tokens of a row.
        practice: Of the engine.
        compute_bytes: Of an element in forward and backward: 2 for bf16, 4 for fp32.
        background: Checkpoints are written while training goes on.
    """

    inventory: Inventory
    cluster: Cluster
    world: int
    step: StepSize
    practice: Practice = ENGINE
    compute_bytes: int = 2
    background: bool = True
    optim: OptimizerSpec = field(default_factory=AdamW)

    def compiled(self, layout: Layout) -> bool:
        """Whether the layers of a layout are fused."""
        splits = layout.pipeline > 1 and layout.kind.splits_backward
        mixture = layout.tensor > 1 and splits_experts(self.inventory.structure.model)
        plain = layout.context == 1 and not splits and not mixture
        return self.practice.compiled == "all" or (self.practice.compiled == "plain" and plain)

    def options(self, layout: Layout) -> Options:
        """As the formulas of one GPU's layers take them."""
        return Options(
            compute="fp32" if self.compute_bytes == 4 else "bf16", compiled=self.compiled(layout), optim=self.optim
        )


@dataclass(frozen=True)
class Way:
    """One way to run a job.

    Attributes:
        layout: Resolved, with its microbatches.
        recompute: Layers keep their input only.
    """

    layout: Layout
    recompute: bool

    def rows(self, step: StepSize) -> int:
        """Of one microbatch on one data rank, padding included."""
        return -(-step.rows // self.layout.row_multiple)

    def tokens(self, step: StepSize) -> int:
        """Of one microbatch on one rank; tensor ranks share them."""
        return (
            self.rows(step)
            * (-(-step.tokens // self.layout.token_multiple) * self.layout.token_multiple)
            // self.layout.context
        )
