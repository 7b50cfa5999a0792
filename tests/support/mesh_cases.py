"""The layouts of the parity tests: every possible pair of values of the factors below occurs in a case."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace
from typing import Any

from megatrain.engine.mesh.layout import SCHEDULES, Layout

WORLD = 8

FACTORS: dict[str, tuple[Any, ...]] = {
    "tensor": (1, 2),
    "pipeline": (1, 2, 4),
    "data": ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2)),  # (replicate, shard)
    "context": (1, 2),
    "schedule": tuple(SCHEDULES),
    "tied": (True, False),
    "kind": ("plain", "padded", "packed"),
    "accumulate": (1, 2),
    "evaluate": (False, True),
    "recompute": (False, True),
    "sliding": (False, True),
}

FULL = ("llama", "qwen3", "granite", "qwen2_full")
SLIDING = ("mistral", "gemma2", "qwen2")


@dataclass(frozen=True)
class Case:
    """One layout with a model and a kind of batch."""

    family: str
    layout: Layout
    layers: int
    tied: bool = True
    kind: str = "packed"
    evaluate: bool = False
    recompute: bool = False
    heads: tuple[int, int] | None = None
    """Query heads and key-value heads, instead of the family's."""

    def __str__(self) -> str:
        at = self.layout
        parts = [self.family, f"tp{at.tensor}", f"pp{at.pipeline}", f"dp{at.replicate}x{at.shard}", f"cp{at.context}"]
        if at.pipeline > 1:
            parts.append(at.schedule)
        parts += [f"mb{at.microbatch_count}", "tied" if self.tied else "untied", self.kind]
        parts += [word for word, on in (("eval", self.evaluate), ("recompute", self.recompute)) if on]
        parts += [f"heads{self.heads[0]}of{self.heads[1]}"] if self.heads else []
        return "-".join(parts)


def possible(values: dict[str, Any]) -> bool:
    """Whether factors, or some of them, fit into `WORLD` ranks."""
    replicate, shard = values.get("data", (1, 1))
    size = values.get("tensor", 1) * values.get("pipeline", 1) * replicate * shard * values.get("context", 1)
    pipeline, schedule = values.get("pipeline"), values.get("schedule")
    if pipeline == 1 and schedule not in (None, "1f1b"):
        return False
    if pipeline is None and schedule not in (None, "1f1b"):
        size *= 2
    return size <= WORLD


def pairwise(seed: int = 0) -> list[dict[str, Any]]:
    """Cases that cover every possible pair of factor values, found greedily; deterministic."""
    generator = random.Random(seed)
    names = list(FACTORS)
    uncovered = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x in FACTORS[a]
        for y in FACTORS[b]
        if possible({a: x, b: y})
    }
    cases = []
    while uncovered:
        (a, x), (b, y) = min(uncovered, key=repr)
        best: tuple[int, dict[str, Any]] | None = None
        for _ in range(40):
            values = {a: x, b: y}
            for name in generator.sample(names, len(names)):
                if name in values:
                    continue
                options = [v for v in FACTORS[name] if possible({**values, name: v})]
                gains = [sum(_pair((name, v), item) in uncovered for item in values.items()) for v in options]
                values[name] = generator.choice([v for v, g in zip(options, gains, strict=True) if g == max(gains)])
            gain = sum(_pair(p, q) in uncovered for p, q in itertools.combinations(values.items(), 2))
            if best is None or gain > best[0]:
                best = gain, values
        assert best is not None
        cases.append(best[1])
        uncovered -= {_pair(p, q) for p, q in itertools.combinations(best[1].items(), 2)}
    return cases


def _pair(p: tuple[str, Any], q: tuple[str, Any]) -> tuple[tuple[str, Any], tuple[str, Any]]:
    order = list(FACTORS)
    return (p, q) if order.index(p[0]) < order.index(q[0]) else (q, p)


def matrix() -> list[Case]:
    """The pairwise cases, with the families in turn."""
    full, sliding = itertools.cycle(FULL), itertools.cycle(SLIDING)
    cases = []
    for values in pairwise():
        replicate, shard = values["data"]
        virtual = SCHEDULES[values["schedule"]].virtual[0]
        layout = Layout(
            tensor=values["tensor"],
            pipeline=values["pipeline"],
            virtual=virtual,
            context=values["context"],
            replicate=replicate,
            shard=shard,
            schedule=values["schedule"],
        )
        layout = replace(layout, microbatches=layout.microbatch_count * values["accumulate"])
        cases.append(
            Case(
                family=next(sliding if values["sliding"] else full),
                layout=layout,
                layers=max(5, layout.stages + 1) if layout.stages < 8 else 8,
                tied=values["tied"],
                kind=values["kind"],
                evaluate=values["evaluate"],
                recompute=values["recompute"],
            )
        )
    return cases


MIXTURE = [
    Case("qwen3_moe", Layout(pipeline=2, context=2, shard=2, schedule="1f1b"), 4),
    Case("qwen3_moe", Layout(pipeline=2, virtual=2, replicate=2, shard=1, schedule="zbv"), 4, tied=False, kind="plain"),
    Case("qwen2_moe", Layout(tensor=2, shard=2), 3, tied=False, kind="plain"),  # a shared expert, and a dense layer
    # more microbatches than rows: in one of them all tokens are equal and may choose the experts of only one rank
    Case("qwen3_moe", Layout(tensor=2, pipeline=2, shard=1, microbatches=8), 4, False, recompute=True, evaluate=True),
]
