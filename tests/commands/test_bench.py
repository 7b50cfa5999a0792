"""The benchmark on a tiny shape completes and prints its measurements."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatrain.commands.bench import bench
from megatrain.commands.main import main
from megatrain.commands.work import Work, plan_overrides
from megatrain.errors import UserError

MACHINE = Path(__file__).parents[2] / "docs/machines/h200.yaml"


def test_a_planned_benchmark_reports_plan_bounds_and_split() -> None:
    said: list[str] = []
    report = bench(Work("tiny", 4, 32, "cpu", machine_file=MACHINE, say=said.append), steps=3, warmup=1)
    assert len(report.steps) == 3
    assert report.seconds["step"] == sorted(report.steps)[1]
    assert report.tokens_per_second == pytest.approx(4 * 32 / report.seconds["step"])
    assert report.bound is not None and report.bound > 0
    assert report.policy_bound is not None and report.policy_bound > 0
    assert report.plan is not None
    assert report.plan["step"]["measured"] == report.seconds["step"]
    assert report.options["placement"]["embedding"] == "device"  # the plan was followed
    text = "\n".join(said)
    for part in (
        "plan for tiny",
        "warm-up: 2 steps instead of 1",
        "step 1 (warm-up)",
        "step 2: ",
        "policy bound",
        "plan and measurement",
    ):
        assert part in text


def test_streamed_units_move_their_weights_and_gradients() -> None:
    overrides = {"placement": "host", "activations": "recompute", "threads": 1}
    work = Work("tiny", 2, 16, "cpu", machine_file=MACHINE, overrides=overrides)
    report = bench(work, steps=1, warmup=1, bounds=False)
    assert report.pcie["sent_bytes"] > 0
    assert report.pcie["loaded_bytes"] >= report.pcie["sent_bytes"]
    assert report.bound is None


def test_the_command_prints_json_alone(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "bench",
        "--shape",
        "tiny",
        "--rows",
        "2",
        "--tokens",
        "16",
        "--steps",
        "1",
        "--device",
        "cpu",
        "--machine",
    ]
    assert main([*words, str(MACHINE), "--json", "--option", "threads=1"]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert report["options"]["threads"] == 1
    assert "policy bound" in printed.err


def test_an_unknown_shape_and_an_unknown_option_are_user_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--shape", "qwen9", "--rows", "1", "--tokens", "8"]) == 2
    assert "qwen3-8b" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"weight_slot=3"):
        plan_overrides(["weight_slot=3"])
    with pytest.raises(UserError, match=r'did you mean "microbatch_rows=3"\?'):
        plan_overrides(["microbatch-row=3"])
    words = "bench --shape tiny --rows 1 --tokens 8 --device cpu --option acumulation_steps=2"
    assert main(words.split()) == 2
    assert 'did you mean "accumulation_steps=2"?' in capsys.readouterr().err


def test_processes_share_the_model_and_report_together(tmp_path: Path) -> None:
    """One command; the report has a line for each rank and the slowest one."""
    words = (
        "bench --shape tiny --rows 4 --tokens 16 --steps 2 --device cpu --gpus 2 --json --no-bounds --option threads=1"
    )
    command = [sys.executable, "-m", "megatrain", *words.split(), "--machine", str(MACHINE)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["gpus"] == 2 and report["plan"]["details"]["gpus"] == 2
    assert report["tokens_per_second"] == pytest.approx(4 * 16 / report["seconds"]["step"])
    work = [rank["work_s"] for rank in report["by_rank"]]
    assert len(work) == 2 and report["host_peak"] == sum(rank["host_peak"] for rank in report["by_rank"])
    assert f"slowest: rank {work.index(max(work))}" in done.stderr
    for said in ("2 GPUs, one process each", "rank 1:", "step 2: "):
        assert done.stderr.count(said) == 1, done.stderr
    assert report["plan"]["host_bytes"]["planned"] == 2 * report["plan"]["details"]["host_bytes"]["total"]


def test_an_error_of_the_ranks_is_told_once(tmp_path: Path) -> None:
    words = "bench --shape tiny --rows 4 --tokens 16 --device cpu --gpus 2 --host-gib 0.0001"
    command = [sys.executable, "-m", "megatrain", *words.split(), "--machine", str(MACHINE)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 3 and done.stderr.count("error:") == 1 and "Traceback" not in done.stderr, done.stderr


def test_a_config_folder_is_a_shape(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48,
                "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64, "max_position_embeddings": 64,
            }
        )
    )  # fmt: skip
    report = bench(Work(str(tmp_path), 1, 8, "cpu", machine_file=MACHINE), steps=1, warmup=1)
    assert report.parameters > 10_000


def test_options_must_have_the_type_of_their_plan_field() -> None:
    words = [
        "threads=2", "activations=keep", "offload_input=[0, 2]", "microbatch_rows=null", 'placement={"head": "device"}',
        "host_gib=4", "gradient_plane=false",
    ]  # fmt: skip
    assert plan_overrides(words) == {
        "threads": 2, "activations": "keep", "offload_input": frozenset({0, 2}), "microbatch_rows": None,
        "placement": {"head": "device"}, "host_gib": 4, "gradient_plane": False,
    }  # fmt: skip
    assert plan_overrides(['activations={"1": "keep_mlp"}']) == {"activations": {1: "keep_mlp"}}
    for word in ("threads=abc", "selective_budget=[1]", "gradient_plane=yes", "segment=null", "weight_slots=true"):
        with pytest.raises(UserError, match="should be"):
            plan_overrides([word])
    for word in ("model=x", "device=cpu", "verify=never", "self=1"):
        with pytest.raises(UserError, match="is not NAME=VALUE of ExecutionPlan"):
            plan_overrides([word])
