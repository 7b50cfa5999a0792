"""AdamW: hyper-parameters, the numbers of one step, and the slow reference of the kernels in `optim/kernels.py`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatrain.errors import UserError
from megatrain.host_memory.layout import SCALES
from megatrain.host_memory.store import UnitPlanes
from megatrain.optim.rounding import unit_key
from megatrain.optim.spec import OptimizerSpec, Segment, StateSpec, StepCoefficients, below, is_number

# An eps below this would be lost in the fp32 sum `sqrt(v) + eps`.
_SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)

Moments = Literal["fp32", "bf16", "int8"]
"""Storage type of the moments; bf16 and int8 by stochastic rounding, int8 in blocks with a scale."""


def _states(first: torch.dtype, second: torch.dtype) -> tuple[StateSpec, ...]:
    return (
        StateSpec("m", first, "first moment", "exp_avg"),
        StateSpec("v", second, "second moment", "exp_avg_sq"),
    )


_STATES: dict[Moments, tuple[StateSpec, ...]] = {
    "fp32": _states(torch.float32, torch.float32),
    "bf16": _states(torch.bfloat16, torch.bfloat16),
    "int8": _states(torch.int8, torch.uint8),
}


class AdamWScalars(NamedTuple):
    """fp32 numbers of one segment in one step."""

    gradient_scale: np.float32
    decay: np.float32  # 1 - lr x weight decay
    one_minus_beta1: np.float32
    beta2: np.float32
    one_minus_beta2: np.float32
    bias_correction2_sqrt: np.float32
    eps: np.float32
    step_size: np.float32  # lr / bias correction of the first moment
    rounding_key: np.uint32  # of the step; see [Note: stochastic rounding] in optim/rounding.py


@dataclass(frozen=True)
class AdamWCoefficients(StepCoefficients):
    """Numbers of one step in float64; `beta1`, `beta2` and `eps` as in `AdamW`."""

    beta1: float
    beta2: float
    eps: float

    def scalars(self, segment: Segment) -> AdamWScalars:
        """Products are computed in float64 and rounded to fp32 once, as torch does with Python numbers."""
        learning_rate = self.learning_rate * segment.lr_scale
        return AdamWScalars(
            gradient_scale=np.float32(self.gradient_scale),
            decay=np.float32(1.0 - learning_rate * segment.weight_decay),
            one_minus_beta1=np.float32(1.0 - self.beta1),
            beta2=np.float32(self.beta2),
            one_minus_beta2=np.float32(1.0 - self.beta2),
            bias_correction2_sqrt=np.float32(math.sqrt(1.0 - self.beta2**self.step)),
            eps=np.float32(self.eps),
            step_size=np.float32(learning_rate / (1.0 - self.beta1**self.step)),
            rounding_key=np.uint32(self.rounding_key),
        )


@dataclass(frozen=True)
class AdamW(OptimizerSpec):
    """AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019) with torch.optim.AdamW's arithmetic.

    Attributes:
        moments: Storage type of both moments. The arithmetic is fp32 in any case, and the weights are updated before
            moments are rounded.
    """

    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    moments: Moments = "fp32"

    @property
    def states(self) -> tuple[StateSpec, ...]:
        return _STATES[self.moments]

    def problems(self) -> Iterable[str]:
        yield from super().problems()
        yield from below("eps", self.eps, _SMALLEST_NORMAL)
        if self.moments not in _STATES:
            yield f"moments = {self.moments!r} is not one of {', '.join(_STATES)}"
        if len(self.betas) != 2:
            yield f"betas = {self.betas!r}: two numbers are needed"
        for index, beta in enumerate(self.betas):
            if not (is_number(beta) and 0.0 <= beta < 1.0):
                yield f"betas[{index}] = {beta!r} is outside [0, 1)"

    def coefficients(
        self, step: int, learning_rate: float | None = None, gradient_scale: float = 1.0
    ) -> AdamWCoefficients:
        rate = self._rate(learning_rate)
        return AdamWCoefficients(step, rate, gradient_scale, *self.betas, self.eps, seed=self.seed)

    def update_(self, master: Tensor, grad: Tensor, states: Mapping[str, Tensor], scalars: AdamWScalars) -> None:
        """See [Note: same bits everywhere] in `optim/kernels.py`.

        Every call rounds once, correctly. This rules out addcmul and lerp, which may fuse; torch's fp32 square root on the CPU,
        which is sometimes off by one unit (in fp64, rounded to fp32, it never is); and division by a Python number, which CUDA
        replaces by a product with the rounded reciprocal (it does not for a tensor).
        """
        _, decay, one_minus_beta1, beta2, one_minus_beta2, bias_correction2_sqrt, eps, step_size, _ = map(
            float, scalars
        )
        m, v = states["m"], states["v"]
        master.mul_(decay)
        m.add_((grad - m).mul_(one_minus_beta1))
        m.masked_fill_(m.abs() < _SMALLEST_NORMAL, 0.0)
        v.mul_(beta2).add_((grad * one_minus_beta2).mul_(grad))
        denom = v.to(torch.float64).sqrt_().to(torch.float32)
        denom.div_(torch.full((), bias_correction2_sqrt, device=v.device)).add_(eps)
        master.sub_((m * step_size).div_(denom))

    def host_kernel(self, planes: UnitPlanes, grad: Tensor) -> Callable[[int, int, Any], object]:
        from megatrain.optim import kernels  # imports numba, which a reader of hyper-parameters does not need

        m, v = planes.states["m"], planes.states["v"]
        if m.dtype == torch.int8:
            scales = planes.states["m" + SCALES], planes.states["v" + SCALES]
            kernel = functools.partial(kernels.adamw_blocks, planes.lo is not None)
            lo = planes.hi if planes.lo is None else planes.lo
            return kernels.rounding_by_blocks(kernel, (planes.hi, lo, m, scales[0], v, scales[1], grad), planes)
        if m.dtype == torch.bfloat16:
            lo = planes.hi if planes.lo is None else planes.lo  # not read without a split
            rounded = kernels.adamw_rounded_whole if planes.lo is None else kernels.adamw_rounded_split
            return kernels.rounding_by_blocks(rounded, (planes.hi, lo, m, v, grad), planes)
        if planes.lo is None:
            return functools.partial(kernels.adamw_whole, *map(kernels.bits_view, (planes.hi, m, v, grad)))
        return functools.partial(kernels.adamw_split, *map(kernels.bits_view, (planes.hi, planes.lo, m, v, grad)))

    def update_on_device(
        self, planes: UnitPlanes, grad: Tensor, segments: Sequence[Segment], coefficients: StepCoefficients
    ) -> None:
        from megatrain.optim import kernels

        if kernels.triton is not None and planes.hi.is_cuda and self.moments != "int8":
            for segment in segments:
                scalars = _device_scalars(coefficients, segment.weight_decay, segment.lr_scale)
                key = unit_key(coefficients.rounding_key, planes.name)
                kernels.adamw_on_gpu(planes, grad, segment.start, segment.end, scalars, key)
        else:
            self.update_unit_(planes, grad, segments, coefficients)

    def torch_optimizer(self, groups: Sequence[Mapping[str, Any]], fused: bool | None) -> torch.optim.AdamW:
        if self.moments != "fp32":
            raise UserError("the mesh engine keeps moments in fp32", "optim.moments", "use fp32, or the host engine")
        return torch.optim.AdamW(
            [dict(group) for group in groups], lr=self.learning_rate, betas=self.betas, eps=self.eps, fused=fused
        )


@functools.lru_cache(maxsize=16)
def _device_scalars(coefficients: StepCoefficients, weight_decay: float, lr_scale: float) -> tuple[float, ...]:
    """The fp32 numbers of `StepCoefficients.scalars` as Python numbers.

    All units of a step share a few sets; older steps' are evicted.
    """
    return tuple(map(float, coefficients.scalars(Segment(0, 0, weight_decay, lr_scale))[:-1]))
