"""Which modules can be computed in chunks of tokens, and that chunks equal the whole."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

from families import BY_NAME, batch, build
from megatrain.models.chunked_mlp import (
    ComputeChunk,
    ModuleKey,
    TokenChunks,
    draws_random_numbers,
    find_token_wise,
    mlp_matrices,
    modules_in_chunks,
)
from megatrain.models.structure import dissect
from megatrain.models.templates import LayerCode


def places_of(name: str) -> dict[ModuleKey, str]:
    model = build(BY_NAME[name], seed=0).eval()
    structure = dissect(model)
    ids = batch(BY_NAME[name], seed=0, rows=2, tokens=16)["input_ids"]
    return find_token_wise(
        model.get_submodule(structure.base_name),
        list(structure.layer_stack()),
        lambda: model(input_ids=ids, use_cache=False),
    )


@pytest.mark.parametrize(
    ("name", "paths"),
    [
        ("llama", {"mlp", "norm"}),
        ("gpt2", {"mlp", "ln_f"}),
        ("falcon", {"mlp", "ln_f"}),  # modifies its MLP's output in place
        ("qwen3_moe", {"mlp", "norm"}),  # experts, and a router without a capacity
        ("granitemoeshared", {"block_sparse_moe", "shared_mlp", "norm"}),
        ("lfm2", {"feed_forward", "embedding_norm"}),
        ("bloom", {"word_embeddings_layernorm", "ln_f"}),  # its MLP takes the residual too
        ("opt", {"decoder.final_layer_norm"}),  # its MLP is not a module
    ],
)
def test_token_wise_modules_are_found_by_their_computation(name: str, paths: set[str]) -> None:
    assert {path for (_, path, _), objection in places_of(name).items() if not objection} == paths


def test_the_objection_to_a_module_is_returned() -> None:
    objections = {path: objection for (_, path, _), objection in places_of("bloom").items()}
    assert objections["mlp"] == "takes more than hidden states"


class Capacity(nn.Module):
    """An MLP that processes only the first tokens, like experts with a capacity."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        within = torch.arange(hidden.shape[1])[None, :, None] < hidden.shape[1] // 2
        return self.down(self.up(hidden).relu()) * within


class Layer(nn.Module):
    def __init__(self, mlp: nn.Module):
        super().__init__()
        self.mlp = mlp

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.mlp(hidden)


def test_experts_with_a_capacity_are_not_computed_in_chunks(caplog: pytest.LogCaptureFixture) -> None:
    root = nn.Module()
    root.layer = layer = Layer(Capacity())
    places = find_token_wise(root, [layer], lambda: layer(torch.randn(2, 6, 8)))
    with caplog.at_level(logging.DEBUG):
        assert modules_in_chunks(layer, places, ()) == []
    assert "Layer.mlp: not computed in chunks of tokens: output of a token depends on other tokens" in caplog.text


def test_dropout_and_jitter_draw_random_numbers() -> None:
    jitter = nn.Linear(2, 2)
    jitter.router_jitter_noise = 0.1  # type: ignore[assignment]
    assert draws_random_numbers(nn.Sequential(nn.Dropout(0.1)))
    assert draws_random_numbers(jitter)
    assert not draws_random_numbers(nn.Sequential(nn.Dropout(0.0), nn.Linear(2, 2)))


def test_a_module_with_fp32_parameters_is_not_computed_in_chunks() -> None:
    layer = build(BY_NAME["llama"], seed=0).model.layers[0]
    places = places_of("llama")
    assert modules_in_chunks(layer, places, ()) == ["mlp"]
    assert modules_in_chunks(layer, places, {"mlp.up_proj.weight"}) == []
    assert modules_in_chunks(layer, places, {"self_attn.q_proj.weight"}) == ["mlp"]


def test_mlp_matrices_are_shapes_that_no_other_module_has() -> None:
    layer = build(BY_NAME["llama"], seed=0).model.layers[0]
    assert mlp_matrices(layer, places_of("llama")) == {tuple(sorted(layer.mlp.up_proj.weight.shape))}
    assert mlp_matrices(layer, {}) == frozenset()


# ------------------------------------------------------------------ the operators


def eager(module: nn.Module) -> ComputeChunk:
    code = LayerCode(module, "chunk", compiled=False)
    return lambda backward, bound, hidden: code("recompute" if backward else "forward", bound, (hidden,), {})


def gradients(
    module: nn.Module, state: dict[str, torch.Tensor], x: torch.Tensor, wanted: list[str]
) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    out = functional_call(module, state, (x,))
    return [out.detach(), *torch.autograd.grad(out, [x, *(state[name] for name in wanted)], torch.cos(out.detach()))]


@pytest.mark.parametrize("tokens", [1, 5, 10, 13, 30])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt2"])
def test_chunks_equal_the_whole(name: str, tokens: int) -> None:
    model = build(BY_NAME[name], seed=0)
    module = dissect(model).layer_stack()[1].get_submodule("mlp")
    x = torch.randn(2, 13, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    state = {n: p.detach().clone().requires_grad_() for n, p in module.named_parameters()}
    want = gradients(module, state, x, list(state))
    chunks = TokenChunks(module, eager(module), tokens)
    for got, wanted in zip(gradients(chunks.chunked_module(), state, x, list(state)), want, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6 * wanted.abs().max().item())


def test_a_family_may_modify_the_output_in_place() -> None:
    """As Falcon does."""
    model = build(BY_NAME["llama"], seed=0)
    module = dissect(model).layer_stack()[1].get_submodule("mlp")
    x = torch.randn(1, 13, model.config.hidden_size).requires_grad_()
    out = TokenChunks(module, eager(module), 5).chunked_module()(x)
    out += x
    (got,) = torch.autograd.grad(out.sum(), [x])
    (want,) = torch.autograd.grad((module(x) + x).sum(), [x])
    torch.testing.assert_close(got, want)


def test_a_frozen_parameter_gets_no_gradient_and_an_unused_one_gets_zeros() -> None:
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4))
    module.register_parameter("unused", nn.Parameter(torch.ones(3)))
    state = {n: p.detach().clone().requires_grad_(n != "0.weight") for n, p in module.named_parameters()}
    twin = TokenChunks(module, eager(module), 2).chunked_module()
    out, _, bias, unused = gradients(twin, state, torch.randn(1, 5, 4), ["1.bias", "unused"])
    torch.testing.assert_close(bias, torch.cos(out).sum((0, 1)))
    assert torch.equal(unused, torch.zeros(3))


def test_weight_gradients_are_summed_in_fp32_and_rounded_once() -> None:
    """A bf16 sum of ones never gets past 256."""
    module = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    state = {"weight": torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)}
    x = torch.ones(1, 1024, 1, dtype=torch.bfloat16)
    out = functional_call(TokenChunks(module, eager(module), 1).chunked_module(), state, (x,))
    (found,) = torch.autograd.grad(out, [state["weight"]], torch.ones_like(out))
    assert found.item() == 1024


def test_an_output_of_another_dtype_is_an_error() -> None:
    class Upcast(nn.Linear):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden).double()

    module = Upcast(2, 2)
    with pytest.raises(AssertionError, match=r"torch\.float64 output for torch\.float32 input"):
        TokenChunks(module, eager(module), 1).chunked_module()(torch.randn(1, 3, 2))


def test_the_module_itself_is_not_changed() -> None:
    module: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = dict(vars(module))
    twin = TokenChunks(module, eager(module), 1).chunked_module()
    twin._parameters["added"] = None
    assert vars(module) == before and "added" not in module._parameters
    assert [n for n, _ in twin.named_parameters()] == [n for n, _ in module.named_parameters()]
