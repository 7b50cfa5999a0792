"""`megatrain monitor RUN`: a live view of a run, read from its files; the run itself is not involved.

With textual installed (`pip install 'megatrain[monitor]'`) the view is an application that `q` quits; without it, the view is
redrawn until Ctrl-C. If the output is not a terminal, the view is printed once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from megatrain.config.load import load_config
from megatrain.config.schema import RunConfig
from megatrain.errors import UserError
from megatrain.metrics.record import StepRecord, parse_record
from megatrain.run.folder import RunFolder
from megatrain.text import one_line, visible
from megatrain.units import number_text

if TYPE_CHECKING:
    from textual.app import App

LOG_LINES = 6
CHART_ROWS = 8
RECENT = 20
"""Steps that the means and the time left are computed from."""
_BLOCKS = " ▁▂▃▄▅▆▇█"


class Tail:
    """Records of a metrics.jsonl that is being written; each `read` parses new bytes only."""

    def __init__(self, path: Path):
        self._path, self._offset = path, 0
        self._file_id: tuple[int, int] | None = None
        self.records: list[StepRecord] = []

    def read(self) -> list[StepRecord]:
        """All records so far. A resumed run replaces the file, which is then read from the beginning."""
        try:
            stream = self._path.open("rb")
        except FileNotFoundError:
            return self.records
        with stream:
            status = self._path.stat()
            file_id = (status.st_dev, status.st_ino)
            if file_id != self._file_id or status.st_size < self._offset:
                self._file_id, self._offset = file_id, 0
                self.records.clear()
            stream.seek(self._offset)
            whole, newline, _ = stream.read().rpartition(b"\n")  # the rest is a line that is still being written
            for number, line in enumerate(whole.splitlines(), start=len(self.records) + 1):
                self.records.append(parse_record(line, self._path, number))
            self._offset += len(whole) + len(newline)
        return self.records


class Watcher:
    """What the monitor shows of a run, read again on each `poll`; UserError if `folder` is not the folder of a run."""

    def __init__(self, folder: Path):
        files = RunFolder(folder)
        if not files.config.is_file():
            raise UserError("is not the folder of a run (no config.yaml)", str(folder), "give run.dir of a started run")
        self.path = files.path
        self.name = one_line(files.path.name)
        self._run: RunConfig = load_config(files.config)
        self._tail = Tail(files.metrics)
        self.now_s = 0.0
        self.log: Sequence[str] = ()

    @property
    def records(self) -> Sequence[StepRecord]:
        return self._tail.records

    @property
    def total_steps(self) -> int | None:
        """Length of the run. Steps per epoch follow from the newest record; None before the first one."""
        if self._run.schedule.steps is not None:
            return self._run.schedule.steps
        last = self.records[-1] if self.records else None
        return self._run.schedule.total_steps(round(last.step / last.epoch)) if last and last.epoch else None

    def poll(self, now_s: float | None = None) -> Watcher:
        self._tail.read()
        self.log = _last_lines(self.path / "log.txt", LOG_LINES)
        self.now_s = time.time() if now_s is None else now_s
        return self


def monitor(folder: Path, *, every_s: float = 2.0, console: Console | None = None) -> None:
    """Show a run until the user quits; its files are read every `every_s` seconds. Raises as `Watcher`."""
    watcher = Watcher(folder)
    console = console or Console()
    if not console.is_terminal:
        console.print(render(watcher.poll(), console.width))
    elif find_spec("textual") is not None:
        application(watcher, every_s).run()
    else:
        _redraw(watcher, every_s, console, lambda: True)


def _redraw(watcher: Watcher, every_s: float, console: Console, go_on: Callable[[], bool]) -> None:
    from rich.live import Live

    with Live(render(watcher.poll(), console.width), console=console, auto_refresh=False) as live:
        while go_on():
            try:
                time.sleep(every_s)
            except KeyboardInterrupt:
                return
            live.update(render(watcher.poll(), console.width), refresh=True)


def application(watcher: Watcher, every_s: float) -> App[None]:
    """The monitor as a textual application; only callable with textual installed."""
    from textual.app import App, ComposeResult
    from textual.binding import BindingType
    from textual.containers import VerticalScroll
    from textual.widgets import Footer, Static

    class MonitorApp(App[None]):
        BINDINGS: ClassVar[list[BindingType]] = [("q", "quit", "quit"), ("r", "poll", "refresh")]
        TITLE = watcher.name

        def compose(self) -> ComposeResult:
            yield VerticalScroll(Static(id="view"))
            yield Footer()

        def on_mount(self) -> None:
            self.action_poll()
            self.set_interval(every_s, self.action_poll)

        def action_poll(self) -> None:
            self.query_one("#view", Static).update(render(watcher.poll(), self.size.width - 4))

    return MonitorApp()


def render(run: Watcher, width: int) -> Group:
    """The run as a rich renderable."""
    records = run.records
    if not records:
        return Group(Text(f"{run.name}: no step yet"), *map(Text, run.log))
    last = records[-1]
    total = f"/{run.total_steps:,}" if run.total_steps else ""
    head = f"{run.name}: step {last.step:,}{total}, epoch {last.epoch:.2f}, {_age(run)}"
    losses = [record.loss for record in records if record.loss is not None]
    return Group(
        Text(head, style="bold"),
        _numbers(run),
        Text("training loss" if losses else ""),
        *(Text(line, style="cyan") for line in chart(losses, max(width - 12, 20), CHART_ROWS)),
        *(Text(line, style="dim", no_wrap=True, overflow="ellipsis") for line in run.log),
    )


def chart(values: Sequence[float], width: int, rows: int) -> list[str]:
    """A bar chart of block characters, one column per value or group of values, with the range at the left."""
    if not values:
        return []
    groups = np.array_split(np.asarray(values, dtype=np.float64), min(width, len(values)))
    columns = np.array([group.mean() for group in groups])
    low, high = float(columns.min()), float(columns.max())
    # the lowest value keeps a visible bar
    eighths = np.round(1 + (columns - low) / (high - low or 1.0) * (8 * rows - 1)).astype(int)
    lines = []
    for row in reversed(range(rows)):
        label = f"{high:9.4f}" if row == rows - 1 else f"{low:9.4f}" if row == 0 else " " * 9
        lines.append(f"{label} " + "".join(_BLOCKS[min(8, max(0, count - 8 * row))] for count in eighths.tolist()))
    return lines


def _numbers(run: Watcher) -> Table:
    recent = [record for record in run.records[-RECENT:] if record.step > 0]
    table = Table(box=None, pad_edge=False)
    for column in ("", "newest", f"mean of {len(recent)}"):
        table.add_column(column, justify="left" if not column else "right")
    rows: tuple[tuple[str, Callable[[StepRecord], float | None], str], ...] = (
        ("loss", lambda record: record.loss, ".4f"),
        ("auxiliary loss", lambda record: record.aux_loss, ".4f"),
        ("gradient norm", lambda record: record.grad_norm, ".3g"),
        ("learning rate", lambda record: record.learning_rate, ".2e"),
        ("processed tokens/s", lambda record: record.processed_tokens_per_s, ",.0f"),
        ("trained tokens/s", lambda record: record.trained_tokens_per_s, ",.0f"),
        ("seconds a step", lambda record: record.step_s, ".2f"),
        ("busiest expert, x mean", lambda record: record.expert_max_load, ".2f"),
        ("experts without tokens", lambda record: record.expert_idle, ".1%"),
    )
    of_experts = {"auxiliary loss", "busiest expert, x mean", "experts without tokens"}
    for name, value, spec in rows:
        found = [one for record in recent if (one := value(record)) is not None]
        newest = value(run.records[-1])
        if not found and newest is None and name in of_experts:
            continue
        table.add_row(name, number_text(newest, spec), number_text(sum(found) / len(found) if found else None, spec))
    val = [(record.step, record.val_loss) for record in run.records if record.val_loss is not None]
    if val:
        step, best = min(val, key=lambda pair: pair[1])
        table.add_row("validation loss", f"{val[-1][1]:.4f}", f"lowest {best:.4f} at {step:,}")
    if skipped := run.records[-1].skipped_steps:
        table.add_row("skipped steps", f"{skipped:,}", "")
    return table


def _age(run: Watcher) -> str:
    """`done`, the time left, or how long ago the newest step was."""
    last = run.records[-1]
    ago_s = max(0.0, run.now_s - last.unix_time_s)
    recent = [record.step_s for record in run.records[-RECENT:] if record.step > 0]
    pace_s = sum(recent) / len(recent) if recent else 0.0
    if run.total_steps is not None and last.step >= run.total_steps:
        return "done"
    if recent and ago_s > max(60.0, 10 * pace_s):
        return f"no step for {timedelta(seconds=round(ago_s))}"
    if run.total_steps is None or not recent:
        return "running"
    return f"{timedelta(seconds=round((run.total_steps - last.step) * pace_s))} left"


def _last_lines(path: Path, count: int) -> list[str]:
    """The last lines of a log file; reads at most its last 8 KiB."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - 8192))
            return [
                visible(line)
                for line in stream.read().decode("utf-8", errors="replace").split("\n")[-count - 1 :]
                if line
            ]
    except FileNotFoundError:
        return []
