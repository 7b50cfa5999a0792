"""No command asks the network, neither for a name that looks like a hub id nor for a folder that is there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from ruamel.yaml import YAML

import megatrain as mt
from megatrain.commands.main import main
from megatrain.errors import UserError
from megatrain.models.folder import constants, offline
from no_network import no_network
from tiny_run import config, prepare


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = prepare(tmp_path_factory.mktemp("offline"))
    YAML().dump(config(folder), folder / "run.yaml")
    return folder


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """What was asked of the network; a test may look at it before its end, too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with no_network() as asked:
        yield asked
    assert asked == []


def test_the_guard_itself_sees_a_question(asked: list[str]) -> None:
    from huggingface_hub.utils import get_session

    with pytest.raises(Exception, match="no network"):
        get_session().get("https://huggingface.co/api/models/api/none")
    assert any("huggingface" in address for address in asked)
    asked.clear()


@pytest.mark.parametrize(
    "words",
    [
        ["train", "RUN", "--model.path=api/none"],
        ["check", "RUN", "--model.path=api/none"],
        ["plan", "RUN", "--model.path=api/none"],
        ["data", "RUN", "--model.path=api/none"],
        ["train", "RUN", "--data.train=api/none"],
        ["train", "RUN", "--resume=api/none"],
        ["eval", "RUN", "--data.val.fraction=0.5", "--checkpoint=api/none"],
        ["generate", "api/none", "--prompt=x"],
        ["export", "api/none", "out"],
        ["verify", "api/none"],
        ["bench", "--shape=api/none", "--rows=1", "--tokens=8"],
        ["init", "api/none", "DATA"],
        ["init", "MODEL", "api/none"],
    ],
    ids=" ".join,
)
def test_a_name_that_may_be_a_hub_id_is_looked_up_nowhere(
    words: list[str], files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"RUN": files / "run.yaml", "DATA": files / "texts.jsonl", "MODEL": files / "model"}
    assert main([str(names.get(word, word)) for word in words]) == 2
    said = capsys.readouterr()
    assert "api/none" in said.err + said.out


def test_the_whole_way_of_a_model_needs_no_network(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    words = [str(files / "run.yaml"), f"--run.dir={run}"]
    for command in (
        ["check", *words],
        ["train", *words, "--schedule.steps=1"],
        ["eval", run, "--data.val.fraction=0.5"],
        ["verify", run],
        ["export", run, out],
        ["generate", run, "--prompt=the", "--tokens=1", "--device=cpu"],
        ["generate", out, "--prompt=the", "--tokens=1", "--device=cpu"],
    ):
        assert main(command) == 0, (command, capsys.readouterr())


def test_an_engine_looks_for_checkpoints_in_folders_only(files: Path, tmp_path: Path) -> None:
    with mt.HostEngine(files / "model", device="cpu", verify="never") as engine:
        for name in ("api/none", "api/none/", "none", "", "hf://api/none", "https://huggingface.co/api/none"):
            with pytest.raises(UserError):
                engine.load(name)
    with pytest.raises(UserError, match="nothing is downloaded"):
        mt.HostEngine("api/none", device="cpu")


def test_code_of_another_repository_is_not_fetched(files: Path, tmp_path: Path) -> None:
    """`ORG/NAME--module.Class` in a config asks for code from the hub, where code may run."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in (files / "model").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    plain = json.loads((folder / "config.json").read_text())
    for kind in ("odd", "llama"):
        auto = {"AutoConfig": "api/none--configuration.Odd", "AutoModelForCausalLM": "api/none--modeling.Odd"}
        (folder / "config.json").write_text(json.dumps(plain | {"model_type": kind, "auto_map": auto}))
        for trusted in (True, False):
            try:
                mt.HostEngine(folder, device="cpu", trust_remote_code=trusted, verify="never").close()
            except UserError as error:
                assert str(folder) in str(error)  # noqa: PT017  whether it loads depends on the kind; no question does


def test_the_hub_is_offline_only_inside_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    for before in (False, True):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", before)
        with offline():
            assert constants.HF_HUB_OFFLINE
            with pytest.raises(KeyError), offline():
                raise KeyError
            assert constants.HF_HUB_OFFLINE, "the outer block goes on"
        assert before == constants.HF_HUB_OFFLINE
