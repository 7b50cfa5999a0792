"""The generated documents are up to date, complete, and consistent with the loader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from ruamel.yaml import YAML

from megatrain.config import docs
from megatrain.config.load import dump_config, fields, load_config
from megatrain.errors import UserError

GOOD: dict[str, Any] = {
    "model": {"path": "m"},
    "data": {"train": "a.jsonl"},
    "batch": {"tokens_per_step": 4096},
    "run": {"dir": "r"},
}


def with_(**sections: Any) -> dict[str, Any]:
    return {**GOOD, **{name: {**GOOD.get(name, {}), **values} for name, values in sections.items()}}


def fits(config: dict[str, Any]) -> bool:
    return jsonschema.Draft202012Validator(docs.json_schema()).is_valid(config)


def test_the_documents_are_up_to_date() -> None:
    assert docs.stale(docs.FOLDER) == [], "run `python -m megatrain.config.docs`"


def test_every_key_is_in_the_document_in_yaml_order() -> None:
    text = docs.markdown()
    last = 0
    for loc, info in fields():
        name = ".".join(map(str, loc))
        if len(loc) == 1 and info.description is None:
            at = text.index(f"\n## {name}\n", last)
        else:
            at = text.index(f"- `{name}` (", last)
            assert str(info.description) in text[at:].split("\n", 1)[0]
        assert at >= last
        last = at


def test_outdated_documents_are_detected_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--folder", str(tmp_path)]
    assert docs.main([*words, "--check"]) == 1
    assert not list(tmp_path.iterdir()), "--check writes nothing"
    assert docs.main(words) == 0
    assert docs.main([*words, "--check"]) == 0
    (tmp_path / docs.SCHEMA).write_text("{}")
    capsys.readouterr()
    assert docs.main([*words, "--check"]) == 1
    assert capsys.readouterr().out == f"{docs.SCHEMA} is out of date\n"


def test_the_json_schema_is_valid() -> None:
    jsonschema.Draft202012Validator.check_schema(docs.json_schema())
    assert json.loads((docs.FOLDER / docs.SCHEMA).read_text()) == docs.json_schema()


@pytest.mark.parametrize(
    "config",
    [
        GOOD,
        with_(data={"train": ["a", {"path": "b", "weight": 0.5, "format": "alpaca"}]}),
        with_(data={"train": {"path": "b"}, "val": {"fraction": 0.1}}),
        with_(data={"val": "v.jsonl"}),
        with_(data={"val": ["v.jsonl", {"path": "w.jsonl"}]}),
        with_(data={"val": {"path": "v.jsonl"}}),
        with_(data={"val": None}, memory={"host_gib": "auto", "device_gib": 60.5}),
        with_(optim={"groups": [{"pattern": "norm", "lr_scale": 0.1}], "betas": [0.9, 0.95]}),
        {**GOOD, "optim": None},
    ],
    ids=str,
)
def test_configs_that_load_match_the_json_schema(config: dict[str, Any]) -> None:
    run = load_config(config)
    assert fits(config)
    assert fits(YAML(typ="safe", pure=True).load(dump_config(run)))


@pytest.mark.parametrize(
    "config",
    [
        {},
        with_(optim={"lr": 1}),
        with_(optim={"learning_rate": "1e-5"}),
        with_(optim={"learning_rate": 0}),
        with_(data={"packing": "no"}),
        with_(data={"train": []}),
        with_(data={"train": [{"path": "a", "weight": 0}]}),
        with_(data={"allow_rejects": 1.5}),
        with_(schedule={"kind": "cosin"}),
        with_(batch={"tokens_per_step": 2048.5}),
    ],
    ids=str,
)
def test_configs_that_are_refused_do_not_match_the_json_schema(config: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        load_config(config)
    assert not fits(config)


@pytest.mark.parametrize(
    "example", sorted((docs.FOLDER.parent / "examples").glob("*.yaml")), ids=lambda path: path.name
)
def test_the_examples_match_the_json_schema(example: Path) -> None:
    assert fits(YAML(typ="safe", pure=True).load(example.read_text()))
