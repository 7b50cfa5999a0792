"""Layers that keep one part: which activations autograd saves, and what is recomputed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

from megatrain.models.chunked_mlp import TokenChunks
from megatrain.models.templates import ATTENTION, KeptResults, LayerCode, Variant, keep_rule

WIDTH, HEADS, TOKENS, WIDE = 32, 2, 40, 96


class Block(nn.Module):
    """A small decoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDE), nn.GELU(), nn.Linear(WIDE, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(x)


MATRICES = frozenset({(WIDTH, WIDE)})
HELD: dict[str, set[tuple[int, ...]]] = {
    "keep_attention": {(1, HEADS, TOKENS, WIDTH // HEADS), (1, HEADS, TOKENS)},  # output, log-sum-exp
    "keep_mlp": {(TOKENS, WIDE)},
}


@pytest.fixture
def aot_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler's front end alone: graphs are partitioned as for a GPU, then run eager."""
    compile = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda f, dynamic: compile(f, dynamic=dynamic, backend="aot_eager", fullgraph=True)
    )
    torch._dynamo.reset()


def gradients(
    code: Any, state: dict[str, torch.Tensor], x: torch.Tensor
) -> tuple[list[torch.Tensor], set[tuple[int, ...]]]:
    """(output and all gradients, shapes of tensors that autograd saves besides weights and input)."""
    held: set[tuple[int, ...]] = set()
    weights = {shape for w in state.values() for shape in (tuple(w.shape), tuple(w.shape)[::-1])}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held.add(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = code(state, x)
    found = torch.autograd.grad(out, [x, *state.values()], torch.cos(out.detach()))
    return [out.detach(), *found], held - weights - {tuple(x.shape), (5056,)}  # the last is the generator state


@pytest.mark.parametrize("variant", ["keep_attention", "keep_mlp"])
def test_a_compiled_layer_saves_only_the_part_it_keeps(variant: Variant, aot_eager: None) -> None:
    torch.manual_seed(0)
    block = Block()
    state = {name: p.detach().clone().requires_grad_() for name, p in block.named_parameters()}
    x = torch.randn(1, TOKENS, WIDTH).requires_grad_()
    code = LayerCode(block, "block", compiled=True, mlp_matrices=MATRICES)
    want, _ = gradients(lambda state, x: functional_call(block, state, (x,)), state, x)
    got, held = gradients(lambda state, x: code(variant, state, (x,), {}), state, x)
    assert code.compiled
    assert held == HELD[variant]
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_compiled_layer_does_not_recompute_an_mlp_in_chunks_without_need(aot_eager: None) -> None:
    """The MLP is one operation, whose output nothing reads in the backward of a layer that keeps its attention."""
    torch.manual_seed(0)
    block, calls = Block(), []
    mlp = LayerCode(block.mlp, "mlp", compiled=False)

    def compute(backward: bool, bound: Any, hidden: torch.Tensor) -> torch.Tensor:
        calls.append(backward)
        return mlp("recompute" if backward else "forward", bound, (hidden,), {})

    chunks = TokenChunks(block.mlp, compute, 16)
    twin = Block()
    twin.__dict__.update({**vars(block), "_modules": {**block._modules, "mlp": chunks.chunked_module()}})
    state = {name: p.detach().clone().requires_grad_() for name, p in block.named_parameters()}
    x = torch.randn(1, TOKENS, WIDTH).requires_grad_()
    code = LayerCode(block, "block", compiled=True)
    code.compute_in_chunks(twin)
    want, _ = gradients(lambda state, x: functional_call(block, state, (x,)), state, x)
    got, held = gradients(lambda state, x: code("keep_attention", state, (x,), {}), state, x)
    assert calls == [False] * 3 + [True] * 3
    assert held == HELD["keep_attention"]
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_an_eager_layer_replays_its_recorded_results() -> None:
    torch.manual_seed(0)
    block, x = Block(), torch.randn(1, TOKENS, WIDTH).requires_grad_()
    want = torch.autograd.grad(block(x).sum(), [x, *block.parameters()])
    kept = KeptResults(keep_rule("keep_attention", MATRICES))
    with torch.no_grad(), kept.recording():
        block(x)
    assert len(kept._results) == 1
    with kept.replaying():
        out = block(x)
    assert not kept._results
    assert all(map(torch.equal, torch.autograd.grad(out.sum(), [x, *block.parameters()]), want))


def test_all_fused_attention_operators_of_torch_are_known() -> None:
    named = {str(operation) for operation in ATTENTION}
    fused = {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::_scaled_dot_product_") and not name.endswith("backward") and "math" not in name
    }
    forward = {name for name in fused if "backward" not in name and "quantized" not in name}
    assert {f"aten.{name}.default" for name in forward if "." not in name} <= named
