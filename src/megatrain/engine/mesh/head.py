"""The end of the last stage: logits, loss and their gradients, for one chunk of target tokens at a time.

[Note: forward and backward of a chunk]
A chunk's logits exist once: its loss is computed, its logits are overwritten by their own gradient, and that is sent back to the
hidden states and the head's weights before the next chunk begins. Autograd sees one function of hidden states and weights that
saves nothing but their gradients. A chunk's temporaries are its logits and one array in fp32: 2 + 4 bytes per logit with bf16.
Gradients of weights are summed over chunks in fp32.

[Note: split logits]
The ranks of a tensor group hold all tokens and a range of the vocabulary each. They agree on the largest logit of each token,
then on the sum of its exponentials and the logit of its label; each differentiates its own logits. So a rank's gradient of the
hidden states is its share of a sum. All ranks see the same labels, so they make the same chunks.

Shapes: B rows, L tokens, D hidden size, N target tokens, n of them in a chunk, V vocabulary, W the part of it on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatrain.engine.objective import IGNORED, wide

HEAD_CHUNK_TOKENS = 4096
Logits = Callable[[torch.Tensor], torch.Tensor]
"""Hugging Face's head: (1, n, D) -> (1, n, W)."""


@dataclass(frozen=True)
class VocabularySplit:
    """The rows of the vocabulary on this rank: those from `first` on; `group` holds all."""

    group: dist.ProcessGroup
    first: int


class ChunkedHead:
    """Computes the sum of cross entropies of hidden states. See [Note: forward and backward of a chunk].

    Attributes:
        split: Where ranks share the vocabulary; None: all of it is here.
        chunk_tokens: Targets whose logits exist at the same time.
    """

    def __init__(self, logits: Logits, chunk_tokens: int = HEAD_CHUNK_TOKENS):
        self.split: VocabularySplit | None = None
        self.chunk_tokens = chunk_tokens
        self._logits = logits
        self._compiled = False
        self._largest, self._sums, self._overwrite = largest_logit, exponential_sums, overwrite_by_gradient

    def compile(self) -> None:
        """Fuse the passes over logits. Chunks then all have one shape: the last one is padded with ignored labels."""
        self._compiled = True
        self._largest = torch.compile(largest_logit, dynamic=False)
        self._sums = torch.compile(exponential_sums, dynamic=False)
        self._overwrite = torch.compile(overwrite_by_gradient, dynamic=False)

    def loss(
        self, hidden_BLD: torch.Tensor, labels_BL: torch.Tensor, parameters: Sequence[nn.Parameter], divisor: float
    ) -> torch.Tensor:
        """Sum of cross entropies / `divisor`, a scalar in fp32 (fp64 for fp64 states).

        Args:
            hidden_BLD: The final norm's output, all tokens on each tensor rank.
            labels_BL: The label each token predicts, -100 for none.
            parameters: All parameters that the logits depend on.
            divisor: Target tokens of the whole step.
        """
        if torch.is_grad_enabled():
            trained = [parameter for parameter in parameters if parameter.requires_grad]
            return _Loss.apply(self, labels_BL, divisor, hidden_BLD, *trained)  # type: ignore[return-value]
        losses = [
            self._losses(*self._normalized(self._logits(hidden_1nD)[0], labels_n), labels_n)
            for hidden_1nD, labels_n, _ in self._chunks(hidden_BLD, labels_BL)
        ]
        return sum(losses, _zero(hidden_BLD)) / divisor

    def forward_backward(
        self, hidden_BLD: torch.Tensor, labels_BL: torch.Tensor, parameters: Sequence[torch.Tensor], divisor: float
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """(loss / divisor, its gradient with respect to the hidden states, and to each parameter)."""
        total, d_hidden_BLD = _zero(hidden_BLD), torch.zeros_like(hidden_BLD)
        d_flat = d_hidden_BLD.view(-1, hidden_BLD.shape[-1])
        sums: list[torch.Tensor | None] = [None] * len(parameters)
        for hidden_1nD, labels_n, positions_n in self._chunks(hidden_BLD, labels_BL):
            with torch.enable_grad():
                hidden_1nD.requires_grad_()
                logits_1nW = self._logits(hidden_1nD)
            # Not `.data`: if the head's code has saved its logits, autograd shall notice that they are overwritten.
            values_nW = logits_1nW.detach()[0]
            normalizers_n, logprobs_n = self._normalized(values_nW, labels_n)
            total += self._losses(normalizers_n, logprobs_n, labels_n)
            slopes_n = torch.full_like(logprobs_n, -1.0 / divisor).masked_fill_(labels_n == IGNORED, 0.0)
            self._overwrite(values_nW, labels_n - self._first, normalizers_n, slopes_n)
            inputs = [hidden_1nD, *parameters]
            d_hidden_1nD, *found = torch.autograd.grad(logits_1nW, inputs, values_nW[None], allow_unused=True)
            d_flat.index_copy_(0, positions_n, d_hidden_1nD[0, : len(positions_n)])
            for index, gradient in enumerate(found):
                sums[index] = _added(sums[index], gradient)
            del logits_1nW, values_nW, d_hidden_1nD, found  # the next chunk needs their memory
        d_parameters = [
            torch.zeros_like(parameter) if total_gradient is None else total_gradient.to(parameter.dtype)
            for parameter, total_gradient in zip(parameters, sums, strict=True)
        ]
        return total / divisor, d_hidden_BLD, d_parameters

    @property
    def _first(self) -> int:
        return 0 if self.split is None else self.split.first

    def _normalized(self, logits_nW: torch.Tensor, labels_n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(log of the sum of exponentials, log-probability of the label), (n,) each. See [Note: split logits]."""
        largest_n = self._largest(logits_nW)
        if self.split is not None:
            dist.all_reduce(largest_n, op=dist.ReduceOp.MAX, group=self.split.group)
        sums_2n = self._sums(logits_nW, labels_n - self._first, largest_n)
        if self.split is not None:
            dist.all_reduce(sums_2n, group=self.split.group)
        log_n = sums_2n[0].log()
        return largest_n + log_n, sums_2n[1] - log_n

    @staticmethod
    def _losses(normalizers_n: torch.Tensor, logprobs_n: torch.Tensor, labels_n: torch.Tensor) -> torch.Tensor:
        return -logprobs_n.masked_fill(labels_n == IGNORED, 0.0).sum()

    def _chunks(
        self, hidden_BLD: torch.Tensor, labels_BL: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """(hidden states (1, n, D), labels (n,), positions in the flat B x L of those that are targets)."""
        flat, labels = hidden_BLD.detach().flatten(0, 1), labels_BL.flatten()
        positions = torch.nonzero(labels != IGNORED).flatten()
        size = min(self.chunk_tokens, 1 << (len(flat) - 1).bit_length()) if self._compiled else self.chunk_tokens
        for start in range(0, len(positions), size):
            part = positions[start : start + size]
            hidden_nD, labels_n = flat[part], labels[part]
            if self._compiled and len(part) < size:
                hidden_nD = torch.nn.functional.pad(hidden_nD, (0, 0, 0, size - len(part)))
                labels_n = torch.nn.functional.pad(labels_n, (0, size - len(part)), value=IGNORED)
            yield hidden_nD[None], labels_n, part


class _Loss(torch.autograd.Function):
    """`ChunkedHead.loss` for autograd. The gradients are ready after the forward."""

    @staticmethod
    def forward(
        ctx: Any,
        head: ChunkedHead,
        labels_BL: torch.Tensor,
        divisor: float,
        hidden_BLD: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        loss, d_hidden_BLD, d_parameters = head.forward_backward(hidden_BLD, labels_BL, parameters, divisor)
        ctx.save_for_backward(d_hidden_BLD, *d_parameters)
        return loss

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        gradients = ctx.saved_tensors
        return None, None, None, *(gradient.mul_(slope) for gradient in gradients)


def largest_logit(logits_nW: torch.Tensor) -> torch.Tensor:
    """(n,), the largest logit of each token on this rank, in fp32 (fp64 for fp64 logits)."""
    return wide(logits_nW.amax(dim=1))


def exponential_sums(logits_nW: torch.Tensor, labels_n: torch.Tensor, largest_n: torch.Tensor) -> torch.Tensor:
    """(2, n): this rank's part of sum exp(logit - largest), and the label's logit - largest, 0 where it is elsewhere.

    `labels_n` count from this rank's first row of the vocabulary.
    """
    # Mixed operands: the difference is computed in the wider type, without a wide copy of the logits.
    sums_n = torch.sub(logits_nW, largest_n[:, None]).exp_().sum(dim=1)
    here_n = (labels_n >= 0) & (labels_n < logits_nW.shape[1])
    logit_n = wide(logits_nW.gather(1, _inside(labels_n, logits_nW)[:, None])[:, 0])
    return torch.stack([sums_n, torch.where(here_n, logit_n - largest_n, 0.0)])


def overwrite_by_gradient(
    logits_nW: torch.Tensor, labels_n: torch.Tensor, normalizers_n: torch.Tensor, slopes_n: torch.Tensor
) -> None:
    """Replace logits by the gradient of sum(slope x log-probability of the label): slope x (1[label] - probability).

    `labels_n` count from this rank's first row of the vocabulary; `slopes_n` is zero for ignored labels.
    """
    here_n = (labels_n >= 0) & (labels_n < logits_nW.shape[1])
    gradient_nW = torch.sub(logits_nW, normalizers_n[:, None]).exp_()
    gradient_nW.scatter_add_(1, _inside(labels_n, logits_nW)[:, None], -here_n.to(gradient_nW.dtype)[:, None])
    logits_nW.copy_(gradient_nW.mul_(-slopes_n[:, None]))


def _inside(labels_n: torch.Tensor, logits_nW: torch.Tensor) -> torch.Tensor:
    return labels_n.clamp(0, logits_nW.shape[1] - 1)


def _zero(like: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)


def _added(total: torch.Tensor | None, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """The sum, in fp32 from the second chunk on: a single chunk's gradient is not copied."""
    if total is None or gradient is None:
        return gradient if total is None else total
    return wide(total).add_(gradient)
