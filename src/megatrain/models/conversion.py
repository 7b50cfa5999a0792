"""Names and shapes of a checkpoint against those of the modules, by transformers' own rules.

A checkpoint may hold one tensor per expert where the module holds all of them fused, or other prefixes than the module tree.
transformers knows both directions for every family (`conversion_mapping`). Its functions for that are semi-public: this file
is the only one that calls them, on the part of a checkpoint that belongs to one unit at a time.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging as hf_logging

from megatrain.errors import MegatrainError, UserError
from megatrain.models.structure import Structure, persistent_buffers

try:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        convert_and_load_state_dict_in_model,
        rename_source_key,
        revert_weight_conversion,
    )
    from transformers.modeling_utils import LoadStateDictConfig
except ImportError as error:
    raise MegatrainError(
        f"transformers {transformers.__version__} has moved the functions that convert checkpoints ({error}); "
        "megatrain is known to work with 5.17 to 5.24"
    ) from error


@dataclass(frozen=True)
class KeyPlan:
    """Which checkpoint keys make which unit.

    Attributes:
        units: Unit name -> checkpoint keys, in sorted order.
        unexpected: Keys that belong to no tensor of the model and that the family does not declare harmless.
    """

    units: dict[str, list[str]]
    unexpected: list[str]


@dataclass(frozen=True)
class _Slot:
    """Where a parameter or persistent buffer hangs in the module tree, and the meta tensor (or buffer) that stays there."""

    module: nn.Module
    leaf: str
    tensor: torch.Tensor


class Conversion:
    """Converts checkpoint tensors to the module tensors of one model, a unit at a time; `to_checkpoint` goes back.

    The model's parameters are on meta and stay on meta; its buffers are not changed either.
    """

    def __init__(self, structure: Structure):
        _check_signatures()
        assert isinstance(structure.model, PreTrainedModel), type(structure.model)
        self.model: PreTrainedModel = structure.model
        self.mapping: list[Any] = get_model_conversion_mapping(self.model)
        self.unit_of = unit_of_names(structure)
        self._slots = {name: self._slot(name) for name in self.unit_of}

    @property
    def compares_on_meta(self) -> bool:
        """Whether `to_model` takes meta tensors: one family's rules insist on the CPU."""
        return not any(getattr(entry, "force_cpu", False) for entry in self.mapping)

    def plan(self, keys: Iterable[str]) -> KeyPlan:
        """Sort checkpoint keys by the unit that their tensors end up in."""
        state = self.model.state_dict()
        renamings = [entry for entry in self.mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in self.mapping if isinstance(entry, WeightConverter)]
        prefix = self.model.base_model_prefix
        units: dict[str, list[str]] = {}
        unexpected: list[str] = []
        # Sorted, because some renamings are switched on by a key that sorts before those they rename.
        for key in sorted(keys):
            name, _ = rename_source_key(key, renamings, converters, prefix, state)
            if name not in state and key in state:
                name, _ = rename_source_key(key, [], [], base_model_prefix=prefix, meta_state_dict=state)
            if name in self.unit_of:
                units.setdefault(self.unit_of[name], []).append(key)
            else:
                unexpected.append(key)
        return KeyPlan(units, self._without_harmless(unexpected))

    def to_model(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Module tensors from checkpoint tensors, by full name, in the checkpoint's own dtypes.

        Args:
            tensors: Checkpoint tensors that belong together, those of one unit in `plan`; on the CPU, or all on meta, which
                compares shapes and computes nothing.

        Raises:
            UserError: A tensor has another shape than the model's, or the family's conversion fails on it.
        """
        # The rule "*: None" overrides the dtype of the meta parameters: nothing is cast, so nothing is rounded.
        on_meta = any(tensor.is_meta for tensor in tensors.values())
        config = LoadStateDictConfig(
            weight_mapping=self.mapping, dtype_plan={"*": None}, device_map={"": "meta" if on_meta else "cpu"}
        )
        try:
            with _no_progress_bar():
                info, _ = convert_and_load_state_dict_in_model(
                    model=self.model, state_dict=dict(tensors), load_config=config
                )
            self._refuse_errors(info)
            return dict(self._replaced())
        finally:
            self._restore()

    def _slot(self, name: str) -> _Slot:
        path, _, leaf = name.rpartition(".")
        module = self.model.get_submodule(path)
        return _Slot(module, leaf, getattr(module, leaf))

    def _replaced(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, slot in self._slots.items():
            current = getattr(slot.module, slot.leaf)
            if current is not slot.tensor:
                yield name, current.detach()

    def _restore(self) -> None:
        for slot in self._slots.values():
            if slot.leaf in slot.module._parameters:
                slot.module._parameters[slot.leaf] = slot.tensor  # type: ignore[assignment]
            else:
                slot.module._buffers[slot.leaf] = slot.tensor

    def _refuse_errors(self, info: Any) -> None:
        problems = [
            f"{name} has shape {tuple(found)} in the checkpoint, the config makes it {tuple(expected)}"
            for name, found, expected in sorted(info.mismatched_keys)
        ]
        problems += [f"{name}: {str(text).strip().splitlines()[-1]}" for name, text in info.conversion_errors.items()]
        if problems:
            more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
            raise UserError("; ".join(problems[:3]) + more, remedy="config.json and weights do not belong together")

    def _without_harmless(self, unexpected: list[str]) -> list[str]:
        """Drop keys that the family declares as left over from older versions (`rotary_emb.inv_freq`, for example)."""
        info = SimpleNamespace(missing_keys=set(), unexpected_keys=set(unexpected))
        self.model._adjust_missing_and_unexpected_keys(info)  # type: ignore[arg-type]
        return sorted(info.unexpected_keys)


def to_checkpoint(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Checkpoint tensors from the module tensors of one unit; views of the input where no conversion is needed."""
    return revert_weight_conversion(model, dict(tensors))


def unit_of_names(structure: Structure) -> dict[str, str]:
    """Full name -> unit, for all parameters, their tied aliases, and persistent buffers."""
    owner = {full: unit.name for unit in structure.units for _, full in unit.full_names()}
    owner |= {alias: owner[name] for alias, name in structure.tied.items()}
    layer = re.compile(re.escape(structure.layers_name) + r"\.(\d+)\.")
    for name in persistent_buffers(structure.model):
        match = layer.match(name)
        owner[name] = f"layer.{match[1]}" if match else structure.embedding.name
    return owner


def _check_signatures() -> None:
    """transformers does not promise these functions; say what has changed instead of failing somewhere inside."""
    needed = {
        get_model_conversion_mapping: {"model"},
        rename_source_key: {"base_model_prefix", "meta_state_dict"},
        convert_and_load_state_dict_in_model: {"model", "state_dict", "load_config"},
        LoadStateDictConfig: {"weight_mapping", "dtype_plan", "device_map"},
    }
    for function, names in needed.items():
        missing = names - inspect.signature(function).parameters.keys()
        if missing:
            raise MegatrainError(
                f"transformers {transformers.__version__}: {function.__name__} has no argument "
                f"{', '.join(sorted(missing))} any more; megatrain is known to work with 5.17 to 5.24"
            )


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """One bar per unit would flood the console."""
    enabled = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            hf_logging.enable_progress_bar()
