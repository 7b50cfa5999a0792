"""The coordinator of a run: a single process, or one rank among those that torchrun started.

[Note: what rank 0 does alone]
All ranks take the same steps with the same batches, so only gradients travel between them. Rank 0 prepares the data first and
the others read its cache; rank 0 alone writes log, metrics, plot and the run's folder. Everything that decides where the loop
goes must be equal on all ranks: step numbers and skipped steps are; requests to stop or to save are agreed on before each step,
and so is the checkpoint to start from, or to go back to, before any of it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatrain.checkpoint.reader import complete_checkpoints, latest_complete
from megatrain.config.schema import RunConfig, WatchdogConfig
from megatrain.engine.mesh import launch
from megatrain.engine.mesh.launch import is_out_of_memory, note_out_of_memory, times_out_of_memory
from megatrain.engine.mesh.watchdog import EXIT_HANG, Watchdog
from megatrain.errors import Aftermath, MegatrainError, NumericStop, PlanRefused, UserError
from megatrain.run.engine_factory import advice_on_layout, check_host_ranks, check_mesh, mesh_plan
from megatrain.run.folder import RunFolder, RunLock

T = TypeVar("T")

RESTART_WAIT_S = 30.0
"""How long a restarted job waits for the run's lock, which an attempt that torchrun has ended may still hold."""
COMES_AGAIN = (UserError, PlanRefused, NumericStop)
"""Errors that a restart would only repeat, unless they are an `Aftermath`. Low host memory is not among them: a new process
begins with less."""


class StartAgain(MegatrainError):
    """This process must end so that torchrun restarts the run, with a smaller plan."""

    exit_code = EXIT_HANG


class EndedBefore(MegatrainError):
    """An earlier attempt of this job, or another rank of this one, ended with an error that a restart would repeat."""

    def __init__(self, code: int, text: str, attempt: int):
        self.exit_code = code
        earlier = "\n  (from an earlier attempt; torchrun restarts what would only fail again)"
        super().__init__(text + (earlier if attempt < launch.attempt() else ""))


class Coordinator:
    """A run in one process: every agreement is trivial.

    Attributes:
        rank, world: This process's number and the number of processes.
        attempt: How often torchrun has restarted the job.
        restarts: How often the run has been restarted because a rank ran out of device memory.
        advice: Lines for the log: what is forecast to be faster than the run's layout.
    """

    rank = 0
    world = 1
    attempt = 0
    restarts = 0
    advice: Sequence[str] = ()

    @property
    def is_main(self) -> bool:
        """Whether this process reports and writes: rank 0."""
        return self.rank == 0

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """For each flag, whether it is set on any rank. Collective."""
        return flags

    def agree(self, ok: bool) -> bool:
        """Whether `ok` is true on every rank. Collective."""
        return not self.any(not ok)[0]

    def gather(self, value: T) -> list[T]:
        """Each rank's value, by rank. Collective."""
        return [value]

    def broadcast(self, value: T) -> T:
        """Rank 0's value. Collective."""
        return value

    def barrier(self) -> None:
        """Wait for all ranks. Collective."""

    def section(self, kind: str, name: str | None = None) -> AbstractContextManager[Any]:
        """A part of the work with a time limit, `watchdog.<kind>_s`."""
        return nullcontext()

    def lock(self, folder: Path) -> AbstractContextManager[Any]:
        """Hold the lock of the run's folder. Collective.

        Raises:
            UserError: Another job holds it.
        """
        return RunLock(folder)

    def resume_from(self, folder: RunFolder, resume: str | None) -> str | None:
        """`resume` as every rank understands it: words that mean the newest checkpoint become its path. Collective."""
        return resume

    def in_turn(self, work: Callable[[], T]) -> T:
        """`work` on rank 0 first, then on the others; returns when all are done. Collective."""
        return work()

    def begin(self, folder: Path) -> None:
        """Call when the run's folder is in place. Collective."""

    def newest_checkpoint(self, folder: RunFolder, before_step: int | None = None) -> Path | None:
        """The newest checkpoint that every rank sees as complete. Collective."""
        return latest_complete(folder.checkpoints, before_step=before_step)

    def restarting_on_out_of_memory(self, step: int) -> AbstractContextManager[Any]:
        """Running out of device memory inside ends the process, and torchrun restarts it: [Note: out of memory] in launch.py."""
        return nullcontext()

    def finish(self) -> None:
        """Call after the run's last collective work: from here on each rank may end by itself. Collective."""


class DistributedCoordinator(Coordinator):
    """One rank of a run, on torch.distributed's default process group.

    Args:
        run: The config.
        device: The rank's device.
        watchdog: Ends all ranks when one hangs.
    """

    def __init__(self, run: RunConfig, device: torch.device, watchdog: Watchdog):
        self.rank, self.world, self.attempt = dist.get_rank(), dist.get_world_size(), launch.attempt()
        self._run, self._device, self._watchdog = run, device, watchdog

    def any(self, *flags: bool) -> tuple[bool, ...]:
        found = torch.tensor([int(flag) for flag in flags], device=self._device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return tuple(map(bool, found.tolist()))

    def gather(self, value: T) -> list[T]:
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value)
        return found

    def broadcast(self, value: T) -> T:
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def barrier(self) -> None:
        dist.barrier()

    def section(self, kind: str, name: str | None = None) -> AbstractContextManager[Any]:
        return self._watchdog.section(kind, name)

    @contextmanager
    def lock(self, folder: Path) -> Iterator[None]:
        """Rank 0 holds it; where it is refused, all ranks end."""
        # after a restart, another host's rank 0 of the previous attempt may still be on its way out
        wait_s = RESTART_WAIT_S if self.attempt else 0.0
        with ExitStack() as stack:
            self._first_on_main(lambda: stack.enter_context(RunLock(folder, wait_s)))
            yield

    def resume_from(self, folder: RunFolder, resume: str | None) -> str | None:
        if self.broadcast(launch.has_begun(folder.path)):
            resume = "auto"  # torchrun restarts this job: it resumes in any case
        if resume not in ("auto", "latest"):
            return resume
        newest = self.newest_checkpoint(folder)
        return resume if newest is None else str(newest)

    def in_turn(self, work: Callable[[], T]) -> T:
        done = self._first_on_main(work)
        found = done[0] if done else work()
        self.barrier()
        return found

    def _first_on_main(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on rank 0; returns its result there and nothing elsewhere. If it fails, every rank ends."""
        done: list[T] = []
        try:
            if self.is_main:
                done.append(work())
        finally:
            agreed = self.agree(bool(done) or not self.is_main)
        if not agreed:
            raise SystemExit(UserError.exit_code)  # rank 0 says why
        return done

    def begin(self, folder: Path) -> None:
        if self.is_main:
            launch.note_begun(folder)
        self.restarts = self.broadcast(times_out_of_memory(folder))

    def newest_checkpoint(self, folder: RunFolder, before_step: int | None = None) -> Path | None:
        """The newest checkpoint that every rank sees as complete.

        Raises:
            UserError: Rank 0 sees checkpoints and another rank none: they do not share the run's folder.
        """
        complete = complete_checkpoints(folder.checkpoints, before_step=before_step)
        found = self.gather({step: path.name for step, path in complete.items()})
        common = set.intersection(*(set(names.items()) for names in found))
        blind = [rank for rank, names in enumerate(found) if not names]
        if found[0] and blind:
            raise UserError(
                f"rank 0 finds checkpoints there and rank {blind[0]} none", str(folder.checkpoints),
                "put run.dir on a file system that all nodes share",
            )  # fmt: skip
        return folder.checkpoints / max(common)[1] if common else None

    @contextmanager
    def restarting_on_out_of_memory(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise self._smaller(f"rank {self.rank}, step {step}") from error

    def _smaller(self, where: str) -> MegatrainError:
        """Note the next smaller plan for the restart, and return the error that ends this process."""
        if self._run.engine == "host":  # the plan is reduced, or refused, when the engine is made again
            note_out_of_memory(Path(self._run.run.dir), self.restarts + 1)
            return StartAgain(f"{where}: out of device memory; restarting with a smaller plan")
        smaller = mesh_plan(self._run, self.restarts).reduced(self._run.rows_per_step)
        if smaller is None:
            remedy = "more tensor, pipeline or shard ranks, or shorter rows (data.max_tokens)"
            return UserError("out of device memory, and no smaller plan is left", where, remedy)
        note_out_of_memory(Path(self._run.run.dir), self.restarts + 1)
        return StartAgain(f"{where}: out of device memory; restarting with {smaller.reduced_by}")

    def finish(self) -> None:
        self._watchdog.neighbours_may_end()
        self.barrier()


@contextmanager
def coordinated(run: RunConfig) -> Iterator[Coordinator]:
    """The coordinator of a run; of several ranks, or with `engine: mesh`, with their process group and watchdog.

    Raises:
        UserError: The run is not for several ranks, or the layout of `engine: mesh` cannot run; raised before any process group
            is made, on rank 0, or on another rank that alone finds it.
    """
    if run.engine == "host" and launch.world_size() == 1:
        yield Coordinator()
        return
    main = launch.rank() == 0
    raise_noted_error(main)
    try:
        with noting_repeating_errors():
            check_mesh(run) if run.engine == "mesh" else check_host_ranks(run)
        advice = advice_on_layout(run, measure=False) if main and run.engine == "mesh" else []
    except UserError as error:
        if main:
            launch.tell_end()
        elif launch.end_was_told():
            raise SystemExit(error.exit_code) from error
        raise
    device, limits = launch.device_of_rank(run.run.device), section_limits(run.watchdog)
    with (
        _joined(device, collective_timeout_s(limits)),
        noting_repeating_errors(),
        Watchdog(Path(run.run.dir), limits) as watchdog,
        watchdog.ending_after_errors(),
    ):
        coordinator = DistributedCoordinator(run, device, watchdog)
        coordinator.advice = advice
        yield coordinator


@contextmanager
def noting_repeating_errors() -> Iterator[None]:
    """Note an error that a restart would repeat; see [Note: errors that come again] in launch.py."""
    try:
        yield
    except COMES_AGAIN as error:
        if not isinstance(error, Aftermath):
            launch.note_end(error.exit_code, str(error))
        raise


def raise_noted_error(main: bool) -> None:
    """Raise the noted error that ended an attempt of this job, if any; ranks other than 0 exit silently."""
    if (end := launch.noted_end()) is None:
        return
    if main:
        launch.tell_end()
        if not (launch.one_command() and end[2] < launch.attempt()):  # else the user has read it already
            raise EndedBefore(*end)
    launch.end_was_told()
    raise SystemExit(end[0])


@contextmanager
def _joined(device: torch.device, timeout_s: float) -> Iterator[None]:
    """The process group; destroyed at an orderly end if it was made here. After an error it dies with the process."""
    made = not dist.is_initialized()
    launch.join(device, timeout_s)
    yield
    if made:
        dist.destroy_process_group()


def section_limits(watchdog: WatchdogConfig) -> dict[str, float | None]:
    """Limit of each kind of section [s]: the config's keys that end in `_s`."""
    return {name.removesuffix("_s"): limit for name, limit in watchdog.model_dump().items() if name.endswith("_s")}


def collective_timeout_s(limits: Mapping[str, float | None]) -> float:
    """Timeout of collectives: later than the watchdog, which leaves stacks behind."""
    known = [limit for limit in limits.values() if limit is not None]
    return max(known) + 60.0 if len(known) == len(limits) else 7 * 86400.0
