"""The exact split of an fp32 master into two 16-bit planes, in torch on any device; `optim/kernels.py` fuses it with the update.

`bits(master) == (hi << 16) + lo` in wrapping int32 arithmetic, where `hi` is bf16 (its bits read as int16) and `lo` is int16.
`hi = (bits + 0x8000) >> 16` is the master rounded to the nearest bf16, so it is the compute weight as it is. Ties round away from
zero, unlike torch's cast (ties to even): rounded down, a tie would need lo = +32768, which int16 does not have.

Integer arithmetic wraps, so the pair restores every bit pattern: subnormals, infinities, NaN payloads. `hi` alone turns a finite
master above the largest bf16 into infinity, and may turn a NaN into infinity or zero; the finite guard keeps masters from both.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Bounds the int32 temporaries to a few times 16 MiB.
_BLOCK_NUMEL = 1 << 22


def split_(master: Tensor, hi: Tensor, lo: Tensor) -> None:
    """Write `master` (fp32) to the planes `hi` (bf16) and `lo` (int16), exactly. All contiguous, of equal size."""
    _check_planes(hi, lo)
    _check_master(master, hi)
    bits_N, hi_bits_N, lo_N = master.view(-1).view(torch.int32), hi.view(-1).view(torch.int16), lo.view(-1)
    for start in range(0, bits_N.numel(), _BLOCK_NUMEL):
        block = slice(start, start + _BLOCK_NUMEL)
        rounded = (bits_N[block] + 0x8000) >> 16
        hi_bits_N[block] = rounded.to(torch.int16)
        lo_N[block] = (bits_N[block] - (rounded << 16)).to(torch.int16)


def join(hi: Tensor, lo: Tensor, out: Tensor | None = None) -> Tensor:
    """The exact fp32 master of the planes `hi` (bf16) and `lo` (int16), in `out` or a new tensor of `hi`'s shape.

    All contiguous, of equal size.
    """
    _check_planes(hi, lo)
    if out is None:
        out = torch.empty(hi.shape, dtype=torch.float32, device=hi.device)
    _check_master(out, hi)
    bits_N, hi_bits_N, lo_N = out.view(-1).view(torch.int32), hi.view(-1).view(torch.int16), lo.view(-1)
    for start in range(0, bits_N.numel(), _BLOCK_NUMEL):
        block = slice(start, start + _BLOCK_NUMEL)
        bits_N[block] = (hi_bits_N[block].to(torch.int32) << 16) + lo_N[block]
    return out


def _check_planes(hi: Tensor, lo: Tensor) -> None:
    assert (hi.dtype, lo.dtype) == (torch.bfloat16, torch.int16), (hi.dtype, lo.dtype)
    assert hi.numel() == lo.numel(), (hi.numel(), lo.numel())


def _check_master(master: Tensor, hi: Tensor) -> None:
    assert master.dtype == torch.float32, master.dtype
    assert master.numel() == hi.numel(), (master.numel(), hi.numel())
