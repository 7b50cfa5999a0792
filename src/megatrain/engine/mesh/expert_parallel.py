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

from functools import partial
from typing import Any

import torch
from torch import nn

from megatrain.engine.mesh.tokens import TensorGroup, gather_at_entry, scatter_tokens


def mixture_block(block: nn.Module, group: TensorGroup) -> None:
    """Of router and experts: tokens (B, S, D) are gathered at its entry, partial sums (B, L, D) scattered at its exit."""
    gather_at_entry(block, group)
    block.register_forward_hook(partial(_scattered, group))


def _scattered(group: TensorGroup, block: nn.Module, args: Any, output_BLD: torch.Tensor) -> torch.Tensor:
    return scatter_tokens(output_BLD, group)


def own_experts(experts: nn.Module, group: TensorGroup) -> None:
    """Let a module of E experts compute with the E / tensor whose parameters it has."""
    count = experts.num_experts // group.size  # type: ignore[operator]
    experts.num_experts = count  # type: ignore[assignment]
    experts.forward = partial(_forward, experts, type(experts).forward, count * group.rank, count)  # type: ignore[method-assign]


def _forward(
    experts: nn.Module,
    plain: Any,
    first: int,
    count: int,
    hidden_ND: torch.Tensor,
    index_NK: torch.Tensor,
    weights_NK: torch.Tensor,
) -> torch.Tensor:
    """This rank's share of the sum over experts (N, D)."""
    tokens_M, choice_M = torch.where((index_NK >= first) & (index_NK < first + count))
    given_MD, weights_M1 = hidden_ND[tokens_M], weights_NK[tokens_M, choice_M, None]
    if len(tokens_M) > 0:
        out_MD = plain(experts, given_MD, index_NK[tokens_M, choice_M, None] - first, weights_M1)
    else:  # see [Note: a rank without pairs]
        out_MD = given_MD * weights_M1 + sum(parameter.flatten()[0] for parameter in experts.parameters())
    return torch.zeros_like(hidden_ND).index_add(0, tokens_M, out_MD.to(hidden_ND.dtype))
