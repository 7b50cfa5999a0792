"""Reads checkpoints back into the planes, exactly, and finds the newest complete one.

Nothing is trusted without a manifest, and every byte that is used is compared with its checksum. The reader does not care how the
weights were sharded, nor whether the store keeps split or whole masters.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from megatrain.checkpoint.files import MANIFEST_FILE, SafetensorsReader, damaged, read_verified, tensor_crc32
from megatrain.checkpoint.format import (
    MOMENTS,
    STATE_FILE,
    STATE_FOLDER,
    Manifest,
    from_json,
    read_manifest,
    state_key,
)
from megatrain.errors import UserError
from megatrain.host import planes as plane_math
from megatrain.host.store import HostStore, UnitPlanes
from megatrain.models.conversion import Conversion
from megatrain.models.structure import Structure
from megatrain.models.weights import resolve_ties

logger = logging.getLogger(__name__)

READ_THREADS = 4


def load_checkpoint(
    directory: str | Path, *, structure: Structure, store: HostStore, buffers: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """Restore masters, moments and buffers bit for bit.

    Args:
        directory: A complete checkpoint of the same model.
        structure: The model.
        store: Receives masters and moments. After an error it holds a mixture and must be loaded again.
        buffers: The model's buffers by full name; those that belong to the weights are filled in place.

    Returns:
        The `state` that the checkpoint was saved with.

    Raises:
        UserError: Not a complete checkpoint, another model's, or damaged; the message names the file and the tensor, and the
            newest other checkpoint beside it.
    """
    directory = Path(directory)
    manifest = read_manifest(directory)
    try:
        return _load(directory, manifest, structure, store, buffers)
    except UserError as error:
        other = latest_complete(directory.parent, except_for=directory)
        if other is None or "damaged" not in error.what:
            raise
        raise UserError(error.what, error.where, f"{error.remedy}; the newest other one is {other}") from error


def latest_complete(checkpoints: str | Path, *, except_for: Path | None = None) -> Path | None:
    """The complete checkpoint of the highest step in a folder, or None. What is ignored is logged, with the reason.

    Complete means a valid manifest and all files in their full size; contents are verified when they are read.
    """
    checkpoints = Path(checkpoints)
    found: list[tuple[int, float, Path]] = []
    for folder in sorted(checkpoints.iterdir()) if checkpoints.is_dir() else []:
        if not folder.is_dir() or folder == except_for:
            continue
        if ".tmp-" in folder.name:
            logger.warning("ignoring %s: it was never finished", folder)
            continue
        try:
            found.append((read_manifest(folder).step, (folder / MANIFEST_FILE).stat().st_mtime, folder))
        except UserError as error:
            logger.warning("ignoring %s: %s", folder, error.what)
    return max(found)[2] if found else None


def is_complete(directory: str | Path) -> bool:
    """Whether a folder is a complete checkpoint, judged as by `latest_complete`."""
    try:
        read_manifest(Path(directory))
    except UserError:
        return False
    return True


def _load(
    directory: Path,
    manifest: Manifest,
    structure: Structure,
    store: HostStore,
    buffers: Mapping[str, torch.Tensor],
) -> dict[str, Any]:
    if STATE_FILE not in manifest.files:
        raise UserError("holds weights only, no training state", str(directory), "load it as a model folder")
    # All small files are verified, also those that only transformers reads: a damaged tokenizer is a damaged checkpoint.
    small = {
        name: read_verified(directory / name, record)
        for name, record in manifest.files.items()
        if not name.endswith(".safetensors")
    }
    saved = json.loads(small[STATE_FILE])
    crcs: dict[str, int] = {}
    for unit in saved["units"].values():
        crcs |= unit["weights_crc32"]
    conversion = Conversion(structure)
    _refuse_other_model(directory, crcs.keys(), structure, conversion)
    with ExitStack() as stack, ThreadPoolExecutor(READ_THREADS, "checkpoint-read") as pool:
        weights: dict[str, SafetensorsReader] = {}
        states: dict[str, SafetensorsReader] = {}
        for name, record in manifest.files.items():
            if name.endswith(".safetensors"):
                reader = stack.enter_context(SafetensorsReader(directory / name, record))
                (states if name.startswith(STATE_FOLDER + "/") else weights).update(dict.fromkeys(reader.names, reader))
        _refuse_other_shapes(directory, structure, states)
        plan = conversion.plan(weights)
        for unit in structure.units:
            keys = plan.units.get(unit.name, [])
            tensors = dict(zip(keys, pool.map(lambda key: weights[key].read(key), keys), strict=True))
            found = resolve_ties(structure, conversion.to_model(tensors), str(directory))
            for name, tensor in found.items():
                if tensor_crc32(tensor) != crcs.get(name):
                    raise damaged(directory, f"{name} differs from what was trained: its conversion did not go back")
            for name in found.keys() & buffers.keys():
                buffers[name].copy_(found[name])
            with store.restoring(unit.name) as planes:
                jobs = [
                    pool.submit(_restore, planes, local, full, found, states, directory)
                    for local, full in unit.full_names()
                ]
                for job in jobs:
                    job.result()
    return from_json(saved["state"])


def _restore(
    planes: UnitPlanes,
    local: str,
    full: str,
    found: Mapping[str, torch.Tensor],
    states: Mapping[str, SafetensorsReader],
    directory: Path,
) -> None:
    """Restore master and moments of one tensor. Moments and lo are read straight into the planes."""
    if full not in found:
        raise damaged(directory, f"{full} is in no weights file")
    weight = found[full]
    lo_key = state_key("lo", full)
    if lo_key not in states:
        planes.write_master(local, weight)  # saved as fp32: it is the master
    elif planes.lo is not None:
        planes.layout.view(planes.hi, local).copy_(weight)
        states[lo_key].read_into(lo_key, planes.layout.view(planes.lo, local))
    else:
        lo = states[lo_key].read(lo_key)
        plane_math.join(weight.contiguous(), lo, out=planes.layout.view(planes.hi, local))
    for plane, flat in zip(MOMENTS, (planes.m, planes.v), strict=True):
        key = state_key(plane, full)
        states[key].read_into(key, planes.layout.view(flat, local))


def _refuse_other_model(directory: Path, saved: Set[str], structure: Structure, conversion: Conversion) -> None:
    own = conversion.unit_of.keys() - structure.tied.keys()
    missing, extra = sorted(own - saved), sorted(saved - own)
    if missing or extra:
        parts = [f"it lacks {', '.join(missing[:3])}"] if missing else []
        parts += [f"it has {', '.join(extra[:3])}"] if extra else []
        raise UserError(f"is a checkpoint of another model: {'; '.join(parts)}", str(directory))


def _refuse_other_shapes(directory: Path, structure: Structure, states: Mapping[str, SafetensorsReader]) -> None:
    for unit in structure.units:
        for entry, (_, full) in zip(unit.layout.entries, unit.full_names(), strict=True):
            key = state_key("m", full)
            if key not in states:
                raise damaged(directory, f"{key} is in no state file")
            if states[key].shape(key) != entry.shape:
                raise UserError(
                    f"is a checkpoint of another model: {full} has shape {states[key].shape(key)}, not {entry.shape}",
                    str(directory),
                )
