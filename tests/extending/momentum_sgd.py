"""A user's optimizer: stochastic gradient descent with momentum, in one file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatrain.optim.spec import OptimizerSpec, Scalars, StateSpec


@dataclass(frozen=True)
class MomentumSGD(OptimizerSpec):
    """torch.optim.SGD with momentum: buffer = momentum * buffer + gradient; weight -= learning rate * buffer."""

    momentum: float = 0.9

    @property
    def states(self) -> tuple[StateSpec, ...]:
        return (StateSpec("momentum", torch.float32, "momentum", torch_key="momentum_buffer"),)

    def problems(self) -> Iterable[str]:
        yield from super().problems()
        if not 0.0 <= self.momentum < 1.0:
            yield f"momentum = {self.momentum!r} is outside [0, 1)"

    def update_(self, master: Tensor, grad: Tensor, states: Mapping[str, Tensor], scalars: Scalars) -> None:
        grad.add_(master, alpha=scalars.weight_decay)
        states["momentum"].mul_(self.momentum).add_(grad)
        master.add_(states["momentum"], alpha=-scalars.learning_rate)

    def torch_optimizer(self, groups: Sequence[Mapping[str, Any]], fused: bool | None) -> torch.optim.Optimizer:
        """For the mesh engine; the host engine does not need it."""
        params = [dict(group) for group in groups]
        return torch.optim.SGD(params, lr=self.learning_rate, momentum=self.momentum, fused=fused)
