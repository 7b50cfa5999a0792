"""The cluster plan of a run's file: `megatrain plan RUN.yaml --machine CLUSTER.yaml --world N`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatrain.config.schema import ParallelConfig, RunConfig
from megatrain.engine.mesh.layout import Layout
from megatrain.errors import UserError
from megatrain.machine.machine import Cluster, load_cluster
from megatrain.models.build import build_meta_model, find_model_folder, load_model_config
from megatrain.models.structure import dissect
from megatrain.planner.choice import StepSize
from megatrain.planner.cluster.job import ENGINE, Job, Practice, Way
from megatrain.planner.cluster.plan import ClusterPlan, plan_cluster
from megatrain.planner.cluster.shards import Inventory
from megatrain.planner.model_cost import shape_of
from megatrain.planner.run import warnings_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def plan_cluster_run(run: RunConfig, *, machine_file: str | Path, world: int) -> ClusterPlan:
    """Rank the layouts of a run. Reads the model's config and no weights; needs no GPU.

    Args:
        run: The config. Its `parallel` section, if it says anything, is judged beside the best.
        machine_file: A cluster's file.
        world: Number of GPUs.

    Raises:
        UserError: The model or the file is not usable, or the GPUs do not fill nodes.
        PlanRefused: No layout fits.
    """
    cluster = load_cluster(machine_file)
    if world > cluster.gpus_per_node and world % cluster.gpus_per_node:
        below = world // cluster.gpus_per_node * cluster.gpus_per_node
        raise UserError(
            f"{world} GPUs do not fill nodes of {cluster.gpus_per_node}",
            "--world",
            f"{below} or {below + cluster.gpus_per_node} would",
        )
    folder = find_model_folder(run.model.path)
    config = load_model_config(folder, run.model.trust_remote_code)
    job = job_of(
        config,
        cluster,
        world,
        StepSize(run.rows_per_step, run.data.max_tokens),
        name=folder.name,
        compute_bytes=4 if run.precision.compute_dtype == "fp32" else 2,
        trust_remote_code=run.model.trust_remote_code,
    )
    practice = replace(job.practice, compiled="plain" if run.activations.compile == "auto" else "none")
    job = replace(job, background=run.checkpoint.background, practice=practice)
    made = plan_cluster(job, config, yours=_own_way(run, world), steps=run.schedule.steps)
    return replace(made, warnings=warnings_of(run, config))


def job_of(
    config: PreTrainedConfig,
    cluster: Cluster,
    world: int,
    step: StepSize,
    *,
    name: str,
    practice: Practice = ENGINE,
    compute_bytes: int = 2,
    trust_remote_code: bool = False,
) -> Job:
    """A job of a model's config; builds it on meta."""
    meta = build_meta_model(config, compute_dtype=torch.float32, trust_remote_code=trust_remote_code)
    shape = shape_of(config, name=name, trust_remote_code=trust_remote_code)
    return Job(Inventory.of(dissect(meta), shape), cluster, world, step, practice, compute_bytes)


def _own_way(run: RunConfig, world: int) -> Way | None:
    """What the file's `parallel` section says, None if it says nothing."""
    if run.parallel == ParallelConfig():
        return None
    layout = Layout(**run.parallel.sizes_for(world))
    splits = layout.pipeline > 1 and layout.kind.splits_backward
    return Way(layout, recompute=run.activations.policy not in (("keep", "auto") if splits else ("keep",)))
