"""`train`: a run from its config to its last checkpoint.

    prepare (check.py)  -->  run folder  -->  engine  -->  loop: batch, step, record, [evaluate], [checkpoint (saves.py)]

[Note: what a step number means]
Step n is the n-th optimizer step of the run, 1 the first. Its batch is `loader.batch(n - 1 + offset)` and its learning rate
`schedule(n - 1)`, both pure functions of the number: a run that is resumed after step n goes on exactly where it was.
A step that is skipped (not finite, or without target tokens) still has its number. The offset is 0 until the run goes back
before a divergence (`run.on_divergence: rollback`): then the steps get their old numbers again, but batches behind those that
went wrong. It is kept in every checkpoint.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import psutil

from megatrain.checkpoint.reader import latest_complete
from megatrain.config.load import dump_config
from megatrain.config.schema import ChangeName, RunConfig
from megatrain.engine.plan import named_device
from megatrain.errors import HostMemoryLow, MegatrainError, NumericStop, UserError, WriteFailed, writing
from megatrain.metrics.logger import RunLogger, quiet_libraries
from megatrain.metrics.mfu import utilisation_of
from megatrain.metrics.plot import LossPlot
from megatrain.metrics.record import MetricsWriter, StepRecord
from megatrain.metrics.trackers import Trackers
from megatrain.run.divergence import Divergence, DivergenceGuard
from megatrain.run.evaluate import EvalSummary, evaluate
from megatrain.run.folder import RunFolder
from megatrain.run.health import RunWatch
from megatrain.run.lock import RunLock
from megatrain.run.prepare import Prepared, make_engine, prepare
from megatrain.run.resume import PastRates
from megatrain.run.saves import RunSaves
from megatrain.run.signals import StopSignals, is_signal
from megatrain.run.watermark import HostWatermark
from megatrain.units import GIB, counted

if TYPE_CHECKING:
    import torch


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainSummary:
    """What a run came to.

    Attributes:
        folder: The run's folder.
        step: The last step.
        total_steps: What the schedule asked for.
        first_loss, last_loss: Training loss of the run's first and last step that had one.
        val_loss: The newest validation loss.
        val_step: The step after which it was measured.
        checkpoint: The newest checkpoint.
        stopped_by: The signal, or file, that ended the run early; None if it went to its end.
        first_val_loss: The first validation loss, if there was more than one; with `eval.at_start` that of the model given.
    """

    folder: Path
    step: int
    total_steps: int
    first_loss: float | None
    last_loss: float | None
    val_loss: float | None
    val_step: int | None
    checkpoint: Path | None
    stopped_by: str | None
    first_val_loss: float | None = None


def train(
    run: RunConfig, *, resume: str | None = None, allow_changes: Collection[ChangeName] = (), engine: Any = None
) -> TrainSummary:
    """Train as the config says.

    Args:
        run: The config; see `load_config`.
        resume: None starts anew, in an empty or missing folder. "auto", "latest" or a checkpoint's path go on.
        allow_changes: What may differ from the checkpoint's run, beside `run.allow_changes`.
        engine: Use this engine instead of making one from `run`; it is not closed.

    Raises:
        UserError: Something given is wrong; all problems at once, before anything is loaded or written. Or another process
            trains in this folder.
        PlanRefused: The run does not fit the machine.
        NumericStop: The run has diverged, and may not go back (any more).
        HostMemoryLow: The host's memory came to its end; the state was saved.
        WriteFailed: The disk refuses a file of the run; the state was saved, unless the error says otherwise.
        KeyboardInterrupt: A second SIGINT or SIGTERM.
    """
    quiet_libraries()
    if run.engine == "mesh":
        from megatrain.run.mesh_loop import train_on_mesh

        return train_on_mesh(run, resume=resume, allow_changes=allow_changes, engine=engine)
    folder = RunFolder(run.run.dir)
    with StopSignals() as stop, RunLogger() as log, RunLock(folder.path):
        prepared = prepare(run, resume=resume, allow_changes=allow_changes, log=log.info)
        if stop:
            log.info(f"stopped by {stop.requested} before the first step")
            total, step = prepared.total_steps, prepared.past.step
            return TrainSummary(folder.path, step, total, None, None, None, None, prepared.start_from, stop.requested)
        with errors_into_log(log, folder):
            open_folder(folder, run, log)
        if engine is None:  # minutes, for a large model
            made = "making random" if run.model.init == "random" else "reading the"
            log.info(f"{made} weights" if prepared.start_from is None else "making room for weights and moments")
        with errors_into_log(log, folder), engine_for(prepared, engine) as running:
            loop = Loop(prepared, running, folder, log, stop)
            summary = loop.run()
            loop.raise_write_failed()
            return summary


def open_folder(folder: RunFolder, run: RunConfig, log: RunLogger) -> None:
    """Make the run's folder, or take it over from a process that has ended; from now on `log` writes into it."""
    folder.create()
    if not folder.config.exists():  # what marks the folder as a run's comes first: making the engine may take long
        replace_text(folder.config, dump_config(run))
    log.open_folder(folder.path)
    folder.tidy()
    for signal in ("save", "stop"):
        if folder.taken(signal):
            log.info(f"the file {signal} in {folder.path} is from before the start; removed")


@contextmanager
def errors_into_log(log: RunLogger, folder: RunFolder) -> Iterator[None]:
    """What ends a run is in its log too, with the traceback if nobody expected it."""
    try:
        yield
    except WriteFailed as failed:
        error = WriteFailed(failed.what, failed.where, f"{failed.remedy}, then go on{_from_newest(folder)}")
        log.to_file(f"error: {error}")
        raise error from None
    except KeyboardInterrupt:
        newest = latest_complete(folder.checkpoints)
        text = (
            f"interrupted; go on from {newest.name} with --resume auto"
            if newest is not None
            else "interrupted; nothing was saved yet: --resume auto begins anew"
        )
        log.to_file(text)
        raise KeyboardInterrupt(text) from None
    except MegatrainError as error:
        log.to_file(f"error: {error}")
        raise
    except BaseException as error:
        log.to_file(f"error: {type(error).__name__}: {error}", error)
        raise


def _from_newest(folder: RunFolder) -> str:
    newest = latest_complete(folder.checkpoints)
    return f" from {newest} with --resume auto" if newest is not None else " with --resume auto: nothing was saved yet"


@contextmanager
def engine_for(prepared: Prepared, given: Any, **more: Any) -> Iterator[Any]:
    """The given engine, or one that is made (`make_engine`, with `more`) and closed."""
    if given is not None:
        yield given
        return
    engine = make_engine(prepared.run, prepared.model_folder, weights=prepared.start_from is None, **more)
    try:
        yield engine
    except KeyboardInterrupt:
        engine.cancel_save()  # somebody insists: what is half written is not worth the wait
        raise
    finally:
        engine.close()


class Stop(Protocol):
    """Whether the run is asked to end, and by what."""

    requested: str | None

    def __bool__(self) -> bool: ...

    def request(self, name: str) -> None: ...


class Loop:
    """The steps of one process of a run."""

    def __init__(
        self,
        prepared: Prepared,
        engine: Any,
        folder: RunFolder,
        log: RunLogger,
        stop: Stop,
    ):
        self.run_config, self.engine, self.folder = prepared.run, engine, folder
        self.log, self.stop = log, stop
        self.loader, self.val = prepared.loader, prepared.val
        self.total_steps, self.learning_rate_at = prepared.total_steps, prepared.learning_rate_at
        past = self.past = prepared.past
        self.step, self.data_offset, self.rollbacks = past.step, past.data_offset, past.rollbacks
        self.utilisation = utilisation_of(self.run_config, prepared.model_folder)
        self.rates = PastRates(self.learning_rate_at, self.step)
        run = self.run_config.run
        self.guard = DivergenceGuard(run.max_bad_steps, run.loss_spike)
        self.saves = RunSaves(
            engine,
            folder,
            self.run_config.checkpoint,
            self._extra,
            self.step,
            prepared.start_from,
            prepared.checkpoint_bytes,
            log.state,
        )
        self.memory_low: HostMemoryLow | None = None
        self.write_failed: WriteFailed | None = None
        self.unread = prepared.start_from
        """The checkpoint that the engine may still be reading: until a step or an evaluation has needed all of it."""
        self.on_gpu = named_device(self.run_config.run.device).type == "cuda"
        self.taken_any = False
        """Whether this process has taken a step."""
        self.process = psutil.Process()
        self.watch = RunWatch(self.run_config, self.process)
        self.started_s = time.perf_counter()
        if prepared.start_from is not None:
            self.log.info(f"going on after step {self.step}: reading {prepared.start_from}")
            with self._explaining_damage():
                self.engine.load(prepared.start_from, wait=False)

    def run(self) -> TrainSummary:
        config = self.run_config
        self._write_config()
        try:
            while (diverged := self._one_history()) is not None:
                self._go_back(diverged)
        except HostMemoryLow:
            self.log.warning(f"host memory is at its end: saving step {self.step} before the run ends")
            self.saves.finish(self.step)
            raise self.watch.host_memory_low(self.engine.memory()) from None
        if not self.stop:
            self._refuse_if_nothing_was_trained()
        if config.checkpoint.at_end or self.stop:
            self._save_at_end()
        self.saves.settle()
        summary = self._summary()
        if self.stop:
            self.log.info(f"stopped by {self.stop.requested} after step {self.step} of {self.total_steps}")
        else:
            self.log.info(_last_words(summary, self.folder))
        return summary

    def _save_at_end(self) -> None:
        try:
            self.saves.finish(self.step, "; a second signal gives it up" if is_signal(self.stop.requested) else "")
        except UserError as error:
            if (failed := self.write_failed) is None:
                raise
            what = f"{failed.what}; nor could step {self.step} be saved: {error.where}: {error.what}"
            raise WriteFailed(what, failed.where, failed.remedy) from None

    def raise_write_failed(self) -> None:
        """After `run`: the error that ended it, if it was the disk's.

        Raises:
            WriteFailed: Names the file.
        """
        if self.write_failed is not None:
            raise self.write_failed

    def _refuse_if_nothing_was_trained(self) -> None:
        """A run may be shorter than `max_bad_steps`: what it would save then are the weights that it began with.

        Raises:
            NumericStop: Every step of the run was skipped.
        """
        steps = [record for record in self.history if record.step > 0]
        if steps and all(record.skipped for record in steps):
            raise NumericStop(
                f"nothing was trained: {'the only step was' if len(steps) == 1 else f'all {len(steps)} steps were'} skipped, "
                f"the last because of: {steps[-1].skipped}\n"
                "  -> look at the data (`megatrain data`), lower optim.learning_rate, or compute in another format "
                "(precision.compute_dtype; fp16 needs some steps to find its loss scale)"
            )

    def _write_config(self) -> None:
        replace_text(self.folder.config, dump_config(self.run_config))

    def _one_history(self) -> Divergence | None:
        """Steps from `self.step` to the end, a stop, or a divergence."""
        self.folder.set_aside(after_step=self.step)
        plot = LossPlot(self.folder.plot, title=self.folder.path.name)
        with MetricsWriter(self.folder.metrics, self.step) as metrics, self._open_trackers() as self.trackers:
            if metrics.dropped:
                self.log.info(
                    f"metrics.jsonl: {counted(metrics.dropped, 'record')} after step {self.step} removed; they come again"
                )
            self.history = metrics.history
            try:
                return self._steps(metrics, plot)
            finally:
                if self.history:
                    plot.draw(self.history)

    def _steps(self, metrics: MetricsWriter | NoOutput, plot: LossPlot | NoOutput) -> Divergence | None:
        config = self.run_config
        self.log.begin(self.step, self.total_steps)
        if self.step == 0 and config.eval.at_start and not self.stop:
            self._record(metrics, self._with_validation(self._before_first_step()))
        if self.step >= self.total_steps:
            self.log.info(
                f"nothing is left to do: {counted(self.step, 'step')} of {self.total_steps:,} taken; to go on, raise "
                "schedule.steps or schedule.epochs (with --allow-changes schedule where that changes "
                "learning rates of steps already taken)"
            )
        first, end = self.step + self.data_offset, self.total_steps + self.data_offset
        reserve = HostWatermark(int(config.memory.host_reserve_gib * GIB), self._host_memory_is_low)
        with Prefetcher(self.loader, first, end) as batches, reserve:
            while self.step < self.total_steps and not self._asked_to_stop():
                record = self._train_one(batches, self.step + 1)
                self.step += 1
                self._after_step()
                self.log.step(record, self.total_steps)
                last = self.step == self.total_steps
                if _due(config.eval.every_steps, self.step) or (last and config.eval.at_end):
                    record = self._with_validation(record)
                self._record(metrics, record)
                plot.update(self.history)
                self.saves.report()
                self.saves.prepare(self.step, record.step_s)
                diverged = self.guard.look(record) or self._act_on_alerts(record)
                if diverged is not None:
                    return diverged
                if self.memory_low is not None:
                    raise self.memory_low
                if _due(config.checkpoint.weights_every_steps, self.step):
                    self.saves.save_weights(
                        self.step
                    )  # first: it is the smaller one, and the second waits for the first
                if _due(config.checkpoint.every_steps, self.step) or self._asked_to_save():
                    self.saves.save(self.step)
        return None

    def _after_step(self) -> None:
        """For a loop of many processes: the place to agree on things."""

    def _asked_to_save(self) -> bool:
        return self.folder.taken("save")

    def _asked_to_stop(self) -> bool:
        if self.folder.taken("stop"):
            self.stop.request(f"the file {self.folder.path / 'stop'}")
        return bool(self.stop)

    def _train_one(self, batches: Prefetcher, step: int) -> StepRecord:
        """One optimizer step; see [Note: what a step number means]."""
        start = time.perf_counter()
        batch, row_numbers = batches.next()
        data_wait_s = time.perf_counter() - start
        learning_rate = self.learning_rate_at(step - 1)
        with self._explaining_damage(), self._first_step():
            result = self.engine.train_step(batch, learning_rate=learning_rate)
        step_s = time.perf_counter() - start

        self._say_resumed(step - 1)
        skipped, rows = result.skipped, self.loader.rows
        # padding is computed too, but it would make a speed out of nothing
        documents = rows.document_lengths(row_numbers)
        processed = int(documents.sum())
        if result.tokens == 0:
            places = ", ".join(place for row in row_numbers for place in rows.places(row))
            self.log.warning(f"step {step}: no target token in its samples, nothing was changed: {places}")
        before = self.history[-1].skipped_steps if self.history else 0
        return StepRecord(
            step=step,
            epoch=(step + self.data_offset) / self.loader.steps_per_epoch,
            loss=_finite(result.loss),
            grad_norm=_finite(result.grad_norm),
            learning_rate=learning_rate,
            rows=len(row_numbers),
            processed_tokens=processed,
            trained_tokens=result.tokens,
            step_s=step_s,
            data_wait_s=data_wait_s,
            split_s={name: seconds for name, seconds in result.seconds.items() if name != "step"},
            processed_tokens_per_s=processed / step_s,
            trained_tokens_per_s=result.tokens / step_s,
            mfu=self.utilisation.mfu(documents, result.tokens, step_s) if self.utilisation is not None else None,
            skipped=skipped,
            skipped_steps=before + bool(skipped),
            pipeline=self.watch.figures(result.pipeline, data_wait_s),
            **self._now(),
        )

    @contextmanager
    def _explaining_damage(self) -> Iterator[None]:
        """Where a damaged part of the checkpoint that the run starts from is found: say the way that works."""
        try:
            yield
        except UserError as error:
            other = (
                latest_complete(self.folder.checkpoints, except_for=self.unread) if self.unread is not None else None
            )
            if other is None or "damaged" not in str(error):
                raise
            while isinstance(error.__cause__, UserError):  # what a reader found, below what others made of it
                error = error.__cause__
            raise UserError(error.what, error.where, f"the newest other one is the way on: --resume {other}") from error

    @contextmanager
    def _first_step(self) -> Iterator[None]:
        """The first step of a process takes longer than the others, on a GPU by minutes."""
        if self.taken_any:
            yield
            return
        compiles = self.run_config.activations.compile == "auto" and self.on_gpu
        with self.log.state("first step: compiling" if compiles else "first step"):
            yield
        self.taken_any = True

    def _say_resumed(self, after_step: int) -> None:
        if self.unread is not None:
            self.log.info(f"resumed from {self.unread} after step {after_step}")
            self.unread = None

    def _act_on_alerts(self, record: StepRecord) -> Divergence | None:
        """Say what the rules have found, and do what the config wants done then."""
        for alert, action in self.watch.alerts(record):
            self.log.warning(f"step {self.step}: alert {alert.rule}: {alert.text}")
            if action == "rollback":
                what = f"alert {alert.rule} (alerts.{alert.rule}_action: rollback)"
                return Divergence(self.step, self.step, what, go_back=True)
            if action == "save":
                self._save_for_an_alert()
            if action == "stop":
                self.stop.request(f"the alert {alert.rule}")
        return None

    def _save_for_an_alert(self) -> None:
        self.saves.save(self.step)

    def _host_memory_is_low(self, left: int) -> None:
        """In the watermark's thread: the step in progress is dropped, or finished where it cannot be; see `run`."""
        self.watch.host_bytes_left = left
        error = HostMemoryLow()
        if not getattr(self.engine, "interrupt", lambda _: False)(error):
            self.memory_low = error

    def _before_first_step(self) -> StepRecord:
        return StepRecord(
            step=0,
            epoch=0.0,
            loss=None,
            grad_norm=None,
            learning_rate=0.0,
            rows=0,
            processed_tokens=0,
            trained_tokens=0,
            step_s=0.0,
            data_wait_s=0.0,
            processed_tokens_per_s=0.0,
            trained_tokens_per_s=0.0,
            **self._now(),
        )

    def _now(self) -> dict[str, Any]:
        memory = self.engine.memory()
        return {
            "elapsed_s": time.perf_counter() - self.started_s,
            "unix_time_s": time.time(),
            "host_rss_bytes": self.process.memory_info().rss,
            "device_peak_bytes": memory.get("device_peak") or None,
        }

    def _with_validation(self, record: StepRecord) -> StepRecord:
        if self.val is None:
            return record
        try:
            with self._explaining_damage(), self.log.state("validating", f"step {record.step}: validating"):
                found: EvalSummary | None = evaluate(
                    self.engine, self.val, rows_per_batch=self.run_config.rows_per_step, stop=self._asked_to_stop
                )
        except HostMemoryLow as error:
            self.memory_low = error  # the step itself has been taken, and is recorded first
            return record
        if found is None:
            self.log.info(f"step {record.step}: evaluation left unfinished because of {self.stop.requested}")
            return record
        record = replace(record, val_loss=found.loss, val_tokens=found.tokens, val_s=found.seconds)
        self.log.validation(record)
        return record

    def _record(self, metrics: MetricsWriter | NoOutput, record: StepRecord) -> None:
        self.history.append(record)
        try:
            metrics.write(record)
        except WriteFailed as error:  # the step itself has been taken: it is saved before the run ends
            self.write_failed = self.write_failed or error
            self.stop.request(f"the disk, which refuses {error.where},")
        self.trackers.write(record)

    def _open_trackers(self) -> Trackers:
        section = self.run_config.metrics
        config = self.run_config.model_dump(mode="json")
        return Trackers(section.trackers, self.folder.path, section.project, config, self.log.warning)

    def _go_back(self, diverged: Divergence) -> None:
        """Load the newest checkpoint from before a divergence, and leave out the data up to it.

        Raises:
            NumericStop: The run is to stop instead, or may not go back any more, or has nothing to go back to.
        """
        run = self.run_config.run
        self.saves.settle()
        target = self._checkpoint_before(diverged.first_step)
        may = run.on_divergence == "rollback" or diverged.go_back
        if not may or self.rollbacks >= run.max_rollbacks or target is None:
            raise NumericStop(_why_it_stops(diverged, target, self.rollbacks, self.run_config))
        extra = self.engine.load(target, wait=False)
        back_to = int(extra["step"])
        self.rollbacks += 1
        self.data_offset += diverged.step - back_to
        self.log.warning(
            f"{diverged.what}: back to {target} (rollback {self.rollbacks} of {run.max_rollbacks}); steps {back_to + 1} to "
            f"{diverged.step} come again, with the data behind those that they had"
        )
        self.step = back_to
        self.guard.start_over()
        self.saves.went_back(back_to, target)

    def _checkpoint_before(self, step: int) -> Path | None:
        return latest_complete(self.folder.checkpoints, before_step=step)

    def _extra(self) -> dict[str, Any]:
        """See [Note: what a checkpoint remembers of its run]."""
        self.rates.extend_to(self.step)
        return {
            **self.past.remembered,
            "step": self.step,
            "data_offset": self.data_offset,
            "rollbacks": self.rollbacks,
            "past_rates_crc32": self.rates.crc32,
        }

    def _summary(self) -> TrainSummary:
        losses = [record.loss for record in self.history if record.loss is not None]
        validated = [(record.step, record.val_loss) for record in self.history if record.val_loss is not None]
        val_step, val_loss = validated[-1] if validated else (None, None)
        return TrainSummary(
            folder=self.folder.path,
            step=self.step,
            total_steps=self.total_steps,
            first_loss=losses[0] if losses else None,
            last_loss=losses[-1] if losses else None,
            val_loss=val_loss,
            val_step=val_step,
            checkpoint=self.saves.checkpoint,
            stopped_by=self.stop.requested,
            first_val_loss=validated[0][1] if len(validated) > 1 else None,
        )


class NoOutput:
    """Stands for the metrics file and the plot in a process that reports nothing."""

    def write(self, record: StepRecord) -> None:
        pass

    def update(self, records: Sequence[StepRecord]) -> None:
        pass


class Batches(Protocol):
    """What the prefetcher needs of a `StepLoader`."""

    def batch(self, step: int, /) -> dict[str, torch.Tensor]: ...
    def rows_of(self, step: int, /) -> Any: ...


class Prefetcher:
    """Batches in the order of the steps, each made by a thread while the step before it is computed.

    An error of the thread is raised by the `next` that would have returned its batch.
    """

    def __init__(self, loader: Batches, first: int, end: int):
        self._loader, self._position, self._end = loader, first, end
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._ahead: Future[tuple[dict[str, torch.Tensor], list[int]]] | None = None

    def __enter__(self) -> Prefetcher:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def next(self) -> tuple[dict[str, torch.Tensor], list[int]]:
        """The next step's batch and the numbers of its rows."""
        assert self._ahead is not None, f"there is no batch {self._position} of {self._end}"
        made = self._ahead.result()
        self._position += 1
        self._start()
        return made

    def _start(self) -> None:
        more = self._position < self._end
        self._ahead = self._pool.submit(self._make, self._position) if more else None

    def _make(self, position: int) -> tuple[dict[str, torch.Tensor], list[int]]:
        # both calls here: the loader keeps the order of the latest epoch asked for, so only one thread may ask
        return self._loader.batch(position), self._loader.rows_of(position).tolist()


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _last_words(summary: TrainSummary, folder: RunFolder) -> str:
    parts = [f"{counted(summary.step, 'step')} done"]
    if summary.first_loss is not None:
        parts.append(f"training loss {summary.first_loss:.4f} -> {summary.last_loss:.4f} (first and last step alone)")
    if summary.val_loss is not None:
        begun = f"{summary.first_val_loss:.4f} -> " if summary.first_val_loss is not None else ""
        of_step = f" (of step {summary.val_step})" if summary.val_step != summary.step else ""
        parts.append(f"validation loss {begun}{summary.val_loss:.4f}{of_step}")
    parts.append(f"checkpoint {summary.checkpoint}" if summary.checkpoint is not None else "no checkpoint")
    return "; ".join([*parts, f"picture {folder.plot}"])


def _why_it_stops(diverged: Divergence, target: Path | None, rollbacks: int, config: RunConfig) -> str:
    again = f" after {counted(rollbacks, 'rollback')}" if rollbacks else ""
    return (
        f"{diverged.what}{again}\n"
        f"  -> the weights are good up to step {diverged.first_step - 1}; lower optim.learning_rate, look at the data, and go "
        f"on from {target or 'the start'} with --resume (run.max_bad_steps sets the limit, run.on_divergence: rollback goes "
        f"back by itself, at most run.max_rollbacks: {config.run.max_rollbacks} times)"
    )


def _due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0


def replace_text(path: Path, text: str) -> None:
    """Write a file that is never seen half written.

    Raises:
        WriteFailed: The system refuses it.
    """
    with writing(path):
        temporary = path.with_name(path.name + ".new")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
