"""The optimizer's loops over plane slices, compiled, without the GIL.

[Note: same bits everywhere]
The update is strict IEEE fp32 in one fixed order of operations: no fast-math, no fused multiply-add, no reordering.
So a result does not depend on how a unit is cut into pieces, on the number of threads, on the vector width, or on the
device: `AdamW.update_` does the same operations one torch call at a time and gets the same bits. The loops
vectorise all the same, because they work element by element, and then host memory is the limit, not arithmetic. Each
kernel takes its slices before the loop: an index that counts from `start` could be negative and wrap for all the
compiler knows, and it would give up vectorising (6 times slower).

The order is torch.optim.AdamW's: decoupled decay first, `lerp` for the first moment, `addcmul` for the second,
`sqrt(v) / sqrt(bias_correction2) + eps` below, `addcdiv` for the step. One thing is added: a first moment below the
smallest normal fp32 number becomes zero. Without a gradient m would otherwise decay to a few subnormal units and stay
there for ever (0.1 x m rounds to nothing), as rows of rare tokens do, and subnormal arithmetic halves the speed or
worse.

Legend: hi, lo, m, v, grad are flat planes (N,); a kernel touches elements [start, end). A bf16 plane arrives as
int16, its bits; so a gradient of int16 is bf16 and one of float32 is fp32. A whole master (no lo plane) is float32.

Compiling takes a few tenths of a second a kernel, once in a process. There is no compilation cache on disk: it would
save little, and fails where neither the installation nor the home directory is writable.
"""

from __future__ import annotations

from typing import Any

import numba
import numba.extending
import numpy as np
import torch
from llvmlite import ir
from numba import types

_SMALLEST_NORMAL = np.finfo(np.float32).tiny
_ZERO = np.float32(0.0)

# Independent sums of `sum_of_squares`: a loop over them vectorises without reordering any single sum.
_LANES = 512


# numba's decorators are not typed.
_compiled: Any = numba.njit(nogil=True, error_model="numpy")
_intrinsic: Any = numba.extending.intrinsic


def bits_view(plane: torch.Tensor) -> np.ndarray:
    """A CPU tensor (N,) as the array that kernels take: the same memory, bf16 as int16."""
    assert plane.device.type == "cpu", plane.device
    assert plane.is_contiguous(), plane.stride()
    return (plane.view(torch.int16) if plane.dtype == torch.bfloat16 else plane).numpy()


@_intrinsic
def _float_of(typingctx: Any, bits: types.Type):
    """The fp32 number of 32 bits."""
    return types.float32(types.int32), lambda context, builder, sig, args: builder.bitcast(args[0], ir.FloatType())


@_intrinsic
def _bits_of(typingctx: Any, number: types.Type):
    """The 32 bits of an fp32 number."""
    return types.int32(types.float32), lambda context, builder, sig, args: builder.bitcast(args[0], ir.IntType(32))


@_intrinsic
def _widen(typingctx: Any, gradient: types.Type):
    """An element of a gradient plane as fp32: int16 holds the bits of a bf16, float32 is itself."""
    if gradient == types.float32:
        return types.float32(types.float32), lambda context, builder, sig, args: args[0]

    def shift_up(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        word = ir.IntType(32)
        return builder.bitcast(builder.shl(builder.zext(args[0], word), word(16)), ir.FloatType())

    return types.float32(types.int16), shift_up


@_compiled
def _adamw(p, g, m, v, s):
    """One element: (p, m, v) after the step with `AdamWScalars` s; see [Note: same bits everywhere]."""
    g = g * s.gradient_scale
    p = p * s.decay
    m = m + s.one_minus_beta1 * (g - m)
    m = _ZERO if abs(m) < _SMALLEST_NORMAL else m
    v = v * s.beta2 + (s.one_minus_beta2 * g) * g
    denom = np.sqrt(v) / s.bias_correction2_sqrt + s.eps
    return p - (s.step_size * m) / denom, m, v


@_compiled
def adamw_split(hi, lo, m, v, grad, start, end, scalars):
    """AdamW on a master kept as hi and lo, with the `AdamWScalars` of the segment that [start, end) lies in."""
    hi, lo, m, v, grad = hi[start:end], lo[start:end], m[start:end], v[start:end], grad[start:end]
    for i in range(hi.size):
        bits = np.int32(np.int32(np.int32(hi[i]) << np.int32(16)) + np.int32(lo[i]))
        p, m[i], v[i] = _adamw(_float_of(bits), _widen(grad[i]), m[i], v[i], scalars)
        bits = _bits_of(p)
        rounded = np.int32(np.int32(bits + np.int32(0x8000)) >> np.int32(16))
        hi[i] = np.int16(rounded)
        lo[i] = np.int16(bits - np.int32(rounded << np.int32(16)))


@_compiled
def adamw_whole(master, m, v, grad, start, end, scalars):
    """AdamW on an fp32 master, with the `AdamWScalars` of the segment that [start, end) lies in."""
    master, m, v, grad = master[start:end], m[start:end], v[start:end], grad[start:end]
    for i in range(master.size):
        master[i], m[i], v[i] = _adamw(master[i], _widen(grad[i]), m[i], v[i], scalars)


@_compiled
def add_gradient(plane, slab, start, end):
    """Adds a gradient slab (bf16 or fp32) to an fp32 gradient plane."""
    plane, slab = plane[start:end], slab[start:end]
    for i in range(plane.size):
        plane[i] += _widen(slab[i])


@_compiled
def set_gradient(plane, slab, start, end):
    """Overwrites an fp32 gradient plane with a gradient slab (bf16 or fp32)."""
    plane, slab = plane[start:end], slab[start:end]
    for i in range(plane.size):
        plane[i] = _widen(slab[i])


@_compiled
def sum_of_squares(grad, start, end):
    """Sum of the squares of gradients (bf16 or fp32) in fp64, always added in the same order.

    A square of an fp32 number is exact in fp64 and cannot overflow there: the sum is finite exactly if every gradient
    is.
    """
    sums = np.zeros(_LANES)
    for first in range(start, end, _LANES):
        block = grad[first : min(first + _LANES, end)]
        for lane in range(block.size):
            g = np.float64(_widen(block[lane]))
            sums[lane] += g * g
    total = 0.0
    for lane in range(_LANES):
        total += sums[lane]
    return total
