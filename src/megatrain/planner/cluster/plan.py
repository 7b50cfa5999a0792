"""`plan_cluster`: from a job to the best layouts, each checked against the engine's own code on a fake process group."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatrain.engine.mesh.layout import Layout, whole_attention
from megatrain.errors import PlanRefused
from megatrain.planner.cluster.job import Job, Way
from megatrain.planner.cluster.judge import Verdict, allowed_bytes, judge
from megatrain.planner.cluster.memory import heaviest_rank
from megatrain.planner.cluster.search import Found, search
from megatrain.planner.cluster.shards import count_on_fake_group
from megatrain.units import abbreviated, counted, gib, size_lines

CHECKED = 3
"""Of the best layouts so many are built on a fake process group; each takes a second or two."""

WHOLE_ATTENTION = "heads do not divide by tensor: every rank computes the whole attention, which is not counted here"


@dataclass(frozen=True)
class Yours:
    """The layout that the run's file gives.

    Attributes:
        verdict: None where it cannot run.
        problems: Why it cannot, memory included; empty where it can.
        note: What the verdict leaves out, if anything.
    """

    layout: Layout
    verdict: Verdict | None
    problems: tuple[str, ...]
    note: str | None = None


@dataclass(frozen=True)
class ClusterPlan:
    """The layouts of a job, best first.

    Attributes:
        found: Of the search.
        yours: The file's own layout, None if it gives none.
        elements: Parameters that the heaviest rank of the first `CHECKED` layouts holds, counted on a fake process group.
        steps: Length of the run, None where it is not known.
        warnings: Of what can be planned and not run, for people.
    """

    job: Job
    found: Found
    yours: Yours | None
    elements: tuple[int, ...]
    steps: int | None = None
    warnings: tuple[str, ...] = ()

    @property
    def best(self) -> Verdict:
        return self.found.best[0]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        shape, yours = self.job.inventory.shape, self.yours
        return {
            "model": shape.name,
            "parameters": shape.parameters,
            "cluster": self.job.cluster.name,
            "world": self.job.world,
            "rows": self.job.step.rows,
            "tokens_per_row": self.job.step.tokens,
            "tried": self.found.tried,
            "fit": self.found.fit,
            "refused": dict(self.found.refused),
            "best": [
                {**verdict.as_dict(), "counted_elements_of_heaviest_rank": elements}
                for verdict, elements in itertools.zip_longest(self.found.best, self.elements)
            ],
            "warnings": list(self.warnings),
            "yours": None
            if yours is None
            else {"problems": list(yours.problems), "verdict": yours.verdict and yours.verdict.as_dict()},
        }


def plan_cluster(
    job: Job, config: Any, *, yours: Way | None = None, steps: int | None = None, count: int = 10
) -> ClusterPlan:
    """Search, judge, and check what is shown.

    Args:
        config: The model's Hugging Face config.
        yours: The file's own layout.
        steps: Length of the run.
        count: How many layouts are wanted.

    Raises:
        PlanRefused: No layout fits; the message is the ledger of the one that comes nearest.
    """
    found = search(job, config, count)
    if not found.best:
        raise PlanRefused(_refusal(job, found))
    elements = tuple(_checked_elements(job, verdict) for verdict in found.best[:CHECKED])
    return ClusterPlan(job, found, look_at(job, config, yours) if yours else None, elements, steps)


def _checked_elements(job: Job, verdict: Verdict) -> int:
    """Elements of the heaviest rank: built as the engine builds it, and the same by formula."""
    layout, rank = verdict.way.layout, verdict.memory.pipeline_rank
    parts = job.inventory.parts(layout)
    formula = sum(job.inventory.stage(parts[s], layout.tensor, layout.fsdp) for s in layout.stages_of(rank))
    counted = count_on_fake_group(job.inventory.structure, layout, rank)
    assert counted == formula, (layout, rank, counted, formula)
    return counted


def look_at(job: Job, config: Any, way: Way) -> Yours:
    """A layout that somebody has chosen: judged, or refused with all reasons."""
    problems = way.layout.problems(config, job.world, job.step.rows)
    layout = way.layout if problems else way.layout.resolved(job.world)
    if problems:
        return Yours(layout, None, tuple(problems))
    verdict = judge(job, Way(layout, way.recompute))
    allowed = allowed_bytes(job)
    if verdict.memory.nbytes > allowed:
        problems.append(
            f"pipeline rank {verdict.memory.pipeline_rank} needs {gib(verdict.memory.nbytes)} of {gib(allowed)}: "
            + _ledger(verdict.memory.lines)
        )
    whole = layout.tensor > 1 and whole_attention(config, layout.tensor)
    return Yours(layout, verdict, tuple(problems), WHOLE_ATTENTION if whole else None)


def _ledger(lines: Mapping[str, float]) -> str:
    largest = sorted(lines.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {gib(size)}" for name, size in largest[:4])


def _refusal(job: Job, found: Found) -> str:
    shape, step = job.inventory.shape, job.step
    text = [
        f"{shape.name} ({abbreviated(shape.parameters)} parameters), {counted(step.rows, 'row')} x "
        f"{counted(step.tokens, 'token')} a step: no layout fits {job.world} GPUs of {job.cluster.name}"
    ]
    text += [f"  {count:>7,} refused: {why}" for why, count in found.refused.most_common()]
    if found.nearest is not None:
        way, memory = found.nearest, heaviest_rank(job, found.nearest)
        text.append(f"  nearest: {layout_words(way)}; {gib(memory.nbytes)} of {gib(allowed_bytes(job))}")
        text += size_lines(memory.lines)
        state = (job.optim.bytes_per_parameter + 4) * shape.parameters
        text.append("  ways down:")
        text.append(
            f"    - more GPUs: masters, moments and gradients alone are {gib(state)}, "
            f"{-(-state // allowed_bytes(job))} GPUs full"
        )
        text.append(
            "    - shorter rows (data.max_tokens), or fewer tokens a step: activations and logits shrink with them"
        )
    else:
        text.append("  ways down: change batch.tokens_per_step or --world so that rows and GPUs divide")
    return "\n".join(text)


def layout_words(way: Way) -> str:
    """A way in one line."""
    layout = way.layout
    names = [
        f"{name} {size}"
        for name, size in (
            ("tensor", layout.tensor),
            ("pipeline", layout.pipeline),
            ("context", layout.context),
            ("replicate", layout.replicate),
            ("shard", layout.shard),
        )
        if size != 1
    ]
    if layout.pipeline > 1:
        names.append(layout.schedule + (f" x{layout.virtual}" if layout.virtual > 1 else ""))
    names.append("1 microbatch" if layout.microbatch_count == 1 else f"{layout.microbatch_count} microbatches")
    names.append("recompute" if way.recompute else "keep")
    return ", ".join(names)
