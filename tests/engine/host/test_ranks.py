"""The host engine on W ranks computes what one process does: loss, norm, every gradient, weights after three clipped steps."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

import mesh_parity
import mesh_ranks
from fp64 import Fp32MeansFp64
from host_ranks import RankCase, engine_of, on_ranks, plain
from megatrain.device.shards import Shards
from megatrain.host_memory.layout import Shard
from mesh_parity import differences

CASES = {
    "tied": RankCase(),
    "untied-plain": RankCase(tied=False, kind="plain"),
    "padded-rows": RankCase("qwen3", kind="padded", plan={"microbatch_rows": 1}),
    "a-rank-without-targets": RankCase(untargeted=4),
    "fewer-rows-than-ranks": RankCase(rows=2, tied=False),
    "accumulation": RankCase(plan={"accumulation_steps": 2, "microbatch_rows": 1}),
    "staged": RankCase(plan={"pin": "staged"}, staged=True),
    "resident": RankCase(plan={"resident": ["embedding", "layer.1"]}),
    "all-resident-accumulated": RankCase(tied=False, plan={"resident": "all", "accumulation_steps": 2}),
    "replicated": RankCase(plan={"resident": "all", "accumulation_steps": 2, "weight_slots": "all"}),
    "streamed-once": RankCase(tied=False, plan={"resident": ["layer.1"], "weight_slots": "all"}),
    "kept-and-offloaded": RankCase(plan={"keep": [0], "offload_input": [1, 2], "weight_slots": 3}),
    "segment": RankCase(plan={"segment": 2}),
    "gemma2": RankCase("gemma2", plan={"resident": ["layer.0"]}),
}


@functools.cache
def one_process(name: str):
    return plain(CASES[name])


WORLDS = {name: 2 + number % 3 for number, name in enumerate(CASES)}
"""The number of ranks of each case; all other numbers are tested among the slow ones."""


def pairs(chosen: bool):
    rest = [(name, world) for name in CASES for world in (1, 2, 3, 4) if WORLDS[name] != world]
    return list(WORLDS.items()) if chosen else rest


@pytest.mark.parametrize(("name", "world"), [*pairs(chosen=True), ("tied", 1), ("tied", 3), ("accumulation", 4)])
def test_ranks_compute_what_one_process_computes(name, world):
    found = differences(on_ranks(CASES[name], world), one_process(name))
    assert not found, "\n".join(found)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "world"), pairs(chosen=False))
def test_any_number_of_ranks_computes_what_one_process_computes(name, world):
    found = differences(on_ranks(CASES[name], world), one_process(name))
    assert not found, "\n".join(found)


def gathers_of_a_step(plan: dict) -> list[int]:
    """Units gathered in the third step, and in an evaluation after it."""
    case = RankCase(plan={"resident": "all", "accumulation_steps": 2, **plan})
    calls: list[int] = []
    fill = Shards.fill
    Shards.fill = lambda self, *rest: (calls.append(1), fill(self, *rest))[1]  # type: ignore[method-assign]
    with Fp32MeansFp64(), engine_of(case, mesh_parity.build(case.case)) as engine:
        found = []
        for number, batch in enumerate([*case.batches()[:3], case.batches()[0]]):
            calls.clear()
            _ = engine.train_step(batch) if number < 3 else engine.eval_step(batch)
            found.append(len(calls))
        engine.eval_step(case.batches()[1])
        return [*found[2:], len(calls) - found[3]]


def test_replicated_weights_are_gathered_once_after_an_update():
    """Three layers, embedding and head; nothing in an evaluation after that. With two slots layers are gathered again."""
    once, again = (mesh_ranks.run(2, gathers_of_a_step, plan)[0] for plan in ({"weight_slots": "all"}, {}))
    assert once == [5, 5, 0]
    assert again[0] > once[0]


HOSTS = {
    "two-by-two": (RankCase(plan={"replicas": 2}), 4),
    "two-by-two-accumulated": (
        RankCase(tied=False, plan={"replicas": 2, "resident": ["layer.1"], "accumulation_steps": 2}),
        4,
    ),
    "one-rank-a-host": (RankCase(tied=False, kind="padded", plan={"replicas": 2, "resident": ["layer.0", "head"]}), 2),
}


@pytest.mark.parametrize("name", HOSTS)
def test_hosts_with_a_replica_each_compute_what_one_process_computes(name):
    """Shards inside a host, sums of shards between hosts; hosts simulated. All ranks report the same bits."""
    case, world = HOSTS[name]
    found = differences(on_ranks(case, world), plain(case))
    assert not found, "\n".join(found)


def no_sum_over_hosts() -> None:
    reduce = Shards.reduce

    def inside_only(self, *rest):
        kept, self._replicas = self._replicas, None
        reduce(self, *rest)
        self._replicas = kept

    Shards.reduce = inside_only  # type: ignore[method-assign]


def squares_of_all_hosts() -> None:
    total_of = Shards.total_of
    Shards.total_of = lambda self, value: self.replicas * total_of(self, value)  # type: ignore[method-assign]


def no_norm_reduction() -> None:
    Shards.total_of = lambda self, value: value  # type: ignore[method-assign]
    total = Shards.total

    def only_loss(self, values):
        return torch.cat([total(self, values[:-1].clone()), values[-1:]]) if len(values) > 1 else total(self, values)

    Shards.total = only_loss  # type: ignore[method-assign]


def local_token_mean() -> None:
    from megatrain.engine import batches
    from megatrain.engine.host.engine import HostEngine

    checked = HostEngine._checked

    def local(self, batch, training=True, objective=None):
        found, step, together = checked(self, batch, training, objective)
        own = {"tokens": max(1, len(batches.find_targets(found["labels"])))}
        return found, dataclasses.replace(step, counts=own), together

    HostEngine._checked = local  # type: ignore[method-assign]


def a_shard_shifted_by_one() -> None:
    start = Shard.start
    Shard.start = lambda self, layout: start(self, layout) + (self.index == 1)  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("fault", "name"), [(no_sum_over_hosts, "two-by-two"), (squares_of_all_hosts, "two-by-two-accumulated")]
)
def test_a_fault_between_hosts_is_found(fault, name):
    case, world = HOSTS[name]
    try:
        found = differences(on_ranks(case, world, fault), plain(case))
    except AssertionError as error:
        found = [str(error)]
    assert found


@pytest.mark.parametrize("fault", [no_norm_reduction, local_token_mean, a_shard_shifted_by_one])
def test_a_fault_on_the_way_is_found(fault):
    try:
        found = differences(on_ranks(CASES["tied"], 2, fault), one_process("tied"))
    except AssertionError as error:  # the ranks report different numbers
        found = [str(error)]
    assert found
