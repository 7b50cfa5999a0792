"""What a rank holds, by formula and by the engine's own code on a fake process group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch.distributed as dist

from megatrain.engine.mesh.layout import Layout
from megatrain.planner.cluster.job import Job
from megatrain.planner.cluster.shards import count_on_fake_group, fake_group

LAYOUTS = [
    Layout(shard=64),
    Layout(tensor=2, pipeline=2, shard=16),
    Layout(pipeline=2, virtual=2, schedule="zbv", context=2, shard=8, replicate=2),
    Layout(tensor=2, pipeline=4, shard=3),
    Layout(tensor=2, context=4, shard=8),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_the_formula_counts_what_the_engine_builds(job: Callable[..., Job], layout: Layout, family: str) -> None:
    inventory = job(family).inventory
    parts = inventory.parts(layout)
    for rank in range(layout.pipeline):
        formula = sum(inventory.stage(parts[s], layout.tensor, layout.fsdp) for s in layout.stages_of(rank))
        assert count_on_fake_group(inventory.structure, layout, rank) == formula


def test_mixtures_are_counted_too(job: Callable[..., Job]) -> None:
    inventory = job("qwen3_moe").inventory
    layout = Layout(tensor=2, pipeline=2, shard=4)
    parts = inventory.parts(layout)
    assert count_on_fake_group(inventory.structure, layout, 1) == inventory.stage(parts[1], 2, 4)
    experts = [piece for group in inventory.groups for piece in group if len(piece.shape) == 3]
    assert experts and {piece.tensor_dim for piece in experts} == {0}


def test_all_stages_hold_the_model_once(job: Callable[..., Job]) -> None:
    """Case 43, for a plan: the sum over stages is the model, and a tied head a second time on a stage of its own."""
    inventory = job("llama").inventory
    whole = sum(p.numel() for p in inventory.structure.model.parameters())
    for stages in (1, 2, 4):
        parts = inventory.parts(Layout(pipeline=stages, shard=1))
        tied = sum(piece.shape[0] * piece.shape[1] for piece in inventory.tied) if stages > 1 else 0
        assert sum(inventory.stage(part, 1, 1) for part in parts) == whole + tied


def test_tensor_parallel_divides_matrices_and_not_norms(job: Callable[..., Job]) -> None:
    inventory = job("8b").inventory
    assert [piece.shape for piece in inventory.groups[0] if piece.tensor_dim is None] == [(4096,), (4096,)]
    whole, eighth = inventory.layer(0, 1, 1), inventory.layer(0, 8, 1)
    assert eighth == (whole - 2 * 4096) // 8 + 2 * 4096


def test_no_process_group_is_left() -> None:
    with fake_group(1024, 7):
        assert dist.get_world_size() == 1024
    assert not dist.is_initialized()


def test_a_layout_equals_itself_with_replicas(job: Callable[..., Job]) -> None:
    layout = Layout(tensor=2, shard=4, replicate=2)
    structure = job("llama").inventory.structure
    assert count_on_fake_group(structure, layout, 0) == count_on_fake_group(structure, replace(layout, replicate=8), 0)
