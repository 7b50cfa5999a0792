"""From raw gradients to an update, in one place and in one order.

sum the tensor ranks' shares -> sum tied parameters -> one global norm -> one decision -> clip -> step

[Note: distinct elements]
The global norm counts every element of every parameter once, wherever it lives. Some of a rank's local gradients are copies: all
of them on replicate ranks above 0; on tensor ranks above 0 those of parameters that tensor ranks hold whole; those of a tie's
second end. Copies count as zero, and the squares of all ranks are summed in fp64. (DTensor's own norms would have to handle
FSDP's `_StridedShard`, which does not count as a shard.)

[Note: one decision]
One collective sums loss and squared norm over all ranks, and every rank reads the same two numbers: if either is not finite, all
ranks skip the update.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatrain.engine.mesh.data_parallel import Box, Devices, local, local_parameters
from megatrain.engine.mesh.stage import Stage
from megatrain.errors import UserError
from megatrain.optim.spec import OptimizerSpec, hyper_parameters

SMALL_ELEMENTS = 1 << 18
"""Gradients with fewer elements are copied together and reduced in one message."""


class Gradients:
    """The gradients of the local stages, and their optimizers.

    Args:
        stages: The local stages, sharded and filled.
        boxes: Per stage, each parameter's box by Hugging Face name.
        tied: Alias -> owner.
        undecayed: Full names of parameters without weight decay.
    """

    def __init__(
        self, stages: Sequence[Stage], boxes: Sequence[Mapping[str, Box]], tied: Mapping[str, str], devices: Devices,
        optim: OptimizerSpec, undecayed: Collection[str],
    ):  # fmt: skip
        self._devices, self._optim = devices, optim
        self.states = optim.states
        for state in self.states:
            if not state.torch_key or state.dtype != torch.float32:
                raise UserError(
                    f"the mesh engine cannot keep the state {state.name!r} of {optim.name}",
                    "optim",
                    "give it a torch_key and the type fp32, or use HostEngine",
                )
        self._parameters = [local_parameters(stage) for stage in stages]
        self._boxes = list(boxes)
        self._tied, self._undecayed = dict(tied), undecayed
        self.optimizers = [self._make_optimizer(parameters) for parameters in self._parameters]

    def all(self) -> Iterator[tuple[str, nn.Parameter, Box, torch.optim.Optimizer]]:
        """(HF name, parameter, box, optimizer) of every local parameter; a tie's second end has its own name."""
        for parameters, boxes, optimizer in zip(self._parameters, self._boxes, self.optimizers, strict=True):
            for name, parameter in parameters.items():
                yield name, parameter, boxes[name], optimizer

    def owned(self) -> dict[str, tuple[nn.Parameter, Box]]:
        """(parameter, box) by HF name, without second ends of ties."""
        return {name: (parameter, box) for name, parameter, box, _ in self.all() if name not in self._tied}

    def finish(self, local_loss: torch.Tensor) -> tuple[float, float]:
        """Complete the gradients and return the step's (loss, global norm before clipping), the same on every rank.

        Afterwards `.grad` is the local part of what a single process would have. Collective.

        Args:
            local_loss: Scalar, this rank's share of the loss; the ranks of a tensor group pass the same.
        """
        self._sum_shares()
        self._sum_ties()
        share = local_loss if self._devices.at.tensor == 0 else torch.zeros_like(local_loss)
        values = torch.stack([share.double(), self._squares()])
        dist.all_reduce(values)
        loss, squares = values.tolist()
        return loss, math.sqrt(squares) if squares >= 0.0 else math.nan

    def update(self, norm: float, learning_rate: float) -> None:
        """Clip the gradients by their global norm and step the optimizers."""
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
        """Free all gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _sum_shares(self) -> None:
        """Sum the tensor ranks' shares of gradients; parameters autograd did not reach get zeros.

        See [Note: shares of gradients] in tensor_parallel.py.
        """
        shares: list[torch.Tensor] = []
        for _, parameter, box, _ in self.all():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                if box.tensor_dim is None:
                    shares.append(local(parameter.grad))
        if self._devices.layout.tensor > 1:
            all_reduce_coalesced(shares, self._devices.mesh["tensor"].get_group())

    def _sum_ties(self) -> None:
        """Give both ends of a tied parameter that lives on two stages the sum of their gradients, so that they stay equal."""
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
        """This rank's share of the squared norm, an fp64 scalar; see [Note: distinct elements]."""
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
                groups.setdefault(hyper_parameters(owner, parameter.ndim, self._optim, self._undecayed), []).append(
                    parameter
                )
        made: list[dict[str, Any]] = [
            {"params": members, "weight_decay": decay, "lr_scale": scale} for (decay, scale), members in groups.items()
        ]
        # The fused kernel needs no temporaries; on the CPU torch chooses. A stage may be entirely frozen.
        fused = self._devices.device.type == "cuda" or None
        return self._optim.torch_optimizer(made or [{"params": [], "lr_scale": 1.0}], fused=fused)


def all_reduce_coalesced(shares: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Replace each tensor (all contiguous, of one dtype) by its sum over a group; small ones travel in one message."""
    small = [share for share in shares if 0 < share.numel() < SMALL_ELEMENTS]
    for share in shares:
        if share.numel() >= SMALL_ELEMENTS:
            dist.all_reduce(share, group=group)
    if small:
        joined = torch.cat([share.flatten() for share in small])
        dist.all_reduce(joined, group=group)
        for share, total in zip(small, joined.split([share.numel() for share in small]), strict=True):
            share.copy_(total.view(share.shape))
