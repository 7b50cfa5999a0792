"""The families that tensor and context parallel take are those that are proven here; others are refused by name."""

from __future__ import annotations

import pytest

import families
from megatrain.mesh.layout import CONTEXT_FAMILIES, TENSOR_FAMILIES, Layout
from mesh_cases import Case
from mesh_parity import differences, on_ranks, plain


@pytest.mark.parametrize("family", sorted(TENSOR_FAMILIES))
def test_tensor_and_context_parallel_compute_the_family(family):
    case = Case(family, Layout(tensor=2, context=2, shard=1), 4, tied=True, kind="packed")
    assert not differences(on_ranks(case), plain(case))


@pytest.mark.parametrize("family", sorted(CONTEXT_FAMILIES - TENSOR_FAMILIES))
def test_context_parallel_computes_the_family(family):
    case = Case(family, Layout(context=2, shard=1), 4, tied=True, kind="packed")
    assert not differences(on_ranks(case), plain(case))


@pytest.mark.parametrize(
    ("family", "heads"), [("qwen3", (3, 3)), pytest.param("llama", (4, 1), marks=pytest.mark.slow)]
)
def test_heads_that_do_not_divide_are_computed_whole(family, heads):
    """As SmolLM2-135M's 9 heads of 3 key-value heads on 2 tensor ranks; qwen3 norms queries and keys."""
    layout = Layout(tensor=2, pipeline=2, shard=1)
    case = Case(family, layout, 4, tied=True, kind="packed", heads=heads)
    assert not differences(on_ranks(case), plain(case))


def test_others_are_refused_by_name():
    config = families.config(families.BY_NAME["olmo"])
    for layout, word in ((Layout(tensor=2), "tensor"), (Layout(context=2), "context")):
        assert any(f"olmo has not been proven with {word} parallel" in p for p in layout.problems(config, world=2))
