"""docs/parallel.md is true: its flags name keys that exist, its numbers are the planner's."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML
from transformers import LlamaConfig

from megatrain.commands.main import main
from megatrain.config.schema import ParallelConfig, RunConfig

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs/parallel.md").read_text(encoding="utf-8")


def known(key: str) -> bool:
    section, _, name = key.partition(".")
    kind = RunConfig.model_fields[section].annotation
    return name in getattr(kind, "model_fields", {})


def test_every_key_of_the_flags_table_exists() -> None:
    table = TEXT[TEXT.index("## From Megatron-LM's flags") : TEXT.index("## Which layout")]
    keys = set(re.findall(r"`(\w+\.\w+)\b", table))
    assert len(keys) > 25
    assert not sorted(key for key in keys if not known(key))


def test_every_size_of_a_layout_is_in_the_flags_table() -> None:
    table = TEXT[TEXT.index("## From Megatron-LM's flags") : TEXT.index("## Which layout")]
    assert not sorted(name for name in ParallelConfig.model_fields if f"`parallel.{name}" not in table)


@pytest.mark.slow
def test_the_example_is_what_the_plan_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = LlamaConfig(
        hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, num_attention_heads=128,
        num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=False, max_position_embeddings=131072,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path / "Llama-3.1-405B")
    example = TEXT[TEXT.index("### An example for 1,024 GPUs") :]
    given = YAML(typ="safe").load(re.findall(r"```yaml\n(.*?)```", example, flags=re.DOTALL)[0])
    given["model"] = {"path": str(tmp_path / "Llama-3.1-405B"), "init": "random"}
    given["data"]["train"] = str(tmp_path / "data.jsonl")
    given["run"] = {"dir": str(tmp_path / "run")}
    YAML().dump(given, tmp_path / "run.yaml")
    machine = ROOT / "docs/machines/h100-cluster.yaml"
    assert main(["plan", str(tmp_path / "run.yaml"), "--machine", str(machine), "--world", "1024"]) == 0
    assert capsys.readouterr().out.rstrip() in example


@pytest.mark.slow
def test_the_comparison_with_published_runs_is_what_the_simulation_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("published_clusters", ROOT / "benchmarks/published_clusters.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    assert module.table() in TEXT
