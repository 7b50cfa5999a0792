"""Optimizer states in 8 bits: codes in blocks with a scale each, rounded at random.

[Note: 8-bit blocks]
A block is `BLOCK_ELEMENTS` consecutive elements of a unit's flat range. Tensors and shards start at blocks, so a block belongs to
one tensor and one rank. Its scale (fp32) is the largest absolute value of the block, its codes are

    signed (int8):     value = sign(q) x (|q| / 127)^2 x scale
    unsigned (uint8):  value = (q / 255)^4 x scale

The powers spend the codes on small values. With equal steps, a second moment a few hundred times smaller than its neighbours'
would be stored as zero, and the next update of that weight would be divided by almost nothing. The root of the second moment is
stored as a square like the first moment, so both have the same range: 1 to 16,000 within a block. A second moment above zero
gets at least code 2, which makes its root as large as the smallest first moment: however the codes are rounded, no update gets
larger than the largest of its block.

A value between two codes becomes the upper one with the probability that its distance to the lower one gives, so there is no
bias; the random bits are those of [Note: stochastic rounding]. A block whose largest value is subnormal becomes zero.

`encode` and `decode` are the slow references of the code in optim/kernels.py. Every operation is one fp32 operation, rounded
once; the roots are taken in fp64 and rounded, as in `AdamW.update_`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.host_memory.layout import BLOCK_ELEMENTS

CODES = (torch.int8, torch.uint8)
"""Storage types of codes."""
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**125
"""Larger values are stored as this; the reciprocals of all scales are normal numbers."""
LEAST_CODE = 2
"""Of an unsigned value that is not zero."""


def largest_code(dtype: torch.dtype) -> int:
    return 127 if dtype == torch.int8 else 255


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """(n,) fp32 values of codes (n,) and their scales (ceil(n / BLOCK_ELEMENTS),)."""
    value = _magnitude(codes.to(torch.float32).abs(), codes.dtype) * _spread(scales, codes.numel())
    return torch.where(codes < 0, -value, value) if codes.dtype == torch.int8 else value


def encode(values: Tensor, codes: Tensor, scales: Tensor, bits: Tensor | None = None) -> None:
    """Write values (n,) fp32 to `codes` and `scales`, rounded by 16 random `bits` (int64, (n,)) or, without them, to nearest."""
    count, dtype, blocks = values.numel(), codes.dtype, scales.numel()
    size = values.abs().clamp_(max=LARGEST_SCALE)
    padded = torch.zeros(blocks * BLOCK_ELEMENTS, device=values.device)
    padded[:count] = size
    scale = padded.view(blocks, BLOCK_ELEMENTS).amax(1)
    scale = torch.where(scale < SMALLEST_SCALE, 0.0, scale)
    inverse = torch.where(scale > 0.0, torch.ones_like(scale) / scale, 0.0)
    root = _root(size * _spread(inverse, count))
    if dtype == torch.uint8:
        root = _root(root)
    largest = largest_code(dtype)
    lower = (root * largest).floor_().clamp_(max=largest - 1)
    whole = _spread(scale, count)
    low, high = _magnitude(lower, dtype) * whole, _magnitude(lower + 1.0, dtype) * whole
    share = 0.5 if bits is None else bits.to(torch.float32) * 2.0**-16
    code = lower + ((size - low) > (high - low) * share)
    if dtype == torch.uint8:
        code = torch.where((size > 0.0) & (whole > 0.0), code.clamp(min=LEAST_CODE), code)
    codes.copy_(torch.where(values < 0.0, -code, code) if dtype == torch.int8 else code)
    scales.copy_(scale)


def unit_of_code(dtype: torch.dtype) -> float:
    """Factor on the power of a code; times the largest power it is exactly 1 in fp32."""
    return 1.0 / 127**2 if dtype == torch.int8 else 1.0 / 255**4


def _magnitude(code: Tensor, dtype: torch.dtype) -> Tensor:
    power = code * code
    if dtype == torch.uint8:
        power = power * power
    return power * unit_of_code(dtype)


def _root(value: Tensor) -> Tensor:
    return value.to(torch.float64).sqrt_().to(torch.float32)


def _spread(scales: Tensor, count: int) -> Tensor:
    return scales.repeat_interleave(BLOCK_ELEMENTS)[:count]
