"""The benchmark on a tiny shape: it runs to its end, and what it prints is what it measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatrain.commands.bench import bench, engine_overrides
from megatrain.commands.main import main
from megatrain.errors import UserError

MACHINE = Path(__file__).parents[2] / "docs/machines/h200.yaml"


def test_a_planned_benchmark_reports_plan_bounds_and_split() -> None:
    said: list[str] = []
    report = bench("tiny", rows=4, tokens=32, steps=3, warmup=1, device="cpu", machine_file=MACHINE, say=said.append)
    assert len(report.steps) == 3
    assert report.seconds["step"] == sorted(report.steps)[1]
    assert report.tokens_per_second == pytest.approx(4 * 32 / report.seconds["step"])
    assert report.bound is not None and report.bound > 0
    assert report.policy_bound is not None and report.policy_bound > 0
    assert report.plan is not None
    assert report.plan["step"]["measured"] == report.seconds["step"]
    assert report.options["resident"][0] == "embedding"  # the plan was followed
    text = "\n".join(said)
    for part in (
        "plan for tiny",
        "warm-up: 2 steps instead of 1",
        "step 1 (warm-up)",
        "step 2: ",
        "policy bound",
        "plan against measurement",
    ):
        assert part in text


def test_streamed_units_move_their_weights_and_gradients() -> None:
    overrides = {"resident": (), "kept": (), "selective": (), "threads": 1}
    report = bench(
        "tiny", rows=2, tokens=16, steps=1, warmup=1, device="cpu", machine_file=MACHINE, overrides=overrides,
        bounds=False, say=lambda _: None,
    )  # fmt: skip
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


def test_an_unknown_shape_and_an_unknown_option_are_errors_of_the_user(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--shape", "qwen9", "--rows", "1", "--tokens", "8"]) == 2
    assert "qwen3-8b" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"weight_slot=3"):
        engine_overrides(["weight_slot=3"])


def test_a_config_folder_is_a_shape(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48,
                "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64, "max_position_embeddings": 64,
            }
        )
    )  # fmt: skip
    report = bench(
        str(tmp_path), rows=1, tokens=8, steps=1, warmup=1, device="cpu", machine_file=MACHINE, say=lambda _: None
    )
    assert report.parameters > 10_000


def test_options_of_the_engine_are_of_the_kind_it_takes() -> None:
    assert engine_overrides(["kept=1", "threads=2", "offloaded=all", "segment=null"]) == {
        "kept": [1], "threads": 2, "offloaded": "all", "segment": None
    }  # fmt: skip
    for word in ("threads=abc", "budget=[1]", "gradient_plane=yes"):
        with pytest.raises(UserError, match="should be"):
            engine_overrides([word])
    for word in ("model=x", "device=cpu", "verify=never", "self=1"):
        with pytest.raises(UserError, match="is no NAME=VALUE of HostEngine"):
            engine_overrides([word])
