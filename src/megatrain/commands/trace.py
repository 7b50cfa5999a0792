"""`megatrain trace`: a timeline of some steps of a run, or of a shape with random weights. See docs/pipeline.md.

The steps are those of the run, but nothing is written to the run's folder, and no weights are kept. The trace has the spans that
instruments record in every step, visits of layers, the making of batches and, on request, a save.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatrain.config.schema import RunConfig
from megatrain.data.rows import Prefetcher
from megatrain.engine.base import Engine
from megatrain.errors import UserError
from megatrain.metrics.logger import RunLogger, quiet_libraries
from megatrain.metrics.spans import Span, chrome_trace, draw_trace
from megatrain.run.coordinator import coordinated
from megatrain.run.engine_factory import Shapes, make_engine
from megatrain.run.folder import nearest_existing
from megatrain.run.prepare import prepare
from megatrain.run.ranks import from_rank_0, gathered
from megatrain.run.saves import refuse_if_disk_too_small
from megatrain.units import gib, number_text

if TYPE_CHECKING:
    from megatrain.commands.work import Work

Batch = dict[str, torch.Tensor]


def trace_run(
    run: RunConfig, *, steps: int, warmup: int, out: Path, png: Path | None = None, save: bool = False
) -> dict[str, Any]:
    """Trace `steps` steps of a run after `warmup` others; writes the trace as JSON to `out` and as an image to `png`.

    Args:
        save: Write a checkpoint to a temporary folder during the first traced step.

    Raises:
        UserError: A setting is wrong, as in `train`, or the engine is not the host engine.
        PlanRefused: The run does not fit the machine.
    """
    if run.engine != "host":
        raise UserError("only the host engine has a timeline", "engine: mesh", "use engine: host")
    quiet_libraries()
    beside = nearest_existing(Path(run.run.dir).absolute().parent)  # a disk with room for a checkpoint
    with (
        coordinated(run) as coordinator,
        _scratch_folder(beside) as scratch,
        RunLogger(quiet=not coordinator.is_main) as log,
    ):
        elsewhere = run.run.model_copy(update={"dir": str(scratch / "run")})
        there = run.model_copy(update={"run": elsewhere})
        prepared = coordinator.in_turn(lambda: prepare(there, resume=None, log=log.info, saves=False))
        if save:
            refuse_if_disk_too_small(prepared.run, prepared.checkpoint_bytes, 1)
            log.info(f"disk: a checkpoint of {gib(prepared.checkpoint_bytes)} in {beside}, removed afterwards")
        batches = _TimedBatches(prepared.loader.batch)
        checkpoint = scratch / "checkpoint" if save else None
        shapes = Shapes.of(prepared.run.rows_per_step, prepared.loader, None)
        with make_engine(prepared.run, prepared.model_folder, shapes=shapes, watch=coordinator.section) as engine:
            spans = _take_steps(engine, batches, steps, warmup, prepared.learning_rate_at, checkpoint, log.info)
        ranks = coordinator.gather(spans)
        coordinator.finish()
        title = f"megatrain: {prepared.model_folder.name}, {run.rows_per_step} rows"
        return _written(ranks, title, out, png, log.info) if coordinator.is_main else {}


def trace_shape(
    work: Work, *, steps: int, warmup: int, out: Path, png: Path | None = None, save: bool = False
) -> dict[str, Any]:
    """Trace steps of a benchmark's shape; see `trace_run`."""
    from megatrain.commands.work import engine_for, random_batch

    quiet_libraries()
    with _scratch_folder(Path.cwd()) as scratch, RunLogger(quiet=not work.is_main) as log:
        checkpoint = scratch / "checkpoint" if save else None
        with engine_for(replace(work, say=log.info)) as engine:
            vocabulary = engine.config.get_text_config().vocab_size
            batches = _TimedBatches(lambda number: random_batch(vocabulary, work.rows, work.tokens, number))
            spans = _take_steps(engine, batches, steps, warmup, lambda step: 1e-5, checkpoint, log.info)
        title = f"megatrain: {Path(work.shape).name}, {work.rows} x {work.tokens} tokens"
        ranks = gathered(spans)
        return _written(ranks, title, out, png, log.info) if work.is_main else {}


@contextmanager
def _scratch_folder(beside: Path) -> Iterator[Path]:
    """A temporary folder in `beside`, the same one for all ranks; rank 0 removes it. Collective."""
    made: list[tempfile.TemporaryDirectory[str]] = []

    def make() -> str:
        made.append(tempfile.TemporaryDirectory(dir=beside))
        return made[0].name

    try:
        yield Path(from_rank_0(make))
    finally:
        for folder in made:
            folder.cleanup()


class _TimedBatches:
    """A loader that records a span for each batch, in the thread that makes it."""

    def __init__(self, make: Callable[[int], Batch]):
        self._make = make
        self.spans: list[Span] = []

    def batch(self, number: int) -> Batch:
        started = time.perf_counter()
        made = self._make(number)
        self.spans.append(Span("data", f"batch {number + 1}", started, time.perf_counter()))
        return made

    def rows_of(self, number: int) -> torch.Tensor:
        return torch.zeros(0)


def _take_steps(
    engine: Engine,
    batches: _TimedBatches,
    steps: int,
    warmup: int,
    learning_rate_at: Callable[[int], float],
    checkpoint: Path | None,
    say: Callable[[str], None],
) -> list[Span]:
    """Run steps and return the spans of the last `steps` of them, the updates after the last step included."""
    saving: list[Span] = []
    begin_s = 0.0
    with Prefetcher(batches, 0, warmup + steps) as ahead:
        for number in range(warmup + steps):
            if number == warmup:
                engine.begin_trace()
                begin_s = time.perf_counter()
            batch, _ = ahead.next()
            result = engine.train_step(batch, learning_rate=learning_rate_at(number))
            kind = "warm-up" if number < warmup else "traced"
            say(f"step {number + 1} ({kind}): loss {number_text(result.loss, '.4f')}, {result.seconds['step']:.3f} s")
            if number == warmup and checkpoint is not None:
                started = time.perf_counter()
                engine.save(
                    checkpoint,
                    background=True,
                    then=lambda _, start=started: saving.append(Span("checkpoint", "save", start, time.perf_counter())),
                )
    engine.wait_saved()
    return [span for span in (*engine.end_trace(), *batches.spans, *saving) if span.end_s > begin_s]


def _written(
    ranks: Sequence[Sequence[Span]], title: str, out: Path, png: Path | None, say: Callable[[str], None]
) -> dict[str, Any]:
    first, *others = ranks
    trace = chrome_trace(first, title, *others)
    try:
        out.write_text(json.dumps(trace), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror}", str(out), "choose another path with --out") from None
    if png is not None:
        draw_trace(trace, png)
    say(f"wrote {out}" + (f" and {png}" if png else "") + "; open the JSON at https://ui.perfetto.dev")
    return trace
