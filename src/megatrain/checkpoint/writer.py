"""Writes checkpoints: a folder that transformers loads as it is, and beside it the rest of the exact training state.

The tensors go to disk straight from the planes. Extra memory is one unit: what its family's conversion copies (fused experts are
saved one by one), or hi and lo where the store keeps whole fp32 masters.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from megatrain import __version__
from megatrain.checkpoint.files import FolderWriter, tensor_crc32
from megatrain.checkpoint.format import (
    FORMAT_NAME,
    FORMAT_VERSION,
    STATE_FILE,
    STATE_FOLDER,
    WEIGHTS_DTYPE,
    state_key,
    to_json,
)
from megatrain.errors import UserError
from megatrain.host.store import HostStore, UnitPlanes
from megatrain.models.build import fp32_parameter_names
from megatrain.models.conversion import to_checkpoint, unit_of_names
from megatrain.models.structure import Structure, Unit
from megatrain.models.weights import INDEX_FILE, OTHER_FORMATS, split

WEIGHT_SUFFIXES = (*OTHER_FORMATS, ".safetensors", ".onnx", ".ckpt", ".npz", ".tar", ".zip")
OWN_FILES = frozenset({"manifest.json", "state.json", "config.json", "latest"})
TEMPLATE_FOLDER = "additional_chat_templates"
SLACK_BYTES = 16 << 20
"""Headers, JSON files and the file system's own blocks, generously."""


@dataclass(frozen=True)
class UnitFiles:
    """What was written for a unit, as `state.json` lists it.

    Attributes:
        weights_crc32: CRC-32 of each weight by its module name, in the type it is saved in but before the family's conversion.
            It proves on reading that the conversion went there and back.
        keys: Checkpoint names in the weights file.
        weights_bytes: Size of their data.
    """

    weights_crc32: dict[str, int]
    keys: list[str]
    weights_bytes: int


def save_checkpoint(
    directory: str | Path,
    *,
    structure: Structure,
    store: HostStore,
    buffers: Mapping[str, torch.Tensor],
    state: Mapping[str, Any],
    source_folder: Path | None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Write a checkpoint and return when it is on the disk.

    Args:
        directory: The folder to make; its parents are made as well. It must not exist.
        structure: The model.
        store: Planes that nobody changes meanwhile.
        buffers: The model's buffers by full name; those that belong to the weights are saved.
        state: The engine's state: `step`, and whatever `format.to_json` can write.
        source_folder: Where the model came from; its tokenizer, template and other files go along. None for a model in memory.
        tokenizer: Saved instead of the source folder's.
        trust_remote_code: Whether the source folder's Python files go along.

    Raises:
        UserError: The folder exists, the disk has no room, or the system refuses a write. Nothing is left behind then.
    """
    directory = Path(directory)
    side_files = list(_side_files(source_folder, trust_remote_code)) if source_folder else []
    config = _config_json(structure, source_folder)  # read before anything is written: it may be damaged
    engine_state = to_json(dict(state))
    refuse_if_no_room(directory, checkpoint_bytes(store) + sum(file.stat().st_size for _, file in side_files))
    with FolderWriter(directory) as folder:
        folder.write_json("config.json", config)
        _write_side_files(folder, side_files, structure, tokenizer)
        units = _write_units(folder, structure, store, buffers)
        versions = {"megatrain": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
        folder.write_json(
            STATE_FILE,
            {
                "version": FORMAT_VERSION,
                "versions": versions,
                "units": {name: {"weights_crc32": files.weights_crc32} for name, files in units.items()},
                "state": engine_state,
            },
        )
        folder.commit({"format": FORMAT_NAME, "version": FORMAT_VERSION, "step": int(state.get("step", 0))})


def checkpoint_bytes(store: HostStore) -> int:
    """Upper bound of a checkpoint's size: bf16 weights, lo, m and v of every element, and slack for the small files."""
    return 12 * sum(planes.layout.numel for planes in store.units.values()) + SLACK_BYTES


def refuse_if_no_room(directory: Path, needed_bytes: int) -> None:
    """Raise UserError unless the disk under `directory` (existing or not) has room."""
    existing = directory.absolute()
    while not existing.exists():
        existing = existing.parent
    free_bytes = shutil.disk_usage(existing).free
    if free_bytes < needed_bytes:
        raise UserError(
            f"no room for a checkpoint: it needs {needed_bytes:,} bytes ({needed_bytes / 2**30:.2f} GiB), "
            f"{free_bytes:,} ({free_bytes / 2**30:.2f} GiB) are free",
            str(directory),
            "free space, or choose another disk",
        )


def write_unit(
    folder: FolderWriter,
    unit: Unit,
    planes: UnitPlanes,
    model: PreTrainedModel,
    unit_buffers: Mapping[str, torch.Tensor],
    keep_fp32: set[str],
    weights_file: str,
) -> UnitFiles:
    """Write one unit: its weights under checkpoint names, and its lo, m and v.

    Args:
        folder: Where to.
        unit: The unit.
        planes: Its state; a copy does as well as the store's own.
        model: For the family's conversion.
        unit_buffers: Persistent buffers that are saved with this unit, on the CPU.
        keep_fp32: Full names of weights that are saved as fp32; their lo would say nothing new and is left out.
        weights_file: Name of the weights file.
    """
    weights: dict[str, torch.Tensor] = dict(unit_buffers)
    rest: dict[str, torch.Tensor] = {}
    for local, full in unit.full_names():
        if full in keep_fp32:
            weights[full] = planes.read_master(local)
        else:
            weights[full], rest[state_key("lo", full)] = split(planes, local)
        rest[state_key("m", full)] = planes.layout.view(planes.m, local)
        rest[state_key("v", full)] = planes.layout.view(planes.v, local)
    crcs = {name: tensor_crc32(tensor) for name, tensor in weights.items()}
    saved = to_checkpoint(model, weights)
    folder.write_tensors(weights_file, saved)
    folder.write_tensors(f"{STATE_FOLDER}/{unit.name}.safetensors", rest)
    return UnitFiles(crcs, list(saved), sum(t.numel() * t.element_size() for t in saved.values()))


def _write_units(
    folder: FolderWriter, structure: Structure, store: HostStore, buffers: Mapping[str, torch.Tensor]
) -> dict[str, UnitFiles]:
    model = structure.model
    assert isinstance(model, PreTrainedModel), type(model)
    keep_fp32 = fp32_parameter_names(model, WEIGHTS_DTYPE)
    owner = unit_of_names(structure)
    written = [unit for unit in structure.units if unit.layout.entries or unit.name in owner.values()]
    units: dict[str, UnitFiles] = {}
    weight_map: dict[str, str] = {}
    for index, unit in enumerate(written, start=1):
        name = f"model-{index:05d}-of-{len(written):05d}.safetensors"
        own = {n: b.detach().cpu() for n, b in buffers.items() if owner.get(n) == unit.name}
        files = units[unit.name] = write_unit(folder, unit, store.on_host(unit.name), model, own, keep_fp32, name)
        twice = weight_map.keys() & set(files.keys)
        assert not twice, f"two units save {sorted(twice)[:3]}"
        weight_map |= dict.fromkeys(files.keys, name)
    total = sum(files.weights_bytes for files in units.values())
    folder.write_json(INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
    return units


def _side_files(source: Path, trust_remote_code: bool) -> Iterator[tuple[str, Path]]:
    """(name, file) of everything in a model folder but weights, indices of weights, hidden files and untrusted code."""
    candidates = [*source.iterdir(), *(source / TEMPLATE_FOLDER).glob("*")]
    for file in sorted(candidates):
        name = file.relative_to(source).as_posix()
        is_code = file.suffix == ".py"
        if (
            file.is_file()
            and not file.name.startswith(".")
            and file.suffix not in WEIGHT_SUFFIXES
            and not file.name.endswith(".index.json")
            and name not in OWN_FILES
            and (trust_remote_code or not is_code)
        ):
            yield name, file


def _write_side_files(
    folder: FolderWriter,
    side_files: list[tuple[str, Path]],
    structure: Structure,
    tokenizer: PreTrainedTokenizerBase | None,
) -> None:
    files = dict(side_files)
    with folder.scratch() as scratch:
        if tokenizer is not None:
            tokenizer.save_pretrained(scratch)
            files |= dict(_side_files(scratch, trust_remote_code=False))
        for name, file in files.items():
            folder.copy_file(name, file)
    generation = getattr(structure.model, "generation_config", None)
    if "generation_config.json" not in files and generation is not None:
        folder.write_bytes("generation_config.json", generation.to_json_string(use_diff=True).encode())


def _config_json(structure: Structure, source: Path | None) -> dict[str, Any]:
    """The config to save: the source's own, with the type the weights are saved in."""
    model = structure.model
    assert isinstance(model, PreTrainedModel), type(model)
    config: dict[str, Any] = {}
    if source is not None:
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if config.get("model_type") != model.config.model_type:
        # A model in memory, or the language model out of a larger one.
        config = json.loads(model.config.to_json_string(use_diff=True))
        config.pop("use_cache", None)  # off for training only
    config.setdefault("architectures", [type(model).__name__])
    return _with_dtype(config, str(WEIGHTS_DTYPE).removeprefix("torch."))


def _with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Every dtype in the config, nested ones too, under the key that it has there; at the top in any case."""

    def visit(part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        return {k: dtype if k in ("dtype", "torch_dtype") else visit(item) for k, item in part.items()}

    changed = visit(config)
    return changed if "torch_dtype" in changed else changed | {"dtype": dtype}
