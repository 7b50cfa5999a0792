"""Stochastic rounding of optimizer states to bf16.

[Note: stochastic rounding]
A moment in bf16 has eight significant bits. With beta2 = 0.999, one step moves it by a thousandth, which is less than half of
its last bit: rounded to nearest, it would hardly ever move. Rounded up or down at random, with the probability that its distance
to either neighbour gives, it moves as it should on average.

The random bits are a pure function of (seed, step, unit, element): a hash of counters, no generator with a state. So they do not
depend on how a unit is cut into pieces or shards, on threads, or on the device, and a resumed run continues with the same bits.
The element is its index in the unit's flat range. Of the 32 bits of an element, the first state takes the low half, the second
the high half.

`noise` and `round_` are the slow references of the code in optim/kernels.py; unsigned 32-bit arithmetic is done in int64 there.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

BLOCK_BITS = 20
"""Elements of a block of 2^20 share one key, which is mixed with the index within the block: no 64-bit arithmetic per element."""
_MASK = 0xFFFFFFFF
MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
"""Of the integer hash `lowbias32` by C. Wellons (https://nullprogram.com/blog/2018/07/31/)."""


def mix(x: int) -> int:
    """`lowbias32`: a bijection of 32-bit numbers in which every bit depends on all."""
    x ^= x >> 16
    x = x * MULTIPLIERS[0] & _MASK
    x ^= x >> 15
    x = x * MULTIPLIERS[1] & _MASK
    return x ^ x >> 16


def step_key(seed: int, step: int) -> int:
    """Key of a step, 32 bits."""
    return mix(mix(mix(seed & _MASK) ^ (seed >> 32 & _MASK)) ^ (step & _MASK))


def unit_key(step: int, unit: str) -> int:
    """Key of a unit in a step; `step` is the step's key."""
    digest = hashlib.blake2b(unit.encode(), digest_size=4).digest()
    return mix(step ^ int.from_bytes(digest, "little"))


def block_key(unit: int, block: int) -> int:
    """Key of a block of 2^20 elements; `unit` is the unit's key in this step."""
    return mix(block & _MASK ^ unit)


def noise(key: int, start: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """(count,) int64: 32 random bits for each of the elements from `start` on, of the unit with this key."""
    index = torch.arange(start, start + count, dtype=torch.int64, device=device)
    block = _mix(index >> BLOCK_BITS & _MASK ^ key)
    return _mix(index & (1 << BLOCK_BITS) - 1 ^ block)


def round_(value: Tensor, bits: Tensor, out: Tensor) -> None:
    """Write `value` (fp32, finite) to `out` (bf16), rounded up or down by 16 random `bits` (int64)."""
    raised = value.view(torch.int32) + bits.to(torch.int32)
    out.view(torch.int16).copy_(raised >> 16)


def _mix(x: Tensor) -> Tensor:
    """`mix` of each element."""
    x = x ^ x >> 16
    x = x * MULTIPLIERS[0] & _MASK  # the low 32 bits are right although int64 wraps
    x = x ^ x >> 15
    x = x * MULTIPLIERS[1] & _MASK
    return x ^ x >> 16
