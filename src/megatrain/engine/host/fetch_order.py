"""The order in which a step visits the layers. Known before the step starts, so that prefetching follows a list."""

from __future__ import annotations


def forward_fetch_order(layers: int) -> list[int]:
    """An evaluation: each layer once, in order."""
    return list(range(layers))


def backward_fetch_order(layers: int, segment: int) -> list[int]:
    """The backward: segments from last to first; each is first recomputed up to the input of its last layer.

    With `segment` 1 every layer's input was kept and the list is simply reversed. With K > 1 only the input of every
    K-th layer was kept: the others come from running the segment's first K - 1 layers again.
    """
    visits: list[int] = []
    for start in reversed(range(0, layers, segment)):
        end = min(start + segment, layers)
        visits += range(start, end - 1)
        visits += reversed(range(start, end))
    return visits


def training_fetch_order(layers: int, segment: int, accumulation_steps: int) -> list[int]:
    """A training step: forward and backward, once per accumulation window."""
    return (forward_fetch_order(layers) + backward_fetch_order(layers, segment)) * accumulation_steps
