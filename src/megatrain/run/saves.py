"""The checkpoints of a run as it goes: when they are written, what is said of them, and what happens when one fails."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from megatrain.checkpoint.async_save import SaveHandle, SaveProgress
from megatrain.config.schema import CheckpointConfig
from megatrain.engine.base import Engine
from megatrain.errors import UserError
from megatrain.run.folder import RunFolder
from megatrain.units import GIB, gib

logger = logging.getLogger(__name__)

PROGRESS_EVERY_S = 10.0
"""A save that takes longer says how far it is, this often."""
REPORTED_S = 1.0
"""A save that took longer, or held updates up for longer, says so at its end."""
PREPARED_S = 30.0
"""The copies' memory is made ready this long before a save: one thread touched 3.2 GiB/s of what was never used."""


class RunSaves:
    """Saves one run's engine into the run's folder.

    The end of a save (`latest`, the removal of old checkpoints, its line in the log) happens in the thread that writes it: it
    belongs to the save, and removing a large checkpoint takes a while. `checkpoint` and `saved_step` are set there too.

    Args:
        engine: The engine whose state is saved.
        folder: The run's.
        config: When and how.
        extra: Gives what to keep with a checkpoint.
        step, checkpoint: Where the run starts from.
        size_bytes: Of a checkpoint, for people.
        state: Shows what a run waits for, see `RunLogger.state`.
    """

    def __init__(
        self,
        engine: Engine,
        folder: RunFolder,
        config: CheckpointConfig,
        extra: Callable[[], dict[str, Any]],
        step: int,
        checkpoint: Path | None,
        size_bytes: int = 0,
        state: Callable[..., AbstractContextManager[None]] = lambda *_, **__: nullcontext(),
    ):
        self._engine, self._folder, self._config, self._extra = engine, folder, config, extra
        self.saved_step, self.checkpoint, self._size_bytes = step, checkpoint, size_bytes
        self._state = state
        self._running: SaveHandle | None = None
        self._running_step = step
        self._said_s = 0.0
        self._lock = threading.Lock()

    def save(self, step: int) -> None:
        """Save after a step; in the background if the run is configured so. A failure ends the run or is a warning."""
        if step in (self.saved_step, self._running_step):
            return
        if self._running is not None and not self._running.done():
            logger.warning(
                "step %d is due to be saved while step %d is still being written: training waits for the disk "
                "(a larger checkpoint.every_steps avoids it)", step, self._running_step
            )  # fmt: skip
        target = self._folder.checkpoint(step)
        if self._config.background:
            self._attempt(target, lambda: self._start(target, step, background=True))
            return
        with self._saving(step):
            self._attempt(target, lambda: self._start(target, step, background=False))

    def _saving(self, step: int, remark: str = "", *, shown: bool = False) -> AbstractContextManager[None]:
        """While training waits for a save."""
        return self._state("saving", f"saving step {step} ({gib(self._size_bytes)}){remark}", shown=shown)

    def prepare(self, step: int, step_s: float) -> None:
        """After a step that took `step_s`: if the next save is near, have its memory made ready."""
        every = self._config.every_steps
        if every is None or not self._config.background:
            return
        steps_left = every - step % every
        if steps_left == 1 or steps_left * step_s <= PREPARED_S:
            self._engine.prepare_save(self._buffer_bytes())

    def save_weights(self, step: int) -> None:
        """Write the weights alone, for evaluation elsewhere."""
        target = self._folder.weights / self._folder.checkpoint(step).name

        def write() -> None:
            self._engine.save(
                target,
                weights_only=True,
                background=self._config.background,
                on_error=self._config.on_error,
                buffer_bytes=self._buffer_bytes(),
            )

        self._attempt(target, write)

    def _attempt(self, target: Path, start: Callable[[], None]) -> None:
        try:
            start()
        except UserError as error:
            if self._config.on_error == "stop":
                raise
            logger.warning("%s was not saved, training goes on: %s", target, error)

    def _start(self, target: Path, step: int, *, background: bool) -> None:
        if target.exists():
            raise UserError("exists already; nothing is overwritten", str(target), "move it away")
        self._running_step, self._said_s = step, time.perf_counter()
        self._running = self._engine.save(
            target,
            extra=self._extra(),
            background=background,
            on_error=self._config.on_error,
            buffer_bytes=self._buffer_bytes(),
            then=lambda progress: self._ended(target, step, progress),
        )

    def _buffer_bytes(self) -> int | None:
        buffer = self._config.buffer_gib
        return None if buffer == "auto" else int(buffer * GIB)

    def _ended(self, target: Path, step: int, progress: SaveProgress) -> None:
        """In the writer's thread: the checkpoint is whole and was read back."""
        self._folder.mark_latest(target)
        with self._lock:
            self.saved_step, self.checkpoint = step, target
        logger.info("step %d: saved %s in %.1f s%s", step, target, progress.seconds, _how(progress))
        self._folder.remove_old_checkpoints(self._config.keep, self._config.keep_every)

    def report(self) -> None:
        """After a step: say how far a long save is."""
        if self._running is None:
            return
        progress = self._running.progress()
        if self._running.done():
            self._running = None
        elif time.perf_counter() - self._said_s >= PROGRESS_EVERY_S:
            self._said_s = time.perf_counter()
            logger.info(
                "step %d: %.0f%% saved, %.2f GiB/s, %.0f s left, updates waited %.1f s",
                self._running_step,
                100 * min(1.0, progress.written_bytes / max(progress.total_bytes, 1)),
                progress.bytes_per_s / GIB,
                progress.left_s,
                progress.waited_s,
            )

    def settle(self) -> None:
        """Wait for the save in progress. Its failure ends the run or is a warning."""
        if self._running is not None and not self._running.done():
            logger.info("step %d is still being saved", self._running_step)
        self._engine.wait_saved()
        self.report()

    def finish(self, step: int, remark: str = "") -> None:
        """The last save of a process: the state of `step` is on the disk when this returns.

        Args:
            step: The last step.
            remark: Follows the line that says that it is being saved.

        Raises:
            UserError: It could not be saved, whatever `checkpoint.on_error` says: there is nothing to go on with.
        """
        self.settle()
        if step != self.saved_step:
            with self._saving(step, remark, shown=True):
                self._start(self._folder.checkpoint(step), step, background=False)
            self.report()

    def went_back(self, step: int, checkpoint: Path) -> None:
        """The run goes on from an older checkpoint."""
        self.saved_step = self._running_step = step
        self.checkpoint = checkpoint


def _how(progress: SaveProgress) -> str:
    """What the line of a save says of one that took long, or held updates up."""
    held_up = progress.waited_s >= REPORTED_S
    if not held_up and progress.seconds < REPORTED_S:
        return ""
    remedy = " (a larger checkpoint.buffer_gib lets them wait less)" if held_up else ""
    return (
        f": {progress.written_bytes / GIB:.2f} GiB at {progress.bytes_per_s / GIB:.2f} GiB/s, "
        f"read back in {progress.read_back_s:.1f} s; updates waited {progress.waited_s:.1f} s for it{remedy}"
    )
