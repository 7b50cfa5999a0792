"""What a rank holds whatever the batch: a formula, and the refusal of layouts that it alone rules out."""

from __future__ import annotations

import pytest
import torch

import families
from megatrain.engine.mesh.layout import Layout
from megatrain.engine.mesh.memory import Held, least_held, memory_problem, state_lines
from megatrain.models.build import build_meta_model
from megatrain.models.structure import Structure, dissect
from megatrain.optim.adamw import AdamW


@pytest.fixture(scope="module")
def structure() -> Structure:
    config = families.config(families.BY_NAME["llama"])
    config.num_hidden_layers = 8
    return dissect(build_meta_model(config, compute_dtype=torch.float32))


def test_bytes_of_an_element_and_what_a_pipeline_keeps_gathered() -> None:
    held = Held(whole=800.0, sharded=100.0, edges=300.0, largest=50.0)
    lines = state_lines(True, held, compute_bytes=2, optim=AdamW())
    assert sum(lines.values()) == 12 * 100 + (2 + 4) * 800 + 6 * 50
    lines = state_lines(False, held, compute_bytes=2, optim=AdamW())
    assert sum(lines.values()) == 16 * 100 + 2 * (300 + 3 * 50) + 6 * (300 + 2 * 50)


def test_all_ranks_together_hold_the_model_once(structure: Structure) -> None:
    total = sum(unit.layout.param_count for unit in structure.units)
    for layout in (Layout(shard=4), Layout(tensor=2, pipeline=4, shard=2), Layout(pipeline=2, context=2, shard=1)):
        held = least_held(structure, layout)
        assert sum(h.whole for h in held) * layout.tensor == pytest.approx(total)
        assert sum(h.sharded for h in held) * layout.tensor * layout.fsdp == pytest.approx(total)


def test_a_layout_that_cannot_fit_says_what_would(structure: Structure) -> None:
    layout = Layout(pipeline=2, shard=1)
    (heaviest,) = [sum(state_lines(True, h, 2, AdamW()).values()) for h in least_held(structure, layout)][1:]
    assert memory_problem(structure, layout, int(2 * heaviest), 2, AdamW()) is None
    problem = memory_problem(structure, layout, int(0.6 * heaviest), 2, AdamW())
    assert problem is not None
    assert "pipeline rank" in problem and "before any activation" in problem and "shard 3 or more would fit" in problem
    assert memory_problem(structure, Layout(pipeline=2, shard=2), int(0.6 * heaviest), 2, AdamW()) is not None
    assert memory_problem(structure, Layout(pipeline=2, shard=3), int(0.6 * heaviest), 2, AdamW()) is None
    problem = memory_problem(structure, layout, int(0.1 * heaviest), 2, AdamW())
    assert problem is not None and "more tensor or pipeline ranks" in problem
