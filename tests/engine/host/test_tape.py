"""Gradients computed layer by layer, last to first, are those of one graph through all layers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatrain.engine.host.tape import Arguments, LayerCall, Tape

Layers = list[Callable[..., Any]]
Loop = Callable[[Layers, torch.Tensor], torch.Tensor]


def double(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * 2


def two(x: torch.Tensor, y: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return x * x, torch.cos(x if y is None else x * y)


def chain(layers: Layers, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


def changed_between(layers: Layers, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = torch.tanh(layer(x * 1.5)) + 0.1
    return x


def skip(layers: Layers, x: torch.Tensor) -> torch.Tensor:
    """Layer 2 reads the outputs of layers 0 and 1, and the embedding is read by all."""
    first = layers[0](x)
    second = layers[1](first)
    return layers[2](second, first) + x.sum() * 0.1 + first


def several_outputs(layers: Layers, x: torch.Tensor) -> torch.Tensor:
    a, b = layers[0](x)
    c, _ = layers[1](b, y=a)
    return c + a


LOOPS: dict[str, tuple[Layers, Loop]] = {
    "chain": ([double, double, double], chain),
    "changed between": ([double, double, double], changed_between),
    "skip": ([double, double, lambda x, y: x * y], skip),
    "several outputs": ([two, two], several_outputs),
    "same input twice": ([lambda x, y: x * y + x], lambda layers, x: layers[0](x, x)),
    "embedding to every layer": ([lambda h, e: h * e] * 3, lambda ls, x: ls[2](ls[1](ls[0](x, x), x), x * 2)),
}


def through_tape(layers: Layers, loop: Loop, x: torch.Tensor) -> tuple[torch.Tensor, Tape]:
    """Forward and backward as in an accumulation step. Returns the gradient of `x`."""
    tape = Tape()

    def streamed(index: int) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            call = tape.record(index, Arguments.of(args, kwargs))
            with torch.no_grad():
                outputs = layers[index](*args, **kwargs)
            several = isinstance(outputs, tuple)
            emitted = tape.emit(call, list(outputs) if several else [outputs])
            return tuple(emitted) if several else emitted[0]

        return run

    result = loop([streamed(i) for i in range(len(layers))], x)
    torch.autograd.backward(result, torch.ones_like(result), retain_graph=True)
    for call in reversed(tape.calls):
        tape.send_back(call, input_gradients(layers[call.layer], call))
    assert x.grad is not None
    return x.grad, tape


def input_gradients(layer: Callable[..., Any], call: LayerCall) -> dict[int, torch.Tensor | None]:
    leaves = list(call.arguments.leaves)
    for position in call.trained:
        leaves[position] = leaves[position].detach().requires_grad_()
    args, kwargs = call.arguments.unflatten(leaves)
    outputs = layer(*args, **kwargs)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    used = [(o, g) for o, g in zip(outputs, call.output_gradients, strict=True) if g is not None]
    found = torch.autograd.grad(
        [o for o, _ in used], [leaves[p] for p in call.trained], [g for _, g in used], allow_unused=True
    )
    return dict(zip(call.trained, found, strict=True))


def start() -> torch.Tensor:
    return torch.randn(5, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("name", LOOPS)
def test_gradients_equal_those_of_one_graph(name: str) -> None:
    layers, loop = LOOPS[name]
    x = start()
    loop(layers, x).sum().backward()
    got, _ = through_tape(layers, loop, start())
    torch.testing.assert_close(got, x.grad)


def test_in_a_plain_chain_gradients_are_handed_over_directly() -> None:
    _, tape = through_tape(*LOOPS["chain"], start())
    assert [call.trained for call in tape.calls] == [[0], [0], [0]]
    assert tape.calls[0].sources == {}, "the embedding's output has no source"
    assert [(c.sources[0].call, c.sources[0].output) for c in tape.calls[1:]] == [(0, 0), (1, 0)]


def test_an_input_computed_from_an_output_has_no_source() -> None:
    _, tape = through_tape(*LOOPS["changed between"], start())
    assert all(call.sources == {} for call in tape.calls)


def test_an_unused_output_gets_no_gradient() -> None:
    _, tape = through_tape(*LOOPS["several outputs"], start())
    assert tape.calls[1].output_gradients[0] is not None
    assert tape.calls[1].output_gradients[1] is None


def test_gradients_of_one_output_add_up() -> None:
    call = LayerCall(0, Arguments.of((), {}), [], {}, output_gradients=[None, None])
    call.receive(1, torch.tensor([1.0]))
    first = call.output_gradients[1]
    call.receive(1, torch.tensor([2.0]))
    assert call.output_gradients[0] is None
    assert call.output_gradients[1] == torch.tensor([3.0])
    assert first == torch.tensor([1.0]), "a gradient that was handed over may have other owners"


def test_arguments_survive_flattening() -> None:
    args, kwargs = (torch.zeros(2), None), {"position_embeddings": (torch.ones(1), torch.ones(2)), "flag": True}
    arguments = Arguments.of(args, kwargs)
    assert sum(isinstance(leaf, torch.Tensor) for leaf in arguments.leaves) == 3
    again_args, again_kwargs = arguments.unflatten(arguments.leaves)
    assert again_args[0] is args[0]
    assert again_args[1] is None
    assert again_kwargs["position_embeddings"][1] is kwargs["position_embeddings"][1]
    assert again_kwargs["flag"] is True


def test_only_floating_outputs_become_leaves() -> None:
    tape = Tape()
    call = tape.record(0, Arguments.of((torch.zeros(2, requires_grad=True),), {}))
    ids, text = torch.arange(3), "extra"
    floating, same_ids, same_text = tape.emit(call, [torch.zeros(2), ids, text])
    assert floating.requires_grad
    assert floating.is_leaf
    assert same_ids is ids
    assert same_text is text
    assert call.output_gradients == [None, None, None]


def test_the_tape_keeps_no_output_alive_and_mistakes_no_other_tensor_for_one() -> None:
    """[Note: activation lifetime]; a new tensor may get the id of one that was freed."""
    tape = Tape()
    call = tape.record(0, Arguments.of((torch.zeros(2, requires_grad=True),), {}))
    (output,) = tape.emit(call, [torch.zeros(2)])
    released, number = weakref.ref(output), id(output)
    del output
    gc.collect()
    assert released() is None
    stranger = torch.zeros(2, requires_grad=True)
    tape._made[id(stranger)] = tape._made.pop(number)
    assert tape.record(1, Arguments.of((stranger,), {})).sources == {}
