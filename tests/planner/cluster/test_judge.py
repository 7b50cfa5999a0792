"""A judged way: seconds by cause add up, memory follows its formula, and the obvious comparisons come out right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from megatrain.engine.mesh.layout import Layout
from megatrain.planner.cluster import judge as judging
from megatrain.planner.cluster.job import Job, Practice, Way
from megatrain.planner.cluster.judge import estimate, judge
from megatrain.planner.cluster.memory import heaviest_rank, saved_by_layer

PLAIN = Way(Layout(shard=64, microbatches=4), recompute=True)
PIPELINE = Way(Layout(pipeline=4, shard=16, microbatches=16), recompute=True)
SPLIT = Way(Layout(tensor=8, pipeline=2, shard=4, microbatches=64), recompute=False)


@pytest.fixture
def big(job: Callable[..., Job]) -> Job:
    return job("8b")


@pytest.mark.parametrize("way", [PLAIN, PIPELINE, SPLIT], ids=["fsdp", "pipeline", "tensor"])
def test_seconds_add_up_to_the_step(big: Job, way: Way) -> None:
    verdict = judge(big, way)
    assert verdict.step_s == pytest.approx(sum(verdict.seconds.values()))
    assert verdict.tokens_per_s == pytest.approx(big.step.all_tokens / verdict.step_s)
    assert 0.05 < verdict.mfu < 0.75
    assert verdict.seconds.keys() <= {"compute", "recompute", "tensor", "context", "shard", "bubble", "optimizer"}


def test_the_quick_estimate_is_near_the_played_table(big: Job) -> None:
    for way in (PLAIN, PIPELINE, SPLIT):
        assert estimate(big, way) == pytest.approx(judge(big, way).step_s, rel=0.1)


def test_many_microbatches_are_played_in_part_and_come_to_the_same(big: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    for layout in (PIPELINE.layout, Layout(pipeline=4, virtual=2, schedule="interleaved", shard=16)):
        way = Way(replace(layout, microbatches=32), recompute=True)
        short = judge(replace(big, step=replace(big.step, rows=512)), way)
        monkeypatch.setattr(judging, "MOST_PLAYED", 100)
        whole = judge(replace(big, step=replace(big.step, rows=512)), way)
        monkeypatch.undo()
        assert short.step_s == pytest.approx(whole.step_s, rel=1e-3)
        assert short.idle == pytest.approx(whole.idle, abs=1e-3)


def test_a_faster_link_and_hidden_collectives_save_time(big: Job) -> None:
    slow = replace(big, cluster=replace(big.cluster, node_gbps=big.cluster.node_gbps / 10))
    hidden = replace(big, practice=Practice(tensor_overlap=1.0))
    assert judge(slow, SPLIT).seconds["tensor"] > 5 * judge(big, SPLIT).seconds["tensor"]
    assert "tensor" not in judge(hidden, SPLIT).seconds
    assert judge(slow, SPLIT).bottleneck == "tensor-parallel collectives inside nodes"


def test_a_slow_network_shows_in_fsdp_and_not_in_tensor(big: Job) -> None:
    slow = replace(big, cluster=replace(big.cluster, network_gbps=0.5))
    assert judge(slow, PLAIN).bottleneck == "gathering parameters and reducing gradients over the network"
    assert judge(slow, SPLIT).seconds["tensor"] == judge(big, SPLIT).seconds["tensor"]


def test_interleaving_shrinks_the_bubble(big: Job) -> None:
    layout = Layout(pipeline=4, shard=16, microbatches=4)
    once = judge(big, Way(layout, True))
    twice = judge(big, Way(replace(layout, schedule="interleaved", virtual=2), True))
    assert once.idle == pytest.approx(3 / 7, abs=0.05)
    assert twice.idle < 0.75 * once.idle
    assert once.bottleneck == "the pipeline's bubble"


def test_parameters_gathered_ahead_do_not_delay_one_stage_after_the_other(big: Job) -> None:
    slow = replace(big, cluster=replace(big.cluster, network_gbps=2))
    way = Way(Layout(pipeline=4, shard=16, microbatches=8), True)
    assert judge(replace(slow, practice=Practice(gathers_ahead=True)), way).step_s < judge(slow, way).step_s


def test_memory_by_formula(big: Job) -> None:
    """Two stages, no tensor parallel: rank 0 has two microbatches in flight, each the inputs of its layers."""
    way = Way(Layout(pipeline=2, shard=32, microbatches=8), recompute=True)
    memory = heaviest_rank(big, way)
    tokens = 1 * 4096
    parts = big.inventory.parts(way.layout)
    part = parts[memory.pipeline_rank]
    whole, sharded = big.inventory.stage(part, 1, 1), big.inventory.stage(part, 1, 32)
    lines = memory.lines
    assert lines["masters, moments (12 bytes, sharded)"] == 12 * sharded
    assert lines["gathered weights"] == 2 * whole
    assert lines["gradient sums of gathered weights (fp32)"] == 4 * whole
    in_flight = 2 - memory.pipeline_rank
    assert lines["activations of microbatches in flight"] == in_flight * len(part.layers) * tokens * 4096 * 2
    assert lines["receive buffers of the pipeline"] == 8 * tokens * 4096 * 2


def test_keeping_costs_what_layers_save(big: Job) -> None:
    layout = Layout(pipeline=2, shard=32, microbatches=8)
    kept, again = (heaviest_rank(big, Way(layout, recompute)) for recompute in (False, True))
    saved, eager = (
        saved_by_layer(replace(big, practice=Practice(compiled=which)), Way(layout, False), 0)
        for which in ("plain", "none")
    )
    assert (
        kept.lines["activations of microbatches in flight"] > 10 * again.lines["activations of microbatches in flight"]
    )
    assert saved == pytest.approx(big.inventory.shape.costs[0].saved_bytes.at(4096) * 4096)
    assert eager == pytest.approx(1.7 * saved)


def test_context_ranks_hold_fewer_tokens(big: Job) -> None:
    long = replace(big, step=replace(big.step, rows=16, tokens=65536))
    ways = [Way(Layout(context=c, shard=16, microbatches=1), True) for c in (4, 8)]
    few, many = (heaviest_rank(long, way).lines["activations of microbatches in flight"] for way in ways)
    assert few == pytest.approx(2 * many)
    assert judge(long, ways[1]).seconds["context"] > 0
