"""Everything that can be known about a run before it trains: `megatrain check`, and the first thing `train` does.

Three stages, each slower than the one before: paths, folders and settings (preflight.py); the model's structure, family and
shapes, memory and disk; the data, which have to be tokenised once. A stage says all its problems together, and none begins
while an earlier one has any.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megatrain.config.schema import ChangeName, RunConfig
from megatrain.errors import Problems, UserError
from megatrain.metrics.logger import RunLogger, quiet_libraries
from megatrain.run import ledger
from megatrain.run.preflight import (
    ModelFiles,
    Steps,
    optimizer,
    preflight,
    preflight_data,
    preflight_model,
    steps_of,
)
from megatrain.run.resume import Past, past_of
from megatrain.units import DtypeName, abbreviated, counted, dtype_name, gib

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from megatrain.data.rows import PackedRows, StepLoader
    from megatrain.engine.base import Engine
    from megatrain.engine.mesh.engine import MeshEngine
    from megatrain.engine.mesh.layout import Layout, MeshPlan

logger = logging.getLogger(__name__)

HIGH_RATE = 0.1
"""Learning rates above this are taken for slips. They may be meant (of a toy), so a run with one starts all the same."""


@dataclass(frozen=True)
class Prepared:
    """A run whose parts are known to be there and to fit together.

    Attributes:
        run: The config.
        model_folder: The local folder behind `model.path`.
        start_from: The checkpoint to resume from; None for a run from the beginning.
        loader: Training batches.
        val: Held-out rows.
        total_steps: Length of the run in optimizer steps.
        learning_rate_at: Learning rate of a step, 0 the first.
        past: The run so far.
        checkpoint_bytes: Size of a checkpoint.
    """

    run: RunConfig
    model_folder: Path
    start_from: Path | None
    loader: StepLoader
    val: PackedRows | None
    total_steps: int
    learning_rate_at: Callable[[int], float]
    past: Past
    checkpoint_bytes: int


def check(run: RunConfig, *, resume: str | None = None, allow_changes: Collection[ChangeName] = ()) -> None:
    """Look at everything that `train` would need, and say what was found.

    Args:
        run: The config; see `load_config`.
        resume, allow_changes: As for `train`.

    Raises:
        UserError, PlanRefused: What would stop `train`, all problems in one error.
    """
    quiet_libraries()
    with RunLogger() as log:
        prepare(run, resume=resume, allow_changes=allow_changes, log=log.info)
        log.info("all checks passed")


def prepare(
    run: RunConfig, *, resume: str | None, allow_changes: Collection[ChangeName] = (), log: Callable[[str], None]
) -> Prepared:
    """Check a run and return its parts. Data are tokenised here, or read from the cache; weights are not read.

    Args:
        run: The config.
        resume: As for `train`.
        allow_changes: What may differ from the checkpoint's run, beside `run.allow_changes`.
        log: Takes lines for people.

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

    model = None
    with problems.collect():
        model = _look_at_model(run, files, log, read_weights=start.start_from is None)
    if model is not None:
        if run.engine == "host":
            with problems.collect():
                _check_memory(run, model, log)
        if run.schedule.steps is not None:
            with problems.collect():
                _check_disk(run, model, run.schedule.steps, log)
    problems.raise_all()
    assert model is not None, "a look failed without a problem"

    data = _look_at_data(run, files, log)
    steps = steps_of(run, data.loader.steps_per_epoch)
    _say_steps(run, steps, data.loader, log)
    _warn_of_large_step(run, data.loader)
    if run.schedule.steps is None:
        _check_disk(run, model, steps.total, log)
    _warn_of_no_validation(run)
    _warn_of_high_rate(run)
    return Prepared(
        run=run,
        model_folder=files.folder,
        start_from=start.start_from,
        loader=data.loader,
        val=data.val,
        total_steps=steps.total,
        learning_rate_at=steps.learning_rate_at,
        past=past_of(run, start, data.loader, data.val, steps, allowed),
        checkpoint_bytes=ledger.checkpoint_bytes(model.shape),
    )


def prepare_eval(run: RunConfig, *, log: Callable[[str], None]) -> tuple[Path, PackedRows]:
    """Check what an evaluation needs, and return the model's folder and the held-out rows.

    Raises:
        UserError, PlanRefused: All problems in one error.
    """
    from megatrain.data.load import load_val

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
    _look_at_model(run, files, log, read_weights=True)
    rows = load_val(
        run.data,
        files.tokenizer,
        vocab_size=files.vocab_size,
        model_max_length=files.positions,
        seed=run.run.seed,
        log=log,
    )
    return files.folder, rows


def check_mesh(run: RunConfig) -> Layout:
    """The resolved layout of a run with `engine: mesh`. Needs the model's config and the number of processes, no more.

    Raises:
        UserError: All reasons why it cannot run.
    """
    from megatrain.config.schema import ActivationsConfig, BatchConfig, MemoryConfig, PrecisionConfig, RunSection
    from megatrain.engine.mesh import launch
    from megatrain.engine.mesh.layout import Layout
    from megatrain.models.build import find_model_folder, load_model_config

    problems = Problems()
    of_the_host_engine = tuple(name for name in MemoryConfig.model_fields if name != "host_reserve_gib")
    sections = [
        ("memory", run.memory, MemoryConfig(), of_the_host_engine),
        (
            "batch",
            run.batch,
            BatchConfig(tokens_per_step=run.batch.tokens_per_step),
            ("microbatch_rows", "accumulation_steps"),
        ),
        (
            "activations",
            run.activations,
            ActivationsConfig(),
            ("segment", "offload_input", "attention", "mlp", "mlp_chunk_tokens"),
        ),
        ("precision", run.precision, PrecisionConfig(), ("grad_transport",)),
        ("run", run.run, RunSection(dir=run.run.dir), ("threads",)),
    ]
    for section, given, default, names in sections:
        for name in names:
            if getattr(given, name) != getattr(default, name):
                problems.found.append(
                    UserError("is a setting of the host engine", f"{section}.{name}", "leave it out with engine: mesh")
                )
    for name, value in run.alerts:
        if value == "rollback":
            problems.found.append(
                UserError(
                    "ranks see different times, and cannot go back each by itself", f"alerts.{name}", "use save or stop"
                )
            )
    if run.precision.compute_dtype == "fp16":
        problems.found.append(
            UserError("fp16 is not computed by the mesh engine", "precision.compute_dtype", "use bf16 or fp32")
        )
    layout = Layout(**run.parallel.sizes_for(launch.world_size()))
    with problems.collect():
        config = load_model_config(find_model_folder(run.model.path), run.model.trust_remote_code)
        layout = layout.checked(config, launch.world_size(), run.rows_per_step)
        _check_mesh_memory(run, layout, config)
    problems.raise_all()
    return layout


def _check_mesh_memory(run: RunConfig, layout: Layout, config: PreTrainedConfig) -> None:
    """Refuse a layout whose parameters, gradients and moments alone are more than a GPU has; on a CPU nothing is known."""
    import torch

    from megatrain.models.build import build_meta_model
    from megatrain.models.structure import dissect
    from megatrain.planner.cluster.memory import memory_problem

    device_bytes = _gpu_bytes(run)
    if device_bytes is None:
        return
    meta = build_meta_model(config, compute_dtype=torch.float32, trust_remote_code=run.model.trust_remote_code)
    compute_bytes = 4 if run.precision.compute_dtype == "fp32" else 2
    problem = memory_problem(dissect(meta), layout, device_bytes, compute_bytes, optimizer(run))
    if problem is not None:
        raise UserError(
            f"this layout does not fit: {problem}", "parallel", "`megatrain plan --world N` ranks those that do"
        )


def _gpu_bytes(run: RunConfig) -> int | None:
    """Memory of this process's GPU, without starting to use it; None on a CPU."""
    import torch

    from megatrain.engine.mesh import launch

    if run.run.device == "cpu" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(launch.device_of_rank(run.run.device)).total_memory


def make_engine(
    run: RunConfig, model_folder: Path, *, for_training: bool = True, weights: bool = True, reductions: int = 0
) -> Engine:
    """The engine of a run whose parts have been checked. Reads the weights, or makes random ones.

    Args:
        model_folder: The local folder behind `model.path`.
        for_training: False leaves out the memory of gradients.
        weights: False leaves the weights to a checkpoint that is loaded next.
        reductions: As for `mesh_plan`.
    """
    if run.engine == "mesh":
        return _make_mesh_engine(run, model_folder, weights, reductions)
    from megatrain.engine.host.engine import HostEngine
    from megatrain.engine.host.instruments import Debug
    from megatrain.optim.adamw import AdamW
    from megatrain.planner.run import execution_plan

    return HostEngine(
        model_folder,
        execution_plan(run, training=for_training),
        optim=optimizer(run) if for_training else AdamW(max_grad_norm=None),
        seed=run.run.seed,
        device=run.run.device,
        init="empty" if not weights else "random" if run.model.init == "random" else None,
        verify="never",  # `prepare` has verified the family
        trust_remote_code=run.model.trust_remote_code,
        debug=Debug(instruments=for_training and run.metrics.instruments),
    )


def mesh_plan(run: RunConfig, reductions: int = 0) -> MeshPlan:
    """The plan of a run with `engine: mesh`.

    Args:
        reductions: How often the run has run out of device memory: the plan is reduced that many times, if it can be.
    """
    from megatrain.engine.mesh.layout import MeshPlan

    layout = check_mesh(run)
    splits = layout.pipeline > 1 and layout.kind.splits_backward
    policy = run.activations.policy
    if policy == "selective":
        logger.warning("activations.policy: selective was asked for; the mesh engine recomputes whole layers instead")
    # A schedule that splits the backward is chosen for speed, so recompute is asked for by name there.
    recompute = policy not in (("keep", "auto") if splits else ("keep",))
    compute = run.precision.compute_dtype
    assert compute != "fp16", "refused by check_mesh"
    plan = MeshPlan(layout, recompute, run.activations.compile, compute)
    for _ in range(reductions):
        plan = plan.reduced(run.rows_per_step) or plan
    return plan


def _make_mesh_engine(run: RunConfig, model_folder: Path, weights: bool, reductions: int) -> MeshEngine:
    from megatrain.engine.mesh.engine import MeshEngine

    plan = mesh_plan(run, reductions)
    if reductions > 0:
        logger.warning(
            "the run has run out of memory %d times: it goes on with %s (RUN/denser)",
            reductions, plan.reduced_by or "the config",
        )  # fmt: skip
    return MeshEngine(
        model_folder,
        plan,
        device=run.run.device,
        optim=optimizer(run),
        init="empty" if not weights else "random" if run.model.init == "random" else None,
        seed=run.run.seed,
        trust_remote_code=run.model.trust_remote_code,
        attn_implementation=run.model.attn_implementation,
    )


@dataclass(frozen=True)
class _Model:
    """What is known of a model without its weights."""

    shape: ledger.ModelShape
    compute_dtype: DtypeName
    device: Literal["cpu", "cuda"]


@dataclass(frozen=True)
class _Data:
    loader: StepLoader
    val: PackedRows | None


def _look_at_model(run: RunConfig, files: ModelFiles, log: Callable[[str], None], *, read_weights: bool) -> _Model:
    """Structure of the model, built without storage; its family; and the shapes of its weights if they will be read."""

    from megatrain.engine.host.engine import parity_engine
    from megatrain.engine.parity_check import verify_family, verify_packing
    from megatrain.engine.plan import compute_dtype_of, device_of
    from megatrain.models.build import build_meta_model
    from megatrain.models.structure import dissect
    from megatrain.models.weights import check_weights
    from megatrain.optim.spec import unmatched_groups

    config = files.config
    device = device_of(run.run.device)
    dtype = compute_dtype_of(run.precision.compute_dtype, device)
    model = build_meta_model(
        config,
        compute_dtype=dtype,
        attn_implementation=run.model.attn_implementation,
        trust_remote_code=run.model.trust_remote_code,
    )
    structure = dissect(model)
    if run.model.init == "pretrained" and read_weights:
        check_weights(files.folder, structure)
    if run.engine == "host":
        verify_family(config, parity_engine, trust_remote_code=run.model.trust_remote_code)
    if run.data.packing:
        verify_packing(
            config,
            attn_implementation=run.model.attn_implementation,
            trust_remote_code=run.model.trust_remote_code,
        )
    names = [name for unit in structure.units for _, name in unit.full_names()]
    for group in unmatched_groups(names, optimizer(run)):
        raise UserError(
            f"no parameter matches the pattern {group.pattern!r}", "optim.groups", f"names are like {names[1]}"
        )
    text = config.get_text_config()
    shape = ledger.ModelShape(
        params=sum(unit.layout.numel for unit in structure.units),
        largest_layer=max(unit.layout.numel for unit in structure.layers),
        edges=structure.embedding.layout.numel + structure.head.layout.numel,
        layers=len(structure.layers),
        hidden_size=text.hidden_size,
    )
    log(
        f"model {files.folder}: {type(model).__name__}, {abbreviated(structure.param_count)} parameters in "
        f"{counted(shape.layers, 'layer')}; computes in {dtype_name(dtype)} on {device}, fp32 master weights and moments"
    )
    return _Model(shape=shape, compute_dtype=dtype_name(dtype), device="cuda" if device.type == "cuda" else "cpu")


def _look_at_data(run: RunConfig, files: ModelFiles, log: Callable[[str], None]) -> _Data:
    from megatrain.data import load_data
    from megatrain.data.rows import StepLoader

    rows, val = load_data(
        run.data,
        files.tokenizer,
        vocab_size=files.vocab_size,
        model_max_length=files.positions,
        seed=run.run.seed,
        log=log,
    )
    return _Data(StepLoader(rows, run.rows_per_step, seed=run.run.seed), val)


def _say_steps(run: RunConfig, steps: Steps, loader: StepLoader, log: Callable[[str], None]) -> None:
    log(
        f"{counted(steps.total, 'step')} of {run.batch.tokens_per_step:,} tokens ({loader.steps_per_epoch:,} per epoch); "
        f"{run.schedule.kind} schedule, {counted(steps.warmup, 'step')} of warm-up to {run.optim.learning_rate:g}"
    )


def _warn_of_large_step(run: RunConfig, loader: StepLoader) -> None:
    if loader.rows_per_epoch < loader.rows_per_step:
        logger.warning(
            "batch.tokens_per_step: a step would take %s, an epoch has %s: every step is one epoch, and smaller than asked "
            "for; %s tokens or fewer make several steps of it",
            counted(loader.rows_per_step, "row"),
            counted(loader.rows_per_epoch, "row"),
            f"{max(1, loader.rows_per_epoch // 2) * run.data.max_tokens:,}",
        )


def _warn_of_no_validation(run: RunConfig) -> None:
    asked = [name for name in ("every_steps", "at_start") if getattr(run.eval, name)]
    if run.data.val is None and asked:
        logger.warning("eval.%s is set, but data.val is not: nothing will be evaluated", asked[0])


def _warn_of_high_rate(run: RunConfig) -> None:
    """AdamW moves a weight by about the learning rate in a step, and weights are mostly smaller than 0.1."""
    if run.optim.learning_rate > HIGH_RATE:
        logger.warning(
            "optim.learning_rate: %g is far above what AdamW usually gets, and will most likely diverge: usual are 1e-6 to 1e-4 "
            "for fine-tuning, 1e-4 to 1e-3 from random weights",
            run.optim.learning_rate,
        )


def _check_memory(run: RunConfig, model: _Model, log: Callable[[str], None]) -> None:
    """Compare the run with the machine's memory: by the plan on a GPU, by the planes on a CPU. Raises PlanRefused."""
    if model.device == "cuda":
        from megatrain.planner.report import plan_text
        from megatrain.planner.run import plan_run

        log(plan_text(plan_run(run)))
        return
    needed = ledger.memory_ledger(model.shape, run, device=model.device, compute_dtype=model.compute_dtype)
    host_available = ledger.host_available_bytes(run.memory.host_gib)
    log(f"host memory: {gib(needed.host_bytes)} needed, {gib(host_available)} available")
    ledger.refuse_if_too_large(needed, host_available=host_available, device_available=None, run=run)


def _check_disk(run: RunConfig, model: _Model, total_steps: int, log: Callable[[str], None]) -> None:
    one, count = ledger.checkpoint_bytes(model.shape), ledger.checkpoints_at_once(run, total_steps)
    if count:
        log(f"disk: {gib(one)} a checkpoint, at most {count} at once, in {run.run.dir}")
    else:
        log(f"disk: {gib(one)} a checkpoint; the config asks for none (checkpoint.every_steps, checkpoint.at_end)")
    ledger.refuse_if_disk_too_small(run, one, count)
