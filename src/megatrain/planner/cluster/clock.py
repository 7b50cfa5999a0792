"""Seconds and memory of a pipeline schedule, from the table that the engine runs, without running it.

[Note: what the clock assumes]
A rank runs its actions one after the other, in the table's order. An action starts when the rank is free and what it needs is
there: a forward needs the stage before, a backward its own forward and the stage behind, each `transfer_s` later where another
rank holds that stage. A stage's gradients are reduced behind its last backward, beside the actions that follow. Two actions
that a schedule overlaps are played one after the other, for they share one GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.engine.mesh.pipeline_schedule import Action, Table, bubble, simulate


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
    found = simulate(
        table,
        len(stages),
        lambda action: stages[action.stage].of(action),
        transfer_s=transfer_s,
        not_before=lambda stage: stages[stage].gathered_at,
    )
    reduced = [_reduced(row, done, stages) for row, done in zip(table, found.ends, strict=True)]
    return Played(max(reduced), found.span_s, found.busy)


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
