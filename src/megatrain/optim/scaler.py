"""The dynamic loss scale of fp16 training: a small state machine without side effects."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class LossScale:
    """The factor on the loss that keeps small fp16 gradients above zero and large ones below infinity.

    A step with a gradient that is not finite is skipped and lowers the scale; `growth_interval` good steps in a row
    raise it. Factors are powers of two, so scaling and unscaling are exact. Defaults are those of
    torch.amp.GradScaler.

    Attributes:
        scale: The factor on the loss now; gradients are multiplied with `1 / scale`.
        good_steps: Good steps since the scale last changed.
        growth_interval: See above.
        growth: Factor on the scale after good steps.
        backoff: Factor on the scale after a bad step.
        least: The scale does not fall below this: where the loss itself overflows, no scale helps.
        most: The scale does not rise above this.
    """

    scale: float = 2.0**16
    good_steps: int = 0
    growth_interval: int = 2000
    growth: float = 2.0
    backoff: float = 0.5
    least: float = 1.0
    most: float = 2.0**32

    def __post_init__(self) -> None:
        assert self.growth_interval >= 1, self.growth_interval
        assert 0.0 < self.backoff < 1.0 < self.growth, (self.backoff, self.growth)
        assert 0.0 < self.least <= self.scale <= self.most, (self.least, self.scale, self.most)
        factors = (self.scale, self.growth, self.backoff, self.least, self.most)
        assert all(math.frexp(factor)[0] == 0.5 for factor in factors), f"not all powers of two: {factors}"
        assert 0 <= self.good_steps < self.growth_interval, self.good_steps

    def after(self, finite: bool) -> LossScale:
        """The state after a step whose gradients were all finite, or not."""
        if not finite:
            return replace(self, scale=max(self.scale * self.backoff, self.least), good_steps=0)
        if self.good_steps + 1 < self.growth_interval:
            return replace(self, good_steps=self.good_steps + 1)
        return replace(self, scale=min(self.scale * self.growth, self.most), good_steps=0)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> LossScale:
        return cls(**state)
