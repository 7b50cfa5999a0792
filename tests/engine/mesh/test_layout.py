"""Layouts are checked before any process group exists, with all reasons at once; ranks, stages and tokens are complete."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig

import families
from megatrain.engine.mesh.context_parallel import zigzag_order
from megatrain.engine.mesh.layout import SCHEDULES, Layout, MeshPlan, split_layers
from megatrain.errors import UserError

FACTORS = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64, "original_max_position_embeddings": 1024}
LLAMA = families.config(families.BY_NAME["llama"])  # 4 layers, 4 heads, 2 kv heads


def test_a_layout_that_fits_has_no_problems():
    layout = Layout(tensor=2, pipeline=2, context=2)
    assert layout.problems(LLAMA, world=8, rows=2) == []
    assert layout.checked(LLAMA, world=8).sizes == (2, 1, 1, 2, 2)
    assert layout.checked(LLAMA, world=16).shard == 2


def test_all_problems_are_reported_at_once_with_sizes_that_would_fit():
    bad = Layout(tensor=5, pipeline=8, virtual=2, shard=3, schedule="1f1b", microbatches=4)
    with pytest.raises(UserError) as error:
        bad.checked(LLAMA, world=7, rows=1)
    text = str(error.value)
    assert "120 ranks, but there are 7 processes" in text
    assert "schedule 1f1b needs exactly 1 virtual" in text and "interleaved" in text
    assert "microbatches 4 are fewer than the 8" in text
    assert "4 layers cannot fill pipeline 8 x virtual 2" in text and "pipeline 2 would fit" in text
    assert "is not a multiple of tensor 5; tensor 1 or 2 or" in text
    assert "a step has 1 row, fewer than 3 data ranks x 4 microbatches = 12" in text


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(tensor=0, pipeline=-1), ["tensor = 0", "pipeline = -1"]),
        (Layout(schedule="gpipe"), ["'gpipe' is unknown", "zbv"]),
        (Layout(virtual=2), ["virtual 2 needs pipeline ranks"]),
        (
            Layout(pipeline=2, virtual=2, schedule="interleaved", microbatches=5),
            ["microbatches 5 do not divide", "4 or 6"],
        ),
        (Layout(pipeline=2, virtual=2, schedule="dualpipev", microbatches=3), ["fewer than the 4"]),
        (Layout(pipeline=2, schedule="zbv"), ["needs exactly 2 virtual"]),
        (Layout(shard=4), ["shard 2 would fit"]),
        (Layout(replicate=3), ["start 3 processes", "divides 2"]),
    ],
)
def test_problems(layout, words):
    problems = "\n".join(layout.problems(LLAMA, world=2))
    for word in words:
        assert word in problems, problems


def test_families_without_a_tensor_plan_are_refused_by_name():
    deepseek = families.config(families.BY_NAME["deepseek_v3"])
    assert any("deepseek_v3 is not tested with tensor" in p for p in Layout(tensor=2).problems(deepseek, world=2))
    gpt2 = families.config(families.BY_NAME["gpt2"])
    assert any("no tensor-parallel plan" in p for p in Layout(tensor=2).problems(gpt2, world=2))


def test_experts_divide_by_tensor():
    mixtral = families.config(families.BY_NAME["mixtral"])
    assert Layout(tensor=2).problems(mixtral, world=2) == []
    mixtral.num_local_experts = 5
    problems = Layout(tensor=2).problems(mixtral, world=2)
    assert "num_local_experts 5 is not a multiple of tensor 2; tensor 1 or 5 would fit" in problems


def test_every_tensor_rank_has_rows_of_the_vocabulary():
    """With 64 ranks of 4 rows each, the last one would have none of 251 rows."""
    assert any("vocab_size 251 leaves a rank of tensor 64" in p for p in Layout(tensor=64).problems(LLAMA, world=64))
    assert not any("vocab_size" in p for p in Layout(tensor=32).problems(LLAMA, world=32))


@pytest.mark.parametrize("rope", [{"rope_type": "dynamic", "factor": 2.0}, {"rope_type": "longrope", **FACTORS}])
def test_context_parallel_refuses_rotary_frequencies_that_depend_on_a_documents_length(rope):
    config = LlamaConfig(rope_parameters={"rope_theta": 1e4, **rope})
    (problem,) = Layout(context=2).problems(config, world=2)
    assert f"the rotary scaling {rope['rope_type']} needs their length" in problem
    assert Layout(context=1, shard=2).problems(config, world=2) == []


def test_context_parallel_refuses_layers_it_cannot_split():
    bamba = families.config(families.BY_NAME["qwen3_next"])
    assert any("linear_attention" in p for p in Layout(context=2).problems(bamba, world=2))


def test_dropout_is_refused_where_ranks_would_differ():
    config = families.config(families.BY_NAME["llama"], dropout=0.1)
    assert any("attention_dropout 0.1" in p for p in Layout(tensor=2).problems(config, world=2))
    assert Layout().problems(config, world=2) == []


def test_every_rank_has_a_different_coordinate():
    layout = Layout(tensor=2, pipeline=2, context=2, replicate=3, shard=2)
    seen = {layout.coordinate(rank) for rank in range(layout.world)}
    assert len(seen) == layout.world == 48
    assert all(layout.rank(layout.coordinate(rank)) == rank for rank in range(48))
    assert layout.coordinate(1).tensor == 1 and layout.coordinate(24).pipeline == 1


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pipeline", [2, 3, 4])
def test_every_stage_has_one_holder(schedule, pipeline):
    layout = Layout(pipeline=pipeline, virtual=SCHEDULES[schedule].virtual[0], schedule=schedule, shard=1)
    held = [stage for rank in range(pipeline) for stage in layout.stages_of(rank)]
    assert sorted(held) == list(range(layout.stages))
    assert all(stage in layout.stages_of(layout.holder_of(stage)) for stage in held)


@pytest.mark.parametrize("layers", range(1, 14))
def test_no_layer_is_dropped_whatever_the_number_of_stages(layers):
    for stages in range(1, layers + 1):
        for edges in ((0.0, 0.0), (3.5, 3.5), (100.0, 0.0), (0.0, 7.0)):
            cut = split_layers(layers, stages, 1.0, *edges)
            assert [layer for part in cut for layer in part] == list(range(layers))
            assert len(cut) == stages and all(len(part) >= 1 for part in cut)


def test_embedding_and_head_count_in_the_split():
    assert [len(part) for part in split_layers(10, 2, 1.0, 4.0, 0.0)] == [3, 7]
    assert [len(part) for part in split_layers(126, 16, 1.0, 0.7, 0.7)] == [7, *[8] * 14, 7]


def test_a_plan_is_reduced_until_microbatches_have_one_row():
    plans = [MeshPlan(Layout(pipeline=2, shard=1))]
    while (reduced := plans[-1].reduced(rows=9)) is not None:
        plans.append(reduced)
    assert [plan.reduced_by for plan in plans] == [
        "", "activations.policy: recompute", "parallel.microbatches: 4", "parallel.microbatches: 8",
    ]  # fmt: skip
    assert [plan.recompute for plan in plans] == [False, True, True, True]
    recomputing = MeshPlan(Layout(pipeline=2, shard=1, schedule="zb1p", microbatches=2)).reduced(rows=3)
    assert recomputing is not None and recomputing.reduced(rows=3) is None


def test_zigzag_gives_each_rank_the_same_causal_work():
    parts = zigzag_order(48, 4).view(4, 12).tolist()
    assert sorted(t for part in parts for t in part) == list(range(48))
    assert len({sum(t + 1 for t in part) for part in parts}) == 1
