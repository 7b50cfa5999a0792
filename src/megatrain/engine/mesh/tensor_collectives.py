"""Collectives of a tensor group: between blocks each rank holds its part of the tokens, inside a block every rank holds all.

[Note: collectives of a tensor group]
Parameters and activations are plain tensors; what moves between ranks is written out here, each direction with its backward. The
gradient of a rank's part is complete; the gradient of something all ranks hold is this rank's share, a partial sum:
    gather_tokens   own tokens -> all tokens         all-gather; backward: shares are summed and scattered (reduce-scatter)
    scatter_tokens  shares of a sum -> own tokens    reduce-scatter; backward: all-gather
    own_tokens      all tokens -> own tokens         no communication; backward: zeros for the other tokens
Only around the embedding, whose output every rank holds whole, gradients of what all ranks hold are complete, too:
    add_up          shares of a sum -> the sum       all-reduce; backward: no communication
    split_tokens    all tokens -> own tokens         no communication; backward: all-gather
They are torch's functional collectives, which a compiled layer keeps in its graph; each is waited for at once.

Shapes: B rows, L tokens, S = L / tensor, D hidden size, I inputs and O outputs of a linear module, I' = I / tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

TOKEN_DIM = 1
_ops = torch.ops._c10d_functional


@dataclass(frozen=True)
class TensorGroup:
    """Ranks that share the tokens and matrices of the same layers, seen from one of them.

    Attributes:
        name: Of the process group; functional collectives look it up by name.
        size: Number of ranks.
        rank: This rank.
    """

    name: str
    size: int
    rank: int

    @classmethod
    def of(cls, mesh: DeviceMesh) -> TensorGroup:
        """The group of a mesh's tensor dimension."""
        return cls(mesh.get_group().group_name, mesh.size(), mesh.get_local_rank())

    def part(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """A copy of this rank's part, split as `torch.chunk` does: `ceil(length / size)` each, fewer on the last rank."""
        return tensor.chunk(self.size, dim)[self.rank].clone(memory_format=torch.contiguous_format)


def gather_tokens(own_BSD: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """(B, S, D) -> (B, L, D). See [Note: collectives of a tensor group]."""
    return _Exchange.apply(own_BSD, group.size, group.name, True)  # type: ignore[return-value]


def scatter_tokens(share_BLD: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """(B, L, D), summed over the ranks -> (B, S, D). See [Note: collectives of a tensor group]."""
    return _Exchange.apply(share_BLD, group.size, group.name, False)  # type: ignore[return-value]


def own_tokens(whole_BLD: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """(B, L, D) -> (B, S, D). See [Note: collectives of a tensor group]."""
    tokens = whole_BLD.shape[TOKEN_DIM] // group.size
    return whole_BLD.narrow(TOKEN_DIM, tokens * group.rank, tokens)


def add_up(share: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """The sum over the ranks, of any shape. See [Note: collectives of a tensor group]."""
    return _AddUp.apply(share, group.name)  # type: ignore[return-value]


def split_tokens(whole_BLD: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """(B, L, D) -> (B, S, D). See [Note: collectives of a tensor group]."""
    return _Split.apply(whole_BLD, group)  # type: ignore[return-value]


def gather_at_entry(module: nn.Module, group: TensorGroup) -> None:
    """Let a module that is called with this rank's tokens (B, S, D), its first argument, see all ranks' tokens (B, L, D)."""
    module.register_forward_pre_hook(partial(_gather_argument, group), with_kwargs=True)


def _gather_argument(group: TensorGroup, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args:
        return (gather_tokens(args[0], group), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": gather_tokens(kwargs["hidden_states"], group)}


def take_own_at_entry(linear: nn.Module, group: TensorGroup) -> None:
    """Let a module that is called with all tokens (B, L, D) see this rank's tokens (B, S, D)."""
    linear.register_forward_pre_hook(partial(_own_argument, group))


def _own_argument(group: TensorGroup, linear: nn.Module, args: tuple[torch.Tensor]) -> torch.Tensor:
    return own_tokens(args[0], group)


def scatter_at_exit(module: nn.Module, group: TensorGroup) -> None:
    """Turn a module's output, this rank's share of a sum (B, L, D), into this rank's tokens of the sum (B, S, D)."""
    module.register_forward_hook(partial(_scatter_output, group))


def _scatter_output(group: TensorGroup, module: nn.Module, args: Any, share_BLD: torch.Tensor) -> torch.Tensor:
    return scatter_tokens(share_BLD, group)


class RowWise(nn.Linear):
    """A linear module whose inputs are split over the ranks: (B, L, I') -> this rank's tokens (B, S, O).

    Each rank adds the bias to its own tokens of the sum.
    """

    group: TensorGroup

    @classmethod
    def make_of(cls, linear: nn.Linear, group: TensorGroup) -> None:
        """Convert, in place, a linear module whose weight is this rank's (O, I')."""
        linear.__class__ = cls
        linear.group = group  # type: ignore[assignment]

    def product(self, input: torch.Tensor) -> torch.Tensor:
        """This rank's share of the sum (B, L, O)."""
        return F.linear(input, self.weight)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        own_BSO = scatter_tokens(self.product(input), self.group)
        return own_BSO if self.bias is None else own_BSO + self.bias


class _Exchange(torch.autograd.Function):
    """All-gathers tokens, or reduce-scatters them; the backward is the other one."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, size: int, name: str, gathers: bool) -> torch.Tensor:
        ctx.size, ctx.name, ctx.gathers = size, name, gathers
        return (_all_gather if gathers else _reduce_scatter)(tensor, size, name)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        return (_reduce_scatter if ctx.gathers else _all_gather)(gradient, ctx.size, ctx.name), None, None, None


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: torch.Tensor, name: str) -> torch.Tensor:
        return _ops.wait_tensor(_ops.all_reduce(share.contiguous(), "sum", name))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole_BLD: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        ctx.group = group
        return own_tokens(whole_BLD, group).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient_BSD: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return _all_gather(gradient_BSD, ctx.group.size, ctx.group.name), None


def _all_gather(own_BSD: torch.Tensor, size: int, name: str) -> torch.Tensor:
    """(B, S, D) -> (B, L, D), tokens in rank order."""
    by_rank = _ops.wait_tensor(_ops.all_gather_into_tensor(own_BSD.contiguous(), size, name))
    return by_rank.unflatten(0, (size, -1)).transpose(0, 1).flatten(1, 2)  # no copy for one row


def _reduce_scatter(share_BLD: torch.Tensor, size: int, name: str) -> torch.Tensor:
    """(B, L, D) -> (B, S, D), the sum over all ranks of their shares of this rank's tokens."""
    by_rank = share_BLD.unflatten(TOKEN_DIM, (size, -1)).transpose(0, 1).flatten(0, 1)  # no copy for one row
    return _ops.wait_tensor(_ops.reduce_scatter_tensor(by_rank.contiguous(), "sum", size, name))
