"""The hot loop: forward, head and backward of one optimizer step, with layers streaming in and gradients streaming out.

Read `StepRunner.gradients` first; the names of its calls are the table of contents.

Shapes: B rows of a window, b rows of a chunk, T tokens, D hidden size, N target tokens, V vocabulary.
A step is cut three ways. Windows: accumulation, each visits every layer forward and backward. Chunks: rows of a window that a
layer computes together; one fetch of the layer serves all chunks (layer-major, chunk-minor). Token chunks: target tokens whose
logits exist at the same time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatrain.device.offload import InputStore
from megatrain.device.streams import Streams, Timestamp
from megatrain.engine.host import rng as randomness
from megatrain.engine.host.activations import MovingTensors, entrance
from megatrain.engine.host.arguments import Arguments, Form, tree_flatten, tree_unflatten
from megatrain.engine.host.fetch_order import forward_fetch_order, training_fetch_order
from megatrain.engine.host.gradients import GradientFlow
from megatrain.engine.host.head import Head, LossSums
from megatrain.engine.host.rows import RowChunks, chunks_of
from megatrain.engine.host.tape import ChunkGraph, LayerCall, Tape
from megatrain.engine.host.weights import WeightStream
from megatrain.engine.objective import Objective
from megatrain.engine.plan import StepShape
from megatrain.models.shell import Shell
from megatrain.models.structure import Unit
from megatrain.models.templates import KEEP_ONE_PART, KeptResults, Leaves, Variant

Batch = Mapping[str, torch.Tensor]
"""`input_ids`, `labels` and optionally `position_ids`, `attention_mask`, each (rows, T) int64 on the CPU."""

MODEL_INPUTS = ("input_ids", "position_ids", "attention_mask")


@dataclass
class Edges:
    """Autograd leaves over the weights of embedding and head, by full name, for one window."""

    embedding: dict[str, torch.Tensor]
    head: dict[str, torch.Tensor]

    def all(self) -> dict[str, torch.Tensor]:
        return {**self.embedding, **self.head}


class StepAborter:
    """Another thread's way to end the step in progress, or the next one, at its next visit of a layer."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def check(self) -> None:
        """Raise what was asked for, once."""
        if self.error is not None:
            error, self.error = self.error, None
            raise error


class StepRunner:
    """Computes losses and gradients. Knows nothing of the optimizer.

    Args:
        shell: HF's code; its layers call back into this object.
        streams, weights, gradients, inputs: The device side.
        objective, compiled: See `Head`.
        aborter: Checked before each visit of a layer.
    """

    def __init__(
        self,
        shell: Shell,
        streams: Streams,
        weights: WeightStream,
        gradients: GradientFlow,
        inputs: InputStore,
        objective: Objective,
        compiled: bool = False,
        aborter: StepAborter | None = None,
    ):
        self.shell = shell
        self._aborter = aborter or StepAborter()
        self._streams = streams
        self._weights = weights
        self._gradients = gradients
        self._inputs = inputs
        self._head = Head(shell, streams, objective, compiled)
        self._units = shell.structure.layers
        # What `run_layer` works on while HF's loop is running.
        self._tape: Tape | None = None
        self._rows = RowChunks()
        self._variants: Mapping[int, Variant] = {}
        self._leaf_cache: dict[tuple[str, int, bool], Leaves] = {}
        self.marks: list[tuple[str, Timestamp]] = []

    # ---------------------------------------------------------------- the step

    def gradients(self, batch: Batch, shape: StepShape, loss_scale: float) -> tuple[LossSums, torch.Tensor]:
        """Forward and backward of a whole step; every unit's gradient is on its way to the host afterwards.

        Args:
            batch: The rows of the step, with at least one target token.
            shape: How to cut it.
            loss_scale: Factor on the loss gradient (fp16), 1.0 otherwise.

        Returns:
            (sums of loss and metrics, sum of the squares of the gradients), scalars on the device, not yet waited for.
        """
        self.shell.train(True)
        inputs, targets = self._place(batch), self._head.find_targets(batch)
        passes = chunks_of(len(batch["input_ids"]), -(-len(batch["input_ids"]) // shape.accumulation_steps))
        microbatch_rows = min(shape.microbatch_rows, max(rows.stop - rows.start for rows in passes))
        self._learn_row_axes(inputs, microbatch_rows)
        self._variants = shape.policies
        self._weights.follow(training_fetch_order(len(self._units), shape.segment, len(passes)))
        self._gradients.begin_step()
        self.marks = []
        sums = LossSums(self._streams.device)
        gradient_scale = loss_scale / len(targets)
        for rows in passes:
            edges, tape = self._bind_edges(requires_grad=True), Tape()
            self._mark("forward")
            hidden_BTD = self._forward(_rows_of(inputs, rows), edges, microbatch_rows, shape.segment, tape)
            self._mark("head")
            here = self._head.targets_of(targets, rows)
            with self._streams.traced("head"):
                d_hidden_BTD = self._head.backward(
                    hidden_BTD, here, edges.all(), shape.head_tokens, gradient_scale, sums, self._gradients.edges.add
                )
            self._mark("backward")
            torch.autograd.backward(hidden_BTD, d_hidden_BTD, retain_graph=True)  # [Note: the graph between the layers]
            del hidden_BTD, d_hidden_BTD
            self._backward(edges, shape.segment, tape)
        self._mark("end")
        self._weights.edges_in_use()
        return sums, self._gradients.squared_norm()

    def loss(self, batch: Batch, shape: StepShape) -> LossSums:
        """Sums of a batch's loss and metrics, without gradients. Logits exist for one chunk of tokens at a time."""
        self.shell.train(False)
        inputs, rows = self._place(batch), slice(0, len(batch["input_ids"]))
        targets = self._head.targets_of(self._head.find_targets(batch), rows)
        sums = LossSums(self._streams.device)
        microbatch_rows = min(shape.microbatch_rows, len(batch["input_ids"]))
        with torch.no_grad():
            self._learn_row_axes(inputs, microbatch_rows)
            self._weights.follow(forward_fetch_order(len(self._units)))
            edges = self._bind_edges(requires_grad=False)
            hidden_BTD = self._forward(inputs, edges, microbatch_rows, 1, tape=None)
            self._head.loss(hidden_BTD, targets, edges.all(), shape.head_tokens, sums)
        self._weights.edges_in_use()
        return sums

    def close(self) -> None:
        """Let go of everything that refers to the device's buffers."""
        self._leaf_cache.clear()

    def where(self) -> str:
        """The phase in work and its layer, for people."""
        phase = self.marks[-1][0] if self.marks else "forward"
        layer = self._weights.visited if phase in ("forward", "backward") else None
        return f"the {phase}" if layer is None else f"the {phase} of layer {layer}"

    def abandon(self) -> None:
        """After an error in the middle of a step: nothing of the step is kept, the next one can start."""
        self._tape, self.marks = None, []
        self._rows.abandon()
        self._streams.synchronize()
        self._weights.abandon()
        self._gradients.abandon()
        self._inputs.abandon()
        self._streams.spans.drop()

    # ---------------------------------------------------------------- forward

    def _forward(
        self, inputs: dict[str, torch.Tensor], edges: Edges, microbatch_rows: int, segment: int, tape: Tape | None
    ) -> torch.Tensor:
        """HF's own base model; its loop calls `run_layer` for each layer. Returns hidden states (B, T, D)."""
        self._tape = tape
        self._rows.begin(self._kind_of(inputs), len(inputs["input_ids"]), microbatch_rows)
        hidden_BTD = self.shell.hidden_states(edges.all(), inputs)
        self._tape = None
        if tape is not None and segment > 1:
            _drop_inner_inputs(tape, segment)
        return hidden_BTD

    def run_layer(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What HF's loop gets in place of layer `index`: the layer's outputs for all rows, without a graph."""
        self._aborter.check()
        arguments = Arguments.of(args, kwargs)
        call = self._tape.record(index, arguments) if self._tape is not None else None
        with self._streams.traced("forward", index):
            if call is not None and self._keeps_graph(index):
                outputs, form = self._forward_kept(call, self._variants[index])
            else:
                if call is not None and index in self._variants:  # see [Note: keeping one part]
                    rule = self.shell.keep_rule(index, self._variants[index])
                    call.kept = [KeptResults(rule) for _ in self._rows.chunks]
                outputs, form = self._forward_layer(index, arguments, call.random_states if call else None, call)
        self._rows.saw(arguments.leaves, outputs)
        if call is not None:
            assert self._tape is not None
            outputs = self._tape.emit(call, outputs)
            self._offload(call)
        if index == len(self._units) - 1:
            self._weights.edge_weights(1)  # behind the last layer: the head's own update ran as long as it could
        return tree_unflatten(form, iter(outputs))

    def _keeps_graph(self, layer: int) -> bool:
        """Whether the layer's autograd graph waits for the backward."""
        variant = self._variants.get(layer)
        return variant is not None and (variant not in KEEP_ONE_PART or self.shell.compiled(layer))

    def _forward_layer(
        self,
        index: int,
        arguments: Arguments,
        random_states: list[randomness.RandomState] | None,
        call: LayerCall | None = None,
    ) -> tuple[list[Any], Form]:
        """One layer over all chunks of the window, without autograd. Returns output leaves and their structure."""
        unit = self._units[index]
        weights = self._leaves(unit, self._weights.fetch(index), requires_grad=False)
        parts: list[list[Any]] = []
        form: Form = None
        with torch.no_grad():
            for number, rows in enumerate(self._rows.chunks):
                if random_states is not None:
                    random_states.append(randomness.capture(self._streams.device))
                args, kwargs = arguments.unflatten(self._rows.cut_inputs(index, arguments.leaves, rows))
                with call.kept[number].recording() if call is not None and call.kept else contextlib.nullcontext():
                    output = self.shell.call_layer(index, "forward", weights, args, kwargs)
                parts.append([])
                form = tree_flatten(output, parts[-1])
        self._weights.release(index)
        return self._rows.join_outputs(index, parts), form

    def _forward_kept(self, call: LayerCall, variant: Variant) -> tuple[list[Any], Form]:
        """One layer over all chunks of the window, with autograd; its graphs wait for the backward without what moves."""
        flat, leaving = self._weights.fetch(call.layer), self._leaving_input(call)
        homes = {} if self._weights.stays(call.layer) else {"weights": flat}
        if leaving is not None:
            homes["input"] = call.arguments.leaves[leaving].detach()
        moving = MovingTensors(homes) if homes else None
        parts: list[list[Any]] = []
        form: Form = None
        for rows in self._rows.chunks:
            around = moving.left_out() if moving else contextlib.nullcontext()
            graph, outputs, form = self._graph_of(call, flat, rows, variant, around, leaving)
            graph.moving = moving
            call.graphs.append(graph)
            parts.append(outputs)
        self._weights.release(call.layer)
        return self._rows.join_outputs(call.layer, parts), form

    def _graph_of(
        self,
        call: LayerCall,
        flat: torch.Tensor,
        rows: slice,
        variant: Variant,
        around: contextlib.AbstractContextManager[Any],
        leaving: int | None = None,
    ) -> tuple[ChunkGraph, list[Any], Form]:
        """Compute one layer on one chunk with autograd, inside `around`, with leaves of its own for inputs and weights.

        Args:
            leaving: Position of an argument that the graph must not hold.

        Returns:
            The graph, and the layer's output leaves with their structure.
        """
        weights = self._leaves(self._units[call.layer], flat, requires_grad=True)
        leaves = self._rows.cut_inputs(call.layer, call.arguments.leaves, rows)
        inputs: list[GradientEdge | torch.Tensor] = []
        for position in call.trained:
            leaf = leaves[position].detach()
            leaves[position] = entrance(leaf) if position == leaving else leaf.requires_grad_()
            # A leaf is held by its node anyway; see [Note: what a waiting graph holds].
            inputs.append(get_gradient_edge(leaves[position]) if position == leaving else leaf)
        args, kwargs = call.arguments.unflatten(leaves)
        outputs: list[Any] = []
        with torch.enable_grad(), around:
            form = tree_flatten(self.shell.call_layer(call.layer, variant, weights, args, kwargs), outputs)
        return ChunkGraph([_edge_of(output) for output in outputs], inputs, weights.trained), outputs, form

    # ---------------------------------------------------------------- backward

    def _backward(self, edges: Edges, segment: int, tape: Tape) -> None:
        """From the last layer to the embedding; each unit's gradient leaves for the host as soon as it is complete."""
        self._collect(edges.head)
        self._gradients.send_edge(self.shell.structure.head)
        for start in reversed(range(0, len(tape.calls), segment)):
            calls = tape.calls[start : start + segment]
            self._recompute_inputs(calls)
            for call in reversed(calls):
                with self._streams.traced("backward", call.layer):
                    self._backward_layer(call, tape)
        self._collect(edges.embedding)
        self._gradients.send_edge(self.shell.structure.embedding)

    def _backward_layer(self, call: LayerCall, tape: Tape) -> None:
        """Run one layer's backward, chunk by chunk, on kept graphs or on recomputed ones; send its gradients both ways.

        See [Note: gradient staging lifetime] for the unit's gradient and [Note: the graph between the layers] for the inputs'.
        """
        self._aborter.check()
        self._bring_back(call, tape)
        flat = self._weights.fetch(call.layer)
        total = self._gradients.begin_layer(self._units[call.layer], len(self._rows.chunks))
        input_parts: dict[int, list[torch.Tensor | None]] = {position: [] for position in call.trained}
        for number, rows in enumerate(self._rows.chunks):
            if call.graphs:
                graph, call.graphs[number] = call.graphs[number], _DONE
                if graph.moving is not None:
                    graph.moving.now = {"weights": flat, **self._returned_input(call)}
            else:
                kept = call.kept[number].replaying() if call.kept else contextlib.nullcontext()
                with randomness.replayed(self._streams.device, call.random_states[number]):
                    graph, _, _ = self._graph_of(call, flat, rows, "recompute", kept)
            d_outputs = self._rows.cut_gradients(call.layer, call.output_gradients, rows)
            used = [(o, g) for o, g in zip(graph.outputs, d_outputs, strict=True) if o is not None and g is not None]
            found = _grad([o for o, _ in used], [*graph.inputs, *graph.weights.values()], [g for _, g in used])
            total.add(dict(zip(graph.weights, found[len(graph.inputs) :], strict=True)))
            for position, gradient in zip(call.trained, found, strict=False):
                input_parts[position].append(gradient)
            del graph
        self._weights.release(call.layer)
        self._gradients.send_layer(total)
        joined = {p: self._rows.join_gradient(call.layer, p, parts) for p, parts in input_parts.items()}
        tape.send_back(call, joined)
        call.forget()

    def _leaves(self, unit: Unit, flat: torch.Tensor, requires_grad: bool) -> Leaves:
        """Autograd leaves over a layer's weights where they are now. Made once for each place, since a place is a slot or a
        resident plane and stays; not where a leaf is computed (parameters that HF keeps in fp32)."""
        key = (unit.name, flat.data_ptr(), requires_grad)
        leaves = self._leaf_cache.get(key)
        if leaves is None:
            leaves = Leaves(self.shell.leaves(unit.layout.views(flat), unit.prefix, requires_grad))
            if all(leaf.dtype == flat.dtype for leaf in leaves.values()):
                self._leaf_cache[key] = leaves
        return leaves

    def _leaving_input(self, call: LayerCall) -> int | None:
        """Position of the argument that waits on the host for the backward, if the layer is one that has such: the first one
        that is an earlier layer's output, its hidden states."""
        if call.layer not in self._inputs.layers or not call.sources:
            return None
        position = next(iter(call.sources))
        return position if call.arguments.leaves[position].is_contiguous() else None

    def _offload(self, call: LayerCall) -> None:
        """Send the layer's input to the host, if it is one that waits there. See [Note: offloaded input lifetime]."""
        position = self._leaving_input(call)
        if position is not None:
            self._inputs.put(call.layer, call.arguments.leaves[position])
            call.arguments.leaves[position] = None

    def _returned_input(self, call: LayerCall) -> dict[str, torch.Tensor]:
        """The input that has come back from the host, by its name among what moves."""
        position = next(iter(call.sources), None)
        return {} if position is None else {"input": call.arguments.leaves[position].detach()}

    def _bring_back(self, call: LayerCall, tape: Tape) -> None:
        """Put an offloaded input back in its place and start the next one's way."""
        for position in call.sources:
            if call.arguments.leaves[position] is None:
                call.arguments.leaves[position] = self._inputs.take(call.layer).requires_grad_()
        if call.layer > 0:
            self._inputs.prefetch(call.layer - 1)

    def _recompute_inputs(self, calls: Sequence[LayerCall]) -> None:
        """Compute again the inputs that a segment dropped, from the one it kept."""
        for call, following in zip(calls, calls[1:], strict=False):
            states = call.random_states[0] if call.random_states else randomness.capture(self._streams.device)
            with randomness.replayed(self._streams.device, states), self._streams.traced("recompute", call.layer):
                outputs, _ = self._forward_layer(call.layer, call.arguments, None)
            for position, source in following.sources.items():
                if following.arguments.leaves[position] is None:
                    following.arguments.leaves[position] = outputs[source.output].detach().requires_grad_()

    def _collect(self, leaves: Mapping[str, torch.Tensor]) -> None:
        for name, leaf in leaves.items():
            self._gradients.edges.add(name, leaf.grad)
            leaf.grad = None

    def _learn_row_axes(self, inputs: dict[str, torch.Tensor], microbatch_rows: int) -> None:
        """See [Note: which argument goes with the rows]. Once per kind of batch, and only where windows have several chunks."""
        rows, kind = len(inputs["input_ids"]), self._kind_of(inputs)
        if rows <= microbatch_rows or self._rows.knows(kind):
            return

        def probe(count: int) -> None:
            few = {name: tensor[torch.arange(count) % rows] for name, tensor in inputs.items()}
            self._weights.follow(forward_fetch_order(len(self._units)))
            # What the probe draws must not be missing later: a step that finds the axes known draws the same numbers.
            device = self._streams.device
            with torch.no_grad(), randomness.replayed(device, randomness.capture(device)):
                self._forward(few, self._bind_edges(requires_grad=False), count, 1, tape=None)

        self._rows.learn(kind, probe)

    def _kind_of(self, inputs: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
        """Batches of a kind hand the same arguments to their layers, whatever their size."""
        return (*inputs, self.shell.attention)

    # ---------------------------------------------------------------- inputs

    def _place(self, batch: Batch) -> dict[str, torch.Tensor]:
        """The model's inputs on the device, once per step; with the attention implementation that they need."""
        self.shell.choose_attention(batch.get("position_ids") is not None, batch["input_ids"].shape[1])
        return {name: self._streams.to_device(batch[name]) for name in MODEL_INPUTS if batch.get(name) is not None}

    def _bind_edges(self, requires_grad: bool) -> Edges:
        """Leaves over the edge weights. The embedding is loaded now; the head's memory is bound now and loaded behind the
        last layer, unless a leaf must be computed from it here (parameters that HF keeps in fp32)."""
        structure = self.shell.structure
        embedding = self._weights.edge_weights(0)
        copied = any(name in self.shell.fp32_names for _, name in structure.head.full_names())
        head = self._weights.edge_weights(1) if copied else self._weights.edge_buffer(1)
        views = [structure.embedding.layout.views(embedding), structure.head.layout.views(head)]
        return Edges(*(self.shell.leaves(view, "", requires_grad) for view in views))

    def _mark(self, phase: str) -> None:
        self.marks.append((phase, self._streams.timestamp()))

    def phase_seconds(self) -> dict[str, float]:
        """Device seconds of each phase of the latest step, summed over its windows. The device must be idle."""
        seconds: dict[str, float] = {}
        for (phase, start), (_, end) in zip(self.marks, self.marks[1:], strict=False):
            seconds[phase] = seconds.get(phase, 0.0) + start.seconds_until(end)
        return seconds


_DONE = ChunkGraph([], [], {})
"""Stands in the list for a graph whose backward has begun, so that nothing but the backward holds its activations."""


def _edge_of(output: Any) -> GradientEdge | None:
    """Where a layer output's gradient enters the layer's graph."""
    return get_gradient_edge(output) if isinstance(output, torch.Tensor) and output.requires_grad else None


def _grad(
    outputs: Sequence[GradientEdge], inputs: Sequence[GradientEdge | torch.Tensor], gradients: list[torch.Tensor]
) -> Sequence[torch.Tensor | None]:
    if not outputs:
        return [None] * len(inputs)
    # A list of edges and tensors is not foreseen by the signature, but is by the function.
    return torch.autograd.grad(outputs, inputs, gradients, allow_unused=True)  # type: ignore[call-overload]


def _rows_of(inputs: Mapping[str, torch.Tensor], rows: slice) -> dict[str, torch.Tensor]:
    return {name: tensor[rows] for name, tensor in inputs.items()}


def _drop_inner_inputs(tape: Tape, segment: int) -> None:
    """Let go of the inputs that the backward will compute again: those of all but the first layer of each segment."""
    for number, call in enumerate(tape.calls):
        if number % segment:
            for position, source in call.sources.items():
                if source.call == number - 1:
                    call.arguments.leaves[position] = None
