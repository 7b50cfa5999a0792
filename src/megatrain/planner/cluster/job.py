"""What is planned: a model, a step and a cluster; and one way to run it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatrain.machine.cluster import Cluster
from megatrain.mesh.layout import Layout
from megatrain.planner.choice import Options, StepSize
from megatrain.planner.cluster.shards import Inventory


@dataclass(frozen=True)
class Practice:
    """How an engine computes a layer, where engines differ.

    Attributes:
        compiled: Pointwise work is fused.
        tensor_overlap: Share of the tensor collectives that is hidden under matrix products.
        gathers_ahead: With a pipeline, all stages' parameters are gathered from the start of the step on, not when the first
            microbatch arrives.
        context_attention: Work of context-parallel attention as a multiple of the causal half. A dense mask is 2.
    """

    compiled: bool = False
    tensor_overlap: float = 0.0
    gathers_ahead: bool = False
    context_attention: float = 2.0


ENGINE = Practice()
"""The mesh engine: eager layers, collectives in the open, parameters gathered at need, a dense mask with context parallel."""


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

    @cached_property
    def options(self) -> Options:
        """As the formulas of one GPU's layers take them."""
        return Options(compute="fp32" if self.compute_bytes == 4 else "bf16", compiled=self.practice.compiled)


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
