"""An evaluated candidate: seconds by cause add up, and the obvious comparisons come out right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from megatrain.engine.mesh.layout import Layout
from megatrain.planner.cluster import estimate as estimating
from megatrain.planner.cluster.candidate import Candidate, Overheads, Request
from megatrain.planner.cluster.estimate import evaluate, quick_step_s

PLAIN = Candidate(Layout(shard=64, microbatches=4), recompute=True)
PIPELINE = Candidate(Layout(pipeline=4, shard=16, microbatches=16), recompute=True)
SPLIT = Candidate(Layout(tensor=8, pipeline=2, shard=4, microbatches=64), recompute=False)


@pytest.fixture
def big(requests: Callable[..., Request]) -> Request:
    return requests("8b")


@pytest.mark.parametrize("candidate", [PLAIN, PIPELINE, SPLIT], ids=["fsdp", "pipeline", "tensor"])
def test_seconds_add_up_to_the_step(big: Request, candidate: Candidate) -> None:
    estimate = evaluate(big, candidate)
    assert estimate.step_s == pytest.approx(sum(estimate.seconds.values()))
    assert estimate.tokens_per_s == pytest.approx(big.step.all_tokens / estimate.step_s)
    assert 0.05 < estimate.mfu < 0.75
    assert estimate.seconds.keys() <= {"compute", "recompute", "tensor", "context", "shard", "bubble", "optimizer"}


def test_the_quick_estimate_is_near_the_played_table(big: Request) -> None:
    for candidate in (PLAIN, PIPELINE, SPLIT):
        assert quick_step_s(big, candidate) == pytest.approx(evaluate(big, candidate).step_s, rel=0.1)


def test_playing_a_part_of_many_microbatches_gives_the_same_step(big: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    for layout in (PIPELINE.layout, Layout(pipeline=4, virtual=2, schedule="interleaved", shard=16)):
        candidate = Candidate(replace(layout, microbatches=32), recompute=True)
        short = evaluate(replace(big, step=replace(big.step, rows=512)), candidate)
        monkeypatch.setattr(estimating, "MAX_PLAYED", 100)
        whole = evaluate(replace(big, step=replace(big.step, rows=512)), candidate)
        monkeypatch.undo()
        assert short.step_s == pytest.approx(whole.step_s, rel=1e-3)
        assert short.bubble == pytest.approx(whole.bubble, abs=1e-3)


def test_a_fast_link_and_hidden_collectives_save_time(big: Request) -> None:
    slow = replace(big, cluster=replace(big.cluster, node_gbps=big.cluster.node_gbps / 10))
    hidden = replace(big, overheads=Overheads(tensor_overlap=1.0))
    assert evaluate(slow, SPLIT).seconds["tensor"] > 5 * evaluate(big, SPLIT).seconds["tensor"]
    assert "tensor" not in evaluate(hidden, SPLIT).seconds
    assert evaluate(slow, SPLIT).bottleneck == "tensor-parallel collectives inside nodes"


def test_a_slow_network_shows_in_fsdp_and_not_in_tensor(big: Request) -> None:
    slow = replace(big, cluster=replace(big.cluster, network_gbps=0.5))
    assert evaluate(slow, PLAIN).bottleneck == "gathering parameters and reducing gradients over the network"
    assert evaluate(slow, SPLIT).seconds["tensor"] == evaluate(big, SPLIT).seconds["tensor"]


def test_interleaving_shrinks_the_bubble(big: Request) -> None:
    layout = Layout(pipeline=4, shard=16, microbatches=4)
    once = evaluate(big, Candidate(layout, True))
    twice = evaluate(big, Candidate(replace(layout, schedule="interleaved", virtual=2), True))
    assert once.bubble == pytest.approx(3 / 7, abs=0.05)
    assert twice.bubble < 0.75 * once.bubble
    assert once.bottleneck == "the pipeline's bubble"


def test_parameters_gathered_ahead_do_not_delay_one_stage_after_the_other(big: Request) -> None:
    slow = replace(big, cluster=replace(big.cluster, network_gbps=2))
    candidate = Candidate(Layout(pipeline=4, shard=16, microbatches=8), True)
    assert (
        evaluate(replace(slow, overheads=Overheads(gathers_ahead=True)), candidate).step_s
        < evaluate(slow, candidate).step_s
    )
