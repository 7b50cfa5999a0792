"""Pipeline schedules as plain tables: each rank's actions in order, simulated without running anything.

The tables are those of the torch schedules that pipeline.py runs, so measured and planned bubbles refer to the same order.

[Note: bubble]
An action is one forward or backward of one stage on one microbatch. A rank's busy time is the sum of its actions; a step's span
runs from the common start of the forward to the end of the last action on any rank. The bubble is the share of all ranks' time
that is not busy: 1 - sum(busy) / (ranks x span). The measured bubble also contains waits for messages between stages. The
simulated bubble plays the schedule's table with given durations; with measured means and free messages, the difference between
the two is communication and jitter.

[Note: assumptions of the simulation]
A rank runs its actions one at a time, in the table's order. An action starts when the rank is free and its inputs are there: a
forward needs the previous stage's forward; a backward needs its own forward and the next stage's backward; each arrives
`transfer_s` later if another rank holds that stage. Two actions that a schedule overlaps run one after the other, because they
share one GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

SCHEDULE_CLASSES: dict[str, Any] = {
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zb1p": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}

Kind = Literal["F", "B", "I", "W"]
"""Forward; whole backward; gradients of inputs alone; gradients of weights alone."""

_KINDS: dict[str, Kind] = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


@dataclass(frozen=True)
class Action:
    """One entry of a schedule's table."""

    kind: Kind
    stage: int
    microbatch: int


Table = tuple[tuple[Action, ...], ...]
"""The actions of each pipeline rank, in order."""


@functools.lru_cache(maxsize=512)
def action_table(schedule: str, pipeline: int, virtual: int, microbatches: int) -> Table:
    """Each pipeline rank's actions in a step, with `virtual` stages on each of `pipeline` ranks.

    Without a pipeline, one rank runs the forward and backward of each microbatch in turn.
    """
    if pipeline == 1 or schedule == "1f1b":
        return tuple(_one_forward_one_backward(rank, pipeline, microbatches) for rank in range(pipeline))
    made = _table_only(schedule)(
        [_stage_stub(turn * pipeline, pipeline, pipeline * virtual) for turn in range(virtual)],
        n_microbatches=microbatches,
        loss_fn=lambda loss, target: loss,
        scale_grads=False,
    )
    return tuple(_row(made.pipeline_order[rank]) for rank in range(pipeline))


def _one_forward_one_backward(rank: int, ranks: int, microbatches: int) -> tuple[Action, ...]:
    """A rank's actions under 1F1B, where rank r is stage r. torch's class has a loop instead of a table."""
    ahead = min(microbatches, ranks - rank)
    row = [Action("F", rank, m) for m in range(ahead)]
    for m in range(microbatches):
        row.append(Action("B", rank, m))
        if ahead + m < microbatches:
            row.append(Action("F", rank, ahead + m))
    return tuple(row)


def _row(order: Sequence[Any]) -> tuple[Action, ...]:
    """A rank's actions from a torch schedule's `pipeline_order`; overlapped actions one after the other."""
    return tuple(
        Action(_KINDS[part.computation_type.name], part.stage_index, part.microbatch_index)
        for entry in order
        if entry is not None
        for part in getattr(entry, "sub_actions", None) or (entry,)
        if part.computation_type.name in _KINDS
    )


@functools.cache
def _table_only(schedule: str) -> Any:
    """A schedule's class without the sends and receives, which take much longer to work out than the table."""
    nothing = {"_prepare_schedule_with_comms": lambda self, actions, format="compute_only": None}
    return type("TableOnly", (SCHEDULE_CLASSES[schedule],), nothing)


def _stage_stub(index: int, pipeline: int, stages: int) -> Any:
    """The attributes of a stage that torch's schedules read when they are constructed."""
    return SimpleNamespace(
        group_rank=0, group_size=pipeline, group=None, num_stages=stages, stage_index=index, stage_index_to_group_rank={},
        is_first=index == 0, is_last=index == stages - 1, has_backward=True, submod=None, device=torch.device("cpu"),
    )  # fmt: skip


@dataclass(frozen=True)
class Simulation:
    """A table played through: when each action of each rank ends, and the sum of each rank's actions [s]."""

    ends: tuple[tuple[float, ...], ...]
    busy: tuple[float, ...]

    @property
    def span_s(self) -> float:
        """When the last action ends."""
        return max((row[-1] for row in self.ends if row), default=0.0)

    @property
    def bubble(self) -> float:
        return bubble(self.busy, self.span_s)


_Done = dict[tuple[int, bool, int], tuple[float, int]]
"""(stage, is a backward, microbatch) -> (when it ended, on which rank)."""


def simulate(
    table: Sequence[Sequence[Action]],
    stages: int,
    seconds: Callable[[Action], float],
    *,
    transfer_s: float = 0.0,
    not_before: Callable[[int], float] = lambda stage: 0.0,
) -> Simulation:
    """Play a table of a pipeline with `stages` stages; see [Note: assumptions of the simulation].

    Args:
        seconds: Duration of an action.
        transfer_s: Duration of a message from one rank to another.
        not_before: Earliest start of a stage's actions.
    """
    finished: _Done = {}
    ends: list[list[float]] = [[] for _ in table]
    moved = True
    while moved:
        moved = False
        for rank, (row, done) in enumerate(zip(table, ends, strict=True)):
            while len(done) < len(row):
                action = row[len(done)]
                ready = _inputs_ready(action, finished, rank, stages, transfer_s)
                if ready is None:
                    break
                begin = max(done[-1] if done else 0.0, ready, not_before(action.stage))
                done.append(begin + seconds(action))
                if action.kind != "W":
                    finished[action.stage, action.kind != "F", action.microbatch] = done[-1], rank
                moved = True
    stuck = [row[len(done)] for row, done in zip(table, ends, strict=True) if len(done) < len(row)]
    assert not stuck, f"the schedule deadlocks at {stuck}"
    return Simulation(tuple(map(tuple, ends)), tuple(sum(seconds(action) for action in row) for row in table))


def _inputs_ready(action: Action, finished: _Done, rank: int, stages: int, transfer_s: float) -> float | None:
    """When all inputs of an action are on its rank; None if one has not been computed yet."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind == "F":
        needed = [(stage - 1, False, microbatch)] if stage > 0 else []
    elif action.kind == "W":
        needed = [(stage, True, microbatch)]
    else:
        needed = [(stage, False, microbatch)]
        needed += [(stage + 1, True, microbatch)] if stage < stages - 1 else []
    ready = 0.0
    for one in needed:
        if one not in finished:
            return None
        ended, where = finished[one]
        ready = max(ready, ended + (transfer_s if where != rank else 0.0))
    return ready


def bubble(busy_s: Sequence[float], span_s: float) -> float:
    """The bubble, from each rank's busy time and the longest span. See [Note: bubble]."""
    return max(0.0, 1.0 - sum(busy_s) / (len(busy_s) * span_s)) if span_s > 0 else 0.0


def simulated_bubble(
    table: Sequence[Sequence[Action]], costs: Mapping[tuple[Kind, int], float], stages: int
) -> float | None:
    """The bubble of a table with the given seconds of each (kind, stage) and free messages; None if one is missing."""
    if any((action.kind, action.stage) not in costs for row in table for action in row):
        return None
    return simulate(table, stages, lambda action: costs[action.kind, action.stage]).bubble


def peak_in_flight(actions: Sequence[Action], nbytes: Sequence[float]) -> float:
    """The most bytes a rank holds at any time between forwards and backwards.

    `nbytes`: by stage, what one microbatch holds from its forward to its backward (to its `W` if that is separate).
    """
    held = most = 0.0
    for action in actions:
        if action.kind == "F":
            held += nbytes[action.stage]
            most = max(most, held)
        elif action.kind in ("B", "W"):
            held -= nbytes[action.stage]
    return most
