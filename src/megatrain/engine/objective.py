"""Objectives: a loss over the log-probabilities of target tokens, and which tokens are targets.

An objective is plain autograd code on one number per target token; it never sees logits. The loss of a step is its sum over all
target tokens divided by their number in the whole step, however the step is cut into accumulation steps, microbatches and
chunks of tokens. Hidden states of tokens that predict nothing never reach the head.

[Note: two passes of the head]
Logits exist for one chunk of tokens at a time, but a loss may couple tokens of different chunks (all tokens of a row, the two
rows of a pair). So the head first runs without gradient, chunk by chunk, for the log-probabilities of all targets of an
accumulation step. The objective's gradient with respect to that vector is one weight per token. Then the head runs again, chunk
by chunk, and each token's log-probability is differentiated with its weight. A linear objective knows the weights beforehand, so
it needs the second pass only.

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

IGNORED = -100
"""Label of a token that is not a target, as in Hugging Face."""


@dataclass(frozen=True)
class Targets:
    """Target tokens of some rows of a batch, in ascending order of position.

    Attributes:
        positions: (N,) int64, flat index b * T + t of the token that predicts; b counts from the first of these rows.
        labels: (N,) int64, the token to predict: the label at t + 1.
        row_tokens: T.
        step_tokens: Target tokens of the whole step, by which the sum is divided.
        values: The objective's `batch_keys`, (N,) each: the entry at t + 1, beside the label.
    """

    positions: torch.Tensor
    labels: torch.Tensor
    row_tokens: int
    step_tokens: int
    values: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.labels.numel()

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
        batch_keys: Further tensors (rows, T) that batches must bring, beside the labels: bool, integer or floating.
    """

    linear: ClassVar[bool] = False
    batch_keys: tuple[str, ...] = ()

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
            divides by `targets.step_tokens`.
        """


class CrossEntropy(Objective):
    """Negative log-likelihood of the target tokens. The engines compute it from logits by `cross_entropy_sum`."""

    linear = True

    def loss(self, logprobs_N: torch.Tensor, targets: Targets) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        return -logprobs_N.sum(), {}


def find_targets(labels_BT: torch.Tensor, values: Mapping[str, torch.Tensor] | None = None) -> Targets:
    """Shift the labels by one inside each row and keep those that are targets (CPU in, CPU out).

    In numpy: torch wakes all cores for each of these small operations, which takes 6 ms of 16 of them and numpy 0.1 of one.

    Args:
        labels_BT: int64.
        values: (B, T) each, shifted and selected in the same way.
    """
    tokens = labels_BT.shape[1]
    next_BT = labels_BT.numpy()[:, 1:]
    row, token = np.nonzero(next_BT != IGNORED)
    found = {key: torch.from_numpy(value.numpy()[row, token + 1]) for key, value in (values or {}).items()}
    return Targets(
        torch.from_numpy(row * tokens + token), torch.from_numpy(next_BT[row, token]), tokens, len(row), found
    )


def cross_entropy_sum(logits_NV: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
    """Sum of the cross entropies, a scalar in fp32 (fp64 for fp64 logits). Ignored labels count as zero."""
    return F.cross_entropy(_wide(logits_NV), labels_N, ignore_index=IGNORED, reduction="sum")


def token_logprobs(logits_NV: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
    """Log-probability of each label, (N,) in fp32 (fp64 for fp64 logits). Ignored labels have zero."""
    return -F.cross_entropy(_wide(logits_NV), labels_N, ignore_index=IGNORED, reduction="none")


def _wide(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
