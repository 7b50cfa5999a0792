"""Which rows make which step: a pure function of the step number.

An epoch takes every group of rows `weight` times, in an order seeded by the epoch. Nothing is remembered between steps,
so that a run is resumed by its step number alone, and any step is found at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from megatrain.data.packing import permutation
from megatrain.data.rows import PackedRows

if TYPE_CHECKING:
    from torch import Tensor


class StepLoader:
    """Batches by step number.

    Args:
        rows: The rows.
        rows_per_step: Rows of a step; the last step of an epoch has what is left.
        seed: Decides the order.
        shuffle: False: every row once, in the order of `rows`, whatever the weights.

    Attributes:
        rows_per_epoch: Rows of an epoch, weights applied.
        steps_per_epoch: Its steps, the partial one included.
    """

    def __init__(self, rows: PackedRows, rows_per_step: int, seed: int, shuffle: bool = True):
        assert rows_per_step > 0, rows_per_step
        assert len(rows) > 0, "there are no rows"
        self.rows, self.rows_per_step = rows, rows_per_step
        self._seed, self._shuffle = seed, shuffle
        # A group keeps at least one row, so that a source with a small weight does not vanish.
        self._takes = [max(1, round(g.weight * len(g))) if shuffle and len(g) else len(g) for g in rows.groups]
        self.rows_per_epoch = sum(self._takes)
        self.steps_per_epoch = -(-self.rows_per_epoch // rows_per_step)
        self._order: tuple[int, np.ndarray] | None = None  # the epoch in use, and its rows

    def epoch_of(self, step: int) -> int:
        return step // self.steps_per_epoch

    def rows_of(self, step: int) -> np.ndarray:
        """Numbers of the rows of a step (from 0)."""
        epoch, own = divmod(step, self.steps_per_epoch)
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, self._order_of(epoch))
        return self._order[1][own * self.rows_per_step : (own + 1) * self.rows_per_step]

    def batch(self, step: int) -> dict[str, Tensor]:
        """The batch of a step: int64 (B, T) tensors, see `PackedRows.arrays`."""
        return self.rows.batch(self.rows_of(step).tolist())

    def places(self, step: int) -> list[str]:
        """Where the samples of a step came from."""
        return [place for row in self.rows_of(step).tolist() for place in self.rows.places(row)]

    def epoch(self, number: int = 0) -> Iterator[dict[str, Tensor]]:
        """All batches of an epoch."""
        first = number * self.steps_per_epoch
        return (self.batch(step) for step in range(first, first + self.steps_per_epoch))

    def _order_of(self, epoch: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(len(self.rows))
        parts, first = [], 0
        for number, (group, take) in enumerate(zip(self.rows.groups, self._takes, strict=True)):
            parts.append(first + self._group_rows(number, len(group), epoch * take, take))
            first += len(group)
        chosen = np.concatenate(parts)
        return chosen[permutation(len(chosen), self._seed, 0, epoch)]

    def _group_rows(self, group: int, count: int, begin: int, take: int) -> np.ndarray:
        """Places `begin..begin + take` of an endless sequence of passes over a group, each in its own order.

        A weight of 0.5 thus takes the other half in the next epoch, and 1.5 every row once or twice.
        """
        if take == 0:
            return np.zeros(0, dtype=np.int64)
        passes = range(begin // count, (begin + take - 1) // count + 1)
        rows = np.concatenate([permutation(count, self._seed, 1, group, one) for one in passes])
        skip = begin - passes[0] * count
        return rows[skip : skip + take]
