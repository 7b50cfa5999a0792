"""Moments in bf16: rounded at random without bias, by the seed, the step and the element alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.errors import UserError
from megatrain.host_memory.layout import FlatLayout
from megatrain.host_memory.store import UnitPlanes, split_
from megatrain.optim import rounding
from megatrain.optim.adamw import AdamW
from megatrain.optim.rounding import noise, round_, step_key, unit_key
from megatrain.optim.spec import Segment

N = (1 << rounding.BLOCK_BITS) + 4999
"""More than a block, and odd."""


def make_planes(split: bool, start: int = 0, numel: int = N, name: str = "layer.3", device: str = "cpu") -> UnitPlanes:
    master = torch.randn(N + 9, generator=torch.Generator().manual_seed(0))[start : start + numel]
    planes: dict[str, Tensor] = {kind: torch.zeros(numel, dtype=torch.bfloat16) for kind in "mv"}
    if split:
        planes = {"hi": torch.empty(numel, dtype=torch.bfloat16), "lo": torch.empty(numel, dtype=torch.int16), **planes}
        split_(master, planes["hi"], planes["lo"])
    else:
        planes = {"hi": master.clone(), **planes}
    placed = {kind: plane.to(device) for kind, plane in planes.items()}
    return UnitPlanes.of(name, FlatLayout((), N + 9), placed, start=start)


def gradient(step: int, start: int = 0, numel: int = N) -> Tensor:
    return torch.randn(N + 9, generator=torch.Generator().manual_seed(step))[start : start + numel] * 1e-3


def train(planes: UnitPlanes, steps: int, seed: int = 5, piece: int = N, first: int = 1) -> None:
    optim = AdamW(moments="bf16", seed=seed)
    for step in range(first, first + steps):
        grad = gradient(step, planes.start, planes.numel)
        kernel, coefficients = optim.host_kernel(planes, grad), optim.coefficients(step, 1e-3, 0.5)
        scalars = coefficients.scalars(Segment(0, planes.numel, 0.1, 1.0))
        for start in range(0, planes.numel, piece):
            kernel(start, min(start + piece, planes.numel), scalars)


def bits(planes: UnitPlanes) -> dict[str, Tensor]:
    integers = {2: torch.int16, 4: torch.int32}
    return {kind: plane.cpu().view(integers[plane.element_size()]) for kind, plane in planes.state().items()}


def assert_same_bits(one: UnitPlanes, other: UnitPlanes) -> None:
    for (kind, plane), expected in zip(bits(one).items(), bits(other).values(), strict=True):
        assert torch.equal(plane, expected), kind


@pytest.mark.parametrize("split", [True, False], ids=["split", "whole"])
def test_kernel_and_torch_reference_give_the_same_bits(split: bool) -> None:
    planes, expected, optim = make_planes(split), make_planes(split), AdamW(moments="bf16", seed=5)
    train(planes, 4)
    for step in range(1, 5):
        segments, coefficients = [Segment(0, N, 0.1, 1.0)], optim.coefficients(step, 1e-3, 0.5)
        optim.update_unit_(expected, gradient(step), segments, coefficients)
    assert_same_bits(planes, expected)
    assert planes.states["v"].count_nonzero() > N // 2


@pytest.mark.gpu
@pytest.mark.parametrize("split", [True, False], ids=["split", "whole"])
def test_the_gpu_kernel_gives_the_same_bits(split: bool) -> None:
    planes, resident, optim = make_planes(split, 7, N - 7), make_planes(split, 7, N - 7, device="cuda"), AdamW()
    train(planes, 4)
    optim = AdamW(moments="bf16", seed=5)
    for step in range(1, 5):
        grad, coefficients = gradient(step, 7, N - 7).cuda(), optim.coefficients(step, 1e-3, 0.5)
        optim.update_on_device(resident, grad, [Segment(0, N - 7, 0.1, 1.0)], coefficients)
    assert_same_bits(resident, planes)


def test_bits_do_not_depend_on_pieces_or_shards() -> None:
    whole, pieces = make_planes(True), make_planes(True)
    train(whole, 3)
    train(pieces, 3, piece=300_007)
    assert_same_bits(pieces, whole)
    cut = (1 << rounding.BLOCK_BITS) - 100
    for start, numel in ((0, cut), (cut, N - cut)):
        shard = make_planes(True, start, numel)
        train(shard, 3)
        for kind, plane in bits(shard).items():
            assert torch.equal(plane, bits(whole)[kind][start : start + numel]), (kind, start)


def test_a_resumed_run_continues_with_the_same_bits_and_another_seed_with_others() -> None:
    whole, resumed, other = make_planes(True), make_planes(True), make_planes(True)
    train(whole, 4)
    train(resumed, 2)
    train(resumed, 2, first=3)
    assert_same_bits(resumed, whole)
    train(other, 4, seed=6)
    assert not torch.equal(bits(other)["m"], bits(whole)["m"])


def test_random_bits_are_uniform_and_differ_by_step_unit_element_and_state() -> None:
    keys = [unit_key(step_key(3, step), unit) for step, unit in itertools.product((1, 2), ("layer.0", "layer.1"))]
    drawn = [noise(key, 0, 1 << 18) for key in keys]
    halves = [half.double() / 65536 for bits in drawn for half in (bits & 0xFFFF, bits >> 16)]
    correlations = torch.corrcoef(torch.stack([*halves, halves[0].roll(1)])) - torch.eye(len(halves) + 1)
    assert correlations.abs().max() < 0.01, "five standard deviations"
    for half in halves:
        counts = torch.histc(half, 64, 0.0, 1.0)
        assert (counts / counts.mean() - 1).abs().max() < 0.08, "five standard deviations"


def test_rounding_has_no_bias_and_keeps_what_bf16_holds() -> None:
    values = torch.tensor([1.0 + 1 / 1024, -3.0 - 1 / 100, 1e-20, -1.5, 0.0, torch.finfo(torch.bfloat16).max])
    count = 1 << 16
    total = torch.zeros(len(values), dtype=torch.float64)
    for step in range(count >> 10):
        out = torch.empty(len(values) << 10, dtype=torch.bfloat16)
        round_(values.repeat(1 << 10), noise(step_key(0, step), 0, len(out)) & 0xFFFF, out)
        total += out.double().view(-1, len(values)).sum(0)
    spacing = torch.tensor([2.0**-7, 2.0**-6, 2.0**-74, 0.0, 0.0, 0.0], dtype=torch.float64)
    assert ((total / count - values.double()).abs() <= 5 * spacing / count**0.5).all(), total / count - values


def test_a_second_moment_moves_where_rounding_to_nearest_stalls() -> None:
    """Constant gradients of 1: v goes from 0.5 to 1 in some thousands of steps of a thousandth of the difference."""
    start, gradients = 0.9, torch.ones(512)
    planes = make_planes(False, 0, 512)
    planes.states["v"].fill_(start)
    exact, nearest = torch.full((512,), start), torch.full((512,), start, dtype=torch.bfloat16)
    optim = AdamW(moments="bf16")
    for step in range(1, 301):
        scalars = optim.coefficients(step, 0.0).scalars(Segment(0, 512, 0.0, 1.0))
        optim.host_kernel(planes, gradients)(0, 512, scalars)
        exact = exact * 0.999 + 0.001
        nearest = (nearest.float() * 0.999 + 0.001).bfloat16()
    assert (nearest.float() - exact).abs().mean() > 0.02, "it has hardly moved"
    assert planes.states["v"].float().mean() == pytest.approx(float(exact.mean()), abs=2e-3)


def test_bytes_follow_the_storage_and_other_words_are_refused() -> None:
    assert (AdamW().bytes_per_parameter, AdamW(moments="bf16").bytes_per_parameter) == (12, 8)
    assert AdamW(moments="bf16").update_bytes(2) == 18
    wrong: Any = "fp8"
    with pytest.raises(UserError, match="moments = 'fp8' is not one of fp32, bf16, int8"):
        AdamW(moments=wrong)
    with pytest.raises(UserError, match="keeps moments in fp32"):
        AdamW(moments="bf16").torch_optimizer([], None)
