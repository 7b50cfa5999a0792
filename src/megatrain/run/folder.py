"""The folder of a run: what lies where, who may write there, and where a run goes on.

    config.yaml              the whole config, defaults filled in
    metrics.jsonl            one record per step (metrics/record.py)
    log.txt, loss.png        for people
    checkpoints/step_000100/ complete checkpoints (checkpoint/)
    checkpoints/latest       name of the newest one, written after it was read back whole
    weights/step_000100/     weights alone, to evaluate or publish (checkpoint.weights_every_steps)
    lock                     held by the process that trains here (run_lock.py)
    save, stop               touch one of these, and the run saves, or saves and ends, after the step in progress
    aside/                   checkpoints that a resume from an older one has made obsolete

A folder that holds anything is never started in again: a run goes on there (resume), or chooses another place. Nothing is
removed except checkpoints that this run wrote, and those only when a newer one is complete.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

from megatrain.checkpoint.files import MARKER_FILE, remove_folder, remove_leftovers
from megatrain.checkpoint.reader import is_complete, latest_complete
from megatrain.errors import UserError, writing
from megatrain.run.lock import LOCK_NAME

logger = logging.getLogger(__name__)

_STEP_NAME = re.compile(r"step_(\d{6,})")


class RunFolder:
    """Paths of a run's folder. Making one touches nothing; `create` does."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.plot = self.path / "loss.png"
        self.checkpoints = self.path / "checkpoints"
        self.aside = self.path / "aside"
        self.weights = self.path / "weights"

    def create(self) -> None:
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"cannot be made: {error.strerror}", str(self.path), "set run.dir to another place"
            ) from None

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:06d}"

    def tidy(self) -> None:
        """Remove what a process that died was writing, or removing, and its mark on what it had just completed."""
        for parent in (self.checkpoints, self.weights):
            if parent.is_dir():
                remove_leftovers(parent)
                for path in self._step_folders(parent):
                    if is_complete(path):
                        (path / MARKER_FILE).unlink(missing_ok=True)

    def taken(self, signal: str) -> bool:
        """Whether the file `save` or `stop` is there; it is removed, so that it counts once."""
        try:
            (self.path / signal).unlink()
        except OSError:  # mostly because it is not there; what cannot be removed would be a signal for ever
            return False
        return True

    def resume_point(self, resume: str | None) -> Path | None:
        """The checkpoint that the run starts from; None for a run from the beginning.

        Args:
            resume: None: the folder must be empty or missing. "auto": the newest complete checkpoint if there is one,
                else from the beginning. "latest": the newest complete checkpoint. Anything else: a checkpoint's path.

        Raises:
            UserError: The folder is not free, or there is nothing to resume from.
        """
        if self.path.exists() and not self.path.is_dir():
            raise UserError("is a file, not a folder", str(self.path), "set run.dir to another place")
        used = self.path.is_dir() and any(path.name != LOCK_NAME for path in self.path.iterdir())
        if resume is None:
            if used:
                raise UserError(
                    "is not empty",
                    f"run.dir {self.path}",
                    "set run.dir to a new folder, or go on with the run in it: --resume auto",
                )
            return None
        if used and not self.config.is_file() and self._was_begun():
            logger.info("%s: an earlier start ended before the run began; this one begins", self.path)
            used = False
        if used and not self.config.is_file():
            raise UserError(
                "holds files but no run (no config.yaml)", f"run.dir {self.path}", "set run.dir to a new folder"
            )
        if resume in ("auto", "latest"):
            newest = latest_complete(self.checkpoints)
            if newest is None and resume == "latest":
                raise UserError(
                    "there is no complete checkpoint to resume from",
                    str(self.checkpoints),
                    "start anew: leave --resume out, or use --resume auto",
                )
            return newest
        return self._chosen(Path(resume), used)

    def _was_begun(self) -> bool:
        """Whether there is nothing but what a start leaves that was killed before it had written the config."""
        own = {self.checkpoints.name, self.config.name + ".new", LOCK_NAME}
        inside = {path.name for path in self.path.iterdir()}
        return inside <= own and not (self.checkpoints.is_dir() and any(self.checkpoints.iterdir()))

    def _chosen(self, chosen: Path, used: bool) -> Path:
        if not is_complete(chosen):
            there = "is not a complete checkpoint" if chosen.is_dir() else "no such checkpoint folder"
            newest = latest_complete(chosen / "checkpoints") if (chosen / "checkpoints").is_dir() else None
            remedy = (
                f"its newest is {newest}" if newest is not None else "give a folder like RUN/checkpoints/step_000100"
            )
            raise UserError(there, f"--resume {chosen}", remedy)
        if used and chosen.resolve().parent != self.checkpoints.resolve():
            raise UserError(
                f"holds another run than {chosen}",
                f"run.dir {self.path}",
                "set run.dir to a new folder, which then goes on from that checkpoint",
            )
        return chosen

    def set_aside(self, after_step: int) -> None:
        """Move checkpoints of steps that this process will reach again out of the way: they are another history's.

        Raises:
            WriteFailed: The system refuses it.
        """
        for path in [*self._step_folders(), *self._step_folders(self.weights)]:
            if _step_of(path) > after_step:
                kind = "weights_" if path.parent == self.weights else ""
                with writing(self.aside):
                    self.aside.mkdir(exist_ok=True)
                    target = _free_name(self.aside / (kind + path.name))
                    path.rename(target)
                logger.warning("%s is from before the run went back to step %d; moved to %s", path, after_step, target)

    def mark_latest(self, path: Path) -> None:
        """Call when `path` is complete.

        Raises:
            WriteFailed: The system refuses it; what `latest` named before, it still names.
        """
        temporary = self.checkpoints / "latest.new"
        with writing(self.checkpoints / "latest"):
            with temporary.open("w", encoding="utf-8") as file:
                file.write(path.name + "\n")
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.checkpoints / "latest")

    def remove_old_checkpoints(self, keep: int | None, keep_every: int | None = None) -> None:
        """Remove all but the newest `keep` complete checkpoints; None keeps all. Incomplete ones are not counted.

        Args:
            keep: How many stay.
            keep_every: Those of every N-th step stay as well.
        """
        if keep is None:
            return
        complete = [path for path in self._step_folders() if is_complete(path)]
        for path in complete[:-keep]:
            if keep_every is None or _step_of(path) % keep_every:
                remove_folder(path)
                logger.info("removed %s (checkpoint.keep: %d)", path, keep)

    def _step_folders(self, parent: Path | None = None) -> list[Path]:
        parent = parent or self.checkpoints
        if not parent.is_dir():
            return []
        found = [path for path in parent.iterdir() if _STEP_NAME.fullmatch(path.name) and path.is_dir()]
        return sorted(found, key=_step_of)


def _step_of(path: Path) -> int:
    match = _STEP_NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])


def _free_name(path: Path) -> Path:
    free, number = path, 1
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}_{number}")
    return free
