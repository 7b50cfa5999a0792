"""The hot loop: forward, head and backward of one optimizer step, with layers streaming in and gradients streaming out.

Read `StepRunner.gradients` first; the names of its calls are the table of contents. layer.py computes a single layer, head.py
the logits and the loss.

A step is cut three ways. Accumulation steps: each runs forward and backward through all layers on its share of the rows.
Microbatches: rows of an accumulation step that a layer computes together; one fetch of the layer serves all of them
(layer-major). Head chunks: target tokens whose logits exist at the same time.
Shapes: B rows of an accumulation step, T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megatrain.device.offload import InputStore
from megatrain.device.shards import ALONE, Shards
from megatrain.device.streams import Streams, Timestamp
from megatrain.engine.base import Batch
from megatrain.engine.host import rng as randomness
from megatrain.engine.host.gradients import GradientFlow
from megatrain.engine.host.head import Head, LossSums
from megatrain.engine.host.layer import LayerRunner, StepAborter
from megatrain.engine.host.routing import Routing
from megatrain.engine.host.rows import chunks_of
from megatrain.engine.host.tape import Tape
from megatrain.engine.host.weights import WeightStream, forward_fetch_order, training_fetch_order
from megatrain.engine.objective import Objective, StepTotals
from megatrain.engine.plan import StepShape
from megatrain.models.rope import scaling_by_length
from megatrain.models.routers import RouterLoss
from megatrain.models.shell import Shell

MODEL_INPUTS = ("input_ids", "position_ids", "attention_mask")
PROBE_TOKENS = 64
"""Tokens of the rows that layers are probed with: any number would do."""


@dataclass
class Edges:
    """Autograd leaves over the weights of embedding and head, by full name, for one accumulation step."""

    embedding: dict[str, torch.Tensor]
    head: dict[str, torch.Tensor]

    def all(self) -> dict[str, torch.Tensor]:
        return {**self.embedding, **self.head}


class StepRunner:
    """Computes losses and gradients. Knows nothing of the optimizer.

    Args:
        shell: HF's code, whose layers call `layers.forward`.
        streams, weights, gradients, inputs: The device side.
        objective, compiled: See `Head`.
        aborter: Checked before each layer.
        router_loss: The auxiliary loss of the routers, if the model is trained with it.
        shards: The ranks that share the state.

    Attributes:
        layers: Computes the layers.
        marks: The phases of the latest step, each with the time of its begin.
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
        router_loss: RouterLoss | None = None,
        shards: Shards = ALONE,
    ):
        self.shell = shell
        self._router_loss, self._shards = router_loss, shards
        self._by_length = scaling_by_length(shell.structure.model.config) is not None
        self.layers = LayerRunner(shell, streams, weights, gradients, inputs, aborter or StepAborter())
        self._streams = streams
        self._weights = weights
        self._gradients = gradients
        self._inputs = inputs
        self._head = Head(shell, streams, objective, compiled)
        self._depth = len(shell.structure.layers)
        self.marks: list[tuple[str, Timestamp]] = []

    # ---------------------------------------------------------------- the step

    def gradients(
        self,
        batch: Batch,
        shape: StepShape,
        gradient_scale: float,
        only: Sequence[int] | None = None,
        loss_scale: float = 1.0,
        *,
        step: StepTotals | None = None,
        together: int = 1,
    ) -> tuple[LossSums, torch.Tensor, Routing | None]:
        """Forward and backward of a whole step; every unit's gradient is on its way to the host afterwards.

        Args:
            batch: The rows of the step, or this rank's share of them.
            shape: How to cut it.
            gradient_scale: Factor on the gradient of the loss's sum: the loss scale over the count that the loss is divided by.
            only: Compute only these layers, ascending, the first layer among them; see `warm_up`.
            loss_scale: The loss scale, which is the factor on the gradient of the auxiliary loss.
            step: What is known of the whole step; None: these rows are all of it.
            together: Rows that stay in one accumulation step; see `Objective.rows_together`.

        Returns:
            (sums of loss and metrics, sum of the squares of the gradients, what the routers did or None), on the device, not yet
            waited for.
        """
        self.shell.train(True)
        inputs, targets = self._place(batch), self._head.find_targets(batch, step)
        passes = _accumulation_steps(len(batch["input_ids"]), shape.accumulation_steps, together)
        microbatch_rows = min(shape.microbatch_rows, max(rows.stop - rows.start for rows in passes))
        self._learn_row_axes(inputs, microbatch_rows)
        self.layers.policies = shape.policies
        layers = self._layers_of(only)
        without_backward = sum(layer < self.layers.first_trained for layer in layers)
        order = training_fetch_order(len(layers), shape.segment, len(passes), without_backward)
        routing = self.layers.routing = self._routing_of(batch)
        counts_first = self._router_loss is not None and len(passes) > 1  # [Note: counts before slopes]
        if counts_first:
            order = [*range(len(layers))] * len(passes) + list(order)
        self._weights.follow([layers[i] for i in order])
        self._gradients.begin_step()
        self.marks = []
        sums = LossSums(self._streams.device)
        if counts_first:
            self._count_routes(inputs, passes, microbatch_rows, loss_scale)
        for rows in passes:
            if routing is not None:
                routing.begin_pass(rows)
            edges, tape = self._bind_edges(requires_grad=True), Tape()
            self._mark("forward")
            hidden_BTD = self._forward(_rows_of(inputs, rows), edges, microbatch_rows, shape.segment, tape)
            if routing is not None and (self._router_loss is not None or rows is passes[-1]):
                routing.complete(loss_scale)
            self._mark("head")
            here = self._head.targets_of(targets, rows)
            with self._streams.traced("head"):
                d_hidden_BTD = self._head.backward(
                    hidden_BTD, here, edges.all(), shape.head_tokens, gradient_scale, sums, self._gradients.edges.add
                )
            self._mark("backward")
            if hidden_BTD.requires_grad:  # not if the head alone is trained; [Note: the graph between the layers]
                torch.autograd.backward(hidden_BTD, d_hidden_BTD, retain_graph=True)
            del hidden_BTD, d_hidden_BTD
            self._backward(edges, shape.segment, tape)
        self._mark("end")
        self.layers.routing = None
        self._weights.edges_in_use()
        return sums, self._gradients.squared_norm(), routing

    def loss(
        self,
        batch: Batch,
        shape: StepShape,
        only: Sequence[int] | None = None,
        *,
        step: StepTotals | None = None,
        objective: Objective | None = None,
    ) -> LossSums:
        """Sums of a batch's loss and metrics, without gradients. Logits exist for one chunk of tokens at a time.

        `only`, `step`: as for `gradients`. `objective`: instead of the engine's.
        """
        self.shell.train(False)
        inputs, rows = self._place(batch), slice(0, len(batch["input_ids"]))
        targets = self._head.targets_of(self._head.find_targets(batch, step, objective), rows)
        sums = LossSums(self._streams.device)
        microbatch_rows = min(shape.microbatch_rows, len(batch["input_ids"]))
        with torch.no_grad():
            self._learn_row_axes(inputs, microbatch_rows)
            self._weights.follow(list(self._layers_of(only)))
            edges = self._bind_edges(requires_grad=False)
            hidden_BTD = self._forward(inputs, edges, microbatch_rows, 1, tape=None)
            self._head.loss(hidden_BTD, targets, edges.all(), shape.head_tokens, sums, objective)
        self._weights.edges_in_use()
        return sums

    def warm_up(self, batch: Batch, shape: StepShape, training: bool) -> None:
        """Compile what steps on batches of this form run. The results are dropped; weights need not be loaded yet.

        Computes the first two layers of each kind (template group and policy) as in a step; the other layers pass on what the
        last computed layer returned.
        """
        groups = self.shell.groups
        kinds = [(group, shape.policies.get(i) if training else None) for i, group in enumerate(groups)]
        only = [i for i, kind in enumerate(kinds) if kinds[:i].count(kind) < 2]
        try:
            if training:
                self.gradients(batch, shape, 1.0, only)
            else:
                self.loss(batch, shape, only)
        finally:
            self.abandon()

    def _layers_of(self, only: Sequence[int] | None) -> Sequence[int]:
        """The layers that are computed from now on: `only` these, or all."""
        self.layers.only = None if only is None else frozenset(only)
        return range(self._depth) if only is None else only

    def close(self) -> None:
        """Release everything that refers to the device's buffers."""
        self.layers.close()

    def where(self) -> str:
        """The current phase, and its layer if it has one, for messages."""
        phase = self.marks[-1][0] if self.marks else "forward"
        layer = self._weights.fetched if phase in ("forward", "backward") else None
        return f"the {phase}" if layer is None else f"the {phase} of layer {layer}"

    def abandon(self) -> None:
        """Reset after an error in the middle of a step, so that the next one can start."""
        self.marks = []
        self.layers.abandon()
        self._streams.synchronize()
        self._weights.abandon()
        self._gradients.abandon()
        self._inputs.abandon()
        self._streams.spans.drop()

    # ---------------------------------------------------------------- forward

    def _forward(
        self, inputs: dict[str, torch.Tensor], edges: Edges, microbatch_rows: int, segment: int, tape: Tape | None
    ) -> torch.Tensor:
        """Run HF's own base model, whose loop calls `layers.forward` for each layer. Returns hidden states (B, T, D)."""
        self.layers.tape = tape
        self.layers.rows.begin(self._kind_of(inputs), len(inputs["input_ids"]), microbatch_rows)
        hidden_BTD = self.shell.hidden_states(edges.all(), inputs)
        self.layers.tape = None
        self._inputs.end_forward()
        if tape is not None and segment > 1:
            tape.drop_inner_inputs(segment)
        return hidden_BTD

    def _routing_of(self, batch: Batch) -> Routing | None:
        """Collects what the routers do with the tokens of this batch that are not padding; None without any to watch."""
        if not self.shell.watched:
            return None
        mask_BT = batch.get("token_mask")
        if mask_BT is None:
            mask_BT = torch.ones_like(batch["input_ids"])
        return Routing(self._router_loss, self.shell.routers, self._streams.to_device(mask_BT), self._shards)

    def _count_routes(
        self, inputs: dict[str, torch.Tensor], passes: Sequence[slice], microbatch_rows: int, loss_scale: float
    ) -> None:
        """Run the forward of all accumulation steps for what their routers choose. See [Note: counts before slopes]."""
        routing, device = self.layers.routing, self._streams.device
        assert routing is not None
        self._mark("forward")
        with torch.no_grad(), randomness.replayed(device, randomness.capture(device)):
            edges = self._bind_edges(requires_grad=False)
            for rows in passes:
                routing.begin_pass(rows)
                self._forward(_rows_of(inputs, rows), edges, microbatch_rows, 1, tape=None)
        routing.complete(loss_scale)

    # ---------------------------------------------------------------- backward

    def _backward(self, edges: Edges, segment: int, tape: Tape) -> None:
        """Run the backward from the last layer to the embedding; each unit's gradient is sent as soon as it is complete."""
        self._collect(edges.head)
        self._gradients.send_edge(self.shell.structure.head)
        for start in reversed(range(0, len(tape.calls), segment)):
            calls = [call for call in tape.calls[start : start + segment] if call.has_backward]
            self.layers.recompute_inputs(calls)
            for call in reversed(calls):
                with self._streams.traced("backward", call.layer):
                    self.layers.backward(call, tape)
        self._collect(edges.embedding)
        self._gradients.send_edge(self.shell.structure.embedding)

    def _collect(self, leaves: Mapping[str, torch.Tensor]) -> None:
        for name, leaf in leaves.items():
            self._gradients.edges.add(name, leaf.grad)
            leaf.grad = None

    def _learn_row_axes(self, inputs: dict[str, torch.Tensor], microbatch_rows: int) -> None:
        """Probe the layers, once per kind of batch, if it takes several microbatches.

        See [Note: which argument goes with the rows].
        """
        rows, kind = len(inputs["input_ids"]), self._kind_of(inputs)
        if rows <= microbatch_rows or self.layers.rows.knows(kind):
            return

        def probe(count: int) -> None:
            few = {name: tensor[torch.arange(count) % rows, :PROBE_TOKENS] for name, tensor in inputs.items()}
            self._weights.follow(forward_fetch_order(self._depth))
            # Replayed, so that a step that has to probe draws the same random numbers as one that need not.
            device = self._streams.device
            kept = randomness.replayed(device, randomness.capture(device))
            with torch.no_grad(), kept, self.shell.eager():
                self._forward(few, self._bind_edges(requires_grad=False), count, 1, tape=None)

        self.layers.rows.learn(kind, probe)

    def _kind_of(self, inputs: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
        """Batches of the same kind pass the same arguments to their layers, whatever their size."""
        return (*inputs, self.shell.attention)

    # ---------------------------------------------------------------- inputs

    def _place(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Copy the model's inputs to the device, and choose the attention implementation that they need."""
        self.shell.choose_attention(batch.get("position_ids") is not None, batch["input_ids"].shape[1])
        inputs = {name: batch[name] for name in MODEL_INPUTS if batch.get(name) is not None}
        if self.shell.uses_block_masks and "position_ids" in inputs and not self._by_length:
            inputs["position_ids"] = _always_packed(inputs["position_ids"])
        return {name: self._streams.to_device(tensor) for name, tensor in inputs.items()}

    def _bind_edges(self, requires_grad: bool) -> Edges:
        """Leaves over the edge weights. The embedding is loaded now. The head's memory is bound now and loaded behind the last
        layer, unless a leaf must be computed from it here (of parameters that HF keeps in fp32)."""
        structure = self.shell.structure
        embedding = self._weights.edge_weights(0)
        copied = any(name in self.shell.fp32_names for _, name in structure.head.full_names())
        head = self._weights.edge_weights(1) if copied else self._weights.edge_buffer(1)
        views = [structure.embedding.layout.views(embedding), structure.head.layout.views(head)]
        return Edges(*(self.shell.leaves(view, "", requires_grad) for view in views))

    def _mark(self, phase: str) -> None:
        self.marks.append((phase, Timestamp(self._streams.compute)))

    def phase_seconds(self) -> dict[str, float]:
        """Device seconds of each phase of the latest step, summed over its accumulation steps. The device must be idle."""
        seconds: dict[str, float] = {}
        for (phase, start), (_, end) in zip(self.marks, self.marks[1:], strict=False):
            seconds[phase] = seconds.get(phase, 0.0) + start.seconds_until(end)
        return seconds


def _always_packed(positions_BT: torch.Tensor) -> torch.Tensor:
    """The positions with a document more, of the last token of each row.

    Hugging Face makes another kind of mask when no row of a batch holds several documents, and another kind of mask compiles the
    layers again. The last token predicts nothing and no other token sees it, so its document is of no consequence. It would be to
    a model whose rotary frequencies depend on the length of a document: the layers of such a model may be compiled twice.
    """
    changed = positions_BT.clone()
    changed[:, -1] = 0
    return changed


def _accumulation_steps(rows: int, steps: int, together: int) -> list[slice]:
    """The rows of each accumulation step, as equal as possible, without separating rows that stay together."""
    groups = -(-rows // together)
    parts = chunks_of(groups, -(-groups // steps))
    return [slice(part.start * together, min(part.stop * together, rows)) for part in parts]


def _rows_of(inputs: Mapping[str, torch.Tensor], rows: slice) -> dict[str, torch.Tensor]:
    return {name: tensor[rows] for name, tensor in inputs.items()}
