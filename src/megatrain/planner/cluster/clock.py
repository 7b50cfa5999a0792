"""Seconds and memory of a pipeline schedule, from the table that the engine runs, without running it.

[Note: what the clock assumes]
A rank runs its actions one after the other, in the table's order. An action starts when the rank is free and what it needs is
there: a forward needs the stage before, a backward its own forward and the stage behind, each `transfer_s` later where another
rank holds that stage. A stage's gradients are reduced behind its last backward, beside the actions that follow. Two actions
that a schedule overlaps are played one after the other, for they share one GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from megatrain.mesh.actions import Action, bubble, one_forward_one_backward, table_of
from megatrain.mesh.schedule import CLASSES

Table = tuple[tuple[Action, ...], ...]
"""Per pipeline rank, its actions in order."""


@functools.lru_cache(maxsize=512)
def action_table(schedule: str, pipeline: int, virtual: int, microbatches: int) -> Table:
    """What each pipeline rank does in a step; one rank runs forward and backward of each microbatch in turn.

    Args:
        schedule: One of `layout.SCHEDULES`.
        pipeline: Ranks.
        virtual: Stages per rank.
        microbatches: At least what the schedule needs.
    """
    if pipeline == 1 or schedule == "1f1b":
        return tuple(tuple(row) for row in one_forward_one_backward(pipeline, microbatches))
    made = _table_only(schedule)(
        [_stand_in(turn * pipeline, pipeline, pipeline * virtual) for turn in range(virtual)],
        n_microbatches=microbatches,
        loss_fn=lambda loss, target: loss,
        scale_grads=False,
    )
    return tuple(tuple(row) for row in table_of(made, pipeline))


@functools.cache
def _table_only(schedule: str) -> Any:
    """The class of a schedule, without the sends and receives that it would work out next, which takes much longer."""
    nothing = {"_prepare_schedule_with_comms": lambda self, actions, format="compute_only": None}
    return type("TableOnly", (CLASSES[schedule],), nothing)


def _stand_in(index: int, pipeline: int, stages: int) -> Any:
    """What a schedule of torch's asks of a stage before it runs anything."""
    return SimpleNamespace(
        group_rank=0,
        group_size=pipeline,
        group=None,
        num_stages=stages,
        stage_index=index,
        stage_index_to_group_rank={},
        is_first=index == 0,
        is_last=index == stages - 1,
        has_backward=True,
        submod=None,
        device=torch.device("cpu"),
    )


@dataclass(frozen=True)
class StageSeconds:
    """What the actions of one stage take for one microbatch.

    Attributes:
        forward, backward: Whole passes; what is computed again belongs to the backward.
        weight: The part of `backward` that a split backward does later.
        first_forward: What the first microbatch's forward takes beside that: parameters that are gathered under it.
        gathered_at: Before that second of the step nothing of the stage starts: parameters that are gathered ahead.
        reduce: Gradients over the data ranks, once.
    """

    forward: float
    backward: float
    weight: float = 0.0
    first_forward: float = 0.0
    gathered_at: float = 0.0
    reduce: float = 0.0

    def of(self, action: Action) -> float:
        match action.kind:
            case "F":
                return self.forward + (self.first_forward if action.microbatch == 0 else 0.0)
            case "B":
                return self.backward
            case "I":
                return self.backward - self.weight
            case "W":
                return self.weight


@dataclass(frozen=True)
class Played:
    """A table played through.

    Attributes:
        seconds: When the last rank has ended, reductions included.
        computed: When the last rank has ended its last forward or backward.
        busy: Per rank, seconds of its forwards and backwards.
    """

    seconds: float
    computed: float
    busy: tuple[float, ...]

    @property
    def idle(self) -> float:
        """The share of all ranks' time, up to the last backward, in which they wait."""
        return bubble(self.busy, self.computed)


def play(table: Table, stages: Sequence[StageSeconds], transfer_s: float = 0.0) -> Played:
    """Seconds of a table; see [Note: what the clock assumes].

    Args:
        table: From `action_table`.
        stages: By stage.
        transfer_s: Of one microbatch's hidden states from one rank to another.
    """
    holder = {action.stage: rank for rank, row in enumerate(table) for action in row}
    done: dict[tuple[int, bool, int], float] = {}  # (stage, is a backward, microbatch) -> when
    clock, reduced, busy = [0.0] * len(table), [0.0] * len(table), [0.0] * len(table)
    last = [{action.stage: number for number, action in enumerate(row)} for row in table]
    position = [0] * len(table)
    moving = True
    while moving:
        moving = False
        for rank, row in enumerate(table):
            while position[rank] < len(row):
                number, action = position[rank], row[position[rank]]
                ready = _ready(action, done, holder, len(stages), transfer_s)
                if ready is None:
                    break
                stage = stages[action.stage]
                seconds = stage.of(action)
                clock[rank] = max(clock[rank], ready, stage.gathered_at) + seconds
                busy[rank] += seconds
                if action.kind != "W":
                    done[action.stage, action.kind != "F", action.microbatch] = clock[rank]
                if last[rank][action.stage] == number:
                    reduced[rank] = max(reduced[rank], clock[rank]) + stage.reduce
                position[rank] += 1
                moving = True
    assert all(at == len(row) for at, row in zip(position, table, strict=True)), "the table waits for itself"
    return Played(max(reduced), max(clock), tuple(busy))


def _ready(
    action: Action, done: dict[tuple[int, bool, int], float], holder: dict[int, int], stages: int, transfer_s: float
) -> float | None:
    """When what the action needs of another stage is there, None if nobody has made it yet."""
    before = action.stage - 1 if action.kind == "F" else action.stage + 1
    if action.kind == "W" or not 0 <= before < stages:
        return 0.0
    made = done.get((before, action.kind != "F", action.microbatch))
    if made is None:
        return None
    return made + (transfer_s if holder[before] != holder[action.stage] else 0.0)


def most_in_flight(actions: Sequence[Action], nbytes: Sequence[float]) -> float:
    """The most that a rank holds at any time between forwards and backwards.

    Args:
        actions: Of the rank, in order.
        nbytes: By stage: what one microbatch leaves behind from its forward to its backward, to its `W` where that is apart.
    """
    held = most = 0.0
    for action in actions:
        if action.kind == "F":
            held += nbytes[action.stage]
            most = max(most, held)
        elif action.kind in ("B", "W"):
            held -= nbytes[action.stage]
    return most
