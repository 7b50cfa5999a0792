"""`megatrain trace`: some steps of a run, or of a shape with random weights, as a timeline. See docs/pipeline.md.

The steps are a run's own: its engine, its batches, its plan. Nothing is written into the run's folder, and no weights are kept.
What the instruments record for every step anyway is joined by visits of layers, the making of batches and, if asked for, a save.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatrain.config.schema import RunConfig
from megatrain.data.rows import Prefetcher
from megatrain.engine.base import Engine
from megatrain.errors import UserError
from megatrain.metrics.logger import RunLogger, quiet_libraries
from megatrain.metrics.spans import Span, chrome_trace, draw_trace
from megatrain.run.engine_factory import make_engine
from megatrain.run.folder import nearest_existing
from megatrain.run.prepare import prepare

Batch = dict[str, torch.Tensor]


def trace_run(
    run: RunConfig, *, steps: int, warmup: int, out: Path, png: Path | None = None, save: bool = False
) -> dict[str, Any]:
    """Trace steps of a run from its beginning.

    Args:
        run: The config.
        steps, warmup: Steps in the trace, and steps before them.
        out: The JSON to write.
        png: Where a picture of it goes.
        save: Write a checkpoint under the first traced step, to a temporary folder; it is removed.

    Returns:
        The trace.

    Raises:
        UserError: Something given is wrong, as for `train`; the engine is not the host engine.
        PlanRefused: The run does not fit the machine.
    """
    if run.engine != "host":
        raise UserError("only the host engine has a timeline", "engine: mesh", "use engine: host")
    quiet_libraries()
    beside = nearest_existing(Path(run.run.dir).absolute().parent)  # where a checkpoint has room
    with tempfile.TemporaryDirectory(dir=beside) as scratch, RunLogger() as log:
        elsewhere = run.run.model_copy(update={"dir": str(Path(scratch) / "run")})
        prepared = prepare(run.model_copy(update={"run": elsewhere}), resume=None, log=log.info)
        timed = _TimedBatches(prepared.loader.batch)
        checkpoint = Path(scratch) / "checkpoint" if save else None
        with make_engine(prepared.run, prepared.model_folder) as engine:
            spans = take_steps(engine, timed, steps, warmup, prepared.learning_rate_at, checkpoint, log.info)
        return _written(spans, f"megatrain: {prepared.model_folder.name}, {run.rows_per_step} rows", out, png, log.info)


def trace_shape(
    shape: str,
    *,
    rows: int,
    tokens: int,
    steps: int,
    warmup: int,
    out: Path,
    png: Path | None = None,
    save: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Trace steps of a benchmark's shape; see `trace_run`. `options` are those of `bench.engine_for`."""
    from megatrain.commands.bench import engine_for, random_batch

    quiet_libraries()
    with (
        tempfile.TemporaryDirectory(dir=Path.cwd()) as scratch,
        RunLogger() as log,
        engine_for(shape, rows=rows, tokens=tokens, say=log.info, **options) as engine,
    ):
        checkpoint = Path(scratch) / "checkpoint" if save else None
        vocabulary = engine.config.get_text_config().vocab_size
        timed = _TimedBatches(lambda number: random_batch(vocabulary, rows, tokens, number))
        spans = take_steps(engine, timed, steps, warmup, lambda step: 1e-5, checkpoint, log.info)
        return _written(spans, f"megatrain: {Path(shape).name}, {rows} x {tokens} tokens", out, png, log.info)


class _TimedBatches:
    """A loader whose batches are recorded as they are made, in the thread that makes them."""

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


def take_steps(
    engine: Engine,
    batches: _TimedBatches,
    steps: int,
    warmup: int,
    learning_rate_at: Callable[[int], float],
    checkpoint: Path | None,
    say: Callable[[str], None],
) -> list[Span]:
    """Run steps, the last `steps` of them traced; returns their spans, the updates behind the last step included."""
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
            loss = "n/a" if result.loss is None else f"{result.loss:.4f}"
            say(f"step {number + 1} ({kind}): loss {loss}, {result.seconds['step']:.3f} s")
            if number == warmup and checkpoint is not None:
                _save(engine, checkpoint, saving)
    engine.wait_saved()
    return [span for span in (*engine.end_trace(), *batches.spans, *saving) if span.end_s > begin_s]


def _save(engine: Engine, checkpoint: Path, spans: list[Span]) -> None:
    """A checkpoint in the background; its span is there when it is whole."""
    started = time.perf_counter()
    engine.save(
        checkpoint,
        background=True,
        then=lambda _: spans.append(Span("checkpoint", "save", started, time.perf_counter())),
    )


def _written(spans: list[Span], title: str, out: Path, png: Path | None, say: Callable[[str], None]) -> dict[str, Any]:
    trace = chrome_trace(spans, title)
    try:
        out.write_text(json.dumps(trace), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror}", str(out), "give another place with --out") from None
    if png is not None:
        draw_trace(trace, png)
    say(f"wrote {out}" + (f" and {png}" if png else "") + "; open the JSON at https://ui.perfetto.dev")
    return trace
