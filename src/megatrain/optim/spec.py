"""What an optimizer is to the engines: its states, the numbers of one step, and its arithmetic on flat planes.

`OptimizerSpec` is the one place that an optimizer needs. The host store allocates its states, checkpoints write and read
them under their names, and the planner counts their bytes. Its update is written once, as torch calls on fp32 tensors
(`update_`); that runs on any device. An optimizer that should be fast adds a kernel for host threads (`host_kernel`) and
one for the GPU (`update_on_device`), which the slow update then verifies.

The arithmetic must work element by element, because units are cut into pieces and into blocks, and a zero weight with a
zero gradient and zero states must stay zero: that is the padding between tensors.

Legend: planes and gradients are flat, (N,).
"""

from __future__ import annotations

import functools
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megatrain.errors import UserError
from megatrain.host_memory.planes import join, split_

MASTER_BYTES = 4
"""Of a parameter's master: hi (bf16) and lo (int16), or fp32."""

# Bounds the temporaries of the slow update to a few times 64 MiB, whatever the size of a unit.
BLOCK_NUMEL = 1 << 24


@dataclass(frozen=True)
class StateSpec:
    """A tensor that an optimizer keeps of every parameter, zero before the first update.

    Attributes:
        name: Of the plane, and of the tensors in a checkpoint (`m/model.norm.weight`).
        dtype: Of the plane.
        label: What it is, in memory reports.
        torch_key: Its key in the state of `OptimizerSpec.torch_optimizer`.
    """

    name: str
    dtype: torch.dtype = torch.float32
    label: str = "optimizer state"
    torch_key: str = ""

    def __post_init__(self) -> None:
        assert self.name not in ("hi", "lo", "grad") and "/" not in self.name, self.name


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
        raise_all(f"optim.groups[{self.pattern!r}]", self._problems())

    def matches(self, name: str) -> bool:
        return re.search(self.pattern, name) is not None

    def _problems(self) -> Iterable[str]:
        try:
            re.compile(self.pattern)
        except (re.error, TypeError) as error:
            yield f"pattern is not a regular expression: {error}"
        if self.weight_decay is not None:
            yield from below("weight_decay", self.weight_decay, 0.0)
        yield from below("lr_scale", self.lr_scale, 0.0)


class Segment(NamedTuple):
    """Elements [start, end) of a unit's flat range that share their hyper-parameters."""

    start: int
    end: int
    weight_decay: float
    lr_scale: float


class Planes(Protocol):
    """The planes (N,) of a unit: `hi` bf16 and `lo` int16, or `hi` the fp32 master and no `lo`; states by name."""

    hi: Tensor
    lo: Tensor | None
    states: dict[str, Tensor]


class Scalars(NamedTuple):
    """What the update of one segment in one step multiplies with."""

    learning_rate: float
    """Of the segment: `lr_scale` is in it."""
    weight_decay: float
    gradient_scale: float
    step: int
    """Number of this update: 1, 2, ... A skipped step does not count."""


@dataclass(frozen=True)
class StepCoefficients:
    """The numbers of one step, the same for all units.

    Attributes:
        step: Number of updates applied to the states, this one included: 1, 2, ... A skipped step does not count.
        learning_rate: Of this step.
        gradient_scale: Factor on the gradients: clip coefficient / loss scale.
    """

    step: int
    learning_rate: float
    gradient_scale: float

    def __post_init__(self) -> None:
        assert self.step >= 1, self.step
        assert math.isfinite(self.gradient_scale), self.gradient_scale

    def scalars(self, segment: Segment) -> Any:
        """The numbers for one segment, with a `gradient_scale` among them."""
        return Scalars(self.learning_rate * segment.lr_scale, segment.weight_decay, self.gradient_scale, self.step)


@dataclass(frozen=True)
class OptimizerSpec(ABC):
    """An optimizer as plain data and arithmetic; see the top of this file.

    Attributes:
        learning_rate: Used where a step does not give its own.
        weight_decay: Of parameters with two dimensions or more. Norms and biases (ndim < 2) are not decayed unless a
            group says so.
        max_grad_norm: The global gradient norm is clipped to this; None does not clip.
        groups: Exceptions; the first one that matches a name holds.
    """

    learning_rate: float = 1e-5
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0
    groups: tuple[ParamGroup, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple(self.groups))
        raise_all("optim", self.problems())

    @property
    @abstractmethod
    def states(self) -> tuple[StateSpec, ...]:
        """What it keeps of every parameter, in a fixed order."""

    @abstractmethod
    def update_(self, master: Tensor, grad: Tensor, states: Mapping[str, Tensor], scalars: Any) -> None:
        """Updates a stretch of parameters in place, on any device, with torch calls.

        Args:
            master: fp32 (N,).
            grad: fp32 (N,), multiplied with `gradient_scale` already; may be overwritten.
            states: By name, (N,) each.
            scalars: Of the step and the segment, from `StepCoefficients.scalars`.
        """

    @property
    def name(self) -> str:
        """What checkpoints and messages call it."""
        return type(self).__name__

    @property
    def state_dtypes(self) -> dict[str, torch.dtype]:
        """Type of each state's plane, by name."""
        return {state.name: state.dtype for state in self.states}

    @property
    def bytes_per_parameter(self) -> int:
        """Of master and states together."""
        return MASTER_BYTES + sum(state.dtype.itemsize for state in self.states)

    def update_bytes(self, gradient_bytes: int) -> int:
        """Bytes that an update moves for one parameter: master and states are read and written, the gradient is read."""
        return 2 * self.bytes_per_parameter + gradient_bytes

    def problems(self) -> Iterable[str]:
        """What is wrong with the hyper-parameters, for one error that names all of it."""
        yield from below("learning_rate", self.learning_rate, 0.0)
        yield from below("weight_decay", self.weight_decay, 0.0)
        if self.max_grad_norm is not None and not (is_number(self.max_grad_norm) and self.max_grad_norm > 0.0):
            yield f"max_grad_norm = {self.max_grad_norm!r} is not above 0 (None does not clip)"

    def coefficients(
        self, step: int, learning_rate: float | None = None, gradient_scale: float = 1.0
    ) -> StepCoefficients:
        """The numbers of one step, hashable; see `StepCoefficients`.

        Args:
            step: Number of this update.
            learning_rate: Of this step; the optimizer's own if not given.
            gradient_scale: Factor on the gradients.
        """
        return StepCoefficients(step, self._rate(learning_rate), gradient_scale)

    def update_unit_(
        self, planes: Planes, grad: Tensor, segments: Sequence[Segment], coefficients: StepCoefficients
    ) -> None:
        """One step on the planes of a unit, in place, with `update_`. Asynchronous on a GPU.

        Args:
            planes: See `Planes`.
            grad: bf16 or fp32 (N,), unchanged.
            segments: What to update, and how.
            coefficients: Of this step.
        """
        for segment in segments:
            self.update_range_(planes, grad, segment.start, segment.end, coefficients.scalars(segment))

    @torch.no_grad()
    def update_range_(self, planes: Planes, grad: Tensor, start: int, end: int, scalars: Any) -> None:
        """One step on the elements [start, end), which lie in one segment."""
        for first in range(start, end, BLOCK_NUMEL):
            block = slice(first, min(first + BLOCK_NUMEL, end))
            hi, lo = planes.hi[block], None if planes.lo is None else planes.lo[block]
            master = hi if lo is None else join(hi, lo)
            states = {name: state[block] for name, state in planes.states.items()}
            self.update_(master, grad[block].to(torch.float32) * float(scalars.gradient_scale), states, scalars)
            if lo is not None:
                split_(master, hi, lo)

    def host_kernel(self, planes: Planes, grad: Tensor) -> Callable[[int, int, Any], object]:
        """A function of (start, end, scalars) that does one step on these elements of a unit in host memory.

        Several threads call it at once, each with other elements; it should release the GIL. By default the slow update.
        """
        return functools.partial(self.update_range_, planes, grad)

    def update_on_device(
        self, planes: Planes, grad: Tensor, segments: Sequence[Segment], coefficients: StepCoefficients
    ) -> None:
        """`update_unit_` for a unit on the GPU, behind everything on the current stream. By default the slow update."""
        self.update_unit_(planes, grad, segments, coefficients)

    def torch_optimizer(self, groups: Sequence[Mapping[str, Any]], fused: bool | None) -> torch.optim.Optimizer:
        """The same optimizer as one of torch's, for the mesh engine; `StateSpec.torch_key` names its states.

        Args:
            groups: Dicts with `params`, `weight_decay` and `lr_scale`, as torch's optimizers take them.
            fused: Ask for a kernel without temporaries; None leaves it to torch.

        Raises:
            UserError: There is none.
        """
        raise UserError(
            f"the mesh engine has no {self.name}", "optim", "implement OptimizerSpec.torch_optimizer, or use HostEngine"
        )

    def _rate(self, learning_rate: float | None) -> float:
        return self.learning_rate if learning_rate is None else learning_rate


def segments_of(entries: Iterable[tuple[str, tuple[int, ...], int, int]], optim: OptimizerSpec) -> tuple[Segment, ...]:
    """Cuts a unit's flat range by hyper-parameters.

    Args:
        entries: (full Hugging Face name, shape, offset, numel) of each tensor, in order of their offsets. Padding
            between two tensors goes with the first: its elements are zero and have no gradient, and optimizers keep
            them so.
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


def hyper_parameters(name: str, ndim: int, optim: OptimizerSpec) -> tuple[float, float]:
    """(weight decay, learning rate factor) of the parameter `name`."""
    weight_decay = optim.weight_decay if ndim >= 2 else 0.0
    group = next((group for group in optim.groups if group.matches(name)), None)
    if group is None:
        return weight_decay, 1.0
    return (weight_decay if group.weight_decay is None else group.weight_decay), group.lr_scale


def unmatched_groups(names: Iterable[str], optim: OptimizerSpec) -> list[ParamGroup]:
    """Groups that no parameter falls into: misspelt, or hidden behind an earlier group."""
    used = {next((i for i, group in enumerate(optim.groups) if group.matches(name)), None) for name in names}
    return [group for i, group in enumerate(optim.groups) if i not in used]


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def below(name: str, value: object, least: float) -> Iterable[str]:
    """The problem of a hyper-parameter that is not a number of at least `least`, if it has it."""
    if not (is_number(value) and value >= least):  # type: ignore[operator]
        yield f"{name} = {value!r} is not a number of at least {least:g}"


def raise_all(where: str, problems: Iterable[str]) -> None:
    problems = list(problems)
    if problems:
        raise UserError("; ".join(problems), where=where)
