"""What a checkpoint folder holds: names, the manifest, and JSON for the engine's state. The spec is docs/checkpoint.md."""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatrain.checkpoint.files import DTYPE_NAMES, DTYPES, MANIFEST_FILE, FileRecord, canonical, damaged, tensor_bytes
from megatrain.errors import UserError

FORMAT_NAME = "megatrain-checkpoint"
FORMAT_VERSION = 1
STATE_FILE = "state.json"
STATE_FOLDER = "state"
WEIGHTS_DTYPE = torch.bfloat16
"""Type of the weights that transformers loads; what it keeps in fp32 is fp32 here as well."""
DEFAULT_OPTIMIZER = "AdamW"
"""Whose checkpoint it is where `state.json` names no `optimizer`."""


def state_key(plane: str, full_name: str) -> str:
    """Name of a plane's tensor in a state file: `lo/model.layers.0.mlp.up_proj.weight`."""
    return f"{plane}/{full_name}"


@dataclass(frozen=True)
class Manifest:
    """The list of a checkpoint's files. A folder without a valid one is not a checkpoint.

    Attributes:
        step: The engine's step.
        files: Relative path -> size and checksums.
    """

    step: int
    files: dict[str, FileRecord]


def read_manifest(folder: Path, *, sizes: bool = True) -> Manifest:
    """Read and verify a checkpoint's manifest, and (`sizes`) that all its files are there in their full size.

    Raises:
        UserError: No manifest, a damaged one, another format, or a file that is missing or has another size.
    """
    path = folder / MANIFEST_FILE
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise UserError("is not a complete checkpoint: it has no manifest.json", str(folder)) from error
    except (OSError, ValueError) as error:
        raise damaged(path, str(error)) from error
    if not isinstance(raw, dict) or raw.get("format") != FORMAT_NAME:
        raise UserError("is not the manifest of a megatrain checkpoint", str(path))
    crc = raw.pop("crc32", None)
    if crc != zlib.crc32(canonical(raw)):
        raise damaged(path, "checksum differs")
    if raw["version"] > FORMAT_VERSION:
        raise UserError(
            f"has format version {raw['version']}, this megatrain reads up to {FORMAT_VERSION}",
            str(folder),
            "install a newer megatrain",
        )
    files = {name: FileRecord.from_json(record) for name, record in raw["files"].items()}
    for name, record in files.items() if sizes else ():
        file = folder / name
        if not file.is_file():
            raise damaged(file, "the file is missing")
        if file.stat().st_size != record.size:
            raise damaged(file, f"has {file.stat().st_size} bytes, {record.size} were written")
    return Manifest(raw["step"], files)


def to_json(value: Any, where: str = "state") -> Any:
    """JSON for numbers, strings, lists, tuples, dicts with string keys, bytes and tensors.

    Raises:
        TypeError: Anything else, with its place.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or key.startswith("$"):
                raise TypeError(f"{where}: key {key!r} cannot be saved; keys are strings that do not start with '$'")
        return {key: to_json(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [to_json(item, f"{where}[{i}]") for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu().contiguous()
        data = base64.b64encode(tensor_bytes(tensor)).decode()
        return {"$tensor": {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data": data}}
    raise TypeError(f"{where}: {type(value).__name__} cannot be saved in a checkpoint")


def from_json(value: Any) -> Any:
    """The inverse of `to_json`."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"$float": text}:
            return float(text)
        case {"$tuple": items}:
            return tuple(from_json(item) for item in items)
        case {"$bytes": text}:
            return base64.b64decode(text)
        case {"$tensor": {"dtype": dtype, "shape": shape, "data": text}}:
            data = bytearray(base64.b64decode(text))
            flat = torch.frombuffer(data, dtype=DTYPES[dtype]) if data else torch.empty(0, dtype=DTYPES[dtype])
            return flat.reshape(shape)
    return {key: from_json(item) for key, item in value.items()}
