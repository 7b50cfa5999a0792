"""Fill the masters of a host store: from a Hugging Face folder, from a model in memory, or with random values.

All three work unit by unit, so they need memory for one unit besides the planes. A folder's tensors are mapped from their files,
converted to the module's names and shapes, and written into the planes. Nothing is rounded: a master is the source's value in
fp32, whatever the compute dtype.

Random initialisation is transformers' own `_init_weights`: one unit's parameters become real fp32 tensors, every module that can
reach them is initialised, the values go into the planes, and the parameters return to meta. Each unit has its own seed, so its
values do not depend on the other units or their order.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel

from megatrain.errors import UserError
from megatrain.host_memory.store import HostStore, UnitPlanes, split_
from megatrain.models.build import mark_unfilled, refuse_unfilled, restore_buffers
from megatrain.models.conversion import Conversion
from megatrain.models.structure import Structure, Unit, owner_of, persistent_buffers
from megatrain.paths import read_json, refuse_names, regular_file, shown
from megatrain.units import SAFETENSORS_DTYPES, counted, torch_dtype

logger = logging.getLogger(__name__)

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SOURCE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TABLE_DTYPES = (torch.int64, torch.bool)
"""Dtypes of buffers; no quantization format uses them for weights."""
HEADER_DTYPES = {name: torch_dtype(name) for name in SAFETENSORS_DTYPES}
"""Torch dtype of each safetensors dtype name."""
OTHER_FORMATS = (".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")


def load_weights(
    folder: str | Path,
    structure: Structure,
    store: HostStore,
    buffers: Mapping[str, torch.Tensor],
    check: Callable[[], None] = lambda: None,
) -> None:
    """Read all weights of a folder into the masters of `store` and into `buffers`. Optimizer states are not changed.

    Args:
        folder: A Hugging Face folder with safetensors weights: one file, several, or shards with an index.
        buffers: The model's persistent buffers by full name; filled in place, in their own dtype.
        check: Called before each tensor; what it raises ends the read.

    Raises:
        UserError: No safetensors files, a missing or corrupt shard, a missing tensor, a wrong shape, a dtype other than fp32,
            bf16 or fp16, or NaN or infinity. The message names the file and the tensor.
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
            found = _to_model(conversion, _map_tensors(stack, keys, files), folder)
            resolved = resolve_ties(structure, found, str(folder))
            missing += [full for _, full in unit.full_names() if full not in resolved]
            write_masters(store.units[unit.name], unit, resolved, "get an intact copy of the model", check)
            for name in found.keys() & buffers.keys():
                buffers[name].copy_(found[name])
                filled.add(name)
    if missing:
        raise _missing(missing, folder)
    absent = (buffers.keys() & conversion.unit_of.keys()) - filled
    if absent:
        logger.warning("%s: buffers not in the files keep their initial values: %s", folder, _some(sorted(absent)))
        restore_buffers(_hf(structure), absent)


def write_masters(
    planes: UnitPlanes, unit: Unit, tensors: Mapping[str, torch.Tensor], remedy: str, check: Callable[[], None]
) -> None:
    """Write a unit's masters from tensors by full name, as far as there are any.

    Args:
        remedy: What to do about a tensor that holds NaN or infinity.
        check: Called before each tensor; what it raises ends the write.

    Raises:
        UserError: A tensor holds NaN or infinity.
    """
    for local, full in unit.full_names():
        check()
        if full in tensors:
            if not bool(torch.isfinite(tensors[full]).all()):
                raise UserError("holds NaN or infinity", f"tensor {full}", remedy)
            planes.write_master(local, tensors[full])


def find_weight_files(folder: Path) -> dict[str, Path]:
    """Checkpoint key -> the safetensors file that holds it. Raises the UserErrors of `load_weights`."""
    if os.path.lexists(folder / WEIGHTS_FILE):
        single = regular_file(folder, WEIGHTS_FILE)
        return dict.fromkeys(_keys(single), single)
    if os.path.lexists(folder / INDEX_FILE):
        return _indexed_files(folder)
    loose = [regular_file(folder, path.name) for path in sorted(folder.glob("*.safetensors"))]
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
                raise UserError(f"tensor {key} is also in {files[key].name}", str(file), "remove one of the files")
            files[key] = file
    return files


def check_weights(folder: str | Path, structure: Structure) -> None:
    """Raise the errors of `load_weights` that the file headers show: missing tensors, shapes, dtypes. Reads no values."""
    folder = Path(folder)
    files = find_weight_files(folder)
    conversion = Conversion(structure)
    if not conversion.compares_on_meta:
        return  # shapes are checked when the values are read
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
            found = _to_model(conversion, tensors, folder)
            owned = {structure.tied.get(name, name) for name in found}
            missing += [full for _, full in unit.full_names() if full not in owned]
    if missing:
        raise _missing(missing, folder)


def copy_from_memory(model: nn.Module, structure: Structure, store: HostStore) -> None:
    """Write all parameters of `model` (any floating-point dtype, any device) into the masters, one tensor at a time."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for unit in structure.units:
        for local, name in unit.full_names():
            store.units[unit.name].write_master(local, parameters[name])


def initialize(structure: Structure, store: HostStore, *, seed: int, device: torch.device | str = "cpu") -> None:
    """Fill all masters and the model's persistent buffers with the family's random initialisation.

    Values are drawn in fp32 on `device`: for billions of them a GPU is far faster than the CPU. The same seed gives the same bits
    on the same kind of device. Optimizer states are not changed, and the model's parameters are on meta again afterwards.

    Raises:
        UserError: The family's `_init_weights` leaves out one of its tensors.
    """
    restore_buffers(_hf(structure), persistent_buffers(structure.model).keys())
    forked = [torch.device(device)] if torch.device(device).type == "cuda" else []
    for unit in structure.units:
        if not unit.layout.entries:
            continue
        # Hashed to 63 bits: with `seed + index`, unit 1 of seed 0 would equal unit 0 of seed 1.
        digest = hashlib.blake2b(f"{seed}/{unit.name}".encode(), digest_size=8).digest()
        # `_init_weights` draws from torch's global generators; their state is restored.
        with torch.random.fork_rng(forked), torch.no_grad(), _materialised(structure, unit, device) as real:
            torch.manual_seed(int.from_bytes(digest, "little") >> 1)
            for owner, module in _walk(structure, unit):
                owner._init_weights(module)
            refuse_unfilled(structure.model, real)
            for local, full in unit.full_names():
                store.units[unit.name].write_master(local, real[full])


def split(planes: UnitPlanes, local: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(hi, lo) of one tensor: views of the planes, or computed if the store keeps whole fp32 masters."""
    hi = planes.layout.view(planes.hi, local)
    if planes.lo is not None:
        return hi, planes.layout.view(planes.lo, local)
    parts = torch.empty_like(hi, dtype=torch.bfloat16), torch.empty_like(hi, dtype=torch.int16)
    split_(hi, *parts)
    return parts


def resolve_ties(structure: Structure, found: Mapping[str, torch.Tensor], where: str) -> dict[str, torch.Tensor]:
    """Rename tied tensors to the one name they are kept under; the files may use any of its names, or several.

    Raises UserError if the files contain different values under two names of one tensor.
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


def _indexed_files(folder: Path) -> dict[str, Path]:
    index = folder / INDEX_FILE
    value = read_json(folder, INDEX_FILE)
    weight_map = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError("not a safetensors index: it has no weight_map", str(index))
    if wrong := [name for name in weight_map.values() if not isinstance(name, str)]:
        raise UserError(f"not a safetensors index: a file is called {shown(wrong[0])}", str(index))
    keys: dict[str, list[str]] = {}
    for key, name in weight_map.items():
        keys.setdefault(name, []).append(key)
    refuse_names(keys, index)
    for name in keys:
        if not name.endswith(".safetensors"):
            raise UserError(f"names {name!r}; only safetensors files are read", str(index))
        if not os.path.lexists(folder / name):
            raise UserError(f"shard {name} is missing", str(folder), "download the folder again")
        regular_file(folder, name)
    for name, listed in sorted(keys.items()):
        inside = set(_keys(folder / name))
        lost = [key for key in listed if key not in inside]
        if lost:
            raise UserError(f"{_some(lost)} should be in this shard according to {index.name}", str(folder / name))
    return {key: folder / name for key, name in weight_map.items()}


def _keys(file: Path) -> list[str]:
    with ExitStack() as stack:
        return list(_open(stack, file).keys())


def _open(stack: ExitStack, file: Path) -> Any:
    try:
        return stack.enter_context(safe_open(file, framework="pt"))
    except (SafetensorError, OSError) as error:
        raise UserError(f"corrupt or truncated: {error}", str(file), "download or copy the file again") from error


def _to_model(conversion: Conversion, tensors: Mapping[str, torch.Tensor], folder: Path) -> dict[str, torch.Tensor]:
    """`Conversion.to_model`, with the folder in its errors."""
    try:
        return conversion.to_model(tensors)
    except UserError as error:
        raise UserError(error.what, str(folder), error.remedy) from error


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
    """Raise a UserError for weights that are not fp32, bf16 or fp16; `dtype` is None if torch does not have it."""
    if dtype in SOURCE_DTYPES or dtype in TABLE_DTYPES:
        return
    remedy = "dequantize the model and save it again"
    if dtype == torch.float64:
        load = "AutoModelForCausalLM.from_pretrained(folder, dtype='float32')"
        remedy = f"save it in fp32: {load}.save_pretrained(new_folder)"
    raise UserError(f"tensor {key} has dtype {called}; weights must be fp32, bf16 or fp16", str(file), remedy)


def _missing(names: list[str], folder: Path) -> UserError:
    return UserError(
        f"{counted(len(names), 'tensor')} missing: {_some(names)}",
        str(folder),
        "the download may be incomplete, or the folder contains the base model without its head",
    )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _hf(structure: Structure) -> PreTrainedModel:
    assert isinstance(structure.model, PreTrainedModel), type(structure.model)
    return structure.model


@contextmanager
def _materialised(structure: Structure, unit: Unit, device: torch.device | str) -> Iterator[dict[str, nn.Parameter]]:
    """Put real, unfilled fp32 parameters on `device` into the unit's modules, and yield them by full name.

    Aliases of a tied parameter stay on meta, so only its owner's module initialises it; transformers, too, ties weights after
    initialisation.
    """
    holders = {}
    real: dict[str, nn.Parameter] = {}
    try:
        for _, full in unit.full_names():
            module, leaf = owner_of(structure.model, full)
            meta = module._parameters[leaf]
            assert meta is not None, full
            holders[full] = (module, leaf, meta)
            empty = torch.empty(meta.shape, dtype=torch.float32, device=device)
            real[full] = module._parameters[leaf] = nn.Parameter(empty, requires_grad=False)
        mark_unfilled(real.values())
        yield real
    finally:
        for module, leaf, meta in holders.values():
            module._parameters[leaf] = meta


def _walk(structure: Structure, unit: Unit) -> Iterator[tuple[PreTrainedModel, nn.Module]]:
    """Yield (owning PreTrainedModel, module) for all modules that can set the unit's parameters, children first.

    These are the unit's modules and all their parents: `_init_weights` may set a parameter through its own module or through a
    parent (GPT-2 scales `c_proj` when it is called with the attention block).
    """
    stack = structure.layers_name + "."
    root = _hf(structure)

    def visit(name: str, module: nn.Module, owner: PreTrainedModel) -> Iterator[tuple[PreTrainedModel, nn.Module]]:
        owner = module if isinstance(module, PreTrainedModel) else owner
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}" if name else child_name
            if unit.layer is None:
                inside = not path.startswith(stack)
            else:
                inside = (path + ".").startswith(unit.prefix) or unit.prefix.startswith(path + ".")
            if inside:
                yield from visit(path, child, owner)
        yield owner, module

    return visit("", root, root)
