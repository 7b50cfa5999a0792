"""Where one GPU with the host engine is faster than a mesh layout, plan, check and the start of a run say so."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ruamel.yaml import YAML

import mesh_agent
from megatrain.commands.main import main
from megatrain.commands.work import folder_of
from megatrain.config.load import load_config
from megatrain.config.schema import RunConfig
from megatrain.engine.mesh.layout import Layout
from megatrain.machine.machine import load_machine
from megatrain.models.build import load_model_config
from megatrain.planner.cluster.candidate import Candidate, Request
from megatrain.planner.cluster.estimate import evaluate
from megatrain.planner.cluster.one_gpu import cluster_of, one_gpu_tokens_per_s, slower_than_one_gpu
from megatrain.planner.cluster.plan import faster_than_layout, make_request
from megatrain.planner.plan import StepSize
from megatrain.planner.timeline import HEAD_FRACTION
from megatrain.run import coordinator, engine_factory
from tiny_run import config, prepare

MACHINES = Path(__file__).parents[3] / "docs/machines"
H200 = load_machine(MACHINES / "h200.yaml")
SHARDED = Layout(shard=2)


def request_of(shape: str, rows: int, scratch: Path) -> Request:
    config = load_model_config(folder_of(shape, scratch))
    return make_request(config, cluster_of(H200, 2), 2, StepSize(rows, 1024), name=shape)


def test_two_gpus_as_measured(tmp_path: Path) -> None:
    """Qwen3-0.6B on H200s: 105,000 tokens/s by the mesh engine on two GPUs, 112,000 by the host engine on one.

    The mesh engine computed the head's logits twice then, which it no longer does.
    """
    request = request_of("qwen3-0.6b", 16, tmp_path)
    estimate, one = evaluate(request, Candidate(SHARDED, recompute=True)), one_gpu_tokens_per_s(request, H200)
    logits_s = 2.0 * request.inventory.shape.head_matrix * 8 * 1024 / (H200.matrix_tflops * 1e12 * HEAD_FRACTION)
    tokens = 16 * 1024
    assert tokens / (tokens / estimate.tokens_per_s + logits_s) == pytest.approx(105_000, rel=0.05)
    assert one == pytest.approx(112_000, rel=0.05)


def test_two_gpus_that_are_slower_than_one(tmp_path: Path) -> None:
    request = request_of("qwen3-0.6b", 8, tmp_path)
    estimate, one = evaluate(request, Candidate(SHARDED, recompute=True)), one_gpu_tokens_per_s(request, H200)
    line = slower_than_one_gpu(estimate, one, 2)
    assert line is not None
    figures = [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]{5,}|\d\d,\d{3}", line)]
    assert figures == [round(estimate.tokens_per_s), round(one or 0)]


def test_nothing_is_said_of_a_large_model_or_step(tmp_path: Path) -> None:
    request = request_of("qwen3-0.6b", 64, tmp_path)
    estimate = evaluate(request, Candidate(SHARDED, recompute=True))
    assert slower_than_one_gpu(estimate, one_gpu_tokens_per_s(request, H200), 2) is None
    request = request_of("qwen3-4b", 32, tmp_path)
    estimate = evaluate(request, Candidate(SHARDED, recompute=True))
    assert slower_than_one_gpu(estimate, one_gpu_tokens_per_s(request, H200), 2) is None
    small = replace(H200, device_gib=2.0, host_gib=2.0)
    assert one_gpu_tokens_per_s(request, small) is None, "it does not fit"
    assert slower_than_one_gpu(estimate, None, 2) is None


@pytest.fixture
def run(tmp_path: Path) -> RunConfig:
    folder_of("qwen3-0.6b", tmp_path)
    return load_config(
        {
            "model": {"path": str(tmp_path), "init": "random"},
            "engine": "mesh",
            "data": {"train": str(tmp_path / "data.jsonl"), "max_tokens": 1024},
            "batch": {"tokens_per_step": 8 * 1024},
            "run": {"dir": str(tmp_path / "run")},
        }
    )


def test_a_run_is_told_of_one_gpu_and_of_a_faster_layout(run: RunConfig) -> None:
    one_gpu, layout = faster_than_layout(run, H200, world=2, per_node=2)
    assert re.fullmatch(
        r"parallel: [\d,]+ tokens/s on 2 GPUs are fewer than the [\d,]+ of one GPU with engine: host \(forecasts\)",
        one_gpu,
    )
    assert re.match(
        r"parallel: shard 2, 1 microbatch, recompute: [\d,]+ tokens/s; .*, keep would reach [\d,]+ ", layout
    )
    assert faster_than_layout(run, H200, world=32, per_node=8) == []


def test_plan_says_so(run: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    YAML().dump(run.model_dump(mode="json", exclude_unset=True), tmp_path / "run.yaml")
    words = ["plan", str(tmp_path / "run.yaml"), "--machine", str(MACHINES / "h100-cluster.yaml"), "--world=2"]
    assert main([*words, "--parallel.shard=2", "--batch.tokens_per_step=2048"]) == 0
    shown = capsys.readouterr().out
    for which in ("the first", "the file's own layout"):
        found = rf"^  warning: {which}: [\d,]+ tokens/s on 2 GPUs are fewer than the [\d,]+ of one GPU"
        assert re.search(found, shown, flags=re.MULTILINE)
    assert main(["plan", str(tmp_path / "run.yaml"), "--machine", str(MACHINES / "h200.yaml")]) == 0
    assert "  warning: engine: mesh: this plans one GPU with the host engine" in capsys.readouterr().out
    assert main([*words, "--json", "--batch.tokens_per_step=262144"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["one_gpu_tokens_per_second"] < found["best"][0]["tokens_per_second"]


def test_a_gpu_rank_asks_for_advice_with_the_figures_of_this_machine(
    run: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine_factory.advice_on_layout(run, measure=True) == [], "no GPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(engine_factory.launch, "device_of_rank", lambda device: torch.device("cuda", 0))
    monkeypatch.setattr(engine_factory.launch, "world_size", lambda: 2)
    monkeypatch.setattr(engine_factory, "known_machine", lambda device: None)
    assert engine_factory.advice_on_layout(run, measure=False) == [], "nothing is measured at a start"
    monkeypatch.setattr(engine_factory, "probe", lambda device: H200)
    assert len(engine_factory.advice_on_layout(run, measure=True)) == 2


def test_check_and_the_start_of_a_run_print_the_advice_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = config(prepare(tmp_path), schedule={"steps": 1})
    del plain["run"]["threads"]
    YAML().dump({**plain, "engine": "mesh"}, tmp_path / "run.yaml")

    def advised(rank: int, attempt: int) -> None:
        coordinator.advice_on_layout = lambda run, measure: ["parallel: one GPU is faster"]

    log = tmp_path / "log"
    assert mesh_agent.run([2], ["train", str(tmp_path / "run.yaml")], log, advised) == [[0, 0]]
    assert log.read_text().count("warning: parallel: one GPU is faster") == 1
    monkeypatch.setattr("megatrain.run.prepare.advice_on_layout", lambda run, measure: ["parallel: one GPU is faster"])
    assert main(["check", str(tmp_path / "run.yaml"), f"--run.dir={tmp_path}/next"]) == 0
    assert "warning: parallel: one GPU is faster" in capsys.readouterr().out
