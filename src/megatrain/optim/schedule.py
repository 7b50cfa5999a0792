"""Learning rate schedule, as a factor on the configured rate. Pure functions of the step number, which counts from 0.

In warm-up, step s has factor `(s + 1) / warmup_steps`: the first step already learns, and the last one has the full rate. After
it, the curves are those of transformers' schedules of the same names, between the full rate and the floor `min_lr_ratio`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from megatrain.errors import UserError

Kind = Literal["constant", "linear", "cosine", "wsd"]
Decay = Literal["linear", "cosine", "1-sqrt"]


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then a curve.

    Attributes:
        kind: `constant`; `linear` or `cosine` decay over all steps after the warm-up; or `wsd` (warm-up, stable, decay; Hu et
            al., "MiniCPM", 2024), which decays over the last steps only.
        min_lr_ratio: Factor at the end of a decay.
        decay_ratio: `wsd`: share of `total_steps` that decays, rounded up to whole steps.
        decay: `wsd`: shape of the decay. `1-sqrt` is Hägele et al., "Scaling Laws and Compute-Optimal Training Beyond Fixed
            Training Durations", 2024.
    """

    kind: Kind
    total_steps: int
    warmup_steps: int = 0
    min_lr_ratio: float = 0.0
    decay_ratio: float = 0.1
    decay: Decay = "1-sqrt"

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise UserError("; ".join(problems), where="schedule")

    @property
    def decay_steps(self) -> int:
        """Steps that decay, at the end of the run."""
        if self.kind == "constant":
            return 0
        if self.kind == "wsd":
            return whole_steps(self.decay_ratio, self.total_steps)
        return self.total_steps - self.warmup_steps

    def lr_factor(self, step: int) -> float:
        """Factor on the learning rate of step `step`. A step after the end of the run has the curve's last value."""
        assert step >= 0, step
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        decayed = step - (self.total_steps - self.decay_steps)
        if decayed <= 0 or self.decay_steps == 0:
            return 1.0
        progress = min(decayed / self.decay_steps, 1.0)
        shape = self.decay if self.kind == "wsd" else self.kind
        return self.min_lr_ratio + (1.0 - self.min_lr_ratio) * _fall(shape, progress)

    def _problems(self) -> Iterable[str]:
        if self.kind not in get_args(Kind):
            yield f"kind = {self.kind!r} is none of {', '.join(get_args(Kind))}"
        if self.total_steps < 1:
            yield f"total_steps = {self.total_steps}: a run has at least one step"
        elif not 0 <= self.warmup_steps < self.total_steps:
            yield f"a warm-up of {self.warmup_steps} steps does not fit into a run of {self.total_steps} steps"
        elif self.kind == "wsd" and self.warmup_steps + self.decay_steps > self.total_steps:
            yield (
                f"a warm-up of {self.warmup_steps} steps and a decay of {self.decay_steps} do not fit into a run of "
                f"{self.total_steps} steps"
            )
        if not 0.0 <= self.min_lr_ratio <= 1.0:
            yield f"min_lr_ratio = {self.min_lr_ratio} is outside [0, 1]"
        if not 0.0 <= self.decay_ratio <= 1.0:
            yield f"decay_ratio = {self.decay_ratio} is outside [0, 1]"
        if self.decay not in get_args(Decay):
            yield f"decay = {self.decay!r} is none of {', '.join(get_args(Decay))}"


def whole_steps(ratio: float, total_steps: int) -> int:
    """A share of a run in whole steps, rounded up, as transformers rounds `warmup_ratio`."""
    return math.ceil(ratio * total_steps)


def _fall(shape: str, progress: float) -> float:
    """Falls from 1 at progress 0 to 0 at progress 1."""
    if shape == "linear":
        return 1.0 - progress
    if shape == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    assert shape == "1-sqrt", shape
    return 1.0 - math.sqrt(progress)
