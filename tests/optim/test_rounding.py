"""Moments that are rounded at random: by the seed, the step and the element alone; those in bf16 without bias."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from megatrain.errors import UserError
from megatrain.host_memory.layout import BLOCK_ELEMENTS
from megatrain.optim import rounding
from megatrain.optim.adamw import AdamW, Moments
from megatrain.optim.rounding import noise, round_, step_key, unit_key
from megatrain.optim.spec import Segment
from moment_planes import N, assert_same_bits, bits, gradient, make_planes, train

ROUNDED = pytest.mark.parametrize("moments", ["bf16", "int8"])


@ROUNDED
@pytest.mark.parametrize("split", [True, False], ids=["split", "whole"])
def test_kernel_and_torch_reference_give_the_same_bits(moments: Moments, split: bool) -> None:
    planes, expected = make_planes(moments, split), make_planes(moments, split)
    optim = AdamW(moments=moments, seed=5)
    train(moments, planes, 4)
    for step in range(1, 5):
        segments, coefficients = [Segment(0, N, 0.1, 1.0)], optim.coefficients(step, 1e-3, 0.5)
        optim.update_unit_(expected, gradient(moments, step), segments, coefficients)
    assert_same_bits(planes, expected)
    assert planes.states["v"].count_nonzero() > N // 2
    if moments == "int8":
        assert planes.states["m"].min() < -100 and planes.states["m"].max() > 100


@pytest.mark.gpu
@pytest.mark.parametrize("split", [True, False], ids=["split", "whole"])
def test_the_gpu_kernel_gives_the_same_bits(split: bool) -> None:
    planes, resident = (make_planes("bf16", split, 7, N - 7, device=device) for device in ("cpu", "cuda"))
    train("bf16", planes, 4)
    optim = AdamW(moments="bf16", seed=5)
    for step in range(1, 5):
        grad, coefficients = gradient("bf16", step, 7, N - 7).cuda(), optim.coefficients(step, 1e-3, 0.5)
        optim.update_on_device(resident, grad, [Segment(0, N - 7, 0.1, 1.0)], coefficients)
    assert_same_bits(resident, planes)


@pytest.mark.parametrize(("moments", "piece", "border"), [("bf16", 300_007, 100), ("int8", 4096 * 21, 256)])
def test_bits_do_not_depend_on_pieces_or_shards(moments: Moments, piece: int, border: int) -> None:
    whole, pieces = make_planes(moments, True), make_planes(moments, True)
    train(moments, whole, 4)
    train(moments, pieces, 4, piece=piece)
    assert_same_bits(pieces, whole)
    cut = (1 << rounding.BLOCK_BITS) - border
    for start, numel in ((0, cut), (cut, N - cut)):
        shard = make_planes(moments, True, start, numel)
        train(moments, shard, 4)
        for kind, plane in shard.state().items():
            step = BLOCK_ELEMENTS if kind.endswith(".scale") else 1
            wanted = whole.state()[kind][start // step :][: plane.numel()]
            assert torch.equal(plane.view(torch.uint8), wanted.view(torch.uint8)), (kind, start)


@ROUNDED
def test_a_resumed_run_continues_with_the_same_bits_and_another_seed_with_others(moments: Moments) -> None:
    whole, resumed, other = (make_planes(moments, True) for _ in range(3))
    train(moments, whole, 4)
    train(moments, resumed, 2)
    train(moments, resumed, 2, first=3)
    assert_same_bits(resumed, whole)
    train(moments, other, 4, seed=6)
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
    planes = make_planes("bf16", False, 0, 512)
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
