"""`make_engine`, the one place that chooses between the host and the mesh engine, and the checks of `engine: mesh`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatrain.config.schema import ActivationsConfig, BatchConfig, MemoryConfig, PrecisionConfig, RunConfig, RunSection
from megatrain.engine.base import Engine
from megatrain.engine.mesh import launch
from megatrain.engine.mesh.layout import Layout, MeshPlan
from megatrain.errors import Problems, UserError
from megatrain.models.build import build_meta_model, find_model_folder, load_model_config
from megatrain.models.structure import dissect
from megatrain.optim.adamw import AdamW
from megatrain.planner.cluster.memory import memory_problem
from megatrain.planner.run import execution_plan
from megatrain.run.preflight import optimizer
from megatrain.units import DTYPE_BYTES

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

logger = logging.getLogger(__name__)


def make_engine(
    run: RunConfig,
    model_folder: Path,
    *,
    for_training: bool = True,
    weights: bool = True,
    restarts: int = 0,
    watch: Callable[..., AbstractContextManager[Any]] | None = None,
) -> Engine:
    """The engine of a checked run, with its weights read, or made at random.

    Args:
        run: The config.
        model_folder: The local folder behind `model.path`.
        for_training: False allocates no memory for gradients.
        weights: False leaves the weights to the checkpoint that is loaded next.
        restarts: With `engine: mesh`, how often the run has run out of device memory: see `mesh_plan`.
        watch: With `engine: mesh`, the watchdog's `section`.
    """
    if run.engine == "mesh":
        return _make_mesh_engine(run, model_folder, weights, restarts, watch)
    from megatrain.engine.host.engine import HostEngine
    from megatrain.engine.host.instruments import Debug

    return HostEngine(
        model_folder,
        execution_plan(run, training=for_training),
        optim=optimizer(run) if for_training else AdamW(max_grad_norm=None),
        verify="never",  # `prepare` has verified the family
        debug=Debug(instruments=for_training and run.metrics.instruments),
        **_common(run, weights),
    )


def _make_mesh_engine(
    run: RunConfig,
    model_folder: Path,
    weights: bool,
    restarts: int,
    watch: Callable[..., AbstractContextManager[Any]] | None,
) -> Engine:
    from megatrain.engine.mesh.engine import MeshEngine

    plan = mesh_plan(run, restarts)
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
    }


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
        "precision": (run.precision, PrecisionConfig(), ["grad_transport"]),
        "run": (run.run, RunSection(dir=run.run.dir), ["threads"]),
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


def _gpu_bytes(run: RunConfig) -> int | None:
    """Memory of this process's GPU, without initialising it; None on a CPU."""
    if run.run.device == "cpu" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(launch.device_of_rank(run.run.device)).total_memory
