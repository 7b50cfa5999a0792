"""A run by many processes: torchrun starts them, rank 0 reports.

[Note: what rank 0 does alone]
All ranks take the same steps with the same batches, so nothing but gradients travels. Rank 0 prepares the data first and
the others read its cache; it writes log, metrics, plot and checkpoints. The others run the same loop without output. Whatever
decides the loop's way must be equal everywhere: step numbers and skipped steps are; signals are agreed on after each step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from megatrain.check import Prepared, check_mesh, prepare
from megatrain.config.load import dump_config
from megatrain.config.schema import ChangeName, RunConfig
from megatrain.divergence import Divergence
from megatrain.errors import UserError
from megatrain.mesh import launch
from megatrain.mesh.state import agree
from megatrain.metrics.logger import RunLogger
from megatrain.metrics.record import MetricsWriter, StepRecord
from megatrain.run_folder import RunFolder
from megatrain.stop import StopSignals
from megatrain.train import Loop, NoOutput, TrainSummary, engine_for, errors_into_log, replace_text


def train_on_mesh(
    run: RunConfig, *, resume: str | None, allow_changes: Collection[ChangeName] = (), engine: Any = None
) -> TrainSummary:
    """`train` for `engine: mesh`; called by every rank.

    Raises:
        UserError: The layout cannot run; before any process group is made. Ranks other than 0 end silently then.
    """
    main = launch.rank() == 0
    try:
        check_mesh(run)
    except UserError as error:
        if main:
            raise
        raise SystemExit(error.exit_code) from error
    device = launch.device_of_rank(run.run.device)
    with _joined(device), StopSignals() as signals, _logger(main) as log:
        folder = RunFolder(run.run.dir) if main else SilentFolder(run.run.dir)
        prepared = _prepare_in_turn(run, resume, allow_changes, log, device)
        folder.create()
        if main:
            if not folder.config.exists():  # see `train`
                replace_text(folder.config, dump_config(run))
            log.open_folder(folder.path)
        for signal in ("save", "stop"):
            if folder.taken(signal):
                log.info(f"the file {signal} in {folder.path} is from before the start; removed")
        stop = AgreedStop(signals, folder, device)
        stop.agree()
        with errors_into_log(log), engine_for(prepared, engine) as running:
            kind = _MainLoop if main else _SilentLoop
            return kind(prepared, running, folder, log, stop).run()


class SilentFolder(RunFolder):
    """The run's folder as a rank sees it that reports nothing: paths, and no changes."""

    def create(self) -> None:
        pass

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
        self.stop.request(f"memory.host_reserve_gib: {left / 2**30:.2f} GiB of host memory are left")


class _SilentLoop(_MainLoop):
    """The same steps on a rank that reports nothing."""

    def _write_config(self) -> None:
        pass

    def _one_history(self) -> Divergence | None:
        self.history = []
        return self._steps(NoOutput(), NoOutput())

    def _record(self, metrics: MetricsWriter | NoOutput, record: StepRecord) -> None:
        self.history.append(record)


@contextlib.contextmanager
def _joined(device: torch.device) -> Iterator[None]:
    """The process group, taken down again if this made it; after an error it is left to die with the process."""
    made = not dist.is_initialized()
    launch.join(device)
    yield
    if made:
        dist.destroy_process_group()


def _logger(main: bool) -> RunLogger:
    return RunLogger() if main else RunLogger(Console(quiet=True))


def _prepare_in_turn(
    run: RunConfig, resume: str | None, allow_changes: Collection[ChangeName], log: RunLogger, device: torch.device
) -> Prepared:
    """Rank 0 first, so that the others find its cache; nobody goes on before everybody is done."""

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
