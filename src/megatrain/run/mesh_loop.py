"""A run by many processes: torchrun starts them, rank 0 reports.

[Note: what rank 0 does alone]
All ranks take the same steps with the same batches, so nothing but gradients travels. Rank 0 prepares the data first and
the others read its cache; it writes log, metrics, plot and checkpoints. The others run the same loop without output. Whatever
decides the loop's way must be equal everywhere: step numbers and skipped steps are; signals are agreed on after each step, and
the checkpoint to start from, or to go back to, before anything of it is read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from megatrain.checkpoint.reader import complete_checkpoints
from megatrain.config.schema import ChangeName, RunConfig, WatchdogConfig
from megatrain.engine.mesh import launch
from megatrain.engine.mesh.comm_overlap import kernels_of, shares
from megatrain.engine.mesh.engine import MeshEngine
from megatrain.engine.mesh.oom import is_out_of_memory, note_out_of_memory, times_out_of_memory
from megatrain.engine.mesh.rank_metrics import (
    Alerts,
    RankClock,
    gather,
    mean_over_ranks,
    numbers_of_all,
    numbers_of_rank,
)
from megatrain.engine.mesh.state import agree
from megatrain.engine.mesh.watchdog import EXIT_HANG, Watchdog
from megatrain.errors import Aftermath, MegatrainError, NumericStop, PlanRefused, UserError
from megatrain.machine.probe import matrix_tflops
from megatrain.metrics.logger import RunLogger
from megatrain.metrics.record import MetricsWriter, StepRecord
from megatrain.planner.model_cost import shape_of_structure
from megatrain.run.divergence import Divergence
from megatrain.run.folder import RunFolder
from megatrain.run.lock import RunLock
from megatrain.run.loop import Loop, NoOutput, Prefetcher, TrainSummary, engine_for, errors_into_log, open_folder
from megatrain.run.prepare import Prepared, check_mesh, prepare
from megatrain.run.signals import StopSignals
from megatrain.units import GIB


def train_on_mesh(
    run: RunConfig, *, resume: str | None, allow_changes: Collection[ChangeName] = (), engine: Any = None
) -> TrainSummary:
    """`train` for `engine: mesh`; called by every rank.

    Raises:
        UserError: The layout cannot run; before any process group is made. Ranks other than 0 end silently then.
    """
    main = launch.rank() == 0
    _end_as_before(main)
    try:
        with _noting_ends():
            check_mesh(run)
    except UserError as error:
        if main:
            raise
        raise SystemExit(error.exit_code) from error
    device = launch.device_of_rank(run.run.device)
    limits = section_limits(run.watchdog)
    with (
        _joined(device, _timeout_s(limits)),
        _noting_ends(),
        StopSignals() as signals,
        _logger(main) as log,
        _locked(Path(run.run.dir), main, device),
        Watchdog(Path(run.run.dir), limits) as watch,
    ):
        with contextlib.ExitStack() as start, watch.ending_after_errors():
            start.enter_context(watch.section("start"))
            folder = RunFolder(run.run.dir) if main else SilentFolder(run.run.dir)
            prepared = _prepare_in_turn(run, resume, allow_changes, log, device)
            if main:
                with errors_into_log(log, folder):
                    open_folder(folder, run, log)
                launch.note_begun(folder.path)
                if (number := launch.attempt()) > 0:
                    log.info(_words_of_attempt(number, prepared))
            stop = AgreedStop(signals, folder, device)
            stop.agree()
            reductions = [times_out_of_memory(folder.path)]
            dist.broadcast_object_list(reductions, src=0)
            with errors_into_log(log, folder), engine_for(prepared, engine, reductions=reductions[0]) as running:
                running.watch = watch.section
                kind = _MainLoop if main else _SilentLoop
                loop = kind(prepared, running, folder, log, stop)
                loop.reductions = reductions[0]
                start.close()
                summary = loop.run()
        watch.neighbours_may_end()
        dist.barrier()
        with errors_into_log(log, folder):
            loop.raise_write_failed()
        return summary


GATHER_EVERY_STEP_RANKS, GATHER_EVERY = 64, 16
"""More ranks than that tell each other their numbers at every sixteenth step only."""


def _words_of_attempt(number: int, prepared: Prepared) -> str:
    since = (
        f"after step {prepared.past.step}"
        if prepared.start_from is not None
        else "from the beginning: nothing was saved"
    )
    return (
        f"attempt {number + 1} of this job: a process of the one before has failed or was killed, torchrun starts all again; "
        f"going on {since}"
    )


RESTART_WAIT_S = 30.0
"""How long the run's lock may still be held by an attempt that torchrun has ended [s]."""


class StartAgain(MegatrainError):
    """The process must end; torchrun starts it again, and then it goes better."""

    exit_code = EXIT_HANG


class EndedBefore(MegatrainError):
    """An earlier attempt of this job has ended with an error that comes again."""

    def __init__(self, code: int, text: str):
        self.exit_code = code
        super().__init__(f"{text}\n  (of an earlier attempt; torchrun starts again what would only end so again)")


class SilentFolder(RunFolder):
    """The run's folder as a rank sees it that reports nothing: paths, and no changes."""

    def taken(self, signal: str) -> bool:
        return False

    def set_aside(self, after_step: int) -> None:
        pass

    def mark_latest(self, path: Path) -> None:
        pass

    def remove_old_checkpoints(self, keep: int | None, keep_every: int | None = None) -> None:
        pass


class AgreedStop:
    """What is asked of the run, known to all ranks at the same step: as of the latest `agree`.

    Attributes:
        requested: By what the run is asked to end.
        save: Whether a checkpoint is asked for.
    """

    def __init__(self, signals: StopSignals, folder: RunFolder, device: torch.device):
        self._signals, self._folder, self._device = signals, folder, device
        self.requested: str | None = None
        self.save = False

    def __bool__(self) -> bool:
        return self.requested is not None

    def request(self, name: str) -> None:
        self._signals.request(name)

    def agree(self) -> None:
        """Signals of any rank, files that rank 0 finds. Collective."""
        if self._folder.taken("stop"):
            self.request(f"the file {self._folder.path / 'stop'}")
        words = torch.tensor([int(bool(self._signals)), int(self._folder.taken("save"))], device=self._device)
        dist.all_reduce(words, op=dist.ReduceOp.MAX)
        stop, save = words.tolist()
        self.save = bool(save)
        if stop:
            self.requested = self._signals.requested or "a signal to another process"


class _MainLoop(Loop):
    stop: AgreedStop
    engine: MeshEngine
    reductions: int

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        engine, watchdog = self.engine, self.run_config.watchdog
        self._peak_tflops = matrix_tflops(engine.device) if engine.device.type == "cuda" else None
        self._flops = shape_of_structure(engine.structure, "").forward_flops(self.run_config.data.max_tokens)
        self._sample_every = watchdog.sample_every_steps if engine.device.type == "cuda" else None
        counts = [len(part.layers) for part in engine.parts]
        self._alerts = Alerts(watchdog.mfu_floor, counts, stragglers=engine.device.type == "cuda")
        self._taken = 0
        """Steps of this process."""

    def _train_one(self, batches: Prefetcher, step: int) -> StepRecord:
        """The step, and behind it what all ranks say of it. See monitor.py."""
        try:
            return self._train_and_look(batches, step)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise self._out_of_memory(step) from error

    def _out_of_memory(self, step: int) -> MegatrainError:
        """See [Note: out of memory]."""
        reduced = self.engine.plan.reduced(self.run_config.rows_per_step)
        where = f"rank {dist.get_rank()}, step {step}"
        if reduced is None:
            remedy = "more tensor, pipeline or shard ranks, or shorter rows (data.max_tokens)"
            return UserError("out of device memory, and nothing denser is left", where, remedy)
        note_out_of_memory(self.folder.path, self.reductions + 1)
        return StartAgain(f"{where}: out of device memory; started again, the run goes on with {reduced.reduced_by}")

    def _train_and_look(self, batches: Prefetcher, step: int) -> StepRecord:
        engine, clock, sampled = self.engine, RankClock(self.engine.device), None
        self._taken += 1
        # The tenth step: the first ones choose kernels and make communicators.
        sample = self._sample_every is not None and self._taken % self._sample_every == min(10, self._sample_every - 1)
        clock.start()
        if sample:
            with kernels_of(engine.device) as kernels:
                record = super()._train_one(batches, step)
            sampled = shares(kernels)
        else:
            record = super()._train_one(batches, step)
        crowd = engine.layout.world > GATHER_EVERY_STEP_RANKS
        if record.trained_tokens == 0 or (crowd and not sample and self._taken % GATHER_EVERY):
            return record
        with engine.watch("step", "numbers of all ranks"):
            ranks = gather(numbers_of_rank(engine.runner, engine.device, clock.work_s(), sampled))
        mfu = None
        if self._peak_tflops is not None and not sample:  # profiling takes time
            peak = self._peak_tflops * 1e12 * engine.layout.world
            mfu = 3 * self._flops * record.processed_tokens / record.step_s / peak
        numbers = numbers_of_all(ranks, engine.layout, engine.runner.table(), mfu)
        for text in self._alerts.look(step, numbers, mean_over_ranks(ranks)):
            self.log.warning(text)
        return replace(record, mesh=numbers.plain())

    def _checkpoint_before(self, step: int) -> Path | None:
        return agreed_checkpoint(self.folder, before_step=step)

    def _after_step(self) -> None:
        self.stop.agree()

    def _asked_to_stop(self) -> bool:
        return bool(self.stop)

    def _asked_to_save(self) -> bool:
        return self.stop.save

    def _save_for_an_alert(self) -> None:
        """As by hand: all ranks find the file's word after the next step."""
        (self.folder.path / "save").touch()

    def _host_memory_is_low(self, left: int) -> None:
        self.stop.request(f"memory.host_reserve_gib: {left / GIB:.2f} GiB of host memory are left")


class _SilentLoop(_MainLoop):
    """The same steps on a rank that reports nothing."""

    def _write_config(self) -> None:
        pass

    def _one_history(self) -> Divergence | None:
        self.history = []
        return self._steps(NoOutput(), NoOutput())

    def _record(self, metrics: MetricsWriter | NoOutput, record: StepRecord) -> None:
        self.history.append(record)


COMES_AGAIN = (UserError, PlanRefused, NumericStop)
"""Errors that another attempt would only repeat, but for `Aftermath`: the rank whose error it was says what comes again. Low host
memory is none: a new process begins with less."""


@contextlib.contextmanager
def _noting_ends() -> Iterator[None]:
    """See [Note: errors that come again] in launch.py."""
    try:
        yield
    except COMES_AGAIN as error:
        if not isinstance(error, Aftermath):
            launch.note_end(error.exit_code, str(error))
        raise


def _end_as_before(main: bool) -> None:
    if (end := launch.noted_end()) is None:
        return
    if main:
        raise EndedBefore(*end)
    raise SystemExit(end[0])


@contextlib.contextmanager
def _joined(device: torch.device, timeout_s: float) -> Iterator[None]:
    """The process group, taken down again if this made it; after an error it is left to die with the process."""
    made = not dist.is_initialized()
    launch.join(device, timeout_s)
    yield
    if made:
        dist.destroy_process_group()


@contextlib.contextmanager
def _locked(folder: Path, main: bool, device: torch.device) -> Iterator[None]:
    """The run's folder, locked by rank 0. Collective: where it is refused, all ranks end."""
    # after a restart, another host's rank 0 of the attempt before may still be on its way out
    wait_s = RESTART_WAIT_S if launch.attempt() else 0.0
    with contextlib.ExitStack() as stack:
        taken = False
        try:
            if main:
                stack.enter_context(RunLock(folder, wait_s))
            taken = True
        finally:
            agreed = agree(taken, device)
        if not agreed:
            raise SystemExit(UserError.exit_code)  # rank 0 says why
        yield


def section_limits(watchdog: WatchdogConfig) -> dict[str, float | None]:
    """Kind of section -> seconds: the config's keys that end with their unit."""
    return {name.removesuffix("_s"): limit for name, limit in watchdog.model_dump().items() if name.endswith("_s")}


def _timeout_s(limits: Mapping[str, float | None]) -> float:
    """Of collectives: the watchdog, which leaves stacks behind, comes first."""
    known = [limit for limit in limits.values() if limit is not None]
    return max(known) + 60.0 if len(known) == len(limits) else 7 * 86400.0


def _logger(main: bool) -> RunLogger:
    return RunLogger() if main else RunLogger(Console(quiet=True))


def agreed_checkpoint(folder: RunFolder, before_step: int | None = None) -> Path | None:
    """The newest checkpoint of a run that is complete in the eyes of every rank. Collective.

    Raises:
        UserError: Rank 0 sees checkpoints and another rank none: the ranks do not share the run's folder.
    """
    mine = {step: path.name for step, path in complete_checkpoints(folder.checkpoints, before_step=before_step).items()}
    everybody: list[dict[int, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    common = set.intersection(*(set(each.items()) for each in everybody))
    blind = [rank for rank, each in enumerate(everybody) if not each]
    if everybody[0] and blind:
        raise UserError(
            f"rank 0 finds checkpoints there and rank {blind[0]} none", str(folder.checkpoints),
            "put run.dir on a file system that all nodes share",
        )  # fmt: skip
    return folder.checkpoints / max(common)[1] if common else None


def _agreed_resume(run: RunConfig, resume: str | None) -> str | None:
    """`resume` with a checkpoint's path in the place of a word, the same on every rank. Collective.

    When torchrun starts again what it has started before, the run goes on in any case.
    """
    again = [launch.has_begun(Path(run.run.dir))]
    dist.broadcast_object_list(again, src=0)
    if again[0]:
        resume = "auto"
    if resume not in ("auto", "latest"):
        return resume
    newest = agreed_checkpoint(RunFolder(run.run.dir))
    return resume if newest is None else str(newest)


def _prepare_in_turn(
    run: RunConfig, resume: str | None, allow_changes: Collection[ChangeName], log: RunLogger, device: torch.device
) -> Prepared:
    """Rank 0 first, so that the others find its cache; nobody goes on before everybody is done."""
    resume = _agreed_resume(run, resume)

    def work() -> Prepared:
        return prepare(run, resume=resume, allow_changes=allow_changes, log=log.info)

    found: Prepared | None = None
    if launch.rank() == 0:
        try:
            found = work()
        finally:
            agree(found is not None, device)
    elif not agree(True, device):
        raise SystemExit(UserError.exit_code)  # rank 0 says why
    else:
        found = work()
    assert found is not None
    dist.barrier()
    return found
