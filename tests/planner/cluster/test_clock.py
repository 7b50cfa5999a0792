"""The bubble of a schedule comes from the table that the engine runs."""

from __future__ import annotations

import pytest

from megatrain.engine.mesh.actions import Action
from megatrain.engine.mesh.layout import SCHEDULES, Layout
from megatrain.engine.mesh.pipeline import CLASSES
from megatrain.planner.cluster.clock import StageSeconds, action_table, most_in_flight, play

ONE_THIRD = StageSeconds(1.0, 2.0, weight=1.0)


def bubble(schedule: str, pipeline: int, virtual: int, microbatches: int) -> float:
    table = action_table(schedule, pipeline, virtual, microbatches)
    return play(table, [ONE_THIRD] * (pipeline * virtual)).idle


@pytest.mark.parametrize(
    ("schedule", "virtual", "idle"),
    [("1f1b", 1, 3 / 11), ("interleaved", 2, 3 / 19), ("interleaved", 4, 3 / 35)],
)
def test_the_bubble_is_the_textbooks(schedule, virtual, idle):
    """(p - 1) / (v m + p - 1), with p = 4 and m = 8."""
    assert bubble(schedule, 4, virtual, 8) == pytest.approx(idle)


def test_split_backwards_have_smaller_bubbles():
    assert bubble("zb1p", 4, 1, 8) < bubble("1f1b", 4, 1, 8) / 2
    assert bubble("zbv", 4, 2, 8) < 0.06


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pipeline", [1, 2, 4])
def test_every_stage_does_everything_once(schedule, pipeline):
    virtual = SCHEDULES[schedule].virtual[0] if pipeline > 1 else 1
    layout = Layout(pipeline=pipeline, virtual=virtual, schedule=schedule, shard=1, microbatches=2 * pipeline * virtual)
    table = action_table(schedule, pipeline, virtual, layout.pieces)
    forwards = sorted((a.stage, a.microbatch) for actions in table for a in actions if a.kind == "F")
    assert forwards == [(s, m) for s in range(layout.stages) for m in range(layout.pieces)]
    ends = sorted((a.stage, a.microbatch) for actions in table for a in actions if a.kind in ("B", "W"))
    assert ends == forwards
    for rank, actions in enumerate(table):
        assert {a.stage for a in actions} == set(layout.stages_of(rank) if pipeline > 1 else [0])
        assert most_in_flight(actions, [1.0] * layout.stages) <= layout.pieces * virtual


class RecordingStage:
    """As much of a torch stage as the loop of `Schedule1F1B` calls."""

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
def test_the_table_of_1f1b_is_the_loop_that_torch_runs(microbatches, monkeypatch):
    """It prints one that begins with microbatch 1 on the last rank."""
    kind = CLASSES["1f1b"]
    for name in ("_initialize_stage", "_maybe_compute_loss", "_maybe_get_loss", "_update_losses"):
        monkeypatch.setattr(kind, name, lambda *args, **kwargs: None)
    monkeypatch.setattr(kind, "_check_inputs", lambda self, args, kwargs, *rest: (args, kwargs))
    for rank, actions in enumerate(action_table("1f1b", 4, 1, microbatches)):
        stage = RecordingStage(rank, 4)
        schedule = kind(stage, n_microbatches=microbatches, loss_fn=lambda *_: None, scale_grads=False)
        schedule._step_microbatches([()] * microbatches, [{}] * microbatches)
        assert [(a.kind, a.microbatch) for a in actions] == stage.calls


def test_a_transfer_delays_what_another_rank_waits_for():
    table = action_table("1f1b", 2, 1, 2)
    quick, slow = (play(table, [ONE_THIRD] * 2, transfer_s=s).seconds for s in (0.0, 0.5))
    assert quick == 9.0
    assert slow == 10.0


def test_the_first_rank_of_1f1b_holds_as_many_microbatches_as_there_are_ranks():
    held = [most_in_flight(actions, [1.0] * 4) for actions in action_table("1f1b", 4, 1, 16)]
    assert held == [4, 3, 2, 1]


def test_gathering_and_reducing_are_played_too():
    table = ((Action("F", 0, 0), Action("B", 0, 0)),)
    assert play(table, [StageSeconds(1.0, 2.0, first_forward=0.5, reduce=4.0)]).seconds == 7.5
    assert play(table, [StageSeconds(1.0, 2.0, gathered_at=5.0)]).seconds == 8.0
