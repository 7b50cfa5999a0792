"""The optimizer's compiled loops over plane slices: numba on host threads (without the GIL), Triton on the GPU.

[Note: same bits everywhere]
An update is strict IEEE fp32 arithmetic in one fixed order: no fast-math, no fused multiply-add, no reordering. So its result
does not depend on how a unit is cut into pieces, on the number of threads, on the vector width, or on the device, and
`AdamW.update_`, one torch call at a time, gives the same bits. The loops are elementwise, so they vectorise all the same and are
limited by memory, not by arithmetic. Each kernel slices its arrays before the loop: an index counted from `start` could be
negative and wrap as far as the compiler knows, and it would not vectorise (6 times slower).

The order is torch.optim.AdamW's: decoupled decay, `lerp` for the first moment, `addcmul` for the second,
`sqrt(v) / sqrt(bias_correction2) + eps` as the denominator, `addcdiv` for the step. One thing is added: a first moment below the
smallest normal fp32 number becomes zero. Without a gradient m would decay to a subnormal and stay there (0.1 x m rounds to
nothing), as in rows of rare tokens, and subnormal arithmetic at least halves the speed.

Legend: hi, lo, m, v, grad are flat planes (N,); a kernel touches elements [start, end). numba gets a bf16 plane as int16 (its
bits), so a gradient of int16 is bf16 and one of float32 is fp32. A master without lo is float32.

numba compiles a kernel once per process, in a few tenths of a second. There is no cache on disk: it would save little, and fails
where neither the installation nor the home directory is writable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numba
import numba.extending
import numpy as np
import torch
from llvmlite import ir
from numba import types

from megatrain.host_memory.layout import BLOCK_ELEMENTS
from megatrain.host_memory.store import UnitPlanes
from megatrain.optim import blocks, rounding

try:
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]
except ImportError:
    triton = None

_SMALLEST_NORMAL = np.finfo(np.float32).tiny
_ZERO = np.float32(0.0)
_UNIT_SIGNED, _UNIT_UNSIGNED = (np.float32(blocks.unit_of_code(dtype)) for dtype in blocks.CODES)
_LARGEST_SCALE, _LEAST_CODE, _PER_2_16 = map(np.float32, (blocks.LARGEST_SCALE, blocks.LEAST_CODE, 2.0**-16))
_CODED = BLOCK_ELEMENTS
_FIRST, _SECOND = map(np.uint32, rounding.MULTIPLIERS)

# Independent sums of `sum_of_squares`: a loop over them vectorises without reordering any of them.
_LANES = 512
# Elements of a Triton program.
_BLOCK = 1024

# numba's decorators are not typed.
_compiled: Any = numba.njit(nogil=True, error_model="numpy")
_intrinsic: Any = numba.extending.intrinsic


def bits_view(plane: torch.Tensor) -> np.ndarray:
    """A CPU tensor (N,) as numba takes it: the same memory, bf16 as int16."""
    assert plane.device.type == "cpu", plane.device
    assert plane.is_contiguous(), plane.stride()
    return (plane.view(torch.int16) if plane.dtype == torch.bfloat16 else plane).numpy()


@_intrinsic
def _float_of(typingctx: Any, bits: types.Type):
    """Reinterpret 32 bits as fp32."""
    return types.float32(types.int32), lambda context, builder, sig, args: builder.bitcast(args[0], ir.FloatType())


@_intrinsic
def _bits_of(typingctx: Any, number: types.Type):
    """Reinterpret an fp32 number as 32 bits."""
    return types.int32(types.float32), lambda context, builder, sig, args: builder.bitcast(args[0], ir.IntType(32))


@_intrinsic
def _widen(typingctx: Any, gradient: types.Type):
    """Widen an element of a gradient plane to fp32: int16 holds the bits of a bf16."""
    if gradient in (types.float32, types.float64):  # fp64: of tests
        return gradient(gradient), lambda context, builder, sig, args: args[0]

    def shift_up(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        word = ir.IntType(32)
        return builder.bitcast(builder.shl(builder.zext(args[0], word), word(16)), ir.FloatType())

    return types.float32(types.int16), shift_up


@_compiled
def _adamw(p, g, m, v, s):
    """(p, m, v) of one element after the step with `AdamWScalars` s. See [Note: same bits everywhere]."""
    g = g * s.gradient_scale
    p = p * s.decay
    m = m + s.one_minus_beta1 * (g - m)
    m = _ZERO if abs(m) < _SMALLEST_NORMAL else m
    v = v * s.beta2 + (s.one_minus_beta2 * g) * g
    denom = np.sqrt(v) / s.bias_correction2_sqrt + s.eps
    return p - (s.step_size * m) / denom, m, v


@_compiled
def adamw_split(hi, lo, m, v, grad, start, end, scalars):
    """Update a split master (hi, lo) with the `AdamWScalars` of the segment that contains [start, end)."""
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
    """Update an fp32 master with the `AdamWScalars` of the segment that contains [start, end)."""
    master, m, v, grad = master[start:end], m[start:end], v[start:end], grad[start:end]
    for i in range(master.size):
        master[i], m[i], v[i] = _adamw(master[i], _widen(grad[i]), m[i], v[i], scalars)


@_compiled
def _mixed(x):
    """`rounding.mix`; the products are of 32 bits."""
    x = np.uint32(x ^ np.uint32(x >> np.uint32(16)))
    x = np.uint32(x * _FIRST)
    x = np.uint32(x ^ np.uint32(x >> np.uint32(15)))
    x = np.uint32(x * _SECOND)
    return np.uint32(x ^ np.uint32(x >> np.uint32(16)))


@_compiled
def _rounded(value, bits16):
    """The bits of `value` as bf16, rounded up or down by 16 random bits; see `rounding.round_`."""
    return np.int16(np.int32(np.int32(_bits_of(value) + np.int32(bits16)) >> np.int32(16)))


@_compiled
def adamw_rounded_split(hi, lo, m, v, grad, start, end, scalars, key, first):
    """`adamw_split` with moments in bf16; `key` is the block's, `first` the index of element `start` in it."""
    hi, lo, m, v, grad = hi[start:end], lo[start:end], m[start:end], v[start:end], grad[start:end]
    for i in range(hi.size):
        bits = np.int32(np.int32(np.int32(hi[i]) << np.int32(16)) + np.int32(lo[i]))
        p, m_i, v_i = _adamw(_float_of(bits), _widen(grad[i]), _widen(m[i]), _widen(v[i]), scalars)
        noise = _mixed(np.uint32(np.uint32(first + np.uint32(i)) ^ key))
        m[i], v[i] = _rounded(m_i, noise & np.uint32(0xFFFF)), _rounded(v_i, noise >> np.uint32(16))
        bits = _bits_of(p)
        rounded = np.int32(np.int32(bits + np.int32(0x8000)) >> np.int32(16))
        hi[i] = np.int16(rounded)
        lo[i] = np.int16(bits - np.int32(rounded << np.int32(16)))


@_compiled
def adamw_rounded_whole(master, unused, m, v, grad, start, end, scalars, key, first):
    """`adamw_whole` with moments in bf16; `key` and `first` as for `adamw_rounded_split`."""
    master, m, v, grad = master[start:end], m[start:end], v[start:end], grad[start:end]
    for i in range(master.size):
        master[i], m_i, v_i = _adamw(master[i], _widen(grad[i]), _widen(m[i]), _widen(v[i]), scalars)
        noise = _mixed(np.uint32(np.uint32(first + np.uint32(i)) ^ key))
        m[i], v[i] = _rounded(m_i, noise & np.uint32(0xFFFF)), _rounded(v_i, noise >> np.uint32(16))


@_compiled
def _root_of(value, signed):
    """Root by which a share of the scale becomes a code; see optim/blocks.py."""
    return np.sqrt(value) if signed else np.sqrt(np.sqrt(value))


@_compiled
def _magnitude(code, signed):
    """Share of the scale that a code (fp32) stands for."""
    power = code * code
    return power * _UNIT_SIGNED if signed else power * power * _UNIT_UNSIGNED


@_compiled
def _encoded(size, scale, inverse, bits16, signed):
    """The code of an absolute value, rounded up or down by 16 random bits: `blocks.encode`."""
    largest = np.float32(127.0) if signed else np.float32(255.0)
    lower = min(np.floor(_root_of(size * inverse, signed) * largest), np.float32(largest - np.float32(1.0)))
    low, high = _magnitude(lower, signed) * scale, _magnitude(lower + np.float32(1.0), signed) * scale
    share = np.float32(np.int32(bits16)) * _PER_2_16
    code = lower + np.float32(1.0) if size - low > (high - low) * share else lower
    if not signed and size > _ZERO and scale > _ZERO:
        code = max(code, _LEAST_CODE)
    return np.int32(code)


@_compiled
def adamw_blocks(split, hi, lo, m, m_scale, v, v_scale, grad, start, end, scalars, key, first):
    """`adamw_split` or `adamw_whole` with moments in 8-bit blocks; `key` and `first` as for `adamw_rounded_split`."""
    ms, vs = np.empty(_CODED, np.float32), np.empty(_CODED, np.float32)
    for at in range(start, end, _CODED):
        n = min(_CODED, end - at)
        m_most, v_most = m_scale[at // _CODED], v_scale[at // _CODED]
        m_bits, v_bits = np.int32(0), np.int32(0)
        for i in range(n):
            code = np.float32(m[at + i])
            m_i = _magnitude(abs(code), True) * m_most
            m_i = -m_i if code < _ZERO else m_i
            v_i = _magnitude(np.float32(v[at + i]), False) * v_most
            g = _widen(grad[at + i])
            if split:
                bits = np.int32(np.int32(np.int32(hi[at + i]) << np.int32(16)) + np.int32(lo[at + i]))
                p, m_i, v_i = _adamw(_float_of(bits), g, m_i, v_i, scalars)
                bits = _bits_of(p)
                rounded = np.int32(np.int32(bits + np.int32(0x8000)) >> np.int32(16))
                hi[at + i] = np.int16(rounded)
                lo[at + i] = np.int16(bits - np.int32(rounded << np.int32(16)))
            else:
                hi[at + i], m_i, v_i = _adamw(hi[at + i], g, m_i, v_i, scalars)
            ms[i], vs[i] = m_i, v_i
            # bits of numbers that are not negative have the order of the numbers
            m_bits = max(m_bits, _bits_of(min(abs(m_i), _LARGEST_SCALE)))
            v_bits = max(v_bits, _bits_of(min(v_i, _LARGEST_SCALE)))
        m_most, v_most = _float_of(m_bits), _float_of(v_bits)
        m_most = _ZERO if m_most < _SMALLEST_NORMAL else m_most
        v_most = _ZERO if v_most < _SMALLEST_NORMAL else v_most
        m_scale[at // _CODED], v_scale[at // _CODED] = m_most, v_most
        m_inverse = np.float32(1.0) / m_most if m_most > _ZERO else _ZERO
        v_inverse = np.float32(1.0) / v_most if v_most > _ZERO else _ZERO
        for i in range(n):
            noise = _mixed(np.uint32(np.uint32(first + np.uint32(at - start + i)) ^ key))
            code = _encoded(min(abs(ms[i]), _LARGEST_SCALE), m_most, m_inverse, noise & np.uint32(0xFFFF), True)
            m[at + i] = np.int8(-code if ms[i] < _ZERO else code)
            v[at + i] = np.uint8(_encoded(min(vs[i], _LARGEST_SCALE), v_most, v_inverse, noise >> np.uint32(16), False))


def rounding_by_blocks(
    kernel: Callable[..., object], planes: Sequence[torch.Tensor], unit: UnitPlanes
) -> Callable[[int, int, Any], object]:
    """A function of (start, end, scalars) that runs `kernel` on each block that shares a key; see `rounding.BLOCK_BITS`."""
    arrays, block = [bits_view(plane) for plane in planes], 1 << rounding.BLOCK_BITS

    def run(start: int, end: int, scalars: Any) -> None:
        key = rounding.unit_key(int(scalars.rounding_key), unit.name)
        while True:
            number, first = divmod(unit.start + start, block)
            stop = min(end, start + block - first)
            kernel(*arrays, start, stop, scalars, np.uint32(rounding.block_key(key, number)), np.uint32(first))
            if stop == end:
                return
            start = stop

    return run


@_compiled
def add_gradient(plane, slab, start, end):
    """Add a gradient slab (bf16 or fp32) to an fp32 gradient plane."""
    plane, slab = plane[start:end], slab[start:end]
    for i in range(plane.size):
        plane[i] += _widen(slab[i])


@_compiled
def set_gradient(plane, slab, start, end):
    """Overwrite an fp32 gradient plane with a gradient slab (bf16 or fp32)."""
    plane, slab = plane[start:end], slab[start:end]
    for i in range(plane.size):
        plane[i] = _widen(slab[i])


@_compiled
def sum_of_squares(grad, start, end):
    """Sum of the squares of gradients (bf16 or fp32) in fp64, in a fixed order.

    The square of an fp32 number is exact in fp64 and cannot overflow, so the sum is finite exactly if every gradient is.
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


def adamw_on_gpu(
    planes: UnitPlanes, grad: torch.Tensor, start: int, end: int, scalars: Sequence[float], key: int = 0
) -> None:
    """One AdamW step on the elements [start, end) of a unit on a CUDA device, in place. Asynchronous on the current stream.

    `grad` (bf16 or fp32, (N,)) is unchanged; `scalars` are the fp32 numbers of `AdamWScalars`; `key` is `rounding.unit_key`, for
    moments in bf16.
    """
    if start == end:
        return
    hi, lo, m, v = planes.hi, planes.lo, planes.states["m"], planes.states["v"]
    rounds = m.dtype == torch.bfloat16
    _adamw_kernel[(-(-(end - start) // _BLOCK),)](
        hi if lo is None else hi.view(torch.int16),
        hi if lo is None else lo,
        m.view(torch.int16) if rounds else m,
        v.view(torch.int16) if rounds else v,
        grad,
        start,
        end,
        planes.start,
        key - (1 << 32) if key >> 31 else key,  # the same 32 bits, as an int32
        *scalars,
        SPLIT=lo is not None,
        ROUNDS=rounds,
        BLOCK_BITS=rounding.BLOCK_BITS,
        BLOCK=_BLOCK,
        SMALLEST_NORMAL=float(_SMALLEST_NORMAL),
        enable_fp_fusion=False,
    )


def _mix_source(x):
    """`rounding.mix` of uint32."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D).to(tl.uint32)
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B).to(tl.uint32)
    return x ^ (x >> 16)


if triton is not None:
    _mix = triton.jit(_mix_source)


def _adamw_source(
    hi, lo, m, v, grad, start, end, offset, key,
    scale, decay, one_minus_beta1, beta2, one_minus_beta2, bias_correction2_sqrt, eps, step_size,
    SPLIT: tl.constexpr, ROUNDS: tl.constexpr, BLOCK_BITS: tl.constexpr, BLOCK: tl.constexpr, SMALLEST_NORMAL: tl.constexpr,
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
    if ROUNDS:
        first = (tl.load(m + index, mask=inside, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
        second = (tl.load(v + index, mask=inside, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        first, second = tl.load(m + index, mask=inside, other=0.0), tl.load(v + index, mask=inside, other=0.0)
    p = p * decay
    first = first + one_minus_beta1 * (g - first)
    first = tl.where(tl.abs(first) < SMALLEST_NORMAL, 0.0, first)
    second = second * beta2 + (one_minus_beta2 * g) * g
    denominator = tl.div_rn(tl.sqrt_rn(second), bias_correction2_sqrt) + eps
    p = p - tl.div_rn(step_size * first, denominator)
    if ROUNDS:
        element = index + offset
        block = _mix((element >> BLOCK_BITS).to(tl.uint32) ^ key.to(tl.uint32))
        noise = _mix((element & ((1 << BLOCK_BITS) - 1)).to(tl.uint32) ^ block)
        first_bits = first.to(tl.int32, bitcast=True) + (noise & 0xFFFF).to(tl.int32)
        second_bits = second.to(tl.int32, bitcast=True) + (noise >> 16).to(tl.int32)
        tl.store(m + index, (first_bits >> 16).to(tl.int16), mask=inside)
        tl.store(v + index, (second_bits >> 16).to(tl.int16), mask=inside)
    else:
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
    _adamw_kernel = triton.jit(_adamw_source, do_not_specialize=["start", "end", "offset", "key"])
