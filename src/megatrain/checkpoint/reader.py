"""Reads checkpoints back into the planes, bit for bit, and finds the newest complete one.

Nothing is trusted without a manifest, and every byte used is compared with its checksum. It does not matter how the weights
were sharded, or whether the store keeps split or whole masters.

[Note: lazy reading]
`RunningLoad` restores unit after unit in a thread, in forward order, straight into the planes; the weights of one unit are the
only extra memory. Each unit has a future. Fetching a unit's weights waits for it as it waits for the unit's updates, so the
first forward starts when the first units are restored, and the others stream in ahead of it. After an error the futures of the
missing units raise it, every time: the planes hold a mixture, on which nobody may train.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from megatrain.checkpoint.format import (
    FORMAT_NAME,
    MANIFEST_FILE,
    PIECE_BYTES,
    STATE_BYTES,
    STATE_FILE,
    STATE_FOLDER,
    STATE_VALUES,
    EngineState,
    Manifest,
    RunExtra,
    SafetensorsReader,
    SavedState,
    checked,
    damaged,
    from_json,
    read_manifest,
    read_verified,
    state_key,
    tensor_crc32,
    verify_file,
)
from megatrain.errors import MegatrainError, UserError
from megatrain.host_memory.layout import BLOCK_ELEMENTS, SCALES, elements_per_value, values_of
from megatrain.host_memory.store import HostStore, UnitPlanes, join
from megatrain.models.conversion import Conversion
from megatrain.models.structure import Structure, Unit
from megatrain.models.weights import find_weight_files, load_weights, resolve_ties, write_masters
from megatrain.optim.blocks import CODES, decode, encode
from megatrain.optim.spec import OptimizerSpec
from megatrain.paths import parse_json, read_json
from megatrain.units import dtype_name

logger = logging.getLogger(__name__)

READ_THREADS = 4

Box = tuple[slice, ...]
"""A part of a tensor, a slice of each dimension."""


class OpenCheckpoint:
    """A complete checkpoint whose small files and headers were verified. Tensors are verified as they are read.

    A context manager. Errors of damaged files name the newest other checkpoint in the same folder.

    Args:
        directory: The checkpoint.
        structure: The model; nobody else may use its module tree while units are read.
        optim: The optimizer that continues from it; None if only masters are read.
        convert_states: Convert states that are stored in another floating-point type than the optimizer's, instead of refusing.

    Raises:
        UserError: Not a complete checkpoint, one of another model or optimizer, or damaged.
    """

    def __init__(
        self,
        directory: str | Path,
        structure: Structure,
        optim: OptimizerSpec | None = None,
        convert_states: bool = False,
    ):
        self.directory, self._convert_states = Path(directory), convert_states
        self._structure, self._optim = structure, optim
        with self._naming_another(), ExitStack() as stack:
            self._open(stack)
            self._stack = stack.pop_all()

    def _open(self, stack: ExitStack) -> None:
        directory, structure = self.directory, self._structure
        manifest = read_manifest(directory)
        saved = read_state(directory, manifest)
        # including those that only transformers reads: a damaged tokenizer is a damaged checkpoint
        for name, record in manifest.files.items():
            if not name.endswith(".safetensors"):
                verify_file(directory, name, record)
        self.step = manifest.step
        checked(EngineState, saved.state, directory / STATE_FILE)
        self.state: dict[str, Any] = from_json(saved.state, directory / STATE_FILE)
        self.source_dtype = saved.source_dtype
        self._frozen = frozenset(saved.frozen)
        self._crcs: dict[str, int] = {}
        for unit in saved.units.values():
            self._crcs |= unit.weights_crc32
        self._conversion = Conversion(structure)
        if self._optim is not None:
            _refuse_other_optimizer(directory, saved.optimizer, self._optim)
        _refuse_other_model(directory, self._crcs.keys(), structure, self._conversion)
        self._pool = stack.enter_context(ThreadPoolExecutor(READ_THREADS, "checkpoint-read"))
        self._weights: dict[str, SafetensorsReader] = {}
        self._states: dict[str, SafetensorsReader] = {}
        for name, record in manifest.files.items():
            if name.endswith(".safetensors"):
                reader = stack.enter_context(SafetensorsReader(directory / name, record))
                kind = self._states if name.startswith(STATE_FOLDER + "/") else self._weights
                kind.update(dict.fromkeys(reader.names, reader))
        self._refuse_other_states()
        self._plan = self._conversion.plan(self._weights)
        self._refuse_larger_weights()

    def __enter__(self) -> OpenCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._stack.close()

    def weights(self, unit: Unit) -> dict[str, torch.Tensor]:
        """Weights and persistent buffers of a unit by module name, in their saved dtype, verified."""
        with self._naming_another():
            keys = self._plan.units.get(unit.name, [])
            tensors = dict(zip(keys, self._pool.map(lambda key: self._weights[key].read(key), keys), strict=True))
            found = resolve_ties(self._structure, self._conversion.to_model(tensors), str(self.directory))
            for name, tensor in found.items():
                if tensor_crc32(tensor) != self._crcs.get(name):
                    what = f"{name} differs from what was trained: its conversion is not exact"
                    raise damaged(self.directory, what)
            for _, full in unit.full_names():
                if full not in found:
                    raise damaged(self.directory, f"{full} is in no weights file")
            return found

    def masters(self, unit: Unit) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """(exact fp32 masters, persistent buffers) of a unit by module name, verified. Does not read the optimizer's states."""
        found, masters = self.weights(unit), {}
        with self._naming_another():
            for _, full in unit.full_names():
                weight, lo_key = found.pop(full), state_key("lo", full)
                if lo_key in self._states:
                    weight = join(weight.contiguous(), self._states[lo_key].read(lo_key))
                masters[full] = weight.float()
        return masters, found

    def restore(self, unit: Unit, store: HostStore, buffers: Mapping[str, torch.Tensor]) -> None:
        """Restore masters, optimizer states and buffers of a unit, verified.

        Raises:
            UserError: Damaged; names file and tensor. The unit's planes hold a mixture.
        """
        found = self.weights(unit)
        with self._naming_another():
            for name in found.keys() & buffers.keys():
                buffers[name].copy_(found[name])
            with store.restoring(unit.name) as planes:
                jobs = [
                    self._pool.submit(_restore, planes, local, full, found[full], self._states)
                    for local, full in unit.full_names()
                ]
                for job in jobs:
                    job.result()

    def boxes(self, unit: Unit, wanted: Mapping[str, Sequence[Box]]) -> dict[str, list[torch.Tensor]] | None:
        """Parts of a unit's state, not verified: name -> for each box (planes, box), master and states in fp32.

        Args:
            unit: The unit.
            wanted: Full name -> boxes of the whole tensor.

        Returns:
            None if the family's conversion changes a tensor, the unit has buffers, or states are 8-bit codes, so that it must be
            read whole.
        """
        names = {full for _, full in unit.full_names()}
        shapes = {full: unit.layout.by_name[local].shape for local, full in unit.full_names()}
        assert self._optim is not None
        keys = [state_key(state.name, full) for state in self._optim.states for full in names]
        if any(self._states[key].dtype(key) in CODES for key in keys):
            return None
        if set(self._plan.units.get(unit.name, [])) != names or not all(self._is_plain(n, shapes[n]) for n in wanted):
            return None
        return {full: [self._box(full, box) for box in boxes] for full, boxes in wanted.items()}

    def _is_plain(self, full: str, shape: tuple[int, ...]) -> bool:
        """Whether the conversion changed neither the name nor a byte of a weight."""
        reader = self._weights.get(full)
        return (
            reader is not None and reader.recorded_crc32(full) == self._crcs.get(full) and reader.shape(full) == shape
        )

    def _box(self, full: str, box: Box) -> torch.Tensor:
        master, lo_key = self._weights[full].read_box(full, box), state_key("lo", full)
        if lo_key in self._states:
            master = join(master, self._states[lo_key].read_box(lo_key, box))
        assert self._optim is not None
        keys = [state_key(state.name, full) for state in self._optim.states]
        return torch.stack([master.float(), *(self._states[key].read_box(key, box).float() for key in keys)])

    def _refuse_other_states(self) -> None:
        """Refuse other shapes, and states that are missing or of another dtype."""
        saved = {key.partition("/")[0]: self._states[key].dtype(key) for key in self._states}
        states = {name: dtype for name, dtype in saved.items() if name != "lo" and not name.endswith(SCALES)}
        if self._optim is not None:
            states = {state.name: state.dtype for state in self._optim.states}
        for unit in self._structure.units:
            for entry, (local, full) in zip(unit.layout.entries, unit.full_names(), strict=True):
                trained = unit.layout.is_trained(local)
                if self._optim is not None and (full not in self._frozen) != trained:
                    then, now = ("frozen", "trained") if trained else ("trained", "frozen")
                    raise UserError(
                        f"{full} was {then} when it was written and is {now} now",
                        str(self.directory),
                        "set train.freeze and train.only as they were, or start from its weights: give the checkpoint as the "
                        "model",
                    )
                if self._optim is not None and not trained:
                    continue
                for name, dtype in states.items():
                    key = state_key(name, full)
                    if key not in self._states:
                        if self._optim is None and full in self._frozen:
                            continue
                        raise damaged(self.directory, f"{key} is in no state file")
                    shape = self._states[key].shape(key)
                    if shape != entry.shape:
                        what = f"is a checkpoint of another model: {full} has shape {shape}, not {entry.shape}"
                        raise UserError(what, str(self.directory))
                    found = self._states[key].dtype(key)
                    if found in CODES:
                        self._refuse_other_scales(state_key(name + SCALES, full), entry.numel)
                    if found != dtype and not (self._convert_states and (found.is_floating_point or found in CODES)):
                        raise UserError(
                            f"holds {key} as {_word(found)}, the optimizer keeps it as {_word(dtype)}",
                            str(self.directory),
                            "set optim.moments as it was, or allow it: --allow-changes optim (from Python: "
                            "load(..., convert_states=True))",
                        )
        changed = {name: dtype for name, dtype in states.items() if saved.get(name, dtype) != dtype}
        for name, dtype in changed.items():
            kinds = f"{_word(saved[name])} in {self.directory}, {_word(dtype)} from now on"
            logger.warning("%s of the optimizer: %s%s", name, kinds, " (rounded)" if dtype.itemsize <= 2 else "")

    def _refuse_other_scales(self, key: str, numel: int) -> None:
        """Refuse codes without the scales of their blocks."""
        if key not in self._states:
            raise damaged(self.directory, f"{key} is in no state file")
        shape, dtype, blocks = self._states[key].shape(key), self._states[key].dtype(key), -(-numel // BLOCK_ELEMENTS)
        if (shape, dtype) != ((blocks,), torch.float32):
            raise damaged(self.directory, f"{key} is {dtype} {shape}, not fp32 ({blocks},)")

    def _refuse_larger_weights(self) -> None:
        """Refuse a unit with more values than the model's, before memory is allocated for them: conversions keep the number."""
        own = dict.fromkeys((unit.name for unit in self._structure.units), 0)
        for name, tensor in self._structure.model.state_dict().items():
            own[self._conversion.unit_of[name]] += tensor.numel()
        for unit, keys in self._plan.units.items():
            found = sum(math.prod(self._weights[key].shape(key)) for key in keys)
            if found > own[unit]:
                what = f"is a checkpoint of another model: {unit} has {found:,} values, the model's {own[unit]:,}"
                raise UserError(what, str(self.directory))

    def verify_share(self, share: int, shares: int) -> None:
        """Compare every `shares`-th tensor with its checksum; all shares together read every byte."""
        piece = mmap.mmap(-1, PIECE_BYTES)
        with self._naming_another():
            for name, reader in sorted({**self._weights, **self._states}.items())[share::shares]:
                reader.verify(name, piece)

    @contextmanager
    def _naming_another(self) -> Iterator[None]:
        """Add the newest other checkpoint to the remedy of an error of damaged files."""
        try:
            yield
        except UserError as error:
            other = None
            if "damaged" in error.what and "newest other" not in (error.remedy or ""):
                other = latest_complete(self.directory.parent, except_for=self.directory)
            if other is None:
                raise
            raise UserError(error.what, error.where, f"{error.remedy}; the newest other one is {other}") from error


class RunningLoad:
    """A load that runs in a thread; see [Note: lazy reading].

    Args:
        opened: The checkpoint; closed at the end.
        units: The units to restore, in this order.
        store, buffers: See `OpenCheckpoint.restore`.
        after_unit: Called in the thread when a unit was restored, before its future is done.
    """

    def __init__(
        self,
        opened: OpenCheckpoint,
        units: Sequence[Unit],
        store: HostStore,
        buffers: Mapping[str, torch.Tensor],
        after_unit: Callable[[Unit], object] = lambda unit: None,
    ):
        self.directory = opened.directory
        self.futures: dict[str, Future[None]] = {unit.name: Future() for unit in units}
        """By unit name; done when the unit is restored."""
        self._opened, self._units, self._store, self._buffers = opened, list(units), store, buffers
        self._after_unit = after_unit
        self._cancelled = False
        # A daemon, as a save's thread is: `cancel` waits for it, the interpreter's end does not.
        self._thread = threading.Thread(target=self._run, name="checkpoint-load", daemon=True)
        self._thread.start()

    def wait(self, names: Iterable[str] | None = None) -> None:
        """Block until these units, or all, are restored. Raises the load's error."""
        for name in list(self.futures) if names is None else names:
            self.futures[name].result()

    def done(self) -> bool:
        return not self._thread.is_alive()

    def error(self) -> BaseException | None:
        """Why the load failed; None if it has not."""
        return next((f.exception() for f in self.futures.values() if f.done() and f.exception()), None)

    def cancel(self) -> None:
        """Stop after the unit in progress, and wait for it. The other units stay missing."""
        self._cancelled = True
        self._thread.join()

    def _run(self) -> None:
        error: BaseException | None = None
        with self._opened:
            for unit in self._units:
                try:
                    if error is None:
                        if self._cancelled:
                            raise MegatrainError(f"{self.directory}: the load was cancelled before {unit.name}")
                        self._opened.restore(unit, self._store, self._buffers)
                        self._after_unit(unit)
                except BaseException as problem:  # noqa: BLE001  whoever waits for a unit gets it
                    error = problem
                if error is None:
                    self.futures[unit.name].set_result(None)
                else:
                    self.futures[unit.name].set_exception(error)


def read_state(directory: Path, manifest: Manifest | None = None) -> SavedState:
    """`state.json` of a complete checkpoint, verified. UserError for a folder of weights only."""
    manifest = manifest or read_manifest(directory)
    if STATE_FILE not in manifest.files:
        raise UserError("holds weights only, no training state", str(directory), "load it as a model folder")
    path = directory / STATE_FILE
    text = read_verified(directory, STATE_FILE, manifest.files[STATE_FILE], STATE_BYTES)
    return checked(SavedState, parse_json(text, path, most_values=STATE_VALUES), path)


def holds_state(folder: Path) -> bool:
    """Whether a model folder is a checkpoint with training state, complete or not."""
    if not all(os.path.lexists(folder / name) for name in (MANIFEST_FILE, STATE_FILE)):
        return False
    found = read_json(folder, MANIFEST_FILE)
    return isinstance(found, dict) and found.get("format") == FORMAT_NAME


def check_model_folder(folder: Path) -> None:
    """Check the weight files of a model folder from their headers; where it is a checkpoint, its manifest and all sizes.

    Raises:
        UserError: As `find_weight_files` and `read_manifest`.
    """
    if holds_state(folder):
        with _without_state_remedy(folder):
            read_manifest(folder)
    find_weight_files(folder)


def source_dtype_of(folder: Path) -> str | None:
    """The dtype of the weights that a checkpoint's training started from; None if the folder is none, or does not know."""
    try:
        return read_state(folder).source_dtype if holds_state(folder) else None
    except UserError:
        return None


def load_masters(
    folder: str | Path,
    structure: Structure,
    store: HostStore,
    buffers: Mapping[str, torch.Tensor],
    check: Callable[[], None] = lambda: None,
) -> None:
    """`load_weights`, but from a checkpoint the exact fp32 weights: what transformers loads there is their bf16 half.

    Raises:
        UserError: As `load_weights`; or the checkpoint is damaged, or one of another model.
    """
    folder = Path(folder)
    if not holds_state(folder):
        load_weights(folder, structure, store, buffers, check)
        return
    with _without_state_remedy(folder), OpenCheckpoint(folder, structure) as opened:
        logger.info("%s: starting from the exact fp32 weights of step %d, without its moments", folder, opened.step)
        for unit in structure.units:
            check()
            masters, saved = opened.masters(unit)
            write_masters(store.units[unit.name], unit, masters, "start from an older checkpoint", check)
            for name in saved.keys() & buffers.keys():
                buffers[name].copy_(saved[name])


@contextmanager
def _without_state_remedy(folder: Path) -> Iterator[None]:
    """Tell how a checkpoint without its state can still be a model."""
    try:
        yield
    except UserError as error:
        if "damaged" not in error.what:
            raise
        more = f"to start from its bf16 weights alone, remove {MANIFEST_FILE} and {STATE_FILE} from a copy of {folder}"
        raise UserError(error.what, error.where, f"{error.remedy}; {more}" if error.remedy else more) from error


def saved_extra(directory: Path) -> dict[str, Any]:
    """What the trainer stores in a checkpoint; reads nothing else of it. UserError if the trainer did not write it."""
    extra = from_json(read_state(directory).state.get("extra"), directory / STATE_FILE) or {}
    if not isinstance(extra, dict) or "step" not in extra:
        raise UserError("was not written by `megatrain train`", str(directory), "load it with HostEngine.load")
    checked(RunExtra, extra, directory / STATE_FILE)
    return extra


def latest_complete(
    checkpoints: str | Path, *, except_for: Path | None = None, before_step: int | None = None
) -> Path | None:
    """The newest of `complete_checkpoints`, or None."""
    found = complete_checkpoints(checkpoints, except_for=except_for, before_step=before_step)
    return found[max(found)] if found else None


def complete_checkpoints(
    checkpoints: str | Path, *, except_for: Path | None = None, before_step: int | None = None
) -> dict[int, Path]:
    """Complete checkpoints in a folder by step; of two of one step the one finished last. Logs what is ignored, and why.

    Complete means a valid manifest and all files in their full size; their content is verified when it is read. A folder of
    weights only does not count.

    Args:
        checkpoints: The folder.
        except_for: A checkpoint that does not count.
        before_step: Count only checkpoints of lower steps.
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
            manifest = read_manifest(folder)
            if STATE_FILE not in manifest.files:
                raise UserError("holds weights only")
            if before_step is None or manifest.step < before_step:
                found.append((manifest.step, (folder / MANIFEST_FILE).stat().st_mtime, folder))
        except UserError as error:
            logger.warning("ignoring %s: %s", folder, error.what)
    return {step: path for step, _, path in sorted(found)}


def is_complete(directory: str | Path) -> bool:
    """Whether a folder has a valid manifest and all files in their full size."""
    try:
        read_manifest(Path(directory))
    except UserError:
        return False
    return True


def _restore(
    planes: UnitPlanes, local: str, full: str, weight: torch.Tensor, states: Mapping[str, SafetensorsReader]
) -> None:
    """Restore master and states of the part of a tensor that the planes hold. Of a whole tensor, states and lo are read straight
    into the planes."""
    wanted, own = planes.part(local)
    if wanted.start == wanted.stop:
        return
    shape = planes.layout.by_name[local].shape
    whole = wanted.stop - wanted.start == math.prod(shape)

    def read_into(key: str, plane: torch.Tensor) -> None:
        if whole and states[key].dtype(key) == plane.dtype:
            states[key].read_into(key, plane[own].view(shape))
        else:  # all of it is verified
            plane[own].copy_(states[key].read(key).view(-1)[wanted])

    lo_key = state_key("lo", full)
    if lo_key not in states:
        planes.write_master(local, weight)  # saved as fp32, it is the master
    elif planes.lo is not None and not planes.layout.is_trained(local):
        planes.write_master(local, join(weight.contiguous(), states[lo_key].read(lo_key)))
    elif planes.lo is not None:
        planes.hi[own].copy_(weight.reshape(-1)[wanted])
        read_into(lo_key, planes.lo)
    else:
        lo = states[lo_key].read(lo_key)
        join(weight.reshape(-1)[wanted], lo.view(-1)[wanted], out=planes.hi[own])
    if not planes.layout.is_trained(local):
        return
    for name in (kind for kind in planes.states if elements_per_value(kind) == 1):
        plane, key = planes.states[name], state_key(name, full)
        saved, scales_key = states[key].dtype(key), state_key(name + SCALES, full)
        if saved not in CODES and plane.dtype not in CODES:
            read_into(key, plane)
        elif saved == plane.dtype:
            read_into(key, plane)
            scales = states[scales_key].read(scales_key)[values_of(name + SCALES, wanted)]
            planes.states[name + SCALES][values_of(name + SCALES, own)].copy_(scales)
        else:
            values = states[key].read(key).view(-1)
            values = decode(values, states[scales_key].read(scales_key)) if saved in CODES else values.float()
            if plane.dtype in CODES:
                scales = planes.states[name + SCALES][values_of(name + SCALES, own)]
                encode(values[wanted], plane[own], scales)
            else:
                plane[own].copy_(values[wanted])


def _refuse_other_model(directory: Path, saved: Set[str], structure: Structure, conversion: Conversion) -> None:
    own = conversion.unit_of.keys() - structure.tied.keys()
    missing, extra = sorted(own - saved), sorted(saved - own)
    if missing or extra:
        parts = [f"it lacks {', '.join(missing[:3])}"] if missing else []
        parts += [f"it has {', '.join(extra[:3])}"] if extra else []
        raise UserError(f"is a checkpoint of another model: {'; '.join(parts)}", str(directory))


def _word(dtype: torch.dtype) -> str:
    """`bf16`, `fp16`, `fp32`, `int8` (codes with scales); torch's name for what only a checkpoint of somebody else holds."""
    if dtype in CODES:
        return "int8"
    return dtype_name(dtype) if dtype in (torch.bfloat16, torch.float16, torch.float32) else str(dtype)


def _refuse_other_optimizer(directory: Path, saved: str, optim: OptimizerSpec) -> None:
    if saved != optim.name:
        raise UserError(
            f"was trained with {saved}, whose states {optim.name} does not have",
            str(directory),
            f"load it with {saved}, or start from its weights with {optim.name}: give the checkpoint as the model",
        )
