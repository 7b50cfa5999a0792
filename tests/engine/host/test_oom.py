"""Recovery from device OOM: the order of the reduced plans, what is logged, and that they compute the same."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ruamel.yaml import YAML

from engines import host_engine
from families import BY_NAME, batch, build
from megatrain.config.load import load_config
from megatrain.engine import plan as planning
from megatrain.engine.host import engine as host_engine_module
from megatrain.engine.host.engine import HostEngine
from megatrain.engine.host.oom import OomRecovery, as_yaml, config_changes
from megatrain.engine.plan import ExecutionPlan, Place, Policy, Shortage
from megatrain.errors import HostMemoryLow, PlanRefused
from megatrain.models.shell import Shell
from megatrain.optim.adamw import AdamW
from oom import Allocations

LLAMA = BY_NAME["llama"]


def engine_of(**options: Any) -> HostEngine:
    options = {"compute_dtype": "fp32", "threads": 2, "verify": "never", "optim": AdamW(learning_rate=1e-3), **options}
    return host_engine(build(LLAMA, seed=0), device="cpu", **options)


def rows_of(seed: int) -> dict[str, torch.Tensor]:
    return batch(LLAMA, seed=seed, rows=4, tokens=16, kind="padded")


def trained(engine: HostEngine, steps: int, first: int = 0) -> tuple[list[Any], dict[str, torch.Tensor]]:
    found = [engine.train_step(rows_of(step)) for step in range(first, first + steps)]
    return [(one.loss, one.grad_norm) for one in found], dict(engine.named_parameters())


def assert_same(one: Any, other: Any) -> None:
    assert one[0] == other[0]
    for name, weight in one[1].items():
        assert torch.equal(weight, other[1][name]), name


# ------------------------------------------------------------------ the order of the plans


def plan_of_layers(resident: int = 0, **fields: Any) -> ExecutionPlan:
    """A plan as resolved for a model of four layers, of which one keeps its activations unless `fields` say otherwise."""
    names = ["embedding", *(f"layer.{layer}" for layer in range(4)), "head"]
    places: dict[str, Place] = {name: "device" if number < resident else "host" for number, name in enumerate(names)}
    policies: dict[int, Policy] = {0: "recompute", 1: "keep", 2: "recompute", 3: "recompute"}
    given = {"activations": policies, "microbatch_rows": 4, "head_chunk_tokens": 256, "offload_input": frozenset()}
    return ExecutionPlan(placement=places, compute_dtype="fp32", **{**given, **fields})


def reductions(plan: ExecutionPlan, rows: int, tokens: int, **situation: bool) -> list[str]:
    """What each reduction changes, from the first to the last."""
    known = {"training": True, "inputs_fit_host": True, "sums_fit_host": True, "mlps_in_chunks": True, **situation}
    found = []
    while following := plan.reduced(Shortage(plan.step_shape(rows, tokens), rows, tokens, **known)):
        found += [f"{setting}: {value}" for setting, value in config_changes(plan, following).items()]
        if following.resident != plan.resident:
            found.append(f"{len(following.resident)} resident")
        plan = following
    return found


def test_the_cheapest_reduction_comes_first() -> None:
    assert reductions(plan_of_layers(resident=3, weight_slots=4), rows=4, tokens=9000) == [
        "memory.weight_slots: 2",
        "activations.policy: recompute",
        "batch.microbatch_rows: 2",
        "batch.microbatch_rows: 1",
        "batch.head_chunk_tokens: 128",
        "batch.head_chunk_tokens: 64",
        "activations.mlp_chunk_tokens: 2048",
        "activations.mlp_chunk_tokens: 1024",
        "activations.offload_input: on",
        "batch.accumulation_steps: 2",
        "batch.accumulation_steps: 4",
        "1 resident",
        "0 resident",
    ]


def test_an_evaluation_reduces_only_what_helps_it() -> None:
    plan = plan_of_layers(resident=1, microbatch_rows=2, head_chunk_tokens=64)
    evaluation = {"training": False, "inputs_fit_host": False, "sums_fit_host": False}
    assert reductions(plan, rows=4, tokens=5000, **evaluation) == [
        "batch.microbatch_rows: 1",
        "activations.mlp_chunk_tokens: 1024",
        "0 resident",
    ]


@pytest.mark.parametrize(
    ("tokens", "planned", "chunks"),
    [
        (1 << 18, None, [65536, 32768, 16384, 8192, 4096, 2048, 1024]),
        (1 << 18, 16384, [8192, 4096, 2048, 1024]),
        (8192, 16384, [2048, 1024]),  # the planned chunk holds whole rows
        (8192, 3000, [1500, 1024]),
        (1500, None, [1024]),
        (8192, 1024, []),
        (1024, None, []),
        (3, None, []),
    ],
)
def test_an_mlp_is_cut_to_a_quarter_of_the_row_and_then_in_halves(
    tokens: int, planned: int | None, chunks: list[int]
) -> None:
    plan = plan_of_layers(activations={}, microbatch_rows=1, head_chunk_tokens=64, mlp_chunk_tokens=planned)
    full = {"inputs_fit_host": False, "sums_fit_host": False}
    assert reductions(plan, 1, tokens, **full) == [f"activations.mlp_chunk_tokens: {chunk}" for chunk in chunks]
    assert reductions(plan, 1, tokens, **full, mlps_in_chunks=False) == []


def test_changes_are_logged_as_yaml_that_the_config_accepts() -> None:
    planned = plan_of_layers(resident=4)
    reduced = plan_of_layers(
        resident=3,
        activations=dict.fromkeys(range(4), "recompute"),
        microbatch_rows=2,
        head_chunk_tokens=128,
        mlp_chunk_tokens=2048,
        offload_input=frozenset(range(4)),
        accumulation_steps=4,
    )
    changes = config_changes(planned, reduced, device_fraction=0.71)
    pasted = YAML(typ="safe").load(as_yaml(changes))
    assert {f"{section}.{key}": value for section, keys in pasted.items() for key, value in keys.items()} == changes
    base = {"model": {"path": "m"}, "data": {"train": "x"}, "run": {"dir": "r"}}
    run = load_config({**base, **pasted, "batch": {"tokens_per_step": 8192, **pasted["batch"]}})
    assert (run.batch.accumulation_steps, run.activations.offload_input, run.memory.device_fraction) == (4, "on", 0.71)
    assert (run.activations.mlp_chunk_tokens, run.activations.policy) == (2048, "recompute")


# ------------------------------------------------------------------ in the engine


def test_oom_at_every_allocation_of_a_step_equals_a_reduced_plan(caplog: pytest.LogCaptureFixture) -> None:
    """At the first and the last allocation of every function that makes tensors."""
    options = {"microbatch_rows": 4, "head_chunk_tokens": 16}
    with engine_of(**{**options, "microbatch_rows": 2}) as planned:
        want = trained(planned, 2)
    data = rows_of(0)
    with engine_of(**options) as engine, Allocations() as counted:
        engine.train_step(data)
    assert {
        "engine/host/head.py backward",
        "engine/host/layer.py _grad",
        "engine/host/gradients.py take",
    } <= counted.seen.keys()
    for site, count in counted.seen.items():
        for number in {1, count}:
            caplog.clear()
            with engine_of(**options) as engine, caplog.at_level(logging.WARNING):
                with Allocations((site, number)) as failing:
                    first = engine.train_step(data)
                assert failing.failed, site
                second, weights = trained(engine, 1, first=1)
                assert_same(([(first.loss, first.grad_norm), *second], weights), want)
            assert "batch:\n      microbatch_rows: 2" in caplog.text, site


def failing_until(monkeypatch: pytest.MonkeyPatch, enough: Any) -> None:
    """Every layer runs out of memory until `enough()`."""
    real = Shell.call_layer

    def call(*args: Any) -> Any:
        if not enough():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return real(*args)

    monkeypatch.setattr(Shell, "call_layer", call)


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_reduced_to_accumulation_equals_planned_accumulation(compute: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 gradients go into a bf16 plane, and into an fp32 plane once they are accumulated."""
    options = {"compute_dtype": compute, "microbatch_rows": 1, "head_chunk_tokens": 64, "offload_input": "all"}
    with engine_of(**options, accumulation_steps=2) as planned, engine_of(**options) as engine:
        failing_until(monkeypatch, lambda: engine.plan.accumulation_steps == 2)
        assert engine.store.grad_dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[compute]
        assert_same(trained(engine, 2), trained(planned, 2))
        record = engine.train_step(rows_of(2)).pipeline
        assert record is not None
        assert record.ladder == ("batch.accumulation_steps: 2",)
        assert engine.store.grad_dtype == torch.float32


LONG: dict[str, Any] = {"microbatch_rows": 1, "head_chunk_tokens": 64}
"""A step whose rows and logits cannot be cut further."""


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make rows of 16 tokens long enough for MLPs in chunks."""
    monkeypatch.setattr(planning, "LEAST_MLP_TOKENS", 2)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    ("options", "chunk", "changes"),
    [
        ({}, 4, ("activations.mlp_chunk_tokens: 4",)),
        ({}, 2, ("activations.mlp_chunk_tokens: 2",)),
        ({"mlp_chunk_tokens": 7, "segment": 2}, 3, ("activations.mlp_chunk_tokens: 3",)),
        ({"keep": "all"}, 4, ("activations.policy: recompute", "activations.mlp_chunk_tokens: 4")),
    ],
    ids=str,
)
def test_reduced_to_mlps_in_chunks_equals_planned_chunks(
    options: dict[str, Any], chunk: int, changes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From whole MLPs, and from larger chunks; in training and in evaluation."""
    with engine_of(**LONG, mlp_chunk_tokens=chunk, segment=options.get("segment", 1)) as planned:
        want, evaluated = trained(planned, 2), planned.eval_step(rows_of(9))
    with engine_of(**LONG, **options) as engine:
        failing_until(monkeypatch, lambda: engine.plan.mlp_chunk_tokens == chunk)
        assert_same(trained(engine, 2), want)
        assert engine.eval_step(rows_of(9)) == evaluated
        record = engine.train_step(rows_of(2)).pipeline
    assert record is not None
    assert record.ladder == changes
    assert f"mlp_chunk_tokens {chunk}" in record.policy
    with engine_of(**LONG) as whole:
        assert trained(whole, 2)[1].keys() == want[1].keys()
        assert any(not torch.equal(weight, want[1][name]) for name, weight in whole.named_parameters())


@pytest.mark.usefixtures("short")
def test_an_evaluation_is_reduced_to_mlps_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of(**LONG, mlp_chunk_tokens=4) as planned:
        evaluated, want = planned.eval_step(rows_of(9)), trained(planned, 1)
    with engine_of(**LONG) as engine:
        failing_until(monkeypatch, lambda: engine.plan.mlp_chunk_tokens == 4)
        assert engine.eval_step(rows_of(9)) == evaluated
        assert_same(trained(engine, 1), want)


@pytest.mark.usefixtures("short")
def test_a_family_without_a_token_wise_mlp_computes_none_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_engine_module, "token_wise", lambda *_, **__: {})
    with engine_of(**LONG) as engine:
        failing_until(monkeypatch, lambda: engine.plan.offload_input)
        trained(engine, 1)
        assert engine.plan.mlp_chunk_tokens is None


def test_moving_units_off_the_device_changes_no_weight(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    options = {"microbatch_rows": 1, "head_chunk_tokens": 64, "offload_input": "all", "accumulation_steps": 4}
    with engine_of(**options) as streamed:
        want = trained(streamed, 3)
    with engine_of(**options, resident=("embedding", "layer.0", "layer.1")) as engine:
        first = trained(engine, 1)[0]
        failing_until(monkeypatch, lambda: not engine.plan.resident)
        with caplog.at_level(logging.WARNING):
            second, weights = trained(engine, 2, first=1)
        assert not any(planes.resident for planes in engine.store.units.values())
        assert engine.memory()["device_resident"] == 0
        # the norm is summed in another order, which shows in its last bit
        assert_same(([loss for loss, _ in first + second], weights), ([loss for loss, _ in want[0]], want[1]))
    assert "memory:\n      device_fraction: " in caplog.text


def test_the_log_says_what_failed_where_and_what_was_changed(caplog: pytest.LogCaptureFixture) -> None:
    options = {"microbatch_rows": 2, "head_chunk_tokens": 16}
    with engine_of(**options) as engine, caplog.at_level(logging.WARNING):
        data = rows_of(0)
        with Allocations() as counted:
            engine.train_step(data)
        with Allocations(("engine/host/layer.py _grad", counted.seen["engine/host/layer.py _grad"])):
            record = engine.train_step(data).pipeline
    for words in (
        "in the backward of layer 0: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "iB  device_slots",
        "nothing was updated",
        "retrying with batch.microbatch_rows: 1",
        "put into its config:\n    batch:\n      microbatch_rows: 1",
    ):
        assert words in caplog.text, words
    assert record is not None
    assert record.ladder == ("batch.microbatch_rows: 1",)
    assert "microbatch_rows 1" in record.policy


def test_a_resumed_run_keeps_its_reduced_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"microbatch_rows": 2, "head_chunk_tokens": 64, "offload_input": "all"}
    with engine_of(**options) as engine:
        with monkeypatch.context() as patch:
            failing_until(patch, lambda: engine.plan.accumulation_steps == 2)
            trained(engine, 1)
        engine.save(tmp_path / "one")
        want = trained(engine, 2, first=1)
    with engine_of(**options) as resumed:
        resumed.load(tmp_path / "one")
        assert resumed.plan == engine.plan
        assert_same(trained(resumed, 2, first=1), want)
    # a device with more memory starts with the planned one
    monkeypatch.setattr(host_engine_module, "limit_device", lambda *_: 1 << 40)
    with engine_of(**options) as larger:
        planned = larger.plan
        larger.load(tmp_path / "one")
        assert larger.plan == planned


@pytest.mark.usefixtures("short")
def test_a_resumed_run_keeps_mlps_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of(**LONG) as engine:
        with monkeypatch.context() as patch:
            failing_until(patch, lambda: engine.plan.mlp_chunk_tokens == 4)
            trained(engine, 1)
        engine.save(tmp_path / "one")
        want = trained(engine, 2, first=1)
    with engine_of(**LONG) as resumed:
        planned = resumed.plan
        resumed.load(tmp_path / "one")
        assert resumed.plan == replace(planned, mlp_chunk_tokens=4)
        assert_same(trained(resumed, 2, first=1), want)
    with engine_of(**LONG, mlp_chunk_tokens=2) as smaller:
        smaller.load(tmp_path / "one")
        assert smaller.plan.mlp_chunk_tokens == 2


def test_a_run_that_goes_back_to_a_checkpoint_keeps_what_it_reduced_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_of(microbatch_rows=4) as engine:
        with monkeypatch.context() as patch:
            failing_until(patch, lambda: engine.plan.microbatch_rows == 2)
            trained(engine, 1)
        engine.save(tmp_path / "one")
        failing_until(monkeypatch, lambda: engine.plan.offload_input)
        trained(engine, 1)
        reduced = engine.plan
        engine.load(tmp_path / "one")
        assert engine.plan == reduced


def test_a_resumed_run_that_keeps_fewer_inputs_offloads_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"microbatch_rows": 1, "segment": 2}
    with engine_of(microbatch_rows=1) as engine:
        with monkeypatch.context() as patch:
            failing_until(patch, lambda: engine.plan.offload_input)
            trained(engine, 1)
        engine.save(tmp_path / "one")
        want = trained(engine, 2, first=1)
    with engine_of(**options) as resumed:
        planned = resumed.plan
        resumed.load(tmp_path / "one")
        assert resumed.plan == replace(planned, head_chunk_tokens=64)
        assert_same(trained(resumed, 2, first=1), want)


def test_the_keys_under_ladder_are_part_of_the_checkpoint_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint of an earlier version, or of a newer one with more keys, reduces the plan as its own run had."""
    with engine_of(microbatch_rows=4, weight_slots=3) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(OomRecovery, "as_dict", lambda _: {**LADDER, "of a newer version": 1})
            engine.save(tmp_path / "one")
        planned = engine.plan
        engine.load(tmp_path / "one")
        assert engine.plan == replace(
            planned,
            weight_slots=2,
            microbatch_rows=2,
            head_chunk_tokens=64,
            mlp_chunk_tokens=8,
            offload_input=frozenset(range(4)),
            accumulation_steps=2,
        )
        engine.save(tmp_path / "two")
        written = json.loads((tmp_path / "two" / "state.json").read_text())["state"]["ladder"]
        assert written == {**LADDER, "recompute": False, "resident": None}  # nothing was kept, nothing resident


LADDER = {
    "recompute": True, "chunk_rows": 2, "head_tokens": 64, "mlp_tokens": 8, "offload": True, "windows": 2, "resident": 0,
    "device_fraction": 0.7, "device_bytes": 0, "weight_slots": 2,
}  # fmt: skip


def test_where_no_plan_needs_less_memory_the_breakdown_is_shown() -> None:
    with engine_of(microbatch_rows=1, head_chunk_tokens=64, offload_input="all", accumulation_steps=4) as engine:
        with (
            Allocations(("engine/host/head.py backward", 1)),
            pytest.raises(PlanRefused, match=r"in the head: CUDA out of memory(.|\n)*iB(.|\n)*no plan needs less"),
        ):
            engine.train_step(rows_of(0))
        assert engine.train_step(rows_of(0)).skipped is None


def test_an_interrupted_step_leaves_no_trace() -> None:
    with engine_of() as calm, engine_of() as engine:
        want = trained(calm, 2)
        trained(engine, 1)
        assert engine.interrupt(HostMemoryLow("low"))
        with pytest.raises(HostMemoryLow, match="low"):
            engine.train_step(rows_of(1))
        assert engine.step == 1
        assert_same(trained(engine, 1, first=1), (want[0][1:], want[1]))
    with engine_of(gradient_plane=False, optim=AdamW(max_grad_norm=None)) as fused:
        assert not fused.interrupt(HostMemoryLow("low"))
        assert fused.train_step(rows_of(0)).skipped is None
