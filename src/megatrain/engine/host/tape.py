"""The tape of an accumulation step: what each layer call needs for its backward.

[Note: the graph between the layers]
The forward of a layer runs without autograd; its outputs are handed to HF's loop as new autograd leaves. What HF computes
between two layers (usually nothing) is therefore a small graph from the outputs of earlier layers to the inputs of a later
one. The backward goes layer by layer, last to first: a layer's backward gives the gradients of its inputs, and these are sent
through that small graph to the outputs of earlier layers, where they add up. When a layer's turn comes, all users of its
outputs have had theirs. Where an input *is* an earlier output, as in plain chains, its gradient is handed over directly.

[Note: activation lifetime]
The tape keeps an input until its layer's backward. Outputs are not kept: they live as long as they are the input of another
call, or part of a graph, or held by HF's own forward. Their gradients are collected by the call that made them.

[Note: flat arguments]
Layers are called with the same handful of tuples and dicts in each fetch. torch's pytree handles any type, but takes 33 us to
flatten and rebuild such arguments where the walk below takes 8 us (a small layer's kernels take less than the difference). So
plain containers are walked here, and pytree is asked for all others (HF's `ModelOutput`, dataclasses).

[Note: activations without weights]
Autograd saves everything it needs for the backward: activations, and the weights too. But weights lie in a slot that the next
layers overwrite. So while a layer runs, a pack hook replaces each saved tensor that lies inside its weights by its (size, stride,
offset), and the unpack hook reads it from where the layer's weights are *then*: fetched again, maybe into another slot. The
layer's input is treated alike if it is offloaded. Eager and compiled code save through the same hooks, so this works for both.

[Note: what a waiting graph holds]
A graph that waits for its backward holds what its nodes have saved, and nothing else: its roots and its inputs are edges
(`GradientEdge`), not tensors. An output is the next layer's input and may be offloaded, so the graph must not hold it. An input
that is a leaf would be held by the node that accumulates its gradient; an offloaded one enters through `entrance`, whose node
holds nothing.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge
from torch.nn.attention.flex_attention import BlockMask
from torch.utils import _pytree as pytree

from megatrain.models.templates import KeptResults


class Branch(NamedTuple):
    """A tuple, list or dict. `keys` are a dict's, in its order; `parts` are the forms of its values."""

    kind: type
    keys: tuple[Any, ...]
    parts: list[Form]


Form = Branch | pytree.TreeSpec | None
"""How a value is rebuilt from its leaves; None: it is a leaf."""

_LEAVES = frozenset((torch.Tensor, BlockMask, type(None), bool, int, float, str))


def tree_flatten(value: Any, leaves: list[Any]) -> Form:
    """Append the leaves of `value` to `leaves`, in order. Returns its form. See [Note: flat arguments]."""
    kind = type(value)
    if kind in _LEAVES:
        leaves.append(value)
        return None
    if kind is tuple or kind is list:
        return Branch(kind, (), [tree_flatten(part, leaves) for part in value])
    if kind is dict:
        return Branch(kind, tuple(value), [tree_flatten(part, leaves) for part in value.values()])
    found, spec = pytree.tree_flatten(value)
    leaves += found
    return spec


def tree_unflatten(form: Form, leaves: Iterator[Any]) -> Any:
    """The value of this form with the next leaves. Its containers are new, so that a layer may change its own."""
    if form is None:
        return next(leaves)
    if isinstance(form, pytree.TreeSpec):
        return pytree.tree_unflatten(list(islice(leaves, form.num_leaves)), form)
    parts = [tree_unflatten(part, leaves) for part in form.parts]
    if form.kind is dict:
        return dict(zip(form.keys, parts, strict=True))
    return parts if form.kind is list else tuple(parts)


@dataclass
class Arguments:
    """Arguments of a layer call as a flat list: tensors and everything else."""

    leaves: list[Any]
    form: Form

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        leaves: list[Any] = []
        return cls(leaves, tree_flatten((args, kwargs), leaves))

    def unflatten(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tree_unflatten(self.form, iter(leaves))


@dataclass
class Source:
    """The earlier call of the same tape that made an argument, and which of its outputs it is."""

    call: int
    output: int


@dataclass
class ChunkGraph:
    """A layer's computation on one microbatch, with autograd. See [Note: what a waiting graph holds] in activations.py.

    Attributes:
        outputs: Roots, one for each output leaf of the layer; None where it has no gradient.
        inputs: Where the gradients of the argument leaves come out, in the order of `LayerCall.trained`.
        weights: The parameters that need a gradient, by layout name.
        moving: Tensors that the graph must find at another address than where it was made.
        balance: Root of the routers' sums, None without. See [Note: the auxiliary loss] in models/routers.py.
    """

    outputs: list[GradientEdge | None]
    inputs: list[GradientEdge | torch.Tensor]
    weights: dict[str, torch.Tensor]
    moving: MovingTensors | None = None
    balance: GradientEdge | None = None


@dataclass
class LayerCall:
    """One call of a layer in an accumulation step.

    Attributes:
        layer: Index of the layer.
        arguments: Its arguments. The leaf of an input that will be recomputed (`segment`) or is offloaded is None.
        trained: Positions of the argument leaves that need a gradient.
        has_backward: Whether a parameter of the layer, or one before it, is trained.
        sources: Sources of the arguments that are outputs of earlier calls, by position.
        random_states: State of the random generators before each microbatch, replayed in the recompute.
        graphs: The autograd graph of each microbatch, if the layer's activations are kept and nothing is recomputed.
        kept: The part of an eager layer that each microbatch keeps for its recompute.
        output_gradients: Gradient of each output so far; None before the first part arrives.
    """

    layer: int
    arguments: Arguments
    trained: list[int]
    sources: dict[int, Source]
    random_states: list[Any] = field(default_factory=list)
    graphs: list[ChunkGraph] = field(default_factory=list)
    kept: list[KeptResults] = field(default_factory=list)
    output_gradients: list[torch.Tensor | None] = field(default_factory=list)
    has_backward: bool = True

    def forget(self) -> None:
        """Release everything the call holds: its backward is done."""
        self.arguments.leaves, self.output_gradients, self.random_states = [], [], []
        self.graphs, self.kept = [], []

    def receive(self, output: int, gradient: torch.Tensor) -> None:
        """Add to the gradient of one of the call's outputs."""
        held = self.output_gradients[output]
        self.output_gradients[output] = gradient if held is None else held + gradient


class Tape:
    """Layer calls of one accumulation step, in order. See the notes at the top."""

    def __init__(self) -> None:
        self.calls: list[LayerCall] = []
        self._made: dict[int, tuple[weakref.ref[torch.Tensor], Source]] = {}

    def record(self, layer: int, arguments: Arguments, has_backward: bool = True) -> LayerCall:
        """Add a call that is about to run."""
        trained = [
            i for i, leaf in enumerate(arguments.leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        sources = {}
        for i in trained:
            reference, source = self._made.get(id(arguments.leaves[i]), (None, None))
            if reference is not None and reference() is arguments.leaves[i] and source is not None:
                sources[i] = source
        call = LayerCall(layer, arguments, trained, sources, has_backward=has_backward)
        self.calls.append(call)
        return call

    def emit(self, call: LayerCall, outputs: list[Any]) -> list[Any]:
        """Turn the floating-point outputs of a call into autograd leaves, for HF's code to continue with.

        A call without a backward is forgotten.
        """
        if not call.has_backward:
            call.forget()
            return outputs
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
        """Send the gradients of a call's inputs (by argument position) to the calls that made these inputs."""
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

    def drop_inner_inputs(self, segment: int) -> None:
        """Drop the inputs that the backward recomputes: those of all but the first layer of each segment."""
        for number, call in enumerate(self.calls):
            if number % segment:
                for position, source in call.sources.items():
                    if source.call == number - 1:
                        call.arguments.leaves[position] = None


@dataclass(frozen=True)
class _Place:
    """A saved tensor that lies inside one of the moving tensors, maybe with another type (complex numbers, for example).

    `offset` is counted from the home's first element, in elements of the saved tensor's type.
    """

    home: str
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class MovingTensors:
    """Tensors of one layer call that have different addresses in forward and backward.

    Args:
        homes: The tensors during the forward, by name; contiguous.
    """

    def __init__(self, homes: Mapping[str, torch.Tensor]):
        self._ranges = [(name, t.data_ptr(), t.data_ptr() + t.nbytes) for name, t in homes.items()]
        self.now: Mapping[str, torch.Tensor] = {}
        """The same tensors during the backward; set right before it."""

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """Autograd graphs built inside do not save these tensors."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Place:
        address = tensor.data_ptr()
        for name, start, end in self._ranges:
            if start <= address < end:
                assert (address - start) % tensor.itemsize == 0, (name, address - start, tensor.dtype)
                offset = (address - start) // tensor.itemsize
                return _Place(name, tensor.dtype, tensor.shape, tensor.stride(), offset)
        return tensor

    def _unpack(self, saved: torch.Tensor | _Place) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        assert saved.home in self.now, f"{saved.home}: not back yet"
        home = self.now[saved.home]
        if home.dtype != saved.dtype:
            home = home.view(-1).view(saved.dtype)
        return torch.as_strided(home, saved.size, saved.stride, saved.offset + home.storage_offset())


class _Entrance(torch.autograd.Function):
    """The identity, with a node that holds nothing. Its backward never runs: the gradient is taken before it."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AssertionError("the gradient of a graph's input is taken before its entrance")


def entrance(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as input of a graph that does not hold it. See [Note: what a waiting graph holds]."""
    return _Entrance.apply(torch.empty(0, device=tensor.device, requires_grad=True), tensor)  # type: ignore[return-value]
