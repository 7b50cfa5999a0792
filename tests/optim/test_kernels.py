"""The compiled kernels give the same bits as one torch call at a time, and AdamW's numbers."""

import platform
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatrain.host_memory.layout import FlatLayout
from megatrain.host_memory.store import UnitPlanes, join, split_
from megatrain.optim import kernels
from megatrain.optim.adamw import AdamW
from megatrain.optim.spec import Segment, StepCoefficients

F32_MAX = torch.finfo(torch.float32).max
N = 5003  # odd: vector loops and their scalar remainders both run


def make_planes(master_N: Tensor, split: bool) -> UnitPlanes:
    layout, states = FlatLayout((), N), {"m": torch.zeros(N), "v": torch.zeros(N)}
    if not split:
        return UnitPlanes("layer.0", layout, master_N.clone(), None, states)
    hi, lo = torch.empty(master_N.shape, dtype=torch.bfloat16), torch.empty(master_N.shape, dtype=torch.int16)
    split_(master_N, hi, lo)
    return UnitPlanes("layer.0", layout, hi, lo, states)


def moved(planes: UnitPlanes, device: str) -> UnitPlanes:
    return UnitPlanes.of("layer.0", planes.layout, {kind: plane.to(device) for kind, plane in planes.state().items()})


def master_of(planes: UnitPlanes) -> Tensor:
    return planes.hi.clone() if planes.lo is None else join(planes.hi, planes.lo)


def run_kernel(
    planes: UnitPlanes, grad: Tensor, segments: list[Segment], coefficients: StepCoefficients, piece: int = N
) -> None:
    kernel = AdamW().host_kernel(planes, grad)
    for segment in segments:
        for start in range(segment.start, segment.end, piece):
            kernel(start, min(start + piece, segment.end), coefficients.scalars(segment))


def assert_same_bits(planes: UnitPlanes, expected: UnitPlanes) -> None:
    assert planes.state().keys() == expected.state().keys()
    for name, plane in expected.state().items():
        integers = torch.int16 if plane.element_size() == 2 else torch.int32
        assert torch.equal(planes.state()[name].view(integers), plane.view(integers)), name


def wide_range(seed: int, scale: float = 1.0) -> Tensor:
    """(N,) fp32 over many magnitudes, with zeros, subnormals and both signs."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(N, generator=generator) * 10.0 ** torch.randint(-30, 3, (N,), generator=generator) * scale
    values[::97] = 0.0
    values[5::101] = 1e-42
    return values


@pytest.mark.parametrize("split", [True, False], ids=["split", "whole"])
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_kernel_and_torch_reference_give_the_same_bits(split: bool, grad_dtype: torch.dtype) -> None:
    segments = [Segment(0, 1000, 0.1, 1.0), Segment(1000, 1007, 0.0, 0.5), Segment(1007, N, 0.01, 1.0)]
    planes, expected = make_planes(wide_range(0), split), make_planes(wide_range(0), split)
    for step in range(1, 6):
        grad = wide_range(step).to(grad_dtype)
        coefficients = AdamW(eps=1e-6).coefficients(step, learning_rate=1e-3 / step, gradient_scale=0.37)
        run_kernel(planes, grad, segments, coefficients)
        AdamW().update_unit_(expected, grad, segments, coefficients)
        assert_same_bits(planes, expected)
    assert planes.states["m"].abs().max() > 0


def test_bits_do_not_depend_on_the_cut_into_pieces() -> None:
    whole, cut = make_planes(wide_range(1), True), make_planes(wide_range(1), True)
    for step in (1, 2, 3):
        grad, coefficients = wide_range(10 + step).bfloat16(), AdamW().coefficients(step)
        run_kernel(whole, grad, [Segment(0, N, 0.1, 1.0)], coefficients)
        run_kernel(cut, grad, [Segment(0, N, 0.1, 1.0)], coefficients, piece=37)
    assert_same_bits(cut, whole)


def test_the_reference_works_in_blocks_of_bounded_size(monkeypatch) -> None:
    whole, blocks = make_planes(wide_range(1), True), make_planes(wide_range(1), True)
    arguments: Any = (wide_range(2), [Segment(3, N, 0.1, 1.0)], AdamW().coefficients(1))
    AdamW().update_unit_(whole, *arguments)
    monkeypatch.setattr("megatrain.optim.spec.BLOCK_NUMEL", 100)
    AdamW().update_unit_(blocks, *arguments)
    assert_same_bits(blocks, whole)


@pytest.mark.gpu
@pytest.mark.parametrize("split", [True, False], ids=["split", "whole"])
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_kernel_on_the_host_and_reference_on_the_gpu_give_the_same_bits(split: bool, grad_dtype: torch.dtype) -> None:
    segments = [Segment(0, N, 0.1, 1.0)]
    planes = make_planes(wide_range(0), split)
    resident = moved(planes, "cuda")
    for step in range(1, 6):
        grad = wide_range(step).to(grad_dtype)
        coefficients = AdamW().coefficients(step, learning_rate=1e-3, gradient_scale=0.37)
        run_kernel(planes, grad, segments, coefficients)
        AdamW().update_unit_(resident, grad.cuda(), segments, coefficients)
    assert_same_bits(planes, moved(resident, "cpu"))


@pytest.mark.parametrize("split", [True, False], ids=["split", "whole"])
def test_five_steps_follow_torch_adamw_with_decay_and_a_changing_rate(split: bool) -> None:
    master = torch.randn(N, generator=torch.Generator().manual_seed(0))
    planes = make_planes(master, split)
    decayed, plain = master[:3000].clone().requires_grad_(), master[3000:].clone().requires_grad_()
    theirs = torch.optim.AdamW(
        [{"params": [decayed], "weight_decay": 0.1}, {"params": [plain], "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        foreach=False,
    )
    segments = [Segment(0, 3000, 0.1, 1.0), Segment(3000, N, 0.0, 1.0)]
    for step in range(1, 6):
        grad = torch.randn(N, generator=torch.Generator().manual_seed(step))
        learning_rate = 1e-2 / step
        for group in theirs.param_groups:
            group["lr"] = learning_rate
        decayed.grad, plain.grad = grad[:3000] * 0.5, grad[3000:] * 0.5
        theirs.step()
        optim = AdamW(betas=(0.9, 0.95))
        run_kernel(planes, grad, segments, optim.coefficients(step, learning_rate, gradient_scale=0.5))
    torch.testing.assert_close(master_of(planes), torch.cat([decayed, plain]).detach(), rtol=1e-6, atol=1e-9)
    for name, plane in (("exp_avg", planes.states["m"]), ("exp_avg_sq", planes.states["v"])):
        expected = torch.cat([theirs.state[decayed][name], theirs.state[plain][name]])
        torch.testing.assert_close(plane, expected, rtol=1e-6, atol=5e-8)  # absolute: where gradients cancel in m


def test_a_rate_of_1e_6_moves_split_weights_as_fp32_does_where_bf16_stands_still() -> None:
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(N, generator=generator) * 0.02
    planes = make_planes(master, split=True)
    fp32, bf16 = master.clone().requires_grad_(), master.bfloat16().requires_grad_()
    theirs = [torch.optim.AdamW([weight], lr=1e-6, weight_decay=0.0, foreach=False) for weight in (fp32, bf16)]
    for step in range(1, 101):
        grad = torch.randn(N, generator=generator).add_(1.0).bfloat16()
        fp32.grad, bf16.grad = grad.float(), grad
        for optimizer in theirs:
            optimizer.step()
        run_kernel(planes, grad, [Segment(0, N, 0.0, 1.0)], AdamW(learning_rate=1e-6).coefficients(step))
    change, expected = master_of(planes) - master, fp32.detach() - master
    assert expected.abs().median() > 2e-5
    torch.testing.assert_close(master_of(planes), fp32.detach(), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(change, expected, rtol=1e-3, atol=2e-8)
    assert (bf16.detach() == master.bfloat16()).float().mean() > 0.5, "the contrast: bf16 weights mostly stand still"


def test_elements_without_gradient_and_weight_stay_zero() -> None:
    planes = make_planes(torch.zeros(N), split=True)
    for step in range(1, 4):
        run_kernel(planes, torch.zeros(N), [Segment(0, N, 0.1, 1.0)], AdamW(learning_rate=1.0).coefficients(step))
    assert all(not plane.any() for plane in planes.state().values())


def test_elements_outside_the_segment_keep_every_byte() -> None:
    planes, before = make_planes(wide_range(3), True), make_planes(wide_range(3), True)
    run_kernel(planes, wide_range(4), [Segment(100, 200, 0.1, 1.0)], AdamW().coefficients(1))
    for name, plane in planes.state().items():
        old = before.state()[name]
        assert torch.equal(plane[:100], old[:100])
        assert torch.equal(plane[200:], old[200:])
        assert not torch.equal(plane[100:200], old[100:200])


def test_a_first_moment_without_gradient_ends_at_zero_not_at_a_subnormal() -> None:
    planes = make_planes(torch.ones(N), split=False)
    planes.states["m"].fill_(1e-37)
    for step in range(1, 60):
        run_kernel(planes, torch.zeros(N), [Segment(0, N, 0.0, 1.0)], AdamW().coefficients(step))
    assert not planes.states["m"].any()


def test_a_first_moment_that_is_nan_is_not_hidden() -> None:
    planes = make_planes(torch.ones(N), split=False)
    run_kernel(planes, torch.full((N,), float("nan")), [Segment(0, N, 0.0, 1.0)], AdamW().coefficients(1))
    assert planes.states["m"].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_gradients_add_up_in_fp32_and_the_first_overwrites(dtype: torch.dtype) -> None:
    slabs = [wide_range(seed).to(dtype) for seed in range(3)]
    plane = torch.full((N,), float("nan"))
    kernels.set_gradient(kernels.bits_view(plane), kernels.bits_view(slabs[0]), 0, N)
    for slab in slabs[1:]:
        kernels.add_gradient(kernels.bits_view(plane), kernels.bits_view(slab), 0, 2000)
        kernels.add_gradient(kernels.bits_view(plane), kernels.bits_view(slab), 2000, N)
    assert torch.equal(plane, slabs[0].float() + slabs[1].float() + slabs[2].float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("span", [(0, N), (1, 2), (7, 7 + 512), (3, 3 + 1024 + 5), (5, 5)])
def test_the_sum_of_squares_is_that_of_fp64(dtype: torch.dtype, span: tuple[int, int]) -> None:
    grad = wide_range(0).to(dtype)
    expected = grad[slice(*span)].double().square().sum().item()
    assert kernels.sum_of_squares(kernels.bits_view(grad), *span) == pytest.approx(expected, rel=1e-13, abs=0.0)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, N - 1), st.sampled_from([np.inf, -np.inf, np.nan, F32_MAX, -F32_MAX, 1e-45]), st.booleans())
def test_the_sum_of_squares_is_finite_exactly_if_every_gradient_is(index: int, value: float, bf16: bool) -> None:
    grad = torch.full((N,), 3.3e38)
    grad[index] = value
    if bf16:
        grad = grad.bfloat16()
    total = kernels.sum_of_squares(kernels.bits_view(grad), 0, N)
    assert np.isfinite(total) == bool(grad.isfinite().all())


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="reads x86 assembly")
def test_the_update_vectorises_and_does_not_fuse() -> None:
    for split in (True, False):
        for grad in (torch.zeros(N), torch.zeros(N).bfloat16()):
            run_kernel(make_planes(torch.zeros(N), split), grad, [Segment(0, N, 0.0, 1.0)], AdamW().coefficients(1))
    for kernel in (kernels.adamw_split, kernels.adamw_whole):
        assembly = kernel.inspect_asm()
        assert len(assembly) >= 2
        for signature, text in assembly.items():
            assert re.search(r"\bv?sqrtps\b", text), f"{kernel.__name__}{signature} is not vectorised"
            assert re.search(r"\bv?divps\b", text), f"{kernel.__name__}{signature} is not vectorised"
            assert not re.search(r"\bvfn?m(add|sub)", text), f"{kernel.__name__}{signature} fuses"
