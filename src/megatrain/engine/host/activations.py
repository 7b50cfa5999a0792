"""Keeping a layer's activations without its weights, and without its input if that is offloaded.

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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch


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
