"""One layer of a step: its forward and backward over all microbatches, with its weights streaming in and its gradient out.

HF's own loop calls `LayerRunner.forward` where its layers were; `StepRunner` calls `backward`, from the last layer to the first.
A layer is computed under one of three regimes, by its policy:
    recompute     the forward runs without autograd, and the backward runs the layer again first (most layers);
    keep, ...     the forward runs with autograd, and its graph waits for the backward without weights and offloaded inputs;
    keep_<part>   of an eager layer: recompute, but replay the results of one part ([Note: keeping one part]).

Shapes: B rows of an accumulation step, b rows of a microbatch, T tokens, D hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatrain.device.offload import InputStore
from megatrain.device.streams import Streams
from megatrain.engine.host import rng as randomness
from megatrain.engine.host.gradients import GradientFlow
from megatrain.engine.host.routing import Routing
from megatrain.engine.host.rows import RowChunks
from megatrain.engine.host.tape import (
    Arguments,
    ChunkGraph,
    Form,
    LayerCall,
    MovingTensors,
    Tape,
    entrance,
    tree_flatten,
    tree_unflatten,
)
from megatrain.engine.host.weights import WeightStream
from megatrain.models.routers import Routed
from megatrain.models.shell import Shell
from megatrain.models.structure import Unit
from megatrain.models.templates import KEEP_ONE_PART, KeptResults, Leaves, Variant


class StepAborter:
    """Lets another thread end the step in progress, or the next one, before its next layer."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def check(self) -> None:
        """Raise the requested error, once."""
        if self.error is not None:
            error, self.error = self.error, None
            raise error


class LayerRunner:
    """Computes layers, one at a time, over all microbatches of an accumulation step.

    Args:
        shell: HF's code.
        streams, weights, gradients, inputs: The device side.
        aborter: Checked before each layer.

    Attributes:
        rows: The microbatches.
        policies: Variant of each layer that is not recomputed from its input alone; set before a step.
        tape: Records the calls of a training step; None in an evaluation. Set before HF's loop runs.
        routing: Collects what routers do in a training step; None: nothing is collected.
        only: If set, the other layers are not computed: they return what the last computed one returned (warm-up).
    """

    def __init__(
        self,
        shell: Shell,
        streams: Streams,
        weights: WeightStream,
        gradients: GradientFlow,
        inputs: InputStore,
        aborter: StepAborter,
    ):
        self._shell, self._streams, self._aborter = shell, streams, aborter
        self._weights, self._gradients, self._inputs = weights, gradients, inputs
        self._units = shell.structure.layers
        self.first_trained = shell.structure.first_trained_layer
        self._leaf_cache: dict[tuple[str, int, bool], Leaves] = {}
        self.rows = RowChunks()
        self.policies: Mapping[int, Variant] = {}
        self.tape: Tape | None = None
        self.routing: Routing | None = None
        self.only: frozenset[int] | None = None
        self._latest: Any = None

    def close(self) -> None:
        """Release everything that refers to the device's buffers."""
        self._leaf_cache.clear()

    def abandon(self) -> None:
        """Reset after an error in the middle of a step."""
        self.tape = self.routing = self.only = self._latest = None
        self.rows.abandon()

    # ---------------------------------------------------------------- forward

    def forward(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Stands in for layer `index` in HF's loop. Returns the layer's outputs for all rows, without a graph."""
        if self.only is None:
            return self._forward(index, args, kwargs)
        if index in self.only:
            self._latest = self._forward(index, args, kwargs)
        else:
            self._load_head_behind(index)
        return self._latest

    def _forward(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._aborter.check()
        arguments = Arguments.of(args, kwargs)
        call, learns = None, self.tape is not None and index >= self.first_trained
        if self.tape is not None:
            call = self.tape.record(index, arguments, has_backward=learns)
        with self._streams.traced("forward", index):
            if call is not None and learns and self._keeps_graph(index):
                outputs, form = self._forward_with_graph(call, self.policies[index])
            else:
                if call is not None and learns and index in self.policies:  # see [Note: keeping one part]
                    rule = self._shell.keep_rule(index, self.policies[index])
                    call.kept = [KeptResults(rule) for _ in self.rows.chunks]
                outputs, form = self._forward_without_graph(
                    index, arguments, call.random_states if call and learns else None, call
                )
        self.rows.saw(arguments.leaves, outputs)
        if call is not None:
            assert self.tape is not None
            outputs = self.tape.emit(call, outputs)
            if learns:
                self._offload_input(call)
        self._load_head_behind(index)
        return tree_unflatten(form, iter(outputs))

    def _load_head_behind(self, index: int) -> None:
        """Load the head behind the last layer: its own update ran as long as it could."""
        if index == len(self._units) - 1:
            self._weights.edge_weights(1)

    def _keeps_graph(self, layer: int) -> bool:
        """Whether the layer's autograd graph waits for the backward."""
        variant = self.policies.get(layer)
        return variant is not None and (variant not in KEEP_ONE_PART or self._shell.compiled(layer))

    def _forward_without_graph(
        self,
        index: int,
        arguments: Arguments,
        random_states: list[randomness.RandomState] | None,
        call: LayerCall | None = None,
        counts: bool = True,
    ) -> tuple[list[Any], Form]:
        """Returns the layer's output leaves and their form. Appends each microbatch's random state to `random_states`.

        `counts`: whether what its routers do is counted.
        """
        unit = self._units[index]
        weights = self._leaves(unit, self._weights.fetch(index), requires_grad=False)
        parts: list[list[Any]] = []
        form: Form = None
        with torch.no_grad():
            for number, rows in enumerate(self.rows.chunks):
                if random_states is not None:
                    random_states.append(randomness.capture(self._streams.device))
                leaves = map(_detached, self.rows.cut_inputs(index, arguments.leaves, rows))
                args, kwargs = arguments.unflatten(list(leaves))
                with call.kept[number].recording() if call is not None and call.kept else contextlib.nullcontext():
                    output, routed = self._call(index, "forward", weights, args, kwargs, rows)
                if counts and routed is not None and self.routing is not None:
                    self.routing.add(index, routed)
                parts.append([])
                form = tree_flatten(output, parts[-1])
        self._weights.release(index)
        return self.rows.join_outputs(index, parts), form

    def _forward_with_graph(self, call: LayerCall, variant: Variant) -> tuple[list[Any], Form]:
        """Returns the layer's output leaves and their form; the graphs wait in `call`, without what moves."""
        flat, leaving = self._weights.fetch(call.layer), self._offloaded_input(call)
        homes = {} if self._weights.stays(call.layer) else {"weights": flat}
        if leaving is not None:
            homes["input"] = call.arguments.leaves[leaving].detach()
        moving = MovingTensors(homes) if homes else None
        parts: list[list[Any]] = []
        form: Form = None
        for rows in self.rows.chunks:
            around = moving.left_out() if moving else contextlib.nullcontext()
            graph, outputs, form, routed = self._graph_of(call, flat, rows, variant, around, leaving)
            graph.moving = moving
            call.graphs.append(graph)
            if routed is not None and self.routing is not None:
                self.routing.add(call.layer, routed)
            parts.append(outputs)
        self._weights.release(call.layer)
        return self.rows.join_outputs(call.layer, parts), form

    def _graph_of(
        self,
        call: LayerCall,
        flat: torch.Tensor,
        rows: slice,
        variant: Variant,
        around: contextlib.AbstractContextManager[Any],
        leaving: int | None = None,
    ) -> tuple[ChunkGraph, list[Any], Form, Routed | None]:
        """Compute the layer on one microbatch with autograd, inside `around`, from new leaves for its inputs and weights.

        Args:
            leaving: Position of an argument that the graph must not hold.

        Returns:
            The graph, the layer's output leaves with their form, and what its routers did.
        """
        weights = self._leaves(self._units[call.layer], flat, requires_grad=True)
        leaves = self.rows.cut_inputs(call.layer, call.arguments.leaves, rows)
        inputs: list[GradientEdge | torch.Tensor] = []
        for position in call.trained:
            leaf = leaves[position].detach()
            leaves[position] = entrance(leaf) if position == leaving else leaf.requires_grad_()
            # A leaf is held by its node anyway; see [Note: what a waiting graph holds].
            inputs.append(get_gradient_edge(leaves[position]) if position == leaving else leaf)
        args, kwargs = call.arguments.unflatten(leaves)
        outputs: list[Any] = []
        with torch.enable_grad(), around:
            output, routed = self._call(call.layer, variant, weights, args, kwargs, rows)
            form = tree_flatten(output, outputs)
        graph = ChunkGraph([_edge_of(output) for output in outputs], inputs, weights.trained)
        graph.balance = _edge_of(routed.balance) if routed is not None else None
        return graph, outputs, form, routed

    def _call(
        self, index: int, variant: Variant, weights: Leaves, args: Any, kwargs: Any, rows: slice
    ) -> tuple[Any, Routed | None]:
        """A layer's output for one microbatch, and what its routers did, if that is asked for."""
        if self.routing is None or index not in self._shell.watched:
            return self._shell.call_layer(index, variant, weights, args, kwargs), None
        return self._shell.call_layer(index, variant, weights, args, kwargs, self.routing.mask_N(rows))

    # ---------------------------------------------------------------- backward

    def backward(self, call: LayerCall, tape: Tape) -> None:
        """Run the layer's backward, microbatch by microbatch; send the gradients of its weights and of its inputs on.

        See [Note: gradient staging lifetime] for the former and [Note: the graph between the layers] for the latter.
        """
        self._aborter.check()
        self._fetch_input(call)
        flat = self._weights.fetch(call.layer)
        unit, total = self._units[call.layer], None
        if unit.layout.trained_numel:
            total = self._gradients.begin_layer(unit, len(self.rows.chunks))
        input_parts: dict[int, list[torch.Tensor | None]] = {position: [] for position in call.trained}
        for number, rows in enumerate(self.rows.chunks):
            if call.graphs:
                graph, call.graphs[number] = call.graphs[number], _DONE
                if graph.moving is not None:
                    graph.moving.now = {"weights": flat, **self._returned_input(call)}
            else:
                kept = call.kept[number].replaying() if call.kept else contextlib.nullcontext()
                with randomness.replayed(self._streams.device, call.random_states[number]):
                    graph, *_ = self._graph_of(call, flat, rows, "recompute", kept)
            d_outputs = self.rows.cut_gradients(call.layer, call.output_gradients, rows)
            used = [(o, g) for o, g in zip(graph.outputs, d_outputs, strict=True) if o is not None and g is not None]
            if graph.balance is not None and self.routing is not None and self.routing.slopes is not None:
                used.append((graph.balance, self.routing.slopes))
            found = _grad([o for o, _ in used], [*graph.inputs, *graph.weights.values()], [g for _, g in used])
            if total is not None:
                total.add(dict(zip(graph.weights, found[len(graph.inputs) :], strict=True)))
            for position, gradient in zip(call.trained, found, strict=False):
                input_parts[position].append(gradient)
            del graph
        self._weights.release(call.layer)
        if total is not None:
            self._gradients.send_layer(total)
        joined = {p: self.rows.join_gradient(call.layer, p, parts) for p, parts in input_parts.items()}
        tape.send_back(call, joined)
        call.forget()

    def recompute_inputs(self, calls: Sequence[LayerCall]) -> None:
        """Recompute the inputs that a segment dropped, from the one it kept."""
        for call, following in zip(calls, calls[1:], strict=False):
            states = call.random_states[0] if call.random_states else randomness.capture(self._streams.device)
            with randomness.replayed(self._streams.device, states), self._streams.traced("recompute", call.layer):
                outputs, _ = self._forward_without_graph(call.layer, call.arguments, None, counts=False)
            for position, source in following.sources.items():
                if following.arguments.leaves[position] is None:
                    following.arguments.leaves[position] = outputs[source.output].detach().requires_grad_()

    # ---------------------------------------------------------------- leaves and offloaded inputs

    def _leaves(self, unit: Unit, flat: torch.Tensor, requires_grad: bool) -> Leaves:
        """Autograd leaves over a layer's weights at their present address.

        Made once per address (of a slot, or of a resident plane), unless a leaf is computed: of parameters that HF keeps in fp32.
        """
        key = (unit.name, flat.data_ptr(), requires_grad)
        leaves = self._leaf_cache.get(key)
        if leaves is None:
            leaves = Leaves(self._shell.leaves(unit.layout.views(flat), unit.prefix, requires_grad))
            if all(leaf.dtype == flat.dtype for leaf in leaves.values()):
                self._leaf_cache[key] = leaves
        return leaves

    def _offloaded_input(self, call: LayerCall) -> int | None:
        """Position of the argument offloaded to the host until the backward, or None: the hidden states, which are the first
        argument that an earlier layer has put out."""
        if call.layer not in self._inputs.layers or not call.sources:
            return None
        position = next(iter(call.sources))
        return position if call.arguments.leaves[position].is_contiguous() else None

    def _offload_input(self, call: LayerCall) -> None:
        """Send the layer's input to the host, if it is to be offloaded. See [Note: offloaded input lifetime]."""
        position = self._offloaded_input(call)
        if position is not None:
            self._inputs.put(call.layer, call.arguments.leaves[position])
            call.arguments.leaves[position] = None

    def _fetch_input(self, call: LayerCall) -> None:
        """Put an offloaded input back in its place, and prefetch that of the layer before."""
        for position in call.sources:
            if call.arguments.leaves[position] is None:
                call.arguments.leaves[position] = self._inputs.take(call.layer).requires_grad_()
        if call.layer > 0:
            self._inputs.prefetch(call.layer - 1)

    def _returned_input(self, call: LayerCall) -> dict[str, torch.Tensor]:
        """The input that came back from the host, by its name in `MovingTensors`."""
        position = next(iter(call.sources), None)
        return {} if position is None else {"input": call.arguments.leaves[position].detach()}


_DONE = ChunkGraph([], [], {})
"""Replaces a graph whose backward has begun, so that nothing but the backward holds its activations."""


def _detached(leaf: Any) -> Any:
    """Compiled code of a forward without gradients is then the same in training and in evaluation."""
    return leaf.detach() if isinstance(leaf, torch.Tensor) and leaf.requires_grad else leaf


def _edge_of(output: Any) -> GradientEdge | None:
    """Where a layer output's gradient enters the layer's graph."""
    return get_gradient_edge(output) if isinstance(output, torch.Tensor) and output.requires_grad else None


def _grad(
    outputs: Sequence[GradientEdge], inputs: Sequence[GradientEdge | torch.Tensor], gradients: list[torch.Tensor]
) -> Sequence[torch.Tensor | None]:
    if not outputs:
        return [None] * len(inputs)
    # The signature does not allow a list of edges and tensors; the function does.
    return torch.autograd.grad(outputs, inputs, gradients, allow_unused=True)  # type: ignore[call-overload]
