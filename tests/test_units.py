"""Each number is written one way everywhere."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import megatrain
from megatrain.units import (
    GIB,
    MIB,
    abbreviated,
    counted,
    dtype_name,
    duration,
    gib,
    gibs,
    parse_size,
    size_lines,
    torch_dtype,
)


def test_sizes_counts_and_times() -> None:
    assert [gib(size) for size in (0, MIB // 4, 812 * MIB, 1234.5 * GIB)] == [
        "0 MiB",
        "0.25 MiB",
        "812 MiB",
        "1,234.5 GiB",
    ]
    assert size_lines({"weights": 2 * GIB, "next to nothing": 10}) == ["        2.0 GiB  weights"]
    assert [counted(1, "step"), counted(1000, "step")] == ["1 step", "1,000 steps"]
    assert [abbreviated(count) for count in (12, 214_000, 8.19e9)] == ["12", "214 K", "8.19 B"]
    assert [duration(seconds) for seconds in (90, 7200, 864000)] == ["1.5 minutes", "2.0 hours", "10.0 days"]


@pytest.mark.parametrize(
    ("sizes", "texts"),
    [
        ((2.13 * MIB, 22.94 * GIB), ("0.0021 GiB", "22.9 GiB")),
        ((812 * MIB, 2 * MIB), ("812 MiB", "2 MiB")),
        ((0, 3 * GIB, 1), ("0.0 GiB", "3.0 GiB", "0.00000000093 GiB")),
        ((0.5 * GIB, 2048.04 * GIB), ("0.5 GiB", "2,048.0 GiB")),
    ],
)
def test_sizes_of_a_sentence_have_one_unit(sizes: tuple[float, ...], texts: tuple[str, ...]) -> None:
    assert gibs(*sizes) == texts
    assert gibs(GIB, GIB // 100, digits=2) == ("1.00 GiB", "0.0100 GiB")


def test_no_sentence_of_the_source_formats_two_sizes_one_by_one() -> None:
    """Then they may have two units; `gibs` is for that."""
    found = []
    for file in sorted(Path(megatrain.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                calls = [part for part in ast.walk(node) if isinstance(part, ast.Call)]
                if sum(isinstance(call.func, ast.Name) and call.func.id == "gib" for call in calls) > 1:
                    found.append(f"{file.name}:{node.lineno}")
    assert found == []


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("500mb", 5 * 10**8), ("1.5 GiB", 3 * GIB // 2)])
def test_a_size_is_parsed_with_its_unit(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["5", "GB", "0GB", "-1GB", "5 PB"])
def test_a_size_without_a_known_unit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="should be a size like 5GB"):
        parse_size(text)


def test_every_spelling_of_a_dtype() -> None:
    assert {torch_dtype(name) for name in ("bf16", "BF16", "bfloat16")} == {torch.bfloat16}
    assert dtype_name(torch.float16) == dtype_name("float16") == "fp16"
