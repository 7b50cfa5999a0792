"""Schedules equal transformers' where the meaning is the same, and start with a step that learns."""

import itertools

import pytest
import torch
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_linear_schedule_with_warmup,
    get_wsd_schedule,
)

from megatrain.errors import UserError
from megatrain.optim.schedule import Schedule, whole_steps

TOTAL, WARMUP = 50, 7


def theirs(make, steps: int, **options) -> list[float]:
    """Factors of a transformers schedule at steps 0 .. steps - 1."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    factor = make(optimizer, **options).lr_lambdas[0]
    return [factor(step) for step in range(steps)]


def ours(schedule: Schedule, steps: int = TOTAL) -> list[float]:
    return [schedule.lr_factor(step) for step in range(steps)]


WSD = {"num_warmup_steps": WARMUP, "num_decay_steps": 10, "num_training_steps": TOTAL}
PAIRS = [
    (Schedule("constant", TOTAL, WARMUP), get_constant_schedule_with_warmup, {"num_warmup_steps": WARMUP}),
    (
        Schedule("linear", TOTAL, WARMUP),
        get_linear_schedule_with_warmup,
        {"num_warmup_steps": WARMUP, "num_training_steps": TOTAL},
    ),
    (
        Schedule("cosine", TOTAL, WARMUP),
        get_cosine_schedule_with_warmup,
        {"num_warmup_steps": WARMUP, "num_training_steps": TOTAL},
    ),
    (
        Schedule("cosine", TOTAL, WARMUP, min_lr_ratio=0.1),
        get_cosine_with_min_lr_schedule_with_warmup,
        {"num_warmup_steps": WARMUP, "num_training_steps": TOTAL, "min_lr_rate": 0.1},
    ),
    (
        Schedule("wsd", TOTAL, WARMUP, decay_ratio=0.2, decay="linear"),
        get_wsd_schedule,
        {**WSD, "decay_type": "linear"},
    ),
    (
        Schedule("wsd", TOTAL, WARMUP, decay_ratio=0.2, decay="cosine"),
        get_wsd_schedule,
        {**WSD, "decay_type": "cosine"},
    ),
    (
        Schedule("wsd", TOTAL, WARMUP, min_lr_ratio=0.05, decay_ratio=0.2),
        get_wsd_schedule,
        {**WSD, "decay_type": "1-sqrt", "min_lr_ratio": 0.05},
    ),
]


@pytest.mark.parametrize(("schedule", "make", "options"), PAIRS)
def test_after_the_warmup_the_curve_is_transformers(schedule: Schedule, make, options: dict) -> None:
    assert ours(schedule)[WARMUP:] == pytest.approx(theirs(make, TOTAL, **options)[WARMUP:], abs=1e-12)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
def test_the_first_step_learns_and_the_last_warmup_step_has_the_full_rate(kind) -> None:
    factors = ours(Schedule(kind, TOTAL, WARMUP, min_lr_ratio=0.5))
    assert factors[:WARMUP] == pytest.approx([(step + 1) / WARMUP for step in range(WARMUP)])
    assert factors[WARMUP] == 1.0


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
def test_without_warmup_the_first_step_has_the_full_rate(kind) -> None:
    assert Schedule(kind, TOTAL).lr_factor(0) == 1.0


@pytest.mark.parametrize("kind", ["linear", "cosine", "wsd"])
def test_a_decay_falls_steadily_to_the_floor_and_stays_there(kind) -> None:
    schedule = Schedule(kind, TOTAL, WARMUP, min_lr_ratio=0.1)
    factors = ours(schedule, TOTAL + 20)
    falling = factors[TOTAL - schedule.decay_steps : TOTAL + 1]
    assert all(later < earlier for earlier, later in itertools.pairwise(falling))
    assert factors[TOTAL - 1] > 0.1
    assert factors[TOTAL:] == [pytest.approx(0.1)] * 20


def test_wsd_is_stable_between_warmup_and_decay() -> None:
    schedule = Schedule("wsd", 100, 10, decay_ratio=0.25)
    assert schedule.decay_steps == 25
    assert set(ours(schedule, 100)[9:76]) == {1.0}
    assert schedule.lr_factor(76) < 1.0
    assert set(ours(Schedule("wsd", 100, decay_ratio=0.0), 120)) == {1.0}


@pytest.mark.parametrize("warmup_steps", [10, 11, -1])
def test_a_warmup_as_long_as_the_run_is_refused(warmup_steps: int) -> None:
    with pytest.raises(UserError, match=f"warm-up of {warmup_steps} steps does not fit into a run of 10 steps"):
        Schedule("cosine", 10, warmup_steps)


def test_bad_values_are_all_named_at_once() -> None:
    with pytest.raises(UserError) as error:
        Schedule("polynomial", 0, min_lr_ratio=2.0, decay_ratio=-1.0, decay="exp")  # type: ignore[arg-type]
    for text in ("'polynomial'", "total_steps = 0", "min_lr_ratio = 2.0", "decay_ratio = -1.0", "'exp'"):
        assert text in str(error.value)
    with pytest.raises(UserError, match="decay of 6 do not fit"):
        Schedule("wsd", 10, 5, decay_ratio=0.6)


def test_a_ratio_is_rounded_up_to_whole_steps() -> None:
    assert [whole_steps(0.03, total) for total in (0, 1, 33, 34, 100)] == [0, 1, 1, 2, 3]
