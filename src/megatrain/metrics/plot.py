"""`loss.png`: training and validation loss, learning rate, gradient norm and tokens/s over the steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from megatrain.metrics.record import StepRecord

MOST_POINTS = 1500  # a line of more points than pixels only costs time


logger = logging.getLogger(__name__)


class LossPlot:
    """Draws a run's picture, at most every ten seconds and never for more than 2% of the time."""

    def __init__(self, path: Path, title: str, *, interval_s: float = 10.0):
        self._path, self._title = path, title
        self._interval_s = interval_s
        self._next_s = time.monotonic() + interval_s

    def update(self, records: Sequence[StepRecord]) -> None:
        """Draw if the last picture is old enough."""
        if time.monotonic() >= self._next_s:
            self.draw(records)

    def draw(self, records: Sequence[StepRecord]) -> None:
        """Draw. A picture that cannot be written is said, and stops nothing."""
        start = time.monotonic()
        try:
            draw_run(records, self._path, self._title)
        except OSError as error:
            logger.warning("%s: the picture was not written: %s", self._path, error)
        took_s = time.monotonic() - start
        self._next_s = time.monotonic() + max(self._interval_s, 50 * took_s)


def draw_run(records: Sequence[StepRecord], path: Path, title: str) -> None:
    """Write the picture of a run. The file is replaced as a whole: a viewer never reads half a picture."""
    # matplotlib takes half a second to import; Figure without pyplot keeps no global state and needs no display
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    loss, rate, norm, speed = figure.subplots(2, 2).flat
    figure.suptitle(title)
    trained = [record for record in records if record.step > 0]

    raw = points(trained, lambda record: record.loss)
    loss.plot(*raw, color="tab:blue", alpha=0.35 if len(raw[0]) > 20 else 1.0, linewidth=1, label="training")
    if len(raw[0]) > 20:
        loss.plot(raw[0], smooth(raw[1]), color="tab:blue", label="training, smoothed")
    held_out = points(records, lambda record: record.val_loss)
    if len(held_out[0]):
        loss.plot(*held_out, color="tab:orange", marker="o", markersize=4, label="validation")
    for record in trained:
        if record.skipped:
            loss.axvline(record.step, color="tab:red", linewidth=0.5, alpha=0.5)
    if loss.lines:
        loss.legend()
    loss.set_title("loss [nats per token]")

    rate.plot(*points(trained, lambda record: record.learning_rate), color="tab:green")
    rate.set_title("learning rate")
    norm.plot(*points(trained, lambda record: record.grad_norm), color="tab:red", linewidth=1)
    norm.set_title("gradient norm before clipping")
    speed.plot(*points(trained, lambda record: record.processed_tokens_per_s), linewidth=1, label="processed")
    speed.plot(*points(trained, lambda record: record.trained_tokens_per_s), linewidth=1, label="trained")
    speed.set_ylim(bottom=0)
    speed.set_title("tokens/s")
    speed.legend()
    for axes in (loss, rate, norm, speed):
        axes.set_xlabel("step")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)

    temporary = path.with_name(path.name + ".new")
    figure.savefig(temporary, format="png", dpi=100)
    temporary.replace(path)


def points(records: Sequence[StepRecord], value: Callable[[StepRecord], float | None]) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values where there are any, averaged in equal bins when there are more than a line can show."""
    pairs = [(record.step, found) for record in records if (found := value(record)) is not None]
    table = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    if len(table) > MOST_POINTS:
        bins = np.array_split(table, MOST_POINTS)
        table = np.stack([part.mean(axis=0) for part in bins])
    return table[:, 0], table[:, 1]


def smooth(values: np.ndarray) -> np.ndarray:
    """Exponential moving average without the pull of its first value (the weights of each average sum to one)."""
    keep = 0.9
    smoothed, total, weight = np.empty_like(values), 0.0, 0.0
    for position, value in enumerate(values):
        total, weight = keep * total + value, keep * weight + 1
        smoothed[position] = total / weight
    return smoothed
