"""The search: which layouts it tries, rejects and finds."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from transformers import PreTrainedConfig

from megatrain.engine.mesh.layout import Layout
from megatrain.errors import PlanRefused
from megatrain.planner.cluster.candidate import Candidate, Request
from megatrain.planner.cluster.estimate import allowed_bytes, evaluate
from megatrain.planner.cluster.plan import cluster_text, evaluate_own, plan_cluster
from megatrain.planner.cluster.search import candidates, layouts, search

Configs = Callable[[str], PreTrainedConfig]
Requests = Callable[..., Request]


def test_every_layout_fills_the_world(requests: Requests) -> None:
    tried = list(layouts(requests("llama", rows=64)))
    assert {layout.world for layout in tried} == {64}
    assert {layout.schedule for layout in tried} == {"1f1b", "interleaved", "zb1p", "zbv", "dualpipev"}
    assert len(tried) == len(set(tried))


def test_rejected_layouts_are_counted_by_reason(requests: Requests, config: Configs) -> None:
    refused: Counter[str] = Counter()
    kept = list(candidates(requests("llama", rows=64), config("llama"), refused))
    assert refused["heads do not divide by tensor: every rank would compute the whole attention"] > 0
    assert all(not candidate.layout.problems(config("llama"), 64, 64) for candidate in kept)
    assert not any(
        candidate.recompute and candidate.layout.pipeline > 1 and candidate.layout.kind.splits_backward
        for candidate in kept
    )


def test_families_that_are_not_tested_get_no_tensor_parallel(requests: Requests, config: Configs) -> None:
    refused: Counter[str] = Counter()
    assert {
        candidate.layout.tensor for candidate in candidates(requests("olmo2", rows=64), config("olmo2"), refused)
    } == {1}
    assert refused["the family is not tested with this dimension"] > 0


def test_families_that_cannot_be_cut_get_no_pipeline(requests: Requests, config: Configs) -> None:
    refused: Counter[str] = Counter()
    assert {
        candidate.layout.pipeline for candidate in candidates(requests("gpt2", rows=64), config("gpt2"), refused)
    } == {1}
    assert refused["the family cannot be cut into pipeline stages"] > 0


def test_the_best_fit_and_are_in_order(requests: Requests, config: Configs) -> None:
    found = search(requests("8b"), config("8b"))
    merits = [estimate.useful_tokens_per_s for estimate in found.best]
    assert merits == sorted(merits, reverse=True)
    assert all(estimate.memory.nbytes <= allowed_bytes(requests("8b")) for estimate in found.best)
    assert found.tried == found.fit + found.refused["more memory than a GPU has"]
    others = [Candidate(Layout(pipeline=8, shard=8, microbatches=32), True), Candidate(Layout(tensor=8, shard=8), True)]
    assert all(evaluate(requests("8b"), candidate).step_s >= found.best[0].step_s for candidate in others)


def test_a_plan_is_checked_by_the_engines_own_code_and_printed(requests: Requests, config: Configs) -> None:
    own = Candidate(Layout(pipeline=8, shard=8, microbatches=32), True)
    plan = plan_cluster(requests("8b"), config("8b"), own=own, steps=1000)
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


def test_a_files_own_layout_is_refused_with_all_reasons(requests: Requests, config: Configs) -> None:
    found = evaluate_own(requests("8b"), config("8b"), Candidate(Layout(tensor=3, pipeline=5, shard=7), True))
    assert found.estimate is None
    text = "\n".join(found.problems)
    assert "105 ranks, but there are 64 processes" in text
    assert "intermediate_size 14336 is not a multiple of tensor 3" in text


def test_a_files_own_layout_that_does_not_fit_gets_its_memory_breakdown(requests: Requests, config: Configs) -> None:
    found = evaluate_own(requests("8b"), config("8b"), Candidate(Layout(replicate=64, shard=1, microbatches=1), False))
    (problem,) = found.problems
    assert found.estimate is not None
    assert "masters, moments, gradients" in problem and "GiB of" in problem


def test_a_files_own_layout_with_heads_that_do_not_divide_says_so(requests: Requests, config: Configs) -> None:
    one_key = copy.deepcopy(config("8b"))
    one_key.num_key_value_heads = 1
    found = evaluate_own(requests("8b"), one_key, Candidate(Layout(tensor=2, shard=32, microbatches=8), True))
    assert not found.problems
    assert found.note is not None and "whole attention" in found.note


def test_a_model_that_fits_nowhere_is_refused_with_the_memory_breakdown(requests: Requests, config: Configs) -> None:
    small = replace(requests("8b"), cluster=replace(requests("8b").cluster, device_gib=4.0))
    with pytest.raises(PlanRefused) as error:
        plan_cluster(small, config("8b"))
    for part in (
        "no layout fits 64 GPUs",
        "more memory than a GPU has",
        "nearest:",
        "to reduce memory",
        "process, NCCL",
    ):
        assert part in str(error.value)
