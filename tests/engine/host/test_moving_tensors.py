"""Activations kept while the weights move give the gradients of weights that stay in place."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.func import functional_call
from torch.multiprocessing.reductions import StorageWeakRef

from families import BY_NAME, build
from megatrain.engine.host.tape import MovingTensors, entrance
from megatrain.host_memory.layout import FlatLayout


def gradients(module: nn.Module, x: torch.Tensor, offset: int | None) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Gradients of all parameters and of `x`, with weights in a slot that is overwritten after the forward and comes
    back at another address (`offset` into another buffer), or that stays (None)."""
    layout = FlatLayout.of((n, tuple(p.shape)) for n, p in module.named_parameters())
    slot = torch.zeros(layout.numel)
    for name, view in layout.views(slot).items():
        view.copy_(module.get_parameter(name).detach())
    x = x.detach().requires_grad_()
    leaves = {name: view.detach().requires_grad_() for name, view in layout.views(slot).items()}
    if offset is None:
        out = functional_call(module, leaves, (x,))
    else:
        moving = MovingTensors({"weights": slot})
        with moving.left_out():
            out = functional_call(module, leaves, (x,))
        now = torch.full((offset + layout.numel,), float("nan"))[offset:]
        moving.now = {"weights": now.copy_(slot)}
        slot.fill_(float("nan"))
    found = torch.autograd.grad(out, [x, *leaves.values()], torch.ones_like(out))
    return dict(zip(leaves, found[1:], strict=True)), found[0]


class Attention(nn.Module):
    """Reads its weights in many ways: as matrices, transposed, sliced, element by element, reshaped."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24, bias=True)
        self.scale = nn.Parameter(torch.ones(8))
        self.out = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        x = torch.softmax(q @ k.transpose(-1, -2), dim=-1) @ v
        x = x * self.scale + x.exp() * self.scale[:4].repeat(2)
        return x @ self.out.t() @ self.out.view(4, 16).reshape(8, 8)


@pytest.mark.parametrize("offset", [0, 64, 7])
def test_weights_that_moved_between_forward_and_backward_give_the_same_gradients(offset: int) -> None:
    torch.manual_seed(0)
    module, x = Attention(), torch.randn(2, 5, 8)
    want, want_x = gradients(module, x, None)
    got, got_x = gradients(module, x, offset)
    assert torch.equal(got_x, want_x)
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_hugging_face_s_mlps_are_read_through_the_hooks(name: str) -> None:
    module = build(BY_NAME[name], seed=0).model.layers[1].mlp
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))
    want, want_x = gradients(module, x, None)
    got, got_x = gradients(module, x, 64)
    assert torch.equal(got_x, want_x)
    assert all(torch.equal(got[key], want[key]) for key in want)


def test_activations_are_saved_and_nothing_of_the_slot() -> None:
    slot = torch.randn(64)
    moving = MovingTensors({"weights": slot})
    packed = moving._pack(slot[16:32].view(4, 4).t())
    assert not isinstance(packed, torch.Tensor)
    assert (tuple(packed.size), packed.stride, packed.offset) == ((4, 4), (1, 4), 16)
    activation = torch.randn(4)
    assert moving._pack(activation) is activation
    assert moving._unpack(activation) is activation


def test_a_backward_before_the_weights_are_back_is_a_bug() -> None:
    slot = torch.randn(16)
    moving, x = MovingTensors({"weights": slot}), torch.randn(16, requires_grad=True)
    with moving.left_out():
        out = (x * slot).sum()
    with pytest.raises(AssertionError, match="not back yet"):
        out.backward()


class Rotation(nn.Module):
    """Reads its weights as complex numbers, and its input too."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = torch.view_as_complex(x.view(*x.shape[:-1], 4, 2)) * torch.view_as_complex(self.turn)
        return torch.view_as_real(turned).flatten(-2)


@pytest.mark.parametrize("offset", [0, 64, 6])
def test_weights_and_inputs_that_are_read_as_another_type_are_left_out(offset: int) -> None:
    torch.manual_seed(0)
    module, x = Rotation(), torch.randn(2, 5, 8)
    want, want_x = gradients(module, x, None)
    got, got_x = gradients(module, x, offset)
    assert torch.equal(got_x, want_x)
    assert torch.equal(got["turn"], want["turn"])
    hidden = x.clone()
    moving, entered = MovingTensors({"input": hidden}), entrance(hidden)
    with moving.left_out():
        out = module(entered)
    hidden.fill_(float("nan"))
    moving.now = {"input": x}
    assert torch.equal(torch.autograd.grad(out, module.turn, torch.ones_like(out))[0], want["turn"])


def test_a_graph_with_an_entrance_holds_neither_its_input_nor_its_output() -> None:
    """Its gradients are those of a graph that holds them."""
    x, weight = torch.randn(8, 8), torch.randn(8, 8, requires_grad=True)
    leaf = x.clone().requires_grad_()
    want = torch.autograd.grad(torch.tanh(leaf.square() @ weight) + leaf, [leaf, weight], torch.ones_like(x))
    hidden = x.clone()
    moving = MovingTensors({"input": hidden})
    entered = entrance(hidden)
    with moving.left_out():
        out = torch.tanh(entered.square() @ weight) + entered
    root, edge = get_gradient_edge(out), get_gradient_edge(entered)
    storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in (hidden, out)]
    del hidden, entered, out
    gc.collect()
    assert all(storage.expired() for storage in storages)
    moving.now = {"input": x.clone()}
    got = torch.autograd.grad([root], [edge, weight], [torch.ones_like(x)])
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
