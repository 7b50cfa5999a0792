"""AdamW: hyper-parameters, the numbers of one step, and the slow reference of the kernels in `optim/kernels.py`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatrain.host_memory.store import UnitPlanes
from megatrain.optim.spec import OptimizerSpec, Segment, StateSpec, StepCoefficients, below, is_number

# An eps below this would be lost in the fp32 sum `sqrt(v) + eps`.
_SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)

_STATES = (
    StateSpec("m", torch.float32, "first moment", "exp_avg"),
    StateSpec("v", torch.float32, "second moment", "exp_avg_sq"),
)


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
        )


@dataclass(frozen=True)
class AdamW(OptimizerSpec):
    """AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019) with torch.optim.AdamW's arithmetic."""

    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    @property
    def states(self) -> tuple[StateSpec, ...]:
        return _STATES

    def problems(self) -> Iterable[str]:
        yield from super().problems()
        yield from below("eps", self.eps, _SMALLEST_NORMAL)
        if len(self.betas) != 2:
            yield f"betas = {self.betas!r}: two numbers are needed"
        for index, beta in enumerate(self.betas):
            if not (is_number(beta) and 0.0 <= beta < 1.0):
                yield f"betas[{index}] = {beta!r} is outside [0, 1)"

    def coefficients(
        self, step: int, learning_rate: float | None = None, gradient_scale: float = 1.0
    ) -> AdamWCoefficients:
        return AdamWCoefficients(step, self._rate(learning_rate), gradient_scale, *self.betas, self.eps)

    def update_(self, master: Tensor, grad: Tensor, states: Mapping[str, Tensor], scalars: AdamWScalars) -> None:
        """See [Note: same bits everywhere] in `optim/kernels.py`.

        Every call rounds once, correctly. This rules out addcmul and lerp, which may fuse; torch's fp32 square root on the CPU,
        which is sometimes off by one unit (in fp64, rounded to fp32, it never is); and division by a Python number, which CUDA
        replaces by a product with the rounded reciprocal (it does not for a tensor).
        """
        _, decay, one_minus_beta1, beta2, one_minus_beta2, bias_correction2_sqrt, eps, step_size = map(float, scalars)
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
        if planes.lo is None:
            return functools.partial(kernels.adamw_whole, *map(kernels.bits_view, (planes.hi, m, v, grad)))
        return functools.partial(kernels.adamw_split, *map(kernels.bits_view, (planes.hi, planes.lo, m, v, grad)))

    def update_on_device(
        self, planes: UnitPlanes, grad: Tensor, segments: Sequence[Segment], coefficients: StepCoefficients
    ) -> None:
        from megatrain.optim import kernels

        if kernels.triton is not None and planes.hi.is_cuda:
            for segment in segments:
                scalars = _device_scalars(coefficients, segment.weight_decay, segment.lr_scale)
                kernels.adamw_on_gpu(planes, grad, segment.start, segment.end, scalars)
        else:
            self.update_unit_(planes, grad, segments, coefficients)

    def torch_optimizer(self, groups: Sequence[Mapping[str, Any]], fused: bool | None) -> torch.optim.AdamW:
        return torch.optim.AdamW(
            [dict(group) for group in groups], lr=self.learning_rate, betas=self.betas, eps=self.eps, fused=fused
        )


@functools.lru_cache(maxsize=16)
def _device_scalars(coefficients: StepCoefficients, weight_decay: float, lr_scale: float) -> tuple[float, ...]:
    """`StepCoefficients.scalars` as Python numbers. All units of a step share a few sets; older steps' are evicted."""
    return tuple(map(float, coefficients.scalars(Segment(0, 0, weight_decay, lr_scale))))
