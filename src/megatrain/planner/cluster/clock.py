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

from megatrain.engine.mesh.actions import Action, bubble, end_times, one_forward_one_backward, table_of
from megatrain.engine.mesh.pipeline import CLASSES

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
    ends = end_times(
        table,
        len(stages),
        lambda action: stages[action.stage].of(action),
        transfer_s=transfer_s,
        not_before=lambda stage: stages[stage].gathered_at,
    )
    reduced = [_reduced(row, done, stages) for row, done in zip(table, ends, strict=True)]
    busy = tuple(sum(stages[action.stage].of(action) for action in row) for row in table)
    return Played(max(reduced), max((done[-1] for done in ends if done), default=0.0), busy)


def _reduced(row: Sequence[Action], ends: Sequence[float], stages: Sequence[StageSeconds]) -> float:
    """When a rank's gradients are reduced: those of each stage behind its last action, one stage after the other."""
    last: dict[int, float] = {}
    for action, end in zip(row, ends, strict=True):
        last.pop(action.stage, None)  # so that the stages stand in the order in which they end
        last[action.stage] = end
    reduced = 0.0
    for stage, end in last.items():
        reduced = max(reduced, end) + stages[stage].reduce
    return reduced


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
