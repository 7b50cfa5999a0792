"""The two halves of a backward equal a whole one, and little is held in between."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatrain.engine.mesh.zero_bubble import WeightGradStore

TOKENS, WIDTH, INNER = 6, 8, 12


class Layer(nn.Module):
    """A norm, two linear modules with much to save in between, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.sigmoid(torch.tanh(torch.sin(self.up(self.norm(x))))))


class Kept:
    """A saved tensor that counts how many of them are alive."""

    alive = 0

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        Kept.alive += 1
        weakref.finalize(self, Kept._gone)

    @staticmethod
    def _gone() -> None:
        Kept.alive -= 1


@pytest.fixture
def layer() -> Layer:
    torch.manual_seed(0)
    return Layer().double()


def gradients(layer: Layer) -> dict[str, torch.Tensor | None]:
    found = {name: None if p.grad is None else p.grad.clone() for name, p in layer.named_parameters()}
    layer.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("recompute", [False, True])
def test_two_halves_are_one_backward(layer: Layer, recompute: bool) -> None:
    """Over two microbatches whose halves overlap; a whole backward defers nothing."""
    rows = [torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    for row in rows:
        layer(row).sin().sum().backward()
    want, want_rows = gradients(layer), [row.grad for row in rows]

    store = WeightGradStore()
    store.install(layer)

    def run(row: torch.Tensor) -> torch.Tensor:
        out: Any = checkpoint(layer, row, use_reentrant=False) if recompute else layer(row)
        return out.sin().sum()

    second_halves = []
    for row in rows:
        row.grad = None
        loss = run(row)
        with store.deferring():
            loss.backward()
        second_halves.append(store.take())
    assert layer.up.weight.grad is None and layer.down.weight.grad is None
    assert layer.norm.weight.grad is not None and layer.up.bias.grad is not None
    for half in second_halves:
        half()
    found = gradients(layer)
    for name, gradient in want.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close([row.grad for row in rows], want_rows, rtol=1e-13, atol=1e-14)

    run(rows[0]).backward()
    assert layer.up.weight.grad is not None
    store.take()()
    assert len(store.pending) == 0


def test_the_graph_is_freed_after_the_first_half(layer: Layer) -> None:
    """Only inputs and output gradients of the linear modules remain, and nothing after the second half."""
    store = WeightGradStore()
    store.install(layer)
    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
        out = layer(torch.randn(2, TOKENS, WIDTH, dtype=torch.float64))
    assert Kept.alive > 8
    with store.deferring():
        out.sum().backward()
    del out
    gc.collect()
    assert Kept.alive == 0
    held = {t.untyped_storage().data_ptr(): t.numel() for _, *pair in store.pending for t in pair}
    assert sum(held.values()) == 2 * TOKENS * (WIDTH + INNER) * 2
    left = [weakref.ref(t) for _, *pair in store.pending for t in pair]
    store.take()()
    assert len(left) == 4 and all(ref() is None for ref in left)


def test_a_frozen_weight_has_no_second_half(layer: Layer) -> None:
    layer.down.weight.requires_grad_(False)
    store = WeightGradStore()
    store.install(layer)
    with store.deferring():
        layer(torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)).sum().backward()
    store.take()()
    assert layer.down.weight.grad is None and layer.up.weight.grad is not None
