"""loss.png is always a whole picture and cheap to draw; `megatrain plot` draws several runs."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from megatrain.commands.main import main
from megatrain.metrics import plot
from megatrain.metrics.plot import LossPlot, draw_run, plot_runs, x_values
from megatrain.metrics.record import MetricsWriter
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


def test_a_long_run_is_averaged_in_bins() -> None:
    steps, losses = plot.points([record(step, loss=float(step)) for step in range(1, 10_001)], lambda r: r.loss)
    assert len(steps) == plot.MOST_POINTS
    np.testing.assert_allclose(steps, losses)
    assert steps[0] < 10
    assert steps[-1] > 9_990


def test_smoothing_keeps_a_constant() -> None:
    np.testing.assert_allclose(plot.smooth(np.full(30, 2.5)), 2.5)


# ---- megatrain plot


def write_run(folder: Path, steps: int, loss: float, **changes: object) -> Path:
    folder.mkdir(parents=True)
    with MetricsWriter(folder / "metrics.jsonl") as metrics:
        for step in range(steps + 1):
            val = loss + 0.5 if step % 10 == 0 else None
            metrics.write(record(step, loss=loss - step / 100 if step else None, val_loss=val, **changes))
    return folder


def test_two_runs_in_a_picture_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = write_run(tmp_path / "one", 30, 3.0), write_run(tmp_path / "two", 5, 4.0)
    out = tmp_path / "new" / "both.v1"
    assert main(["plot", str(one), str(two / "metrics.jsonl"), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"wrote {out}.png and {out}.html\n"
    assert Path(f"{out}.png").read_bytes().startswith(b"\x89PNG")
    page = Path(f"{out}.html").read_text()
    assert page.count("<svg") == 1
    rows = re.findall(r"<tr>(<td>.*?)</tr>", page)
    cells = [re.sub("<.*?>", " ", row).split() for row in rows]
    assert cells[0] == ["one", "30", "2.9900", "2.7000", "3.5000", "3.5000", "2,000", "0"]
    assert cells[1][:4] == ["two", "5", "3.9900", "3.9500"]


def test_the_page_needs_nothing_from_anywhere(tmp_path: Path) -> None:
    write_run(tmp_path / "one", 3, 3.0)
    assert main(["plot", str(tmp_path / "one"), "--out", str(tmp_path / "p")]) == 0
    page = (tmp_path / "p.html").read_text()
    outside = [url for url in re.findall(r"https?://[^\"'<> ]*", page) if not url.startswith("http://www.w3.org/")]
    assert outside == [], "only the names of SVG's own vocabularies"
    for tag in ("<script", "<link", "<img", "@import", "<!DOCTYPE svg"):
        assert tag not in page


def test_runs_of_one_name_are_told_apart_and_names_are_escaped(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / place / "run<1>", 2, 3.0) for place in ("a", "b")]
    assert main(["plot", *map(str, runs), "--out", str(tmp_path / "p")]) == 0
    page = (tmp_path / "p.html").read_text()
    assert "run<1>" not in page
    for place in ("a", "b"):
        assert f"{tmp_path}/{place}/run&lt;1&gt;" in page


@pytest.mark.parametrize("axis", ["step", "tokens", "hours"])
def test_every_axis_draws(tmp_path: Path, axis: str) -> None:
    write_run(tmp_path / "one", 3, 3.0)
    assert main(["plot", str(tmp_path / "one"), "--x", axis, "--out", str(tmp_path / axis)]) == 0
    assert (tmp_path / f"{axis}.png").stat().st_size > 10_000


def test_tokens_and_hours_are_counted_from_the_first_step() -> None:
    records = [record(0, processed_tokens=0, step_s=0.0), record(1, step_s=1800.0), record(2, step_s=1800.0)]
    assert x_values(records, "step") == {0: 0, 1: 1, 2: 2}
    assert x_values(records, "tokens") == pytest.approx({0: 0, 1: 0.004, 2: 0.008})
    assert x_values(records, "hours") == pytest.approx({0: 0, 1: 0.5, 2: 1.0})


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere", "does not exist"),
        ("bare", "holds no metrics.jsonl"),
        ("empty", "no step yet"),
        ("run.yaml", "is neither a run's folder nor its metrics.jsonl"),
    ],
)
def test_a_path_that_is_no_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, says: str
) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").touch()
    (tmp_path / "run.yaml").write_text("run: {dir: bare}\n")
    assert main(["plot", str(tmp_path / name), "--out", str(tmp_path / "p")]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert "\n  -> " in said
    assert not list(tmp_path.glob("p.*"))


def test_an_output_that_cannot_be_written_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "one", 3, 3.0)
    (tmp_path / "file").touch()
    assert main(["plot", str(tmp_path / "one"), "--out", str(tmp_path / "file" / "p")]) == 2
    assert "give another place: --out" in capsys.readouterr().err


def test_any_name_can_be_drawn(tmp_path: Path) -> None:
    """Dollars are no formula, a name with an underscore first is in the legend, and nothing steers a page."""
    names = ["cost $x_{$", "_hidden", "<b>\x1b[31m\u202e"]
    for name in names:
        (tmp_path / name).mkdir()
        with MetricsWriter(tmp_path / name / "metrics.jsonl") as metrics:
            metrics.write(record(1))
        draw_run([record(1), record(2)], tmp_path / "loss.png", title=name)
    png, page = plot_runs([tmp_path / name for name in names], tmp_path / "all")
    assert png.stat().st_size > 0
    text = page.read_text()
    assert "&lt;b&gt;\\x1b[31m\\u202e" in text
    assert "\x1b" not in text
    assert "_hidden" in re.sub(r"<td>.*?</td>", "", text), "in the picture itself"
