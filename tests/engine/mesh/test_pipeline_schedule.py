"""Schedule tables are those torch runs, their bubbles are the textbook's, and actions are timed."""

from __future__ import annotations

import pytest
import torch

from megatrain.engine.mesh.layout import SCHEDULES, Layout
from megatrain.engine.mesh.pipeline import ActionClock
from megatrain.engine.mesh.pipeline_schedule import (
    SCHEDULE_CLASSES,
    Action,
    action_table,
    bubble,
    peak_in_flight,
    simulate,
    simulated_bubble,
)

SECONDS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
COSTS = {(kind, stage): seconds for kind, seconds in SECONDS.items() for stage in range(16)}


def bubble_of(schedule: str, pipeline: int, virtual: int, microbatches: int) -> float:
    table = action_table(schedule, pipeline, virtual, microbatches)
    return simulate(table, pipeline * virtual, lambda action: SECONDS[action.kind]).bubble


@pytest.mark.parametrize(
    ("schedule", "pipeline", "virtual", "microbatches"),
    [
        *(("1f1b", p, 1, m) for p, m in ((2, 2), (2, 8), (4, 8), (8, 8))),
        ("interleaved", 4, 2, 8),
        ("interleaved", 4, 4, 8),
    ],
)
def test_the_bubble_is_the_textbooks(schedule: str, pipeline: int, virtual: int, microbatches: int) -> None:
    """(p - 1) / (v m + p - 1) with stages of equal cost."""
    expected = (pipeline - 1) / (virtual * microbatches + pipeline - 1)
    assert bubble_of(schedule, pipeline, virtual, microbatches) == pytest.approx(expected)


def test_split_backwards_have_smaller_bubbles() -> None:
    assert bubble_of("zb1p", 4, 1, 8) < bubble_of("1f1b", 4, 1, 8) / 2
    assert bubble_of("zbv", 4, 2, 8) < 0.06


def test_a_slow_stage_enlarges_the_bubble() -> None:
    table = action_table("1f1b", 2, 1, 4)
    slow = {**COSTS, ("F", 1): 2.0, ("B", 1): 4.0}
    even, uneven = simulated_bubble(table, COSTS, 2), simulated_bubble(table, slow, 2)
    assert even is not None and uneven is not None and uneven > even
    assert simulated_bubble(table, {("F", 0): 1.0}, 2) is None


def test_bubbles_of_plain_numbers() -> None:
    assert bubble([1.0, 1.0], 1.0) == 0.0
    assert bubble([1.0, 0.5], 1.0) == 0.25


def test_a_table_that_deadlocks_is_reported() -> None:
    with pytest.raises(AssertionError, match="deadlocks at"):
        simulated_bubble([[Action("B", 0, 0), Action("F", 0, 0)]], COSTS, 1)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pipeline", [1, 2, 4])
def test_every_stage_runs_every_microbatch_once(schedule: str, pipeline: int) -> None:
    virtual = SCHEDULES[schedule].virtual[0] if pipeline > 1 else 1
    layout = Layout(pipeline=pipeline, virtual=virtual, schedule=schedule, shard=1, microbatches=2 * pipeline * virtual)
    table = action_table(schedule, pipeline, virtual, layout.microbatch_count)
    forwards = sorted((a.stage, a.microbatch) for actions in table for a in actions if a.kind == "F")
    assert forwards == [(s, m) for s in range(layout.stages) for m in range(layout.microbatch_count)]
    ends = sorted((a.stage, a.microbatch) for actions in table for a in actions if a.kind in ("B", "W"))
    assert ends == forwards
    for rank, actions in enumerate(table):
        assert {a.stage for a in actions} == set(layout.stages_of(rank) if pipeline > 1 else [0])
        assert peak_in_flight(actions, [1.0] * layout.stages) <= layout.microbatch_count * virtual


class RecordingStage:
    """The part of a torch stage that the loop of `Schedule1F1B` calls."""

    def __init__(self, index: int, count: int):
        self.stage_index, self.num_stages, self.group_size, self.group_rank = index, count, count, index
        self.has_backward, self.is_last, self.submod = True, False, None
        self.calls: list[tuple[str, int]] = []

    def get_fwd_recv_ops(self, _: int) -> list[object]:
        return []

    get_bwd_recv_ops = get_fwd_send_ops = get_bwd_send_ops = get_fwd_recv_ops

    def forward_one_chunk(self, microbatch: int, *args: object, **kwargs: object) -> None:
        self.calls.append(("F", microbatch))

    def backward_one_chunk(self, microbatch: int, **kwargs: object) -> None:
        self.calls.append(("B", microbatch))

    def perform_reduce_grad(self, _: float) -> None:
        pass


@pytest.mark.parametrize("microbatches", [4, 9])
def test_the_table_of_1f1b_is_the_loop_that_torch_runs(microbatches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch also prints a table of 1F1B, but that one begins with microbatch 1 on the last rank."""
    kind = SCHEDULE_CLASSES["1f1b"]
    for name in ("_initialize_stage", "_maybe_compute_loss", "_maybe_get_loss", "_update_losses"):
        monkeypatch.setattr(kind, name, lambda *args, **kwargs: None)
    monkeypatch.setattr(kind, "_check_inputs", lambda self, args, kwargs, *rest: (args, kwargs))
    for rank, actions in enumerate(action_table("1f1b", 4, 1, microbatches)):
        stage = RecordingStage(rank, 4)
        schedule = kind(stage, n_microbatches=microbatches, loss_fn=lambda *_: None, scale_grads=False)
        schedule._step_microbatches([()] * microbatches, [{}] * microbatches)
        assert [(a.kind, a.microbatch) for a in actions] == stage.calls


def test_a_transfer_delays_the_rank_that_waits_for_it() -> None:
    table = action_table("1f1b", 2, 1, 2)
    quick, slow = (simulate(table, 2, lambda a: SECONDS[a.kind], transfer_s=s).span_s for s in (0.0, 0.5))
    assert (quick, slow) == (9.0, 10.0)


def test_the_first_rank_of_1f1b_holds_as_many_microbatches_as_there_are_ranks() -> None:
    held = [peak_in_flight(actions, [1.0] * 4) for actions in action_table("1f1b", 4, 1, 16)]
    assert held == [4, 3, 2, 1]


def test_the_clock_times_actions() -> None:
    clock = ActionClock(torch.device("cpu"))
    clock.start()
    for number in range(3):
        with clock.action("F", 0, number):
            sum(range(20000))
    timed = clock.read()
    assert [t.action for t in timed] == [Action("F", 0, n) for n in range(3)]
    assert all(t.seconds > 0 for t in timed)
    assert sum(t.seconds for t in timed) <= timed[-1].end_s
    clock.start()
    assert clock.read() == []
