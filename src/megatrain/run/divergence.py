"""Divergence of a run: non-finite steps in a row, or a loss far above the recent ones."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

from megatrain.metrics.record import StepRecord
from megatrain.units import counted

RECENT_STEPS = 20


@dataclass(frozen=True)
class Divergence:
    """A divergence."""

    first_step: int  # the first bad step; the weights before it are good as far as is known
    step: int  # the last bad step
    what: str  # for messages
    go_back: bool = False  # roll back whatever `run.on_divergence` says


class DivergenceGuard:
    """Checks every step's record.

    Args:
        max_bad_steps: This many non-finite steps in a row are a divergence.
        loss_spike: A loss above this multiple of the median of the last `RECENT_STEPS` is one; None: never.
    """

    def __init__(self, max_bad_steps: int, loss_spike: float | None):
        self._max_bad_steps, self._loss_spike = max_bad_steps, loss_spike
        self._bad_in_a_row = 0
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)

    def check(self, record: StepRecord) -> Divergence | None:
        """The divergence that this step completes, if any."""
        not_finite = record.skipped is not None and record.trained_tokens > 0
        self._bad_in_a_row = self._bad_in_a_row + 1 if not_finite else 0
        if self._bad_in_a_row >= self._max_bad_steps:
            first = record.step - self._bad_in_a_row + 1
            what = f"{counted(self._bad_in_a_row, 'step')} in a row skipped, the last because of: {record.skipped}"
            return Divergence(first, record.step, what)
        if record.loss is None:
            return None
        median = statistics.median(self._recent) if len(self._recent) == RECENT_STEPS else None
        if self._loss_spike is not None and median is not None and record.loss > self._loss_spike * median:
            what = (
                f"the loss of step {record.step} is {record.loss:.4f}, more than {self._loss_spike:g} times the median "
                f"{median:.4f} of the {RECENT_STEPS} steps before (run.loss_spike)"
            )
            return Divergence(record.step, record.step, what)
        self._recent.append(record.loss)
        return None

    def start_over(self) -> None:
        """Forget all records, after a rollback."""
        self._bad_in_a_row = 0
        self._recent.clear()
