"""Values computed by the config, its short forms, and that it is frozen."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from megatrain.config.load import load_config
from megatrain.config.schema import DataConfig, ScheduleConfig, SourceConfig, ValConfig


@pytest.mark.parametrize(
    ("schedule", "steps_per_epoch", "total"),
    [
        ({}, 30, 30),
        ({"epochs": 3}, 7, 21),
        ({"epochs": 0.1}, 30, 3),  # 0.1 * 30 is slightly more than 3 in binary
        ({"epochs": 0.5}, 7, 4),
        ({"epochs": 0.001}, 5, 1),
        ({"steps": 12}, 7, 12),
    ],
)
def test_length_of_a_run_in_steps(schedule: dict[str, float], steps_per_epoch: int, total: int) -> None:
    assert ScheduleConfig.model_validate(schedule).total_steps(steps_per_epoch) == total


@pytest.mark.parametrize("both", [{"epochs": 1, "steps": 1}, {"warmup_ratio": 0.1, "warmup_steps": 1}])
def test_exclusive_keys_cannot_both_be_given(both: dict[str, float]) -> None:
    with pytest.raises(ValidationError, match="leave the other out"):
        ScheduleConfig.model_validate(both)


@pytest.mark.parametrize(
    "train", ["a.jsonl", ["a.jsonl"], {"path": "a.jsonl"}, [{"path": "a.jsonl"}], SourceConfig(path="a.jsonl")]
)
def test_all_short_forms_of_a_source(train: object) -> None:
    assert DataConfig.model_validate({"train": train}).train == (SourceConfig(path="a.jsonl"),)


@pytest.mark.parametrize("val", ["v.txt", ["v.txt"], {"path": "v.txt"}, {"sources": ["v.txt"]}])
def test_all_short_forms_of_validation_sources(val: object) -> None:
    assert ValConfig.model_validate(val).sources == (SourceConfig(path="v.txt"),)


def test_a_config_is_frozen() -> None:
    run = load_config(
        {"model": {"path": "m"}, "data": {"train": "a"}, "batch": {"tokens_per_step": 2048}, "run": {"dir": "r"}}
    )
    with pytest.raises(ValidationError, match="frozen"):
        run.optim.learning_rate = 1.0  # type: ignore[misc]
