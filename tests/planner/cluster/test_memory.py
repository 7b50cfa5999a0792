"""Memory of a rank by formula, and the refusal of layouts whose state alone does not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import families
from megatrain.engine.mesh.layout import Layout
from megatrain.models.build import build_meta_model
from megatrain.models.structure import Structure, dissect
from megatrain.optim.adamw import AdamW
from megatrain.planner.cluster.candidate import Candidate, Overheads, Request
from megatrain.planner.cluster.estimate import evaluate
from megatrain.planner.cluster.memory import (
    Elements,
    heaviest_rank,
    least_elements,
    memory_problem,
    saved_by_layer,
    state_lines,
)


@pytest.fixture(scope="module")
def structure() -> Structure:
    config = families.config(families.BY_NAME["llama"])
    config.num_hidden_layers = 8
    return dissect(build_meta_model(config, compute_dtype=torch.float32))


def test_bytes_of_an_element_with_and_without_a_pipeline() -> None:
    held = Elements(whole=800.0, sharded=100.0, edges=300.0, largest=50.0)
    lines = state_lines(True, held, compute_bytes=2, optim=AdamW())
    assert sum(lines.values()) == 12 * 100 + (2 + 4) * 800 + 6 * 50
    lines = state_lines(False, held, compute_bytes=2, optim=AdamW())
    assert sum(lines.values()) == 16 * 100 + 2 * (300 + 3 * 50) + 6 * (300 + 2 * 50)


def test_all_ranks_together_hold_the_model_once(structure: Structure) -> None:
    total = sum(unit.layout.param_count for unit in structure.units)
    for layout in (Layout(shard=4), Layout(tensor=2, pipeline=4, shard=2), Layout(pipeline=2, context=2, shard=1)):
        held = least_elements(structure, layout)
        assert sum(h.whole for h in held) * layout.tensor == pytest.approx(total)
        assert sum(h.sharded for h in held) * layout.tensor * layout.fsdp == pytest.approx(total)


def test_a_layout_that_cannot_fit_says_what_would(structure: Structure) -> None:
    layout = Layout(pipeline=2, shard=1)
    (heaviest,) = [sum(state_lines(True, h, 2, AdamW()).values()) for h in least_elements(structure, layout)][1:]
    assert memory_problem(structure, layout, int(2 * heaviest), 2, AdamW()) is None
    problem = memory_problem(structure, layout, int(0.6 * heaviest), 2, AdamW())
    assert problem is not None
    assert "pipeline rank" in problem and "before any activation" in problem and "shard 3 or more would fit" in problem
    assert memory_problem(structure, Layout(pipeline=2, shard=2), int(0.6 * heaviest), 2, AdamW()) is not None
    assert memory_problem(structure, Layout(pipeline=2, shard=3), int(0.6 * heaviest), 2, AdamW()) is None
    problem = memory_problem(structure, layout, int(0.1 * heaviest), 2, AdamW())
    assert problem is not None and "use more tensor or pipeline ranks" in problem


@pytest.fixture
def big(requests: Callable[..., Request]) -> Request:
    return requests("8b")


def test_memory_by_formula(big: Request) -> None:
    """Two stages, no tensor parallel: rank 0 has two microbatches in flight, each the inputs of its layers."""
    candidate = Candidate(Layout(pipeline=2, shard=32, microbatches=8), recompute=True)
    memory = heaviest_rank(big, candidate)
    tokens = 1 * 4096
    parts = big.inventory.parts(candidate.layout)
    part = parts[memory.pipeline_rank]
    whole, sharded = big.inventory.stage(part, 1, 1), big.inventory.stage(part, 1, 32)
    lines = memory.lines
    assert lines["masters, moments (12 bytes, sharded)"] == 12 * sharded
    assert lines["gathered weights"] == 2 * whole
    assert lines["gradient sums of gathered weights (fp32)"] == 4 * whole
    in_flight = 2 - memory.pipeline_rank
    assert lines["activations of microbatches in flight"] == in_flight * len(part.layers) * tokens * 4096 * 2
    assert lines["receive buffers of the pipeline"] == 8 * tokens * 4096 * 2


def test_keeping_activations_costs_the_bytes_that_layers_save(big: Request) -> None:
    layout = Layout(pipeline=2, shard=32, microbatches=8)
    kept, again = (heaviest_rank(big, Candidate(layout, recompute)) for recompute in (False, True))
    saved, eager = (
        saved_by_layer(replace(big, overheads=Overheads(compiled=which)), Candidate(layout, False), 0)
        for which in ("plain", "none")
    )
    assert (
        kept.lines["activations of microbatches in flight"] > 10 * again.lines["activations of microbatches in flight"]
    )
    assert saved == pytest.approx(big.inventory.shape.costs[0].saved_bytes.at(4096) * 4096)
    assert eager == pytest.approx(1.7 * saved)


def test_context_ranks_hold_fewer_tokens(big: Request) -> None:
    long = replace(big, step=replace(big.step, rows=16, tokens=65536))
    candidates = [Candidate(Layout(context=c, shard=16, microbatches=1), True) for c in (4, 8)]
    few, many = (
        heaviest_rank(long, candidate).lines["activations of microbatches in flight"] for candidate in candidates
    )
    assert few == pytest.approx(2 * many)
    assert evaluate(long, candidates[1]).seconds["context"] > 0
