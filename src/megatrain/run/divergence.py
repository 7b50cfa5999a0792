"""When a run has gone wrong: steps that are not finite in a row, or a loss far above the recent ones."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

from megatrain.metrics.record import StepRecord
from megatrain.units import counted

RECENT_STEPS = 20


@dataclass(frozen=True)
class Divergence:
    """A run that has gone wrong.

    Attributes:
        first_step: The first step that was wrong; the weights before it are good as far as anyone knows.
        step: The last.
        what: For people.
        go_back: Whether the run is to go back whatever `run.on_divergence` says.
    """

    first_step: int
    step: int
    what: str
    go_back: bool = False


class DivergenceGuard:
    """Looks at every step's record.

    Args:
        max_bad_steps: So many steps in a row that were not finite are a divergence.
        loss_spike: A loss above this multiple of the median of the last `RECENT_STEPS` is one; None: never.
    """

    def __init__(self, max_bad_steps: int, loss_spike: float | None):
        self._max_bad_steps, self._loss_spike = max_bad_steps, loss_spike
        self._bad_in_a_row = 0
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)

    def check(self, record: StepRecord) -> Divergence | None:
        not_finite = record.skipped is not None and record.trained_tokens > 0
        self._bad_in_a_row = self._bad_in_a_row + 1 if not_finite else 0
        if self._bad_in_a_row >= self._max_bad_steps:
            first = record.step - self._bad_in_a_row + 1
            what = f"{counted(self._bad_in_a_row, 'step')} in a row skipped, the last because of: {record.skipped}"
            return Divergence(first, record.step, what)
        if record.loss is None:
            return None
        full = len(self._recent) == RECENT_STEPS
        if self._loss_spike is not None and full and record.loss > self._loss_spike * statistics.median(self._recent):
            median = statistics.median(self._recent)
            what = (
                f"the loss of step {record.step} is {record.loss:.4f}, more than {self._loss_spike:g} times the median "
                f"{median:.4f} of the {RECENT_STEPS} steps before (run.loss_spike)"
            )
            return Divergence(record.step, record.step, what)
        self._recent.append(record.loss)
        return None

    def start_over(self) -> None:
        """The run has gone back: what was seen is another history."""
        self._bad_in_a_row = 0
        self._recent.clear()
