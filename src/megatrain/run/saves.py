"""The checkpoints of a run: when they are written, the disk space they need, and what happens when one fails."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from megatrain.checkpoint.async_save import SaveHandle, SaveProgress
from megatrain.checkpoint.host_planes import RESERVED_BYTES
from megatrain.checkpoint.writer import SLACK_BYTES
from megatrain.config.schema import CheckpointConfig, RunConfig
from megatrain.engine.base import Engine
from megatrain.errors import ReplicasDiffer, UserError
from megatrain.host_memory.available import available_host_bytes
from megatrain.run.folder import RunFolder, nearest_existing
from megatrain.units import GIB, counted, gib, gibs

logger = logging.getLogger(__name__)

PROGRESS_EVERY_S = 10.0
"""Interval of the log lines of a long save."""
REPORTED_S = 1.0
"""A save that took longer, or delayed updates for longer, says so at its end."""
PREPARED_S = 30.0
"""How long before a save its staging buffers are allocated: one thread first touches memory at 3.2 GiB/s."""


class RunSaves:
    """Saves one run's engine into the run's folder.

    The end of a save (`latest`, the removal of old checkpoints, its log line) happens in the thread that writes it: removing a
    large checkpoint takes a while. `checkpoint` and `saved_step` are set there, too.

    Args:
        engine: The engine whose state is saved.
        folder: The run's folder.
        config: When and how to save.
        extra: Returns the data to store with a checkpoint.
        step, checkpoint: Where the run starts from.
        size_bytes: Size of a checkpoint, for log lines.
        state: Shows what the run waits for, see `RunLogger.state`.
        reserve_bytes: Host memory that copies of a background save leave free: below it the run would end.
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
        reserve_bytes: int = 0,
    ):
        self._engine, self._folder, self._config, self._extra = engine, folder, config, extra
        self.saved_step, self.checkpoint, self._size_bytes = step, checkpoint, size_bytes
        self._state = state
        self._running: SaveHandle | None = None
        self._running_step = step
        self._reported_s = 0.0
        self._lock = threading.Lock()
        self._reserve_bytes = reserve_bytes
        self._next_buffer_bytes: int | None = None  # for copies of the next save, once it is known

    def after_step(self, step: int, step_s: float) -> None:
        """Log the progress of a long save; if the next one is near, let the engine prepare it.

        Args:
            step: The step just taken.
            step_s: How long it took.
        """
        self._report()
        every = self._config.every_steps
        if every is not None and self._config.background:
            steps_left = every - step % every
            if steps_left == 1 or steps_left * step_s <= PREPARED_S:
                self._engine.prepare_save(self._buffer_bytes())

    def save_if_due(self, step: int) -> None:
        """Save after a step if `checkpoint.every_steps` or `weights_every_steps` says so."""
        if is_due(self._config.weights_every_steps, step):
            self._save_weights(step)  # first: it is the smaller one, and the second waits for the first
        if is_due(self._config.every_steps, step):
            self.save(step)

    def save(self, step: int) -> None:
        """Save the state after a step, unless it is saved already. A failure ends the run or is a warning, as configured."""
        if step in (self.saved_step, self._running_step):
            return
        if self._running is not None and not self._running.done():
            logger.warning(
                "step %d: due to be saved while step %d is still being written: waiting for the disk "
                "(a larger checkpoint.every_steps avoids it)", step, self._running_step
            )  # fmt: skip
        target, background = self._folder.checkpoint(step), self._config.background
        with nullcontext() if background else self._saving(step):
            self._attempt(target, lambda: self._start(target, step, background=background))

    def _saving(self, step: int, remark: str = "", *, shown: bool = False) -> AbstractContextManager[None]:
        """The state in which training waits for a save."""
        return self._state("saving", f"saving step {step} ({gib(self._size_bytes)}){remark}", shown=shown)

    def _save_weights(self, step: int) -> None:
        target = self._folder.weights / self._folder.checkpoint(step).name
        self._attempt(
            target,
            lambda: self._engine.save(
                target,
                weights_only=True,
                background=self._config.background,
                on_error=self._config.on_error,
                buffer_bytes=self._buffer_bytes(),
            ),
        )

    def _attempt(self, target: Path, start: Callable[[], object]) -> None:
        try:
            start()
        except UserError as error:
            if self._config.on_error == "stop" or isinstance(error, ReplicasDiffer):
                raise
            logger.warning("%s was not saved, training continues: %s", target, error)

    def _start(self, target: Path, step: int, *, background: bool) -> None:
        if target.exists():
            raise UserError("exists already; nothing is overwritten", str(target), "move it away")
        self._running_step, self._reported_s = step, time.perf_counter()
        self._running = self._engine.save(
            target,
            extra=self._extra(),
            background=background,
            on_error=self._config.on_error,
            buffer_bytes=self._buffer_bytes(),
            then=lambda progress: self._ended(target, step, progress),
        )
        self._next_buffer_bytes = None

    def _buffer_bytes(self) -> int | None:
        """Bound on copies of the next save; None: the engine's own, which leaves the host its last GiB."""
        if self._config.buffer_gib != "auto":
            return int(self._config.buffer_gib * GIB)
        if self._reserve_bytes <= RESERVED_BYTES:
            return None
        if self._next_buffer_bytes is None:  # asked once for each save: memory that is prepared is no longer free
            free = available_host_bytes()
            self._next_buffer_bytes = max(0, min(free // 2, free - self._reserve_bytes))
        return self._next_buffer_bytes

    def _ended(self, target: Path, step: int, progress: SaveProgress) -> None:
        """Called in the writer's thread: the checkpoint is complete and was read back."""
        self._folder.mark_latest(target)
        with self._lock:
            self.saved_step, self.checkpoint = step, target
        logger.info("step %d: saved %s in %.1f s%s", step, target, progress.seconds, _details(progress))
        self._folder.remove_old_checkpoints(self._config.keep, self._config.keep_every)

    def _report(self) -> None:
        if self._running is None:
            return
        progress = self._running.progress()
        if self._running.done():
            self._running = None
        elif time.perf_counter() - self._reported_s >= PROGRESS_EVERY_S:
            self._reported_s = time.perf_counter()
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
            logger.info("step %d: still being saved", self._running_step)
        self._engine.wait_saved()
        self._report()

    def finish(self, step: int, remark: str = "") -> None:
        """The last save of a process: the state of `step` is on the disk when this returns.

        Args:
            step: The last step.
            remark: Appended to the log line.

        Raises:
            UserError: It could not be saved, whatever `checkpoint.on_error` says: the run could not be resumed.
        """
        self.settle()
        if step != self.saved_step:
            with self._saving(step, remark, shown=True):
                self._start(self._folder.checkpoint(step), step, background=False)
            self._report()

    def went_back(self, step: int, checkpoint: Path) -> None:
        """The run continues from an older checkpoint."""
        self.saved_step = self._running_step = step
        self.checkpoint = checkpoint


def is_due(every: int | None, step: int) -> bool:
    """Whether something that happens every N steps happens after this one; None: never."""
    return every is not None and step % every == 0


def _details(progress: SaveProgress) -> str:
    """The end of the log line of a save that took long, or delayed updates."""
    delayed = progress.waited_s >= REPORTED_S
    if not delayed and progress.seconds < REPORTED_S:
        return ""
    remedy = " (a larger checkpoint.buffer_gib shortens it)" if delayed else ""
    return (
        f": {progress.written_bytes / GIB:.2f} GiB at {progress.bytes_per_s / GIB:.2f} GiB/s, "
        f"read back in {progress.read_back_s:.1f} s, updates waited {progress.waited_s:.1f} s{remedy}"
    )


# ---------------------------------------------------------------- disk space


def checkpoints_at_once(run: RunConfig, total_steps: int, start: int = 0, there: Sequence[int] = ()) -> int:
    """Largest number of checkpoints on disk at once: an old one is removed only when the new one is complete.

    Args:
        run: The config.
        total_steps: Length of the run.
        start: The last step taken.
        there: Steps of the run's checkpoints that exist, in order, up to `start`.
    """
    config = run.checkpoint
    every = config.every_steps or total_steps + 1
    made = list(range(start - start % every + every, total_steps + 1, every))
    if config.at_end and total_steps > max([start, *made[-1:]]):
        made.append(total_steps)
    recent, kept, most = deque(there), 0, len(there)
    for step in made:
        recent.append(step)
        most = max(most, len(recent) + kept)
        while config.keep is not None and len(recent) > config.keep:
            removed = recent.popleft()
            kept += config.keep_every is not None and removed % config.keep_every == 0
    return most


def weights_to_come(run: RunConfig, total_steps: int, start: int = 0) -> int:
    """Folders of weights that the steps after `start` save; none of them is ever removed."""
    every = run.checkpoint.weights_every_steps
    return total_steps // every - start // every if every else 0


def refuse_if_disk_too_small(
    run: RunConfig, checkpoint_bytes: int, count: int, weights_bytes: int = 0, there_bytes: int = 0
) -> None:
    """Compare what a run will save with the free space where its folder is, or will be.

    Args:
        run: The config.
        checkpoint_bytes: Size of one checkpoint.
        count: Number of checkpoints on disk at once.
        weights_bytes: Size of all folders of weights that will be saved.
        there_bytes: Size of the checkpoints, among `count`, that are there already, and of what the run removes at its start.

    Raises:
        UserError: There is not enough space.
    """
    place = nearest_existing(Path(run.run.dir))
    free = shutil.disk_usage(place).free
    needed = count * checkpoint_bytes + weights_bytes
    if needed and needed + SLACK_BYTES > free + there_bytes:  # each save wants this slack, for its small files
        each, weights, there, free_text, slack = gibs(checkpoint_bytes, weights_bytes, there_bytes, free, SLACK_BYTES)
        parts = [f"{counted(count, 'checkpoint')} of {each}"] if count else []
        parts += [f"{weights} of weights (checkpoint.weights_every_steps)"] if weights_bytes else []
        already = f", {there} of it are there already" if there_bytes else ""
        raise UserError(
            f"not enough space for {' and '.join(parts)}{already}: {free_text} free, of which {slack} must stay free",
            str(place),
            "free some space, set run.dir to another disk, or keep fewer (checkpoint.keep, checkpoint.every_steps)",
        )
