"""`OptimizerSpec`: an optimizer's states, hyper-parameters, numbers of one step, and arithmetic on flat planes.

A subclass is all that an optimizer needs. The host store allocates the states, checkpoints hold them under their names, and the
planner counts their bytes. The update is written once as torch calls on fp32 tensors (`update_`), which run on any device. A
fast optimizer adds a kernel for host threads (`host_kernel`) and one for the GPU (`update_on_device`); `update_` is then the
reference that tests compare them with.

Updates must be elementwise, because units are cut into pieces and blocks, and must keep a zero weight with a zero gradient and
zero states at zero: the padding between tensors.

Legend: planes and gradients are flat, (N,).
"""

from __future__ import annotations

import functools
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatrain.errors import UserError
from megatrain.host_memory.layout import SCALES, elements_per_value, values_of
from megatrain.host_memory.store import UnitPlanes, join, split_
from megatrain.optim.blocks import CODES, decode, encode
from megatrain.optim.rounding import noise, round_, step_key, unit_key

MASTER_BYTES = 4
"""A parameter's master: hi (bf16) and lo (int16), or fp32."""

# Bounds the temporaries of `update_` to a few times 64 MiB, whatever the size of a unit.
BLOCK_NUMEL = 1 << 24


@dataclass(frozen=True)
class StateSpec:
    """One value per parameter that an optimizer keeps, zero before the first update.

    Attributes:
        name: Name of the plane, and of the tensors in a checkpoint (`m/model.norm.weight`).
        dtype: Storage type: fp32; or, by stochastic rounding and of the first two states, bf16, or int8 (signed) and uint8
            (not negative): codes in blocks, with a plane of scales, see [Note: 8-bit blocks] in optim/blocks.py.
        label: Description in memory reports.
        torch_key: Key in the state of `OptimizerSpec.torch_optimizer`.
    """

    name: str
    dtype: torch.dtype = torch.float32
    label: str = "optimizer state"
    torch_key: str = ""

    def __post_init__(self) -> None:
        assert self.name not in ("hi", "lo", "grad") and "/" not in self.name, self.name


@dataclass(frozen=True)
class ParamGroup:
    """Parameters with their own hyper-parameters.

    Attributes:
        pattern: Regular expression, searched in the full Hugging Face name (`model.layers.0.self_attn.q_proj.weight`).
        weight_decay: None keeps the weight decay that they would have without the group.
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


class Scalars(NamedTuple):
    """Numbers of one segment in one step; `learning_rate` includes the segment's `lr_scale`."""

    learning_rate: float
    weight_decay: float
    gradient_scale: float
    step: int
    rounding_key: int


@dataclass(frozen=True)
class StepCoefficients:
    """Numbers of one step, the same for all units.

    Attributes:
        step: Number of this update: 1, 2, ... Skipped steps do not count.
        gradient_scale: Factor on the gradients: clip coefficient / loss scale.
        seed: Of stochastic rounding.
    """

    step: int
    learning_rate: float
    gradient_scale: float
    seed: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        assert self.step >= 1, self.step
        assert math.isfinite(self.gradient_scale), self.gradient_scale

    @functools.cached_property
    def rounding_key(self) -> int:
        """See [Note: stochastic rounding] in optim/rounding.py."""
        return step_key(self.seed, self.step)

    def scalars(self, segment: Segment) -> Any:
        """Numbers of one segment, a NamedTuple with at least `gradient_scale` and `rounding_key`."""
        learning_rate = self.learning_rate * segment.lr_scale
        return Scalars(learning_rate, segment.weight_decay, self.gradient_scale, self.step, self.rounding_key)


@dataclass(frozen=True)
class OptimizerSpec(ABC):
    """Base class of optimizers: frozen dataclasses. See the top of this file.

    Attributes:
        learning_rate: Default for steps that do not give one.
        weight_decay: Decay of matrices; norms and biases decay only by a group: see `hyper_parameters`.
        max_grad_norm: Clip the global gradient norm to this; None does not clip.
        groups: Exceptions; the first group that matches a name holds.
        seed: Of the stochastic rounding of states.
    """

    learning_rate: float = 1e-5
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0
    groups: tuple[ParamGroup, ...] = ()
    seed: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple(self.groups))
        raise_all("optim", self.problems())

    @property
    @abstractmethod
    def states(self) -> tuple[StateSpec, ...]:
        """States, in a fixed order."""

    @abstractmethod
    def update_(self, master: Tensor, grad: Tensor, states: Mapping[str, Tensor], scalars: Any) -> None:
        """Update parameters and states in place with elementwise torch calls, on any device.

        Args:
            master: fp32 (N,).
            grad: fp32 (N,), already multiplied by `gradient_scale`; may be overwritten.
            states: By name, (N,) fp32 each; those that are stored in fewer bits are rounded afterwards.
            scalars: From `StepCoefficients.scalars`.
        """

    @property
    def name(self) -> str:
        """Name in checkpoints and messages."""
        return type(self).__name__

    @property
    def state_dtypes(self) -> dict[str, torch.dtype]:
        """Storage type by plane of the states; planes of codes have their scales next to them."""
        found: dict[str, torch.dtype] = {}
        for state in self.states:
            found[state.name] = state.dtype
            if state.dtype in CODES:
                found[state.name + SCALES] = torch.float32
        return found

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes of master and states; with 8-bit states not whole, because a block has one scale."""
        planes = self.state_dtypes.items()
        total = MASTER_BYTES + sum(dtype.itemsize / elements_per_value(kind) for kind, dtype in planes)
        return int(total) if total == int(total) else total

    def update_bytes(self, gradient_bytes: int) -> float:
        """Bytes that one update moves per parameter: master and states are read and written, the gradient is read."""
        return 2 * self.bytes_per_parameter + gradient_bytes

    def problems(self) -> Iterable[str]:
        """What is wrong with the hyper-parameters; the constructor raises one error that lists all."""
        yield from below("learning_rate", self.learning_rate, 0.0)
        yield from below("weight_decay", self.weight_decay, 0.0)
        if self.max_grad_norm is not None and not (is_number(self.max_grad_norm) and self.max_grad_norm > 0.0):
            yield f"max_grad_norm = {self.max_grad_norm!r} is not above 0 (None does not clip)"

    def coefficients(
        self, step: int, learning_rate: float | None = None, gradient_scale: float = 1.0
    ) -> StepCoefficients:
        """Numbers of one step, hashable. See `StepCoefficients`; None takes the optimizer's own learning rate."""
        return StepCoefficients(step, self._rate(learning_rate), gradient_scale, seed=self.seed)

    def update_unit_(
        self, planes: UnitPlanes, grad: Tensor, segments: Sequence[Segment], coefficients: StepCoefficients
    ) -> None:
        """One step on a unit, in place, with `update_`. `grad` (bf16 or fp32, (N,)) is unchanged.

        Asynchronous on a GPU, ordered by the current stream.
        """
        for segment in segments:
            self.update_range_(planes, grad, segment.start, segment.end, coefficients.scalars(segment))

    @torch.no_grad()
    def update_range_(self, planes: UnitPlanes, grad: Tensor, start: int, end: int, scalars: Any) -> None:
        """One step on the elements [start, end) of one segment, with `update_`."""
        for first in range(start, end, BLOCK_NUMEL):
            block = slice(first, min(first + BLOCK_NUMEL, end))
            hi, lo = planes.hi[block], None if planes.lo is None else planes.lo[block]
            master = hi if lo is None else join(hi, lo)
            states = {name: state[values_of(name, block)] for name, state in planes.states.items()}
            names = [name for name in states if elements_per_value(name) == 1]
            wide = {name: _widened(states, name) for name in names}
            self.update_(master, grad[block].to(master.dtype) * float(scalars.gradient_scale), wide, scalars)
            if lo is not None:
                split_(master, hi, lo)
            if any(states[name].dtype in (torch.bfloat16, *CODES) for name in names):
                key = unit_key(int(scalars.rounding_key), planes.name)
                bits = noise(key, planes.start + first, block.stop - first, hi.device)
                for i, name in enumerate(names):
                    own_bits = bits >> 16 * i & 0xFFFF
                    if states[name].dtype == torch.bfloat16:
                        round_(wide[name], own_bits, states[name])
                    elif states[name].dtype in CODES:
                        encode(wide[name], states[name], states[name + SCALES], own_bits)

    def host_kernel(self, planes: UnitPlanes, grad: Tensor) -> Callable[[int, int, Any], object]:
        """A function of (start, end, scalars) that does one step on these elements of a unit in host memory.

        Several threads call it at once on different elements; it should release the GIL. By default `update_range_`.
        """
        return functools.partial(self.update_range_, planes, grad)

    def update_on_device(
        self, planes: UnitPlanes, grad: Tensor, segments: Sequence[Segment], coefficients: StepCoefficients
    ) -> None:
        """`update_unit_` for a resident unit, asynchronous on the current stream. By default `update_unit_` itself."""
        self.update_unit_(planes, grad, segments, coefficients)

    def torch_optimizer(self, groups: Sequence[Mapping[str, Any]], fused: bool | None) -> torch.optim.Optimizer:
        """The torch optimizer that the mesh engine uses; `StateSpec.torch_key` names its states. By default raises UserError.

        `groups` are torch parameter groups: dicts with `params`, `weight_decay` and `lr_scale`.
        """
        raise UserError(
            f"the mesh engine cannot train with {self.name}: it has no torch_optimizer",
            "optim",
            f"implement {self.name}.torch_optimizer, or use HostEngine",
        )

    def _rate(self, learning_rate: float | None) -> float:
        return self.learning_rate if learning_rate is None else learning_rate


def _widened(states: Mapping[str, Tensor], name: str) -> Tensor:
    """A state in fp32: itself, or a copy."""
    state = states[name]
    if state.dtype in CODES:
        return decode(state, states[name + SCALES])
    return state.float() if state.dtype == torch.bfloat16 else state


def segments_of(
    entries: Iterable[tuple[str, tuple[int, ...], int, int]], optim: OptimizerSpec, undecayed: Collection[str] = ()
) -> tuple[Segment, ...]:
    """Cut a unit's flat range by hyper-parameters, from the first tensor's start to the last one's end.

    `entries` are (full Hugging Face name, shape, offset, numel) by ascending offset. Adjacent equal segments are merged. Padding
    behind a tensor belongs to its segment. `undecayed`: as for `hyper_parameters`.
    """
    segments: list[Segment] = []
    for name, shape, offset, numel in entries:
        weight_decay, lr_scale = hyper_parameters(name, len(shape), optim, undecayed)
        if segments:
            last = segments.pop()
            assert last.end <= offset, f"{name} at {offset} overlaps the tensor before it, which ends at {last.end}"
            if (last.weight_decay, last.lr_scale) == (weight_decay, lr_scale):
                segments.append(last._replace(end=offset + numel))
                continue
            segments.append(last._replace(end=offset))
        segments.append(Segment(offset, offset + numel, weight_decay, lr_scale))
    return tuple(segments)


UNDECAYED_NAME = re.compile(
    r"bias|layernorm|rmsnorm|(^|\.)norm\d*(\.|$)|_norm\d*(\.|$)|(^|\.)ln_\w+(\.|$)", re.IGNORECASE
)
"""Names of norms and biases, as transformers' Trainer decides. Some have two dimensions: the biases of experts, (experts, width),
and of gates, norms of each head."""


def hyper_parameters(
    name: str, ndim: int, optim: OptimizerSpec, undecayed: Collection[str] = ()
) -> tuple[float, float]:
    """(weight decay, learning rate factor) of the parameter `name`.

    A parameter decays if it has two dimensions or more, its name is not that of a norm or a bias, and it is none of `undecayed`:
    full names of parameters that the model's modules show to be norms.
    """
    decays = ndim >= 2 and UNDECAYED_NAME.search(name) is None and name not in undecayed
    weight_decay = optim.weight_decay if decays else 0.0
    group = next((group for group in optim.groups if group.matches(name)), None)
    if group is None:
        return weight_decay, 1.0
    return (weight_decay if group.weight_decay is None else group.weight_decay), group.lr_scale


def unmatched_groups(names: Iterable[str], optim: OptimizerSpec) -> list[ParamGroup]:
    """Groups that no parameter belongs to: misspelt, or hidden by an earlier group."""
    used = {next((i for i, group in enumerate(optim.groups) if group.matches(name)), None) for name in names}
    return [group for i, group in enumerate(optim.groups) if i not in used]


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def below(name: str, value: object, least: float) -> Iterable[str]:
    """A problem if a hyper-parameter is not a number of at least `least`."""
    if not (is_number(value) and value >= least):  # type: ignore[operator]
        yield f"{name} = {value!r} is not a number of at least {least:g}"


def raise_all(where: str, problems: Iterable[str]) -> None:
    problems = list(problems)
    if problems:
        raise UserError("; ".join(problems), where=where)
