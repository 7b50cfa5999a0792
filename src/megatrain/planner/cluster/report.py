"""A cluster plan as text: the best layouts, details of the first, and the lines to paste and to start."""

from __future__ import annotations

import json
from collections.abc import Iterator

from megatrain.planner.cluster.estimate import Estimate, allowed_bytes, describe_cause
from megatrain.planner.cluster.plan import ClusterPlan
from megatrain.units import abbreviated, counted, duration, gib, size_lines


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


def _details(plan: ClusterPlan) -> Iterator[str]:
    best, allowed = plan.best, allowed_bytes(plan.request)
    memory, loss = best.memory, best.goodput
    yield f"  details of the first; bottleneck: {best.bottleneck}"
    yield f"    memory of pipeline rank {memory.pipeline_rank}, the heaviest: {gib(memory.nbytes)} of {gib(allowed)}"
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
