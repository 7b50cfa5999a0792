"""The figures that an engine reports of its steps, on a CPU; measuring changes no result."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from engines import host_engine
from families import BY_NAME, batch, build
from megatrain.device.slabs import Slab
from megatrain.engine.host.engine import HostEngine
from megatrain.engine.host.optimizer import HostOptimizer
from megatrain.metrics.spans import Span
from megatrain.optim.adamw import AdamW
from megatrain.optim.updater import CpuUpdater

LLAMA = BY_NAME["llama"]


def engine_of(**options: Any) -> HostEngine:
    options = {"compute_dtype": "fp32", "threads": 2, "verify": "never", **options}
    return host_engine(build(LLAMA, seed=0), device="cpu", **options)


def rows_of(seed: int) -> dict[str, torch.Tensor]:
    return batch(LLAMA, seed=seed, rows=4, tokens=16, kind="padded")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulation_steps": 2},
        {"gradient_plane": False},
        {"offload_input": "all"},
        {"keep": "all", "weight_slots": 8},
    ],
    ids=str,
)
def test_bytes_are_those_of_the_copies(options: dict[str, Any]) -> None:
    optim = AdamW(max_grad_norm=None) if "gradient_plane" in options else AdamW()
    with engine_of(optim=optim, **options) as engine:
        numel = sum(unit.layout.numel for unit in engine.structure.units)
        for step in range(3):
            result = engine.train_step(rows_of(step))
            record = result.pipeline
            assert record is not None
            assert record.h2d is not None
            assert record.d2h is not None
            moved = {"h2d": record.h2d.bytes, "d2h": record.d2h.bytes}
            assert moved == result.moved_bytes
            assert moved["d2h"] >= 4 * numel, "every gradient went home"
        record = engine.train_step(rows_of(3)).pipeline
        assert record is not None
        layers = len(engine.structure.layers)
        assert f"{'keep' if 'keep' in options else 'recompute'} {layers}" in record.policy
        assert record.policy.endswith(f"resident 0 of {len(engine.structure.units)}")
        # on a CPU the computing thread copies: nothing is hidden
        assert record.overlap == pytest.approx(0.0, abs=1e-9)
        assert record.slot_switch_s is not None


def test_adamw_figures_are_those_of_the_previous_step() -> None:
    with engine_of() as engine:
        first = engine.train_step(rows_of(0)).pipeline
        assert first is not None
        assert first.adamw_params_per_s is None
        engine.synchronize()
        second = engine.train_step(rows_of(1)).pipeline
        assert second is not None
        assert second.adamw_params_per_s is not None
        assert second.adamw_gbps == pytest.approx(second.adamw_params_per_s * (4 + 2 * 12) / 1e9)


def test_an_unfinished_update_shows_as_a_wait_for_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of() as engine:
        engine.train_step(rows_of(0))
        late, real_update, real_wait = threading.Event(), CpuUpdater.submit_update, HostOptimizer.wait

        def update(updater: CpuUpdater, unit: str, *args: Any) -> Any:
            *given, _ = args
            return real_update(updater, unit, *given, after=late.wait if unit == "layer.1" else None)

        def wait(optimizer: HostOptimizer, unit: str) -> None:
            if unit == "layer.1":
                threading.Timer(0.05, late.set).start()
            real_wait(optimizer, unit)

        monkeypatch.setattr(CpuUpdater, "submit_update", update)
        engine.train_step(rows_of(1))
        monkeypatch.setattr(HostOptimizer, "wait", wait)
        record = engine.train_step(rows_of(2)).pipeline
    assert record is not None
    assert record.waited_s["optimizer"] >= 0.05


def test_slabs_in_use_and_waits_for_them_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of(gradient_slabs=2, accumulation_steps=2) as engine:
        late, real_submit, real_settle = threading.Event(), CpuUpdater.submit, Slab.settle

        def submit(*args: Any, after: Any = None, **options: Any) -> Any:
            """The sums of gradients begin late; the sums of squares have no `after`."""
            return real_submit(*args, after=late.wait if after is not None else None, **options)

        def settle(slab: Slab) -> None:
            if slab.in_use:
                threading.Timer(0.05, late.set).start()
            real_settle(slab)

        monkeypatch.setattr(CpuUpdater, "submit", submit)
        monkeypatch.setattr(Slab, "settle", settle)
        record = engine.train_step(rows_of(0)).pipeline
    assert record is not None
    assert (record.slabs, record.slabs_in_use) == (2, 2)
    assert record.slab_waits > 0
    assert record.waited_s["slabs"] >= 0.05


def test_instruments_change_no_bit_and_can_be_switched_off() -> None:
    with engine_of() as on, engine_of(instruments=False) as off:
        for step in range(3):
            one, other = on.train_step(rows_of(step)), off.train_step(rows_of(step))
            assert (one.loss, one.grad_norm) == (other.loss, other.grad_norm)
            assert other.pipeline is None
        assert all(
            torch.equal(a, b) for (_, a), (_, b) in zip(on.named_parameters(), off.named_parameters(), strict=True)
        )


def compute_spans(spans: list[Span]) -> list[str]:
    return [span.name for span in sorted(spans, key=lambda one: one.start_s) if span.row == "compute"]


@pytest.mark.parametrize("options", [{}, {"keep": "all"}, {"segment": 2}], ids=str)
def test_a_trace_has_every_layer_inside_its_step(options: dict[str, Any]) -> None:
    with engine_of(**options) as engine:
        engine.train_step(rows_of(0))
        engine.begin_trace()
        for step in (1, 2):
            engine.train_step(rows_of(step))
        spans = engine.end_trace()
        assert engine.end_trace() == []
        layers = range(len(engine.structure.layers))
        forward, backward = ([f"{phase} layer {i}" for i in layers] for phase in ("forward", "backward"))
        once = [name for name in compute_spans(spans) if not name.startswith("recompute")]
        assert once == ([*forward, "head", *reversed(backward)]) * 2
        steps = [span for span in spans if span.row == "step"]
        for span in spans:
            if span.row in ("compute", "wait"):
                assert sum(s.start_s <= span.start_s <= span.end_s <= s.end_s for s in steps) == 1, span
        units = [span.name for span in spans if span.row == "adamw"]
        assert {unit.name for unit in engine.structure.units} == set(units)
