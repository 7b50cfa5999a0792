"""Runs on a CPU that do not fit are refused before anything is allocated, with keys and values that were tried."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from megatrain.commands.main import main
from megatrain.config.load import load_config
from megatrain.config.schema import RunConfig
from megatrain.errors import PlanRefused
from megatrain.models.build import load_model_config
from megatrain.planner import cpu
from megatrain.planner.cpu import RESERVE, Ledger, check_cpu_memory
from megatrain.planner.model_cost import ModelShape, shape_of
from megatrain.units import GIB, MIB
from tiny_run import config, write_model, write_texts


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a model of 8.6 M parameters, which is not written."""
    folder = tmp_path_factory.mktemp("files")
    write_model(folder / "model", weights=False, hidden_size=256, intermediate_size=2048, num_hidden_layers=4)
    write_texts(folder / "texts.jsonl", 60)
    YAML().dump(config(folder, model={"init": "random"}), folder / "run.yaml")
    return folder


@pytest.fixture(scope="module")
def shape(files: Path) -> ModelShape:
    return shape_of(load_model_config(files / "model"))


@pytest.fixture
def available(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return lambda size: monkeypatch.setattr(cpu, "available_host_bytes", lambda: size)


def run_of(files: Path, *words: str) -> RunConfig:
    return load_config(files / "run.yaml", words)


def needed(files: Path, shape: ModelShape, *words: str) -> int:
    return Ledger(shape, 0).needed_bytes(run_of(files, *words))


def refusal(files: Path, *words: str) -> str:
    run = run_of(files, *words)
    with pytest.raises(PlanRefused) as caught:
        check_cpu_memory(run, load_model_config(run.model.path))
    return str(caught.value)


def settings(line: str) -> list[str]:
    """The settings of a remedy, as overrides."""
    return [f"{key}={value}" for key, value in re.findall(r"(\w+\.\w+): (\S+) \(now ", line)]


def test_the_reserve_and_the_copies_of_a_save_are_in_the_ledger(files: Path, shape: ModelShape) -> None:
    lines = Ledger(shape, 0).lines(run_of(files, "memory.host_reserve_gib=2"))
    layer, whole = 12 * shape.layers[0], 12 * shape.parameters
    assert lines[RESERVE] == 2 * GIB
    assert lines["copies during a save (checkpoint.buffer_gib)"] == 2 * layer
    for words, size in (
        (("checkpoint.buffer_gib=8",), whole),
        (("checkpoint.buffer_gib=0.00001",), layer),
        (("checkpoint.background=false",), 0),
        (("checkpoint.every_steps=null",), 0),
    ):
        assert needed(files, shape, *words) - needed(files, shape) == size - 2 * layer, words
    without = ("checkpoint.every_steps=null", "checkpoint.at_end=false")
    assert needed(files, shape) - needed(files, shape, *without) > 2 * layer + 8 * shape.layers[0]


def test_check_and_train_refuse_before_anything_is_allocated(
    files: Path, shape: ModelShape, tmp_path: Path, available: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """It fits what is available, but not with what must stay free: the watermark would end it in its first step."""
    available(needed(files, shape) + 256 * MIB)
    for command in ("check", "train"):
        assert main([command, str(files / "run.yaml"), "--run.dir", str(tmp_path / "run")]) == 3
        text = capsys.readouterr().err
        assert "512 MiB  kept free (memory.host_reserve_gib)" in text
        assert "copies during a save (checkpoint.buffer_gib)" in text
        assert re.search(r"memory\.host_reserve_gib: 0\.2[45] \(now 0\.5\); then it fits", text)
    assert not (tmp_path / "run").exists()
    assert main(["check", str(files / "run.yaml"), "--memory.host_reserve_gib", "0.2"]) == 0


def test_a_reserve_that_is_too_large_is_the_key_at_fault(
    files: Path, shape: ModelShape, available: Callable[[int], None]
) -> None:
    available(needed(files, shape) + 7 * GIB)
    text = refusal(files, "memory.host_reserve_gib=8")
    assert "memory.host_reserve_gib: 7 (now 8); then it fits" in text
    assert "checkpoint.background: false (now true): training waits for saves; not enough alone" in text


def test_a_limit_that_is_too_small_is_named_with_the_value_that_fits(files: Path, shape: ModelShape) -> None:
    text = refusal(files, "memory.host_gib=0.1")
    assert " allowed (memory.host_gib: 0.1)" in text
    value = re.search(r"memory\.host_gib: ([\d.]+) \(now 0\.1\); then it fits", text)
    assert value and float(value[1]) * GIB >= needed(files, shape)
    assert RESERVE not in text


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("data.max_tokens=256", "batch.tokens_per_step=65536"), "batch.tokens_per_step"),
        (("data.max_tokens=256", "batch.tokens_per_step=65536"), "batch.accumulation_steps"),
        (("data.max_tokens=256", "batch.tokens_per_step=65536", "batch.microbatch_rows=256"), "batch.microbatch_rows"),
        (("data.max_tokens=256", "batch.tokens_per_step=65536"), "data.max_tokens"),
        ((), "checkpoint.background"),
    ],
)
def test_each_remedy_that_is_said_to_fit_fits(
    files: Path, shape: ModelShape, available: Callable[[int], None], words: tuple[str, ...], key: str
) -> None:
    """A little less than needed is available: the remedy's values, taken from the text, are enough, and the mildest of them."""
    size = needed(files, shape, *words) + GIB // 2 - 8 * MIB
    available(size)
    text = refusal(files, *words)
    lines = [line for line in text.splitlines() if line.strip().startswith(f"- {key}: ")]
    assert len(lines) == 1 and lines[0].endswith("; then it fits"), text
    run = run_of(files, *words, *settings(lines[0]))
    assert Ledger(shape, size).fits(run)
    check_cpu_memory(run, load_model_config(run.model.path))


def test_two_settings_are_named_where_one_is_not_enough(
    files: Path, shape: ModelShape, available: Callable[[int], None]
) -> None:
    words = ("data.max_tokens=256", "batch.tokens_per_step=65536", "memory.host_reserve_gib=0")
    least = needed(
        files,
        shape,
        "memory.host_reserve_gib=0",
        "data.max_tokens=256",
        "batch.tokens_per_step=256",
        "checkpoint.background=false",
    )
    available(least)
    text = refusal(files, *words)
    assert "; then it fits" not in text.split("together: ")[0], text
    line = next(line for line in text.splitlines() if "together: " in line)
    assert Ledger(shape, least).fits(run_of(files, *words, *settings(line)))


def test_a_run_that_cannot_fit_says_what_it_needs(files: Path, available: Callable[[int], None]) -> None:
    available(10 * MIB)
    text = refusal(files)
    assert "then it fits" not in text
    assert re.search(r"a machine with \d+ MiB|[\d.]+ GiB available, or a smaller model", text)
