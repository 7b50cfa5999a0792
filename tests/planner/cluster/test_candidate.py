"""Elements of a rank, by formula and by the engine's own code on a fake process group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch.distributed as dist

from megatrain.engine.mesh.layout import Layout
from megatrain.planner.cluster.candidate import Request, count_on_fake_group, fake_group

LAYOUTS = [
    Layout(shard=64),
    Layout(tensor=2, pipeline=2, shard=16),
    Layout(pipeline=2, virtual=2, schedule="zbv", context=2, shard=8, replicate=2),
    Layout(tensor=2, pipeline=4, shard=3),
    Layout(tensor=2, context=4, shard=8),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_the_formula_counts_what_the_engine_builds(
    requests: Callable[..., Request], layout: Layout, family: str
) -> None:
    inventory = requests(family).inventory
    for rank in range(layout.pipeline):
        formula = inventory.rank(layout, rank, layout.fsdp)
        assert count_on_fake_group(inventory.structure, layout, rank) == formula


def test_mixtures_are_counted_too(requests: Callable[..., Request]) -> None:
    inventory = requests("qwen3_moe").inventory
    layout = Layout(tensor=2, pipeline=2, shard=4)
    parts = inventory.parts(layout)
    assert count_on_fake_group(inventory.structure, layout, 1) == inventory.stage(parts[1], 2, 4)
    experts = [split for group in inventory.groups for split in group if len(split.shape) == 3]
    assert experts and {split.tensor_dim for split in experts} == {0}


def test_all_stages_hold_the_model_once(requests: Callable[..., Request]) -> None:
    """The sum over stages is the model; a tied head on a separate stage counts twice."""
    inventory = requests("llama").inventory
    whole = sum(p.numel() for p in inventory.structure.model.parameters())
    for stages in (1, 2, 4):
        parts = inventory.parts(Layout(pipeline=stages, shard=1))
        tied = sum(split.shape[0] * split.shape[1] for split in inventory.tied) if stages > 1 else 0
        assert sum(inventory.stage(part, 1, 1) for part in parts) == whole + tied


def test_tensor_parallel_divides_matrices_and_not_norms(requests: Callable[..., Request]) -> None:
    inventory = requests("8b").inventory
    assert [split.shape for split in inventory.groups[0] if split.tensor_dim is None] == [(4096,), (4096,)]
    whole, eighth = inventory.layer(0, 1, 1), inventory.layer(0, 8, 1)
    assert eighth == (whole - 2 * 4096) // 8 + 2 * 4096


def test_no_process_group_is_left() -> None:
    with fake_group(1024, 7):
        assert dist.get_world_size() == 1024
    assert not dist.is_initialized()


def test_a_layout_equals_itself_with_replicas(requests: Callable[..., Request]) -> None:
    layout = Layout(tensor=2, shard=4, replicate=2)
    structure = requests("llama").inventory.structure
    assert count_on_fake_group(structure, layout, 0) == count_on_fake_group(structure, replace(layout, replicate=8), 0)
