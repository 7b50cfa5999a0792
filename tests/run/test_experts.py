"""What a run of a mixture of experts records, prints and warns of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ruamel.yaml import YAML
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from megatrain.commands.main import main
from megatrain.metrics.record import read_records
from tiny_run import config, write_model, write_texts


@pytest.fixture
def yaml(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    write_model(folder, weights=False)
    sizes = Qwen3MoeConfig.from_pretrained(folder).vocab_size
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=sizes, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2, head_dim=8,
            num_attention_heads=4, num_key_value_heads=2, num_experts=8, num_experts_per_tok=2, max_position_embeddings=256,
            output_router_logits=True, router_aux_loss_coef=0.01,
        )
    ).save_pretrained(folder)  # fmt: skip
    write_texts(tmp_path / "texts.jsonl", 60)
    file = tmp_path / "run.yaml"
    with file.open("w") as stream:
        YAML().dump(config(tmp_path), stream)
    return file


def test_the_auxiliary_loss_and_the_load_are_recorded_and_shown(yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--schedule.steps=20", "--alerts.expert_share=0.2", "--alerts.steps=2", "--checkpoint.every_steps=null"]
    assert main(["train", str(yaml), *words]) == 0
    run = yaml.parent / "run"
    records, log = read_records(run / "metrics.jsonl"), (run / "log.txt").read_text()
    for record in records:
        assert (
            record.aux_loss is not None and 1.5 < record.aux_loss < 8.0
        )  # the number of chosen experts if all are used alike
        assert record.expert_max_load is not None and record.expert_max_load > 1.0
        assert record.expert_idle is not None and record.expert_max_share is not None
    assert "auxiliary loss of the routers: on, coefficient 0.01" in log
    assert "active for a token" in log
    assert f"aux {records[0].aux_loss:.4f}" in log
    assert "routing collapses: one expert of a layer gets" in log
    capsys.readouterr()
    assert main(["monitor", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "auxiliary loss" in shown and "busiest expert, x mean" in shown


def test_the_key_turns_the_loss_off_and_changes_what_is_trained(yaml: Path) -> None:
    weights = {}
    for setting in ("null", "true", "0.01", "false", "1.0"):
        folder = yaml.parent / setting
        words = [f"--model.router_aux_loss={setting}", f"--run.dir={folder}", "--optim.max_grad_norm=null"]
        assert main(["train", str(yaml), *words]) == 0
        records = read_records(folder / "metrics.jsonl")
        assert all((record.aux_loss is None) == (setting == "false") for record in records)
        weights[setting] = [record.loss for record in records]
    assert weights["null"] == weights["true"] == weights["0.01"]
    assert len({tuple(weights[name]) for name in ("null", "false", "1.0")}) == 3
