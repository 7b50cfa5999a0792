"""AdamW on planes that live on the GPU: one kernel over a unit's flat range.

The same arithmetic in the same order as `optim/kernels.py`, with every operation rounded once ([Note: same bits everywhere]
there): no fused multiply-add, correctly rounded division and root. So a unit's weights do not depend on where it lives.
Where Triton is not installed, `AdamW.update_` does the same, slower.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatrain.optim.spec import Planes

try:
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]
except ImportError:
    triton = None

BLOCK = 1024
_SMALLEST_NORMAL = float(torch.finfo(torch.float32).tiny)


def has_kernel(plane: Tensor) -> bool:
    """Whether a plane lives where the kernel runs."""
    return triton is not None and plane.device.type == "cuda"


def adamw_(planes: Planes, grad: Tensor, start: int, end: int, scalars: Sequence[float]) -> None:
    """One AdamW step on the elements [start, end) of a unit, in place, behind everything on the current stream. Asynchronous.

    Args:
        planes: On a CUDA device.
        grad: bf16 or fp32 (N,), unchanged.
        start, end: Elements that share their hyper-parameters.
        scalars: `AdamWScalars` of them, as Python numbers.
    """
    if start == end:
        return
    hi, lo = planes.hi, planes.lo
    _adamw_kernel[(-(-(end - start) // BLOCK),)](
        hi if lo is None else hi.view(torch.int16),
        hi if lo is None else lo,
        planes.states["m"],
        planes.states["v"],
        grad,
        start,
        end,
        *scalars,
        SPLIT=lo is not None,
        BLOCK=BLOCK,
        SMALLEST_NORMAL=_SMALLEST_NORMAL,
        enable_fp_fusion=False,
    )


def _adamw_source(
    hi, lo, m, v, grad, start, end,
    scale, decay, one_minus_beta1, beta2, one_minus_beta2, bias_correction2_sqrt, eps, step_size,
    SPLIT: tl.constexpr, BLOCK: tl.constexpr, SMALLEST_NORMAL: tl.constexpr,
):  # fmt: skip
    # 64-bit offsets: a unit may have more than 2^31 elements.
    index = start.to(tl.int64) + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < end
    g = tl.load(grad + index, mask=inside, other=0.0).to(tl.float32) * scale
    if SPLIT:
        high = tl.load(hi + index, mask=inside, other=0).to(tl.int32)
        low = tl.load(lo + index, mask=inside, other=0).to(tl.int32)
        p = ((high << 16) + low).to(tl.float32, bitcast=True)
    else:
        p = tl.load(hi + index, mask=inside, other=0.0)
    first, second = tl.load(m + index, mask=inside, other=0.0), tl.load(v + index, mask=inside, other=0.0)
    p = p * decay
    first = first + one_minus_beta1 * (g - first)
    first = tl.where(tl.abs(first) < SMALLEST_NORMAL, 0.0, first)
    second = second * beta2 + (one_minus_beta2 * g) * g
    denominator = tl.div_rn(tl.sqrt_rn(second), bias_correction2_sqrt) + eps
    p = p - tl.div_rn(step_size * first, denominator)
    tl.store(m + index, first, mask=inside)
    tl.store(v + index, second, mask=inside)
    if SPLIT:
        bits = p.to(tl.int32, bitcast=True)
        high = (bits + 0x8000) >> 16
        tl.store(hi + index, high.to(tl.int16), mask=inside)
        tl.store(lo + index, (bits - (high << 16)).to(tl.int16), mask=inside)
    else:
        tl.store(hi + index, p, mask=inside)


if triton is not None:
    _adamw_kernel = triton.jit(_adamw_source, do_not_specialize=["start", "end"])
