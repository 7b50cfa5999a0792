"""RunLogger: prints and writes everything that a run says, to the console and to `log.txt` in the run's folder.

Library code logs through `logging` (`logging.getLogger(__name__)`); the RunLogger is the handler behind it:

    megatrain.*  INFO and above     -> console and log.txt
    all others   WARNING and above  -> log.txt only (most warnings of transformers and torch do not concern the user)

With the logger `megatrain` at DEBUG (`--verbose`), its DEBUG lines and the warnings of all others go to both. INFO is for what a
user can act on or waits for; what only explains the program is DEBUG.

A step is one plain line in `log.txt`. On the console the lines of steps are printed every few seconds only: on a terminal above a
bar at the bottom, which shows the newest step and the time left; elsewhere (a file, a pipe) after the first `FIRST_STEPS` of a
process. A step that is left out there is printed after all when any other line follows, so a validation, a save, an alert or the
end comes with its step. Long work other than steps (compiling, validating, saving) is a word beside the bar, or without a bar a
line when it begins.

Everything shown or written goes through megatrain.text, see [Note: what a name may not do] there.
"""

from __future__ import annotations

import logging
import os
import textwrap
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from io import RawIOBase
from pathlib import Path

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from megatrain.errors import writing
from megatrain.metrics.record import StepRecord, write_whole
from megatrain.text import printable, visible
from megatrain.units import counted, number_text

LINE_EVERY_S = 10.0
"""Shortest time between two lines of progress, and between the lines of two steps unless the config says otherwise."""
FIRST_STEPS = 10
"""Where the console is no terminal, this many steps of a process are printed in any case."""
_STYLES = {logging.WARNING: "yellow", logging.ERROR: "red", logging.CRITICAL: "red"}
_Live = tuple[Progress, TaskID]


class RunLogger:
    """A context manager; while it is open, it receives what the library logs.

    Lines before `open_folder` are kept and written to `log.txt` when it opens: a run's folder is created only after the checks,
    whose lines belong in its log.

    Args:
        console: By default standard output.
        quiet: Print and write nothing: for a rank that does not report.
        stderr: Print to standard error, for a command whose standard output is its result.
        line_every_s: Shortest time between the lines of two steps on the console; 0: every step has its line. None: the
            default of the config.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        quiet: bool = False,
        stderr: bool = False,
        line_every_s: float | None = None,
    ):
        self._console = console or Console(highlight=False, markup=False, soft_wrap=True, quiet=quiet, stderr=stderr)
        self._quiet = quiet
        self._line_every_s = LINE_EVERY_S if line_every_s is None else line_every_s
        self._first_left = FIRST_STEPS
        self._left_out: str | None = None  # the newest step's line, while the console has not shown it
        self._file: RawIOBase | None = None  # unbuffered: a line that the disk refuses is lost, later ones are not
        self._refused = False  # the disk has refused a line, and the user knows it
        self._waiting: list[str] = []
        self._handlers: list[tuple[logging.Logger, logging.Handler]] = []
        self._pace_s: float | None = None  # moving average of a step's wall time
        self._bar: _Live | None = None  # from `begin` on, on a terminal
        self._beside_bar = ""  # the text beside it between two states
        self._next_line_s = 0.0
        self._work: _Live | None = None  # during long work before the bar, on a terminal
        self._next_progress_s = time.monotonic() + LINE_EVERY_S
        self._lock = threading.RLock()  # trackers' threads warn, too

    def __enter__(self) -> RunLogger:
        own = logging.getLogger("megatrain")
        self._level = own.level
        verbose = own.isEnabledFor(logging.DEBUG)
        own.setLevel(logging.DEBUG if verbose else logging.INFO)
        for logger, is_own in ((own, True), (logging.getLogger(), False)):
            handler = _Handler(self, own=is_own, to_console=is_own or verbose)
            logger.addHandler(handler)
            self._handlers.append((logger, handler))
        logging.captureWarnings(True)
        return self

    def __exit__(self, *_: object) -> None:
        self._end_work()
        if self._bar is not None:
            self._bar[0].stop()
            self._bar = None
        self._show_left_out()
        logging.captureWarnings(False)
        while self._handlers:
            logger, handler = self._handlers.pop()
            logger.removeHandler(handler)
        logging.getLogger("megatrain").setLevel(self._level)
        if self._file is not None:
            self._file.close()
            self._file = None

    def open_folder(self, folder: Path) -> None:
        """Open `log.txt` in the run's folder, to append lines; WriteFailed if the system refuses."""
        assert self._file is None, f"log.txt is already open in another folder than {folder}"
        if self._quiet:
            return
        with writing(folder / "log.txt"):
            self._file = (folder / "log.txt").open("ab", buffering=0)
        self._write("".join(self._waiting))
        self._waiting.clear()

    def info(self, text: str) -> None:
        self.print(text, logging.INFO)

    def warning(self, text: str) -> None:
        self.print(f"warning: {text}", logging.WARNING)

    def to_file(self, text: str, error: BaseException | None = None) -> None:
        """Write a line to `log.txt` alone, with the traceback of `error` if given."""
        trace = "".join(traceback.format_exception(error)).rstrip() if error is not None else ""
        self.print(f"{text}\n{textwrap.indent(trace, '  ')}" if trace else text, logging.ERROR, to_console=False)

    def print(self, text: str, level: int, *, to_console: bool = True) -> None:
        """Log a line, without `warning: ` or the like before it; `level` (of `logging`) decides its colour."""
        if self._quiet:
            return
        self._end_work()  # the next `progress` brings it back
        text = printable(text)
        line = f"{datetime.now():%Y-%m-%d %H:%M:%S} {text}\n"
        with self._lock:
            if to_console:
                self._show_left_out()
                self._console.print(text, style=_STYLES.get(level))
            if self._file is not None:
                self._write(line)
            else:
                self._waiting.append(line)

    def _write(self, lines: str) -> None:
        """Append to `log.txt`. A refused line is a warning: it is on the console, and metrics.jsonl matters more."""
        assert self._file is not None
        try:
            write_whole(self._file, lines.encode())
        except OSError as error:
            if not self._refused:
                self._refused = True
                text = f"warning: log.txt cannot be written: {error.strerror}; lines are missing there"
                self._console.print(text, style=_STYLES[logging.WARNING])

    def _show_left_out(self) -> None:
        line, self._left_out = self._left_out, None
        if line is not None:
            self._console.print(printable(line))

    def show(self, renderable: RenderableType) -> None:
        """Print on the console only, a text with all its line breaks; other renderables must hold safe text."""
        self._console.print(visible(renderable) if isinstance(renderable, str) else renderable)

    @property
    def colours(self) -> bool:
        """Whether the console shows colours: it is a terminal, and NO_COLOR is not set."""
        return self._console.is_terminal and not self._console.no_color

    def printable(self, character: str, instead: str) -> str:
        """`character` if the console's encoding has it, else `instead`."""
        try:
            character.encode(self._console.encoding)
            return character
        except UnicodeEncodeError:
            return instead

    def progress(self, text: str, share: float) -> None:
        """Show the progress of long work, 0 to 1: a bar on a terminal, else a line every `LINE_EVERY_S`."""
        text = printable(text)
        if not self._console.is_terminal or self._console.is_dumb_terminal:
            if time.monotonic() >= self._next_progress_s:
                self._next_progress_s = time.monotonic() + LINE_EVERY_S
                self.info(text)
        elif self._bar is not None:  # a terminal has room for one live bar
            self._bar[0].update(self._bar[1], description=text)
        else:
            if self._work is None:
                self._work = self._live(_beside(), TimeRemainingColumn(), total=1.0)
            self._work[0].update(self._work[1], completed=share, description=text)

    def _live(self, *columns: ProgressColumn, total: float) -> _Live:
        progress = Progress(BarColumn(), *columns, console=self._console, transient=True, refresh_per_second=4)
        task = progress.add_task("", total=total)
        progress.start()
        return progress, task

    def _end_work(self) -> None:
        if self._work is not None:
            self._work[0].stop()
            self._work = None

    def begin(self, step: int, total_steps: int) -> None:
        """Draw the bar, on a terminal, before the first step of this process."""
        if self._console.is_terminal:
            self._draw_bar(step, total_steps, self._beside_bar)

    def step(self, record: StepRecord, total_steps: int) -> None:
        """Log a step as one line; on a terminal update the bar."""
        self._pace_s = record.step_s if self._pace_s is None else 0.9 * self._pace_s + 0.1 * record.step_s
        left_s = (total_steps - record.step) * self._pace_s
        now, on_terminal = time.monotonic(), self._console.is_terminal
        shown = record.step == total_steps or record.skipped is not None or now >= self._next_line_s
        if on_terminal:
            self._draw_bar(record.step, total_steps, bar_text(record, left_s))
        else:
            shown = shown or self._first_left > 0
            self._first_left -= 1
        if shown:
            self._next_line_s = now + self._line_every_s
        line = step_line(record, total_steps, left_s)
        self._left_out = None
        self.print(line, logging.INFO, to_console=shown)
        if not shown and not on_terminal:
            self._left_out = line

    def validation(self, record: StepRecord) -> None:
        """Log the validation loss of a record that has one."""
        assert record.val_loss is not None, f"the record of step {record.step} has no validation loss"
        tokens = f"{counted(record.val_tokens or 0, 'token')}, {record.val_s:.1f} s"
        self.info(f"step {record.step}: validation loss {record.val_loss:.4f} over {tokens}")

    @contextmanager
    def state(self, word: str, line: str | None = None, *, shown: bool = False) -> Iterator[None]:
        """A state of the run other than steps: a word (`validating`) beside the bar, or without a bar a line at its beginning.

        The line (by default the word) is also in log.txt; `shown` prints it above a bar, too.
        """
        self.print(line or word, logging.INFO, to_console=shown or self._bar is None)
        self._write_beside_bar(word)
        try:
            yield
        finally:
            self._write_beside_bar(self._beside_bar)

    def _write_beside_bar(self, text: str) -> None:
        if self._bar is not None:
            self._bar[0].update(self._bar[1], description=printable(text), refresh=True)

    def _draw_bar(self, step: int, total_steps: int, text: str) -> None:
        self._beside_bar = text
        if self._bar is None:
            self._end_work()
            self._bar = self._live(MofNCompleteColumn(), _beside(), total=total_steps)
        self._bar[0].update(self._bar[1], completed=step, description=text)


def _beside() -> TextColumn:
    return TextColumn("{task.description}", markup=False)


class _Handler(logging.Handler):
    def __init__(self, logger: RunLogger, *, own: bool, to_console: bool):
        super().__init__(logging.NOTSET if own else logging.WARNING)
        self._logger, self._own, self._to_console = logger, own, to_console

    def emit(self, record: logging.LogRecord) -> None:
        own = record.name.partition(".")[0] == "megatrain"
        if own != self._own:
            return  # the record also reaches the other handler, which prints it
        text = record.getMessage()
        if record.exc_info:
            trace = "".join(traceback.format_exception(*record.exc_info)).rstrip()
            text += "\n" + textwrap.indent(trace, "  ")
        if own and isinstance(share := getattr(record, "share", None), float):
            self._logger.progress(text, share)
            return
        if record.levelno >= logging.WARNING:
            text = f"{record.levelname.lower()}{'' if own else f' from {record.name}'}: {text}"
        self._logger.print(text, record.levelno, to_console=self._to_console)


def step_line(record: StepRecord, total_steps: int, left_s: float) -> str:
    """`step  12/300  loss 2.3456  norm 1.23  lr 1.00e-05  10.3k tok/s (8.1k trained)  3.12 s (data 0.01)  ETA 0:14:58`

    The auxiliary loss of routers follows the loss, if it is on; the MFU the tokens, if it is known; the bubble of a pipeline the
    ETA: `bubble 0.12 (0.09 simulated)`. `experts x3.1, 2.0% idle`: the largest load of an expert over its layer's mean, and the
    share of experts without tokens.
    """
    width = len(str(total_steps))
    split_s = {**record.split_s, "data": record.data_wait_s}
    split = ", ".join(f"{name} {part_s:.2f}" for name, part_s in split_s.items() if part_s >= 0.005)
    parts = [
        f"step {record.step:>{width}}/{total_steps}",
        f"loss {number_text(record.loss, '.4f')}",
        *([f"aux {record.aux_loss:.4f}"] if record.aux_loss is not None else []),
        f"norm {number_text(record.grad_norm, '.3g')}",
        f"lr {record.learning_rate:.2e}",
        f"{_thousands(record.processed_tokens_per_s)} tok/s ({_thousands(record.trained_tokens_per_s)} trained)",
        *([f"MFU {record.mfu:.1%}"] if record.mfu is not None else []),
        f"{record.step_s:.2f} s ({split})" if split else f"{record.step_s:.2f} s",
        f"ETA {timedelta(seconds=round(left_s))}",
    ]
    if "bubble" in record.mesh:
        simulated = record.mesh.get("bubble_simulated")
        beside = f" ({simulated:.2f} simulated)" if simulated is not None else ""
        parts.append(f"bubble {record.mesh['bubble']:.2f}{beside}")
    if record.expert_max_load is not None:
        idle = f", {record.expert_idle:.1%} idle" if record.expert_idle else ""
        parts.append(f"experts x{record.expert_max_load:.1f}{idle}")
    if record.skipped:
        parts.append(f"SKIPPED: {record.skipped}")
    return "  ".join(parts)


def bar_text(record: StepRecord, left_s: float) -> str:
    """The text beside the bar: `loss 2.3456  10.3k tok/s  ETA 0:14:58`"""
    speed = _thousands(record.processed_tokens_per_s)
    return f"loss {number_text(record.loss, '.4f')}  {speed} tok/s  ETA {timedelta(seconds=round(left_s))}"


def _thousands(value: float) -> str:
    if value >= 1000:
        return f"{value / 1000:.1f}k"
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def quiet_libraries() -> None:
    """Route transformers' messages through `logging` and switch off its progress bars, which would break our lines."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.disable_default_handler()
    transformers_logging.enable_propagation()
