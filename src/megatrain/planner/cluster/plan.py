"""`plan_cluster`: from a request to its best layouts, each checked against the engine's own code on a fake process group.

`megatrain plan RUN.yaml --machine CLUSTER.yaml --world N` calls `plan_cluster_run`, and prints `cluster_text`:
the best layouts, details of the first, and the lines to paste and to start.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatrain.config.schema import ParallelConfig, RunConfig
from megatrain.engine.mesh.layout import Layout, whole_attention
from megatrain.errors import PlanRefused, UserError
from megatrain.machine.machine import Cluster, Machine, load_cluster
from megatrain.models.build import build_meta_model, find_model_folder, load_model_config
from megatrain.models.structure import dissect
from megatrain.planner.cluster.candidate import Candidate, Inventory, Overheads, Request, count_on_fake_group
from megatrain.planner.cluster.estimate import Estimate, allowed_bytes, describe_cause, evaluate
from megatrain.planner.cluster.memory import heaviest_rank
from megatrain.planner.cluster.one_gpu import cluster_of, one_gpu_tokens_per_s, slower_than_one_gpu
from megatrain.planner.cluster.search import SearchResult, search
from megatrain.planner.model_cost import shape_of
from megatrain.planner.plan import StepSize
from megatrain.planner.run import warnings_of
from megatrain.units import abbreviated, counted, duration, gib, gibs, size_lines

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MOST_GPUS = 16
"""For more, the search of a run's start would take seconds, and one GPU is not faster."""
MUCH_FASTER = 1.1
"""A run's start names a layout that is forecast to be this much faster; less is within the forecast's error."""
CHECKED = 3
"""The best layouts that are built on a fake process group; each takes a second or two."""

WHOLE_ATTENTION = "heads do not divide by tensor: every rank computes the whole attention, which is not counted here"


@dataclass(frozen=True)
class OwnLayout:
    """The layout in the run's file.

    Attributes:
        estimate: None if the layout is impossible.
        problems: Why it cannot run, memory included; empty if it can.
        note: What the estimate leaves out, if anything.
    """

    estimate: Estimate | None
    problems: tuple[str, ...]
    note: str | None = None


@dataclass(frozen=True)
class ClusterPlan:
    """The layouts of a request, best first.

    Attributes:
        own: The file's own layout; None if it gives none.
        elements: Parameters on the heaviest rank of the first `CHECKED` layouts, counted on a fake process group.
        steps: Length of the run; None if unknown.
        warnings: Problems of a run that can be planned but not started.
        one_gpu: Tokens/s of the host engine on one GPU, forecast; None if the run does not fit there.
    """

    request: Request
    result: SearchResult
    own: OwnLayout | None
    elements: tuple[int, ...]
    steps: int | None = None
    warnings: tuple[str, ...] = ()
    one_gpu: float | None = None

    @property
    def best(self) -> Estimate:
        return self.result.best[0]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        request, shape, own = self.request, self.request.inventory.shape, self.own
        return {
            "model": shape.name,
            "parameters": shape.parameters,
            "cluster": request.cluster.name,
            "world": request.world,
            "rows": request.step.rows,
            "tokens_per_row": request.step.tokens,
            "tried": self.result.tried,
            "fit": self.result.fit,
            "refused": dict(self.result.refused),
            "best": [
                {**estimate.as_dict(), "counted_elements_of_heaviest_rank": elements}
                for estimate, elements in itertools.zip_longest(self.result.best, self.elements)
            ],
            "one_gpu_tokens_per_second": self.one_gpu,
            "warnings": list(self.warnings),
            "yours": own and {"problems": list(own.problems), "verdict": own.estimate and own.estimate.as_dict()},
        }


def plan_cluster_run(run: RunConfig, *, machine_file: str | Path, world: int) -> ClusterPlan:
    """Rank the layouts of a run on `world` GPUs. Reads the model's config but no weights; needs no GPU.

    The config's own `parallel` section, if not empty, is evaluated beside the best.

    Raises:
        UserError: The model or the cluster's file is not usable, or the GPUs do not fill nodes.
        PlanRefused: No layout fits.
    """
    cluster = load_cluster(machine_file)
    if world > cluster.gpus_per_node and world % cluster.gpus_per_node:
        below = world // cluster.gpus_per_node * cluster.gpus_per_node
        what = f"{world} GPUs do not fill nodes of {cluster.gpus_per_node}"
        raise UserError(what, "--world", f"{below} or {below + cluster.gpus_per_node} would")
    folder = find_model_folder(run.model.path)
    config = load_model_config(folder, run.model.trust_remote_code)
    request = _request_of_run(run, config, cluster, world, folder.name)
    plan = plan_cluster(request, config, own=_own_candidate(run, world), steps=run.schedule.steps)
    return replace(plan, warnings=warnings_of(run, config))


def _request_of_run(run: RunConfig, config: PreTrainedConfig, cluster: Cluster, world: int, name: str) -> Request:
    step = StepSize(run.rows_per_step, run.data.max_tokens)
    return replace(
        make_request(config, cluster, world, step, name=name, trust_remote_code=run.model.trust_remote_code),
        overheads=Overheads(compiled="plain" if run.activations.compile == "auto" else "none"),
        compute_bytes=4 if run.precision.compute_dtype == "fp32" else 2,
        background=run.checkpoint.background,
    )


def faster_than_layout(run: RunConfig, machine: Machine, world: int, per_node: int) -> list[str]:
    """What is faster than a run's own layout, a line each: one GPU with the host engine, another layout.

    Empty if nothing is, for more than `MOST_GPUS` (the search takes seconds there), and for a layout that cannot run. Needs no
    GPU, and must be called before there is a process group.

    Args:
        run: The config.
        machine: One of the GPUs, with its host.
        world: Number of GPUs.
        per_node: GPUs of a host.
    """
    if world > MOST_GPUS:
        return []
    cluster = cluster_of(machine, per_node)
    folder = find_model_folder(run.model.path)
    config = load_model_config(folder, run.model.trust_remote_code)
    request = _request_of_run(run, config, cluster, world, folder.name)
    layout = Layout(**run.parallel.sizes_for(world))
    own = evaluate_own(request, config, Candidate(layout, layout.recomputes(run.activations.policy))).estimate
    if own is None:
        return []  # `check_mesh` says why
    line = slower_than_one_gpu(own, one_gpu_tokens_per_s(request, machine), world)
    found = [f"parallel: {line}"] if line else []
    best = next(iter(search(request, config, count=1).best), None)
    if best is not None and best.tokens_per_s > MUCH_FASTER * own.tokens_per_s:
        found.append(
            f"parallel: {own.candidate}: {own.tokens_per_s:,.0f} tokens/s; {best.candidate} would reach "
            f"{best.tokens_per_s:,.0f} (forecasts; `megatrain plan --world {world}` ranks layouts)"
        )
    return found


def make_request(
    config: PreTrainedConfig,
    cluster: Cluster,
    world: int,
    step: StepSize,
    *,
    name: str,
    trust_remote_code: bool = False,
) -> Request:
    """The request of a model's config; builds the model on meta."""
    meta = build_meta_model(config, compute_dtype=torch.float32, trust_remote_code=trust_remote_code)
    shape = shape_of(config, name=name, trust_remote_code=trust_remote_code)
    return Request(Inventory.of(dissect(meta), shape), cluster, world, step)


def _own_candidate(run: RunConfig, world: int) -> Candidate | None:
    """The file's `parallel` section; None if it is empty."""
    if run.parallel == ParallelConfig():
        return None
    layout = Layout(**run.parallel.sizes_for(world))
    return Candidate(layout, layout.recomputes(run.activations.policy))


def plan_cluster(
    request: Request, config: Any, *, own: Candidate | None = None, steps: int | None = None, count: int = 10
) -> ClusterPlan:
    """Search, evaluate, and check the layouts that are shown.

    Args:
        config: The model's Hugging Face config.
        own: The file's own layout.
        steps: Length of the run.
        count: Number of layouts wanted.

    Raises:
        PlanRefused: No layout fits; the message has the memory breakdown of the nearest one.
    """
    result = search(request, config, count)
    if not result.best:
        raise PlanRefused(_refusal(request, result))
    elements = tuple(_checked_elements(request, estimate) for estimate in result.best[:CHECKED])
    own_layout = evaluate_own(request, config, own) if own else None
    return ClusterPlan(request, result, own_layout, elements, steps, one_gpu=one_gpu_tokens_per_s(request))


def _checked_elements(request: Request, estimate: Estimate) -> int:
    """Elements of the heaviest rank, built as the engine builds it; asserts that the formula agrees."""
    layout, rank = estimate.candidate.layout, estimate.memory.pipeline_rank
    formula = request.inventory.rank(layout, rank, layout.fsdp)
    found = count_on_fake_group(request.inventory.structure, layout, rank)
    assert found == formula, (layout, rank, found, formula)
    return found


def evaluate_own(request: Request, config: Any, candidate: Candidate) -> OwnLayout:
    """Evaluate a user's own layout, or collect all reasons why it cannot run."""
    if problems := candidate.layout.problems(config, request.world, request.step.rows):
        return OwnLayout(None, tuple(problems))
    layout = candidate.layout.resolved(request.world)
    estimate = evaluate(request, replace(candidate, layout=layout))
    memory, allowed = estimate.memory, allowed_bytes(request)
    if memory.nbytes > allowed:
        largest = sorted(memory.lines.items(), key=lambda item: -item[1])[:4]
        needs, of, *sizes = gibs(memory.nbytes, allowed, *(size for _, size in largest))
        parts = ", ".join(f"{name} {size}" for (name, _), size in zip(largest, sizes, strict=True))
        problems.append(f"pipeline rank {memory.pipeline_rank} needs {needs} of {of}: {parts}")
    whole = layout.tensor > 1 and whole_attention(config, layout.tensor)
    return OwnLayout(estimate, tuple(problems), WHOLE_ATTENTION if whole else None)


def _refusal(request: Request, result: SearchResult) -> str:
    """No layout fits: the reasons counted, the nearest layout with its memory breakdown, and how to reduce it."""
    shape, step, allowed = request.inventory.shape, request.step, allowed_bytes(request)
    text = [
        f"{shape.name} ({abbreviated(shape.parameters)} parameters), {counted(step.rows, 'row')} x "
        f"{counted(step.tokens, 'token')} a step: no layout fits {request.world} GPUs of {request.cluster.name}"
    ]
    text += [f"  {count:>7,} rejected: {why}" for why, count in result.refused.most_common()]
    if result.nearest is None:
        return "\n".join([*text, "  change batch.tokens_per_step or --world so that rows and GPUs divide"])
    memory = heaviest_rank(request, result.nearest)
    state = (request.optim.bytes_per_parameter + 4) * shape.parameters
    text.append(f"  nearest: {result.nearest}; {' of '.join(gibs(memory.nbytes, allowed))}")
    text += size_lines(memory.lines)
    text += [
        "  to reduce memory:",
        f"    - more GPUs: masters, moments and gradients alone take {gib(state)}, which fills {-(-state // allowed)} GPUs",
        "    - shorter rows (data.max_tokens), or fewer tokens a step: activations and logits shrink with them",
    ]
    return "\n".join(text)


def cluster_text(plan: ClusterPlan) -> str:
    """The plan as text."""
    return "\n".join([*_head(plan), *_best(plan), *_own(plan), *_details(plan), *_paste(plan)])


def cluster_json(plan: ClusterPlan) -> str:
    """The plan as JSON."""
    return json.dumps(plan.as_dict(), indent=1)


def _head(plan: ClusterPlan) -> Iterator[str]:
    request, result = plan.request, plan.result
    shape, step = request.inventory.shape, request.step
    where = f"on {request.world} GPUs of {request.cluster.name}"
    yield f"plan for {shape.name}, {abbreviated(shape.parameters)} parameters, {where}"
    yield f"  a step: {counted(step.rows, 'row')} x {counted(step.tokens, 'token')}"
    yield from (f"  warning: {warning}" for warning in plan.warnings)
    yield f"  {result.tried:,} candidates tried, {result.fit:,} fit; rejected:"
    for why, count in result.refused.most_common(6):
        yield f"    {count:>9,}  {why}"


def _best(plan: ClusterPlan) -> Iterator[str]:
    yield "  best of each kind, by tokens/s after failures:"
    yield "        s/step     tok/s    MFU   bubble   memory    layout; where the time goes"
    for place, estimate in enumerate(plan.result.best, 1):
        yield (
            f"    {place:>2}  {estimate.step_s:6.2f}  {estimate.tokens_per_s:8,.0f}  {estimate.mfu:5.1%}  "
            f"{estimate.bubble:6.1%}  {gib(estimate.memory.nbytes):>9}   {estimate.candidate}"
        )
        yield f"        {_causes(estimate)}"
    if line := slower_than_one_gpu(plan.best, plan.one_gpu, plan.request.world):
        yield f"  warning: the first: {line}"


def _causes(estimate: Estimate) -> str:
    """Shares of the step's time by cause, largest first, down to 1%."""
    return ", ".join(
        f"{seconds / estimate.step_s:.0%} "
        + (describe_cause(name, estimate.traffic) if name != "compute" else "computing")
        for name, seconds in sorted(estimate.seconds.items(), key=lambda item: -item[1])
        if seconds >= 0.01 * estimate.step_s
    )


def _own(plan: ClusterPlan) -> Iterator[str]:
    own = plan.own
    if own is None:
        return
    if own.problems:
        yield "  the file's own layout (parallel:) cannot run here:"
        yield from (f"    - {problem}" for problem in own.problems)
        return
    estimate = own.estimate
    assert estimate is not None
    slower = estimate.step_s / plan.best.step_s - 1
    yield f"  the file's own layout (parallel:): {estimate.candidate}"
    yield (
        f"        {estimate.step_s:.2f} s a step, {slower:+.0%} against the first; {gib(estimate.memory.nbytes)}; "
        f"{_causes(estimate)}"
    )
    if own.note is not None:
        yield f"        {own.note}"
    if line := slower_than_one_gpu(estimate, plan.one_gpu, plan.request.world):
        yield f"  warning: the file's own layout: {line}"


def _details(plan: ClusterPlan) -> Iterator[str]:
    best, allowed = plan.best, allowed_bytes(plan.request)
    memory, loss = best.memory, best.goodput
    yield f"  details of the first; bottleneck: {best.bottleneck}"
    sizes = " of ".join(gibs(memory.nbytes, allowed))
    yield f"    memory of pipeline rank {memory.pipeline_rank}, the heaviest: {sizes}"
    yield from size_lines(memory.lines, indent=6)
    yield f"      {plan.elements[0]:,} parameters on it, counted by the engine's own code on a fake process group"
    yield "    traffic per GPU and step:"
    for name, sent in best.traffic.items():
        link = "node link" if sent.link == "node" else "network"
        yield f"      {sent.nbytes / 1e9:>8,.1f} GB  {name}: {sent.size} ranks, {sent.per_node} in a node; {link}"
    yield (
        f"    failures: one every {loss.mtbf_hours:.1f} h; a save stops training for {loss.stop_s:,.1f} s and is verified "
        f"after {loss.write_s:,.0f} s; a restart takes {loss.restart_s:,.0f} s; "
        f"save every {loss.every_steps:,} steps ({loss.every_s / 3600:.1f} h); goodput {loss.share:.1%}"
    )
    if plan.steps is not None:
        yield f"    {counted(plan.steps, 'step')}: {duration(plan.steps * best.step_s / loss.share)}"


def _paste(plan: ClusterPlan) -> Iterator[str]:
    best, world = plan.best, plan.request.world
    layout = best.candidate.layout
    per_node = min(plan.request.cluster.gpus_per_node, world)
    nodes = world // per_node
    names = ("tensor", "pipeline", "virtual", "context", "replicate", "shard")
    words = [f"{name}: {size}" for name in names if (size := getattr(layout, name)) != 1 or name == "shard"]
    if layout.pipeline > 1:
        words.append(f"schedule: {layout.schedule}")
    words.append(f"microbatches: {layout.microbatch_count}")
    yield "  for RUN.yaml:"
    yield "    engine:      mesh"
    yield f"    parallel:    {{{', '.join(words)}}}"
    yield f"    activations: {{policy: {'recompute' if best.candidate.recompute else 'keep'}}}"
    yield f"    checkpoint:  {{every_steps: {best.goodput.every_steps}}}"
    yield "  on each node:" if nodes > 1 else "  start:"
    where = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500 --rdzv-id RUN " if nodes > 1 else ""
    yield f"    torchrun {where}--nproc-per-node {per_node} --max-restarts 100 -m megatrain train RUN.yaml --resume auto"
