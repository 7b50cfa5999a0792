"""Writes checkpoints: a folder that transformers loads as it is, plus the rest of the exact training state.

Tensors go to disk straight from the planes. Extra memory is one unit: what the family's conversion copies (fused experts are
saved one by one), or hi and lo if the store keeps whole fp32 masters.

A save has two halves. `plan_save` runs between two steps, when the model may be read: it decides everything and refuses what
cannot work. `write_planned` only moves bytes, from any source of the units' planes, and may run in a thread: it never reads
the live model, whose modules a running step binds and unbinds. Writers that share a checkpoint (shared_write.py) call
its parts `write_begin`, `write_unit` and `write_end`.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from megatrain import __version__
from megatrain.checkpoint.files import FilesWriter, FolderWriter, refuse_if_taken
from megatrain.checkpoint.format import (
    DEFAULT_OPTIMIZER,
    FORMAT_NAME,
    FORMAT_VERSION,
    STATE_BYTES,
    STATE_FILE,
    STATE_FOLDER,
    STATE_VALUES,
    WEIGHTS_DTYPE,
    state_key,
    to_json,
)
from megatrain.checkpoint.reader import source_dtype_of
from megatrain.errors import UserError, WriteFailed
from megatrain.host_memory.store import UnitPlanes
from megatrain.models.conversion import to_checkpoint, unit_of_names
from megatrain.models.folder import TEMPLATE_FOLDER
from megatrain.models.structure import Structure, Unit, fp32_parameter_names
from megatrain.models.weights import INDEX_FILE, OTHER_FORMATS, split
from megatrain.optim.spec import OptimizerSpec
from megatrain.paths import JSON_BYTES, JSON_VALUES, file_problem, json_values, name_problem, read_json
from megatrain.units import MIB, gibs

logger = logging.getLogger(__name__)

WEIGHT_SUFFIXES = (*OTHER_FORMATS, ".safetensors", ".onnx", ".ckpt", ".npz", ".tar", ".zip")
OWN_FILES = frozenset({"manifest.json", "state.json", "config.json", "latest"})
ADAPTER_FILES = frozenset({"adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"})
"""Where peft is installed, transformers loads an adapter that it finds beside a model, on top of the trained weights."""
SLACK_BYTES = 16 << 20
"""Upper bound of headers, JSON files and the file system's own blocks."""


@dataclass(frozen=True)
class UnitFiles:
    """What was written for a unit, for `state.json` and the index.

    Attributes:
        weights_crc32: CRC-32 of each weight by module name, in its saved dtype but before the family's conversion; comparing it
            after reading proves that the conversion there and back is exact.
        keys: Checkpoint names in the weights file.
        weights_bytes: Size of their data.
    """

    weights_crc32: dict[str, int]
    keys: list[str]
    weights_bytes: int


@dataclass(frozen=True)
class UnitsPlan:
    """How units are written: the same in every process that writes some of them.

    Attributes:
        units: The units to write, in forward order; unit k goes to the k-th weights file.
        model: Used for the family's conversion.
        keep_fp32: Full names of weights that are saved as fp32.
        buffers: Unit name -> copies of its persistent buffers on the CPU.
        optim: The optimizer whose states are written.
        weights_only: Leave out lo and the optimizer's states.
    """

    units: tuple[Unit, ...]
    model: PreTrainedModel
    keep_fp32: frozenset[str]
    buffers: Mapping[str, dict[str, torch.Tensor]]
    optim: OptimizerSpec
    weights_only: bool

    @property
    def weights_files(self) -> dict[str, str]:
        """Unit name -> its weights file."""
        return {
            unit.name: weights_file_name(number, len(self.units)) for number, unit in enumerate(self.units, start=1)
        }


@dataclass(frozen=True)
class SavePlan(UnitsPlan):
    """A whole save, decided before anything is written.

    Attributes:
        directory: The folder to make.
        config: Content of config.json.
        generation: Content of generation_config.json; None if it is a side file or there is none.
        side_files: (name, file) of everything else that is copied.
        own_files: Content of files by name that come from the run instead of the source folder.
        state: The engine's state as JSON; None for a folder of weights only.
        step: For the manifest.
        source_dtype: Dtype of the source's weights, for `export`.
        total_bytes: Upper bound of what will be written.
    """

    directory: Path
    config: dict[str, Any]
    generation: bytes | None
    side_files: list[tuple[str, Path]]
    own_files: dict[str, bytes]
    state: Any
    step: int
    source_dtype: str | None
    total_bytes: int


def plan_units(
    structure: Structure,
    buffers: Mapping[str, torch.Tensor],
    optim: OptimizerSpec,
    weights_only: bool = False,
    model: PreTrainedModel | None = None,
) -> UnitsPlan:
    """Decide how units are written.

    Args:
        structure: The model.
        buffers: The model's buffers by full name; those that belong to the weights are saved.
        optim, weights_only: See `UnitsPlan`.
        model: Used for the family's conversion instead of the structure's own, which may be in use during the save.
    """
    own = structure.model
    assert isinstance(own, PreTrainedModel), type(own)
    owner = unit_of_names(structure)
    unit_buffers: dict[str, dict[str, torch.Tensor]] = {}
    for name, buffer in buffers.items():
        if name in owner:
            unit_buffers.setdefault(owner[name], {})[name] = buffer.detach().to("cpu", copy=True)
    return UnitsPlan(
        units=tuple(unit for unit in structure.units if unit.layout.entries or unit.name in owner.values()),
        model=model or own,
        keep_fp32=frozenset(fp32_parameter_names(own, WEIGHTS_DTYPE)),
        buffers=unit_buffers,
        optim=optim,
        weights_only=weights_only,
    )


def plan_save(
    directory: Path,
    structure: Structure,
    units: UnitsPlan,
    state: Mapping[str, Any],
    source_folder: Path | None,
    trust_remote_code: bool = False,
    shipped: Mapping[str, bytes | None] | None = None,
) -> SavePlan:
    """Decide what a save writes, and refuse what cannot work. Nothing is written.

    Args:
        directory: The folder to make, with its parents. It must not exist.
        structure, units: The model, and how its units are written.
        state: The engine's state: `step`, and whatever `format.to_json` can write.
        source_folder: The folder the model came from; its tokenizer, template and other files are copied. None for a model in
            memory.
        trust_remote_code: Whether the source folder's Python files are copied.
        shipped: Content of files by name that replaces the source folder's; None leaves a file out.

    Raises:
        UserError: The folder exists, the source folder cannot be read, or `state` is too large.
        WriteFailed: The disk has no room.
    """
    refuse_if_taken(directory)
    shipped = shipped or {}
    found = _side_files(source_folder, trust_remote_code) if source_folder else ()
    side_files = [(name, file) for name, file in found if name not in shipped]
    own_files = {name: content for name, content in shipped.items() if content is not None}
    config, source_dtype = _config_json(structure, source_folder)
    generation = getattr(structure.model, "generation_config", None)
    if "generation_config.json" in {*dict(side_files), *own_files}:
        generation = None
    element_bytes, frozen_bytes = units.optim.bytes_per_parameter, FROZEN_BYTES
    if units.weights_only:
        element_bytes = frozen_bytes = 4 if units.keep_fp32 else 2
    trained = sum(unit.layout.trained_numel for unit in structure.units)
    frozen = sum(unit.layout.frozen_numel for unit in structure.units)
    total_bytes = math.ceil(element_bytes * trained) + frozen_bytes * frozen + SLACK_BYTES
    total_bytes += sum(file.stat().st_size for _, file in side_files)
    refuse_if_no_room(directory, total_bytes)
    saved = None if units.weights_only else to_json(dict(state))
    _refuse_large_state(directory, saved)
    return SavePlan(
        **vars(units),
        directory=directory,
        config=config,
        generation=None if generation is None else generation.to_json_string(use_diff=True).encode(),
        side_files=side_files,
        own_files=own_files,
        state=saved,
        step=int(state.get("step", 0)),
        source_dtype=source_dtype,
        total_bytes=total_bytes,
    )


def _refuse_large_state(directory: Path, state: Any) -> None:
    text = json.dumps(state, indent=1, ensure_ascii=False).encode()
    most_bytes, most_values = (
        STATE_BYTES - JSON_BYTES,
        STATE_VALUES - JSON_VALUES,
    )  # leaves room for the checksums beside it
    if len(text) > most_bytes or json_values(text) > most_values:
        size, most = gibs(len(text), most_bytes)
        what = (
            f"the engine's state and `extra` are {size} of JSON with {json_values(text):,} values; at most "
            f"{most} and {most_values:,} are read back"
        )
        raise UserError(what, str(directory), "keep large tensors in files of your own")


def write_planned(
    plan: SavePlan, units: Iterable[tuple[Unit, UnitPlanes]], on_bytes: Callable[[int], None] = lambda count: None
) -> float:
    """Write a checkpoint. Returns when it is synced and was read back: the seconds of reading back.

    Args:
        plan: What to write.
        units: The plan's units in any order. A unit's planes must not change until the next unit is asked for.
        on_bytes: Called with the number of bytes after each piece written; what it raises ends the save.

    Raises:
        UserError: The folder exists, or the system refuses a write. Nothing is left of the save.
    """
    with FolderWriter(plan.directory, on_bytes) as folder:
        write_begin(folder, plan)
        write_end(folder, plan, {unit.name: write_unit(folder, unit, planes, plan) for unit, planes in units})
    return folder.read_back_s


def write_begin(folder: FolderWriter, plan: SavePlan) -> None:
    """Write everything but the units: config, tokenizer and the source folder's other files."""
    folder.write_json("config.json", plan.config)
    for name, file in plan.side_files:
        folder.copy_file(name, file)
    for name, content in plan.own_files.items():
        folder.write_bytes(name, content)
    if plan.generation is not None:
        folder.write_bytes("generation_config.json", plan.generation)


def write_end(folder: FolderWriter, plan: SavePlan, written: Mapping[str, UnitFiles]) -> None:
    """Write index and state.json, and give the folder its name.

    `written` is what `write_unit` returned for each unit, in any order.
    """
    files = plan.weights_files
    assert written.keys() == files.keys(), files.keys() ^ written.keys()
    units = {name: written[name] for name in files}
    weight_map: dict[str, str] = {}
    for name, unit in units.items():
        twice = weight_map.keys() & set(unit.keys)
        assert not twice, f"two units save {sorted(twice)[:3]}"
        weight_map |= dict.fromkeys(unit.keys, files[name])
    write_index(folder, weight_map, sum(unit.weights_bytes for unit in units.values()))
    if not plan.weights_only:
        frozen = [full for unit in plan.units for local, full in unit.full_names() if not unit.layout.is_trained(local)]
        versions = {"megatrain": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
        folder.write_json(
            STATE_FILE,
            {
                "version": FORMAT_VERSION,
                "versions": versions,
                **({} if plan.optim.name == DEFAULT_OPTIMIZER else {"optimizer": plan.optim.name}),
                "source_dtype": plan.source_dtype,
                **({"frozen": frozen} if frozen else {}),
                "units": {name: {"weights_crc32": unit.weights_crc32} for name, unit in units.items()},
                "state": plan.state,
            },
        )
    folder.commit({"format": FORMAT_NAME, "version": FORMAT_VERSION, "step": plan.step})


def refuse_if_no_room(directory: Path, needed_bytes: int) -> None:
    """Raise WriteFailed unless the disk of `directory`, which need not exist, has room."""
    existing = directory.absolute()
    while not existing.exists():
        existing = existing.parent
    free_bytes = shutil.disk_usage(existing).free
    if free_bytes < needed_bytes:
        needed, free = gibs(needed_bytes, free_bytes, digits=2)
        raise WriteFailed(
            f"no room for a checkpoint: it needs {needed} ({needed_bytes:,} bytes), "
            f"{free} ({free_bytes:,} bytes) are free",
            str(directory),
            "free space, or choose another disk",
        )


def write_unit(folder: FilesWriter, unit: Unit, planes: UnitPlanes, plan: UnitsPlan) -> UnitFiles:
    """Write one unit: its weights under checkpoint names, and unless `plan.weights_only` lo and the optimizer's states.

    A weight that is saved as fp32 is its master and has no lo; neither has a frozen one that is bf16. For weights only, `planes`
    need no states.
    """
    weights: dict[str, torch.Tensor] = dict(plan.buffers.get(unit.name, {}))
    rest: dict[str, torch.Tensor] = {}
    for local, full in unit.full_names():
        trained = planes.layout.is_trained(local)
        if full in plan.keep_fp32:
            weights[full] = planes.read_master(local)
        elif planes.lo is not None and not trained:
            weights[full] = planes.layout.view(planes.hi, local)
        else:
            weights[full], rest[state_key("lo", full)] = split(planes, local)
        if trained and not plan.weights_only:
            for name in planes.states:
                rest[state_key(name, full)] = planes.state_of(name, local)
    crcs = folder.crcs_of(weights)
    saved = to_checkpoint(plan.model, weights)
    folder.write_tensors(plan.weights_files[unit.name], saved)
    if not plan.weights_only:
        folder.write_tensors(f"{STATE_FOLDER}/{unit.name}.safetensors", rest)
    return UnitFiles(crcs, list(saved), sum(t.numel() * t.element_size() for t in saved.values()))


def weights_file_name(number: int, count: int) -> str:
    """The name that transformers gives to shard `number`, from 1 on."""
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def write_index(folder: FolderWriter, weight_map: Mapping[str, str], total_bytes: int) -> None:
    """Write the index of all weights files, in transformers' format."""
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    folder.write_json(INDEX_FILE, index)


def _side_files(source: Path, trust_remote_code: bool) -> Iterator[tuple[str, Path]]:
    """(name, file) of everything in a model folder except weights, their index, hidden files and untrusted code.

    Left out with a warning: adapters, names that no reader would accept, and links to places outside of the folder, which may
    lead to anything that this user can read.
    """
    candidates = [*source.iterdir(), *(source / TEMPLATE_FOLDER).glob("*")]
    folded: set[str] = set()
    for file in sorted(candidates):
        name = file.relative_to(source).as_posix()
        is_code = file.suffix == ".py"
        if (
            file.is_dir()
            or file.name.startswith(".")
            or (file.suffix in WEIGHT_SUFFIXES and name not in ADAPTER_FILES)
            or file.name.endswith(".index.json")
            or name in OWN_FILES
            or (is_code and not trust_remote_code)
        ):
            continue
        why = "transformers would load the adapter on top of the trained weights" if name in ADAPTER_FILES else None
        why = why or name_problem(name) or file_problem(source, name)
        if why is None and name.casefold() in folded:
            why = "another file has the same name on systems that ignore case"
        if why is not None:
            warn_left_out(str(file), why)
        else:
            folded.add(name.casefold())
            yield name, file


FROZEN_BYTES = 4
"""At most: the bf16 weight, and with fp32 compute the rest of it."""


def checkpoint_size(
    source: Path, trust_remote_code: bool, parameters: int, optim: OptimizerSpec, frozen: int = 0
) -> int:
    """Bytes of a checkpoint of a model that comes from the folder `source`: an estimate, rather too large.

    Headers, manifest and index take less than 1 MiB for a few hundred tensors, and less than a thousandth of large models.
    """
    state = math.ceil(optim.bytes_per_parameter * (parameters - frozen)) + FROZEN_BYTES * frozen
    return state + state // 1000 + MIB + sum(file.stat().st_size for _, file in _side_files(source, trust_remote_code))


@lru_cache(maxsize=1000)
def warn_left_out(file: str, why: str) -> None:
    """Warn, once in a process, that checkpoints do not get a file of their source folder."""
    logger.warning("%r is not copied into checkpoints: %s", file, why)


def _config_json(structure: Structure, source: Path | None) -> tuple[dict[str, Any], str | None]:
    """The config to save, which is the source's own with the dtype of the saved weights; and the source's dtype."""
    model = structure.model
    assert isinstance(model, PreTrainedModel), type(model)
    config: dict[str, Any] = {}
    if source is not None:
        config = read_json(source, "config.json", constants=True)
    if config.get("model_type") != model.config.model_type:
        # a model in memory, or the language model of a larger one
        config = json.loads(model.config.to_json_string(use_diff=True))
        config.pop("use_cache", None)  # switched off for training
    config.setdefault("architectures", [type(model).__name__])
    # A checkpoint's own config says bf16, whatever its training started from.
    started_from = source_dtype_of(source) if source is not None else None
    source_dtype = started_from or config.get("dtype", config.get("torch_dtype"))
    return with_dtype(config, str(WEIGHTS_DTYPE).removeprefix("torch.")), source_dtype


def with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The config with every dtype replaced, also in nested configs, under the key it has there; the top level always has one."""

    def visit(part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        return {k: dtype if k in ("dtype", "torch_dtype") else visit(item) for k, item in part.items()}

    changed = visit(config)
    return changed if "torch_dtype" in changed else changed | {"dtype": dtype}
