"""`make_engine`, the one place that chooses between the host and the mesh engine, and the checks of `engine: mesh`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from megatrain.config.schema import (
    ActivationsConfig,
    BatchConfig,
    MemoryConfig,
    OptimConfig,
    PrecisionConfig,
    RunConfig,
    RunSection,
    TrainConfig,
)
from megatrain.data.rows import PackedRows, StepLoader
from megatrain.engine.base import Engine, refuse_dropout
from megatrain.engine.batches import BatchShape
from megatrain.engine.host.oom import config_changes
from megatrain.engine.mesh import launch
from megatrain.engine.mesh.layout import Layout, MeshPlan
from megatrain.engine.plan import ExecutionPlan
from megatrain.errors import Problems, UserError
from megatrain.machine.gpus import stay_near_gpu
from megatrain.machine.probe import known_machine, probe
from megatrain.models.build import build_meta_model, find_model_folder, load_model_config
from megatrain.models.structure import dissect
from megatrain.models.trainable import Trainable
from megatrain.optim.adamw import AdamW
from megatrain.optim.configured import optimizer
from megatrain.planner.cluster.memory import memory_problem
from megatrain.planner.cluster.plan import faster_than_layout
from megatrain.planner.plan import Plan
from megatrain.planner.run import execution_plan
from megatrain.units import DTYPE_BYTES

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

logger = logging.getLogger(__name__)


SHARES = (1, 2, 4)
"""Unpacked rows are padded to the longest row of the set, or to a half or a quarter of it."""
P = TypeVar("P", ExecutionPlan, MeshPlan)


@dataclass(frozen=True)
class Shapes:
    """Shapes of a run's batches; None: unknown, or there are no such batches. See [Note: one shape] in engine/batches.py."""

    train: BatchShape | None = None
    eval: BatchShape | None = None

    @classmethod
    def of(cls, rows_per_batch: int, loader: StepLoader | None, val: PackedRows | None) -> Shapes:
        """The shapes of the batches of a run.

        Args:
            rows_per_batch: `RunConfig.rows_per_step`.
            loader: The training batches; None for an evaluation.
            val: The held-out rows.
        """
        train = evaluation = None
        if loader is not None:
            first_steps = (loader.rows_of(step).tolist() for step in range(min(loader.steps_per_epoch, 1000)))
            train = _shape_of(loader.rows, min(rows_per_batch, loader.rows_per_epoch), first_steps)
        if val is not None and len(val):
            largest = max(len(group) for group in val.groups)  # sources are evaluated one by one
            batches = (
                range(first, min(first + rows_per_batch, len(val))) for first in range(0, len(val), rows_per_batch)
            )
            evaluation = _shape_of(val, min(rows_per_batch, largest), batches)
        return cls(train, evaluation)

    def on(self, plan: P, run: RunConfig) -> P:
        """A plan for batches of these shapes, deterministic if the run is to be."""
        deterministic = run.run.deterministic is True
        return replace(plan, deterministic=deterministic, train_shape=self.train, eval_shape=self.eval)


def _shape_of(rows: PackedRows, count: int, batches: Iterable[Sequence[int]]) -> BatchShape:
    """The shape of batches of at most `count` rows; `batches` are examples."""
    if rows.packing:
        return BatchShape(count, (rows.max_tokens,), rows.shared)
    longest = min(rows.max_tokens, -(-rows.stats.longest // 64) * 64)
    lengths = sorted({max(2, longest // share) for share in SHARES})
    used = {next(length for length in lengths if length >= rows.length_of(batch)) for batch in batches}
    return BatchShape(count, tuple(sorted({*used, longest})))


def make_engine(
    run: RunConfig,
    model_folder: Path,
    *,
    for_training: bool = True,
    weights: bool = True,
    shapes: Shapes = Shapes(),
    plan: Plan | None = None,
    restarts: int = 0,
    watch: Callable[..., AbstractContextManager[Any]] | None = None,
) -> Engine:
    """The engine of a checked run, with its weights read, or made at random.

    Args:
        run: The config.
        model_folder: The local folder behind `model.path`.
        for_training: False allocates no memory for gradients.
        weights: False leaves the weights to the checkpoint that is loaded next.
        shapes: The shapes of the run's batches; see `Shapes.of`.
        plan: With `engine: host` on a GPU, the run's plan, if it was made already.
        restarts: How often the ranks of the run have run out of device memory; the plan is reduced as often.
        watch: The watchdog's `section`, where there are several ranks.
    """
    if run.engine == "mesh":
        return _make_mesh_engine(run, model_folder, weights, shapes, restarts, watch)
    return _make_host_engine(run, model_folder, for_training, weights, shapes, plan, restarts, watch)


def _make_host_engine(
    run: RunConfig,
    model_folder: Path,
    for_training: bool,
    weights: bool,
    shapes: Shapes,
    made: Plan | None,
    restarts: int,
    watch: Callable[..., AbstractContextManager[Any]] | None,
) -> Engine:
    from megatrain.engine.host.engine import HostEngine
    from megatrain.engine.host.instruments import Debug

    group = dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None
    given = _common(run, weights)
    if group is not None:
        given["device"] = launch.device_of_rank(run.run.device)
        stay_near_gpu(given["device"], launch.local_world_size())
    engine = HostEngine(
        model_folder,
        shapes.on(_host_plan(run, model_folder, for_training, made, restarts), run),
        optim=optimizer(run) if for_training else AdamW(max_grad_norm=None),
        verify="never",  # `prepare` has verified the family
        trainable=trainable(run),
        debug=Debug(instruments=for_training and run.metrics.instruments),
        group=group,
        timeout=launch.collective_timeout(),
        **given,
    )
    if watch is not None:
        engine.watch = watch
    return engine


def _host_plan(run: RunConfig, model_folder: Path, training: bool, made: Plan | None, restarts: int) -> ExecutionPlan:
    """The plan of a run with `engine: host`; on several ranks that of rank 0, on all of them. Collective.

    Raises:
        PlanRefused: It cannot be reduced as often as the ranks have run out of memory.
    """
    plan, shared = None, dist.is_initialized() and dist.get_world_size() > 1
    if not shared or dist.get_rank() == 0:
        plan = execution_plan(run, training=training, made=made)
        if restarts:
            config = load_model_config(model_folder, run.model.trust_remote_code)
            meta = build_meta_model(config, compute_dtype=torch.bfloat16, trust_remote_code=run.model.trust_remote_code)
            device = launch.device_of_rank(run.run.device)
            whole = plan.for_device(device, optimizer(run)).for_model(
                dissect(meta), config.get_text_config().vocab_size
            )
            rows = -(-run.rows_per_step // launch.world_size())
            plan = whole.reduced_by_steps(restarts, rows, run.data.max_tokens)
            now = ", ".join(f"{setting}: {value}" for setting, value in config_changes(whole, plan).items())
            logger.warning("out of device memory %d times so far (RUN/denser): using a smaller plan: %s", restarts, now)
    if shared:
        plans = [plan]
        dist.broadcast_object_list(plans, src=0)
        plan = plans[0]
    assert plan is not None
    return plan


def check_host_ranks(run: RunConfig) -> None:
    """Check a run with `engine: host` on several ranks.

    Raises:
        UserError: All reasons why it cannot run.
    """
    problems = Problems()
    for name, value in run.alerts:
        if value == "rollback":
            what = "ranks see different times and cannot roll back each by itself"
            problems.found.append(UserError(what, f"alerts.{name}", "use save or stop, or run.gpus: 1"))
    world, local = launch.world_size(), launch.local_world_size()
    if run.run.replicate_hosts is True and world % local:
        what = (
            f"hosts with a copy each need the same number of processes; there are {world}, {local} of them on one host"
        )
        problems.found.append(UserError(what, "run.replicate_hosts", "use auto or false, or the same --nproc-per-node"))
    with problems.collect():
        refuse_dropout(load_model_config(find_model_folder(run.model.path), run.model.trust_remote_code))
    problems.raise_all()


def _make_mesh_engine(
    run: RunConfig,
    model_folder: Path,
    weights: bool,
    shapes: Shapes,
    restarts: int,
    watch: Callable[..., AbstractContextManager[Any]] | None,
) -> Engine:
    from megatrain.engine.mesh.engine import MeshEngine

    plan = shapes.on(mesh_plan(run, restarts), run)
    if restarts:
        now = plan.reduced_by or "the config"
        logger.warning("out of device memory %d times so far (RUN/denser): using %s", restarts, now)
    engine = MeshEngine(
        model_folder,
        plan,
        optim=optimizer(run),
        sample_every_steps=run.watchdog.sample_every_steps,
        **_common(run, weights),
    )
    if watch is not None:
        engine.watch = watch
    return engine


def _common(run: RunConfig, weights: bool) -> dict[str, Any]:
    """Arguments of both engines."""
    return {
        "device": run.run.device,
        "init": "empty" if not weights else "random" if run.model.init == "random" else None,
        "seed": run.run.seed,
        "trust_remote_code": run.model.trust_remote_code,
        "router_loss": run.model.router_aux_loss,
        "router_bias_speed": run.model.router_bias_update_speed,
    }


def trainable(run: RunConfig) -> Trainable:
    """The parameters that a run trains."""
    return Trainable(run.train.freeze, run.train.only)


# ---------------------------------------------------------------- engine: mesh


def mesh_plan(run: RunConfig, restarts: int = 0) -> MeshPlan:
    """The plan of a run with `engine: mesh`.

    Args:
        run: The config.
        restarts: Restarts after running out of device memory; the plan is reduced once for each, as far as it can be.
    """
    layout = check_mesh(run)
    policy, compute = run.activations.policy, run.precision.compute_dtype
    if policy == "selective":
        logger.warning("activations.policy: selective is not supported by the mesh engine: recomputing whole layers")
    assert compute != "fp16", "refused by check_mesh"
    attention = run.model.attn_implementation
    plan = MeshPlan(layout, layout.recomputes(policy), run.activations.compile, compute, attention)
    for _ in range(restarts):
        plan = plan.reduced(run.rows_per_step) or plan
    return plan


def check_mesh(run: RunConfig) -> Layout:
    """The resolved layout of a run with `engine: mesh`. Needs the model's config and the number of processes.

    Raises:
        UserError: All reasons why it cannot run.
    """
    problems = Problems()
    for key in _keys_of_the_host_engine(run):
        problems.found.append(UserError("is a setting of the host engine", key, "leave it out with engine: mesh"))
    for name, value in run.alerts:
        if value == "rollback":
            what = "ranks see different times and cannot roll back each by itself"
            problems.found.append(UserError(what, f"alerts.{name}", "use save or stop"))
    if run.precision.compute_dtype == "fp16":
        what = "fp16 is not supported by the mesh engine"
        problems.found.append(UserError(what, "precision.compute_dtype", "use bf16 or fp32"))
    layout = Layout(**run.parallel.sizes_for(launch.world_size()))
    with problems.collect():
        config = load_model_config(find_model_folder(run.model.path), run.model.trust_remote_code)
        layout = layout.checked(config, launch.world_size(), run.rows_per_step)
        _check_mesh_memory(run, layout, config)
    problems.raise_all()
    return layout


def _keys_of_the_host_engine(run: RunConfig) -> list[str]:
    """Keys that the mesh engine would ignore and that are not at their default."""
    sections = {
        "memory": (run.memory, MemoryConfig(), [key for key in MemoryConfig.model_fields if key != "host_reserve_gib"]),
        "batch": (
            run.batch,
            BatchConfig(tokens_per_step=run.batch.tokens_per_step),
            ["microbatch_rows", "accumulation_steps"],
        ),
        "activations": (
            run.activations,
            ActivationsConfig(),
            ["segment", "offload_input", "attention", "mlp", "mlp_chunk_tokens"],
        ),
        "train": (run.train, TrainConfig(), ["freeze", "only"]),
        "optim": (run.optim, OptimConfig(), ["moments"]),
        "precision": (run.precision, PrecisionConfig(), ["grad_transport"]),
        "run": (run.run, RunSection(dir=run.run.dir), ["threads", "replicate_hosts"]),
    }
    return [
        f"{section}.{key}"
        for section, (given, default, keys) in sections.items()
        for key in keys
        if getattr(given, key) != getattr(default, key)
    ]


def _check_mesh_memory(run: RunConfig, layout: Layout, config: PreTrainedConfig) -> None:
    """Refuse a layout whose parameters, gradients and moments alone exceed a GPU; on a CPU nothing is checked."""
    device_bytes = _gpu_bytes(run)
    if device_bytes is None:
        return
    meta = build_meta_model(config, compute_dtype=torch.float32, trust_remote_code=run.model.trust_remote_code)
    compute_bytes = DTYPE_BYTES["fp32" if run.precision.compute_dtype == "fp32" else "bf16"]
    problem = memory_problem(dissect(meta), layout, device_bytes, compute_bytes, optimizer(run))
    if problem is not None:
        raise UserError(
            f"this layout does not fit: {problem}", "parallel", "`megatrain plan --world N` ranks those that do"
        )


def advice_on_layout(run: RunConfig, *, measure: bool) -> list[str]:
    """What is forecast to be faster than the layout of a run with `engine: mesh`, a line each; on a CPU nothing.

    Call it before there is a process group: planning uses a fake one.

    Args:
        run: A run that `check_mesh` accepts.
        measure: Measure this machine where its figures are not known; False: no advice then.
    """
    if run.run.device == "cpu" or not torch.cuda.is_available() or dist.is_initialized():
        return []
    device = launch.device_of_rank(run.run.device)
    machine = known_machine(device) or (probe(device) if measure else None)
    if machine is None or not machine.device_gib:
        return []
    world = launch.world_size()
    return faster_than_layout(run, machine, world, per_node=launch.local_world_size())


def _gpu_bytes(run: RunConfig) -> int | None:
    """Memory of this process's GPU, without initialising it; None on a CPU."""
    if run.run.device == "cpu" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(launch.device_of_rank(run.run.device)).total_memory
