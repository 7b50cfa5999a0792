"""A unit's planes with moments that are rounded at random, and steps of the host kernel on them."""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.host_memory.layout import BLOCK_ELEMENTS, FlatLayout
from megatrain.host_memory.store import UnitPlanes, split_
from megatrain.optim import rounding
from megatrain.optim.adamw import AdamW, Moments
from megatrain.optim.spec import Segment

N = (1 << rounding.BLOCK_BITS) + 40 * BLOCK_ELEMENTS + 77
"""More than a block of random bits, and odd."""
SPARE = 9
MAGNITUDES = 10.0 ** torch.linspace(-12, 3, N + SPARE)


def make_planes(
    moments: Moments, split: bool, start: int = 0, numel: int = N, name: str = "layer.3", device: str = "cpu"
) -> UnitPlanes:
    """The elements `start` to `start + numel` of a unit."""
    master = torch.randn(N + SPARE, generator=torch.Generator().manual_seed(0))[start : start + numel]
    planes = {"hi": master.clone()}
    if split:
        planes = {"hi": torch.empty(numel, dtype=torch.bfloat16), "lo": torch.empty(numel, dtype=torch.int16)}
        split_(master, planes["hi"], planes["lo"])
    for kind, dtype in AdamW(moments=moments).state_dtypes.items():
        planes[kind] = torch.zeros(-(-numel // BLOCK_ELEMENTS) if kind.endswith(".scale") else numel, dtype=dtype)
    placed = {kind: plane.to(device) for kind, plane in planes.items()}
    return UnitPlanes.of(name, FlatLayout((), N + SPARE), placed, start=start)


def gradient(moments: Moments, step: int, start: int = 0, numel: int = N) -> Tensor:
    """Of equal size everywhere; for 8-bit blocks of many sizes, and two blocks without any."""
    drawn = torch.randn(N + SPARE, generator=torch.Generator().manual_seed(step))
    drawn *= MAGNITUDES if moments == "int8" else 1e-3
    if moments == "int8":
        drawn[3 * BLOCK_ELEMENTS : 5 * BLOCK_ELEMENTS] = 0.0
    return drawn[start : start + numel]


def train(moments: Moments, planes: UnitPlanes, steps: int, seed: int = 5, piece: int = N, first: int = 1) -> None:
    """Steps of the host kernel, `piece` elements at a time."""
    optim = AdamW(moments=moments, seed=seed)
    for step in range(first, first + steps):
        grad = gradient(moments, step, planes.start, planes.numel)
        kernel, coefficients = optim.host_kernel(planes, grad), optim.coefficients(step, 1e-3, 0.5)
        scalars = coefficients.scalars(Segment(0, planes.numel, 0.1, 1.0))
        for start in range(0, planes.numel, piece):
            kernel(start, min(start + piece, planes.numel), scalars)


def bits(planes: UnitPlanes) -> dict[str, Tensor]:
    return {kind: plane.cpu().view(torch.uint8) for kind, plane in planes.state().items()}


def assert_same_bits(one: UnitPlanes, other: UnitPlanes) -> None:
    found, expected = bits(one), bits(other)
    assert found.keys() == expected.keys()
    for kind, plane in found.items():
        assert torch.equal(plane, expected[kind]), kind
