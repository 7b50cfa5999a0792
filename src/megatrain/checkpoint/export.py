"""`megatrain export`, a plain Hugging Face folder from a checkpoint, and `megatrain verify`, the comparison of every byte.

The export works unit by unit: the exact masters of a unit are read, rounded once to the target dtype, and written under
checkpoint names. Then transformers loads the folder, and tensors and logits are compared.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.func import functional_call
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatrain.checkpoint.card import CARD, CURVE, SOURCE_CARD, card_text, run_of
from megatrain.checkpoint.files import FolderWriter, refuse_if_taken
from megatrain.checkpoint.format import MANIFEST_FILE, MARKER_FILE, STATE_FILE, STATE_FOLDER, damages, read_manifest
from megatrain.checkpoint.reader import OpenCheckpoint, latest_complete
from megatrain.checkpoint.writer import (
    ADAPTER_FILES,
    SLACK_BYTES,
    WEIGHT_SUFFIXES,
    refuse_if_no_room,
    warn_left_out,
    weights_file_name,
    with_dtype,
    write_index,
)
from megatrain.errors import UserError
from megatrain.host_memory.store import split_
from megatrain.models.build import build_meta_model, load_model_config
from megatrain.models.conversion import to_checkpoint, unit_of_names
from megatrain.models.folder import offline
from megatrain.models.structure import Structure, Unit, dissect, fp32_parameter_names, persistent_buffers
from megatrain.paths import read_json
from megatrain.units import counted, torch_dtype

logger = logging.getLogger(__name__)

Say = Callable[[str], object]
TRIAL_TOKENS = 16
SINGLE_FILE = "model.safetensors"
MAX_SHARD_BYTES = 50 * 10**9
"""The default of transformers."""


def find_checkpoint(given: Path) -> Path:
    """The checkpoint `given`, or the newest complete one of the run `given`. UserError if there is none."""
    if os.path.lexists(given / MANIFEST_FILE):
        return given
    newest = latest_complete(given / "checkpoints") if (given / "checkpoints").is_dir() else None
    if newest is None:
        there = "holds no complete checkpoint" if given.is_dir() else "no such folder"
        raise UserError(there, str(given), "give a run's folder, or a checkpoint like RUN/checkpoints/step_000100")
    return newest


def export(
    given: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    trust_remote_code: bool = False,
    say: Say = logger.info,
) -> Path:
    """Write a plain Hugging Face folder from a checkpoint, and verify that it loads and computes the same. Returns `out`.

    Args:
        given: A checkpoint, or a run, which stands for its newest checkpoint.
        out: The folder to make. It must not exist.
        dtype: `bf16`, `fp16` or `fp32`; None: the dtype of the model that training started from.
        max_shard_bytes: Largest size of a weights file; a model that fits is one file.
        trust_remote_code: Whether code in the checkpoint may run.
        say: Prints a line.

    Raises:
        UserError: There is no such checkpoint, it is damaged, the disk has no room, or the written folder, which is then
            removed, does not compute the same.
    """
    source, out = find_checkpoint(Path(given)), Path(out)
    refuse_if_taken(out)
    manifest = read_manifest(source)
    if STATE_FILE not in manifest.files:
        raise UserError("holds weights only and is a plain model folder already", str(source), "copy it")
    # The checkpoint's names and shapes are those of the bf16 model.
    config = load_model_config(source, trust_remote_code)
    structure = dissect(build_meta_model(config, compute_dtype=torch.bfloat16, trust_remote_code=trust_remote_code))
    with OpenCheckpoint(source, structure) as opened:
        target = _target_dtype(dtype, opened.source_dtype)
        refuse_if_no_room(out, structure.param_count * 4 + SLACK_BYTES)
        plain = build_meta_model(config, compute_dtype=target, trust_remote_code=trust_remote_code)
        keep_fp32 = fp32_parameter_names(plain, target)
        rest = [name for name in manifest.files if _goes_along(name, source, trust_remote_code)]
        rounded = "" if target == torch.float32 else ", rounded (--dtype fp32 keeps what was trained)"
        say(f"{source}: step {opened.step}, to {out} as {str(target).removeprefix('torch.')}{rounded}")

        def units() -> Iterable[tuple[Unit, dict[str, torch.Tensor]]]:
            for unit in structure.units:
                masters, buffers = opened.masters(unit)
                yield unit, {name: _rounded(m, target, name in keep_fp32) for name, m in masters.items()} | buffers

        with FolderWriter(out) as folder:
            saved = read_json(source, "config.json", constants=True)
            folder.write_json("config.json", with_dtype(saved, str(target).removeprefix("torch.")))
            for name in rest:
                folder.copy_file(SOURCE_CARD if name == CARD else name, source / name)
            extra = opened.state.get("extra") or {}
            folder.write_bytes(CARD, card_text(source, extra, opened.step, saved, target).encode())
            run = run_of(source, opened.step)
            if run is not None and run.curve is not None:
                folder.copy_file(CURVE, run.curve)
            buffers = persistent_buffers(structure.model)
            described = [_described(unit, structure, buffers, target, keep_fp32) for unit in structure.units]
            _write_weights(folder, structure, units(), described, max_shard_bytes)
            folder.finish_plain(lambda: verify_export(folder.temp, opened, plain, keep_fp32, trust_remote_code, say))
    say(f"{out}: read back, loaded with transformers, every tensor and the logits equal")
    return out


def verify_export(
    folder: Path,
    opened: OpenCheckpoint,
    plain: PreTrainedModel,
    keep_fp32: set[str],
    trust_remote_code: bool,
    say: Say = logger.info,
) -> None:
    """Load a folder with transformers and compare it with the checkpoint: every tensor, and the logits of a few tokens.

    The other logits are those of a model built from the checkpoint's config with the loaded weights bound to it. This compares
    everything but the weights, too: config, buffers, ties.

    Raises:
        UserError: Something differs.
    """
    where, target = str(folder), plain.dtype
    try:
        with offline():
            made: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=target,
                output_loading_info=True,
                trust_remote_code=trust_remote_code,
                local_files_only=True,
                use_safetensors=True,
            )
    except (OSError, ValueError) as error:
        raise UserError(f"transformers cannot load it: {error}", where) from error
    loaded, info = made
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            raise UserError(f"transformers finds {kind}: {sorted(map(str, info[kind]))[:3]}", where)
    loaded = loaded.eval()
    state = loaded.state_dict()
    structure = dissect(plain)
    bound: dict[str, torch.Tensor] = {}
    for unit in structure.units:
        masters, buffers = opened.masters(unit)
        wanted = {name: _rounded(m, target, name in keep_fp32) for name, m in masters.items()} | buffers
        for name, tensor in wanted.items():
            if name not in state or state[name].dtype != tensor.dtype or not torch.equal(state[name], tensor):
                raise UserError(f"{name} is not what was trained", where)
            bound[name] = state[name]
    ids = torch.arange(TRIAL_TOKENS)[None] % plain.config.get_text_config().vocab_size
    own = persistent_buffers(plain)
    fixed = {name: buffer for name, buffer in plain.named_buffers() if name not in own}
    with torch.no_grad():
        theirs = loaded(input_ids=ids, use_cache=False).logits
        mine = functional_call(plain.eval(), {**fixed, **bound}, kwargs={"input_ids": ids, "use_cache": False}).logits
    if not torch.equal(theirs, mine):
        raise UserError(
            f"computes other logits than the checkpoint, by {(theirs - mine).abs().max().item():.3g}", where
        )
    if not bool(torch.isfinite(theirs).all()):
        say(f"warning: {where}: the logits are not finite")


def verify(given: str | Path, *, say: Say = logger.info) -> int:
    """Compare every byte of a checkpoint with its checksum. Returns the number of bytes.

    Args:
        given: A checkpoint, or a run, which stands for its newest checkpoint.
        say: Prints a line.

    Raises:
        UserError: Files are damaged or missing; names each, with its first damaged tensor.
    """
    folder = find_checkpoint(Path(given))
    files = read_manifest(folder, sizes=False).files
    if found := list(damages(folder, files)):
        lines = "\n".join(f"  {error.where}: {error.what}" for error in found)
        other = latest_complete(folder.parent, except_for=folder)
        raise UserError(
            f"{len(found)} of {len(files)} files damaged:\n{lines}",
            str(folder),
            f"restore them, or continue from {other}" if other else "restore them, or take another checkpoint",
        )
    total_bytes = sum(record.size for record in files.values())
    say(f"{folder}: {counted(len(files), 'file')}, {total_bytes:,} bytes, all checksums are right")
    return total_bytes


def _goes_along(name: str, source: Path, trust_remote_code: bool) -> bool:
    """Whether a file is copied: all are but weights, state, untrusted code, and what is written anew."""
    if name in ADAPTER_FILES:
        warn_left_out(str(source / name), "transformers would load the adapter on top of the trained weights")
    own = {"config.json", STATE_FILE, MANIFEST_FILE, MARKER_FILE, SOURCE_CARD}
    is_weights = name.endswith((*WEIGHT_SUFFIXES, ".index.json")) or name in ADAPTER_FILES
    is_code = name.endswith(".py") and not trust_remote_code
    return not is_weights and not is_code and name not in own and not name.startswith(STATE_FOLDER + "/")


def _target_dtype(asked: str | None, source_dtype: str | None) -> torch.dtype:
    if asked is not None:
        return torch_dtype(asked)
    return torch_dtype(source_dtype if source_dtype in ("float16", "float32") else "bfloat16")


def _rounded(master: torch.Tensor, target: torch.dtype, keep_fp32: bool) -> torch.Tensor:
    """The master in its exported dtype. bf16 is rounded as in training, to the very weights that training computed with."""
    if keep_fp32 or target == torch.float32:
        return master
    if target == torch.bfloat16:
        hi, lo = torch.empty_like(master, dtype=torch.bfloat16), torch.empty_like(master, dtype=torch.int16)
        split_(master.contiguous(), hi, lo)
        return hi
    rounded = master.to(target)
    if bool(rounded.isinf().any()):
        raise UserError("a weight is too large for fp16", remedy="export with --dtype bf16 or fp32")
    return rounded


def _described(
    unit: Unit,
    structure: Structure,
    buffers: Mapping[str, torch.Tensor],
    target: torch.dtype,
    keep_fp32: Collection[str],
) -> dict[str, torch.Tensor]:
    """Meta tensors like a unit's exported parameters and persistent buffers, by module name."""
    owner = unit_of_names(structure)
    found = {
        full: torch.empty(
            unit.layout.by_name[local].shape, dtype=torch.float32 if full in keep_fp32 else target, device="meta"
        )
        for local, full in unit.full_names()
    }
    return found | {name: b.detach().to("meta") for name, b in buffers.items() if owner[name] == unit.name}


def _write_weights(
    folder: FolderWriter,
    structure: Structure,
    units: Iterable[tuple[Unit, dict[str, torch.Tensor]]],
    described: Iterable[dict[str, torch.Tensor]],
    max_shard_bytes: int,
) -> None:
    """Write all weights under checkpoint names, into one file or into shards with an index, as transformers does.

    Args:
        folder: Receives the files.
        structure: The model.
        units: Module tensors of each unit, read when iterated: one unit is in memory at a time.
        described: For each unit, meta tensors of the same names, shapes and dtypes.
        max_shard_bytes: Largest size of a file, except for one larger tensor.
    """
    model = structure.model
    assert isinstance(model, PreTrainedModel), type(model)
    metas = [to_checkpoint(model, tensors) for tensors in described]
    shards = plan_shards([(key, meta) for unit in metas for key, meta in unit.items()], max_shard_bytes)
    names = [SINGLE_FILE] if len(shards) == 1 else [weights_file_name(n + 1, len(shards)) for n in range(len(shards))]
    weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    with ExitStack() as stack:
        # All shards are open at once, because a unit may be spread over several.
        writers = {
            name: stack.enter_context(folder.streamed_tensors(name, shard))
            for name, shard in zip(names, shards, strict=True)
        }
        for (_, tensors), wanted in zip(units, metas, strict=True):
            saved = to_checkpoint(model, tensors) if tensors else {}
            assert saved.keys() == wanted.keys(), sorted(saved.keys() ^ wanted.keys())[:3]
            for key, tensor in saved.items():
                writers[weight_map[key]](key, tensor)
    if len(shards) > 1:
        total = sum(meta.numel() * meta.element_size() for shard in shards for meta in shard.values())
        write_index(folder, weight_map, total)


def plan_shards(tensors: Sequence[tuple[str, torch.Tensor]], max_shard_bytes: int) -> list[dict[str, torch.Tensor]]:
    """The tensors, in order, in groups of at most `max_shard_bytes`; a larger tensor is a group by itself."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    room = max_shard_bytes
    for key, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if size > room and shards[-1]:
            shards.append({})
            room = max_shard_bytes
        shards[-1][key] = tensor
        room -= size
    return shards
