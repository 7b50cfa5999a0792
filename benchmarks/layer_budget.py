"""What a compiled layer holds and costs by activation memory budget, and what the head costs: sources of the planner's constants.

Use: python benchmarks/layer_budget.py SHAPE ROWS TOKENS BUDGET...
     python benchmarks/layer_budget.py qwen3-8b 32 1024 1.0 0.5 0.3 0.2
     python benchmarks/layer_budget.py tiny 2 64 1.0 0.5 0.2      on a CPU: only the bytes that a forward saves
SHAPE is one of `megatrain bench --shape`. Budget 1.0 is the `keep` variant of a layer's code, smaller ones are `selective`. The
script fails unless each smaller budget saves fewer bytes for the backward: else two budgets ran the same compiled graph.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy, linear

from megatrain.commands.work import folder_of, structure_of
from megatrain.device.attention import fastest_attention, measured_backends
from megatrain.machine.timing import device_seconds
from megatrain.models.structure import Structure, attention_shape
from megatrain.models.templates import LayerCode
from megatrain.planner.model_cost import layer_arguments
from megatrain.units import GIB


class Layer:
    """The first layer of a shape with random weights, to run with any compiled code."""

    def __init__(self, structure: Structure, rows: int, tokens: int, device: torch.device):
        dtype = torch.bfloat16
        unit = structure.layers[0]
        flat = (torch.randn(unit.layout.numel, device=device) * 0.02).to(dtype)
        self.weights = {name: view.requires_grad_() for name, view in unit.layout.views(flat).items()}
        self.module = structure.layer_stack()[0]
        ids_BT = torch.zeros((rows, tokens), dtype=torch.int64, device=device)
        buffers = {name: buffer.to(device) for name, buffer in structure.model.named_buffers()}
        (hidden_BTD, *rest), self._kwargs = layer_arguments(structure, ids_BT, buffers)
        self.hidden_BTD = torch.randn_like(hidden_BTD, dtype=dtype).requires_grad_()
        self.gradient_BTD = torch.ones_like(self.hidden_BTD)
        self._args = (self.hidden_BTD, *rest)

    def code(self, budget: float) -> LayerCode:
        return LayerCode(self.module, f"budget_{round(budget * 1000)}", compiled=True, budget=budget)

    def forward(self, code: LayerCode, budget: float) -> torch.Tensor:
        out = code("keep" if budget == 1.0 else "selective", self.weights, self._args, self._kwargs)
        return out[0] if isinstance(out, tuple) else out

    def forward_only(self, code: LayerCode) -> None:
        with torch.no_grad():
            code("forward", self.weights, self._args, self._kwargs)

    def backward(self, out: torch.Tensor) -> None:
        torch.autograd.grad(out, [self.hidden_BTD, *self.weights.values()], self.gradient_BTD)

    def both(self, code: LayerCode, budget: float) -> None:
        self.backward(self.forward(code, budget))

    def saved_bytes(self, code: LayerCode, budget: float) -> int:
        """Bytes that a forward saves for its backward, each storage once, without weights and the layer's input."""
        known = {t.untyped_storage().data_ptr() for t in (*self.weights.values(), self.hidden_BTD)}
        found: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                found[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = self.forward(code, budget)
        assert out.requires_grad
        return sum(found.values())


def check_budgets(saved: Mapping[float, int]) -> None:
    """Raise SystemExit unless each smaller budget saves fewer bytes."""
    ordered = sorted(saved.items(), reverse=True)
    for (larger, more), (smaller, less) in zip(ordered, ordered[1:], strict=False):
        if not less < more:
            raise SystemExit(
                f"budget {smaller} saves {less:,} bytes, budget {larger} {more:,}: they were not compiled apart"
            )


def gpu_figures(layer: Layer, code: LayerCode, budget: float, device: torch.device) -> str:
    """Bytes held between forward and backward, peak of the backward on top, and times."""
    base = torch.cuda.memory_allocated()
    out = layer.forward(code, budget)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - base
    torch.cuda.reset_peak_memory_stats()
    at = torch.cuda.memory_allocated()
    layer.backward(out)
    peak = torch.cuda.max_memory_allocated() - at
    del out
    forward_s = device_seconds(partial(layer.forward, code, budget), device)
    both_s = device_seconds(partial(layer.both, code, budget), device)
    return (
        f"held {held / GIB:.2f} GiB, backward peak +{peak / GIB:.2f} GiB, "
        f"forward {forward_s * 1e3:.1f} ms, both {both_s * 1e3:.1f} ms"
    )


def layers(
    structure: Structure, rows: int, tokens: int, budgets: list[float], device: torch.device
) -> dict[float, int]:
    """Print a line for each budget; returns the bytes that each saves for the backward."""
    layer = Layer(structure, rows, tokens, device)
    saved: dict[float, int] = {}
    for budget in budgets:
        code = layer.code(budget)  # compiled anew: the compiler does not see the budget in its guards
        started = time.perf_counter()
        layer.both(code, budget)
        compiled_s = time.perf_counter() - started
        saved[budget] = layer.saved_bytes(code, budget)
        figures = gpu_figures(layer, code, budget, device) if device.type == "cuda" else ""
        print(f"budget {budget}: compiled in {compiled_s:.0f} s, {saved[budget]:,} bytes saved; {figures}", flush=True)
    check_budgets(saved)
    if device.type == "cuda":
        plain = partial(layer.forward_only, layer.code(1.0))
        print(f"forward without gradients {device_seconds(plain, device) * 1e3:.1f} ms", flush=True)
    return saved


def head(tokens_list: tuple[int, ...], hidden: int, vocabulary: int, device: torch.device) -> None:
    """Time and peak memory of logits and cross entropy, eager and compiled, by tokens of a chunk."""
    weight = (torch.randn(vocabulary, hidden, device=device) * 0.02).bfloat16().requires_grad_()

    def loss(hidden_ND: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
        return cross_entropy(linear(hidden_ND, weight).float(), labels_N, reduction="sum")

    compiled = torch.compile(loss, dynamic=False)
    for tokens in tokens_list:
        hidden_ND = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
        labels_N = torch.randint(0, vocabulary, (tokens,), device=device)
        for name, run in (("eager", loss), ("compiled", compiled)):
            torch.cuda.reset_peak_memory_stats()
            base = torch.cuda.memory_allocated()
            seconds = device_seconds(
                lambda run=run, x=hidden_ND, y=labels_N: torch.autograd.grad(run(x, y), [x, weight]), device
            )
            peak = torch.cuda.max_memory_allocated() - base
            print(
                f"head {name} {tokens} tokens: {seconds / tokens * 32768:.3f} s per 32k tokens, peak {peak / GIB:.2f} GiB",
                flush=True,
            )


def main(shape: str, rows: int, tokens: int, budgets: list[float]) -> dict[float, int]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as scratch:
        structure = structure_of(folder_of(shape, Path(scratch)), torch.bfloat16)
    config: Any = structure.model.config
    text = config.get_text_config()
    if device.type == "cpu":
        return layers(structure, rows, tokens, budgets, device)
    order = measured_backends(*attention_shape(text), tokens, torch.bfloat16, device)
    print("attention", [(backend.name, round(ms, 2)) for backend, ms in order], flush=True)
    with fastest_attention(tuple(backend for backend, _ in order)):
        saved = layers(structure, rows, tokens, budgets, device)
    head((1408, 2816, 8192), text.hidden_size, text.vocab_size, device)
    return saved


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), [float(word) for word in sys.argv[4:]])
