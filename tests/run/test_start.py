"""A run that starts from another run's checkpoint has its exact fp32 weights, on either engine, and says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ruamel.yaml import YAML

import megatrain as mt
from megatrain.checkpoint.export import export
from megatrain.checkpoint.reader import OpenCheckpoint
from megatrain.commands.main import main
from megatrain.config.load import load_config
from megatrain.errors import UserError
from megatrain.models.build import build_meta_model, load_model_config
from megatrain.models.structure import dissect
from megatrain.run.evaluate import evaluate_run
from megatrain.run.loop import train
from megatrain.units import DtypeName
from tiny_run import config, group_ended, log_of, make, prepare

no_group_left = pytest.fixture(autouse=True)(group_ended)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def checkpoint(files: Path) -> Path:
    """Of a run of three steps."""
    assert train(make(files, files, "--schedule.steps=3", "--optim.learning_rate=3e-3")).step == 3
    return files / "run" / "checkpoints" / "step_000003"


def masters(checkpoint: Path) -> dict[str, torch.Tensor]:
    structure = dissect(build_meta_model(load_model_config(checkpoint), compute_dtype=torch.float32))
    with OpenCheckpoint(checkpoint, structure) as opened:
        return {name: weight for unit in structure.units for name, weight in opened.masters(unit)[0].items()}


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_an_engine_from_a_checkpoint_has_its_exact_weights(compute: DtypeName, checkpoint: Path) -> None:
    want = masters(checkpoint)
    assert any(bool((weight != weight.bfloat16().float()).any()) for weight in want.values()), "bf16 would lose bits"
    with mt.HostEngine(checkpoint, mt.ExecutionPlan(compute_dtype=compute), device="cpu", verify="never") as engine:
        found = dict(engine.named_parameters())
        assert engine.step == 0
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name].float(), weight) for name, weight in want.items())


@pytest.mark.parametrize("engine", ["host", "mesh"])
def test_a_run_from_a_checkpoint_starts_where_its_weights_are(
    engine: str, checkpoint: Path, files: Path, tmp_path: Path
) -> None:
    """Its first validation equals `eval` of the checkpoint in fp32, and its exports have the dtype of the first model."""
    plain = config(files, model={"path": str(checkpoint)}, run={"dir": str(tmp_path / "run")}, schedule={"steps": 1})
    plain["data"]["val"] = {"fraction": 0.5}
    plain |= {"eval": {"at_start": True}, "precision": {"compute_dtype": "fp32"}, "engine": engine}
    if engine == "mesh":
        del plain["run"]["threads"]
    run = load_config(plain)
    summary = train(run)
    assert f"{checkpoint}: starting from the exact fp32 weights of step 3, without its moments" in log_of(run)
    alone = evaluate_run(load_config({**plain, "engine": "host"}), checkpoint=checkpoint)
    assert alone.loss is not None
    assert summary.first_val_loss == pytest.approx(alone.loss, abs=1e-6)
    assert export(tmp_path / "run", tmp_path / "out").is_dir()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"


def test_a_damaged_checkpoint_is_no_model(
    checkpoint: Path, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Silently starting from the bf16 half would be worse. Who wants that can have it, as the error says."""
    import shutil

    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    state = copy / "state" / "layer.0.safetensors"
    state.write_bytes(state.read_bytes()[:-1] + b"\xff")
    YAML().dump(config(files, model={"path": str(copy)}, run={"dir": str(tmp_path / "run")}), tmp_path / "run.yaml")
    assert main(["train", str(tmp_path / "run.yaml")]) == 2
    said = capsys.readouterr().err
    assert f"{state}: the checkpoint is damaged: " in said
    assert f"to start from its bf16 weights alone, remove manifest.json and state.json from a copy of {copy}" in said
    for name in ("manifest.json", "state.json"):
        (copy / name).unlink()
    assert main(["train", str(tmp_path / "run.yaml"), f"--run.dir={tmp_path / 'other'}", "--schedule.steps=1"]) == 0


def test_a_manifest_of_another_program_is_no_obstacle(files: Path, tmp_path: Path) -> None:
    for name in ("manifest.json", "state.json"):
        (files / "model" / name).write_text('{"format": "of another program"}')
    try:
        mt.HostEngine(files / "model", device="cpu", verify="never").close()
    finally:
        for name in ("manifest.json", "state.json"):
            (files / "model" / name).unlink()


def test_weights_that_are_not_finite_are_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = OpenCheckpoint.masters

    def damaged(self: OpenCheckpoint, unit: object) -> object:
        found, buffers = real(self, unit)  # type: ignore[arg-type]
        next(iter(found.values())).view(-1)[0] = float("nan")
        return found, buffers

    monkeypatch.setattr(OpenCheckpoint, "masters", damaged)
    with pytest.raises(UserError, match="holds NaN or infinity"):
        mt.HostEngine(checkpoint, device="cpu", verify="never")
