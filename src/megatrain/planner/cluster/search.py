"""Which layouts a job can have, and the best of them.

Tried are all sizes that divide the world: tensor groups inside a node, any number of pipeline ranks and virtual
stages, each schedule, context groups where rows are long, data ranks sharded or in replicas, microbatches of a few
rows, layers recomputed or kept. What `Layout.problems` refuses is counted by reason, so is what does not fit the
memory. Of the rest the textbook's estimate picks `PLAYED` of each kind, whose tables are played through.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from megatrain.engine.mesh.layout import SCHEDULES, Layout, dropout_keys, whole_attention
from megatrain.engine.mesh.stage_check import verify_family_cut
from megatrain.errors import UserError
from megatrain.planner.cluster.job import Job, Way
from megatrain.planner.cluster.judge import Verdict, allowed_bytes, estimate, judge
from megatrain.planner.cluster.memory import RankMemory, heaviest_rank, state_bytes

MOST_ROWS = 8
"""Of a microbatch."""
MOST_VIRTUAL = 8
LEAST_CONTEXT_TOKENS = 4096
"""A context rank has at least so many tokens of a row."""
PLAYED = 2
"""Ways played through of each (tensor, pipeline, context, schedule)."""
KINDS_PLAYED = 24


REASONS = {
    "cannot fill": "more stages than layers",
    "rows per step": "fewer rows than data ranks x microbatches",
    "rounds of schedule": "microbatches do not divide into the schedule's rounds",
    "intermediate_size": "intermediate_size does not divide by tensor",
    "is not tested with": "the family is not tested with this dimension",
    "plan uses the styles": "the family's tensor-parallel plan is not supported",
    "no tensor-parallel plan": "the family has no tensor-parallel plan",
    "would differ between": "dropout with tensor or context parallel",
    "cannot split layers": "layers that context parallel cannot split",
}
"""Words of a problem of `Layout.problems`, and what it is counted as."""


@dataclass(frozen=True)
class Found:
    """What a search has found.

    Attributes:
        best: Fastest first, one of each (tensor, pipeline, context, schedule).
        tried, fit: Ways, and how many of them fit.
        refused: Layouts by the reason they were refused for.
        nearest: Of those that do not fit the memory, the one that comes nearest.
    """

    best: tuple[Verdict, ...]
    tried: int
    fit: int
    refused: Counter[str]
    nearest: Way | None = None


def search(job: Job, config: Any, count: int = 10) -> Found:
    """The best ways to run a job.

    Args:
        config: The model's Hugging Face config.
        count: How many are wanted.
    """
    refused: Counter[str] = Counter()
    fitting: list[tuple[float, Way, RankMemory]] = []
    tried, allowed = 0, allowed_bytes(job)
    nearest: tuple[float, Way] | None = None
    for way in ways(job, config, refused):
        tried += 1
        memory, least = None, state_bytes(job, way)
        if least <= allowed:
            memory = heaviest_rank(job, way)
            least = memory.nbytes
        if memory is not None and least <= allowed:
            fitting.append((estimate(job, way), way, memory))
            continue
        refused["more memory than a GPU has"] += 1
        if nearest is None or least < nearest[0]:
            nearest = least, way
    fitting.sort(key=lambda item: item[0])
    kinds: dict[tuple[int, int, int, str], list[Verdict]] = {}
    for _, way, memory in fitting:
        kind = (way.layout.tensor, way.layout.pipeline, way.layout.context, way.layout.schedule)
        if kind not in kinds and len(kinds) >= KINDS_PLAYED:
            continue
        if len(kinds.setdefault(kind, [])) < PLAYED:
            kinds[kind].append(judge(job, way, memory))
    best = sorted((max(v, key=_merit) for v in kinds.values()), key=_merit, reverse=True)
    return Found(tuple(best[:count]), tried, len(fitting), refused, nearest[1] if nearest else None)


def _merit(verdict: Verdict) -> float:
    return verdict.useful_tokens_per_s


def ways(job: Job, config: Any, refused: Counter[str]) -> Iterator[Way]:
    """All ways to run a job that `Layout.problems` lets pass; the others are counted."""
    cannot_be_cut = _cannot_be_cut(config)
    for layout in layouts(job):
        if cannot_be_cut and layout.pipeline > 1:
            refused["the family cannot be cut into pipeline stages"] += 1
            continue
        if layout.tensor > 1 and whole_attention(config, layout.tensor):
            refused["heads do not divide by tensor: every rank would compute the whole attention"] += 1
            continue
        problems = layout.problems(config, job.world, job.step.rows)
        for problem in problems:
            refused[reason(problem)] += 1
        if problems:
            continue
        splits = layout.pipeline > 1 and layout.kind.splits_backward
        if splits and dropout_keys(config.get_text_config()):
            continue
        yield Way(layout, recompute=False)
        if not splits:
            yield Way(layout, recompute=True)


def _cannot_be_cut(config: Any) -> bool:
    """Whether the family cannot be cut into stages; unproven ones are tried on a tiny copy, as the engine does."""
    try:
        verify_family_cut(config)
    except UserError:
        return True
    return False


def layouts(job: Job) -> Iterator[Layout]:
    """Every layout worth a look, checked or not."""
    for tensor in divisors(min(job.cluster.gpus_per_node, job.world)):
        for context in divisors(job.world // tensor):
            if context > 1 and job.step.tokens // context < LEAST_CONTEXT_TOKENS:
                break
            for pipeline in divisors(job.world // (tensor * context)):
                data = job.world // (tensor * context * pipeline)
                if data > job.step.rows or pipeline > job.inventory.shape.depth:
                    continue
                for kind, virtual in _schedules(pipeline, job.inventory.shape.depth):
                    layout = Layout(tensor, pipeline, virtual, context, 1, data, kind)
                    for pieces in _pieces(job, layout):
                        for replicate in _replicas(job, layout):
                            yield replace(layout, replicate=replicate, shard=data // replicate, microbatches=pieces)


def _schedules(pipeline: int, depth: int) -> Iterator[tuple[str, int]]:
    """(name, virtual stages)."""
    if pipeline == 1:
        yield "1f1b", 1
        return
    for kind in SCHEDULES.values():
        least, most = kind.virtual
        for virtual in range(least, min(most or MOST_VIRTUAL, depth // pipeline) + 1):
            if kind.name != "zb1p" or virtual <= 2:
                yield kind.name, virtual


def _pieces(job: Job, layout: Layout) -> Iterator[int]:
    """Microbatches whose rows are 1, 2, 4 ... MOST_ROWS."""
    mine = -(-job.step.rows // layout.data)
    rows = 1
    while rows <= min(MOST_ROWS, mine):
        pieces = -(-mine // rows)
        if pieces >= replace(layout, microbatches=None).min_microbatches:
            yield pieces
        rows *= 2


def _replicas(job: Job, layout: Layout) -> Iterator[int]:
    """One copy; copies inside of which gradients stay in a node; copies of 8 and 64 data ranks."""
    node = max(1, job.cluster.gpus_per_node // (layout.tensor * layout.context))
    yield from sorted({layout.data // shard for shard in (layout.data, node, 8, 64) if layout.data % shard == 0})


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def reason(problem: str) -> str:
    """A layout's problem without its numbers, for counting."""
    for words, short in REASONS.items():
        if words in problem:
            return short
    return problem
