"""From raw gradients to an update, in one place and in one order.

settle shares of tensor ranks -> add up tied parameters -> one global norm -> one decision -> clip -> step

[Note: distinct elements]
The global norm counts every element of every parameter once, wherever it lives. A rank's local gradients are parts of it, and
some of them are copies: of replicate ranks (all), of tensor ranks where a parameter is replicated over them, of a tie's second
end. Copies count as zero, and the squares of all ranks are added up in fp64. (DTensor's own norms would have to know FSDP's
`_StridedShard`, which says of itself that it is no shard.)

[Note: one decision]
Loss and squared norm of all ranks are summed by one collective, and every rank reads the same two numbers: if either is not
finite, all of them skip.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from megatrain.engine.mesh.data_parallel import Box, local, local_parameters
from megatrain.engine.mesh.devices import Devices
from megatrain.engine.mesh.stage import Stage
from megatrain.optim.spec import OptimizerSpec, hyper_parameters

SMALL_ELEMENTS = 1 << 18
"""Of a gradient that is sent together with others, in a copy."""


@dataclass(frozen=True)
class Finished:
    """What all ranks agree on before the update.

    Attributes:
        loss: Of the whole step.
        norm: Global gradient norm before clipping.
    """

    loss: float
    norm: float

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm)


class Gradients:
    """The gradients of the local stages, and their optimizers.

    Args:
        stages: The local stages, sharded and filled.
        boxes: Per stage, box of each parameter by HF name.
        tied: Alias -> owner.
        devices: The mesh.
        optim: The optimizer, as torch has it.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        boxes: Sequence[Mapping[str, Box]],
        tied: Mapping[str, str],
        devices: Devices,
        optim: OptimizerSpec,
    ):
        self._devices, self._optim = devices, optim
        self.states = optim.states
        self._parameters = [local_parameters(stage) for stage in stages]
        self._boxes = list(boxes)
        self._tied = dict(tied)
        self.optimizers = [self._make_optimizer(parameters) for parameters in self._parameters]

    def all(self) -> Iterator[tuple[str, nn.Parameter, Box, torch.optim.Optimizer]]:
        """(HF name, parameter, box, optimizer) of every local parameter, second ends of ties under their own name."""
        for parameters, boxes, optimizer in zip(self._parameters, self._boxes, self.optimizers, strict=True):
            for name, parameter in parameters.items():
                yield name, parameter, boxes[name], optimizer

    def owned(self) -> dict[str, tuple[nn.Parameter, Box]]:
        """Parameters by HF name, without second ends of ties."""
        return {
            name: (parameter, boxes[name])
            for parameters, boxes in zip(self._parameters, self._boxes, strict=True)
            for name, parameter in parameters.items()
            if name not in self._tied
        }

    def finish(self, local_loss: torch.Tensor) -> Finished:
        """Settle, tie, and agree on loss and norm. Afterwards `.grad` is what one process would have.

        Args:
            local_loss: Scalar, this rank's share of the loss; ranks of a tensor group all bring the same.
        """
        self._settle()
        self._sum_ties()
        share = local_loss if self._devices.at.tensor == 0 else torch.zeros_like(local_loss)
        values = torch.stack([share.double(), self._squares()])
        dist.all_reduce(values)
        loss, squares = values.tolist()
        return Finished(loss, math.sqrt(squares) if squares >= 0.0 else math.nan)

    def update(self, norm: float, learning_rate: float) -> None:
        """Clip and step."""
        limit = self._optim.max_grad_norm
        scale = 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
        for parameters, optimizer in zip(self._parameters, self.optimizers, strict=True):
            if scale != 1.0:
                for parameter in parameters.values():
                    if parameter.grad is not None:
                        local(parameter.grad).mul_(scale)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * group["lr_scale"]
            optimizer.step()

    def clear(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _settle(self) -> None:
        """A gradient of zeros for what autograd did not reach, and for what tensor ranks hold alike the sum of their shares.

        See [Note: shares of gradients] in tensor.py.
        """
        shares: list[torch.Tensor] = []
        for parameters, boxes in zip(self._parameters, self._boxes, strict=True):
            for name, parameter in parameters.items():
                if not parameter.requires_grad:
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                if boxes[name].tensor_dim is None:
                    shares.append(local(parameter.grad))
        if self._devices.layout.tensor > 1:
            add_up_together(shares, self._devices.mesh["tensor"].get_group())

    def _sum_ties(self) -> None:
        """A tied parameter that is on two stages gets the sum of both gradients on both; the copies then stay equal."""
        for alias, owner in self._tied.items():
            ends = [parameters[n] for parameters in self._parameters for n in (owner, alias) if n in parameters]
            grads = [local(end.grad) for end in ends if end.grad is not None]
            if self._devices.tie_group is not None and grads:
                assert len(grads) == 1, (alias, len(grads))
                dist.all_reduce(grads[0], group=self._devices.tie_group)
            elif len(grads) == 2:
                total = grads[0] + grads[1]
                grads[0].copy_(total)
                grads[1].copy_(total)

    def _squares(self) -> torch.Tensor:
        """This rank's share of the squared norm, a fp64 scalar; see [Note: distinct elements]."""
        total = torch.zeros((), dtype=torch.float64, device=self._devices.device)
        if self._devices.at.replicate > 0:
            return total
        for parameter, box in self.owned().values():
            copy = box.tensor_dim is None and self._devices.at.tensor > 0
            if parameter.grad is not None and not copy:
                total += torch.linalg.vector_norm(local(parameter.grad), dtype=torch.float64).square()
        return total

    def _make_optimizer(self, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        groups: dict[tuple[float, float], list[nn.Parameter]] = {}
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                owner = self._tied.get(name, name)
                groups.setdefault(hyper_parameters(owner, parameter.ndim, self._optim), []).append(parameter)
        return self._optim.torch_optimizer(
            [
                {"params": members, "weight_decay": decay, "lr_scale": scale}
                for (decay, scale), members in groups.items()
            ]
            or [{"params": [], "lr_scale": 1.0}],  # a stage may be frozen altogether
            # Fused has no temporaries; on the CPU torch chooses.
            fused=self._devices.device.type == "cuda" or None,
        )


def add_up_together(shares: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Replace each of the tensors, contiguous and of one type, by its sum over a group's ranks: small ones in one message."""
    small = [share for share in shares if 0 < share.numel() < SMALL_ELEMENTS]
    for share in shares:
        if share.numel() >= SMALL_ELEMENTS:
            dist.all_reduce(share, group=group)
    if small:
        joined = torch.cat([share.flatten() for share in small])
        dist.all_reduce(joined, group=group)
        for share, total in zip(small, joined.split([share.numel() for share in small]), strict=True):
            share.copy_(total.view(share.shape))
