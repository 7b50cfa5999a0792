"""The fp16 loss scale follows torch's GradScaler, stays a power of two, and survives a checkpoint."""

import json
import math
import random

import pytest
import torch

from megatrain.engine.host.optimizer import LossScale


def test_the_scale_follows_torch_over_a_random_run() -> None:
    mine = LossScale(scale=2.0**10, growth_interval=3, least=2.0**-60)
    scale, tracker = torch.tensor(2.0**10), torch.tensor(0, dtype=torch.int32)
    dice = random.Random(0)
    for _ in range(200):
        finite = dice.random() < 0.75
        torch._amp_update_scale_(  # type: ignore[attr-defined]
            scale, tracker, torch.tensor(0.0 if finite else 1.0), 2.0, 0.5, 3
        )
        mine = mine.after(finite)
        assert (mine.scale, mine.good_steps) == (scale.item(), tracker.item())
        assert math.frexp(mine.scale)[0] == 0.5


def test_the_scale_stays_within_its_bounds() -> None:
    state = LossScale(scale=4.0, growth_interval=1, most=8.0)
    for _ in range(5):
        state = state.after(True)
    assert state.scale == 8.0
    for _ in range(10):
        state = state.after(False)
    assert state.scale == 1.0


def test_a_bad_step_starts_the_count_of_good_steps_anew() -> None:
    state = LossScale(growth_interval=4).after(True).after(True).after(True).after(False)
    assert (state.scale, state.good_steps) == (2.0**15, 0)


def test_the_state_survives_json() -> None:
    state = LossScale(growth_interval=7).after(True).after(False).after(True)
    assert LossScale.from_state_dict(json.loads(json.dumps(state.state_dict()))) == state


@pytest.mark.parametrize(
    "bad", [{"scale": 3.0}, {"growth": 1.0}, {"backoff": 1.0}, {"growth_interval": 0}, {"scale": 0.5}]
)
def test_a_scale_that_is_not_exact_or_cannot_move_is_refused(bad: dict) -> None:
    with pytest.raises(AssertionError):
        LossScale(**bad)
