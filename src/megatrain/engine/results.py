"""What a step returns."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatrain.metrics.record import PipelineRecord


@dataclass(frozen=True)
class StepResult:
    """What a training step did.

    Attributes:
        loss: Mean loss over the step's target tokens, None where there were none.
        grad_norm: Global norm of the gradients before clipping, None without target tokens.
        tokens: Target tokens.
        skipped: Why no weight was changed, None when the update was launched.
        seconds: `step` in all, and in it `forward`, `head`, `backward` (device time, with what they wait for); `update_wait`
            (for AdamW: before the forward and inside it) and `slab_wait` (for a free gradient slab, inside the backward) are
            seen from the CPU, across these phases: they are no further parts of the step.
        loss_scale: Of this step (fp16), else 1.
        moved_bytes: Copied between host and device for this step: `h2d` (weights, offloaded inputs), `d2h` (gradients, inputs).
        pipeline: What the instruments say, None where they are off.
        metrics: The objective's metrics, means over the target tokens.
    """

    loss: float | None
    grad_norm: float | None
    tokens: int
    skipped: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    loss_scale: float = 1.0
    moved_bytes: dict[str, int] = field(default_factory=dict)
    pipeline: PipelineRecord | None = None
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class EvalResult:
    """Loss of a batch.

    Attributes:
        loss_sum: Sum over the target tokens.
        tokens: Target tokens.
        metric_sums: The objective's metrics, sums over the target tokens.
    """

    loss_sum: float
    tokens: int
    metric_sums: dict[str, float] = field(default_factory=dict)
