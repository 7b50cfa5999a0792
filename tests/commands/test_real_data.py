"""Typical data files without a given format are previewed, checked and trained on.

They are the demo files of LLaMA-Factory and are not part of the project: `shared/data` inside or beside the repository, or the
folder that MEGATRAIN_TEST_DATA names. MEGATRAIN_TEST_TOKENIZER may name a model folder whose tokenizer is used instead of a
tiny one.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from ruamel.yaml import YAML
from transformers import AutoTokenizer

from megatrain.commands.main import main
from megatrain.metrics.record import read_records
from megatrain.units import counted
from tiny_run import config, write_model

REPOSITORY = Path(__file__).parents[2]
PLACES = [
    os.environ.get("MEGATRAIN_TEST_DATA", ""),
    REPOSITORY / "shared" / "data",
    REPOSITORY.parent / "shared" / "data",
]
FOLDER = next((Path(place) for place in PLACES if place and Path(place).is_dir()), None)

FILES = {
    # file name: the format to detect, its samples, and whether all of its text is trained
    "alpaca_en_demo.json": ("alpaca", 999, False),
    "identity.json": ("alpaca", 91, False),
    "v1_sft_demo.jsonl": ("messages", 500, False),
    "c4_demo.jsonl": ("text", 300, True),
    "wiki_demo.txt": ("text", 1, True),
}

pytestmark = pytest.mark.skipif(FOLDER is None, reason="the demo files are not here")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real") / "model"
    given = os.environ.get("MEGATRAIN_TEST_TOKENIZER")
    vocabulary = {"vocab_size": len(AutoTokenizer.from_pretrained(given))} if given else {}
    write_model(folder, weights=False, max_position_embeddings=1024, **vocabulary)
    if given:
        for file in [*Path(given).glob("*token*"), *Path(given).glob("*.jinja"), *Path(given).glob("vocab*")]:
            shutil.copy(file, folder)
    return folder


def cache_of(model: Path) -> dict[str, str]:
    """One for all tests of this file: each data file is tokenized once."""
    return {"cache_dir": str(model.parent / "cache")}


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_previewed_checked_and_trained_on(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert FOLDER is not None
    format, samples, whole = FILES[name]
    sections = {
        "model": {"path": str(model), "init": "random"},
        "data": {"train": str(FOLDER / name), "max_tokens": 512, "overflow": "truncate", **cache_of(model)},
        "batch": {"tokens_per_step": 1024},
        "schedule": {"kind": "constant", "steps": 2},
        "checkpoint": {"at_end": False},
    }
    run = str(tmp_path / "run.yaml")
    YAML().dump(config(tmp_path, **sections), tmp_path / "run.yaml")

    assert main(["data", run, "--samples", "2"]) == 0
    shown = capsys.readouterr().out
    assert f"format {format} (" in shown
    assert f": {counted(samples, 'sample')}, " in shown
    assert "rejected: none" in shown
    assert "⟦" in shown

    assert main(["check", run]) == 0
    assert "all checks passed" in capsys.readouterr().out

    assert main(["train", run]) == 0
    found = read_records(tmp_path / "run" / "metrics.jsonl")
    assert [record.step for record in found] == [1, 2]
    for record in found:
        assert record.loss is not None
        share = record.trained_tokens / record.processed_tokens
        assert share > 0.98 if whole else 0.2 < share < 0.95


def test_all_files_in_one_run(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert FOLDER is not None
    sections = {
        "model": {"path": str(model), "init": "random"},
        "data": {
            "train": [{"path": str(FOLDER / name), "weight": 0.5} for name in FILES],
            "val": {"fraction": 0.01},
            "max_tokens": 512,
            "overflow": "truncate",
            **cache_of(model),
        },
        "batch": {"tokens_per_step": 1024},
        "schedule": {"kind": "constant", "steps": 1},
        "checkpoint": {"at_end": False},
        "eval": {"at_end": False},
    }
    YAML().dump(config(tmp_path, **sections), tmp_path / "run.yaml")
    assert main(["train", str(tmp_path / "run.yaml")]) == 0
    assert len(read_records(tmp_path / "run" / "metrics.jsonl")) == 1
