"""What each rank of a pipeline does when: measured per action, and simulated from the schedule's own table.

[Note: bubble]
An action is one forward or backward of one stage on one microbatch. A rank's busy time is the sum of its actions; a step's span
runs from the common start of the forward to the end of the last action anywhere. The bubble is the share of all ranks' time that
is not busy: 1 - sum(busy) / (ranks x span). Measured, it also holds waits for messages between stages. The simulated bubble plays
the schedule's table with the measured mean of each kind of action and free messages: what is left between the two is
communication and jitter.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

Kind = Literal["F", "B", "I", "W"]
"""Forward; whole backward; gradients of inputs alone; gradients of weights alone."""

_KINDS: dict[str, Kind] = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


@dataclass(frozen=True)
class Action:
    """One entry of a schedule's table."""

    kind: Kind
    stage: int
    microbatch: int


@dataclass(frozen=True)
class Timed:
    """An action as it ran, in seconds since the step began."""

    action: Action
    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


class ActionClock:
    """Times the actions of one rank and one step. On CUDA by events on the current stream: nothing waits for it.

    Args:
        device: Where the actions compute.
    """

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._start: Any = None
        self._marks: list[tuple[Action, Any, Any]] = []

    def start(self) -> None:
        """A step begins; what was measured before is forgotten."""
        self._marks.clear()
        self._start = self._now()

    @contextlib.contextmanager
    def action(self, kind: Kind, stage: int, microbatch: int) -> Iterator[None]:
        begin = self._now()
        yield
        self._marks.append((Action(kind, stage, microbatch), begin, self._now()))

    def read(self) -> list[Timed]:
        """The actions since `start`. On CUDA they must have ended: call it behind a synchronisation of the step."""
        return [Timed(action, self._since(begin), self._since(end)) for action, begin, end in self._marks]

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _since(self, mark: Any) -> float:
        return self._start.elapsed_time(mark) / 1e3 if self._cuda else mark - self._start


def busy_s(timed: Sequence[Timed]) -> float:
    return sum(t.seconds for t in timed)


def span_s(timed: Sequence[Timed]) -> float:
    """From the start of the step to the end of its last action."""
    return max((t.end_s for t in timed), default=0.0)


def bubble(busy: Sequence[float], span: float) -> float:
    """See [Note: bubble]; busy seconds of each rank, and the longest span."""
    return max(0.0, 1.0 - sum(busy) / (len(busy) * span)) if span > 0 else 0.0


def mean_costs(timed: Sequence[Timed]) -> dict[tuple[Kind, int], float]:
    """Mean seconds of each (kind, stage)."""
    found: dict[tuple[Kind, int], list[float]] = {}
    for t in timed:
        found.setdefault((t.action.kind, t.action.stage), []).append(t.seconds)
    return {key: sum(values) / len(values) for key, values in found.items()}


def one_forward_one_backward(ranks: int, microbatches: int) -> list[list[Action]]:
    """The table of 1F1B: rank r is stage r."""
    table = []
    for rank in range(ranks):
        ahead = min(microbatches, ranks - rank)
        row = [Action("F", rank, m) for m in range(ahead)]
        for m in range(microbatches):
            row.append(Action("B", rank, m))
            if ahead + m < microbatches:
                row.append(Action("F", rank, ahead + m))
        table.append(row)
    return table


def table_of(schedule: Any, ranks: int) -> list[list[Action]]:
    """Each rank's actions in order, from a schedule of torch's that holds several stages per rank."""
    order: Mapping[int, Sequence[Any]] = schedule.pipeline_order
    table: list[list[Action]] = []
    for rank in range(ranks):
        row: list[Action] = []
        for entry in order[rank]:
            for part in (getattr(entry, "sub_actions", None) or (entry,)) if entry is not None else ():
                kind = _KINDS.get(part.computation_type.name)
                if kind is not None:
                    row.append(Action(kind, part.stage_index, part.microbatch_index))
        table.append(row)
    return table


def simulate(table: Sequence[Sequence[Action]], costs: Mapping[tuple[Kind, int], float], stages: int) -> float:
    """The bubble of a table with given costs and free messages.

    Args:
        table: Actions of each rank, in order.
        costs: Seconds of each (kind, stage).
        stages: Of the whole pipeline.
    """
    ends = end_times(table, stages, lambda action: costs[action.kind, action.stage])
    busy = [sum(costs[a.kind, a.stage] for a in row) for row in table]
    return bubble(busy, max((row[-1] for row in ends if row), default=0.0))


Made = dict[tuple[int, bool, int], tuple[float, int]]
"""(stage, is a backward, microbatch) -> when it was there, and on which rank."""


def end_times(
    table: Sequence[Sequence[Action]],
    stages: int,
    seconds: Callable[[Action], float],
    *,
    transfer_s: float = 0.0,
    not_before: Callable[[int], float] = lambda stage: 0.0,
) -> list[list[float]]:
    """When each action of each rank ends, where it starts as soon as its rank and what it needs allow.

    Args:
        table: Actions of each rank, in order.
        stages: Of the whole pipeline.
        seconds: What an action takes.
        transfer_s: What a message from one rank to another takes.
        not_before: When a stage's actions may start at the earliest.
    """
    made: Made = {}
    ends: list[list[float]] = [[] for _ in table]
    moved = True
    while moved:
        moved = False
        for rank, (row, done) in enumerate(zip(table, ends, strict=True)):
            while len(done) < len(row):
                action = row[len(done)]
                ready = _ready(action, made, rank, stages, transfer_s)
                if ready is None:
                    break
                begin = max(done[-1] if done else 0.0, ready, not_before(action.stage))
                done.append(begin + seconds(action))
                if action.kind != "W":
                    made[action.stage, action.kind != "F", action.microbatch] = done[-1], rank
                moved = True
    stuck = [row[len(done)] for row, done in zip(table, ends, strict=True) if len(done) < len(row)]
    assert not stuck, f"the schedule waits in a circle at {stuck}"
    return ends


def _ready(action: Action, made: Made, rank: int, stages: int, transfer_s: float) -> float | None:
    """When all that an action needs is on its rank, None if something was not made yet."""
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
        if one not in made:
            return None
        ended, where = made[one]
        ready = max(ready, ended + (transfer_s if where != rank else 0.0))
    return ready
