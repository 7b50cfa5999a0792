"""loss.png: always a whole picture, seldom drawn, and short for long runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatrain.metrics import plot
from megatrain.metrics.plot import LossPlot, draw_run
from step_records import record


def test_a_picture_of_every_kind_of_step(tmp_path: Path) -> None:
    records = [record(0, loss=None, val_loss=3.0), record(1), record(2, loss=None, grad_norm=None, skipped="nan")]
    path = tmp_path / "loss.png"
    for count in range(1, 4):  # also while nothing has a training loss yet
        draw_run(records[:count], path, "run")
        assert path.read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in tmp_path.iterdir()] == ["loss.png"]


def test_the_picture_is_not_drawn_at_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, drawn_s = 0.0, []

    def draw(*_: object) -> None:
        nonlocal now_s
        drawn_s.append(now_s)
        now_s += 0.5

    monkeypatch.setattr(plot, "draw_run", draw)
    monkeypatch.setattr(plot.time, "monotonic", lambda: now_s)
    picture = LossPlot(tmp_path / "loss.png", "run", interval_s=10)
    for _ in range(100):
        now_s += 1
        picture.update([record(1)])
    assert drawn_s[0] == 10
    assert np.diff(drawn_s).min() >= 25  # 0.5 s to draw is 2% of 25 s
    assert len(drawn_s) == 4


def test_a_long_run_becomes_a_line_that_can_be_drawn() -> None:
    steps, losses = plot.points([record(step, loss=float(step)) for step in range(1, 10_001)], lambda r: r.loss)
    assert len(steps) == plot.MOST_POINTS
    np.testing.assert_allclose(steps, losses)
    assert steps[0] < 10
    assert steps[-1] > 9_990


def test_smoothing_keeps_a_constant() -> None:
    np.testing.assert_allclose(plot.smooth(np.full(30, 2.5)), 2.5)
