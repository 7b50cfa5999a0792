"""Objectives: a loss over the log-probabilities of target tokens, and which tokens are targets.

An objective is plain autograd code on one number per target token; it never sees logits. The loss of a step is its sum divided
by a count of the whole step (target tokens, pairs, examples), however the step is cut into accumulation steps, microbatches and
chunks of tokens. Hidden states of tokens that predict nothing never reach the head.

[Note: two passes of the head]
Logits exist for one chunk of tokens at a time, but a loss may couple tokens of different chunks (all tokens of a row, the two
rows of a pair). So the head first runs without gradient, chunk by chunk, for the log-probabilities of all targets of an
accumulation step. The objective's gradient with respect to that vector is one weight per token. Then the head runs again, chunk
by chunk, and each token's log-probability is differentiated with its weight. A linear objective knows the weights beforehand, so
it needs the second pass only.

[Note: what an objective knows of the step]
A part of a step (an accumulation step, a rank's rows) must not change the result. So everything that couples the parts is known
before the first gradient: counts, which follow from the batch, and statistics, which need log-probabilities of the whole step
(KTO's estimate of the divergence). Where a step is cut, statistics cost a forward pass ahead of it; where it is not, the first
pass of the head has them. Rows that belong together (the two rows of a pair) are never separated: `Objective.rows_together`.

Shapes: B rows, T tokens, N target tokens, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch
from torch.nn import functional as F

from megatrain.data.samples import DataKind

IGNORED = -100
"""Label of a token that is not a target, as in Hugging Face."""


@dataclass(frozen=True)
class StepTotals:
    """What an objective knows of the whole step. See [Note: what an objective knows of the step].

    Attributes:
        counts: By name: `tokens` (target tokens), and the objective's `counts`.
        statistics: The objective's `statistics` of the whole step; None: not computed.
    """

    counts: Mapping[str, int]
    statistics: Mapping[str, torch.Tensor | float] | None = None


@dataclass(frozen=True)
class Targets:
    """Target tokens of some rows of a batch, in ascending order of position.

    Attributes:
        positions: (N,) int64, flat index b * T + t of the token that predicts; b counts from the first of these rows.
        labels: (N,) int64, the token to predict: the label at t + 1.
        row_tokens: T.
        step: What is known of the whole step.
        values: The objective's `batch_keys`, (N,) each: the entry at t + 1, beside the label.
    """

    positions: torch.Tensor
    labels: torch.Tensor
    row_tokens: int
    step: StepTotals
    values: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.labels.numel()

    @property
    def step_tokens(self) -> int:
        """Target tokens of the whole step."""
        return self.step.counts["tokens"]

    @property
    def rows(self) -> torch.Tensor:
        """(N,) int64, the row of each target, for sums over rows."""
        return self.positions // self.row_tokens

    def part(self, part: slice, row: int = 0) -> Targets:
        """Some of the targets, with rows counted from `row`."""
        return replace(
            self,
            positions=self.positions[part] - row * self.row_tokens,
            labels=self.labels[part],
            values={key: value[part] for key, value in self.values.items()},
        )


class Objective(ABC):
    """The loss of a training step.

    Attributes:
        linear: Whether the loss is a sum of log-probabilities times weights that do not depend on any log-probability, so that
            it can be computed for a part of the targets alone. See [Note: two passes of the head].
        has_statistics: Whether the loss needs `statistics` of the whole step.
        data: What it is trained on; decides which samples a run reads, and which tensors its batches bring.
        needs_reference: Whether batches bring `reference_logprobs`, those of the initial model.
        batch_keys: Further tensors (rows, T) that batches must bring, beside the labels: bool, integer or floating.
        per: The count that the loss is divided by.
        metric_per: Metric -> the count that it is divided by, where that is not `per`.
    """

    linear: ClassVar[bool] = False
    has_statistics: ClassVar[bool] = False
    data: ClassVar[DataKind] = "samples"
    needs_reference: ClassVar[bool] = False
    batch_keys: tuple[str, ...] = ()
    per: str = "tokens"
    metric_per: Mapping[str, str] = {}

    @property
    def name(self) -> str:
        return type(self).__name__

    @abstractmethod
    def loss(self, logprobs_N: torch.Tensor, targets: Targets) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """The loss of all target tokens of an accumulation step (of an evaluation: of the batch).

        Args:
            logprobs_N: (N,) fp32, log-probability of each label, on the device. Differentiable.
            targets: The same tokens, on the device.

        Returns:
            (sum over these tokens, scalar; metrics by name, scalar sums too). The engine adds up the accumulation steps and
            divides by the step's count `per` (`targets.step_tokens` unless the objective says otherwise).
        """

    def counts(self, targets: Targets) -> Mapping[str, int]:
        """Counts of a whole step besides its `tokens`, from all its targets, on the CPU.

        Raises:
            UserError: The objective cannot use this batch.
        """
        return {}

    def rows_together(self, targets: Targets) -> int:
        """Number of consecutive rows (counted from the first) that no cut of the step may separate. Raises as `counts`."""
        return 1

    def statistics(self, logprobs_N: torch.Tensor, targets: Targets) -> Mapping[str, torch.Tensor]:
        """Scalar sums over these targets that `loss` needs of the whole step, without gradient. As for `loss`."""
        return {}

    def example(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
        """A batch of any tokens with the `batch_keys` added, for compiling ahead of the first step; None: not possible."""
        return None if self.batch_keys else dict(batch)

    def derived(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The mean metrics of a step or an evaluation, with those that follow from them."""
        return dict(metrics)

    def with_statistics(
        self, logprobs_N: torch.Tensor, targets: Targets
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """`loss`. If statistics are needed and not known, these targets are the whole step."""
        if self.has_statistics and targets.step.statistics is None:
            with torch.no_grad():
                found = self.statistics(logprobs_N.detach(), targets)
            targets = replace(targets, step=replace(targets.step, statistics=found))
        return self.loss(logprobs_N, targets)

    def means(
        self, loss_sum: float, metric_sums: Mapping[str, float], counts: Mapping[str, int]
    ) -> tuple[float | None, dict[str, float]]:
        """(loss, metrics) from sums and counts of a step or an evaluation. None, or absent: the count is zero."""
        divisors = {name: counts.get(self.metric_per.get(name, self.per), 0) for name in metric_sums}
        metrics = {name: value / divisors[name] for name, value in metric_sums.items() if divisors[name]}
        count = counts.get(self.per, 0)
        return loss_sum / count if count else None, self.derived(metrics)


class Statistics(Objective):
    """Another objective's `statistics` as metrics, for a forward pass ahead of a step."""

    def __init__(self, objective: Objective):
        self._objective, self.batch_keys = objective, objective.batch_keys

    def loss(self, logprobs_N: torch.Tensor, targets: Targets) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        return logprobs_N.new_zeros(()), self._objective.statistics(logprobs_N, targets)


class CrossEntropy(Objective):
    """Negative log-likelihood of the target tokens. The engines compute it from logits by `cross_entropy_sum`."""

    linear = True

    def loss(self, logprobs_N: torch.Tensor, targets: Targets) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        return -logprobs_N.sum(), {}


def find_targets(
    labels_BT: torch.Tensor, values: Mapping[str, torch.Tensor] | None = None, step: StepTotals | None = None
) -> Targets:
    """Shift the labels by one inside each row and keep those that are targets (CPU in, CPU out).

    In numpy: torch wakes all cores for each of these small operations, which takes 6 ms of 16 of them and numpy 0.1 of one.

    Args:
        labels_BT: int64.
        values: (B, T) each, shifted and selected in the same way.
        step: By default these targets are the whole step.
    """
    tokens = labels_BT.shape[1]
    next_BT = labels_BT.numpy()[:, 1:]
    row, token = np.nonzero(next_BT != IGNORED)
    found = {key: torch.from_numpy(value.numpy()[row, token + 1]) for key, value in (values or {}).items()}
    step = step or StepTotals({"tokens": len(row)})
    return Targets(torch.from_numpy(row * tokens + token), torch.from_numpy(next_BT[row, token]), tokens, step, found)


def cross_entropy_sum(logits_NV: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
    """Sum of the cross entropies, a scalar in fp32 (fp64 for fp64 logits). Ignored labels count as zero."""
    return F.cross_entropy(wide(logits_NV), labels_N, ignore_index=IGNORED, reduction="sum")


def token_logprobs(logits_NV: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
    """Log-probability of each label, (N,) in fp32 (fp64 for fp64 logits). Ignored labels have zero."""
    return -F.cross_entropy(wide(logits_NV), labels_N, ignore_index=IGNORED, reduction="none")


def wide(logits: torch.Tensor) -> torch.Tensor:
    """In fp32; fp64 stays."""
    return logits if logits.dtype == torch.float64 else logits.float()
