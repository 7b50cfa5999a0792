"""The action table of a pipeline schedule, exactly as the engine will run it, and a clock that plays it through.

The table is torch's: `schedule.CLASSES` makes it, from the numbers of ranks, stages and microbatches alone. Playing it needs what
each action takes and nothing else, so a plan for a thousand GPUs and the bubble that a monitor shows beside the measured one are
the same calculation.

[Note: 1f1b has no table]
torch's `Schedule1F1B` runs a loop. (It can print a table, but the last rank's begins with microbatch 1.) The loop is: as many
forwards as there are stages from this one to the end, then a backward and a forward in turn, then the backwards that are left.

[Note: what the clock assumes]
A rank runs its actions one after the other, in the table's order. An action starts when the rank is free and what it needs is
there: a forward needs the stage before, a backward its own forward and the stage behind, each `transfer_s` later where another
rank holds that stage. A reduction runs beside the actions that follow it, on a stream of its own. Two actions that a schedule
overlaps are played one after the other, for they share one GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import torch

from megatrain.mesh.layout import Layout
from megatrain.mesh.schedule import CLASSES

Kind = Literal["forward", "backward", "input", "weight", "reduce"]
"""`backward` is a whole one; `input` and `weight` are its halves where a schedule splits it. `reduce` comes once a stage."""

KINDS: dict[str, Kind] = {
    "FORWARD": "forward",
    "FULL_BACKWARD": "backward",
    "BACKWARD_INPUT": "input",
    "BACKWARD_WEIGHT": "weight",
}
"""By torch's names. Its own entries for reductions, which some schedules have and others do not, are left out and put in again
behind each stage's last backward, where torch reduces in any case."""


@dataclass(frozen=True)
class Action:
    """What a rank does with one microbatch of one of its stages."""

    stage: int
    kind: Kind
    microbatch: int


Table = tuple[tuple[Action, ...], ...]
"""Per pipeline rank, its actions in order."""


@functools.lru_cache(maxsize=256)
def action_table(schedule: str, pipeline: int, virtual: int, microbatches: int) -> Table:
    """What each pipeline rank does in a step.

    Args:
        schedule: One of `layout.SCHEDULES`.
        pipeline: Ranks; one of them runs forward and backward of each microbatch in turn.
        virtual: Stages per rank.
        microbatches: At least what the schedule needs.
    """
    if pipeline == 1:
        pairs = ((Action(0, "forward", m), Action(0, "backward", m)) for m in range(microbatches))
        return (_with_reductions([action for pair in pairs for action in pair]),)
    if schedule == "1f1b":
        return tuple(
            _with_reductions(_one_forward_one_backward(rank, pipeline, microbatches)) for rank in range(pipeline)
        )
    stages = [_stand_in(rank * pipeline, pipeline, pipeline * virtual) for rank in range(virtual)]
    made = _table_only(schedule)(
        stages,
        n_microbatches=microbatches,
        loss_fn=lambda loss, target: loss,
        scale_grads=False,
    )
    return tuple(_with_reductions(_plain(made.pipeline_order[rank])) for rank in range(pipeline))


@functools.cache
def _table_only(schedule: str) -> Any:
    """The class of a schedule, without the sends and receives that it would work out next, which takes much longer."""
    nothing = {"_prepare_schedule_with_comms": lambda self, actions, format="compute_only": None}
    return type("TableOnly", (CLASSES[schedule],), nothing)


def _one_forward_one_backward(stage: int, stages: int, microbatches: int) -> list[Action]:
    """See [Note: 1f1b has no table]."""
    first = min(microbatches, stages - stage)
    found = [Action(stage, "forward", m) for m in range(first)]
    for m in range(microbatches):
        found.append(Action(stage, "backward", m))
        if m + first < microbatches:
            found.append(Action(stage, "forward", m + first))
    return found


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


def _plain(actions: Sequence[Any]) -> list[Action]:
    """Without torch's idle slots; overlapped actions one after the other."""
    found: list[Action] = []
    for action in actions:
        if action is None:
            continue
        if action.sub_actions:
            found += _plain(action.sub_actions)
        elif action.computation_type.name in KINDS:
            found.append(Action(action.stage_index, KINDS[action.computation_type.name], action.microbatch_index))
    return found


def _with_reductions(actions: Sequence[Action]) -> tuple[Action, ...]:
    last = {action.stage: number for number, action in enumerate(actions)}
    found: list[Action] = []
    for number, action in enumerate(actions):
        found.append(action)
        if last[action.stage] == number:
            found.append(Action(action.stage, "reduce", -1))
    return tuple(found)


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
            case "forward":
                return self.forward + (self.first_forward if action.microbatch == 0 else 0.0)
            case "backward":
                return self.backward
            case "input":
                return self.backward - self.weight
            case "weight":
                return self.weight
            case "reduce":
                return self.reduce


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
        """The bubble: the share of all ranks' time, up to the last backward, in which they wait."""
        return 1.0 - sum(self.busy) / (len(self.busy) * self.computed) if self.computed else 0.0


def play(table: Table, stages: Sequence[StageSeconds], transfer_s: float = 0.0) -> Played:
    """Seconds of a table; see [Note: what the clock assumes].

    Args:
        table: From `action_table`.
        stages: By stage.
        transfer_s: Of one microbatch's hidden states from one rank to another.
    """
    holder = {action.stage: rank for rank, actions in enumerate(table) for action in actions}
    done: dict[tuple[int, bool, int], float] = {}  # (stage, is a backward, microbatch) -> when
    clock, reduced, busy = [0.0] * len(table), [0.0] * len(table), [0.0] * len(table)
    position = [0] * len(table)
    moving = True
    while moving:
        moving = False
        for rank, actions in enumerate(table):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                ready = _ready(action, done, holder, len(stages), transfer_s)
                if ready is None:
                    break
                seconds = stages[action.stage].of(action)
                if action.kind == "reduce":
                    reduced[rank] = max(reduced[rank], clock[rank]) + seconds
                else:
                    clock[rank] = max(clock[rank], ready, stages[action.stage].gathered_at) + seconds
                    busy[rank] += seconds
                if action.kind in ("forward", "backward", "input"):
                    done[action.stage, action.kind != "forward", action.microbatch] = clock[rank]
                position[rank] += 1
                moving = True
    assert all(p == len(actions) for p, actions in zip(position, table, strict=True)), "the table waits for itself"
    return Played(max(*clock, *reduced), max(clock), tuple(busy))


def _ready(
    action: Action, done: dict[tuple[int, bool, int], float], holder: dict[int, int], stages: int, transfer_s: float
) -> float | None:
    """When what the action needs is there, None if nobody has made it yet."""
    if action.kind in ("weight", "reduce"):
        return 0.0  # the rank's own order sees to it
    backward = action.kind != "forward"
    before = action.stage + 1 if backward else action.stage - 1
    if not 0 <= before < stages:
        return 0.0
    made = done.get((before, backward, action.microbatch))
    if made is None:
        return None
    return made + (transfer_s if holder[before] != holder[action.stage] else 0.0)


def most_in_flight(actions: Sequence[Action], nbytes: Sequence[float]) -> float:
    """The most that a rank holds at any time between forwards and backwards.

    Args:
        actions: Of the rank, in order.
        nbytes: By stage: what one microbatch leaves behind from its forward to its backward, to `weight` where that is apart.
    """
    held = most = 0.0
    for action in actions:
        if action.kind == "forward":
            held += nbytes[action.stage]
            most = max(most, held)
        elif action.kind in ("backward", "weight"):
            held -= nbytes[action.stage]
    return most


def table_of(layout: Layout) -> Table:
    """The table of a resolved layout."""
    return action_table(layout.schedule, layout.pipeline, layout.virtual, layout.pieces)
