"""The slow reference of every parity test: plain transformers, autograd and torch optimizers, nothing of megatrain.

Packed batches are passed as transformers documents it: `position_ids` that restart with each document, and no `attention_mask`.
No transformers model takes `document_ids`; `separate_documents_loss` does.

Legend: B rows, T tokens per row, V vocabulary.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Trainer

NO_TARGET = -100


@dataclass(frozen=True)
class Reference:
    """Loss of a batch and, unless only the loss was computed, the gradient of every parameter by its HF name.

    Attributes:
        loss: Mean cross entropy over target tokens.
        tokens: Number of target tokens.
        gradients: None for parameters that autograd did not reach (an expert without a token).
    """

    loss: float
    tokens: int
    gradients: dict[str, Tensor | None] = field(default_factory=dict)


def accepts_positions(model: nn.Module) -> bool:
    """Whether `position_ids` is an argument of the model, rather than swallowed by its `**kwargs`."""
    return "position_ids" in inspect.signature(model.forward).parameters


def forward_loss_sum(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Plain forward of the whole model.

    Returns:
        Sum of cross entropies over target tokens, of fp32 logits (fp64 ones stay fp64), and the number of target tokens.

    Raises:
        ValueError: The batch is packed and the model has no `position_ids`, so it would silently mix the documents.
    """
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask", "position_ids") if key in batch}
    if "position_ids" in inputs and not accepts_positions(model):
        raise ValueError(f"{type(model).__name__}.forward has no position_ids")
    logits_BTV = model(**inputs, use_cache=False).logits
    logits_BTV = logits_BTV if logits_BTV.dtype == torch.float64 else logits_BTV.float()
    targets_BT = batch["labels"][:, 1:]
    loss_sum = F.cross_entropy(
        logits_BTV[:, :-1].flatten(0, 1), targets_BT.flatten(), ignore_index=NO_TARGET, reduction="sum"
    )
    return loss_sum, int((targets_BT != NO_TARGET).sum())


def reference_loss(model: nn.Module, batch: dict[str, Tensor]) -> Reference:
    """The loss alone, without a graph, in the model's current mode (train or eval)."""
    with torch.no_grad():
        loss_sum, tokens = forward_loss_sum(model, batch)
    return Reference(loss=(loss_sum / tokens).item(), tokens=tokens)


def reference_loss_and_grads(model: nn.Module, batch: dict[str, Tensor]) -> Reference:
    """Loss and gradients of one batch. The model's `.grad` fields are left empty."""
    model.zero_grad(set_to_none=True)
    loss_sum, tokens = forward_loss_sum(model, batch)
    loss = loss_sum / tokens
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return Reference(loss=loss.item(), tokens=tokens, gradients=gradients)


def gradient_error(got: Mapping[str, Tensor | None], want: Mapping[str, Tensor | None]) -> tuple[float, str]:
    """The largest difference of any gradient relative to its norm, and the name of that parameter.

    The norm counts as at least a tenth of what a parameter of this size has at the model's mean square: some gradients are zero
    in exact arithmetic (a key bias shifts all scores of a softmax alike) or differences of large terms, and so rounding noise. A
    missing gradient counts as zeros, on either side.
    """
    total = sum(g.double().square().sum().item() for g in want.values() if g is not None)
    count = sum(g.numel() for g in want.values() if g is not None)
    worst, worst_name = 0.0, ""
    for name in {**want, **got}:
        a, b = got.get(name), want.get(name)
        if a is None and b is None:
            continue
        a, b = (torch.zeros_like(b) if a is None else a).double(), (torch.zeros_like(a) if b is None else b).double()
        floor = 0.1 * math.sqrt(total / count * b.numel())
        error = ((a - b).norm() / max(b.norm().item(), floor)).item()
        if math.isnan(error):
            return error, name
        if error > worst:
            worst, worst_name = error, name
    return worst, worst_name


def document_spans(batch: dict[str, Tensor]) -> list[tuple[int, int, int]]:
    """(row, start, stop) of every document of a packed batch, the padding at the end of a row included."""
    spans = []
    for row, ids in enumerate(batch["document_ids"].tolist()):
        starts = [t for t, document in enumerate(ids) if t == 0 or document != ids[t - 1]]
        spans += [(row, start, stop) for start, stop in zip(starts, [*starts[1:], len(ids)], strict=True)]
    return spans


def separate_documents_loss(model: nn.Module, batch: dict[str, Tensor]) -> Reference:
    """The loss of a packed batch with each document computed alone, which packing must not change."""
    total, tokens = 0.0, 0
    with torch.no_grad():
        for row, start, stop in document_spans(batch):
            alone = {key: batch[key][row : row + 1, start:stop] for key in ("input_ids", "labels")}
            if (alone["labels"][:, 1:] != NO_TARGET).any():
                loss_sum, count = forward_loss_sum(model, alone)
                total, tokens = total + loss_sum.item(), tokens + count
    return Reference(loss=total / tokens, tokens=tokens)


def packing_error(model: nn.Module, batch: dict[str, Tensor]) -> float:
    """Largest change of any document's logits by packing, relative to the largest logit: rounding noise if plain transformers
    keeps documents apart, infinite if the model has no `position_ids` to tell them apart."""
    if not accepts_positions(model):
        return math.inf
    with torch.no_grad():
        packed_BTV = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        worst = 0.0
        for row, start, stop in document_spans(batch):
            alone_1TV = model(input_ids=batch["input_ids"][row : row + 1, start:stop], use_cache=False).logits
            worst = max(worst, (packed_BTV[row, start:stop] - alone_1TV[0]).abs().max().item())
    return worst / packed_BTV.abs().max().item()


def decayed_parameters(model: nn.Module) -> set[str]:
    """Names of the parameters that decay: matrices that transformers' Trainer decays and the model does not mark."""
    named = set(Trainer.get_decay_parameter_names(None, model))  # pyright: ignore[reportArgumentType]  (it uses no self)
    return {
        name
        for name, p in model.named_parameters()
        if name in named and p.ndim >= 2 and not getattr(p, "_no_weight_decay", False)
    }


class ReferenceTrainer:
    """Plain transformers and `torch.optim.AdamW`: parameters with fewer than two dimensions do not decay, frozen ones
    (`requires_grad=False`) do not change.

    Args:
        model: Trained in place.
        learning_rate: Default for steps that are given none.
        betas: Of AdamW.
        eps: Of AdamW.
        weight_decay: Of parameters with two dimensions or more.
        max_grad_norm: Clip the global norm to this; None does not clip.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        learning_rate: float = 1e-5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        max_grad_norm: float | None = 1.0,
    ):
        self.model, self.max_grad_norm = model, max_grad_norm
        decayed = decayed_parameters(model)
        parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        groups = [
            {"params": [p for name, p in parameters if name in decayed], "weight_decay": weight_decay},
            {"params": [p for name, p in parameters if name not in decayed], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=eps)

    def step(self, batch: dict[str, Tensor], learning_rate: float | None = None) -> tuple[float, float]:
        """One update. Returns the loss and the global gradient norm before clipping.

        A parameter that autograd did not reach has a zero gradient: its moments fade and its weight decays, so that an update
        does not depend on which experts the batch used.
        """
        if learning_rate is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
        result = reference_loss_and_grads(self.model, batch)
        for name, p in self.model.named_parameters():
            if p.requires_grad:
                gradient = result.gradients[name]
                p.grad = torch.zeros_like(p) if gradient is None else gradient
        limit = float("inf") if self.max_grad_norm is None else self.max_grad_norm
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return result.loss, norm.item()
