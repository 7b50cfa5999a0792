"""AdamW on planes, one torch call at a time, on any device.

It is the slow reference for `optim/kernels.py`, with the same bits, and the update of units whose planes live on a GPU.
See [Note: same bits everywhere] in `optim/kernels.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatrain.host_memory.planes import join, split_
from megatrain.optim.adamw import Scalars, Segment, StepCoefficients

# Bounds the temporaries to a few times 64 MiB, whatever the size of a unit.
_BLOCK_NUMEL = 1 << 24

_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


@torch.no_grad()
def adamw_(
    hi: Tensor,
    lo: Tensor | None,
    m: Tensor,
    v: Tensor,
    grad: Tensor,
    segments: Sequence[Segment],
    coefficients: StepCoefficients,
) -> None:
    """One AdamW step on the planes of a unit, in place. Asynchronous on a GPU: ordered by the current stream.

    Args:
        hi: bf16 (N,) with `lo`; or the fp32 master itself without.
        lo: int16 (N,), or None.
        m: fp32 (N,), first moment.
        v: fp32 (N,), second moment.
        grad: bf16 or fp32 (N,).
        segments: What to update, and how.
        coefficients: Of this step.
    """
    for segment in segments:
        scalars = coefficients.scalars(segment)
        for start in range(segment.start, segment.end, _BLOCK_NUMEL):
            block = slice(start, min(start + _BLOCK_NUMEL, segment.end))
            master = hi[block] if lo is None else join(hi[block], lo[block])
            _adamw_block_(master, m[block], v[block], grad[block], scalars)
            if lo is not None:
                split_(master, hi[block], lo[block])


def _adamw_block_(p: Tensor, m: Tensor, v: Tensor, grad: Tensor, scalars: Scalars) -> None:
    """Every call rounds once, correctly. That rules some calls out: addcmul, lerp and the like may fuse; torch's fp32
    square root on a CPU is sometimes off by one unit, while one in fp64, rounded to fp32, never is; and CUDA divides
    by a Python number through its rounded reciprocal, but not by a tensor.
    """
    scale, decay, one_minus_beta1, beta2, one_minus_beta2, bias_correction2_sqrt, eps, step_size = map(float, scalars)
    g = grad.to(torch.float32) * scale
    p.mul_(decay)
    m.add_((g - m).mul_(one_minus_beta1))
    m.masked_fill_(m.abs() < _SMALLEST_NORMAL, 0.0)
    v.mul_(beta2).add_((g * one_minus_beta2).mul_(g))
    denom = v.to(torch.float64).sqrt_().to(torch.float32)
    denom.div_(torch.full((), bias_correction2_sqrt, device=v.device)).add_(eps)
    p.sub_((m * step_size).div_(denom))
