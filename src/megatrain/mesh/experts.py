"""Mixtures of experts under tensor parallel: each rank of the group has some of the experts.

[Note: experts of a tensor group]
Hugging Face keeps the experts of a layer in matrices stacked by expert, (E, out, in). They are split by expert, E /
tensor on each rank: whole experts instead of slices of each, so that what a rank holds stays one box of the
parameter, and a product keeps its width. The block gathers the tokens once at its entry, like any other. The router
runs on all of them on every rank and chooses the same everywhere; a rank picks the (token, expert) pairs whose expert
is its own, runs them through Hugging Face's own code as tokens with one expert each, and adds them up by token. What
it has then is a partial sum, which is scattered to tokens at the block's exit. For the router, and for the tokens
that came in, each rank's gradient is a partial sum too, of its own experts' share.

[Note: a rank without pairs]
A microbatch may leave a rank's experts without a token. Tokens, router and parameters take part in the graph all the
same, with no rows: the backward's collectives, of this group and of FSDP, run on every rank or on none.

Shapes: B rows, S tokens of this rank, L = S x tensor, N = B * L, D hidden size, K experts per token, M pairs of this
rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from megatrain.mesh.tokens import TOKEN_DIM, gather_at_entry


class MixtureBlock(ParallelStyle):
    """On the block of router and experts: tokens (B, S, D) are gathered at its entry, partial sums scattered at its exit."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def scatter(block: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            partial_BLD = DTensor.from_local(output, device_mesh, [Partial()], run_check=False)
            return partial_BLD.redistribute(placements=[Shard(TOKEN_DIM)]).to_local()

        gather_at_entry(module, device_mesh, lambda whole_BLD: whole_BLD.to_local(grad_placements=[Partial()]))
        module.register_forward_hook(scatter)
        return module


class Router(ParallelStyle):
    """On what chooses experts: the same on every rank, its gradient a partial sum."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _distribute(module, device_mesh, Replicate())
        plain = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            with _parameters(module, _local(module, Partial())):
                return plain(*args, **kwargs)

        module.forward = forward  # type: ignore[method-assign]
        return module


class OwnExperts(ParallelStyle):
    """On the experts: each rank has E / tensor of them."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        count = module.num_experts // device_mesh.size()  # type: ignore[operator]
        first = count * device_mesh.get_local_rank()
        _distribute(module, device_mesh, Shard(0))
        module.num_experts = count  # type: ignore[assignment]
        plain = module.forward

        def forward(hidden_ND: torch.Tensor, index_NK: torch.Tensor, weights_NK: torch.Tensor) -> torch.Tensor:
            tokens_M, choice_M = torch.where((index_NK >= first) & (index_NK < first + count))
            own = _local(module, Shard(0))
            given_MD, weights_M1 = hidden_ND[tokens_M], weights_NK[tokens_M, choice_M, None]
            if len(tokens_M) > 0:
                with _parameters(module, own):
                    out_MD = plain(given_MD, index_NK[tokens_M, choice_M, None] - first, weights_M1)
            else:  # see [Note: a rank without pairs]
                out_MD = given_MD * weights_M1 + sum(parameter.flatten()[0] for parameter in own.values())
            return torch.zeros_like(hidden_ND).index_add(0, tokens_M, out_MD.to(hidden_ND.dtype))

        module.forward = forward  # type: ignore[method-assign]
        return module


def _distribute(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    """Make the module's own parameters DTensors; every rank takes its slice, nothing is sent."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        split = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(split, requires_grad=parameter.requires_grad))


def _local(module: nn.Module, gradient: Placement) -> dict[str, torch.Tensor]:
    """This rank's parts of the module's own parameters, whose gradients are `gradient`."""
    return {
        name: parameter.to_local(grad_placements=[gradient])  # type: ignore[attr-defined]
        for name, parameter in module.named_parameters(recurse=False)
    }


@contextlib.contextmanager
def _parameters(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Inside, the module's code finds `tensors` where its parameters are."""
    kept = dict(module._parameters)
    module._parameters.update(tensors)  # type: ignore[arg-type]
    try:
        yield
    finally:
        module._parameters.update(kept)
