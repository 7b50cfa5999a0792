"""On a real GPU: running out of memory at every allocation site, the instruments' figures, and the trace."""

from __future__ import annotations

import gc
import logging
import math
from typing import Any

import pytest
import torch

from engines import host_engine
from families import BY_NAME, batch, build
from megatrain.engine.host.engine import HostEngine
from megatrain.metrics.spans import Span, chrome_trace
from megatrain.models.shell import Shell
from megatrain.optim.adamw import AdamW
from oom import Allocations

pytestmark = pytest.mark.gpu

QWEN = BY_NAME["qwen3"]


def engine_of(**options: Any) -> HostEngine:
    options = {"compute_dtype": "bf16", "optim": AdamW(learning_rate=1e-3), "compile": "off", "threads": 4, **options}
    return host_engine(build(QWEN, seed=0), device="cuda", verify="never", **options)


def rows_of(seed: int, rows: int = 4, tokens: int = 32) -> dict[str, torch.Tensor]:
    return batch(QWEN, seed=seed, rows=rows, tokens=tokens, kind="padded")


def trained(engine: HostEngine, first: int, steps: int) -> tuple[list[Any], dict[str, torch.Tensor]]:
    found = [engine.train_step(rows_of(step)) for step in range(first, first + steps)]
    return [one.loss for one in found], dict(engine.named_parameters())


def assert_same_bits(one: Any, other: Any) -> None:
    assert one[0] == other[0], "losses differ"
    for name, weight in one[1].items():
        assert torch.equal(weight, other[1][name]), name


@pytest.mark.parametrize(
    "options",
    [{}, {"resident": ("embedding", "layer.0")}, {"accumulation_steps": 2}, {"offload_input": "all"}],
    ids=str,
)
def test_oom_at_every_allocation_of_a_step_equals_a_reduced_plan(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """At the first and the last device allocation of every function, those in autograd's thread included."""
    options = {"microbatch_rows": 4 // options.get("accumulation_steps", 1), "head_chunk_tokens": 64, **options}
    reduced = {**options, "microbatch_rows": options["microbatch_rows"] // 2}
    with engine_of(**reduced) as planned:
        want = trained(planned, 0, 2)
    data = rows_of(0)
    with engine_of(**options) as engine, Allocations(device="cuda") as counted:
        engine.train_step(data)
    assert {"engine/host/head.py backward", "engine/host/gradients.py take"} <= counted.seen.keys()
    assert any("autograd" in site or site.endswith("_grad") for site in counted.seen), counted.seen
    for site, count in counted.seen.items():
        for number in {1, count}:
            caplog.clear()
            with engine_of(**options) as engine, caplog.at_level(logging.WARNING):
                with Allocations((site, number), device="cuda") as failing:
                    first = engine.train_step(data).loss
                assert failing.failed, site
                second, weights = trained(engine, 1, 1)
                assert_same_bits(([first, *second], weights), want)
            assert f"microbatch_rows: {reduced['microbatch_rows']}" in caplog.text, site


def test_a_real_oom_reduces_the_plan_until_the_step_fits(caplog: pytest.LogCaptureFixture) -> None:
    """The process is limited to little more than a single row needs."""
    data = batch(QWEN, seed=0, rows=64, tokens=512, kind="padded")
    options: dict[str, Any] = {"head_chunk_tokens": 64, "keep": "all", "microbatch_rows": 64}
    with engine_of(head_chunk_tokens=64, microbatch_rows=1) as dense:
        torch.cuda.reset_peak_memory_stats()
        want = dense.train_step(data).loss
        need = torch.cuda.max_memory_reserved()
    gc.collect()
    torch.cuda.empty_cache()
    try:
        with caplog.at_level(logging.WARNING), engine_of(**options, device_gib=(need + (64 << 20)) / 2**30) as engine:
            result = engine.train_step(data)
            followed = engine.plan
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert set(dict(followed.activations).values()) == {"recompute"}
    assert result.loss == pytest.approx(want, rel=1e-3)
    assert "out of device memory in the" in caplog.text
    assert "Tried to allocate" in caplog.text
    assert "reserved by the allocator" in caplog.text


def test_a_plan_reduced_to_accumulation_without_resident_units(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {
        "microbatch_rows": 1,
        "head_chunk_tokens": 64,
        "offload_input": "all",
        "resident": ("embedding", "layer.0", "layer.1"),
    }
    with engine_of(**{**options, "resident": ()}, accumulation_steps=4) as planned:
        want = trained(planned, 0, 3)
    with engine_of(**options) as engine:
        real = Shell.call_layer

        def call(*args: Any) -> Any:
            if engine.plan.resident:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return real(*args)

        monkeypatch.setattr(Shell, "call_layer", call)
        found = trained(engine, 0, 3)
        assert engine.plan.accumulation_steps == 4
        assert engine.memory()["device_resident"] == 0
        assert engine.memory()["host_pinned"] > 0
    assert_same_bits(found, want)


def test_figures_fit_their_step() -> None:
    with engine_of() as engine:
        numel = sum(unit.layout.numel for unit in engine.structure.units)
        for step in range(6):
            result = engine.train_step(rows_of(step))
        record = result.pipeline
        assert record is not None
        assert record.h2d is not None
        assert record.d2h is not None
        assert record.computed_s > 0
        assert record.computed_s + sum(record.waited_s.values()) <= result.seconds["step"] * 1.02
        assert record.h2d.bytes == result.moved_bytes["h2d"]
        assert 0.5 * 2 * numel <= record.d2h.bytes <= 1.5 * 2 * numel, "one step's, give or take what was under way"
        assert record.overlap is not None
        assert 0 <= record.overlap <= 1
        assert record.slot_switch_s is not None
        assert 0 < record.slot_switch_s < 0.1
        assert record.adamw_params_per_s is not None
        assert record.device_total_bytes == torch.cuda.get_device_properties(0).total_memory
        assert record.device_reserved_bytes is not None
        assert record.host_pinned_bytes == engine.memory()["host_pinned"]


def test_a_delayed_copy_shows_as_a_wait_for_weights() -> None:
    """Every host-to-device copy is delayed: the device waits for weights, and no copy is hidden."""

    def slow_h2d(name: str, streams: Any) -> None:
        if name == "h2d":
            with torch.cuda.stream(streams.h2d):
                torch.cuda._sleep(20_000_000)

    with engine_of(disturb=slow_h2d) as slow, engine_of() as quick:
        for step in range(3):
            late, calm = slow.train_step(rows_of(step)).pipeline, quick.train_step(rows_of(step)).pipeline
        assert late is not None
        assert calm is not None
        assert late.waited_s["weights"] > 3 * calm.waited_s["weights"]
        assert late.waited_s["weights"] > 0.5 * (late.computed_s + sum(late.waited_s.values()))


def test_measuring_adds_no_synchronisation(monkeypatch: pytest.MonkeyPatch) -> None:
    """With instruments, a step synchronises as often as without."""

    def syncs(engine: HostEngine) -> int:
        calls = [0]
        real = torch.cuda.synchronize

        def counting(*args: Any) -> None:
            calls[0] += 1
            real(*args)

        engine.train_step(rows_of(0))
        engine.train_step(rows_of(1))
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "synchronize", counting)
            engine.train_step(rows_of(2))
        return calls[0]

    with engine_of() as on, engine_of(instruments=False) as off:
        assert syncs(on) == syncs(off) == 0


@pytest.mark.parametrize("options", [{}, {"resident": ("layer.0",), "keep": (1,)}, {"accumulation_steps": 2}], ids=str)
def test_a_trace_of_the_gpu_has_every_layer_inside_its_step(options: dict[str, Any]) -> None:
    with engine_of(**options) as engine:
        for step in range(3):
            engine.train_step(rows_of(step))
        engine.begin_trace()
        for step in range(2):
            engine.train_step(rows_of(step))
        spans = engine.end_trace()
        layers, accumulation_steps = len(engine.structure.layers), options.get("accumulation_steps", 1)
    work = [span.name for span in spans if span.row == "compute" and "update" not in span.name]
    for name in [f"{phase} layer {i}" for phase in ("forward", "backward") for i in range(layers)] + ["head"]:
        assert work.count(name) == 2 * accumulation_steps, name
    steps = sorted((span for span in spans if span.row == "step"), key=lambda span: span.start_s)
    slack_s = 50e-6  # the anchor ties device and clock to some microseconds
    for span in spans:
        assert math.isfinite(span.start_s)
        assert span.end_s >= span.start_s - 1e-6
        if span.row in ("compute", "wait") and "update" not in span.name:
            assert any(s.start_s - slack_s <= span.start_s and span.end_s <= s.end_s + slack_s for s in steps), span
    copies = [span for span in spans if span.row == "h2d" and isinstance(span, Span)]
    assert copies
    assert {event["name"] for event in chrome_trace(spans, "x")["traceEvents"]} >= set(work)
