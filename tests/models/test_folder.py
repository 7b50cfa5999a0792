"""Model folders from somebody else: what their files and configs name stays in the folder, and only safetensors are read."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from ruamel.yaml import YAML

from megatrain.commands.main import main
from megatrain.errors import UserError
from megatrain.models.folder import refuse_unsafe_folder
from megatrain.models.weights import INDEX_FILE, WEIGHTS_FILE, find_weight_files
from megatrain.run.preflight import load_tokenizer
from opens import outside, watching
from tiny_run import config, prepare


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("folder"))


@pytest.fixture
def model(files: Path, tmp_path: Path) -> Path:
    """A copy of the model, with private files beside it."""
    shutil.copytree(files / "model", tmp_path / "model")
    for name in ("secret", "secret.json", "tokenizer.4.0.0.json"):
        (tmp_path / name).write_text('{"a": 1}')
    shutil.copy(files / "model" / WEIGHTS_FILE, tmp_path / "secret.safetensors")
    return tmp_path / "model"


def all_commands_refuse(model: Path, files: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What `check`, `generate` and `eval` say; each exits with 2 and opens nothing of the private files."""
    run = model.parent / "run.yaml"
    YAML().dump(config(files, model={"path": str(model)}, run={"dir": str(model.parent / "run")}), run)
    said = ""
    for words in (["check", str(run)], ["generate", str(model), "--prompt=the", "--tokens=1", "--device=cpu"]):
        with watching() as opened:
            assert main(words) == 2, (words, capsys.readouterr())
        private = [path for path in outside(opened, model) if Path(path).resolve().name in PRIVATE]
        assert private == []
        said += capsys.readouterr().err
    assert "Traceback" not in said
    return said


PRIVATE = {"secret", "secret.json", "secret.safetensors", "tokenizer.4.0.0.json", "zero"}


# ------------------------------------------------------------------ weights


@pytest.mark.parametrize(
    "name",
    ["../secret.safetensors", "{parent}/secret.safetensors", "sub/../../secret.safetensors", "/dev/zero",
     "..\\secret.safetensors", "pytorch_model.bin", "link.safetensors", "sub/link.safetensors", "pipe.safetensors",
     "dir.safetensors", "", "\0.safetensors", 7, None, ["model.safetensors"], {}],
    ids=lambda name: ascii(name)[:24],
)  # fmt: skip
def test_an_index_names_safetensors_files_of_its_folder(
    name: Any, model: Path, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = find_weight_files(model)
    (model / WEIGHTS_FILE).rename(model / "part.safetensors")
    (model / "sub").mkdir()
    (model / "dir.safetensors").mkdir()
    os.mkfifo(model / "pipe.safetensors")
    for link in ("link.safetensors", "sub/link.safetensors"):
        (model / link).symlink_to(model.parent / "secret.safetensors")
    torch.save({}, model / "pytorch_model.bin")
    name = name.replace("{parent}", str(model.parent)) if isinstance(name, str) else name
    weight_map = dict.fromkeys(keys, "part.safetensors")
    weight_map["model.norm.weight"] = name
    (model / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    with watching() as opened, pytest.raises(UserError) as caught:
        find_weight_files(model)
    assert outside(opened, model) == []
    assert str(model) in str(caught.value)
    assert str(model) in all_commands_refuse(model, files, capsys)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": "x", "a": "y"}}']
)
def test_an_index_that_is_none(text: str, model: Path, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (model / WEIGHTS_FILE).unlink()
    (model / INDEX_FILE).write_text(text)
    assert INDEX_FILE in all_commands_refuse(model, files, capsys)


@pytest.mark.parametrize(
    "name", [WEIGHTS_FILE, "loose.safetensors", INDEX_FILE, "config.json", "tokenizer.json", "merges.txt"]
)
@pytest.mark.parametrize("target", ["../secret.safetensors", "/dev/zero", "nowhere", "PIPE"])
def test_a_file_that_leads_out_of_the_folder_is_not_read(
    name: str, target: str, model: Path, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if name.endswith((".safetensors", "index.json")):
        (model / WEIGHTS_FILE).unlink()
    (model / name).unlink(missing_ok=True)
    if target == "PIPE":
        os.mkfifo(model / name)
    else:
        (model / name).symlink_to(target)
    said = all_commands_refuse(model, files, capsys)
    assert f"{model / name}: " in said
    assert "symbolic link" in said or "is a pipe" in said


def test_only_safetensors_are_read(
    model: Path, files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading a pickle can run code: `generate` did, because transformers does."""

    class Run:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(model.parent / "owned"),)

    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Run()))
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("a pickle was loaded"))
    assert main(["generate", str(model), "--prompt=the", "--tokens=1", "--device=cpu"]) == 0, (
        "the safetensors beside it"
    )
    (model / WEIGHTS_FILE).unlink()
    assert "not safetensors (pytorch_model.bin)" in all_commands_refuse(model, files, capsys)
    (model / "pytorch_model.bin.index.json").write_text(
        json.dumps({"weight_map": {"lm_head.weight": "pytorch_model.bin"}})
    )
    assert "not safetensors" in all_commands_refuse(model, files, capsys)
    assert not (model.parent / "owned").exists()


def test_generate_follows_no_adapter(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (model / "adapter_config.json").write_text('{"base_model_name_or_path": "../other", "peft_type": "LORA"}')
    assert main(["generate", str(model), "--prompt=the", "--device=cpu"]) == 2
    assert "merge the adapter into the weights, or move the file away" in capsys.readouterr().err


# ------------------------------------------------------------------ names in configs


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("tokenizer_config.json", {"tokenizer_file": "{parent}/secret.json"}),
        ("tokenizer_config.json", {"vocab_file": "../secret.json"}),
        ("tokenizer_config.json", {"spm_file": "/dev/zero"}),
        ("tokenizer_config.json", {"fast_tokenizer_files": ["tokenizer.json", "../tokenizer.4.0.0.json"]}),
        ("tokenizer_config.json", {"fast_tokenizer_files": [["tokenizer.json"]]}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["../secret.Odd", None]}}),
        ("config.json", {"auto_map": {"AutoConfig": "../../secret.Odd"}}),
        ("config.json", {"auto_map": {"AutoConfig": "org/name--../../secret.Odd"}}),
        ("config.json", {"auto_map": {"AutoConfig": "/tmp/secret.Odd"}}),
        ("config.json", {"transformers_weights": "../secret.safetensors"}),
        ("config.json", {"transformers_weights": 3}),
    ],
)
def test_a_config_names_files_of_its_folder(
    file: str, change: dict[str, Any], model: Path, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = json.dumps(json.loads((model / file).read_text()) | change).replace("{parent}", str(model.parent))
    (model / file).write_text(text)
    assert f"{model / file}: names " in all_commands_refuse(model, files, capsys)
    with pytest.raises(UserError):
        load_tokenizer(model, trust_remote_code=True)


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("tokenizer_config.json", {"special_tokens_map_file": "/root/.cache/torch/deadbeef", "tokenizer_file": None}),
        (
            "tokenizer_config.json",
            {"tokenizer_file": "/home/who/trained-it/tokenizer.json", "name_or_path": "/home/who/x"},
        ),
        ("tokenizer_config.json", {"fast_tokenizer_files": ["tokenizer.json"]}),
        ("config.json", {"auto_map": {"AutoConfig": "configuration_odd.Odd", "AutoModel": "org/name--modeling.Odd"}}),
        ("config.json", {"auto_map": {"AutoTokenizer": ["tokenization.Slow", None]}, "_name_or_path": "/home/who/x"}),
        ("config.json", {"limit": [0.0, float("inf")]}),
    ],
)
def test_what_published_models_say_is_accepted(file: str, change: dict[str, Any], model: Path) -> None:
    """Paths of the machine that saved them lead to nothing here."""
    (model / file).write_text(json.dumps(json.loads((model / file).read_text()) | change))
    refuse_unsafe_folder(model, trust_remote_code=True)
    load_tokenizer(model, trust_remote_code=False)


def test_code_is_checked_where_it_may_run(model: Path) -> None:
    (model / "modeling_odd.py").symlink_to("../secret")
    refuse_unsafe_folder(model)
    with pytest.raises(UserError, match="symbolic link that leads out"):
        refuse_unsafe_folder(model, trust_remote_code=True)


def test_a_config_that_is_too_large_is_not_read(model: Path, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("config.json", "tokenizer.json"):
        kept = (model / name).read_bytes()
        os.truncate(model / name, 1 << 40)
        assert "are read" in all_commands_refuse(model, files, capsys)
        (model / name).write_bytes(kept)


def test_links_inside_the_folder_and_unrelated_ones_do_no_harm(model: Path) -> None:
    (model / WEIGHTS_FILE).rename(model / "real.data")
    (model / WEIGHTS_FILE).symlink_to("real.data")
    (model / "runs").symlink_to("/tmp")
    (model / "notes.md").symlink_to("../secret")
    assert main(["generate", str(model), "--prompt=the", "--tokens=1", "--device=cpu"]) == 0


def test_a_model_in_the_hubs_cache_trains(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its files are links to blobs, `../../blobs/HASH`; checkpoints and exports get the files themselves."""
    repository = tmp_path / "hub" / "models--org--name"
    snapshot = repository / "snapshots" / "0f1"
    (repository / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in sorted((files / "model").iterdir()):
        shutil.copy(file, repository / "blobs" / f"{file.name}-hash")
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}-hash")
    YAML().dump(config(files, model={"path": str(snapshot)}, run={"dir": str(tmp_path / "run")}), tmp_path / "run.yaml")
    assert main(["train", str(tmp_path / "run.yaml"), "--schedule.steps=1"]) == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    said = capsys.readouterr()
    assert "not copied" not in said.out + said.err
    for made in (tmp_path / "run" / "checkpoints" / "step_000001", tmp_path / "out"):
        assert (made / "tokenizer.json").read_bytes() == (files / "model" / "tokenizer.json").read_bytes()
        assert not any(path.is_symlink() for path in made.rglob("*"))


TEXTS = ["", "[]", "null", "[1]", "[" * 3000, '{"a": 1, "a": 2}']
ODD = {
    "tokenizer.json": ["", "{}", "null", "[1]", "[" * 3000, '{"model": {"type": "x"}}'],
    "tokenizer_config.json": [*TEXTS, '{"chat_template": 3}', '{"added_tokens_decoder": 1}'],
    "special_tokens_map.json": [*TEXTS, '{"chat_template": 3}'],
    "generation_config.json": [*TEXTS, '{"eos_token_id": "x", "temperature": "y"}'],
    "config.json": [*TEXTS, '{"model_type": []}', '{"model_type": "llama", "hidden_size": "x"}'],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in ODD.items() for text in texts])
def test_a_small_file_of_another_shape_is_an_error_and_not_a_traceback(
    name: str, text: str, model: Path, files: Path
) -> None:
    """Some are harmless, where transformers does not look at what is odd."""
    (model / name).write_text(text)
    YAML().dump(
        config(files, model={"path": str(model)}, run={"dir": str(model.parent / "run")}), model.parent / "run.yaml"
    )
    for words in (
        ["check", str(model.parent / "run.yaml")],
        ["generate", str(model), "--prompt=the", "--tokens=1", "--device=cpu"],
    ):
        code = main(words)
        assert code in ((2,) if text in TEXTS else (0, 2)), words
