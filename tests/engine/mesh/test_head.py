"""The chunked head: equal to plain cross entropy, one chunk of logits at a time, nothing saved but gradients."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import mesh_ranks as ranks
from megatrain.engine.mesh.head import ChunkedHead, VocabularySplit
from megatrain.engine.objective import IGNORED, cross_entropy_sum

ROWS, TOKENS, WIDTH, VOCABULARY, CHUNK = 3, 11, 8, 50, 7
DIVISOR = 13.0


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors made inside that are alive at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage()._cdata for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        results = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(results):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in known and key not in self._seen:
                    self._seen.add(key)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._freed, key, storage.nbytes())
        self.most = max(self.most, self.now)
        return results

    def _freed(self, key: int, nbytes: int) -> None:
        self._seen.discard(key)
        self.now -= nbytes


def given(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, TOKENS, WIDTH, dtype=dtype)
    labels = torch.randint(VOCABULARY, (ROWS, TOKENS))
    labels[0, :4] = labels[2, 5:] = IGNORED
    return hidden, labels, torch.randn(VOCABULARY, WIDTH, dtype=dtype)


def capped(weight: torch.Tensor) -> Any:
    """A head with a soft cap, as gemma's."""
    return lambda hidden: 3.0 * torch.tanh(hidden @ weight.t() / 3.0)


def results(loss: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    (loss * 2.0).backward()
    assert hidden.grad is not None and weight.grad is not None
    return [loss.detach(), hidden.grad, weight.grad]


def wanted() -> list[torch.Tensor]:
    hidden, labels, weight = (t.requires_grad_(t.is_floating_point()) for t in given())
    loss = cross_entropy_sum(capped(weight)(hidden).flatten(0, 1), labels.flatten()) / DIVISOR
    return results(loss, hidden, weight)


@pytest.mark.parametrize("chunk", [1, CHUNK, 1000])
@pytest.mark.parametrize("fused", [False, True])
def test_it_is_cross_entropy(chunk: int, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """For any size of a chunk; fused code pads the last one."""
    hidden, labels, weight = given()
    parameter = nn.Parameter(weight)
    head = ChunkedHead(capped(parameter), chunk)
    if fused:
        monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
        head.compile()
    with torch.no_grad():
        loss = head.loss(hidden, labels, [parameter], DIVISOR)
    found = results(head.loss(hidden.requires_grad_(), labels, [parameter], DIVISOR), hidden, parameter)
    torch.testing.assert_close(found, wanted(), rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(loss, found[0], rtol=1e-13, atol=0)


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_share_the_vocabulary(world: int) -> None:
    """With parts of unequal size; gradients of hidden states are shares of a sum."""
    width = -(-VOCABULARY // world)

    def work() -> list[torch.Tensor]:
        rank = dist.get_rank()
        hidden, labels, weight = given()
        parameter = nn.Parameter(weight[rank * width : (rank + 1) * width].clone())
        head = ChunkedHead(capped(parameter), CHUNK)
        group = dist.group.WORLD
        assert group is not None
        head.split = VocabularySplit(group, rank * width)
        return results(head.loss(hidden.requires_grad_(), labels, [parameter], DIVISOR), hidden, parameter)

    found = ranks.run(world, work)
    loss, d_hidden, d_weight = wanted()
    for other, _, _ in found:
        torch.testing.assert_close(other, loss, rtol=1e-13, atol=0)
    torch.testing.assert_close(sum(share for _, share, _ in found), d_hidden, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(torch.cat([part for _, _, part in found]), d_weight, rtol=1e-12, atol=1e-14)


def test_a_microbatch_without_targets_has_zero_gradients() -> None:
    hidden, labels, weight = given()
    parameter = nn.Parameter(weight)
    head = ChunkedHead(capped(parameter))
    found = results(head.loss(hidden.requires_grad_(), labels.fill_(IGNORED), [parameter], DIVISOR), hidden, parameter)
    assert not any(tensor.any() for tensor in found)


def test_one_chunk_of_logits_takes_six_bytes_each() -> None:
    """In bf16: the logits and one array in fp32. Beside them the gradients and a chunk's vectors."""
    tokens, vocabulary, chunk = 96, 4000, 16
    hidden = torch.randn(1, tokens, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(vocabulary, (1, tokens))
    weight = nn.Parameter(torch.randn(vocabulary, WIDTH, dtype=torch.bfloat16))
    head = ChunkedHead(lambda given: given @ weight.t(), chunk)
    with LiveBytes() as live:
        loss = head.loss(hidden, labels, [weight], 1.0)
    logits = 6 * chunk * vocabulary
    gradients = 4 * weight.numel() + 2 * weight.numel() + 2 * hidden.numel()  # the sum in fp32, a chunk's in bf16
    vectors = 8 * 20 * max(tokens, chunk)
    assert 0.9 * logits < live.most <= logits + gradients + vectors
    del loss


def test_nothing_is_saved_but_the_gradients() -> None:
    hidden, labels, weight = given(torch.bfloat16)
    parameter = nn.Parameter(weight)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        loss = ChunkedHead(lambda given: given @ parameter.t(), 1000).loss(
            hidden.requires_grad_(), labels, [parameter], DIVISOR
        )
    inside = [hidden.numel(), parameter.numel()]
    assert saved[-2:] == inside  # earlier ones are those of the chunk's own graph, which is gone
    loss.backward()


def test_gradients_of_chunks_are_summed_in_fp32() -> None:
    hidden, labels, weight = given(torch.bfloat16)
    exact = nn.Parameter(weight.double())
    want = results(
        ChunkedHead(lambda h: h @ exact.t()).loss(wide := hidden.double().requires_grad_(), labels, [exact], 1.0),
        wide, exact,
    )[2]  # fmt: skip
    parameter = nn.Parameter(weight)
    head = ChunkedHead(lambda h: h @ parameter.t(), 1)
    found = results(head.loss(hidden.requires_grad_(), labels, [parameter], 1.0), hidden, parameter)[2]
    error = (found.double() - want).norm() / want.norm()
    assert error < 4e-3, "about the rounding of one chunk, not that of 27 sums"


def test_a_head_that_saves_its_logits_is_noticed() -> None:
    """Its own backward would read what the gradient has overwritten."""
    hidden, labels, weight = given()
    parameter = nn.Parameter(weight)
    head = ChunkedHead(lambda given: torch.tanh(given @ parameter.t()))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        head.loss(hidden.requires_grad_(), labels, [parameter], DIVISOR)
