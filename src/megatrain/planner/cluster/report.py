"""A cluster plan as text: the best layouts, the first one in full, and what to paste and to start."""

from __future__ import annotations

import json
from collections.abc import Iterator

from megatrain.planner.cluster.judge import Verdict, allowed_bytes, describe
from megatrain.planner.cluster.plan import ClusterPlan, layout_words
from megatrain.units import abbreviated, counted, duration, gib, size_lines


def cluster_text(plan: ClusterPlan) -> str:
    """The whole plan for people."""
    return "\n".join([*_head(plan), *_best(plan), *_yours(plan), *_first(plan), *_paste(plan)])


def cluster_json(plan: ClusterPlan) -> str:
    """The whole plan for programs."""
    return json.dumps(plan.as_dict(), indent=1)


def _head(plan: ClusterPlan) -> Iterator[str]:
    job, found = plan.job, plan.found
    yield (
        f"plan for {job.inventory.shape.name}, {abbreviated(job.inventory.shape.parameters)} parameters, "
        f"on {job.world} GPUs of {job.cluster.name}"
    )
    yield f"  a step: {counted(job.step.rows, 'row')} x {counted(job.step.tokens, 'token')}"
    yield from (f"  warning: {warning}" for warning in plan.warnings)
    yield f"  {found.tried:,} ways tried, {found.fit:,} fit; refused:"
    for why, count in found.refused.most_common(6):
        yield f"    {count:>9,}  {why}"


def _best(plan: ClusterPlan) -> Iterator[str]:
    yield "  the best of each kind, by tokens/s that failures leave:"
    yield "        s/step     tok/s    MFU   bubble   memory    layout; where the rest of the time goes"
    for place, verdict in enumerate(plan.found.best, 1):
        yield (
            f"    {place:>2}  {verdict.step_s:6.2f}  {verdict.tokens_per_s:8,.0f}  {verdict.mfu:5.1%}  {verdict.idle:6.1%}  "
            f"{gib(verdict.memory.nbytes):>9}   {layout_words(verdict.way)}"
        )
        yield f"        {_reasons(verdict)}"


def _reasons(verdict: Verdict) -> str:
    parts = sorted(verdict.seconds.items(), key=lambda item: -item[1])
    shares = [
        f"{seconds / verdict.step_s:.0%} {describe(name, verdict.flows) if name != 'compute' else 'computing'}"
        for name, seconds in parts
        if seconds >= 0.01 * verdict.step_s
    ]
    return ", ".join(shares)


def _yours(plan: ClusterPlan) -> Iterator[str]:
    yours = plan.yours
    if yours is None:
        return
    if yours.problems:
        yield "  the file's own layout (parallel:) cannot run here:"
        yield from (f"    - {problem}" for problem in yours.problems)
        return
    assert yours.verdict is not None
    slower = yours.verdict.step_s / plan.best.step_s - 1
    yield f"  the file's own layout (parallel:): {layout_words(yours.verdict.way)}"
    yield (
        f"        {yours.verdict.step_s:.2f} s a step, {slower:+.0%} against the first; {gib(yours.verdict.memory.nbytes)}; "
        f"{_reasons(yours.verdict)}"
    )
    if yours.note is not None:
        yield f"        {yours.note}"


def _first(plan: ClusterPlan) -> Iterator[str]:
    best, job = plan.best, plan.job
    memory, loss = best.memory, best.goodput
    yield f"  the first in full; bottleneck: {best.bottleneck}"
    yield f"    memory of pipeline rank {memory.pipeline_rank}, the heaviest: {gib(memory.nbytes)} of {gib(allowed_bytes(job))}"
    yield from size_lines(memory.lines, indent=6)
    yield f"      {plan.elements[0]:,} parameters on it, counted by the engine's own code on a fake process group"
    yield "    traffic of a GPU in a step:"
    for name, flow in best.flows.items():
        sent = f"{flow.nbytes / 1e9:>8,.1f} GB  {name}: {flow.size} ranks, {flow.per_node} of them in a node"
        yield f"      {sent}; {_link(flow.link)}"
    yield (
        f"    failures: one every {loss.mtbf_hours:.1f} h; a save stops training for {loss.stop_s:,.1f} s and "
        f"is written and read back in {loss.write_s:,.0f} s, a restart takes {loss.restart_s:,.0f} s; "
        f"save every {loss.every_steps:,} steps ({loss.every_s / 3600:.1f} h); goodput {loss.share:.1%}"
    )
    if plan.steps is not None:
        yield f"    {counted(plan.steps, 'step')}: {duration(plan.steps * best.step_s / loss.share)}"


def _link(link: str) -> str:
    return "the node's link" if link == "node" else "the network"


def _paste(plan: ClusterPlan) -> Iterator[str]:
    best, job = plan.best, plan.job
    layout = best.way.layout
    per_node = min(job.cluster.gpus_per_node, job.world)
    nodes = job.world // per_node
    yield "  for RUN.yaml:"
    yield "    engine:      mesh"
    sizes = {
        name: getattr(layout, name)
        for name in ("tensor", "pipeline", "virtual", "context", "replicate", "shard")
        if getattr(layout, name) != 1 or name == "shard"
    }
    words = [f"{name}: {size}" for name, size in sizes.items()]
    if layout.pipeline > 1:
        words.append(f"schedule: {layout.schedule}")
    words.append(f"microbatches: {layout.microbatch_count}")
    yield f"    parallel:    {{{', '.join(words)}}}"
    yield f"    activations: {{policy: {'recompute' if best.way.recompute else 'keep'}}}"
    yield f"    checkpoint:  {{every_steps: {best.goodput.every_steps}}}"
    yield "  on each node:" if nodes > 1 else "  start:"
    where = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500 --rdzv-id RUN " if nodes > 1 else ""
    yield f"    torchrun {where}--nproc-per-node {per_node} --max-restarts 100 -m megatrain train RUN.yaml --resume auto"
