"""Processed and trained tokens are counted separately; MFU by its formula, against a measured peak or not at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from counting import CountingEngine
from megatrain.config.load import load_config
from megatrain.machine.machine import Machine
from megatrain.metrics import mfu
from megatrain.metrics.logger import step_line
from megatrain.metrics.record import read_records
from megatrain.planner.model_cost import ModelShape, shape_of
from megatrain.run import health
from megatrain.run.loop import train
from step_records import record
from tiny_run import config, prepare

MACHINE = Machine("a GPU", 100.0, 500.0, 16)
HIDDEN, MLP, HEADS, DEPTH, VOCABULARY = 64, 96, 4, 3, 500


@pytest.fixture(scope="module")
def shape() -> ModelShape:
    return shape_of(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=MLP,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            num_hidden_layers=DEPTH,
        )
    )


def by_hand(lengths: list[int], trained: int) -> float:
    """Each document by itself: six products a layer, half of the square of its attention scores, the head of its targets."""
    products = 2 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * MLP)
    layers = sum(DEPTH * (n * products + 4 * HIDDEN * n * n / 2) for n in lengths)
    return 3 * (layers + trained * 2 * VOCABULARY * HIDDEN)


@pytest.mark.parametrize(("lengths", "trained"), [([100], 99), ([10, 20, 70], 40), ([64] * 8, 0)])
def test_flops_by_hand(shape: ModelShape, lengths: list[int], trained: int) -> None:
    counted = mfu.Utilisation(shape, 1.0).flops(np.array(lengths), trained)
    # the rotary products are the only ones that the hand leaves out
    assert counted == pytest.approx(by_hand(lengths, trained), rel=2e-3)


def test_a_step_without_a_token_has_none(shape: ModelShape) -> None:
    assert mfu.Utilisation(shape, 1.0).mfu(np.zeros(0, np.int64), 0, 1.0) == 0.0


def test_flops_do_not_count_attention_between_documents_of_a_row(shape: ModelShape) -> None:
    one = mfu.Utilisation(shape, 2.0)
    assert one.mfu(np.array([512]), 0, 1.0) > one.mfu(np.array([64] * 8), 0, 1.0)
    assert one.mfu(np.array([512]), 0, 2.0) == one.mfu(np.array([512]), 0, 1.0) / 2


def test_the_log_line_and_the_file_have_the_mfu(
    tmp_path: Path, shape: ModelShape, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(tmp_path)
    one = mfu.Utilisation(shape, 1e-6)
    monkeypatch.setattr(health, "utilisation_of", lambda *_: one)
    train(load_config(config(tmp_path, schedule={"steps": 2})), engine=CountingEngine())
    found = read_records(tmp_path / "run" / "metrics.jsonl")
    for step in found:
        assert step.mfu is not None
        assert step.processed_tokens > step.trained_tokens
        flops = step.mfu * step.step_s * 1e6
        least = one.flops(np.ones(step.processed_tokens, np.int64), step.trained_tokens)
        assert least < flops < one.flops(np.array([step.processed_tokens]), step.trained_tokens)
    assert " MFU " in capsys.readouterr().out


def test_without_a_peak_there_is_no_mfu(tmp_path: Path) -> None:
    """A CPU's peak is not measured, and the default of a machine file is no measurement."""
    prepare(tmp_path)
    run = load_config(config(tmp_path), ["--precision.compute_dtype=bf16"])
    assert health.utilisation_of(run, tmp_path / "model", 1) is None
    assert "MFU" not in step_line(record(1), 10, 5.0)
    assert "tok/s (1.5k trained)  MFU 41.2%  2.00 s" in step_line(replace(record(1), mfu=0.412), 10, 5.0)


def test_fp32_has_no_mfu_against_the_peak_of_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path)
    monkeypatch.setattr(health, "device_of", lambda _: torch.device("cuda"))
    monkeypatch.setattr(health, "known_machine", lambda _: replace(MACHINE, matrix_tflops=700.0))
    for word, has in (("fp32", False), ("bf16", True), ("fp16", True)):
        run = load_config(config(tmp_path), [f"--precision.compute_dtype={word}"])
        found = health.utilisation_of(run, tmp_path / "model", 2)
        assert (found is not None) == has, word
        assert found is None or found.peak_tflops == 1400.0
