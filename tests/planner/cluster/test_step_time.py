"""A schedule's table played with the gathering of parameters and the reduction of gradients."""

from __future__ import annotations

import pytest

from megatrain.engine.mesh.pipeline_schedule import Action
from megatrain.planner.cluster.step_time import Pass, StageTime, play

TABLE = ((Action("F", 0, 0), Action("B", 0, 0)),)


@pytest.mark.parametrize(
    ("stage", "seconds"),
    [
        (StageTime(Pass(1.0), Pass(2.0)), 3.0),
        (StageTime(Pass(1.0), Pass(2.0), first_forward=0.5, reduce=4.0), 7.5),
        (StageTime(Pass(1.0), Pass(2.0), gathered_at=5.0), 8.0),
    ],
)
def test_gathering_and_reducing_are_played_too(stage: StageTime, seconds: float) -> None:
    assert play(TABLE, [stage]).seconds == seconds


def test_a_split_backward_takes_as_long_as_a_whole_one() -> None:
    stage = StageTime(Pass(1.0), Pass(compute=1.5, tensor=0.5), weight=0.75)
    halves = ((Action("F", 0, 0), Action("I", 0, 0), Action("W", 0, 0)),)
    assert play(halves, [stage]).seconds == play(TABLE, [stage]).seconds == 3.0
