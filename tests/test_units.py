"""Each number is written one way everywhere."""

from __future__ import annotations

import pytest
import torch

from megatrain.units import (
    GIB,
    MIB,
    abbreviated,
    counted,
    dtype_name,
    duration,
    gib,
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
