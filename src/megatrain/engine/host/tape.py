"""The tape of a window: what each layer call needs for its backward.

[Note: the graph between the layers]
The forward of a layer runs without autograd; its outputs are handed to HF's loop as new autograd leaves. What HF computes
between two layers (usually nothing) is therefore a small graph from the outputs of earlier layers to the inputs of a later
one. The backward goes layer by layer, last to first: a layer's backward gives the gradients of its inputs, and these are sent
through that small graph into the outputs of earlier layers, where they add up. When a layer's turn comes, everybody who used
its outputs has been there. Where an input *is* an earlier output, as in plain chains, its gradient is handed over directly.

[Note: activation lifetime]
An input is kept by the tape until its layer's backward. Outputs are not kept: they live as long as they are the input of
another call, or part of a graph, or held by HF's own forward. Their gradients are collected by the call that made them.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from megatrain.engine.host.activations import MovingTensors
from megatrain.engine.host.arguments import Arguments
from megatrain.models.templates import KeptResults


@dataclass
class Source:
    """Where an argument comes from, when it is an output of an earlier call of the same tape."""

    call: int
    output: int


@dataclass
class ChunkGraph:
    """A layer's computation on one chunk, with autograd. See [Note: what a waiting graph holds] in saved.py.

    Attributes:
        outputs: Roots: one for each output leaf of the layer, None where it has no gradient.
        inputs: Where the gradients of the argument leaves come out, in the order of `LayerCall.trained`.
        weights: The parameters that need a gradient, by layout name.
        moving: What the graph must find at another address than where it was made.
    """

    outputs: list[GradientEdge | None]
    inputs: list[GradientEdge | torch.Tensor]
    weights: dict[str, torch.Tensor]
    moving: MovingTensors | None = None


@dataclass
class LayerCall:
    """One call of a layer in a window.

    Attributes:
        layer: Index of the layer.
        arguments: What it was called with. An input that will be recomputed (`segment`) is dropped: its leaf is None.
        trained: Positions of the argument leaves that need a gradient.
        sources: For argument positions that are outputs of earlier calls.
        random_states: State of the random generators before each chunk, replayed in the recompute.
        graphs: Each chunk's autograd graph, where the layer's activations are kept; then nothing is computed again.
        kept: What each chunk keeps of one part of an eager layer, for its recompute.
        output_gradients: Gradient of each output so far, None where nobody has sent one (yet).
    """

    layer: int
    arguments: Arguments
    trained: list[int]
    sources: dict[int, Source]
    random_states: list[Any] = field(default_factory=list)
    graphs: list[ChunkGraph] = field(default_factory=list)
    kept: list[KeptResults] = field(default_factory=list)
    output_gradients: list[torch.Tensor | None] = field(default_factory=list)

    def forget(self) -> None:
        """The call's backward is done: let go of all that it held."""
        self.arguments.leaves, self.output_gradients, self.random_states = [], [], []
        self.graphs, self.kept = [], []

    def receive(self, output: int, gradient: torch.Tensor) -> None:
        """Add to the gradient of one of the call's outputs."""
        held = self.output_gradients[output]
        self.output_gradients[output] = gradient if held is None else held + gradient


class Tape:
    """Layer calls of one window, in order. See the notes at the top."""

    def __init__(self) -> None:
        self.calls: list[LayerCall] = []
        self._made: dict[int, tuple[weakref.ref[torch.Tensor], Source]] = {}

    def record(self, layer: int, arguments: Arguments) -> LayerCall:
        """Note a call that is about to run."""
        trained = [
            i for i, leaf in enumerate(arguments.leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        sources = {}
        for i in trained:
            reference, source = self._made.get(id(arguments.leaves[i]), (None, None))
            if reference is not None and reference() is arguments.leaves[i] and source is not None:
                sources[i] = source
        call = LayerCall(layer, arguments, trained, sources)
        self.calls.append(call)
        return call

    def emit(self, call: LayerCall, outputs: list[Any]) -> list[Any]:
        """Turn a call's floating outputs into autograd leaves for HF's code to go on with."""
        index = len(self.calls) - 1
        for position, output in enumerate(outputs):
            if isinstance(output, torch.Tensor) and output.is_floating_point():
                leaf = output.detach().requires_grad_()
                # A hook rather than `leaf.grad`: the leaf may be gone when its layer's turn comes.
                leaf.register_hook(functools.partial(call.receive, position))
                self._made[id(leaf)] = (weakref.ref(leaf), Source(index, position))
                outputs[position] = leaf
            call.output_gradients.append(None)
        return outputs

    def send_back(self, call: LayerCall, gradients: dict[int, torch.Tensor | None]) -> None:
        """Send the gradients of a call's inputs (by argument position) on to whoever made these inputs."""
        tensors, grads = [], []
        for position, gradient in gradients.items():
            if gradient is None:
                continue
            source = call.sources.get(position)
            if source is not None:
                self.calls[source.call].receive(source.output, gradient)
            else:
                tensors.append(call.arguments.leaves[position])
                grads.append(gradient)
        if tensors:
            # A graph that several layers share (per-layer inputs made from the embedding) is walked once for each of them.
            torch.autograd.backward(tensors, grads, retain_graph=True)
