"""Bytes by formula, and refusals before anything is allocated."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatrain.checkpoint.writer import SLACK_BYTES, refuse_if_no_room
from megatrain.config.load import load_config
from megatrain.config.schema import RunConfig
from megatrain.errors import PlanRefused, UserError
from megatrain.run import ledger
from megatrain.units import GIB

SHAPE = ledger.ModelShape(params=1000, largest_layer=300, edges=100, layers=3, hidden_size=8)


def run(*overrides: str) -> RunConfig:
    sections = {"model": {"path": "m"}, "data": {"train": "a", "max_tokens": 16}, "batch": {"tokens_per_step": 64}}
    return load_config({**sections, "run": {"dir": "r"}}, overrides)


@pytest.mark.parametrize(
    ("overrides", "gradients", "slabs"),
    [
        ((), 2 * 1000, 0),
        (("--precision.grad_transport=fp32",), 4 * 1000, 0),
        (("--batch.accumulation_steps=2",), 4 * 1000, (3 * 300 + 100) * 2),
        (("--memory.gradient_plane=false", "--optim.max_grad_norm=null"), 0, (3 * 300 + 100) * 2),
        (("--memory.gradient_slabs=2", "--batch.accumulation_steps=2"), 4 * 1000, (2 * 300 + 100) * 2),
    ],
)
def test_host_bytes(overrides: tuple[str, ...], gradients: int, slabs: int) -> None:
    found = ledger.memory_ledger(SHAPE, run(*overrides), device="cuda", compute_dtype="bf16")
    assert found.host_bytes == 12 * 1000 + gradients + slabs


def test_device_bytes() -> None:
    found = ledger.memory_ledger(SHAPE, run(), device="cuda", compute_dtype="bf16")
    row = 16 * 8 * 2
    assert found.device_bytes == 2 * 300 * 2 + 100 * 2 + 400 * 2 + 4 * row * 3 + 30 * row
    fewer = ledger.memory_ledger(SHAPE, run("--batch.accumulation_steps=4"), device="cuda", compute_dtype="bf16")
    assert found.device_bytes - fewer.device_bytes == 3 * row * 3


def test_on_the_cpu_device_buffers_are_host_memory() -> None:
    on_cpu = ledger.memory_ledger(SHAPE, run(), device="cpu", compute_dtype="fp32")
    on_gpu = ledger.memory_ledger(SHAPE, run(), device="cuda", compute_dtype="fp32")
    assert on_cpu.device_bytes == 0
    assert on_cpu.host_bytes == on_gpu.host_bytes + on_gpu.device_bytes


def test_a_run_that_does_not_fit_is_refused_with_the_ledger_and_the_ways_down() -> None:
    needed = ledger.Ledger({"planes": 100 * GIB, "gradients": 20 * GIB}, {"slots": 50 * GIB})
    config = run("--memory.device_gib=40")
    with pytest.raises(PlanRefused) as caught:
        ledger.refuse_if_too_large(needed, host_available=64 * GIB, device_available=40 * GIB, run=config)
    text = str(caught.value)
    assert "not enough host memory: 120.0 GiB needed, 64.0 GiB available" in text
    assert "not enough device memory: 50.0 GiB needed, 40.0 GiB available (memory.device_gib: 40)" in text
    assert "20.0 GiB  gradients" in text
    assert "memory.gradient_plane: false" in text
    assert "batch.accumulation_steps" in text
    ledger.refuse_if_too_large(needed, host_available=120 * GIB, device_available=50 * GIB, run=config)


@pytest.mark.parametrize(
    ("overrides", "steps", "count"),
    [
        (("--checkpoint.every_steps=10", "--checkpoint.keep=2"), 100, 3),
        (("--checkpoint.every_steps=10", "--checkpoint.keep=null"), 100, 10),
        (("--checkpoint.every_steps=10", "--checkpoint.keep=null"), 105, 11),
        (("--checkpoint.every_steps=null",), 100, 1),
        (("--checkpoint.every_steps=60",), 100, 2),
        (("--checkpoint.every_steps=null", "--checkpoint.at_end=false"), 100, 0),
    ],
)
def test_checkpoints_on_disk_at_the_worst_moment(overrides: tuple[str, ...], steps: int, count: int) -> None:
    assert ledger.checkpoints_at_once(run(*overrides), steps) == count


def test_no_space_is_known_before_the_start(tmp_path: Path) -> None:
    config = run("--run.dir", str(tmp_path / "not" / "yet"))
    ledger.refuse_if_disk_too_small(config, 10, 3)
    with pytest.raises(UserError, match="not enough space for 3 checkpoints") as caught:
        ledger.refuse_if_disk_too_small(config, 1 << 60, 3)
    assert str(tmp_path) in str(caught.value)


def test_space_that_a_save_would_refuse_is_refused_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at the first checkpoint, when the steps before it would be lost."""
    config, usage = run("--run.dir", str(tmp_path / "run")), shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=(3 * 10**6) + SLACK_BYTES - 1))
    with pytest.raises(UserError, match="not enough space for 3 checkpoints"):
        ledger.refuse_if_disk_too_small(config, 10**6, 3)
    with pytest.raises(UserError, match="no room for a checkpoint"):
        refuse_if_no_room(tmp_path / "run", 3 * 10**6 + SLACK_BYTES)
    ledger.refuse_if_disk_too_small(config, 10**6, 2)
    ledger.refuse_if_disk_too_small(config, 10**9, 0)


def test_host_memory_is_bounded_by_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "available_host_bytes", lambda: 3 * GIB)
    assert ledger.host_available_bytes() == 3 * GIB
    assert ledger.host_available_bytes(0.5) == GIB // 2
    assert ledger.host_available_bytes(4.0) == 3 * GIB
