"""`Engine`: the interface of both engines with its results, and the checks that they share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import nn

from megatrain.checkpoint.async_save import SaveHandle, SaveProgress
from megatrain.engine import batches
from megatrain.engine.batches import BatchShape
from megatrain.engine.objective import CrossEntropy, Objective, StepTotals, find_targets
from megatrain.errors import EngineClosed, UserError
from megatrain.metrics.record import MeshRecord, PipelineRecord
from megatrain.metrics.spans import Span
from megatrain.models.build import (
    build_from_memory,
    build_meta_model,
    dropout_keys,
    load_model_config,
    refuse_no_causal_lm,
)
from megatrain.models.rope import scaling_by_length
from megatrain.models.structure import Structure
from megatrain.optim.adamw import AdamW
from megatrain.optim.spec import OptimizerSpec, unmatched_groups

Batch = Mapping[str, torch.Tensor]
"""`input_ids`, `labels` and optionally `position_ids`, `document_ids`, `attention_mask`, each (rows, T) int64 on the CPU."""


@dataclass(frozen=True)
class StepResult:
    """Result of a training step.

    Attributes:
        loss: The objective's sum over its count (cross entropy: mean over the target tokens), None without target tokens.
        grad_norm: Global norm of the gradients before clipping, None without target tokens.
        tokens: Number of target tokens.
        skipped: Why no weight was changed; None if the update was launched.
        seconds: `step`: the whole step; its phases `forward`, `head` and `backward`: device time, waits included; `update_wait`
            (for updates, before and inside the forward) and `slab_wait` (for a free gradient slab, inside the backward): host
            time, which overlaps these phases.
        loss_scale: Loss scale of this step (fp16), else 1.
        moved_bytes: Bytes copied for this step: `h2d` (weights, offloaded inputs) and `d2h` (gradients, inputs to offload).
        pipeline: Figures of the instruments, None if they are off.
        metrics: The objective's metrics, means over its counts.
        routing: Of a mixture of experts: `aux_loss`, the auxiliary loss as Hugging Face reports it, without its coefficient and
            apart from `loss`; of the layer with the busiest expert `max_load`, its load over the layer's mean, and `max_share`,
            the share of tokens that it gets; `idle`, the share of all experts without tokens.
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
    routing: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class EvalResult:
    """Loss of a batch.

    Attributes:
        loss_sum: The objective's sum.
        tokens: Number of target tokens.
        metric_sums: The objective's metrics, sums too.
        counts: What `Objective.means` divides the sums by.
    """

    loss_sum: float
    tokens: int
    metric_sums: dict[str, float] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)


class Engine(ABC):
    """Trains one model: everything outside `megatrain.engine` uses an engine through this interface.

    Args:
        optim: The optimizer, by default `AdamW()`.
        objective: The loss, by default `CrossEntropy()`.
        seed: Seed of initialisation and dropout.

    Attributes:
        step: Calls of `train_step`, skipped steps included.
        updates: Updates applied to the optimizer states.
        config: The model's Hugging Face config.
        structure: The model's units and parameter names.
        device: The device that computes.
        start_seconds: Where the time of its construction went, by name.
        shipped: Content of files by name that checkpoints get instead of the model folder's; None leaves a file out.
        watch: (kind, name) -> a context manager around that section of the work, for a watchdog.
    """

    config: Any
    structure: Structure
    device: torch.device

    def __init__(self, optim: OptimizerSpec | None, objective: Objective | None, seed: int):
        self.optim: OptimizerSpec = optim or AdamW()
        self.objective: Objective = objective or CrossEntropy()
        self.seed = seed
        self.step = 0
        self.updates = 0
        self.start_seconds: dict[str, float] = {}
        self.shipped: dict[str, bytes | None] = {}
        self.watch: Callable[..., AbstractContextManager[Any]] = unwatched
        self._closed = False
        self._shapes: tuple[BatchShape | None, BatchShape | None] = (None, None)
        """What batches of training and of evaluation are padded to; None: they are computed as they come."""
        self._masks_tokens = False
        """Whether training needs to know which tokens are padding: routers do not count them."""

    @abstractmethod
    def train_step(self, batch: Batch, learning_rate: float | None = None) -> StepResult:
        """Run one optimizer step on all rows of `batch`. Returns when loss and gradient norm are known.

        Args:
            batch: CPU int64 tensors `input_ids`, `labels` (rows, T), -100 = no target, unshifted; optionally `position_ids`,
                `document_ids`, `attention_mask` (rows, T); and the objective's `batch_keys`.
            learning_rate: Learning rate of this step; by default the optimizer's.

        Raises:
            UserError: The batch is malformed. Nothing was changed.
        """

    @abstractmethod
    def backward(self, batch: Batch) -> StepResult:
        """Compute the gradients of a step without an update; read them with `named_gradients`."""

    @abstractmethod
    def eval_step(self, batch: Batch) -> EvalResult:
        """Loss of a batch in evaluation mode. Changes no state, and no later training step."""

    @abstractmethod
    def sequence_logprobs(self, batch: Batch) -> torch.Tensor:
        """Log-probability of each sequence of a batch by the current weights, (S,) fp32 on the CPU: the sum over its targets.

        Args:
            batch: As for `train_step`, with `sequence_ids` (rows, T) instead of the objective's keys: 0 to S - 1 at targets.
        """

    @abstractmethod
    def save(
        self,
        folder: str | Path,
        extra: dict[str, Any] | None = None,
        *,
        background: bool = False,
        weights_only: bool = False,
        on_error: Literal["stop", "warn"] = "stop",
        buffer_bytes: int | None = None,
        then: Callable[[SaveProgress], object] = lambda progress: None,
    ) -> SaveHandle:
        """Write a checkpoint that `from_pretrained` loads and from which `load` continues bit for bit.

        Args:
            folder: A folder that does not exist yet.
            extra: JSON data to store with it; `load` returns it.
            background: Return at once and write while training continues. A second save waits for the first.
            weights_only: Write bf16 weights without training state, 2 bytes a parameter.
            on_error: Effect of a failed background save on the next step: raise its error, or log a warning.
            buffer_bytes: Limit on host memory for copies of units whose update comes before they are written; None: automatic.
            then: Called in the writer's thread when the checkpoint is complete and verified, with the save's statistics.

        Raises:
            UserError: The folder exists, the disk is full, or (unless `background`) the system refuses a write.
        """

    def prepare_save(self, buffer_bytes: int | None = None) -> None:  # noqa: B027  optional
        """Hint that a background save starts in a few seconds, so the engine can pre-allocate staging buffers. Does not block.

        Args:
            buffer_bytes: As `save` will get it.
        """

    @abstractmethod
    def wait_saved(self) -> None:
        """Block until no save is in progress. Raises or logs an error that has not been reported yet."""

    @abstractmethod
    def cancel_save(self) -> None:
        """Abort the save in progress, if any, and remove what it has written."""

    @abstractmethod
    def load(self, folder: str | Path, *, wait: bool = True, convert_states: bool = False) -> dict[str, Any]:
        """Restore weights, moments and step counters from a checkpoint.

        Args:
            folder: A complete checkpoint of this model.
            wait: False lets the engine return before all units are read, where it can read them during the next step.
            convert_states: Convert optimizer states that are stored in another type (fp32, bf16) than the optimizer's.

        Returns:
            The `extra` it was saved with.

        Raises:
            UserError: The checkpoint is damaged or belongs to another model.
        """

    @abstractmethod
    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, master weights on the CPU) of every parameter; tied parameters once."""

    @abstractmethod
    def named_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, gradient on the CPU) after `backward`, before clipping, without the loss scale."""

    @abstractmethod
    def memory(self) -> dict[str, int]:
        """Bytes of host and device memory by purpose."""

    def synchronize(self) -> None:  # noqa: B027  optional
        """Block until the updates of the latest step are applied and the device is idle."""

    def counters(self) -> dict[str, int | float | str]:
        """Counts and bytes of the latest step, for diagnosis; the keys depend on the engine."""
        return {}

    def step_over_ranks(self) -> MeshRecord | None:
        """Figures of the latest `train_step` over all ranks, where there are several. Collective."""
        return None

    def interrupt(self, error: BaseException) -> bool:
        """From another thread: end the step in progress, or the next one, with `error`; the state stays as before that step.

        Returns:
            False, without effect, where a step cannot be dropped.
        """
        return False

    def begin_trace(self) -> None:
        """Record everything that steps do, until `end_trace`."""
        raise UserError("only the host engine has a timeline", "engine: mesh", "use engine: host")

    def end_trace(self) -> list[Span]:
        """All spans recorded since `begin_trace`. Waits for background work."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Wait for background work, then free all memory. A closed engine refuses every further call."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _refuse_closed(self) -> None:
        if self._closed:
            raise EngineClosed("the engine is closed")

    def _checked(
        self, batch: Batch, training: bool = True, objective: Objective | None = None
    ) -> tuple[dict[str, torch.Tensor], StepTotals, int]:
        """The validated batch in the form the engine computes, what is known of the step, and the rows that stay together.

        See `batches.checked`, `Objective.counts` and `Objective.rows_together`.
        """
        self._refuse_closed()
        objective = objective or self.objective
        vocabulary = self.config.get_text_config().vocab_size
        positions, keys = batches.most_positions(self.config), objective.batch_keys
        by_length, masks = scaling_by_length(self.config) is not None, training and self._masks_tokens
        found, tokens = batches.checked(batch, vocabulary, positions, keys, by_length, masks)
        counts, together = {"tokens": tokens}, 1
        if tokens and type(objective) is not CrossEntropy:
            targets = find_targets(found["labels"], {key: found[key] for key in keys})
            counts |= objective.counts(targets)
            together = objective.rows_together(targets)
        shape = self._shapes[0 if training else 1]
        return found if shape is None else shape.padded(found), StepTotals(counts), together


def unwatched(kind: str, name: str | None = None) -> AbstractContextManager[Any]:
    """`Engine.watch` without a watchdog."""
    return nullcontext()


def check_learning_rate(learning_rate: float | None) -> None:
    """Raise a UserError unless it is a number of at least 0, or None (the optimizer's own)."""
    if learning_rate is not None and not (isinstance(learning_rate, int | float) and 0 <= learning_rate < math.inf):
        raise UserError(f"learning_rate = {learning_rate!r} is not a number of at least 0", "train_step")


def skip_reason(loss: float, norm: float) -> str | None:
    """Why an update is skipped because its loss or gradient norm is not finite; None if both are."""
    if not math.isfinite(loss):
        return "loss is not finite"
    return None if math.isfinite(norm) else "gradient norm is not finite"


def refuse_dropout(config: Any) -> None:
    """Raise a UserError if the model draws random numbers: ranks would draw others than one process."""
    for name in dropout_keys(config.get_text_config()):
        raise UserError(
            "random numbers would depend on the number of ranks",
            name,
            "set it to 0, or train on one device (run.gpus: 1)",
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
    """The HF model with parameters of `dtype` on meta: a copy of a model in memory, or built from a folder's config.

    Raises:
        UserError: Transformers cannot build it.
    """
    if isinstance(model, nn.Module):
        return build_from_memory(model, compute_dtype=dtype)  # type: ignore[arg-type]
    return build_meta_model(
        config, compute_dtype=dtype, attn_implementation=attention, trust_remote_code=trust_remote_code
    )
