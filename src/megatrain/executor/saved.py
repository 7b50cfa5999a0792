"""Keeping a layer's activations without keeping its weights.

[Note: activations without weights]
Autograd saves for the backward whatever it needs: activations, and the weights too. But the weights lie in a slot that the next
layers overwrite. So while a layer runs, a pack hook replaces every saved tensor inside its weights by a note of (size, stride,
offset), and the unpack hook reads it from wherever the same layer's weights are *then*: fetched again, maybe into another slot.
Works for eager and for compiled code, since both save through the same hooks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class _Place:
    """A saved tensor that lies inside the weights."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class MovingWeights:
    """The flat weights of one layer call, at different addresses in forward and backward.

    Args:
        flat: (numel,) weights during the forward.
    """

    def __init__(self, flat: torch.Tensor):
        self._start = flat.data_ptr()
        self._end = self._start + flat.nbytes
        self._itemsize = flat.itemsize
        self.now: torch.Tensor | None = None
        """Where the weights are during the backward; set right before it."""

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """Autograd graphs made inside keep notes instead of weights."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Place:
        address = tensor.data_ptr()
        if not self._start <= address < self._end or tensor.itemsize != self._itemsize:
            return tensor
        return _Place(tensor.shape, tensor.stride(), (address - self._start) // self._itemsize)

    def _unpack(self, saved: torch.Tensor | _Place) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        assert self.now is not None, "the weights are not back yet"
        return torch.as_strided(self.now, saved.size, saved.stride, saved.offset + self.now.storage_offset())
