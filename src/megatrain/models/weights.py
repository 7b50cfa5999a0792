"""A Hugging Face folder's weights, straight into the host store, and a unit's weights back under their checkpoint names.

Reading goes unit by unit: the tensors of a unit are mapped from their files, converted to the module's names and shapes, and
written into the planes. Memory beside the planes is one unit. Nothing is rounded on the way: a master is the source's value
in fp32, whatever the compute type.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from megatrain.errors import UserError
from megatrain.host_memory import planes as plane_math
from megatrain.host_memory.store import HostStore, UnitPlanes
from megatrain.models.build import fp32_parameter_names, restore_buffers
from megatrain.models.conversion import Conversion, to_checkpoint, unit_of_names
from megatrain.models.structure import Structure, Unit
from megatrain.units import SAFETENSORS_DTYPES, counted, torch_dtype

logger = logging.getLogger(__name__)

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SOURCE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TABLE_DTYPES = (torch.int64, torch.bool)
"""Of buffers: tables that no quantization format uses for weights."""
HEADER_DTYPES = {name: torch_dtype(name) for name in SAFETENSORS_DTYPES}
"""Torch dtypes by their safetensors name."""
OTHER_FORMATS = (".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")


def load_weights(
    folder: str | Path, structure: Structure, store: HostStore, buffers: Mapping[str, torch.Tensor]
) -> None:
    """Read all weights of a folder into the masters of `store` and into `buffers`. Moments are left alone.

    Args:
        folder: A Hugging Face folder with safetensors weights, in one file, in several, or sharded with an index.
        structure: The model they belong to, parameters on meta.
        store: Receives the masters.
        buffers: The model's persistent buffers by full name; filled in place, in their own dtype.

    Raises:
        UserError: No safetensors files, a missing or corrupt shard, a missing tensor, a tensor of the wrong shape, or a type
            that is not fp32, bf16 or fp16. The message names the file and the tensor.
    """
    folder = Path(folder)
    files = find_weight_files(folder)
    conversion = Conversion(structure)
    plan = conversion.plan(files)
    if plan.unexpected:
        logger.warning("%s: %s not used: %s", folder, counted(len(plan.unexpected), "tensor"), _some(plan.unexpected))
    missing: list[str] = []
    filled: set[str] = set()
    for unit in structure.units:
        keys = plan.units.get(unit.name, [])
        # The mapped files stay open until the unit is in the planes: the tensors are views of the mappings.
        with ExitStack() as stack:
            tensors = _map_tensors(stack, keys, files)
            try:
                found = conversion.to_model(tensors)
            except UserError as error:
                raise UserError(error.what, str(folder), error.remedy) from error
            _write_unit(unit, resolve_ties(structure, found, str(folder)), store, missing)
            for name in found.keys() & buffers.keys():
                buffers[name].copy_(found[name])
                filled.add(name)
    if missing:
        raise _missing(missing, folder)
    absent = (buffers.keys() & conversion.unit_of.keys()) - filled
    if absent:
        logger.warning("%s: buffers not in the files keep their initial values: %s", folder, _some(sorted(absent)))
        assert isinstance(structure.model, PreTrainedModel)
        restore_buffers(structure.model, absent)


def find_weight_files(folder: Path) -> dict[str, Path]:
    """Checkpoint key -> the safetensors file that holds it.

    Raises:
        UserError: See `load_weights`.
    """
    single, index = folder / WEIGHTS_FILE, folder / INDEX_FILE
    if single.is_file():
        return dict.fromkeys(_keys(single), single)
    if index.is_file():
        return _indexed_files(index)
    loose = sorted(folder.glob("*.safetensors"))
    if not loose:
        other = sorted(p.name for p in folder.glob("*") if p.suffix in OTHER_FORMATS)
        if other:
            raise UserError(
                f"the weights are not safetensors ({', '.join(other[:3])}); other formats can run code and are not read",
                str(folder),
                "convert them: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)",
            )
        raise UserError("holds no weights", str(folder), "for random weights set model.init: random")
    files: dict[str, Path] = {}
    for file in loose:
        for key in _keys(file):
            if key in files:
                raise UserError(
                    f"tensor {key} is also in {files[key].name}", str(file), "remove the file that is wrong"
                )
            files[key] = file
    return files


def check_weights(folder: str | Path, structure: Structure) -> None:
    """What `load_weights` would refuse, as far as the files' headers tell: missing tensors, shapes and types. Reads no values.

    Raises:
        UserError: As `load_weights`, for values excepted.
    """
    folder = Path(folder)
    files = find_weight_files(folder)
    conversion = Conversion(structure)
    if not conversion.compares_on_meta:
        return  # shapes are compared when the values are read
    plan = conversion.plan(files)
    missing: list[str] = []
    with ExitStack() as stack:
        handles = {file: _open(stack, file) for file in sorted(set(files.values()))}
        for unit in structure.units:
            tensors: dict[str, torch.Tensor] = {}
            for key in plan.units.get(unit.name, []):
                described = handles[files[key]].get_slice(key)
                kind = described.get_dtype()
                _refuse_dtype(key, HEADER_DTYPES.get(kind), files[key], str(HEADER_DTYPES.get(kind, kind)))
                tensors[key] = torch.empty(described.get_shape(), dtype=HEADER_DTYPES[kind], device="meta")
            try:
                found = conversion.to_model(tensors)
            except UserError as error:
                raise UserError(error.what, str(folder), error.remedy) from error
            owned = {structure.tied.get(name, name) for name in found}
            missing += [full for _, full in unit.full_names() if full not in owned]
    if missing:
        raise _missing(missing, folder)


def hf_tensors(
    structure: Structure,
    store: HostStore,
    unit: Unit,
    dtype: torch.dtype,
    buffers: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """The tensors of one unit as its family saves them: checkpoint names, checkpoint shapes, a tied tensor once.

    Args:
        structure: The model.
        store: Holds the masters.
        unit: One of `structure.units`.
        dtype: Type to save in. Tensors that transformers keeps in fp32 when it loads that type are fp32 nevertheless.
        buffers: The model's persistent buffers; those of this unit are included, in their own dtype.

    Returns:
        Tensors by checkpoint name, views of the planes where nothing had to be converted.
    """
    assert isinstance(structure.model, PreTrainedModel)
    keep_fp32 = fp32_parameter_names(structure.model, dtype)
    planes = store.on_host(unit.name)
    tensors = {
        full: weight_of(planes, local, torch.float32 if full in keep_fp32 else dtype)
        for local, full in unit.full_names()
    }
    owner = unit_of_names(structure)
    tensors |= {name: b.detach().cpu() for name, b in (buffers or {}).items() if owner[name] == unit.name}
    return to_checkpoint(structure.model, tensors)


def weight_of(planes: UnitPlanes, local: str, dtype: torch.dtype) -> torch.Tensor:
    """One weight in `dtype`. In bf16 it is the hi plane: what the engine computes with, and what lo completes exactly."""
    if dtype == torch.bfloat16:
        return planes.layout.view(planes.hi, local) if planes.lo is not None else split(planes, local)[0]
    return planes.read_master(local).to(dtype)


def split(planes: UnitPlanes, local: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(hi, lo) of one tensor: views of the planes, or computed where the store keeps whole fp32 masters."""
    hi = planes.layout.view(planes.hi, local)
    if planes.lo is not None:
        return hi, planes.layout.view(planes.lo, local)
    parts = torch.empty_like(hi, dtype=torch.bfloat16), torch.empty_like(hi, dtype=torch.int16)
    plane_math.split_(hi, *parts)
    return parts


def resolve_ties(structure: Structure, found: Mapping[str, torch.Tensor], where: str) -> dict[str, torch.Tensor]:
    """Tensors under the one name a tied tensor is kept by; a file may hold any of its names, or several.

    Raises:
        UserError: A file holds two names of one tensor with different values.
    """
    resolved = {name: tensor for name, tensor in found.items() if name not in structure.tied}
    for alias, owner in structure.tied.items():
        if alias not in found:
            continue
        if owner not in resolved:
            resolved[owner] = found[alias]
        elif not torch.equal(resolved[owner], found[alias]):
            raise UserError(
                f"{alias} and {owner} are tied by the config but differ in the files",
                where,
                "set tie_word_embeddings to false in config.json, or remove one of them",
            )
    return resolved


def _write_unit(unit: Unit, found: Mapping[str, torch.Tensor], store: HostStore, missing: list[str]) -> None:
    for local, full in unit.full_names():
        if full in found:
            if not bool(torch.isfinite(found[full]).all()):
                raise UserError(
                    "holds NaN or infinity", f"tensor {full}", "the weights are broken: take another copy of the model"
                )
            store.units[unit.name].write_master(local, found[full])
        else:
            missing.append(full)


def _indexed_files(index: Path) -> dict[str, Path]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {str(key): index.parent / str(name) for key, name in weight_map.items()}
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"not a safetensors index: {error!r}", str(index)) from error
    for shard in sorted(set(files.values())):
        if not shard.is_file():
            raise UserError(f"shard {shard.name} is missing", str(index.parent), "download the folder again")
        inside = set(_keys(shard))
        lost = [key for key, file in files.items() if file == shard and key not in inside]
        if lost:
            raise UserError(f"{_some(lost)} should be in this shard by {index.name}", str(shard))
    return files


def _keys(file: Path) -> list[str]:
    with ExitStack() as stack:
        return list(_open(stack, file).keys())


def _open(stack: ExitStack, file: Path) -> Any:
    try:
        return stack.enter_context(safe_open(file, framework="pt"))
    except (SafetensorError, OSError) as error:
        raise UserError(f"corrupt or truncated: {error}", str(file), "download or copy the file again") from error


def _map_tensors(stack: ExitStack, keys: list[str], files: Mapping[str, Path]) -> dict[str, torch.Tensor]:
    handles = {file: _open(stack, file) for file in {files[key] for key in keys}}
    tensors: dict[str, torch.Tensor] = {}
    for key in keys:
        try:
            tensor = tensors[key] = handles[files[key]].get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise UserError(f"tensor {key} cannot be read: {error}", str(files[key])) from error
        _refuse_dtype(key, tensor.dtype, files[key], str(tensor.dtype))
    return tensors


def _refuse_dtype(key: str, dtype: torch.dtype | None, file: Path, called: str) -> None:
    """Raise for weights that are not fp32, bf16 or fp16.

    Args:
        dtype: The tensor's type; None: one that torch does not have.
        called: What the error calls it.

    Raises:
        UserError: Names the tensor and the file.
    """
    if dtype in SOURCE_DTYPES or dtype in TABLE_DTYPES:
        return
    if dtype == torch.float64:
        remedy = (
            "save it in fp32: AutoModelForCausalLM.from_pretrained(folder, dtype='float32').save_pretrained(new_folder)"
        )
    else:
        remedy = "dequantize the model and save it again"
    raise UserError(f"tensor {key} has type {called}; weights must be fp32, bf16 or fp16", str(file), remedy)


def _missing(names: list[str], folder: Path) -> UserError:
    return UserError(
        f"{counted(len(names), 'tensor')} missing: {_some(names)}",
        str(folder),
        "the download may be incomplete, or the folder holds the base model without its head",
    )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
