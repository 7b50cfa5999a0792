"""Moments in 8-bit blocks: rounding has no bias, and small second moments stay positive. Their bits: test_rounding.py."""

from __future__ import annotations

import pytest
import torch

from megatrain.host_memory.layout import BLOCK_ELEMENTS
from megatrain.optim.adamw import AdamW
from megatrain.optim.blocks import decode, encode
from megatrain.optim.rounding import noise, step_key
from megatrain.optim.spec import Segment
from moment_planes import make_planes


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
    planes = make_planes("int8", False, 0, 512)
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
