"""`megatrain plan` on a run's file, and the settings that reach planner and engine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ruamel.yaml import YAML

import megatrain as mt
from families import FAMILIES, build
from megatrain.commands.main import main
from megatrain.config.load import load_config
from megatrain.engine.host.engine import HostEngine
from megatrain.errors import UserError
from megatrain.machine.machine import load_machine
from megatrain.models.build import build_from_memory
from megatrain.models.structure import dissect
from megatrain.planner.model_cost import shape_of_structure
from megatrain.planner.plan import StepSize
from megatrain.planner.run import execution_plan, options_of, plan_run, plan_step
from tiny_run import config, prepare

MACHINE = Path(__file__).parents[2] / "docs/machines/h200.yaml"


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = prepare(tmp_path_factory.mktemp("files"))
    YAML().dump(config(folder), folder / "run.yaml")
    return folder / "run.yaml"


def test_the_command_prints_the_plan(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(run_file), "--machine", str(MACHINE), "--schedule.steps", "50"]) == 0
    text = capsys.readouterr().out
    for part in (
        "K parameters, on ",
        "all units in device memory",
        "host memory",
        "bottleneck",
        "for 50 steps",
    ):
        assert part in text


def test_the_command_prints_json(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(run_file), "--machine", str(MACHINE), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    run = load_config(run_file)
    assert data["rows"] * data["tokens_per_row"] == run.batch.tokens_per_step
    assert set(data["execution"]["placement"].values()) == {"device"}


def test_rows_longer_than_the_models_positions_are_planned_with_a_warning(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", str(run_file), "--batch.tokens_per_step=2048", "--data.max_tokens"]
    said = "warning: data.max_tokens: rows of 512 tokens are longer than the 256 positions of the model"
    for machine in (["--machine", str(MACHINE)], ["--machine", str(CLUSTER), "--world", "8"]):
        assert main([*words, "512", *machine]) == 0
        assert said in capsys.readouterr().out
        assert main([*words, "256", *machine]) == 0
        assert "warning: data" not in capsys.readouterr().out


CLUSTER = MACHINE.with_name("h100-cluster.yaml")


def test_the_command_ranks_the_layouts_of_a_cluster(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--machine", str(CLUSTER), "--world", "8", "--parallel.pipeline", "2", "--schedule.steps", "50"]
    assert main(["plan", str(run_file), *words]) == 0
    text = capsys.readouterr().out
    assert " 0 MiB" not in text and "1 microbatches" not in text
    for part in (
        "on 8 GPUs of H100",
        "K parameters",
        "    50 steps: 0.",
        " minutes",
        "bottleneck: ",
        "the file's own layout",
        "torchrun --nproc-per-node 8",
    ):
        assert part in text
    assert main(["plan", str(run_file), *words, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["world"] == 8 and len(data["best"]) > 1
    assert data["best"][0]["parallel"]["shard"] >= 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--world", "8"], "give --machine FILE"),
        (["--world", "12", "--machine", str(CLUSTER)], "8 or 16 would"),
        (["--world", "8", "--machine", str(MACHINE)], "of one machine, not of a cluster"),
        (["--machine", str(CLUSTER)], "plan for it with --world"),
    ],
)
def test_world_needs_a_cluster_file_and_a_cluster_file_needs_world(
    run_file: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["plan", str(run_file), *words]) == 2
    assert said in capsys.readouterr().err


def test_a_missing_machine_file_is_reported_before_torch_is_imported(run_file: Path) -> None:
    """With similar file names."""
    missing = MACHINE.with_name("h20.yaml")
    script = (
        "import sys; from megatrain.commands.main import main\n"
        f"code = main(['plan', {str(run_file)!r}, '--machine', {str(missing)!r}])\n"
        "assert 'torch' not in sys.modules\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert f"{missing}: no such file" in done.stderr
    assert f"did you mean {MACHINE}" in done.stderr


def test_a_run_that_does_not_fit_ends_with_code_3(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--machine", str(MACHINE), "--memory.host_gib", "0.5"]
    assert main(["plan", str(run_file), *words]) == 3
    assert "how to reduce it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "value"),
    [("host_gib", "0.5"), ("host_reserve_gib", "123"), ("device_gib", "0.05"), ("device_fraction", "0.0005")],
)
def test_a_limit_of_the_config_is_named_with_the_value_that_fits(
    run_file: Path, capsys: pytest.CaptureFixture[str], key: str, value: str
) -> None:
    words = ["plan", str(run_file), "--machine", str(MACHINE), f"--memory.{key}"]
    assert main([*words, value]) == 3
    text = capsys.readouterr().err
    found = re.search(rf"- memory\.{key}: ([\d.]+) \(now {value}\); then it fits", text)
    assert found is not None, text
    assert main([*words, found[1]]) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_a_machine_file_is_required(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megatrain.machine.probe.probe", lambda *_: load_machine_without_gpu())
    assert main(["plan", str(run_file)]) == 2
    assert "--machine" in capsys.readouterr().err


def load_machine_without_gpu() -> object:
    from dataclasses import replace

    return replace(load_machine(MACHINE), device_gib=0.0)


def test_memory_limits_of_the_file_hold_for_the_plan(run_file: Path) -> None:
    run = load_config(run_file, ["memory.host_gib=3", "memory.device_gib=2"])
    made = plan_run(run, machine_file=MACHINE)
    assert made.caps.host_bytes == 3 << 30
    assert made.caps.device_bytes == int(0.92 * (2 << 30))


def test_the_plan_fills_a_fraction_of_the_device_and_keeps_the_host_reserve(run_file: Path) -> None:
    whole = load_machine(MACHINE)
    made = plan_run(
        load_config(run_file, ["memory.device_fraction=0.5", "memory.host_reserve_gib=2"]), machine_file=MACHINE
    )
    assert made.caps.device_bytes == int(0.5 * whole.device_gib * (1 << 30))
    assert made.caps.host_bytes == int(whole.host_gib * (1 << 30)) - (2 << 30)
    assert made.device_bytes <= made.caps.device_bytes


def test_settings_of_the_file_reach_the_planner(run_file: Path) -> None:
    changes = {
        "precision.compute_dtype": "fp32",
        "activations.policy": "keep",
        "activations.compile": "off",
        "activations.offload_input": "off",
        "activations.mlp_chunk_tokens": 9,
        "batch.accumulation_steps": 2,
        "batch.microbatch_rows": 1,
        "batch.head_chunk_tokens": 7,
        "memory.pin": "staged",
        "run.threads": 3,
    }
    options = options_of(load_config(run_file, [f"{key}={value}" for key, value in changes.items()]))
    assert (options.compute, options.transport_bytes, options.policy) == ("fp32", 4, "keep")
    assert (options.compiled, options.offload_input, options.staged, options.threads) == (False, "off", True, 3)
    assert (options.accumulation_steps, options.microbatch_rows, options.head_chunk_tokens) == (2, 1, 7)
    assert options.mlp_chunk_tokens == 9
    default = options_of(load_config(run_file))
    assert (default.compute, default.policy, default.accumulation_steps, default.compiled) == (
        "bf16",
        "auto",
        None,
        True,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_on_a_cpu_the_engine_gets_what_the_file_says(run_file: Path) -> None:
    run = load_config(run_file, ["activations.policy=keep", "batch.microbatch_rows=2"])
    followed = execution_plan(run)
    assert (followed.activations, followed.microbatch_rows) == ("keep", 2)
    with HostEngine(run.model.path, followed, device="cpu") as engine:
        ids = torch.randint(0, 8, (4, 16))
        assert engine.train_step({"input_ids": ids, "labels": ids}).skipped is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize(
    ("words", "policy"),
    [
        (["attention=keep"], "keep_attention"),
        (["policy=recompute", "mlp=keep"], "keep_mlp"),
        (["attention=keep", "mlp=keep"], "keep"),
        (["policy=selective"], "selective"),
        ([], "recompute"),
    ],
)
def test_on_a_cpu_all_layers_follow_the_policy_of_the_file(run_file: Path, words: list[str], policy: str) -> None:
    given = [f"activations.{word}" for word in [*words, "mlp_chunk_tokens=7"]]
    followed = execution_plan(load_config(run_file, given))
    assert (followed.activations, followed.mlp_chunk_tokens) == (policy, 7)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_an_evaluation_needs_no_gradient_planes(run_file: Path) -> None:
    assert not execution_plan(load_config(run_file), training=False).gradient_plane
    fp16 = load_config(run_file, ["precision.compute_dtype=fp16"])
    assert execution_plan(fp16, training=False).gradient_plane


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_python_users_get_a_plan_from_a_config_or_a_model(run_file: Path) -> None:
    run = load_config(run_file, ["batch.microbatch_rows=2"])
    assert mt.plan(run) == execution_plan(run)
    assert mt.plan(run.model.path, rows=4, tokens=16) == mt.ExecutionPlan()
    with pytest.raises(UserError, match="rows and tokens"):
        mt.plan(run.model.path)


FEW = ["gpt2", "gemma3_text", "mixtral", "qwen3_moe", "mamba2", "qwen3_next", "deepseek_v3"]


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.name in FEW], ids=lambda f: f.name)
def test_other_families_are_planned(family: object, caplog: pytest.LogCaptureFixture) -> None:
    model = build(family, seed=0, tie=None).bfloat16()  # type: ignore[arg-type]
    shape = shape_of_structure(dissect(build_from_memory(model, compute_dtype=torch.bfloat16)), "family")
    warned = [record.getMessage() for record in caplog.records if record.name.startswith("megatrain")]
    assert not warned, "the layer was not traced but estimated"
    assert all(cost.saved_bytes.at(64) > 2 * shape.hidden and cost.product_flops.at(64) > 0 for cost in shape.costs)
    assert plan_step(shape, load_machine(MACHINE), StepSize(2, 64)).all_resident
