"""Moments in 8-bit blocks: the kernel has the reference's bits, rounding has no bias, and small second moments stay positive."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatrain.host_memory.layout import BLOCK_ELEMENTS, FlatLayout
from megatrain.host_memory.store import UnitPlanes, split_
from megatrain.optim import rounding
from megatrain.optim.adamw import AdamW
from megatrain.optim.blocks import decode, encode
from megatrain.optim.rounding import noise, step_key
from megatrain.optim.spec import Segment

N = (1 << rounding.BLOCK_BITS) + 40 * BLOCK_ELEMENTS + 77
BLOCKS = -(-N // BLOCK_ELEMENTS)
MAGNITUDES = 10.0 ** torch.linspace(-12, 3, N)


def make_planes(split: bool, start: int = 0, numel: int = N) -> UnitPlanes:
    master = torch.randn(N, generator=torch.Generator().manual_seed(0))[start : start + numel]
    planes = {"hi": master.clone()}
    if split:
        planes = {"hi": torch.empty(numel, dtype=torch.bfloat16), "lo": torch.empty(numel, dtype=torch.int16)}
        split_(master, planes["hi"], planes["lo"])
    for kind, dtype in AdamW(moments="int8").state_dtypes.items():
        planes[kind] = torch.zeros(-(-numel // BLOCK_ELEMENTS) if kind.endswith(".scale") else numel, dtype=dtype)
    return UnitPlanes.of("layer.3", FlatLayout((), N), planes, start=start)


def gradient(step: int, start: int = 0, numel: int = N) -> Tensor:
    drawn = torch.randn(N, generator=torch.Generator().manual_seed(step)) * MAGNITUDES
    drawn[3 * BLOCK_ELEMENTS : 5 * BLOCK_ELEMENTS] = 0.0
    return drawn[start : start + numel]


def train(planes: UnitPlanes, steps: int, piece: int = N, seed: int = 5, first: int = 1) -> None:
    optim = AdamW(moments="int8", seed=seed)
    for step in range(first, first + steps):
        grad = gradient(step, planes.start, planes.numel)
        kernel, coefficients = optim.host_kernel(planes, grad), optim.coefficients(step, 1e-3, 0.5)
        scalars = coefficients.scalars(Segment(0, planes.numel, 0.1, 1.0))
        for start in range(0, planes.numel, piece):
            kernel(start, min(start + piece, planes.numel), scalars)


def assert_same_bits(one: UnitPlanes, other: UnitPlanes) -> None:
    for kind, plane in one.state().items():
        assert torch.equal(plane.view(torch.uint8), other.state()[kind].view(torch.uint8)), kind


@pytest.mark.parametrize("split", [True, False], ids=["split", "whole"])
def test_kernel_and_torch_reference_give_the_same_bits(split: bool) -> None:
    planes, expected, optim = make_planes(split), make_planes(split), AdamW(moments="int8", seed=5)
    train(planes, 4)
    for step in range(1, 5):
        segments, coefficients = [Segment(0, N, 0.1, 1.0)], optim.coefficients(step, 1e-3, 0.5)
        optim.update_unit_(expected, gradient(step), segments, coefficients)
    assert_same_bits(planes, expected)
    assert planes.states["v"].count_nonzero() > N // 2
    assert planes.states["m"].min() < -100 and planes.states["m"].max() > 100


def test_bits_do_not_depend_on_pieces_or_shards_and_a_resume_continues_them() -> None:
    whole, pieces, resumed, other = (make_planes(True) for _ in range(4))
    train(whole, 4)
    train(pieces, 4, piece=4096 * 21)
    assert_same_bits(pieces, whole)
    train(resumed, 2)
    train(resumed, 2, first=3)
    assert_same_bits(resumed, whole)
    train(other, 4, seed=6)
    assert not torch.equal(other.states["m"], whole.states["m"])
    cut = (1 << rounding.BLOCK_BITS) - 256
    for start, numel in ((0, cut), (cut, N - cut)):
        shard = make_planes(True, start, numel)
        train(shard, 4)
        for kind, plane in shard.state().items():
            step = BLOCK_ELEMENTS if kind.endswith(".scale") else 1
            wanted = whole.state()[kind][start // step :][: plane.numel()]
            assert torch.equal(plane.view(torch.uint8), wanted.view(torch.uint8)), (kind, start)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_rounding_has_no_bias(dtype: torch.dtype) -> None:
    values = torch.linspace(0.02, 1.0, BLOCK_ELEMENTS)
    values = values * (1 - 2 * (torch.arange(BLOCK_ELEMENTS) % 2)) if dtype == torch.int8 else values
    count = 1 << 13
    codes, scales = torch.empty(BLOCK_ELEMENTS * count, dtype=dtype), torch.empty(count)
    encode(values.repeat(count), codes, scales, noise(step_key(0, 1), 0, codes.numel()) & 0xFFFF)
    mean = decode(codes, scales).double().view(count, -1).mean(0)
    step = 4 * values.abs() / 64  # about the distance of two codes there
    assert ((mean - values).abs() <= 5 * step / count**0.5).all()
    assert (scales == 1.0).all() and abs(float(mean[-1])) == pytest.approx(1.0, abs=1e-6)


def test_a_positive_second_moment_never_becomes_zero() -> None:
    values = torch.full((BLOCK_ELEMENTS * 100,), 1e-30)
    values[::BLOCK_ELEMENTS] = 1.0
    values[1::BLOCK_ELEMENTS] = 0.0
    codes, scales = torch.empty(values.numel(), dtype=torch.uint8), torch.empty(100)
    encode(values, codes, scales, noise(step_key(0, 1), 0, values.numel()) & 0xFFFF)
    found = decode(codes, scales).view(100, -1)
    assert (found[:, 1] == 0.0).all() and (found[:, 2:] > 0.0).all()
    smallest = decode(torch.tensor([1], dtype=torch.int8), torch.ones(1))
    assert (found[:, 2:].sqrt() >= 0.99 * smallest).all(), "its root is no smaller than the smallest first moment"


def test_a_second_moment_moves_where_rounding_to_nearest_stalls() -> None:
    start, gradients = 0.9, torch.ones(512)
    planes = UnitPlanes.of("unit", FlatLayout((), 512), {kind: p[: 512 if p.numel() == N else 4] for kind, p in
                           make_planes(False).state().items()})  # fmt: skip
    peak = torch.full((512,), start)
    peak[::BLOCK_ELEMENTS] = 1.0  # the scale stays
    encode(peak, planes.states["v"], planes.states["v.scale"])
    nearest, exact = planes.states["v"].clone(), decode(planes.states["v"], planes.states["v.scale"])
    optim, scales = AdamW(moments="int8"), planes.states["v.scale"].clone()
    for step in range(1, 301):
        scalars = optim.coefficients(step, 0.0).scalars(Segment(0, 512, 0.0, 1.0))
        optim.host_kernel(planes, gradients)(0, 512, scalars)
        exact = exact * 0.999 + 0.001
        encode(decode(nearest, scales) * 0.999 + 0.001, nearest, scales)
    moved = exact.mean() - start
    assert decode(nearest, scales)[1::BLOCK_ELEMENTS].mean() - start < 0.2 * moved, "it has hardly moved"
    assert decode(planes.states["v"], planes.states["v.scale"]).mean() == pytest.approx(float(exact.mean()), abs=5e-3)


def test_bytes_count_the_scales() -> None:
    assert AdamW(moments="int8").bytes_per_parameter == 6 + 8 / BLOCK_ELEMENTS
