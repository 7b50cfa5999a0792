"""A run by many processes: torchrun starts them, rank 0 reports.

[Note: what rank 0 does alone]
All ranks take the same steps with the same batches, so nothing but gradients travels. Rank 0 prepares the data first and
the others read its cache; it writes log, metrics, plot and checkpoints. The others run the same loop without output. Whatever
decides the loop's way must be equal everywhere: step numbers and skipped steps are; signals are agreed on after each step.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from megatrain.check import Prepared, check_mesh, prepare
from megatrain.config.schema import RunConfig
from megatrain.errors import UserError
from megatrain.mesh import launch
from megatrain.mesh.state import agree
from megatrain.metrics.logger import RunLogger
from megatrain.run_folder import RunFolder
from megatrain.stop import StopSignals
from megatrain.train import Loop, NoOutput, TrainSummary, engine_for, errors_into_log


def train_on_mesh(run: RunConfig, *, resume: str | None, engine: Any = None) -> TrainSummary:
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
        folder = RunFolder(run.run.dir)
        prepared = _prepare_in_turn(run, resume, log, device)
        if main:
            folder.create()
            log.open_folder(folder.path)
        stop = AgreedStop(signals, device)
        with errors_into_log(log), engine_for(prepared, engine) as running:
            kind = _MainLoop if main else _SilentLoop
            return kind(prepared, running, folder, log, stop).run()


class AgreedStop:
    """A stop that all ranks know of at the same step: any rank's signal, as of the latest `agree`."""

    def __init__(self, signals: StopSignals, device: torch.device):
        self._signals, self._device = signals, device
        self.requested: str | None = None

    def __bool__(self) -> bool:
        return self.requested is not None

    def agree(self) -> None:
        """Collective."""
        word = torch.tensor([int(bool(self._signals))], device=self._device)
        dist.all_reduce(word, op=dist.ReduceOp.MAX)
        if word.item():
            self.requested = self._signals.requested or "a signal to another process"


class _MainLoop(Loop):
    stop: AgreedStop

    def _after_step(self) -> None:
        self.stop.agree()


class _SilentLoop(_MainLoop):
    """The same steps on a rank that reports nothing."""

    def run(self) -> TrainSummary:
        self.history = []
        self.started_s = time.perf_counter()
        self._steps(NoOutput(), NoOutput())
        if self.run_config.checkpoint.at_end or self.stop:
            self._save()
        return self._summary()

    def _after_save(self, target: Path) -> None:
        """Rank 0 marks and removes."""


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


def _prepare_in_turn(run: RunConfig, resume: str | None, log: RunLogger, device: torch.device) -> Prepared:
    """Rank 0 first, so that the others find its cache; nobody goes on before everybody is done."""
    prepared: Prepared | None = None
    if launch.rank() == 0:
        try:
            prepared = prepare(run, resume=resume, log=log.info)
        finally:
            agree(prepared is not None, device)
    elif not agree(True, device):
        raise SystemExit(UserError.exit_code)  # rank 0 says why
    else:
        prepared = prepare(run, resume=resume, log=log.info)
    assert prepared is not None
    dist.barrier()
    return prepared
