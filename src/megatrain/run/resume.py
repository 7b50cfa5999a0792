"""What a resumed run must have in common with the run that wrote its checkpoint.

[Note: what a checkpoint remembers of its run]
`data`: what decides which rows form which step. `schedule`: the settings of the learning rate, and a checksum over the rates of
all steps taken. `settings`: those of optimizer, loss and number formats. These must be equal, except that only the past of the
schedule counts: a run may be prolonged as long as no step that was taken would have had another learning rate. `computed_in`: the
compute dtype, also where `precision.compute_dtype` is auto. `held_out`: some of the samples that were validated on and not
trained. `data_offset`: batches skipped by rollbacks. `rollbacks`: their number. `guard`, `alerts`, `skipped_steps`: the history
by which the run judges its next steps, so that a resumed run stops, rolls back and alerts where the undisturbed one does. `plan`:
how steps are computed: the settings that decide it, the planner's choice on a GPU, the layout of the mesh engine; see [Note: the
cut and the bits] in planner/keep.py.

Each kind of difference has a name (`ChangeName`), by which the user allows it.
"""

from __future__ import annotations

import logging
import struct
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatrain.config.schema import ChangeName, RunConfig
from megatrain.engine.plan import compute_dtype_of, device_of
from megatrain.errors import UserError
from megatrain.units import counted

if TYPE_CHECKING:
    from megatrain.data.rows import PackedRows, StepLoader

logger = logging.getLogger(__name__)

KEYS: dict[str, tuple[ChangeName, str]] = {
    "rows": ("data", "data (rows)"),
    "rows_per_epoch": ("data", "data (rows of an epoch)"),
    "tokens": ("data", "data (tokens)"),
    "content": ("data", "data (checksum of token ids, targets, rows and weights)"),
    "max_tokens": ("data", "data.max_tokens"),
    "rows_per_step": ("batch", "batch.tokens_per_step (rows of a step)"),
    "seed": ("seed", "run.seed"),
}
"""Entry of the fingerprint -> (the name that allows a change of it, its name in messages)."""
REMEMBERED_HELD_OUT = 1024
"""Held-out samples that a checkpoint remembers: enough to notice that they are trained, few enough to store."""


@dataclass(frozen=True)
class Change:
    """A difference that matters."""

    name: ChangeName  # allows it
    what: str  # for messages


@dataclass(frozen=True)
class Start:
    """Where a run begins."""

    start_from: Path | None = None  # the checkpoint to resume from; None for a run from the beginning
    then: Mapping[str, Any] = field(default_factory=dict)  # what that checkpoint remembers of its run (`saved_extra`)


@dataclass(frozen=True)
class Steps:
    """The length of a run and its learning rates."""

    total: int
    warmup: int  # steps in which the learning rate rises
    learning_rate_at: Callable[[int], float]  # of a step, 0 the first


@dataclass(frozen=True)
class Past:
    """The run so far, according to the checkpoint that it starts from."""

    step: int  # the last step taken
    data_offset: int  # see [Note: what a step number means] in loop.py
    rollbacks: int
    remembered: dict[str, Any]  # what this run's checkpoints will remember of it, besides the other fields
    skipped_steps: int = 0
    guard: Mapping[str, Any] = field(default_factory=dict)  # `DivergenceGuard.as_dict`
    alerts: Mapping[str, Any] = field(default_factory=dict)  # `RunHealth.as_dict`


def past_of(
    run: RunConfig,
    start: Start,
    loader: StepLoader,
    val: PackedRows | None,
    steps: Steps,
    date: str,
    allowed: Collection[ChangeName],
) -> Past:
    """The run so far, and what its checkpoints will remember. Allowed changes are logged.

    Raises:
        UserError: The run differs from the checkpoint's in something that matters.
    """
    rows, then = loader.rows, start.then
    fingerprint = {
        "rows": len(rows),
        "rows_per_epoch": loader.rows_per_epoch,
        "tokens": rows.stats.tokens,
        **fingerprint_of_config(run),
        "content": content_crc32(rows),
    }
    schedule = schedule_settings(run, steps.total)
    remembered = {
        "data": fingerprint,
        "schedule": schedule,
        "settings": settings_of(run),
        "computed_in": str(compute_dtype_of(run.precision.compute_dtype, device_of(run.run.device))).split(".")[-1],
        "model": run.model.path,
        "date": date,
        "held_out": held_out_hashes(rows, val),
    }
    if start.start_from is None:
        return Past(0, 0, 0, remembered)
    began = then.get("model", run.model.path)
    if began != run.model.path:
        logger.warning("model.path: %s (was %s): the weights are the checkpoint's", run.model.path, began)
    found = [
        *changed_data(then, fingerprint),
        *changed_holdout(then, rows),
        *changed_settings(then, run),
        *changed_rates(then, schedule, steps.learning_rate_at),
    ]
    refuse_changes(found, allowed, start.start_from)
    for change in found:
        logger.warning("%s: allowed", change.what)
    if not any(change.name == "schedule" for change in found):
        for difference in differences(then, schedule):
            logger.info("%s; the learning rates so far are the same", difference)
    return Past(
        step=int(then["step"]),
        data_offset=int(then.get("data_offset", 0)),
        rollbacks=int(then.get("rollbacks", 0)),
        remembered=remembered,
        skipped_steps=int(then.get("skipped_steps", 0)),
        guard=then.get("guard", {}),
        alerts=then.get("alerts", {}),
    )


def refuse_known_changes(run: RunConfig, start: Start, steps: Steps | None, allowed: Collection[ChangeName]) -> None:
    """The part of `past_of` that needs no data.

    Args:
        run, start, allowed: As for `past_of`.
        steps: None if their number is unknown without the data.

    Raises:
        UserError: As `past_of`.
    """
    if start.start_from is None:
        return
    found = [*changed_data(start.then, fingerprint_of_config(run)), *changed_settings(start.then, run)]
    if steps is not None:
        found += changed_rates(start.then, schedule_settings(run, steps.total), steps.learning_rate_at)
    refuse_changes(found, allowed, start.start_from)


def settings_of(run: RunConfig) -> dict[str, Any]:
    """Settings that change every step, as JSON values, by their names in the config."""
    optim = run.optim.model_dump(mode="json", exclude={"learning_rate"})
    return {
        **{f"train.{name}": value for name, value in run.train.model_dump(mode="json").items()},
        **{f"optim.{name}": value for name, value in optim.items()},
        "precision.compute_dtype": run.precision.compute_dtype,
        "model.router_aux_loss": run.model.router_aux_loss,
        "model.router_bias_update_speed": run.model.router_bias_update_speed,
    }


def fingerprint_of_config(run: RunConfig) -> dict[str, int]:
    """The entries of a run's fingerprint that are known before its data is read."""
    return {"max_tokens": run.data.max_tokens, "rows_per_step": run.rows_per_step, "seed": run.run.seed}


def content_crc32(rows: PackedRows) -> int:
    """Checksum of what is trained: ids and targets of the samples, how they are packed into rows, and the sources' weights."""
    crc = zlib.crc32(b"packed" if rows.packing else b"one by one")
    for group in rows.groups:
        segments, contents = group.segments, group.store.fingerprints[group.segments.samples]
        for array in (contents, segments.offsets, segments.lengths, segments.rows, np.array([group.weight])):
            crc = zlib.crc32(memoryview(array.tobytes()), crc)
    return crc


def held_out_hashes(rows: PackedRows, val: PackedRows | None) -> str:
    """The smallest hashes of validation samples that are not trained, at most `REMEMBERED_HELD_OUT`, as hexadecimal uint64."""
    if val is None:
        return ""
    return np.setdiff1d(_hashes(val), _hashes(rows))[:REMEMBERED_HELD_OUT].tobytes().hex()


def _hashes(rows: PackedRows) -> np.ndarray:
    """(S,) uint64: hashes of the samples in the rows, sorted, each once."""
    return np.unique(np.concatenate([group.store.hashes[group.segments.samples] for group in rows.groups]))


class PastRates:
    """Checksum over the learning rates of steps 1 to n, updated a step at a time.

    Args:
        rate_at: Learning rate of a step, 0 the first.
        steps: Initial n.
    """

    def __init__(self, rate_at: Callable[[int], float], steps: int = 0):
        self._rate_at = rate_at
        self.crc32 = 0
        self.steps = 0
        self.extend_to(steps)

    def extend_to(self, steps: int) -> None:
        """Include the rates up to step `steps`; a smaller number than before starts over."""
        if steps < self.steps:
            self.crc32 = self.steps = 0
        while self.steps < steps:
            self.crc32 = zlib.crc32(struct.pack("<d", self._rate_at(self.steps)), self.crc32)
            self.steps += 1


def schedule_settings(run: RunConfig, total_steps: int) -> dict[str, Any]:
    """What decides the learning rate, by name in messages."""
    keys = ("kind", "warmup_ratio", "warmup_steps", "min_lr_ratio", "decay_ratio")
    return {
        "optim.learning_rate": run.optim.learning_rate,
        **{f"schedule.{key}": getattr(run.schedule, key) for key in keys},
        "total steps": total_steps,
    }


def changed_data(then: Mapping[str, Any], data: Mapping[str, Any]) -> list[Change]:
    """Entries of the fingerprint that differ from the checkpoint's.

    Args:
        then: The checkpoint's `extra`.
        data: The resumed run's fingerprint, or the known part of it.
    """
    old = then.get("data", {})
    return [
        Change(KEYS[name][0], f"{KEYS[name][1]} was {old[name]} and is {value}")
        for name, value in data.items()
        if name in old and old[name] != value
    ]


def changed_settings(then: Mapping[str, Any], run: RunConfig) -> list[Change]:
    """Settings of optimizer, loss and number formats that differ from the checkpoint's."""
    old = then.get("settings", {})
    names: dict[str, ChangeName] = {"optim": "optim", "precision": "precision", "model": "optim", "train": "optim"}
    return [
        Change(names[key.partition(".")[0]], f"{key} was {_yaml(old[key])} and is {_yaml(value)}")
        for key, value in settings_of(run).items()
        if key in old and old[key] != value
    ]


def changed_rates(
    then: Mapping[str, Any], schedule: Mapping[str, Any], rate_at: Callable[[int], float]
) -> list[Change]:
    """The change of the learning rate of steps already taken, if there is one, and its cause."""
    past = then.get("past_rates_crc32")
    if past is None or past == PastRates(rate_at, int(then["step"])).crc32:
        return []
    why = "; ".join(differences(then, schedule))
    return [Change("schedule", f"the {counted(then['step'], 'step')} taken would have had other learning rates: {why}")]


def changed_holdout(then: Mapping[str, Any], rows: PackedRows) -> list[Change]:
    """Samples held out so far that would be trained now: a validation loss over them would be meaningless."""
    held_out = np.frombuffer(bytes.fromhex(then.get("held_out", "")), np.uint64)
    moved = int(np.isin(held_out, _hashes(rows)).sum())
    if not moved:
        return []
    what = f"{moved:,} of {len(held_out):,} samples held out so far (data.val) would be trained now"
    return [Change("data", f"{what}: they no longer measure the run's progress")]


def differences(then: Mapping[str, Any], schedule: Mapping[str, Any]) -> list[str]:
    """Settings of the schedule that differ from the checkpoint's."""
    old = then.get("schedule", {})
    return [f"{k} was {_yaml(old[k])} and is {_yaml(v)}" for k, v in schedule.items() if k in old and old[k] != v]


def _yaml(value: Any) -> str:
    return "null" if value is None else str(value)


def refuse_changes(found: Collection[Change], allowed: Collection[ChangeName], start_from: Path) -> None:
    """Raise for the changes that are not allowed.

    Raises:
        UserError: Names every change, and exactly what allows them.
    """
    refused = [change for change in found if change.name not in allowed]
    if not refused:
        return
    needed = ",".join(dict.fromkeys(change.name for change in found))
    repeats = any(change.name in ("data", "batch", "seed") for change in found)
    raise UserError(
        "the run differs from its checkpoint: " + "; ".join(change.what for change in refused),
        f"--resume {start_from}",
        f"undo it, or resume with --allow-changes {needed}{' (rows may repeat)' if repeats else ''}",
    )
