"""Layers with the same code share a template; a layer that cannot be compiled runs eager, with a warning."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import Unsupported
from torch.func import functional_call

from families import BY_NAME, FAMILIES, Family, build, config
from megatrain.models import templates
from megatrain.models.build import build_meta_model
from megatrain.models.structure import dissect
from megatrain.models.templates import LayerCode, template_groups


def groups(name: str) -> list[int]:
    return template_groups(list(dissect(build(BY_NAME[name], seed=0)).layer_stack()))


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("llama", [0, 0, 0, 0]),
        ("gpt2", [0, 0, 0, 0]),
        ("gemma2", [0, 1, 0, 1]),  # sliding, full
        ("qwen3_moe", [0, 1, 0, 1]),  # decoder_sparse_step 2: dense, experts
        ("qwen3_next", [0, 1]),  # linear attention, full attention
        ("deepseek_v3", [0, 1, 1, 1]),  # first_k_dense_replace 1
        ("smollm3", [0, 0, 0, 1]),  # no rotary positions in the last
        ("lfm2", [0, 1, 0]),
    ],
)
def test_template_groups(name: str, want: list[int]) -> None:
    assert groups(name) == want


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_a_template_can_be_bound_to_each_layer_of_its_group(family: Family) -> None:
    """Layers of one group have tensors of the same names, shapes and dtypes."""
    layers = list(dissect(build_meta_model(config(family), compute_dtype=torch.float32)).layer_stack())
    for layer, group in zip(layers, template_groups(layers), strict=True):
        template = layers[template_groups(layers).index(group)]
        for one, other in (
            (layer.named_parameters(), template.named_parameters()),
            (layer.named_buffers(), template.named_buffers()),
        ):
            assert [(n, t.shape, t.dtype) for n, t in one] == [(n, t.shape, t.dtype) for n, t in other]


class Layer(nn.Module):
    """A layer with plain attributes of every kind."""

    def __init__(self, layer_idx: int, width: int = 3, **attributes: Any):
        super().__init__()
        self.layer_idx = layer_idx
        self.linear = nn.Linear(width, width)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({}, {}, True),
        ({"scale": 1.0}, {"scale": 1.0}, True),
        ({"scale": 1.0}, {"scale": 2.0}, False),
        ({"window": None}, {"window": 8}, False),
        ({"flag": True}, {"flag": 1}, False),
        ({"sizes": [1, 2]}, {"sizes": [1, 2]}, True),
        ({"sizes": [1, 2]}, {"sizes": [1, 3]}, False),
        ({"table": {"a": 1}}, {"table": {"a": 2}}, False),
        ({"act": torch.nn.functional.gelu}, {"act": torch.nn.functional.gelu}, True),
        ({"act": torch.nn.functional.gelu}, {"act": torch.nn.functional.silu}, False),
        ({"width": 3}, {"width": 4}, False),
        ({"what": object()}, {"what": object()}, False),
    ],
    ids=lambda value: (
        "-".join(value) if isinstance(value, dict) else str(value)
    ),  # no addresses: all workers must agree
)
def test_layers_are_equal_when_their_plain_attributes_are(
    one: dict[str, Any], other: dict[str, Any], same: bool
) -> None:
    assert template_groups([Layer(0, **one), Layer(1, **other)]) == ([0, 0] if same else [0, 1])


# ------------------------------------------------------------------ running and compiling


def bound(module: nn.Module, factor: float = 1.0) -> dict[str, torch.Tensor]:
    return {name: p.detach() * factor for name, p in module.named_parameters()}


def fake_compile(monkeypatch: pytest.MonkeyPatch, error: BaseException | None = None) -> list[Any]:
    """torch.compile without a compiler: records the functions, and raises `error` on the first call."""
    asked: list[Any] = []

    def compile(function: Any, **options: Any) -> Any:
        asked.append(function)

        def run(*args: Any) -> Any:
            if error is not None:
                raise error
            return function(*args)

        return run

    monkeypatch.setattr(torch, "compile", compile)
    return asked


def test_each_variant_is_compiled_once_with_a_separate_code_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """[Note: variants]"""
    asked, module, x = fake_compile(monkeypatch), Layer(0), torch.randn(2, 3)
    code = LayerCode(module, "layer_0", compiled=True)
    for factor in (1.0, 2.0):
        for variant in ("forward", "recompute", "keep", "selective"):
            weights = bound(module, factor)
            assert torch.equal(code(variant, weights, (x,), {}), functional_call(module, weights, (x,)))
    assert len(asked) == 4
    assert len({id(function.__code__) for function in asked}) == 4
    assert code.compiled


def test_only_the_selective_variant_has_a_memory_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}
    module = Layer(0)
    code = LayerCode(module, "layer_0", compiled=True, budget=0.25)

    def compile(function: Any, **options: Any) -> Any:
        def run(*args: Any) -> Any:
            seen[function.__name__] = templates.functorch_config.activation_memory_budget
            return function(*args)

        return run

    monkeypatch.setattr(torch, "compile", compile)
    before = templates.functorch_config.activation_memory_budget
    for variant in ("forward", "recompute", "keep", "selective"):
        code(variant, bound(module), (torch.randn(2, 3),), {})
    assert {name.removeprefix("layer_0_"): budget for name, budget in seen.items()} == {
        "forward": 1.0,
        "recompute": 1.0,
        "keep": 1.0,
        "selective": 0.25,
    }
    assert templates.functorch_config.activation_memory_budget == before


def test_a_layer_that_cannot_be_compiled_runs_eager_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked, module, x = fake_compile(monkeypatch, Unsupported("a graph break", "")), Layer(0), torch.randn(2, 3)
    code = LayerCode(module, "layer_0", compiled=True)
    with caplog.at_level(logging.WARNING):
        for variant in ("forward", "recompute", "forward"):
            assert torch.equal(code(variant, bound(module), (x,), {}), functional_call(module, bound(module), (x,)))
    assert len(asked) == 1
    assert not code.compiled
    (record,) = caplog.records
    assert "Layer cannot be compiled" in record.message
    assert "eager" in record.message


def test_an_error_of_the_layer_itself_is_not_a_compiler_error(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_compile(monkeypatch, torch.OutOfMemoryError("no room"))
    code = LayerCode(Layer(0), "layer_0", compiled=True)
    with pytest.raises(torch.OutOfMemoryError):
        code("forward", bound(code.module), (torch.randn(2, 3),), {})
    assert code.compiled


def test_eager_code_does_not_call_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, module = fake_compile(monkeypatch), Layer(0)
    LayerCode(module, "layer_0", compiled=False)("keep", bound(module), (torch.randn(2, 3),), {})
    assert asked == []
