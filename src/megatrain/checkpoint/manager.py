"""The checkpoints of one engine: at most one save and one load in progress, and who is told of their errors."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatrain.checkpoint.async_save import AsyncSave, SaveProgress, SaveSource
from megatrain.checkpoint.reader import RunningLoad
from megatrain.errors import Aftermath, ReplicasDiffer, UserError

logger = logging.getLogger(__name__)

OnError = Literal["stop", "warn"]


@dataclass(frozen=True)
class SaveOptions:
    """The options of `Engine.save`, which describes them."""

    background: bool
    weights_only: bool
    on_error: OnError
    buffer_bytes: int | None
    then: Callable[[SaveProgress], object]


class CheckpointPolicy(ABC):
    """What differs between engines: where a save gets its state, and whether other processes must agree on its end."""

    @abstractmethod
    def open_source(self, directory: Path, state: Mapping[str, Any], options: SaveOptions) -> SaveSource:
        """Decide what a save writes.

        Args:
            directory: The folder to make.
            state: The engine's state beside weights and moments, as JSON.
            options: Of the save.

        Raises:
            UserError: The folder exists, or the disk has no room for it. Nothing was written.
        """

    def agree(self, ended: bool, failed: bool) -> tuple[bool, bool]:
        """(whether a save has ended on all ranks, whether it failed on any)."""
        return ended, failed

    def prepare(self, buffer_bytes: int | None) -> None:  # noqa: B027  a policy need not
        """Allocate staging memory for a background save that starts soon. Does not block."""

    def close(self) -> None:  # noqa: B027  a policy need not
        """Free what is kept between saves."""


class CheckpointManager:
    """Runs the saves of one engine, and remembers its loads.

    Where the policy's `agree` is collective, so are `save`, `check_save` and `wait_saved`.

    Args:
        policy: Of the engine.
        empty: The engine holds no weights yet; it must load a checkpoint first.
    """

    def __init__(self, policy: CheckpointPolicy, empty: bool = False):
        self._policy, self._empty = policy, empty
        self._on_error: OnError = "stop"
        self._saving: AsyncSave | None = None
        self._loading: RunningLoad | None = None
        self._failed_load: tuple[Path, BaseException] | None = None

    # ---------------------------------------------------------------- saves

    @property
    def is_saving(self) -> bool:
        return self._saving is not None and not self._saving.done()

    def save(self, directory: Path, state: Mapping[str, Any], options: SaveOptions) -> AsyncSave:
        """Start a save after the one that may still run; unless it is in the background, wait for it.

        Raises:
            UserError: It could not start; or it failed, and is not in the background.
        """
        self.wait_saved()
        save = AsyncSave(self._policy.open_source(directory, state, options), options.then)
        self._saving, self._on_error = save, options.on_error if options.background else "stop"
        if not options.background:
            self.wait_saved()
        return save

    def prepare_save(self, buffer_bytes: int | None) -> None:
        """Pre-allocate staging memory, unless a save is running."""
        if not self.is_saving:
            self._policy.prepare(buffer_bytes)

    def check_save(self) -> None:
        """Between steps: if the save has ended, forget it; raise its error, or log it, unless that was done already."""
        if self._saving is not None:
            ended, failed = self._policy.agree(self._saving.done(), self._saving.unreported_failure() is not None)
            if ended:
                self._forget_save(failed)

    def wait_saved(self) -> None:
        """Wait for the save in progress, if any; then as `check_save`."""
        if self._saving is not None:
            self._saving.wait()
            _, failed = self._policy.agree(True, self._saving.unreported_failure() is not None)
            self._forget_save(failed)

    def _forget_save(self, failed: bool) -> None:
        """Raise or log the failure of the save, which has ended. Every rank does the same."""
        assert self._saving is not None
        ended, self._saving = self._saving, None
        if not failed:
            return
        error = ended.unreported_failure() or Aftermath("another rank could not save the checkpoint", "Engine.save")
        if self._on_error == "stop" or isinstance(error, ReplicasDiffer):
            raise error
        logger.warning("the checkpoint was not saved, training continues: %s", error)

    def cancel_save(self) -> None:
        """Cancel the save in progress, if any. Not collective, so that a rank can end while others hang."""
        if self._saving is not None:
            self._saving.cancel()
            self._log_failure()

    def _log_failure(self) -> None:
        """Forget the save without raising its error."""
        if self._saving is not None and (error := self._saving.unreported_failure()) is not None:
            logger.error("the checkpoint was not saved: %s", error)
        self._saving = None

    # ---------------------------------------------------------------- loads

    def follow_load(self, loading: RunningLoad) -> None:
        """Remember a load that restores the state unit by unit in its thread."""
        self._empty, self._loading = False, loading

    def cancel_load(self) -> dict[str, Future[None]]:
        """Cancel the latest load, running or failed, so that another can start. Returns the futures of its units, all done."""
        if self._loading is None:
            return {}
        self._loading.cancel()
        ended, self._loading = self._loading, None
        self._empty = ended.error() is not None
        return ended.futures

    @contextmanager
    def restoring(self, directory: Path) -> Iterator[None]:
        """Encloses a load in the foreground. If the block raises, the state counts as a mixture until a load succeeds."""
        try:
            yield
        except BaseException as error:
            self._failed_load = directory, error
            raise
        self._empty, self._failed_load = False, None

    def refuse_mixture(self) -> None:
        """Raise unless the engine holds one consistent state, or is about to.

        Raises:
            UserError: No weights were loaded yet; or the latest load failed, and left a mixture of two states.
        """
        if self._empty:
            raise UserError("the engine holds no weights", remedy="load a checkpoint first")
        failed = self._failed_load
        if self._loading is not None:
            if (error := self._loading.error()) is not None:
                failed = self._loading.directory, error
            elif self._loading.done():
                self._loading = None
        if failed is not None:
            directory, error = failed
            raise UserError(
                f"the load of {directory} has failed, the weights are a mixture: {error}",
                remedy=None if isinstance(error, UserError) else "load a checkpoint again",
            ) from error

    def close(self) -> None:
        """Cancel a load. Let a save end, because a checkpoint is worth having; its error is logged."""
        if self._loading is not None:
            self._loading.cancel()
        if self._saving is not None:
            self._saving.wait()
        self._log_failure()
        self._policy.close()
