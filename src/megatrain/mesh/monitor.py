"""What all ranks together say of a step: bubble, time of every rank, memory of every stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megatrain.mesh.actions import bubble, busy_s, mean_costs, simulate, span_s
from megatrain.mesh.schedule import Runner


@dataclass(frozen=True)
class Bubbles:
    """See [Note: bubble] in actions.py.

    Attributes:
        measured: Share of all ranks' time in which no action ran.
        simulated: Of the schedule's table, with the measured cost of each action.
        busy_s: Of every rank.
    """

    measured: float
    simulated: float
    busy_s: tuple[float, ...]


def bubbles(runner: Runner, stages: int) -> Bubbles:
    """Of the latest step. Collective; behind a synchronisation of the step.

    Args:
        runner: Has run a step.
        stages: Of the whole pipeline.
    """
    timed = runner.clock.read()
    mine = (busy_s(timed), span_s(timed), mean_costs(timed))
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    busy = tuple(each[0] for each in found)
    sums: dict[Any, list[float]] = {}
    for _, _, costs in found:
        for key, seconds in costs.items():
            sums.setdefault(key, []).append(seconds)
    means = {key: sum(values) / len(values) for key, values in sums.items()}
    return Bubbles(bubble(busy, max(each[1] for each in found)), simulate(runner.table(), means, stages), busy)
