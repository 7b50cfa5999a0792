"""`train`: a run from its config to its last checkpoint, in one process or in many.

    prepare  -->  run folder  -->  engine  -->  TrainingLoop: batch, step, record, [evaluate], [save]

[Note: what a step number means]
Step n is the n-th optimizer step of the run, 1 the first. Its batch is `loader.batch(n - 1 + offset)` and its learning rate
`schedule(n - 1)`, both pure functions of the number: a run that is resumed after step n continues exactly where it was.
A step that is skipped (not finite, or without target tokens) still has its number. The offset is 0 until the run rolls back
before a divergence (`run.on_divergence: rollback`): then the steps get their old numbers again, but batches behind those that
went wrong. It is kept in every checkpoint.
"""

from __future__ import annotations

import datetime
import logging
import math
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatrain.checkpoint.reader import latest_complete, saved_extra
from megatrain.config.schema import ChangeName, RunConfig
from megatrain.data.rows import Prefetcher
from megatrain.engine.base import Engine
from megatrain.engine.plan import named_device
from megatrain.errors import HostMemoryLow, NumericStop, UserError, WriteFailed
from megatrain.metrics.laps import Laps
from megatrain.metrics.logger import RunLogger, quiet_libraries
from megatrain.metrics.output import lasting_output
from megatrain.metrics.plot import LossPlot
from megatrain.metrics.record import MeshRecord, MetricsWriter, StepRecord
from megatrain.metrics.trackers import Trackers
from megatrain.run.coordinator import Coordinator, coordinated
from megatrain.run.engine_factory import Shapes, make_engine
from megatrain.run.evaluate import evaluate
from megatrain.run.folder import RunFolder, errors_into_log
from megatrain.run.health import Divergence, DivergenceGuard, HostWatermark, RunHealth
from megatrain.run.prepare import Prepared, prepare
from megatrain.run.resume import PastRates
from megatrain.run.saves import RunSaves, is_due
from megatrain.run.signals import Requests, Stopped, StopSignals
from megatrain.units import GIB, counted, gib

logger = logging.getLogger(__name__)

ECHO_S = 2.0
"""Ranks get a signal from the terminal or the batch system, and within this time once more from torchrun."""


@dataclass(frozen=True)
class TrainSummary:
    """The outcome of a run."""

    folder: Path
    step: int  # the last one
    total_steps: int  # length of the schedule; 0 if the run was stopped before its first step
    first_loss: float | None  # training loss of the run's first step that had one
    last_loss: float | None
    val_loss: float | None  # the newest validation loss
    val_step: int | None  # the step after which it was measured
    checkpoint: Path | None  # the newest one
    stopped_by: str | None  # signal, file or reason that ended the run early; None if it went to its end
    first_val_loss: float | None = None  # if there was more than one; with `eval.at_start` that of the initial model


def train(
    run: RunConfig,
    *,
    resume: str | None = None,
    allow_changes: Collection[ChangeName] = (),
    engine: Engine | None = None,
) -> TrainSummary:
    """Train as the config says. With `engine: mesh`, every rank calls this.

    Args:
        run: The config; see `load_config`.
        resume: None starts from the beginning, in an empty or missing folder. "auto", "latest" or a checkpoint's path resume.
        allow_changes: What may differ from the checkpoint's run, besides `run.allow_changes`.
        engine: Use this engine instead of making one from `run`; it is not closed.

    Raises:
        UserError: Something given is wrong; all problems at once, before anything is loaded or written. Or another process
            trains in this folder.
        PlanRefused: The run does not fit the machine.
        NumericStop: The run has diverged, and may not roll back (any more).
        HostMemoryLow: Host memory is low; the state was saved.
        WriteFailed: The disk refuses a file of the run; the state was saved, unless the error says otherwise.
        KeyboardInterrupt: A second SIGINT or SIGTERM; see [Note: signals of a run] in signals.py.
        SystemExit: On ranks other than 0, where rank 0 raises one of the above.
    """
    quiet_libraries()
    with (
        lasting_output(),
        coordinated(run) as coordinator,
        StopSignals(ECHO_S if coordinator.world > 1 else 0.0) as signals,
        RunLogger(quiet=not coordinator.is_main, line_every_s=run.metrics.print_every_s) as log,
        coordinator.lock(Path(run.run.dir)),
    ):
        folder = RunFolder(run.run.dir, read_only=not coordinator.is_main)
        try:
            return _train(run, folder, resume, allow_changes, engine, coordinator, signals, log)
        except Stopped as stopped:
            log.info(f"stopped by {stopped} before the first step; there was nothing to save")
            return _stopped_at_the_start(folder, resume, str(stopped))
        except SystemExit:
            if signals.requested is None:
                raise
            raise SystemExit(0) from None  # rank 0 has ended because of the same signal


def _train(
    run: RunConfig,
    folder: RunFolder,
    resume: str | None,
    allow_changes: Collection[ChangeName],
    engine: Engine | None,
    coordinator: Coordinator,
    signals: StopSignals,
    log: RunLogger,
) -> TrainSummary:
    """`train` in its surroundings. Raises Stopped if a signal comes before the first step of this process has been taken."""
    laps = Laps.of_process()
    with ExitStack() as start:
        start.enter_context(coordinator.section("start"))
        resume = coordinator.resume_from(folder, resume)

        today = coordinator.gather(datetime.date.today().isoformat())[0]

        def prepare_here() -> Prepared:
            # The others wait for rank 0 meanwhile, and learn of its end. Anywhere else a rank that left would leave them waiting.
            signals.nothing_to_save = coordinator.is_main
            found = prepare(run, resume=resume, allow_changes=allow_changes, today=today, log=log.info)
            signals.nothing_to_save = coordinator.world == 1
            return found

        prepared = coordinator.in_turn(prepare_here)
        laps.end("checks and data")
        for line in coordinator.advice:
            log.warning(line)
        requests = Requests(signals, folder, coordinator)
        if requests.poll(files=False):
            coordinator.finish()
            raise Stopped(requests.stop)
        with errors_into_log(log, folder):
            folder.open(run, log)
            coordinator.begin(folder.path)
            if coordinator.attempt:
                resumed = (
                    f"resuming after step {prepared.past.step}" if prepared.start_from else "nothing was saved yet"
                )
                log.info(f"attempt {coordinator.attempt + 1} of this job: restarted after a failure, {resumed}")
            with engine_for(prepared, engine, coordinator, log) as running:
                laps.split(running.start_seconds, rest="other")
                loop = TrainingLoop(prepared, running, folder, log, requests, coordinator, laps)
                start.close()
                summary = loop.run()
            coordinator.finish()
            loop.raise_write_failed()
            return summary


def _stopped_at_the_start(folder: RunFolder, resume: str | None, signal: str) -> TrainSummary:
    """The outcome of a process that took no step: the run is where its checkpoint left it."""
    checkpoint = None
    if resume is not None:
        checkpoint = latest_complete(folder.checkpoints) if resume in ("auto", "latest") else Path(resume)
    step = int(saved_extra(checkpoint)["step"]) if checkpoint is not None else 0
    return TrainSummary(folder.path, step, 0, None, None, None, None, checkpoint, signal)


@contextmanager
def engine_for(prepared: Prepared, given: Engine | None, coordinator: Coordinator, log: RunLogger) -> Iterator[Engine]:
    """The given engine; or a new one, which is closed at the end."""
    if given is not None:
        given.shipped.update(prepared.shipped)
        yield given
        return
    run, weights = prepared.run, prepared.start_from is None
    made = "making random" if run.model.init == "random" else "reading the"
    log.info(f"{made} weights" if weights else "allocating weights and moments")  # takes minutes for a large model
    with coordinator.restarting_on_out_of_memory(prepared.past.step + 1):
        engine = make_engine(
            run,
            prepared.model_folder,
            weights=weights,
            shapes=Shapes.of(run.rows_per_step, prepared.loader, prepared.val),
            plan=prepared.plan,
            restarts=coordinator.restarts,
            watch=coordinator.section,
        )
    engine.shipped.update(prepared.shipped)
    try:
        yield engine
    except KeyboardInterrupt:
        engine.cancel_save()  # somebody insists: the half-written checkpoint is not worth the wait
        raise
    finally:
        engine.close()


class RunRecords:
    """The records of a run's steps and everything they are written to: metrics.jsonl, loss.png, trackers.

    Args:
        run: The config.
        folder: The run's folder.
        step: The last step taken; later records are dropped from the file.
        log: Takes warnings.
        writes: False only remembers the records, on ranks that do not write.

    Attributes:
        history: All records of the run, oldest first; where nothing is written, those of this process.
    """

    def __init__(self, run: RunConfig, folder: RunFolder, step: int, log: RunLogger, *, writes: bool):
        self.history: list[StepRecord] = []
        self._writes = writes
        if not writes:
            return
        self._metrics = MetricsWriter(folder.metrics, step)
        self._plot = LossPlot(folder.plot, title=folder.path.name)
        config, section = run.model_dump(mode="json"), run.metrics
        self._trackers = Trackers(section.trackers, folder.path, section.project, config, log.warning)
        self.history = self._metrics.history
        if dropped := self._metrics.dropped:
            log.info(f"metrics.jsonl: {counted(dropped, 'record')} after step {step} dropped, to be repeated")

    def add(self, record: StepRecord) -> None:
        """Append a record.

        Raises:
            WriteFailed: The disk refuses it in metrics.jsonl.
        """
        self.history.append(record)
        if self._writes:
            self._trackers.write(record)
            self._plot.update(self.history)
            self._metrics.write(record)

    def complete(self, record: StepRecord) -> None:
        """Put a record in the place of the last one, which is of the same step and misses something; `add` it if there is none.

        Raises:
            WriteFailed: As `add`.
        """
        if not self.history or self.history[-1].step != record.step:
            self.add(record)
            return
        self.history[-1] = record
        if self._writes:
            self._trackers.write(record)
            self._metrics.rewrite(self.history)

    def __enter__(self) -> RunRecords:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writes:
            with self._metrics, self._trackers:
                if self.history:
                    self._plot.draw(self.history)


class TrainingLoop:
    """The steps of one process of a run."""

    def __init__(
        self,
        prepared: Prepared,
        engine: Engine,
        folder: RunFolder,
        log: RunLogger,
        requests: Requests,
        coordinator: Coordinator,
        laps: Laps,
    ):
        self._laps = laps
        self.config, self.engine, self.folder = prepared.run, engine, folder
        self.log, self.requests, self.coordinator = log, requests, coordinator
        self.loader, self.val = prepared.loader, prepared.val
        self.total_steps, self.learning_rate_at = prepared.total_steps, prepared.learning_rate_at
        past = self.past = prepared.past
        self.step, self.data_offset, self.rollbacks = past.step, past.data_offset, past.rollbacks
        self.skipped_steps = past.skipped_steps
        self.rates = PastRates(self.learning_rate_at, self.step)
        self.guard = DivergenceGuard(self.config.run.max_bad_steps, self.config.run.loss_spike)
        self.guard.restore(past.guard)
        self.health = RunHealth(self.config, prepared.model_folder, coordinator.world)
        self.health.restore(past.alerts)
        self.saves = RunSaves(
            engine,
            folder,
            self.config.checkpoint,
            self._extra,
            self.step,
            prepared.start_from,
            prepared.checkpoint_bytes,
            log.state,
            int(self.config.memory.host_reserve_gib * GIB),
        )
        self.memory_low: HostMemoryLow | None = None
        self.write_failed: WriteFailed | None = None
        self.unread = prepared.start_from
        """The checkpoint that the engine may still be reading, until a step or an evaluation has needed all of it."""
        self.stepped = False
        """Whether this process has taken a step."""
        self.started_s = time.perf_counter()
        if prepared.start_from is not None:
            self.log.info(f"resuming after step {self.step}: reading {prepared.start_from}")
            with self._explaining_damage():
                self.engine.load(prepared.start_from, wait=False, convert_states=True)  # allowed by name, in `past_of`

    def run(self) -> TrainSummary:
        """Train to the end of the schedule, or until the run is asked to stop."""
        self.folder.write_config(self.config)
        try:
            while (diverged := self._train()) is not None:
                self._roll_back(diverged)
        except HostMemoryLow:
            self.log.warning(f"host memory is low: saving step {self.step}, then ending the run")
            self.saves.finish(self.step)
            raise self.health.host_memory_low(self.engine.memory()) from None
        stopped_by = self.requests.stop
        if not stopped_by:
            self._refuse_if_nothing_was_trained()
        if self.config.checkpoint.at_end or stopped_by:
            self._save_at_end()
        self.saves.settle()
        summary = self._summary()
        if stopped_by:
            self.log.info(f"stopped by {stopped_by} after step {self.step} of {self.total_steps}")
        else:
            self.log.info(_last_words(summary, self.folder))
        return summary

    def _train(self) -> Divergence | None:
        """The training loop: from `self.step` to the end of the schedule, a stop, or a divergence."""
        self.folder.set_aside(after_step=self.step)
        with RunRecords(self.config, self.folder, self.step, self.log, writes=self.coordinator.is_main) as self.records:
            self.log.begin(self.step, self.total_steps)
            with self._batches() as batches, self._host_watermark():
                self._before_first_step()
                if self.memory_low is not None:
                    raise self.memory_low
                while self._continues():
                    record, ranks = self._take_step(batches)
                    self.step += 1
                    self.log.step(record, self.total_steps)
                    if self._evaluation_is_due():
                        record = self._evaluate(record)
                    self._record(record)
                    self.saves.after_step(self.step, record.step_s)
                    diverged = self.guard.check(record) or self._act_on_alerts(record, ranks)
                    if diverged is not None:
                        return diverged
                    if self.memory_low is not None:
                        raise self.memory_low
                    self.saves.save_if_due(self.step)
        return None

    def _continues(self) -> bool:
        """Collect requests, save if one asks for it; whether there is another step to take. Collective."""
        stop = self.requests.poll()
        if self.requests.take_save():
            self.saves.save(self.step)
        return not stop and self.step < self.total_steps

    def _batches(self) -> Prefetcher:
        return Prefetcher(self.loader, self.step + self.data_offset, self.total_steps + self.data_offset)

    def _host_watermark(self) -> HostWatermark:
        return HostWatermark(int(self.config.memory.host_reserve_gib * GIB), self._host_memory_is_low)

    # ---------------------------------------------------------------- a step

    def _before_first_step(self) -> None:
        self._evaluate_what_was_cut_short()
        if self.step >= self.total_steps:
            self.log.info(
                f"nothing left to do: {self.step:,} of {counted(self.total_steps, 'step')} taken; to continue, raise "
                "schedule.steps or schedule.epochs (with --allow-changes schedule where that changes "
                "learning rates of steps already taken)"
            )
        if self.step == 0 and self.config.eval.at_start and not self.requests.stop:
            self._record(self._evaluate(self._step_record(step=0)))

    def _evaluate_what_was_cut_short(self) -> None:
        """Measure the validation loss of the step that the run resumes after, if it was due and a stop came first."""
        if self.step == 0 or self.val is None or not self._evaluation_is_due():
            return
        last = self.records.history[-1] if self.records.history else None
        record = last if last is not None and last.step == self.step else self._step_record(step=self.step)
        if not self.coordinator.broadcast(record.val_tokens is None) or self.requests.poll():
            return
        self.log.info(f"step {self.step}: its validation loss is missing, an earlier process was stopped before it")
        record = self._evaluate(record)
        if record.val_tokens is not None:
            self._record(record, complete=True)

    def _take_step(self, batches: Prefetcher) -> tuple[StepRecord, MeshRecord | None]:
        """One optimizer step; see [Note: what a step number means]."""
        step, start = self.step + 1, time.perf_counter()
        batch, row_numbers = batches.next()
        data_wait_s = time.perf_counter() - start
        learning_rate = self.learning_rate_at(step - 1)
        with self.coordinator.restarting_on_out_of_memory(step):
            with self._explaining_damage(), self._first_step():
                result = self.engine.train_step(batch, learning_rate=learning_rate)
            step_s = time.perf_counter() - start
            ranks = self.engine.step_over_ranks() if result.tokens else None

        if self.unread is not None:
            self.log.info(f"resumed from {self.unread} after step {step - 1}")
            self.unread = None
        rows = self.loader.rows
        # padding is computed, too, but it is not what a speed should count
        documents = rows.document_lengths(row_numbers)
        if result.tokens == 0:
            places = ", ".join(place for row in row_numbers for place in rows.places(row))
            self.log.warning(f"step {step}: no target token in its samples, nothing was changed: {places}")
        profiled = ranks is not None and ranks.sampled
        mfu = None if profiled else self.health.mfu(documents, result.tokens, step_s)
        self.skipped_steps += bool(result.skipped)
        record = self._step_record(
            step=step,
            epoch=(step + self.data_offset) / self.loader.steps_per_epoch,
            loss=_finite(result.loss),
            grad_norm=_finite(result.grad_norm),
            learning_rate=learning_rate,
            rows=len(row_numbers),
            processed_tokens=int(documents.sum()),
            trained_tokens=result.tokens,
            step_s=step_s,
            data_wait_s=data_wait_s,
            split_s={name: seconds for name, seconds in result.seconds.items() if name != "step"},
            aux_loss=_finite(result.routing.get("aux_loss")),
            expert_max_load=_finite(result.routing.get("max_load")),
            expert_max_share=_finite(result.routing.get("max_share")),
            expert_idle=_finite(result.routing.get("idle")),
            mfu=mfu,
            skipped=result.skipped,
            skipped_steps=self.skipped_steps,
            pipeline=self.health.pipeline(result.pipeline, data_wait_s),
            mesh=ranks.plain(mfu) if ranks is not None else {},
        )
        return record, ranks

    def _step_record(
        self, *, step: int, processed_tokens: int = 0, trained_tokens: int = 0, step_s: float = 0.0, **figures: Any
    ) -> StepRecord:
        """A record with the figures given, and zero or None for the others."""
        zero = {"epoch": 0.0, "loss": None, "grad_norm": None, "learning_rate": 0.0, "rows": 0, "data_wait_s": 0.0}
        return StepRecord(
            step=step,
            processed_tokens=processed_tokens,
            trained_tokens=trained_tokens,
            step_s=step_s,
            processed_tokens_per_s=processed_tokens / step_s if step_s else 0.0,
            trained_tokens_per_s=trained_tokens / step_s if step_s else 0.0,
            elapsed_s=time.perf_counter() - self.started_s,
            unix_time_s=time.time(),
            host_rss_bytes=self.health.host_rss_bytes,
            device_peak_bytes=self.engine.memory().get("device_peak") or None,
            **{**zero, **figures},
        )

    @contextmanager
    def _explaining_damage(self) -> Iterator[None]:
        """Where the checkpoint that the run starts from turns out to be damaged: name the newest other one."""
        try:
            yield
        except UserError as error:
            if self.unread is None or "damaged" not in str(error):
                raise
            other = latest_complete(self.folder.checkpoints, except_for=self.unread)
            if other is None:
                raise
            while isinstance(error.__cause__, UserError):  # the reader's own finding, below what others made of it
                error = error.__cause__
            raise UserError(error.what, error.where, f"resume from the newest other one: --resume {other}") from error

    @contextmanager
    def _first_step(self) -> Iterator[None]:
        """The first step of a process takes longer than the others, on a GPU by minutes."""
        if self.stepped:
            yield
            return
        on_gpu = named_device(self.config.run.device).type == "cuda"
        compiles = self.config.activations.compile == "auto" and on_gpu
        with self.log.state("first step: compiling" if compiles else "first step"):
            yield
        self.stepped = True
        self._laps.end("first step")
        logger.debug("from the command to the end of the first step %s", self._laps)
        self.requests.something_to_save()

    def _record(self, record: StepRecord, *, complete: bool = False) -> None:
        try:
            (self.records.complete if complete else self.records.add)(record)
        except WriteFailed as error:  # the step itself has been taken: it is saved before the run ends
            self.write_failed = self.write_failed or error
            self.requests.request_stop(f"the disk, which refuses {error.where},")

    # ---------------------------------------------------------------- between steps

    def _evaluation_is_due(self) -> bool:
        last = self.step == self.total_steps
        return is_due(self.config.eval.every_steps, self.step) or (last and self.config.eval.at_end)

    def _evaluate(self, record: StepRecord) -> StepRecord:
        """The record with the validation loss; without it if the run is asked to stop meanwhile."""
        if self.val is None:
            return record
        try:
            with self._explaining_damage(), self.log.state("validating", f"step {record.step}: validating"):
                found = evaluate(
                    self.engine, self.val, rows_per_batch=self.config.rows_per_step, stop=self.requests.poll
                )
        except HostMemoryLow as error:
            self.memory_low = error  # the step itself has been taken, and is recorded first
            return record
        if found is None:
            self.log.info(f"step {record.step}: evaluation aborted by {self.requests.stop}")
            return record
        record = replace(record, val_loss=found.loss, val_tokens=found.tokens, val_s=found.seconds)
        self.log.validation(record)
        return record

    def _act_on_alerts(self, record: StepRecord, ranks: MeshRecord | None) -> Divergence | None:
        """Log the alerts that the step completes, and take the actions that the config wants."""
        for alert, action in self.health.alerts(record, ranks):
            self.log.warning(f"step {self.step}: alert {alert.rule}: {alert.text}")
            if action == "rollback":
                what = f"alert {alert.rule} (alerts.{alert.rule}_action: rollback)"
                return Divergence(self.step, self.step, what, go_back=True)
            if action == "save":
                self.requests.request_save()
            if action == "stop":
                self.requests.request_stop(f"the alert {alert.rule}")
        return None

    def _host_memory_is_low(self, left: int) -> None:
        """In the watermark's thread: drop the step in progress, or finish it where it cannot be dropped; see `run`."""
        if self.coordinator.world > 1:  # all ranks end after the same step
            self.requests.request_stop(f"memory.host_reserve_gib: {gib(left)} of host memory available")
            return
        self.health.host_bytes_left = left
        error = HostMemoryLow()
        if not self.engine.interrupt(error):
            self.memory_low = error

    def _roll_back(self, diverged: Divergence) -> None:
        """Load the newest checkpoint from before a divergence, and skip the data up to it.

        Raises:
            NumericStop: The run is to stop instead, may not roll back any more, or has no checkpoint to go back to.
        """
        run = self.config.run
        self.saves.settle()
        target = self.coordinator.newest_checkpoint(self.folder, before_step=diverged.first_step)
        may = run.on_divergence == "rollback" or diverged.go_back
        if not may or self.rollbacks >= run.max_rollbacks or target is None:
            raise NumericStop(_why_it_stops(diverged, target, self.rollbacks, run.max_rollbacks))
        extra = self.engine.load(target, wait=False, convert_states=True)
        back_to = int(extra["step"])
        self.rollbacks += 1
        self.data_offset += diverged.step - back_to
        self.log.warning(
            f"{diverged.what}: back to {target} (rollback {self.rollbacks} of {run.max_rollbacks}); repeating steps "
            f"{back_to + 1} to {diverged.step} with later data"
        )
        self.step = back_to
        self.skipped_steps = int(extra.get("skipped_steps", 0))
        self.guard.restore(extra.get("guard", {}))
        self.saves.went_back(back_to, target)

    # ---------------------------------------------------------------- the end

    def _refuse_if_nothing_was_trained(self) -> None:
        """A run may be shorter than `max_bad_steps`: it would save the weights that it began with.

        Raises:
            NumericStop: Every step of the run was skipped.
        """
        last = self.records.history[-1].skipped if self.records.history else None
        reason = (last or "not finite") if self.step and self.skipped_steps == self.step else None
        if reason := self.coordinator.broadcast(reason):
            skipped = "the only step was" if self.step == 1 else f"all {self.step} steps were"
            raise NumericStop(
                f"nothing was trained: {skipped} skipped, the last because of: {reason}\n"
                "  -> check the data (`megatrain data`), lower optim.learning_rate, or compute in another format "
                "(precision.compute_dtype; fp16 needs some steps to find its loss scale)"
            )

    def _save_at_end(self) -> None:
        try:
            remark = "; a second signal aborts it" if self.requests.stopped_by_signal else ""
            self.saves.finish(self.step, remark)
        except UserError as error:
            if (failed := self.write_failed) is None:
                raise
            what = f"{failed.what}; nor could step {self.step} be saved: {error.where}: {error.what}"
            raise WriteFailed(what, failed.where, failed.remedy) from None

    def raise_write_failed(self) -> None:
        """Call after `run`: raise the error that ended the run, if it was the disk's.

        Raises:
            WriteFailed: Names the file.
        """
        if self.write_failed is not None:
            raise self.write_failed

    def _extra(self) -> dict[str, Any]:
        """See [Note: what a checkpoint remembers of its run]."""
        self.rates.extend_to(self.step)
        return {
            **self.past.remembered,
            "step": self.step,
            "data_offset": self.data_offset,
            "rollbacks": self.rollbacks,
            "skipped_steps": self.skipped_steps,
            "guard": self.guard.as_dict(),
            "alerts": self.health.as_dict(),
            "past_rates_crc32": self.rates.crc32,
        }

    def _summary(self) -> TrainSummary:
        losses = [record.loss for record in self.records.history if record.loss is not None] or [None]
        validated = [record for record in self.records.history if record.val_loss is not None]
        return TrainSummary(
            folder=self.folder.path,
            step=self.step,
            total_steps=self.total_steps,
            first_loss=losses[0],
            last_loss=losses[-1],
            val_loss=validated[-1].val_loss if validated else None,
            val_step=validated[-1].step if validated else None,
            checkpoint=self.saves.checkpoint,
            stopped_by=self.requests.stop,
            first_val_loss=validated[0].val_loss if len(validated) > 1 else None,
        )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _last_words(summary: TrainSummary, folder: RunFolder) -> str:
    parts = [f"{counted(summary.step, 'step')} done"]
    if summary.first_loss is not None:
        parts.append(f"training loss {summary.first_loss:.4f} -> {summary.last_loss:.4f} (first and last step alone)")
    if summary.val_loss is not None:
        first = f"{summary.first_val_loss:.4f} -> " if summary.first_val_loss is not None else ""
        of_step = f" (step {summary.val_step})" if summary.val_step != summary.step else ""
        parts.append(f"validation loss {first}{summary.val_loss:.4f}{of_step}")
    parts.append(f"checkpoint {summary.checkpoint}" if summary.checkpoint is not None else "no checkpoint")
    return "; ".join([*parts, f"picture {folder.plot}"])


def _why_it_stops(diverged: Divergence, target: Path | None, rollbacks: int, max_rollbacks: int) -> str:
    again = f" after {counted(rollbacks, 'rollback')}" if rollbacks else ""
    return (
        f"{diverged.what}{again}\n"
        f"  -> the weights are good up to step {diverged.first_step - 1}; lower optim.learning_rate, check the data, and resume "
        f"from {target or 'the start'} with --resume (run.max_bad_steps sets the limit; run.on_divergence: rollback rolls back "
        f"automatically, at most run.max_rollbacks: {max_rollbacks} times)"
    )
