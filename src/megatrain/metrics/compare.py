"""`megatrain plot RUN...`: several runs in one picture, as PNG and as one HTML file that needs nothing from anywhere."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from megatrain.errors import UserError
from megatrain.metrics.plot import points, smooth
from megatrain.metrics.record import StepRecord, read_records

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Axis = Literal["step", "tokens", "hours"]
AXES: dict[Axis, str] = {"step": "step", "tokens": "processed tokens [millions]", "hours": "time in steps [hours]"}
_SMOOTH_FROM = 20  # points; fewer are shown as they are

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 72em; color: #222; background: #fff; }}
table {{ border-collapse: collapse; margin: 1em 0; }}
td, th {{ padding: .2em .9em; border-bottom: 1px solid #ddd; text-align: right; }}
td:first-child, th:first-child {{ text-align: left; }} svg {{ max-width: 100%; height: auto; }}
.dot {{ display: inline-block; width: .8em; height: .8em; border-radius: 50%; margin-right: .5em; }}
</style></head><body><h1>{title}</h1>
<table><tr>{head}</tr>
{rows}
</table>
{svg}
</body></html>
"""


@dataclass(frozen=True)
class RunHistory:
    """A run as the plots see it."""

    name: str
    folder: Path
    records: Sequence[StepRecord]


def plot_runs(runs: Sequence[Path], out: Path, axis: Axis = "step") -> tuple[Path, Path]:
    """Draw runs over each other.

    Args:
        runs: Run folders, or metrics.jsonl files.
        out: Path of the files to write, without suffix.
        axis: What is drawn to the right.

    Returns:
        The PNG and the HTML file.

    Raises:
        UserError: A run has no metrics, or nothing can be written.
    """
    histories = [read_run(run) for run in runs]
    figure = _figure(_with_own_names(histories), axis)
    png, page = out.with_name(out.name + ".png"), out.with_name(out.name + ".html")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(png, format="png", dpi=110)
        page.write_text(_page(_with_own_names(histories), figure), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror}", str(out), "give another place: --out") from None
    return png, page


def read_run(path: Path) -> RunHistory:
    """A run's history, from its folder or its metrics.jsonl.

    Raises:
        UserError: There is none, or it is empty.
    """
    file = path / "metrics.jsonl" if path.is_dir() else path
    if not file.is_file():
        what = "holds no metrics.jsonl" if path.is_dir() else "does not exist"
        raise UserError(what, str(path), "give the folder of a run (run.dir)")
    if file.suffix != ".jsonl":
        raise UserError(
            "is neither a run's folder nor its metrics.jsonl", str(path), "give the folder of a run (run.dir)"
        )
    records = read_records(file)
    if not records:
        raise UserError("holds no step yet", str(file), "wait for the run's first step")
    return RunHistory(file.parent.name, file.parent, records)


def x_values(records: Sequence[StepRecord], axis: Axis) -> dict[int, float]:
    """Step number -> its place to the right."""
    if axis == "tokens":
        reached = accumulate(record.processed_tokens / 1e6 for record in records)
    elif axis == "hours":
        reached = accumulate(record.step_s / 3600 for record in records)
    else:
        reached = (float(record.step) for record in records)
    return {record.step: x for record, x in zip(records, reached, strict=True)}


def _with_own_names(runs: Sequence[RunHistory]) -> list[RunHistory]:
    """Runs of one name are told apart by their whole paths."""
    names = [run.name for run in runs]
    return [
        RunHistory(run.name if names.count(run.name) == 1 else str(run.folder), run.folder, run.records) for run in runs
    ]


def _figure(runs: Sequence[RunHistory], axis: Axis) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    FigureCanvasAgg(figure)
    loss, val, norm, speed = figure.subplots(2, 2).flat
    for number, run in enumerate(runs):
        colour, x_of = _colour(number), x_values(run.records, axis)
        trained = [record for record in run.records if record.step > 0]

        def line(
            value: Callable[[StepRecord], float | None],
            records: Sequence[StepRecord],
            x_of: dict[int, float] = x_of,
        ) -> tuple[np.ndarray, np.ndarray]:
            steps, values = points(records, value)
            return np.interp(steps, list(x_of), list(x_of.values())), values

        x, y = line(lambda record: record.loss, trained)
        if len(x) > _SMOOTH_FROM:
            loss.plot(x, y, color=colour, alpha=0.25, linewidth=0.8)
            y = smooth(y)
        loss.plot(x, y, color=colour, label=run.name)
        val.plot(*line(lambda record: record.val_loss, run.records), color=colour, marker="o", markersize=3)
        norm.plot(*line(lambda record: record.grad_norm, trained), color=colour, linewidth=0.8)
        speed.plot(*line(lambda record: record.processed_tokens_per_s, trained), color=colour, linewidth=0.8)
    for axes, title in (
        (loss, "training loss [nats per token], smoothed"),
        (val, "validation loss [nats per token]"),
        (norm, "gradient norm before clipping"),
        (speed, "processed tokens/s"),
    ):
        axes.set_title(title)
        axes.set_xlabel(AXES[axis])
        axes.grid(alpha=0.3)
    speed.set_ylim(bottom=0)
    loss.legend()
    return figure


def _colour(number: int) -> str:
    return f"C{number % 10}"


def _page(runs: Sequence[RunHistory], figure: Figure) -> str:
    from matplotlib.colors import to_hex

    names = ("run", "steps", "first loss", "last loss", "validation", "lowest validation", "tokens/s", "skipped")
    rows = []
    for number, run in enumerate(runs):
        dot = f'<span class="dot" style="background:{to_hex(_colour(number))}"></span>'
        cells = [f"{dot}{html.escape(run.name)}", *map(html.escape, _summary(run.records))]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return _PAGE.format(
        title=html.escape(", ".join(run.name for run in runs)),
        head="".join(f"<th>{name}</th>" for name in names),
        rows="\n".join(rows),
        svg=_svg(figure),
    )


def _summary(records: Sequence[StepRecord]) -> list[str]:
    trained = [record for record in records if record.step > 0]
    losses = [record.loss for record in trained if record.loss is not None]
    val = [record.val_loss for record in records if record.val_loss is not None]
    seconds = sum(record.step_s for record in trained)
    tokens = sum(record.processed_tokens for record in trained)
    return [
        f"{records[-1].step:,}",
        _four(losses[0] if losses else None),
        _four(losses[-1] if losses else None),
        _four(val[-1] if val else None),
        _four(min(val) if val else None),
        f"{tokens / seconds:,.0f}" if seconds else "n/a",
        f"{records[-1].skipped_steps:,}",
    ]


def _four(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.4f}"


def _svg(figure: Figure) -> str:
    """The picture as an element of a page: without the header of a file, and without its links to vocabularies."""
    out = io.StringIO()
    figure.savefig(out, format="svg")
    text = out.getvalue()
    text = text[text.index("<svg") :]
    return re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
