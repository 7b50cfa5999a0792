"""AdamW as plain data: hyper-parameters, which part of a unit gets which of them, and the numbers of one step."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatrain.errors import UserError

# Below the smallest normal fp32 number, eps would be lost (or be nothing) in the fp32 sum `sqrt(v) + eps`.
_SMALLEST_EPS = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class ParamGroup:
    """Parameters that are treated differently.

    Attributes:
        pattern: Regular expression, searched in the full Hugging Face name (`model.layers.0.self_attn.q_proj.weight`).
        weight_decay: Their weight decay; None keeps what they would have without the group.
        lr_scale: Factor on the learning rate.
    """

    pattern: str
    weight_decay: float | None = None
    lr_scale: float = 1.0

    def __post_init__(self) -> None:
        _raise_all(f"optim.groups[{self.pattern!r}]", self._problems())

    def matches(self, name: str) -> bool:
        return re.search(self.pattern, name) is not None

    def _problems(self) -> Iterable[str]:
        try:
            re.compile(self.pattern)
        except (re.error, TypeError) as error:
            yield f"pattern is not a regular expression: {error}"
        if self.weight_decay is not None:
            yield from _below("weight_decay", self.weight_decay, 0.0)
        yield from _below("lr_scale", self.lr_scale, 0.0)


@dataclass(frozen=True)
class AdamW:
    """AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019) with torch.optim.AdamW's arithmetic.

    Attributes:
        learning_rate: Used where a step does not give its own.
        betas: Decay of the first and the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Of parameters with two dimensions or more. Norms and biases (ndim < 2) are not decayed unless a
            group says so.
        max_grad_norm: The global gradient norm is clipped to this; None does not clip.
        groups: Exceptions; the first one that matches a name holds.
    """

    learning_rate: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    max_grad_norm: float | None = 1.0
    groups: tuple[ParamGroup, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple(self.groups))
        _raise_all("optim", self._problems())

    def _problems(self) -> Iterable[str]:
        yield from _below("learning_rate", self.learning_rate, 0.0)
        yield from _below("weight_decay", self.weight_decay, 0.0)
        yield from _below("eps", self.eps, _SMALLEST_EPS)
        if len(self.betas) != 2:
            yield f"betas = {self.betas!r}: two numbers are needed"
        for index, beta in enumerate(self.betas):
            if not (_is_number(beta) and 0.0 <= beta < 1.0):
                yield f"betas[{index}] = {beta!r} is outside [0, 1)"
        if self.max_grad_norm is not None and not (_is_number(self.max_grad_norm) and self.max_grad_norm > 0.0):
            yield f"max_grad_norm = {self.max_grad_norm!r} is not above 0 (None does not clip)"


class Segment(NamedTuple):
    """Elements [start, end) of a unit's flat range that share their hyper-parameters."""

    start: int
    end: int
    weight_decay: float
    lr_scale: float


def segments_of(entries: Iterable[tuple[str, tuple[int, ...], int, int]], optim: AdamW) -> tuple[Segment, ...]:
    """Cuts a unit's flat range by hyper-parameters.

    Args:
        entries: (full Hugging Face name, shape, offset, numel) of each tensor, in order of their offsets. Padding
            between two tensors goes with the first: its elements are zero and have no gradient, and AdamW keeps them
            so.
        optim: Says what each name gets.

    Returns:
        Segments in order, adjacent equal ones merged; from the first tensor's start to the last one's end.
    """
    segments: list[Segment] = []
    for name, shape, offset, numel in entries:
        weight_decay, lr_scale = hyper_parameters(name, len(shape), optim)
        if segments:
            last = segments.pop()
            assert last.end <= offset, f"{name} at {offset} overlaps the tensor before it, which ends at {last.end}"
            if (last.weight_decay, last.lr_scale) == (weight_decay, lr_scale):
                segments.append(last._replace(end=offset + numel))
                continue
            segments.append(last._replace(end=offset))
        segments.append(Segment(offset, offset + numel, weight_decay, lr_scale))
    return tuple(segments)


def hyper_parameters(name: str, ndim: int, optim: AdamW) -> tuple[float, float]:
    """(weight decay, learning rate factor) of the parameter `name`."""
    weight_decay = optim.weight_decay if ndim >= 2 else 0.0
    group = next((group for group in optim.groups if group.matches(name)), None)
    if group is None:
        return weight_decay, 1.0
    return (weight_decay if group.weight_decay is None else group.weight_decay), group.lr_scale


def unmatched_groups(names: Iterable[str], optim: AdamW) -> list[ParamGroup]:
    """Groups that no parameter falls into: misspelt, or hidden behind an earlier group."""
    used = {next((i for i, group in enumerate(optim.groups) if group.matches(name)), None) for name in names}
    return [group for i, group in enumerate(optim.groups) if i not in used]


class Scalars(NamedTuple):
    """The fp32 numbers that the update of one segment needs."""

    gradient_scale: np.float32
    decay: np.float32
    """1 - lr x weight decay"""
    one_minus_beta1: np.float32
    beta2: np.float32
    one_minus_beta2: np.float32
    bias_correction2_sqrt: np.float32
    eps: np.float32
    step_size: np.float32
    """lr / bias correction of the first moment"""


@dataclass(frozen=True)
class StepCoefficients:
    """What one step of AdamW multiplies with, in float64.

    Attributes:
        learning_rate: Of this step.
        beta1, beta2, eps: See `AdamW`.
        bias_correction1: `1 - beta1^step`.
        bias_correction2_sqrt: `sqrt(1 - beta2^step)`.
        gradient_scale: Factor on the gradients: clip coefficient / loss scale.
    """

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    bias_correction1: float
    bias_correction2_sqrt: float
    gradient_scale: float

    @classmethod
    def of(
        cls, optim: AdamW, step: int, learning_rate: float | None = None, gradient_scale: float = 1.0
    ) -> StepCoefficients:
        """The coefficients of one step.

        Args:
            optim: Hyper-parameters.
            step: Number of updates applied to the moments, this one included: 1, 2, ... A skipped step does not count.
            learning_rate: Of this step; `optim.learning_rate` if not given.
            gradient_scale: See above.
        """
        assert step >= 1, step
        assert math.isfinite(gradient_scale), gradient_scale
        beta1, beta2 = optim.betas
        return cls(
            learning_rate=optim.learning_rate if learning_rate is None else learning_rate,
            beta1=beta1,
            beta2=beta2,
            eps=optim.eps,
            bias_correction1=1.0 - beta1**step,
            bias_correction2_sqrt=math.sqrt(1.0 - beta2**step),
            gradient_scale=gradient_scale,
        )

    def scalars(self, segment: Segment) -> Scalars:
        """Each product is taken in float64 and rounded to fp32 once, as torch does with Python numbers."""
        learning_rate = self.learning_rate * segment.lr_scale
        return Scalars(
            gradient_scale=np.float32(self.gradient_scale),
            decay=np.float32(1.0 - learning_rate * segment.weight_decay),
            one_minus_beta1=np.float32(1.0 - self.beta1),
            beta2=np.float32(self.beta2),
            one_minus_beta2=np.float32(1.0 - self.beta2),
            bias_correction2_sqrt=np.float32(self.bias_correction2_sqrt),
            eps=np.float32(self.eps),
            step_size=np.float32(learning_rate / self.bias_correction1),
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _below(name: str, value: object, least: float) -> Iterable[str]:
    if not (_is_number(value) and value >= least):  # type: ignore[operator]
        yield f"{name} = {value!r} is not a number of at least {least:g}"


def _raise_all(where: str, problems: Iterable[str]) -> None:
    problems = list(problems)
    if problems:
        raise UserError("; ".join(problems), where=where)
