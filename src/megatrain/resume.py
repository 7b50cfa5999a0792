"""What a run that goes on must have in common with the run that wrote its checkpoint.

[Note: what a checkpoint remembers of its run]
`data`: what decides which rows make which step. `schedule`: the settings of the learning rate, and a checksum over the rates
of all steps taken. The first must be equal; of the second only the past must: a run may be prolonged, as long as no step that
was taken would have had another learning rate. `data_offset`: batches that were left out when the run went back before a
divergence. `rollbacks`: how often it did.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.config.schema import RunConfig
from megatrain.errors import UserError

if TYPE_CHECKING:
    from megatrain.data.rows import PackedRows

KEYS = {
    "rows": "data (rows)",
    "rows_per_epoch": "data (rows of an epoch)",
    "tokens": "data (tokens)",
    "content": "data (checksum of the samples)",
    "max_tokens": "data.max_tokens",
    "rows_per_step": "batch.tokens_per_step (rows of a step)",
    "seed": "run.seed",
}
"""Entry of the fingerprint -> what a person calls it."""


def content_crc32(rows: PackedRows) -> int:
    """Checksum of the samples and of how they lie in rows."""
    crc = 0
    for group in rows.groups:
        for array in (group.store.hashes, group.segments.samples, group.segments.rows, group.segments.lengths):
            crc = zlib.crc32(memoryview(array.tobytes()), crc)
    return crc


class PastRates:
    """Checksum over the learning rates of steps 1 to n, kept up to date a step at a time.

    Args:
        rate_at: Learning rate of a step, 0 the first.
        steps: n at the beginning.
    """

    def __init__(self, rate_at: Callable[[int], float], steps: int = 0):
        self._rate_at = rate_at
        self.crc32 = 0
        self.steps = 0
        self.extend_to(steps)

    def extend_to(self, steps: int) -> None:
        """Take in the rates up to step `steps`; going back starts over."""
        if steps < self.steps:
            self.crc32 = self.steps = 0
        while self.steps < steps:
            self.crc32 = zlib.crc32(struct.pack("<d", self._rate_at(self.steps)), self.crc32)
            self.steps += 1


def schedule_settings(run: RunConfig, total_steps: int) -> dict[str, Any]:
    """What decides the learning rate, for people."""
    return {
        "optim.learning_rate": run.optim.learning_rate,
        "schedule.kind": run.schedule.kind,
        "schedule.warmup_ratio": run.schedule.warmup_ratio,
        "schedule.warmup_steps": run.schedule.warmup_steps,
        "schedule.min_lr_ratio": run.schedule.min_lr_ratio,
        "schedule.decay_ratio": run.schedule.decay_ratio,
        "total steps": total_steps,
    }


def changes(
    then: Mapping[str, Any], data: Mapping[str, Any], schedule: Mapping[str, Any], rate_at: Callable[[int], float]
) -> list[str]:
    """What differs from the checkpoint's run in a way that matters, each as a sentence.

    Args:
        then: The checkpoint's `extra`.
        data, schedule, rate_at: Of the run that goes on.
    """
    old = then.get("data", {})
    found = [
        f"{KEYS.get(name, name)} was {old[name]} and is {value}"
        for name, value in data.items()
        if name in old and old[name] != value
    ]
    past = then.get("past_rates_crc32")
    if past is not None and past != PastRates(rate_at, int(then["step"])).crc32:
        differing = differences(then, schedule)
        found.append(
            f"the learning rates of the {then['step']} steps taken would have been others: " + "; ".join(differing)
        )
    return found


def differences(then: Mapping[str, Any], schedule: Mapping[str, Any]) -> list[str]:
    """Settings of the schedule that are not the checkpoint's."""
    old = then.get("schedule", {})
    return [f"{k} was {old[k]} and is {v}" for k, v in schedule.items() if k in old and old[k] != v]


def refuse_changes(found: list[str], start_from: Path) -> None:
    """Raise UserError for `changes`, if there are any."""
    if found:
        raise UserError(
            "the run does not go on as it began: " + "; ".join(found),
            f"--resume {start_from}",
            "set it back; or go on all the same with --allow-changes (run.allow_changes: true), and accept that rows "
            "already seen may come again",
        )
