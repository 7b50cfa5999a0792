"""A run compiles for the shapes of its batches once, before its first step, and padding to them changes no result."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path

import pytest
import torch
from ruamel.yaml import YAML

from engines import host_engine
from families import BY_NAME, VOCAB, build
from megatrain.commands.main import main
from megatrain.config.schema import DataConfig, SourceConfig
from megatrain.data import PackedRows, load_data
from megatrain.data.rows import StepLoader
from megatrain.device.compiler import compilations
from megatrain.engine.batches import BatchShape
from megatrain.run.engine_factory import Shapes
from tiny_run import config, prepare
from tiny_tokenizer import make_tokenizer

MAX_TOKENS, ROWS = 64, 6


@pytest.fixture(scope="module", params=[True, False], ids=["packed", "unpacked"])
def data(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PackedRows, PackedRows]:
    """Rows whose number is no multiple of a step's, some steps of which have short rows only."""
    folder, rng = tmp_path_factory.mktemp("shapes"), random.Random(0)

    def write(name: str, lengths: list[int]) -> None:
        with (folder / name).open("w") as file:
            for length in lengths:
                file.write(json.dumps({"input_ids": [rng.randrange(3, VOCAB) for _ in range(length)]}) + "\n")

    write("train.jsonl", [60, *(rng.randint(4, 16) for _ in range(80))])
    write("a.jsonl", [rng.randint(4, 50) for _ in range(9)])
    write("b.jsonl", [rng.randint(4, 12) for _ in range(2)])
    config = DataConfig(
        train=(SourceConfig(path=str(folder / "train.jsonl")),),
        val=(SourceConfig(path=str(folder / "a.jsonl")), SourceConfig(path=str(folder / "b.jsonl"))),  # type: ignore[arg-type]
        max_tokens=MAX_TOKENS,
        packing=request.param,
        cache_dir=str(folder / "cache"),
    )
    train, val = load_data(config, make_tokenizer(None), vocab_size=VOCAB, seed=0, log=lambda text: None)
    assert val is not None
    return train, val


def test_a_run_of_two_epochs_with_validations_compiles_nothing_and_computes_the_same(
    data: tuple[PackedRows, PackedRows], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))  # fast to compile
    train, val = data
    loader = StepLoader(train, ROWS, seed=0)
    assert loader.rows_per_epoch % ROWS != 0
    shapes = Shapes.of(ROWS, loader, val)
    assert shapes.train is not None
    assert shapes.train.packed == train.packing
    if not train.packing:
        assert len(shapes.train.lengths) > 1
    words = {"device": "cpu", "compute_dtype": "fp32", "threads": 1, "verify": "never", "microbatch_rows": 4}
    model = build(BY_NAME["qwen3"], seed=0)
    engine = host_engine(
        model, **words, compile="on", keep=[1], train_shape=shapes.train, eval_shape=shapes.eval, head_chunk_tokens=64
    )
    plain = host_engine(model, **words)
    with engine, plain:
        ready = compilations()
        assert ready > 0
        for step in range(2 * loader.steps_per_epoch):
            batch = loader.batch(step)
            found, want = engine.train_step(batch), plain.train_step(batch)
            assert found.tokens == want.tokens
            assert found.loss == pytest.approx(want.loss, abs=1e-5)
            assert found.grad_norm == pytest.approx(want.grad_norm, rel=1e-4)
            if step % 3 == 0:
                for group, first in zip(val.groups, (0, len(val.groups[0])), strict=True):
                    rows = val.batch(range(first, first + min(len(group), ROWS)))
                    one, other = engine.eval_step(rows), plain.eval_step(rows)
                    assert one.tokens == other.tokens
                    assert one.loss_sum == pytest.approx(other.loss_sum, rel=1e-5)
        assert compilations() == ready
        assert engine.counters()["compiled_layers"] == len(engine.structure.layers)


def test_rows_of_one_document_each_are_computed_as_plain_rows(tmp_path: Path) -> None:
    """Attention without documents is faster, so a packed set uses it where no row is shared."""
    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps({"input_ids": [5] * MAX_TOKENS}) + "\n" for _ in range(4)))
    config = DataConfig(train=(SourceConfig(path=str(path)),), max_tokens=MAX_TOKENS, cache_dir=str(tmp_path / "cache"))
    rows, _ = load_data(config, make_tokenizer(None), vocab_size=VOCAB, seed=0, log=lambda text: None)
    assert Shapes.of(2, StepLoader(rows, 2, seed=0), None).train == BatchShape(2, (MAX_TOKENS,), packed=False)
    assert "document_ids" not in rows.batch([0, 1])


def test_padding_predicts_nothing_and_is_a_document_of_its_own() -> None:
    positions = torch.tensor([[0, 1, 2, 0], [0, 1, 0, 1]])
    mask = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 1]])
    batch = {"input_ids": positions + 7, "labels": positions + 7, "position_ids": positions, "attention_mask": mask}
    padded = BatchShape(3, (2, 6, 9), packed=True).padded(batch)
    assert {name: tuple(tensor.shape) for name, tensor in padded.items()} == dict.fromkeys(batch, (3, 6))
    assert padded["labels"][:2, 4:].eq(-100).all()
    assert padded["labels"][2].eq(-100).all()
    assert padded["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1], [0, 1, 0, 1, 0, 1], [0, 1, 2, 3, 4, 5]]
    assert padded["attention_mask"].tolist() == [[0, 1, 1, 1, 0, 0], [0, 0, 1, 1, 0, 0], [1] * 6]
    assert torch.equal(padded["input_ids"][:2, :4], batch["input_ids"])
    larger = {name: tensor.repeat(2, 3) for name, tensor in batch.items()}
    assert BatchShape(3, (2, 6, 9)).padded(larger).keys() == larger.keys()
    assert BatchShape(3, (2, 6, 9)).padded(larger)["labels"].shape == (4, 12)


def test_the_start_of_a_run_is_broken_down_with_verbose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.yaml"
    with file.open("w") as out:
        YAML().dump(config(prepare(tmp_path), schedule={"steps": 1}), out)
    assert main(["train", str(file), "--verbose"]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if "from the command to the end of" in line]
    for part in ("process", "checks and data", "first step"):
        assert f"{part} " in line, line
