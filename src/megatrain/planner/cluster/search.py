"""Enumerates the candidates of a request and finds the best.

Tried are all sizes that divide the world: tensor groups inside a node, any number of pipeline ranks and virtual stages, each
schedule, context groups for long rows, data ranks sharded or in replicas, microbatches of a few rows, layers recomputed or kept.
Candidates that `Layout.problems` rejects are counted by reason, and so are those that do not fit. Of the rest, the textbook's
formula picks `PLAYED` of each kind, whose tables are played.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from megatrain.engine.mesh.layout import SCHEDULES, Layout, whole_attention
from megatrain.engine.mesh.stage import verify_family_cut
from megatrain.errors import UserError
from megatrain.models.build import dropout_keys
from megatrain.planner.cluster.candidate import Candidate, Request
from megatrain.planner.cluster.estimate import Estimate, allowed_bytes, evaluate, quick_step_s
from megatrain.planner.cluster.memory import RankMemory, heaviest_rank, state_bytes

MAX_ROWS = 8
"""Rows of a microbatch."""
MAX_VIRTUAL = 8
MIN_CONTEXT_TOKENS = 4096
"""Tokens of a row on each context rank."""
PLAYED = 2
"""Candidates played of each (tensor, pipeline, context, schedule)."""
KINDS_PLAYED = 24

REASONS = {
    "cannot fill": "more stages than layers",
    "only padding": "fewer rows than data ranks x microbatches",
    "rounds of schedule": "microbatches do not divide into the schedule's rounds",
    "intermediate_size": "intermediate_size does not divide by tensor",
    "is not tested with": "the family is not tested with this dimension",
    "no tensor-parallel plan": "the family has no tensor-parallel plan",
    "would differ between": "dropout with tensor or context parallel",
    "cannot split layers": "layers that context parallel cannot split",
}
"""Words of a problem of `Layout.problems` -> the reason it is counted as."""


@dataclass(frozen=True)
class SearchResult:
    """The outcome of a search.

    Attributes:
        best: Fastest first, one of each (tensor, pipeline, context, schedule).
        tried: Number of candidates.
        fit: Candidates that fit.
        refused: Number of candidates by the reason they were rejected for.
        nearest: The candidate that comes nearest to fitting, of those that do not.
    """

    best: tuple[Estimate, ...]
    tried: int
    fit: int
    refused: Counter[str]
    nearest: Candidate | None = None


def search(request: Request, config: Any, count: int = 10) -> SearchResult:
    """Find the `count` best candidates for a model with the given Hugging Face config."""
    refused: Counter[str] = Counter()
    fitting: list[tuple[float, Candidate, RankMemory]] = []
    tried, allowed = 0, allowed_bytes(request)
    nearest: tuple[float, Candidate] | None = None
    for candidate in candidates(request, config, refused):
        tried += 1
        memory, least = None, state_bytes(request, candidate)
        if least <= allowed:
            memory = heaviest_rank(request, candidate)
            least = memory.nbytes
        if memory is not None and least <= allowed:
            fitting.append((quick_step_s(request, candidate), candidate, memory))
            continue
        refused["more memory than a GPU has"] += 1
        if nearest is None or least < nearest[0]:
            nearest = least, candidate
    fitting.sort(key=lambda item: item[0])
    kinds: dict[tuple[int, int, int, str], list[Estimate]] = {}
    for _, candidate, memory in fitting:
        layout = candidate.layout
        kind = (layout.tensor, layout.pipeline, layout.context, layout.schedule)
        if kind not in kinds and len(kinds) >= KINDS_PLAYED:
            continue
        if len(kinds.setdefault(kind, [])) < PLAYED:
            kinds[kind].append(evaluate(request, candidate, memory))
    merit = operator.attrgetter("useful_tokens_per_s")
    best = sorted((max(estimates, key=merit) for estimates in kinds.values()), key=merit, reverse=True)
    return SearchResult(tuple(best[:count]), tried, len(fitting), refused, nearest[1] if nearest else None)


def candidates(request: Request, config: Any, refused: Counter[str]) -> Iterator[Candidate]:
    """All candidates that `Layout.problems` accepts; the others are counted in `refused`."""
    cuttable = _can_be_cut(config)
    for layout in layouts(request):
        if not cuttable and layout.pipeline > 1:
            refused["the family cannot be cut into pipeline stages"] += 1
            continue
        if layout.tensor > 1 and whole_attention(config, layout.tensor):
            refused["heads do not divide by tensor: every rank would compute the whole attention"] += 1
            continue
        problems = layout.problems(config, request.world, request.step.rows)
        refused.update(map(reason, problems))
        if problems or (layout.splits_backward and dropout_keys(config.get_text_config())):
            continue
        yield Candidate(layout, recompute=False)
        if not layout.splits_backward:
            yield Candidate(layout, recompute=True)


def _can_be_cut(config: Any) -> bool:
    """Whether the family can be cut into stages; untested ones are checked on a tiny copy, as the engine does."""
    try:
        verify_family_cut(config)
    except UserError:
        return False
    return True


def layouts(request: Request) -> Iterator[Layout]:
    """Every layout worth trying, unchecked."""
    cluster, world, step, depth = request.cluster, request.world, request.step, request.inventory.shape.depth
    for tensor in divisors(min(cluster.gpus_per_node, world)):
        for context in divisors(world // tensor):
            if context > 1 and step.tokens // context < MIN_CONTEXT_TOKENS:
                break
            for pipeline in divisors(world // (tensor * context)):
                data = world // (tensor * context * pipeline)
                if data > step.rows or pipeline > depth:
                    continue
                for schedule, virtual in _schedules(pipeline, depth):
                    layout = Layout(tensor, pipeline, virtual, context, 1, data, schedule)
                    for count in _microbatch_counts(request, layout):
                        for replicate in _replicas(request, layout):
                            yield replace(layout, replicate=replicate, shard=data // replicate, microbatches=count)


def _schedules(pipeline: int, depth: int) -> Iterator[tuple[str, int]]:
    """(schedule, virtual stages)."""
    if pipeline == 1:
        yield "1f1b", 1
        return
    for kind in SCHEDULES.values():
        least, most = kind.virtual
        for virtual in range(least, min(most or MAX_VIRTUAL, depth // pipeline) + 1):
            if kind.name != "zb1p" or virtual <= 2:
                yield kind.name, virtual


def _microbatch_counts(request: Request, layout: Layout) -> Iterator[int]:
    """Numbers of microbatches with 1, 2, 4 ... MAX_ROWS rows each."""
    own_rows = -(-request.step.rows // layout.data)
    rows = 1
    while rows <= min(MAX_ROWS, own_rows):
        count = -(-own_rows // rows)
        if count >= layout.min_microbatches:
            yield count
        rows *= 2


def _replicas(request: Request, layout: Layout) -> Iterator[int]:
    """Numbers of copies: one; copies whose gradients stay inside a node; copies of 8 and of 64 data ranks."""
    node = max(1, request.cluster.gpus_per_node // (layout.tensor * layout.context))
    yield from sorted({layout.data // shard for shard in (layout.data, node, 8, 64) if layout.data % shard == 0})


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def reason(problem: str) -> str:
    """A layout's problem without its numbers, for counting."""
    return next((short for words, short in REASONS.items() if words in problem), problem)
