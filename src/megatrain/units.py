"""Units, dtype names and number formatting: each constant and each formatter once. Imports nothing heavy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    import torch

MIB = 1 << 20
GIB = 1 << 30
_SIZES = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": MIB, "GIB": GIB, "TIB": 2**40}

DtypeName = Literal["bf16", "fp16", "fp32"]
"""The dtypes that layers compute in, as the config spells them."""
DTYPE_NAMES: tuple[DtypeName, ...] = get_args(DtypeName)
DTYPE_BYTES: dict[DtypeName, int] = {"bf16": 2, "fp16": 2, "fp32": 4}
_TORCH_NAMES: dict[str, DtypeName] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
SAFETENSORS_DTYPES = {
    "F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip
"""Names in a safetensors header and torch's names for them."""


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a config name (`bf16`; tests: `fp64`), a safetensors name (`BF16`) or a torch name (`bfloat16`)."""
    import torch

    by_config_name = {short: long for long, short in _TORCH_NAMES.items()}
    return getattr(torch, {"fp64": "float64", **by_config_name}.get(name) or SAFETENSORS_DTYPES.get(name, name))


def dtype_name(dtype: torch.dtype | str) -> DtypeName:
    """The config name of a torch dtype: `bf16` for `torch.bfloat16` or `"bfloat16"`. KeyError for other dtypes."""
    return _TORCH_NAMES[str(dtype).removeprefix("torch.")]


def gib(size_bytes: float, digits: int = 1) -> str:
    """A memory size: `12.3 GiB`, `812 MiB`, `0.25 MiB`."""
    if size_bytes >= GIB:
        return f"{size_bytes / GIB:,.{digits}f} GiB"
    return f"{size_bytes / MIB:,.0f} MiB" if size_bytes >= 100 * MIB else f"{size_bytes / MIB:.3g} MiB"


def gibs(*sizes_bytes: float, digits: int = 1) -> tuple[str, ...]:
    """Memory sizes of one sentence, all in the unit of the largest: `0.0021 GiB`, `22.9 GiB`; small ones to two digits."""
    if max(sizes_bytes) < GIB:
        return tuple(gib(size) for size in sizes_bytes)
    return tuple(f"{size / GIB:,.{_digits(size / GIB, digits)}f} GiB" for size in sizes_bytes)


def _digits(value: float, least: int) -> int:
    """Decimals that show two digits of a small value, and at least `least`."""
    return max(least, 1 - math.floor(math.log10(value))) if 0 < value < 10**-least else least


def size_lines(sizes: Mapping[str, float], indent: int = 4, smallest_bytes: int = MIB // 2) -> list[str]:
    """A memory breakdown, one line per entry; entries below `smallest_bytes` are left out."""
    return [f"{'':{indent}}{gib(size):>11}  {name}" for name, size in sizes.items() if size >= smallest_bytes]


def parse_size(text: str) -> int:
    """Bytes of `5GB`, `500MB` (powers of ten, as in transformers) or `5GiB`; ValueError if it is not a positive size."""
    digits = text.rstrip("KMGTBIkmgtbi ")
    scale = _SIZES.get(text[len(digits) :].strip().upper())
    try:
        size_bytes = int(float(digits) * scale) if scale else 0
    except (ValueError, OverflowError):
        size_bytes = 0
    if size_bytes <= 0:
        raise ValueError(f"should be a size like 5GB, found {text!r}")
    return size_bytes


def counted(count: int, word: str) -> str:
    """A count with its noun: `1 step`, `2 steps`, `1,000 steps`."""
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def number_text(value: float | None, spec: str) -> str:
    """A number in the format `spec`; n/a for None."""
    return "n/a" if value is None else format(value, spec)


def abbreviated(count: float) -> str:
    """A large number to three digits: `8.19 B`, `214 K`, `12`."""
    for scale, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= scale:
            return f"{count / scale:.3g} {letter}"
    return f"{count:.0f}"


def duration(seconds: float) -> str:
    """A long time in minutes, hours or days."""
    if seconds < 3600:
        return f"{seconds / 60:.1f} minutes"
    return f"{seconds / 3600:.1f} hours" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"
