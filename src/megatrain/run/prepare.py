"""Everything that can be known about a run before it trains: `megatrain check`, and the first thing `train` does.

Three stages, each slower than the one before: paths, folders and settings (preflight.py); the model's structure, family and
shapes, memory and disk; the data, which have to be tokenised once. A stage reports all its problems together, and the next one
starts only when there are none.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from megatrain.checkpoint.reader import saved_extra
from megatrain.checkpoint.writer import checkpoint_size
from megatrain.config.schema import ChangeName, RunConfig
from megatrain.data.load import load_data, load_val
from megatrain.data.rows import PackedRows, StepLoader
from megatrain.engine.host.engine import parity_engine
from megatrain.engine.mesh.layout import Layout
from megatrain.engine.parity_check import verify_family, verify_packing, verify_padding
from megatrain.engine.plan import compute_dtype_of, device_of
from megatrain.errors import Problems, UserError
from megatrain.host_memory.available import available_host_bytes
from megatrain.metrics.logger import RunLogger, quiet_libraries
from megatrain.models.build import build_meta_model
from megatrain.models.routers import BIAS, BIAS_KEY, correction_biases, router_loss, trained_biases
from megatrain.models.structure import dissect
from megatrain.models.weights import check_weights
from megatrain.optim.configured import optimizer
from megatrain.optim.spec import unmatched_groups
from megatrain.planner.cpu import RESERVE, check_cpu_memory
from megatrain.planner.keep import differing, plain_choice, plan_settings
from megatrain.planner.model_cost import active_parameters
from megatrain.planner.plan import Plan
from megatrain.planner.report import plan_text
from megatrain.planner.run import plan_run
from megatrain.run.engine_factory import advice_on_layout, check_mesh, trainable
from megatrain.run.folder import RunFolder
from megatrain.run.preflight import ModelFiles, preflight, preflight_data, preflight_model, steps_of
from megatrain.run.resume import Past, Start, past_of
from megatrain.run.saves import checkpoints_at_once, refuse_if_disk_too_small, weights_to_come
from megatrain.run.shipping import shipped_files
from megatrain.units import abbreviated, counted, dtype_name, gib, gibs

logger = logging.getLogger(__name__)

WEIGHT_BYTES = 2
"""Of a parameter in a folder of weights, which is bf16."""
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
    plan: Plan | None = None  # of the host engine on a GPU
    shipped: Mapping[str, bytes | None] = field(default_factory=dict)  # see `shipped_files`


def prepare(
    run: RunConfig,
    *,
    resume: str | None,
    allow_changes: Collection[ChangeName] = (),
    today: str | None = None,
    log: Callable[[str], None],
    saves: bool = True,
) -> Prepared:
    """Check a run and return its parts. Data are tokenised here, or read from the cache; weights are not read.

    Args:
        run: The config.
        resume: As for `train`.
        allow_changes: What may differ from the checkpoint's run, besides `run.allow_changes`.
        today: The date for chat templates that read it, YYYY-MM-DD, in a run that begins; None: this machine's.
        log: Takes the findings, a line each.
        saves: False for steps whose checkpoints are not the run's: their space is not checked.

    Raises:
        UserError, PlanRefused: All problems of the first stage that has any, in one error.
    """
    allowed: set[ChangeName] = {*allow_changes, *run.run.allow_changes}
    problems = Problems()
    start, files = preflight(run, problems, resume=resume, allowed=allowed)
    layout: Layout | None = None
    if run.engine == "mesh":
        with problems.collect():
            layout = check_mesh(run)
    problems.raise_all()
    assert files is not None, "the model could not be opened without a problem"

    parameters, frozen, plan = 0, 0, None
    with problems.collect():
        parameters, frozen = _check_model(run, files, log, read_weights=start.start_from is None)
    checkpoint_bytes = checkpoint_size(files.folder, run.model.trust_remote_code, parameters, optimizer(run), frozen)
    if parameters:
        if run.engine == "host":
            with problems.collect():
                plan = _check_memory(run, files, start, log)
        if saves and run.schedule.steps is not None:
            with problems.collect():
                _check_disk(run, start, checkpoint_bytes, parameters, run.schedule.steps, log)
    problems.raise_all()

    computed = _how_steps_are_computed(run, plan, layout)
    _say_what_changed(start, computed, plan)

    date = run.data.date or start.then.get("date") or today or datetime.date.today().isoformat()
    rows, val = load_data(
        run.data,
        files.tokenizer,
        vocab_size=files.vocab_size,
        model_max_length=files.positions,
        seed=run.run.seed,
        date=date,
        log=log,
    )
    loader = StepLoader(rows, run.rows_per_step, seed=run.run.seed)
    steps = steps_of(run, loader.steps_per_epoch)
    log(
        f"{counted(steps.total, 'step')} of {run.batch.tokens_per_step:,} tokens ({loader.steps_per_epoch:,} per epoch); "
        f"{run.schedule.kind} schedule, {counted(steps.warmup, 'step')} of warm-up to {run.optim.learning_rate:g}"
    )
    if saves and run.schedule.steps is None:
        _check_disk(run, start, checkpoint_bytes, parameters, steps.total, log)
    _warn(run, loader)
    past = past_of(run, start, loader, val, steps, date, allowed)
    return Prepared(
        run=run,
        model_folder=files.folder,
        start_from=start.start_from,
        loader=loader,
        val=val,
        total_steps=steps.total,
        learning_rate_at=steps.learning_rate_at,
        past=replace(past, remembered={**past.remembered, "plan": computed}),
        plan=plan,
        checkpoint_bytes=checkpoint_bytes,
        shipped=shipped_files(run, files.folder, files.config, files.tokenizer, rows, log),
    )


def check(run: RunConfig, *, resume: str | None = None, allow_changes: Collection[ChangeName] = ()) -> None:
    """Run every check that `train` (with the same arguments) runs before the first step, and print the findings.

    Raises:
        UserError, PlanRefused: What would stop `train`, all problems in one error.
    """
    quiet_libraries()
    with RunLogger() as log:
        prepare(run, resume=resume, allow_changes=allow_changes, log=log.info)
        for line in advice_on_layout(run, measure=True) if run.engine == "mesh" else ():
            log.warning(line)
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
        date=_date_of(files.folder),
        log=log,
    )
    return files.folder, rows


def _date_of(folder: Path) -> str | None:
    """The date that the run of a checkpoint gave its chat template; None if the folder is none of a run."""
    try:
        return saved_extra(folder).get("date")
    except UserError:
        return None


def _check_model(
    run: RunConfig, files: ModelFiles, log: Callable[[str], None], *, read_weights: bool
) -> tuple[int, int]:
    """Check structure and family of the model, and the shapes of its weights if they will be read; builds it without storage.

    Returns:
        Parameters of the model, and how many of them are frozen, padding included; tied ones count once.
    """
    device = device_of(run.run.device)
    dtype = compute_dtype_of(run.precision.compute_dtype, device)
    given = {"attn_implementation": run.model.attn_implementation, "trust_remote_code": run.model.trust_remote_code}
    model = build_meta_model(files.config, compute_dtype=dtype, **given)
    trainable(run).apply(model)
    structure, auxiliary = dissect(model), router_loss(model, run.model.router_aux_loss)
    if run.model.init == "pretrained" and read_weights:
        check_weights(files.folder, structure)
    if run.engine == "host":
        verify_family(
            files.config,
            parity_engine,
            trust_remote_code=run.model.trust_remote_code,
            router_loss=auxiliary is not None,
        )
    verify = verify_packing if run.data.packing else verify_padding
    verify(files.config, max_tokens=run.data.max_tokens, **given)
    names = [name for unit in structure.units for _, name in unit.full_names()]
    for group in unmatched_groups(names, optimizer(run)):
        raise UserError(
            f"no parameter matches the pattern {group.pattern!r}", "optim.groups", f"names are like {names[1]}"
        )
    active = active_parameters(structure)
    of_these = f" ({abbreviated(active)} active for a token)" if active < structure.param_count else ""
    log(
        f"model {files.folder}: {type(model).__name__}, {abbreviated(structure.param_count)} parameters{of_these} in "
        f"{counted(len(structure.layers), 'layer')}, {dtype_name(dtype)} compute on {device}, fp32 master weights and moments"
    )
    speed = run.model.router_bias_update_speed
    biases = trained_biases(model, structure.layers_name, speed) or correction_biases(model, structure.layers_name)
    if biases:
        how = (
            f"follow the load of the experts, {BIAS_KEY}: {speed:g}" if speed else f"are not trained ({BIAS_KEY}: null)"
        )
        log(f"correction biases of the routers ({BIAS}) {how}")
    if auxiliary is not None:
        log(
            f"auxiliary loss of the routers: on, coefficient {auxiliary.coefficient:g} (aux_loss in the records, not in loss)"
        )
    if structure.trained_count < structure.param_count:
        trained, every = structure.trained_count, structure.param_count
        log(f"training {abbreviated(trained)} of {abbreviated(every)} parameters ({100 * trained / every:.3g}%)")
    layouts = [unit.layout for unit in structure.units]
    return sum(layout.numel for layout in layouts), sum(layout.frozen_numel for layout in layouts)


def _check_memory(run: RunConfig, files: ModelFiles, start: Start, log: Callable[[str], None]) -> Plan | None:
    """Compare the run with the machine's memory, by its plan on a GPU and by formula on a CPU. Raises PlanRefused.

    Returns:
        The plan, on a GPU.
    """
    if device_of(run.run.device).type == "cuda":
        plan = plan_run(run, then=start.then.get("plan"))
        log(plan_text(plan))
        return plan
    lines = check_cpu_memory(run, files.config)
    needs, kept, available = gibs(sum(lines.values()), lines.get(RESERVE, 0), available_host_bytes())
    log(f"host memory: {needs} needed, {kept} of it {RESERVE}; {available} available")
    return None


def _how_steps_are_computed(run: RunConfig, plan: Plan | None, layout: Layout | None) -> dict[str, Any]:
    """What a checkpoint remembers of it: see [Note: what a checkpoint remembers of its run] in resume.py."""
    found: dict[str, Any] = {"device": device_of(run.run.device).type, "settings": plan_settings(run)}
    if plan is not None:
        found["choice"] = plain_choice(plan.choice)
    if layout is not None:
        sizes = {f"parallel.{name}": size for name, size in asdict(layout).items()}
        found["layout"] = {name: list(size) if isinstance(size, tuple) else size for name, size in sizes.items()}
    return found


def _say_what_changed(start: Start, computed: Mapping[str, Any], plan: Plan | None) -> None:
    """Name what makes a resumed run compute its steps differently than before: sums are rounded in another order then."""
    then = start.then.get("plan", {})
    if start.start_from is None or not then:
        return
    remarks = list(plan.remarks) if plan is not None else differing(then.get("settings", {}), computed["settings"])
    remarks += differing(then.get("layout", {}), computed.get("layout", {}))
    remarks += differing({"the device": then.get("device")}, {"the device": computed["device"]})
    if remarks:
        text = (
            "steps are computed differently than before step %s's checkpoint, results may differ in their last bits: %s"
        )
        logger.warning(text, start.then["step"], "; ".join(remarks))


def _check_disk(
    run: RunConfig,
    start: Start,
    checkpoint_bytes: int,
    parameters: int,
    total_steps: int,
    log: Callable[[str], None],
) -> None:
    """Compare the run's checkpoints and folders of weights with the disk. What the run has there already counts."""
    folder, step = RunFolder(run.run.dir), int(start.then.get("step", 0))
    there = [other for other in folder.complete_steps() if other <= step]
    count = checkpoints_at_once(run, total_steps, step, there)
    weights = weights_to_come(run, total_steps, step)
    if count:
        of_them = f" ({len(there)} of them there already)" if there else ""
        log(f"disk: {gib(checkpoint_bytes)} per checkpoint, at most {count} at once{of_them}, in {run.run.dir}")
    else:
        log("disk: no checkpoint is configured (checkpoint.every_steps, checkpoint.at_end)")
    if count == len(there):  # none is to come
        count, there = 0, []
    weights_bytes = 0
    if parameters:
        weights_bytes = max(int(checkpoint_bytes * WEIGHT_BYTES // optimizer(run).bytes_per_parameter), 2 * parameters)
    refuse_if_disk_too_small(run, checkpoint_bytes, count, weights * weights_bytes, folder.bytes_there(there))


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
