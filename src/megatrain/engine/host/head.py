"""The end of a forward: logits, loss and their gradients, for one chunk of target tokens at a time.

Shapes: B rows, T tokens, D hidden size, N target tokens, n of them in a chunk, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from megatrain.device.shards import ALONE, Shards
from megatrain.device.streams import Streams
from megatrain.engine.objective import (
    IGNORED,
    CrossEntropy,
    Objective,
    StepTotals,
    Targets,
    cross_entropy_sum,
    find_targets,
    token_logprobs,
)
from megatrain.models.shell import Shell

Weights = Mapping[str, torch.Tensor]
"""Parameters of embedding and head by full name, on the device."""


class LossSums:
    """Sums of a step's loss and metrics over its target tokens: fp64 scalars on the device."""

    def __init__(self, device: torch.device):
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.metrics: dict[str, torch.Tensor] = {}

    def add(self, loss: torch.Tensor, metrics: Mapping[str, torch.Tensor]) -> None:
        self.loss += loss.detach()
        for name, value in metrics.items():
            value = value.detach().double()
            self.metrics[name] = self.metrics[name] + value if name in self.metrics else value

    def wait(
        self, *others: torch.Tensor, shards: Shards = ALONE, names: Sequence[str] | None = None
    ) -> tuple[float, dict[str, float], list[float]]:
        """(loss, metrics, other scalars on the device), summed over the ranks, by one synchronisation.

        `names` are the metrics of all ranks; None: of this one.
        """
        names, nothing = list(self.metrics) if names is None else names, torch.zeros_like(self.loss)
        scalars = [self.loss, *(self.metrics.get(name, nothing) for name in names), *(o.double() for o in others)]
        loss, *values = shards.total(torch.stack(scalars)).tolist()
        count = len(names)
        return loss, dict(zip(names, values[:count], strict=True)), values[count:]


class Head:
    """Computes an objective on hidden states through Hugging Face's own head.

    Args:
        shell: Hugging Face's code.
        streams: The device's streams.
        objective: The loss.
        compiled: Compile the loss; chunks then all have one shape.
    """

    def __init__(self, shell: Shell, streams: Streams, objective: Objective, compiled: bool):
        self._shell, self._streams, self._objective = shell, streams, objective
        self._fixed_chunks = compiled
        self._cross_entropy = torch.compile(cross_entropy_sum, dynamic=False) if compiled else cross_entropy_sum
        self._logprobs = torch.compile(token_logprobs, dynamic=False) if compiled else token_logprobs

    def find_targets(
        self, batch: Mapping[str, torch.Tensor], step: StepTotals | None, objective: Objective | None = None
    ) -> Targets:
        """All targets of a batch, on the CPU. `step`: what is known of the whole step, of which this may be a part."""
        keys = (objective or self._objective).batch_keys
        return find_targets(batch["labels"], {key: batch[key] for key in keys}, step)

    def targets_of(self, targets: Targets, rows: slice) -> Targets:
        """The targets of some rows, on the device, with positions counted from the first of these rows."""
        bounds = rows.start * targets.row_tokens, rows.stop * targets.row_tokens
        start, end = np.searchsorted(targets.positions.numpy(), bounds)  # they ascend
        part = targets.part(slice(int(start), int(end)), rows.start)
        move = self._streams.to_device
        values = {key: move(value) for key, value in part.values.items()}
        return replace(part, positions=move(part.positions), labels=move(part.labels), values=values)

    @torch.no_grad()
    def loss(
        self,
        hidden_BTD: torch.Tensor,
        targets: Targets,
        weights: Weights,
        chunk_tokens: int,
        sums: LossSums,
        objective: Objective | None = None,
    ) -> None:
        """Add loss and metrics of the targets to `sums`, without gradients; by the engine's objective unless another is given."""
        objective = objective or self._objective
        if objective is self._objective and objective.linear:
            for hidden_nD, labels_n, part in self._chunks(hidden_BTD, targets, chunk_tokens):
                self._linear_loss(hidden_nD, labels_n, targets.part(part), weights, sums)
        else:
            logprobs_N = self._all_logprobs(hidden_BTD, targets, weights, chunk_tokens)
            sums.add(*objective.with_statistics(logprobs_N, targets))

    def backward(
        self,
        hidden_BTD: torch.Tensor,
        targets: Targets,
        weights: Weights,
        chunk_tokens: int,
        scale: float,
        sums: LossSums,
        collect: Callable[[str, torch.Tensor | None], object],
    ) -> torch.Tensor:
        """d (scale x loss) / d hidden (B, T, D); adds loss and metrics to `sums`. See [Note: two passes of the head].

        Args:
            hidden_BTD: The base model's output.
            targets: Targets of these rows, on the device.
            weights: Leaves that require gradients.
            chunk_tokens: Targets whose logits exist at the same time.
            scale: Factor on the gradients.
            sums: Receives loss and metrics.
            collect: Receives each chunk's gradient of each parameter that the head reads, None if there is none.
        """
        d_hidden_BTD = torch.zeros_like(hidden_BTD)
        d_flat = d_hidden_BTD.view(-1, hidden_BTD.shape[-1])
        names = self._shell.head_names
        leaves = [weights[name] for name in names]
        # Filled on the device: a copy would wait for it.
        factor = torch.full((), scale, dtype=torch.float32, device=hidden_BTD.device)
        slopes_N = None
        if not self._objective.linear:
            slopes_N = self._slopes(hidden_BTD, targets, weights, chunk_tokens, sums)
        for hidden_nD, labels_n, part in self._chunks(hidden_BTD.detach(), targets, chunk_tokens):
            hidden_nD.requires_grad_()
            count = part.stop - part.start
            if slopes_N is None:
                result, slope = self._linear_loss(hidden_nD, labels_n, targets.part(part), weights, sums), factor
            else:
                result = self._logprobs(self._shell.logits(weights, hidden_nD), labels_n)[:count]
                slope = slopes_N[part] * factor
            d_hidden_nD, *d_leaves = torch.autograd.grad(
                result, [hidden_nD, *leaves], slope.to(result.dtype), allow_unused=True
            )
            d_flat.index_copy_(0, targets.positions[part], d_hidden_nD[:count])
            for name in reversed(names):
                collect(name, d_leaves.pop())
            del d_hidden_nD, result  # the next chunk needs their memory
        return d_hidden_BTD

    def _linear_loss(
        self, hidden_nD: torch.Tensor, labels_n: torch.Tensor, targets: Targets, weights: Weights, sums: LossSums
    ) -> torch.Tensor:
        """Loss of one chunk by a linear objective, a scalar; adds it and the metrics to `sums`."""
        logits_nV = self._shell.logits(weights, hidden_nD)
        if type(self._objective) is CrossEntropy:
            loss, metrics = self._cross_entropy(logits_nV, labels_n), {}
        else:
            loss, metrics = self._objective.loss(self._logprobs(logits_nV, labels_n)[: len(targets)], targets)
        sums.add(loss, metrics)
        return loss

    def _slopes(
        self, hidden_BTD: torch.Tensor, targets: Targets, weights: Weights, chunk_tokens: int, sums: LossSums
    ) -> torch.Tensor:
        """(N,) fp32, derivative of the loss with respect to each log-probability; adds loss and metrics to `sums`."""
        logprobs_N = self._all_logprobs(hidden_BTD, targets, weights, chunk_tokens).requires_grad_()
        loss, metrics = self._objective.with_statistics(logprobs_N, targets)
        sums.add(loss, metrics)
        return torch.autograd.grad(loss, logprobs_N)[0]

    @torch.no_grad()
    def _all_logprobs(
        self, hidden_BTD: torch.Tensor, targets: Targets, weights: Weights, chunk_tokens: int
    ) -> torch.Tensor:
        """(N,) fp32, log-probability of each target."""
        logprobs_N = torch.zeros(len(targets), dtype=torch.float32, device=hidden_BTD.device)
        for hidden_nD, labels_n, part in self._chunks(hidden_BTD, targets, chunk_tokens):
            found = self._logprobs(self._shell.logits(weights, hidden_nD), labels_n)
            logprobs_N[part] = found[: part.stop - part.start]
        return logprobs_N

    def _chunks(
        self, hidden_BTD: torch.Tensor, targets: Targets, chunk_tokens: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, slice]]:
        """(hidden states (n, D), labels (n,), which targets these are), at most `chunk_tokens` targets at a time.

        Compiled code needs one shape: its last chunk is padded with ignored labels, which the slice leaves out.
        """
        flat, count = hidden_BTD.reshape(-1, hidden_BTD.shape[-1]), len(targets)
        positions, labels = targets.positions, targets.labels
        if self._fixed_chunks:
            # By the shape of the batch, not by the number of its targets, which differs from step to step.
            chunk_tokens = min(chunk_tokens, 1 << (len(flat) - 1).bit_length())
            missing = -count % chunk_tokens
            positions = torch.nn.functional.pad(positions, (0, missing))
            labels = torch.nn.functional.pad(labels, (0, missing), value=IGNORED)
        for start in range(0, len(labels), chunk_tokens):
            part = slice(start, start + chunk_tokens)
            yield flat.index_select(0, positions[part]), labels[part], slice(start, min(part.stop, count))
