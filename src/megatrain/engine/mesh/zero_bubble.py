"""Zero-bubble weight gradients: the second half of a backward, for schedules that split it.

[Note: two halves]
torch's own split keeps a microbatch's whole graph, with everything it saved, from the first half to the second, and its first
stage does all of its work in the second half. Here the first half is a whole backward in which only the layers' linear modules
defer their weight gradients: each keeps its input and output gradient, and the graph is freed. Everything else (norms, biases,
embedding, head, experts) has its gradient after the first half. The head does not defer, because the gradients of its logits are
larger than everything else. Autograd goes through the graph once, so layers may be recomputed in the first half.

Shapes: ... leading dimensions, I inputs and O outputs of a linear module, N = product of the leading dimensions.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megatrain.engine.mesh.tensor_collectives import RowWise


class WeightGradStore:
    """Deferred weight gradients of a stage's linear modules.

    Attributes:
        pending: (module, input, output gradient) of the microbatch whose backward ran last, until `take`.
    """

    def __init__(self) -> None:
        self.pending: list[tuple[nn.Linear, torch.Tensor, torch.Tensor]] = []
        self._defers = False

    def install(self, module: nn.Module) -> None:
        """Make the linear modules inside `module` able to defer, inside whatever hooks they have or get."""
        for inner in module.modules():
            if isinstance(inner, RowWise):
                inner.product = functools.partial(self._forward, inner, False)  # type: ignore[method-assign]
            elif isinstance(inner, nn.Linear) and type(inner).forward is nn.Linear.forward:
                inner.forward = functools.partial(self._forward, inner, True)  # type: ignore[method-assign]

    @contextlib.contextmanager
    def deferring(self) -> Iterator[None]:
        """Inside, backwards leave the weight gradients to `take`."""
        self._defers = True
        try:
            yield
        finally:
            self._defers = False

    def take(self) -> Callable[[], None]:
        """A function that adds the pending gradients to the weights' `.grad`. It owns them from now on."""
        taken, self.pending = self.pending, []

        @torch.no_grad()
        def accumulate() -> None:
            while taken:
                linear, input, gradient = taken.pop()
                weight_gradient = _weight_gradient(input, gradient)
                if linear.weight.grad is None:
                    linear.weight.grad = weight_gradient
                else:
                    linear.weight.grad += weight_gradient

        return accumulate

    def _forward(self, linear: nn.Linear, with_bias: bool, input: torch.Tensor) -> torch.Tensor:
        bias = linear.bias if with_bias else None
        if not (torch.is_grad_enabled() and linear.weight.requires_grad):
            return F.linear(input, linear.weight, bias)
        return _Linear.apply(input, linear.weight, bias, linear, self)  # type: ignore[return-value]

    def weight_gradient(self, linear: nn.Linear, input: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor | None:
        """The gradient of the weight, or None if it is deferred."""
        if not self._defers:
            return _weight_gradient(input, gradient)
        self.pending.append((linear, input.detach(), gradient))  # detached: `input` would keep the graph that made it
        return None


class _Linear(torch.autograd.Function):
    """(..., I) -> (..., O), as `nn.Linear`."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        linear: nn.Linear,
        store: WeightGradStore,
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        ctx.linear, ctx.store = linear, store
        return F.linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        input, weight = ctx.saved_tensors
        needs_input, _, needs_bias, *_ = ctx.needs_input_grad
        input_gradient = gradient @ weight if needs_input else None
        bias_gradient = gradient.flatten(0, -2).sum(0) if needs_bias else None
        return input_gradient, ctx.store.weight_gradient(ctx.linear, input, gradient), bias_gradient, None, None


def _weight_gradient(input: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """(O, I), by the same product as autograd's."""
    return (input.flatten(0, -2).t() @ gradient.flatten(0, -2)).t()
