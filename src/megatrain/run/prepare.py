"""Everything that can be known about a run before it trains: `megatrain check`, and the first thing `train` does.

Three stages, each slower than the one before: paths, folders and settings (preflight.py); the model's structure, family and
shapes, memory and disk; the data, which have to be tokenised once. A stage reports all its problems together, and the next one
starts only when there are none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from megatrain.config.schema import ChangeName, RunConfig
from megatrain.data.load import load_data, load_val
from megatrain.data.rows import PackedRows, StepLoader
from megatrain.engine.host.engine import parity_engine
from megatrain.engine.parity_check import verify_family, verify_packing
from megatrain.engine.plan import compute_dtype_of, device_of
from megatrain.errors import Problems, UserError
from megatrain.host_memory.available import available_host_bytes
from megatrain.metrics.logger import RunLogger, quiet_libraries
from megatrain.models.build import build_meta_model
from megatrain.models.structure import dissect
from megatrain.models.weights import check_weights
from megatrain.optim.spec import unmatched_groups
from megatrain.planner.report import plan_text
from megatrain.planner.run import check_cpu_memory, plan_run
from megatrain.run.engine_factory import check_mesh
from megatrain.run.preflight import ModelFiles, optimizer, preflight, preflight_data, preflight_model, steps_of
from megatrain.run.resume import Past, past_of
from megatrain.run.saves import checkpoints_at_once, refuse_if_disk_too_small
from megatrain.units import abbreviated, counted, dtype_name, gib

logger = logging.getLogger(__name__)

HIGH_RATE = 0.1
"""Learning rates above this are probably typing errors: AdamW moves a weight by about this much per step, and weights are mostly
smaller. They may be meant (for a toy model), so they are only a warning."""


@dataclass(frozen=True)
class Prepared:
    """A run whose parts exist and fit together."""

    run: RunConfig
    model_folder: Path  # the local folder behind `model.path`
    start_from: Path | None  # the checkpoint to resume from; None for a run from the beginning
    loader: StepLoader  # training batches
    val: PackedRows | None  # held-out rows
    total_steps: int
    learning_rate_at: Callable[[int], float]  # of a step, 0 the first
    past: Past
    checkpoint_bytes: int  # size of a checkpoint


def prepare(
    run: RunConfig, *, resume: str | None, allow_changes: Collection[ChangeName] = (), log: Callable[[str], None]
) -> Prepared:
    """Check a run and return its parts. Data are tokenised here, or read from the cache; weights are not read.

    Args:
        run: The config.
        resume: As for `train`.
        allow_changes: What may differ from the checkpoint's run, besides `run.allow_changes`.
        log: Takes the findings, a line each.

    Raises:
        UserError, PlanRefused: All problems of the first stage that has any, in one error.
    """
    allowed: set[ChangeName] = {*allow_changes, *run.run.allow_changes}
    problems = Problems()
    start, files = preflight(run, problems, resume=resume, allowed=allowed)
    if run.engine == "mesh":
        with problems.collect():
            check_mesh(run)
    problems.raise_all()
    assert files is not None, "the model could not be opened without a problem"

    parameters = 0
    with problems.collect():
        parameters = _check_model(run, files, log, read_weights=start.start_from is None)
    checkpoint_bytes = optimizer(run).bytes_per_parameter * parameters
    if parameters:
        if run.engine == "host":
            with problems.collect():
                _check_memory(run, files, log)
        if run.schedule.steps is not None:
            with problems.collect():
                _check_disk(run, checkpoint_bytes, run.schedule.steps, log)
    problems.raise_all()

    rows, val = load_data(
        run.data,
        files.tokenizer,
        vocab_size=files.vocab_size,
        model_max_length=files.positions,
        seed=run.run.seed,
        log=log,
    )
    loader = StepLoader(rows, run.rows_per_step, seed=run.run.seed)
    steps = steps_of(run, loader.steps_per_epoch)
    log(
        f"{counted(steps.total, 'step')} of {run.batch.tokens_per_step:,} tokens ({loader.steps_per_epoch:,} per epoch); "
        f"{run.schedule.kind} schedule, {counted(steps.warmup, 'step')} of warm-up to {run.optim.learning_rate:g}"
    )
    if run.schedule.steps is None:
        _check_disk(run, checkpoint_bytes, steps.total, log)
    _warn(run, loader)
    return Prepared(
        run=run,
        model_folder=files.folder,
        start_from=start.start_from,
        loader=loader,
        val=val,
        total_steps=steps.total,
        learning_rate_at=steps.learning_rate_at,
        past=past_of(run, start, loader, val, steps, allowed),
        checkpoint_bytes=checkpoint_bytes,
    )


def check(run: RunConfig, *, resume: str | None = None, allow_changes: Collection[ChangeName] = ()) -> None:
    """Run every check that `train` (with the same arguments) runs before the first step, and print the findings.

    Raises:
        UserError, PlanRefused: What would stop `train`, all problems in one error.
    """
    quiet_libraries()
    with RunLogger() as log:
        prepare(run, resume=resume, allow_changes=allow_changes, log=log.info)
        log.info("all checks passed")


def prepare_eval(run: RunConfig, *, log: Callable[[str], None]) -> tuple[Path, PackedRows]:
    """Check what an evaluation needs, and return the model's folder and the held-out rows.

    Raises:
        UserError, PlanRefused: All problems in one error.
    """
    problems = Problems()
    with problems.collect():
        if run.data.val is None:
            raise UserError(
                "is not set: there is nothing to evaluate on", "data.val", "give {fraction: 0.01} or a path"
            )
    files = preflight_model(run, problems)
    preflight_data(run, problems, files)
    problems.raise_all()
    assert files is not None, "the model could not be opened without a problem"
    _check_model(run, files, log, read_weights=True)
    rows = load_val(
        run.data,
        files.tokenizer,
        vocab_size=files.vocab_size,
        model_max_length=files.positions,
        seed=run.run.seed,
        log=log,
    )
    return files.folder, rows


def _check_model(run: RunConfig, files: ModelFiles, log: Callable[[str], None], *, read_weights: bool) -> int:
    """Check structure and family of the model, and the shapes of its weights if they will be read; builds it without storage.

    Returns:
        Parameters of the model, padding included; tied ones count once.
    """
    device = device_of(run.run.device)
    dtype = compute_dtype_of(run.precision.compute_dtype, device)
    given = {"attn_implementation": run.model.attn_implementation, "trust_remote_code": run.model.trust_remote_code}
    model = build_meta_model(files.config, compute_dtype=dtype, **given)
    structure = dissect(model)
    if run.model.init == "pretrained" and read_weights:
        check_weights(files.folder, structure)
    if run.engine == "host":
        verify_family(files.config, parity_engine, trust_remote_code=run.model.trust_remote_code)
    if run.data.packing:
        verify_packing(files.config, **given)
    names = [name for unit in structure.units for _, name in unit.full_names()]
    for group in unmatched_groups(names, optimizer(run)):
        raise UserError(
            f"no parameter matches the pattern {group.pattern!r}", "optim.groups", f"names are like {names[1]}"
        )
    log(
        f"model {files.folder}: {type(model).__name__}, {abbreviated(structure.param_count)} parameters in "
        f"{counted(len(structure.layers), 'layer')}, {dtype_name(dtype)} compute on {device}, fp32 master weights and moments"
    )
    return sum(unit.layout.numel for unit in structure.units)


def _check_memory(run: RunConfig, files: ModelFiles, log: Callable[[str], None]) -> None:
    """Compare the run with the machine's memory, by its plan on a GPU and by formula on a CPU. Raises PlanRefused."""
    if device_of(run.run.device).type == "cuda":
        log(plan_text(plan_run(run)))
        return
    lines = check_cpu_memory(run, files.config)
    log(f"host memory: {gib(sum(lines.values()))} needed, {gib(available_host_bytes())} available")


def _check_disk(run: RunConfig, checkpoint_bytes: int, total_steps: int, log: Callable[[str], None]) -> None:
    count = checkpoints_at_once(run, total_steps)
    if count:
        log(f"disk: {gib(checkpoint_bytes)} per checkpoint, at most {count} at once, in {run.run.dir}")
    else:
        log("disk: no checkpoint is configured (checkpoint.every_steps, checkpoint.at_end)")
    refuse_if_disk_too_small(run, checkpoint_bytes, count)


def _warn(run: RunConfig, loader: StepLoader) -> None:
    """Log settings that work, but hardly as intended."""
    if loader.rows_per_epoch < loader.rows_per_step:
        logger.warning(
            "batch.tokens_per_step: a step is %s but an epoch only %s: every step is one epoch, and smaller than configured; "
            "%s tokens or fewer give several steps per epoch",
            counted(loader.rows_per_step, "row"),
            counted(loader.rows_per_epoch, "row"),
            f"{max(1, loader.rows_per_epoch // 2) * run.data.max_tokens:,}",
        )
    asked = [name for name in ("every_steps", "at_start") if getattr(run.eval, name)]
    if run.data.val is None and asked:
        logger.warning("eval.%s is set, but data.val is not: nothing will be evaluated", asked[0])
    if run.optim.learning_rate > HIGH_RATE:
        logger.warning(
            "optim.learning_rate: %g will most likely diverge with AdamW: usual are 1e-6 to 1e-4 for fine-tuning, 1e-4 to 1e-3 "
            "from random weights",
            run.optim.learning_rate,
        )
