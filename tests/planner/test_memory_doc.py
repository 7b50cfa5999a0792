"""The tables of docs/memory.md equal the planner's figures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import Qwen2Config

from megatrain.commands.main import main
from megatrain.commands.work import QWEN25_7B
from megatrain.planner.memory import device_peak, held_bytes, host_lines, working_bytes
from megatrain.planner.model_cost import ModelShape, shape_of
from megatrain.planner.plan import Choice, Options, Policy, StepSize

ROOT = Path(__file__).parents[2]
DOC = (ROOT / "docs/memory.md").read_text()


@pytest.fixture(scope="module")
def shape() -> ModelShape:
    """Qwen2.5-7B, one layer built and counted as 28."""
    one = shape_of(Qwen2Config(**{**QWEN25_7B, "num_hidden_layers": 1}), name="qwen2.5-7b")
    return replace(one, layers=one.layers * 28, groups=(0,) * 28)


def choice(shape: ModelShape, policy: Policy = "recompute", offloaded: int = 0, chunk: int | None = None) -> Choice:
    return Choice(0, False, False, (policy,) * shape.depth, offloaded, 1, 1, 8192, chunk)


def held_by_layer_0(shape: ModelShape, policy: Policy, tokens: int) -> float:
    """Bytes per token."""
    return held_bytes(shape, tokens, Options(), (policy,) * shape.depth)[0]


def rows(title: str) -> dict[str, list[str]]:
    """The table with this header line: first cell -> the other cells."""
    lines = DOC[DOC.index(title) :].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[: lines.index("")]]
    return {first: rest for first, *rest in cells}


def test_the_quoted_plan_of_a_long_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the example's file."""
    model = tmp_path / "models" / "my-long-model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({**QWEN25_7B, "max_position_embeddings": 131072}))
    monkeypatch.chdir(tmp_path)
    words = ["plan", str(ROOT / "examples/long-rows.yaml"), "--machine", str(ROOT / "docs/machines/h200.yaml")]
    quoted = DOC.split("```\n")[1].splitlines()
    assert len(quoted) > 10
    assert main(words) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if line in quoted] == quoted
    assert main([*words, "--memory.device_gib", "40"]) == 0
    smaller = capsys.readouterr().out
    for part in ("the first 1 layer in device memory", "host memory: 122.6 GiB", "seconds of a step: 34.80"):
        assert part in smaller


@pytest.mark.parametrize("policy", ["keep", "selective", "keep_mlp", "keep_attention", "recompute"])
def test_bytes_held_per_token_and_layer(shape: ModelShape, policy: Policy) -> None:
    tokens = 262144
    on_device, without_input, on_host = rows("| policy | on the device |")[policy]
    held = held_by_layer_0(shape, policy, tokens)
    assert on_device == f"{held + 2 * shape.hidden:,.0f}"
    assert (without_input, on_host) == (f"{held:,.0f}", f"{2 * shape.hidden:,.0f}")


def test_an_offloaded_input_moves_to_the_host(shape: ModelShape) -> None:
    _, device, host = rows("| policy | on the device |")["recompute"]
    step, options = StepSize(1, 65536), Options()
    few, many = (choice(shape, offloaded=count, chunk=16384) for count in (10, 20))
    entries = 10 * step.all_tokens

    def inputs(made: Choice) -> int:
        return device_peak(shape, step, options, made).lines["layer inputs"]

    moved = sum(host_lines(shape, step, options, many).values()) - sum(host_lines(shape, step, options, few).values())
    assert host == f"{moved / entries:,.0f}"
    assert inputs(few) - inputs(many) == moved, f"{device} bytes on the device"


@pytest.mark.parametrize("tokens", [16384, 65536, 131072, 262144, 524288])
def test_bytes_of_a_layer_s_backward_per_token(shape: ModelShape, tokens: int) -> None:
    whole, in_chunks = (
        working_bytes(shape, StepSize(1, tokens), Options(), choice(shape, chunk=chunk))[0] / tokens
        for chunk in (None, 16384)
    )
    assert rows("| | whole, recomputed |")[f"{tokens:,} tokens"] == [f"{whole:,.0f}", f"{in_chunks:,.0f}"]


def test_the_terms_of_the_formula_add_up(shape: ModelShape) -> None:
    """The four terms under 'Needed by one layer's backward', for the shape of the page."""
    heads, kv_heads, size = 28, 4, 128
    unit, given, qkv = 2 * shape.hidden, 2 * heads * size + 4 * heads, 2 * 2 * (heads + 2 * kv_heads) * size
    assert held_by_layer_0(shape, "keep_attention", 262144) == given
    found = working_bytes(shape, StepSize(1, 262144), Options(), choice(shape, chunk=16384))[0] / 262144
    assert found == 4 * unit + given + qkv + 4 * given


def test_chunks_of_tokens_take_the_mlp_out_of_the_peak_and_never_increase_it(shape: ModelShape) -> None:
    for tokens in (8192, 65536, 524288):
        step = StepSize(1, tokens)
        whole, cut = (device_peak(shape, step, Options(), choice(shape, chunk=chunk)).nbytes for chunk in (None, 16384))
        assert cut <= whole
    wide = 2 * 18944 * 524288
    assert whole - cut > 2 * wide, "gate and up, of which only one chunk exists"
