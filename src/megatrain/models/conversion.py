"""Convert between checkpoint tensors and module tensors, by transformers' own rules.

A checkpoint may store one tensor per expert where the module fuses all experts, or use other prefixes than the module tree.
transformers has the rules of every family for both directions (`conversion_mapping`). Its functions are semi-public: only this
file calls them, for one unit's part of a checkpoint at a time.
"""

from __future__ import annotations

import functools
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
from megatrain.models.structure import Structure, owner_of, persistent_buffers

_KNOWN_VERSIONS = "megatrain is known to work with 5.17 to 5.24"

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
        f"transformers {transformers.__version__} has moved the functions that convert checkpoints ({error}); {_KNOWN_VERSIONS}"
    ) from error


@dataclass(frozen=True)
class KeyPlan:
    """Assignment of checkpoint keys to units."""

    units: dict[str, list[str]]  # unit name -> checkpoint keys, sorted
    unexpected: list[str]  # keys of no tensor of the model, except those that the family declares harmless


class Conversion:
    """Converts checkpoint tensors to a model's module tensors, one unit at a time; `to_checkpoint` is the inverse.

    The model's parameters stay on meta, and its buffers are not changed.
    """

    def __init__(self, structure: Structure):
        _check_signatures()
        assert isinstance(structure.model, PreTrainedModel), type(structure.model)
        self.model: PreTrainedModel = structure.model
        self.mapping: list[Any] = get_model_conversion_mapping(self.model)
        self.unit_of = unit_of_names(structure)
        self._places: dict[str, tuple[nn.Module, str, torch.Tensor]] = {}
        """Module and attribute of each parameter and persistent buffer, with the meta tensor or buffer that stays there."""
        for name in self.unit_of:
            module, leaf = owner_of(self.model, name)
            self._places[name] = module, leaf, getattr(module, leaf)

    @property
    def compares_on_meta(self) -> bool:
        """Whether `to_model` accepts meta tensors: one family's rules require the CPU."""
        return not any(getattr(entry, "force_cpu", False) for entry in self.mapping)

    def plan(self, keys: Iterable[str]) -> KeyPlan:
        """Assign checkpoint keys to the units that their tensors belong to."""
        state = self.model.state_dict()
        renamings = [entry for entry in self.mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in self.mapping if isinstance(entry, WeightConverter)]
        prefix = self.model.base_model_prefix
        units: dict[str, list[str]] = {}
        unexpected: list[str] = []
        # Sorted because some renamings are enabled by a key that sorts before the keys they rename.
        for key in sorted(keys):
            name, _ = rename_source_key(key, renamings, converters, prefix, state)
            if name not in state and key in state:
                name, _ = rename_source_key(key, [], [], base_model_prefix=prefix, meta_state_dict=state)
            if name in self.unit_of:
                units.setdefault(self.unit_of[name], []).append(key)
            else:
                unexpected.append(key)
        # The family drops the keys that it declares as leftovers of older versions (for example `rotary_emb.inv_freq`).
        info = SimpleNamespace(missing_keys=set(), unexpected_keys=set(unexpected))
        self.model._adjust_missing_and_unexpected_keys(info)  # type: ignore[arg-type]
        return KeyPlan(units, sorted(info.unexpected_keys))

    def to_model(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return module tensors by full name, in the checkpoint's dtypes.

        Args:
            tensors: The checkpoint tensors of one unit of `plan`; on the CPU, or all on meta to check shapes only.

        Raises:
            UserError: A tensor's shape differs from the model's, or the family's conversion fails.
        """
        # The rule "*: None" overrides the dtype of the meta parameters: nothing is cast, so nothing is rounded.
        device_map = {"": "meta" if any(tensor.is_meta for tensor in tensors.values()) else "cpu"}
        config = LoadStateDictConfig(weight_mapping=self.mapping, dtype_plan={"*": None}, device_map=device_map)
        load = functools.partial(convert_and_load_state_dict_in_model, load_config=config)
        try:
            with _no_progress_bar():
                info, _ = load(model=self.model, state_dict=dict(tensors))
            self._refuse_errors(info)
            current = {name: getattr(module, leaf) for name, (module, leaf, _) in self._places.items()}
            return {name: now.detach() for name, now in current.items() if now is not self._places[name][2]}
        finally:
            for module, leaf, tensor in self._places.values():
                (module._parameters if leaf in module._parameters else module._buffers)[leaf] = tensor  # type: ignore[index]

    def _refuse_errors(self, info: Any) -> None:
        problems = [
            f"{name} has shape {tuple(found)} in the checkpoint, the config makes it {tuple(expected)}"
            for name, found, expected in sorted(info.mismatched_keys)
        ]
        problems += [f"{name}: {str(text).strip().splitlines()[-1]}" for name, text in info.conversion_errors.items()]
        if problems:
            more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
            raise UserError("; ".join(problems[:3]) + more, remedy="config.json and weights do not belong together")


def to_checkpoint(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return checkpoint tensors for the module tensors of one unit; views of the input if no conversion is needed."""
    return revert_weight_conversion(model, dict(tensors))


def unit_of_names(structure: Structure) -> dict[str, str]:
    """Full name -> unit name, for all parameters, their tied aliases and persistent buffers."""
    owner = {full: unit.name for unit in structure.units for _, full in unit.full_names()}
    owner |= {alias: owner[name] for alias, name in structure.tied.items()}
    layer = re.compile(re.escape(structure.layers_name) + r"\.(\d+)\.")
    for name in persistent_buffers(structure.model):
        match = layer.match(name)
        owner[name] = f"layer.{match[1]}" if match else structure.embedding.name
    return owner


def _check_signatures() -> None:
    """Raise if transformers has changed the functions used here; it does not guarantee them between versions."""
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
                f"transformers {transformers.__version__}: {function.__name__} no longer has the argument "
                f"{', '.join(sorted(missing))}; {_KNOWN_VERSIONS}"
            )


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Disable transformers' progress bar: one bar per unit would flood the console."""
    enabled = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            hf_logging.enable_progress_bar()
