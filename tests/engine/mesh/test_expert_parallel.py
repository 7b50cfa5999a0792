"""Experts of a tensor group: the ranks' shares add up to the whole, and a rank without tokens takes part anyway."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import families
from megatrain.engine.mesh.tensor_collectives import TensorGroup
from megatrain.engine.mesh.tensor_parallel import own_experts

TOKENS, CHOICES = 12, 2


def experts(implementation: str) -> nn.Module:
    model = families.build(families.BY_NAME["mixtral"], seed=1, dtype=torch.float32)
    model.set_experts_implementation(implementation)
    return model.model.layers[0].mlp.experts


def routing(module: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_ND = torch.randn(TOKENS, module.hidden_dim, generator=generator, requires_grad=True)
    index_NK = torch.rand(TOKENS, module.num_experts, generator=generator).topk(CHOICES).indices
    return hidden_ND, index_NK, torch.rand(TOKENS, CHOICES, generator=generator, requires_grad=True)


def on_rank(module: nn.Module, rank: int) -> nn.Module:
    """A copy of the module with the experts of one rank of two."""
    mine, group = copy.deepcopy(module), TensorGroup("", 2, rank)
    for name, parameter in list(mine.named_parameters()):
        setattr(mine, name, nn.Parameter(group.part(parameter.detach(), 0)))
    own_experts(mine, group)
    return mine


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_the_shares_of_all_ranks_add_up(implementation: str) -> None:
    whole = experts(implementation)
    hidden_ND, index_NK, weights_NK = routing(whole)
    want_ND = whole(hidden_ND, index_NK, weights_NK)
    want_ND.sin().sum().backward()
    sums_ND, parts = torch.zeros_like(want_ND), []
    for rank in range(2):
        mine = on_rank(whole, rank)
        out_ND = mine(hidden_ND, index_NK, weights_NK)
        out_ND.backward(want_ND.detach().cos())
        sums_ND += out_ND.detach()
        parts.append({name: p.grad for name, p in mine.named_parameters() if p.grad is not None})
    torch.testing.assert_close(sums_ND, want_ND.detach(), rtol=1e-4, atol=1e-5)
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(torch.cat([part[name] for part in parts]), parameter.grad, rtol=1e-4, atol=1e-5)


def test_a_rank_without_tokens_gives_zeros_and_gradients_of_zero() -> None:
    whole = experts("eager")
    hidden_ND, index_NK, weights_NK = routing(whole)
    mine = on_rank(whole, 1)
    out_ND = mine(hidden_ND, index_NK % 2, weights_NK)  # experts 0 and 1 are the other rank's
    out_ND.sum().backward()
    assert not out_ND.any()
    for tensor in (hidden_ND, weights_NK, *mine.parameters()):
        assert tensor.grad is not None
        assert not tensor.grad.any()
