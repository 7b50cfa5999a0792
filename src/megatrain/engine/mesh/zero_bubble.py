"""Gradients of weights in their own time: the second half of a backward, for schedules that split it.

[Note: two halves]
torch's own halves keep a microbatch's whole graph, with all it saved, from the first half to the second, and the first stage does
all its work in the second. Here the first half is a whole backward, in which the layers' linear modules alone put their weights'
gradient off: of each, input and output gradient are left, and the graph is gone. Everything else (norms, biases, embedding,
head, experts) has its gradient after the first half. The head does not put off, because the gradients of its logits are larger
than all else. The graph is gone through once, so layers may be recomputed in the first half.

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

from megatrain.engine.mesh.tokens import RowWise


class Deferred:
    """The weights' gradients that a stage's linear modules have put off, of the microbatch whose backward ran last."""

    def __init__(self) -> None:
        self._puts_off = False
        self._left: list[tuple[nn.Linear, torch.Tensor, torch.Tensor]] = []

    def install(self, module: nn.Module) -> None:
        """Let the linear modules inside `module` put off, behind whatever hooks they have or get."""
        for inner in module.modules():
            if isinstance(inner, RowWise):
                inner.product = functools.partial(self._forward, inner, False)  # type: ignore[method-assign]
            elif isinstance(inner, nn.Linear) and type(inner).forward is nn.Linear.forward:
                inner.forward = functools.partial(self._forward, inner, True)  # type: ignore[method-assign]

    @contextlib.contextmanager
    def putting_off(self) -> Iterator[None]:
        """Inside, backwards leave the weights' gradients to `take`."""
        self._puts_off = True
        try:
            yield
        finally:
            self._puts_off = False

    def take(self) -> Callable[[], None]:
        """What adds the gradients that are left to the weights' `.grad`; they are then no longer kept here."""
        left, self._left = self._left, []

        @torch.no_grad()
        def add_up() -> None:
            while left:
                linear, input, gradient = left.pop()
                weight_gradient = _of_weight(input, gradient)
                if linear.weight.grad is None:
                    linear.weight.grad = weight_gradient
                else:
                    linear.weight.grad += weight_gradient

        return add_up

    def _forward(self, linear: nn.Linear, with_bias: bool, input: torch.Tensor) -> torch.Tensor:
        bias = linear.bias if with_bias else None
        if not (torch.is_grad_enabled() and linear.weight.requires_grad):
            return F.linear(input, linear.weight, bias)
        return _Linear.apply(input, linear.weight, bias, linear, self)  # type: ignore[return-value]

    def later(self, linear: nn.Linear, input: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor | None:
        """The gradient of the weight, None if it was put off."""
        if not self._puts_off:
            return _of_weight(input, gradient)
        self._left.append((linear, input.detach(), gradient))  # detached: `input` knows the graph that made it
        return None


class _Linear(torch.autograd.Function):
    """(..., I) -> (..., O), as `nn.Linear`."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, linear: nn.Linear, by: Deferred
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        ctx.linear, ctx.by = linear, by
        return F.linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        input, weight = ctx.saved_tensors
        needs_input, _, needs_bias, *_ = ctx.needs_input_grad
        of_input = gradient @ weight if needs_input else None
        of_bias = gradient.flatten(0, -2).sum(0) if needs_bias else None
        return of_input, ctx.by.later(ctx.linear, input, gradient), of_bias, None, None


def _of_weight(input: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """(O, I), by the product that autograd takes for it."""
    return (input.flatten(0, -2).t() @ gradient.flatten(0, -2)).t()
