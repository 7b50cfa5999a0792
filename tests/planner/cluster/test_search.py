"""The search: what it tries, what it refuses, and what it finds."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from transformers import PreTrainedConfig

from megatrain.engine.mesh.layout import Layout
from megatrain.errors import PlanRefused
from megatrain.planner.cluster.job import Job, Way
from megatrain.planner.cluster.judge import allowed_bytes, judge
from megatrain.planner.cluster.plan import look_at, plan_cluster
from megatrain.planner.cluster.report import cluster_text
from megatrain.planner.cluster.search import layouts, search, ways

Configs = Callable[[str], PreTrainedConfig]
Jobs = Callable[..., Job]


def test_every_layout_fills_the_world(job: Jobs) -> None:
    tried = list(layouts(job("llama", rows=64)))
    assert {layout.world for layout in tried} == {64}
    assert {layout.schedule for layout in tried} == {"1f1b", "interleaved", "zb1p", "zbv", "dualpipev"}
    assert len(tried) == len(set(tried))


def test_what_is_refused_is_counted_by_reason(job: Jobs, config: Configs) -> None:
    refused: Counter[str] = Counter()
    kept = list(ways(job("llama", rows=64), config("llama"), refused))
    assert refused["heads do not divide by tensor: every rank would compute the whole attention"] > 0
    assert all(not way.layout.problems(config("llama"), 64, 64) for way in kept)
    assert not any(way.recompute and way.layout.pipeline > 1 and way.layout.kind.splits_backward for way in kept)


def test_families_that_are_not_proven_get_no_tensor_parallel(job: Jobs, config: Configs) -> None:
    refused: Counter[str] = Counter()
    assert {way.layout.tensor for way in ways(job("olmo2", rows=64), config("olmo2"), refused)} == {1}
    assert refused["the family is not tested with this dimension"] > 0


def test_families_that_cannot_be_cut_get_no_pipeline(job: Jobs, config: Configs) -> None:
    refused: Counter[str] = Counter()
    assert {way.layout.pipeline for way in ways(job("gpt2", rows=64), config("gpt2"), refused)} == {1}
    assert refused["the family cannot be cut into pipeline stages"] > 0


def test_the_best_fit_and_are_in_order(job: Jobs, config: Configs) -> None:
    found = search(job("8b"), config("8b"))
    merits = [verdict.useful_tokens_per_s for verdict in found.best]
    assert merits == sorted(merits, reverse=True)
    assert all(verdict.memory.nbytes <= allowed_bytes(job("8b")) for verdict in found.best)
    assert found.tried == found.fit + found.refused["more memory than a GPU has"]
    random_others = [Way(Layout(pipeline=8, shard=8, microbatches=32), True), Way(Layout(tensor=8, shard=8), True)]
    assert all(judge(job("8b"), way).step_s >= found.best[0].step_s for way in random_others)


def test_a_plan_is_checked_by_the_engines_own_code_and_read_by_people(job: Jobs, config: Configs) -> None:
    yours = Way(Layout(pipeline=8, shard=8, microbatches=32), True)
    plan = plan_cluster(job("8b"), config("8b"), yours=yours, steps=1000)
    text = cluster_text(plan)
    for part in (
        "bottleneck:",
        "the engine's own code",
        "torchrun --nnodes 8",
        "parallel:",
        "goodput",
        "file's own layout",
    ):
        assert part in text
    assert plan.elements[0] > 0
    assert plan.as_dict()["best"][0]["counted_elements_of_heaviest_rank"] == plan.elements[0]


def test_your_own_layout_is_refused_with_all_reasons(job: Jobs, config: Configs) -> None:
    found = look_at(job("8b"), config("8b"), Way(Layout(tensor=3, pipeline=5, shard=7), True))
    assert found.verdict is None
    text = "\n".join(found.problems)
    assert "105 ranks, but there are 64 processes" in text
    assert "intermediate_size 14336 is not a multiple of tensor 3" in text


def test_your_own_layout_that_does_not_fit_gets_its_ledger(job: Jobs, config: Configs) -> None:
    found = look_at(job("8b"), config("8b"), Way(Layout(replicate=64, shard=1, microbatches=1), False))
    (problem,) = found.problems
    assert found.verdict is not None
    assert "masters, moments, gradients" in problem and "GiB of" in problem


def test_your_own_layout_with_heads_that_do_not_divide_says_so(job: Jobs, config: Configs) -> None:
    one_key = copy.deepcopy(config("8b"))
    one_key.num_key_value_heads = 1
    found = look_at(job("8b"), one_key, Way(Layout(tensor=2, shard=32, microbatches=8), True))
    assert not found.problems
    assert found.note is not None and "whole attention" in found.note


def test_what_fits_nowhere_is_refused_with_the_ledger(job: Jobs, config: Configs) -> None:
    small = replace(job("8b"), cluster=replace(job("8b").cluster, device_gib=4.0))
    with pytest.raises(PlanRefused) as error:
        plan_cluster(small, config("8b"))
    for part in ("no layout fits 64 GPUs", "more memory than a GPU has", "nearest:", "ways down", "process, NCCL"):
        assert part in str(error.value)
