"""The hi/lo split is exact for every fp32 bit pattern, and hi is the master rounded to nearest."""

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatrain.host_memory.store import join, split_

EDGES = [
    0x00000000,  # +0
    0x80000000,  # -0
    0x00000001,  # smallest subnormal
    0x807FFFFF,  # largest negative subnormal
    0x00800000,  # smallest normal
    0x7F7FFFFF,  # largest finite: hi rounds up to infinity
    0xFF7FFFFF,
    0x7F800000,  # infinities
    0xFF800000,
    0x3F808000,  # ties
    0xBF818000,
    0x3F807FFF,  # next to a tie
    0x7FC00000,  # quiet NaN
    0x7F800001,  # signalling NaN
    0x7FFFFFFF,  # NaN whose hi wraps
    0xFFFFFFFF,
]


def from_bits(bits: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(bits, dtype=np.uint32).view(np.float32))


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    hi, lo = torch.empty(master.shape, dtype=torch.bfloat16), torch.empty(master.shape, dtype=torch.int16)
    split_(master, hi, lo)
    return hi, lo


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64))
@example(EDGES)
def test_split_and_join_give_back_every_bit_pattern(bits: list[int]) -> None:
    master = from_bits(bits)
    assert torch.equal(join(*split(master)).view(torch.int32), master.view(torch.int32))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64))
@example(EDGES)
def test_hi_is_the_master_rounded_to_nearest_except_at_ties(bits: list[int]) -> None:
    master = from_bits(bits)
    hi, _ = split(master)
    low_half = torch.from_numpy(np.array(bits, dtype=np.uint32)).to(torch.int64) & 0xFFFF
    ordinary = ~master.isnan() & (low_half != 0x8000)
    assert torch.equal(hi.view(torch.int16)[ordinary], master.to(torch.bfloat16).view(torch.int16)[ordinary])


def test_ties_go_away_from_zero() -> None:
    hi, lo = split(from_bits([0x3F808000, 0xBF808000, 0x3F818000]))
    assert hi.view(torch.int16).tolist() == [0x3F81, 0xBF81 - 0x10000, 0x3F82]
    assert lo.tolist() == [-0x8000] * 3


def test_every_low_half_is_restored_across_the_exponent_range() -> None:
    low_half = torch.arange(0x10000, dtype=torch.int64)
    for high_half in (0x0000, 0x007F, 0x3F80, 0x7F7F, 0x7F80, 0x8000, 0xBFFF, 0xFF80):
        master = from_bits(((high_half << 16) + low_half).tolist())
        assert torch.equal(join(*split(master)).view(torch.int32), master.view(torch.int32)), hex(high_half)


def test_shapes_longer_than_a_block_and_given_outputs(monkeypatch) -> None:
    monkeypatch.setattr("megatrain.host_memory.store._BLOCK_NUMEL", 100)
    master_AB = torch.randn(37, 11)
    hi_AB, lo_AB = split(master_AB)
    out_AB = torch.full((37, 11), float("nan"))
    assert join(hi_AB, lo_AB, out=out_AB) is out_AB
    assert torch.equal(out_AB, master_AB)
    assert join(hi_AB, lo_AB).shape == (37, 11)
    assert join(hi_AB[:0], lo_AB[:0]).shape == (0, 11)
