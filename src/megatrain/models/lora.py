"""LoRA by peft: its own modules are injected into a model on meta before it is taken apart, and its base weights are frozen.

[Note: two models]
An injected model calls its base weights `q_proj.base_layer.weight`. Whatever reads model folders works with a plain twin, whose
names are Hugging Face's own; `Adapter.original` maps one to the other.

The layers run peft's own forward, so what it computes is what peft computes. Masters of the adapter are fp32 like all others.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from megatrain.errors import UserError
from megatrain.host_memory.store import HostStore, UnitPlanes
from megatrain.models.structure import Structure, dissect

NAME = "default"
"""The adapter's name in peft."""
BASE = ".base_layer."


@dataclass(frozen=True)
class Lora:
    """A low-rank adapter, in peft's terms.

    Attributes:
        rank: Rank of the update of each matrix.
        alpha: The update counts alpha / rank times, with `rslora` alpha / sqrt(rank) times.
        dropout: On the adapter's input.
        targets: Names of modules, or their ends; `all-linear`: every linear module of the layers.
    """

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: str | Sequence[str] = "all-linear"
    rslora: bool = False

    def __post_init__(self) -> None:
        if self.rank < 1 or self.alpha <= 0 or not 0.0 <= self.dropout < 1.0:
            raise UserError(f"{self}: rank is at least 1, alpha above 0, dropout in [0, 1)", "train.lora")


class Adapter:
    """An adapter that was injected into a model on meta.

    Args:
        model: The CausalLM; changed in place.
        lora: The adapter's settings.

    Attributes:
        plain: The structure of a twin of the model without the adapter, on meta.
        original: Full name in the model -> full name in the twin, of every parameter of the base.

    Raises:
        UserError: peft is not installed, or it cannot adapt the targets.
    """

    def __init__(self, model: nn.Module, lora: Lora):
        peft = _peft()
        self.plain, self._model = dissect(copy.deepcopy(model)), model
        layers_name = self.plain.layers_name
        targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
        self.config = peft.LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=targets,
            use_rslora=lora.rslora,
            task_type="CAUSAL_LM",
            fan_in_fan_out=any(type(module).__name__ == "Conv1D" for module in model.modules()),
        )
        names = [name for name, _ in model.named_modules() if name.startswith(layers_name + ".")]
        for target in [targets] if isinstance(targets, str) else targets:
            if target != "all-linear" and not any(name == target or name.endswith("." + target) for name in names):
                ends = sorted({name.rpartition(".")[2] for name in names})
                near = difflib.get_close_matches(target, ends, n=3, cutoff=0.0)
                remedy = f"names are like {', '.join(near)}"
                raise UserError(f"{target!r} matches no module of the layers", "train.lora.targets", remedy)
        try:
            peft.inject_adapter_in_model(self.config, model, NAME)
        except (ValueError, NotImplementedError, TypeError) as error:
            raise UserError(
                f"peft cannot adapt these modules: {error}", "train.lora.targets", "name linear modules of the layers"
            ) from error
        for module in model.modules():
            if hasattr(module, "reset_lora_parameters"):
                # These keywords name the place of the module: no two layers would share a template.
                module.kwargs = {}  # type: ignore[assignment]
        plain = dict(self.plain.model.named_parameters(remove_duplicate=False))
        self.original: dict[str, str] = {}
        outside: list[str] = []
        for name, _ in model.named_parameters(remove_duplicate=False):
            base = name.replace(BASE, ".")
            if base in plain:
                self.original[name] = base
            elif not name.startswith(layers_name + "."):
                outside.append(name)
        if outside:
            raise UserError(f"{outside[0]} is not in a layer", "train.lora.targets", "name modules of the layers only")

    def base_of(self, store: HostStore) -> Any:
        """The planes of the base under the names of the twin: in place of a store wherever masters are written."""
        injected = {base: name for name, base in self.original.items()}
        return SimpleNamespace(
            units={unit.name: _BasePlanes(store.units[unit.name], unit.prefix, injected) for unit in self.plain.units}
        )

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Inside, the model computes what its base computes: the reference model of a preference objective."""
        layers = [module for module in self._model.modules() if hasattr(module, "_disable_adapters")]
        for module in layers:
            module._disable_adapters = True  # type: ignore[assignment]
        try:
            yield
        finally:
            for module in layers:
                module._disable_adapters = False  # type: ignore[assignment]

    @torch.no_grad()
    def initial(self, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
        """(full name, fp32 values) of each parameter of the adapter by peft's rules: a pure function of seed and name."""
        for path, module in self._model.named_modules():
            if not hasattr(module, "reset_lora_parameters"):
                continue
            own = {name: p for name, p in module.named_parameters() if f".{NAME}." in name}
            real = {name: nn.Parameter(torch.empty(p.shape)) for name, p in own.items()}
            digest = hashlib.blake2b(f"{seed}/{path}/lora".encode(), digest_size=8).digest()
            with torch.random.fork_rng([]), _bound(module, real):
                torch.manual_seed(int.from_bytes(digest, "little") >> 1)
                module.reset_lora_parameters(NAME, True)  # type: ignore[operator]
            for name, parameter in real.items():
                yield f"{path}.{name}", parameter.detach()

    def save(self, folder: str | Path, parameters: Iterable[tuple[str, torch.Tensor]], base: str | None) -> None:
        """Write the folder that `peft.PeftModel.from_pretrained` loads.

        Args:
            folder: Made if needed.
            parameters: (full name, values) of at least the adapter's parameters.
            base: The base model's folder or hub id.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {
            f"base_model.model.{name.replace(f'.{NAME}.', '.')}": value.float().contiguous().clone()
            for name, value in parameters
            if name not in self.original
        }
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        config = copy.deepcopy(self.config)
        config.base_model_name_or_path, config.inference_mode = base, True
        config.save_pretrained(str(folder))

    def load(self, folder: str | Path, structure: Structure, store: HostStore) -> None:
        """Set the masters of the adapter from a PEFT adapter folder.

        Raises:
            UserError: It is an adapter of other modules or of another rank; nothing was changed.
        """
        own = {
            name: (unit, local)
            for unit in structure.units
            for local, name in unit.full_names()
            if name not in self.original
        }
        tensors = read_adapter(folder, own)
        for name, value in tensors.items():
            unit, local = own[name]
            if value.shape != (shape := unit.layout.by_name[local].shape):
                what = f"{name} has shape {tuple(value.shape)}, the engine's {shape}"
                raise UserError(what, str(folder), "set lora.rank as it was trained")
        for name, value in tensors.items():
            unit, local = own[name]
            store.units[unit.name].write_master(local, value)


class _BasePlanes:
    """The planes of one unit, whose tensors are named as in the twin."""

    def __init__(self, planes: UnitPlanes, prefix: str, injected: Mapping[str, str]):
        self._planes, self._prefix, self._injected = planes, prefix, injected

    def write_master(self, name: str, value: torch.Tensor) -> None:
        self._planes.write_master(self._injected[self._prefix + name].removeprefix(self._prefix), value)


def read_adapter(folder: str | Path, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """The tensors of a PEFT adapter folder under the names in the model, which must be exactly `names`.

    Raises:
        UserError: The folder holds no adapter as safetensors, or one of other modules.
    """
    file = Path(folder) / "adapter_model.safetensors"
    if not file.is_file():
        raise UserError("holds no adapter_model.safetensors", str(folder), "give a folder of save_adapter or of peft")
    found = {name.removeprefix("base_model.model."): value for name, value in load_file(file).items()}
    wanted = {name.replace(f".{NAME}.", "."): name for name in names}
    if different := sorted(found.keys() ^ wanted.keys()):
        where = "the folder" if different[0] in found else "the engine"
        raise UserError(
            f"is an adapter of other modules: only {where} has {different[0]}",
            str(folder),
            "set lora as it was trained",
        )
    return {wanted[name]: value for name, value in found.items()}


@contextlib.contextmanager
def _bound(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Inside, the module has these parameters."""
    before = {name: module.get_parameter(name) for name in parameters}

    def bind(values: Mapping[str, nn.Parameter]) -> None:
        for name, value in values.items():
            path, _, leaf = name.rpartition(".")
            module.get_submodule(path)._parameters[leaf] = value

    bind(parameters)
    try:
        yield
    finally:
        bind(before)


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise UserError("LoRA needs the package peft", "train.lora", "pip install 'megatrain[lora]'") from error
    return peft
