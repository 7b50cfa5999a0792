"""Dissect a Hugging Face causal language model into its layer stack and the units that its parameters move in.

No code here is specific to a family. The stack of decoder layers is found by its shape (the outermost `ModuleList` of
`num_hidden_layers` entries under the base model); everything else is the shell.

[Note: embedding or head]
The shell's parameters form two units. `embedding` is on the device when the step starts, and its gradient is complete when the
backward ends. `head` is loaded after the last layer, and its gradient leaves before the backward reaches the layers. Where a
module is registered does not tell when it is used (Gemma 3n registers its per-layer embedding after the layers), so the base
model's forward runs on a few tokens up to its first layer: the parameters it has read by then belong to `embedding`.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel
from transformers.core_model_loading import build_glob_alternation

from megatrain.errors import UserError
from megatrain.host_memory.layout import FlatLayout, Shard

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Unit:
    """Parameters that move together: `embedding`, `layer.0` .. `layer.L-1` or `head`.

    Attributes:
        prefix: Prepended to a layout name, gives the full Hugging Face name (`model.layers.3.`; empty for embedding and head).
        layout: May be empty (a tied head without a norm).
        layer: Index in the layer stack; None for embedding and head.
    """

    name: str
    prefix: str
    layout: FlatLayout
    layer: int | None = None

    def full_names(self) -> Iterator[tuple[str, str]]:
        """(layout name, full Hugging Face name) of each parameter."""
        return ((entry.name, self.prefix + entry.name) for entry in self.layout.entries)


@dataclass(frozen=True)
class Structure:
    """A dissected causal language model. Its parameters may be on meta: only shapes are read."""

    model: nn.Module  # the CausalLM, unchanged
    base_name: str  # attribute of the CausalLM that holds the base model (`model`, `transformer`, `gpt_neox`...)
    layers_name: str  # full name of the layer stack (`model.layers`)
    units: tuple[Unit, ...]  # embedding, the layers in order, head
    tied: dict[str, str] = field(default_factory=dict)
    """Alias -> the full name under which a tied tensor is kept, moved, updated and saved."""
    frozen: frozenset[str] = frozenset()
    """Full names of parameters that are not trained (`requires_grad` is False)."""
    undecayed: frozenset[str] = frozenset()
    """Full names of parameters without weight decay according to their modules: those of norms, and marked ones."""

    @property
    def embedding(self) -> Unit:
        return self.units[0]

    @property
    def head(self) -> Unit:
        return self.units[-1]

    @property
    def layers(self) -> tuple[Unit, ...]:
        return self.units[1:-1]

    @property
    def param_count(self) -> int:
        return sum(unit.layout.param_count for unit in self.units)

    @property
    def trained_count(self) -> int:
        """Parameters that are trained."""
        return sum(unit.layout.trained.param_count for unit in self.units)

    @property
    def first_trained_layer(self) -> int:
        """The first layer that has a backward: no parameter of the units before it is trained. L if the head alone is trained."""
        if self.embedding.layout.trained_numel:
            return 0
        return next((i for i, unit in enumerate(self.layers) if unit.layout.trained_numel), len(self.layers))

    def padded(self, shard: Shard) -> Structure:
        """The structure with layouts that can be cut into shards; the same for one shard."""
        if shard.count == 1:
            return self
        return replace(self, units=tuple(replace(unit, layout=shard.padded(unit.layout)) for unit in self.units))

    def layer_stack(self) -> nn.ModuleList:
        return self.model.get_submodule(self.layers_name)  # type: ignore[return-value]


def dissect(model: nn.Module) -> Structure:
    """Find the layer stack of a transformers CausalLM and divide its parameters into units.

    Raises:
        UserError: The model has no layer stack of this kind, or two layers share a parameter.
    """
    base_name = _base_name(model)
    layers_name = _find_layers(model, base_name)
    owner: dict[int, str] = {}
    tied: dict[str, str] = {}
    edges: dict[str, list[tuple[str, tuple[int, ...]]]] = {"embedding": [], "head": []}
    depth = len(model.get_submodule(layers_name))  # type: ignore[arg-type]
    layers: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in range(depth)]
    early = _read_before_layers(model, base_name, layers_name)
    named = model.named_parameters(remove_duplicate=False)
    # The base model first, whatever the order of registration: a tied tensor is kept under its first name.
    for name, parameter in sorted(named, key=lambda item: not item[0].startswith(base_name + ".")):
        if id(parameter) in owner:
            tied[name] = owner[id(parameter)]
            continue
        owner[id(parameter)] = name
        shape = tuple(parameter.shape)
        if name.startswith(layers_name + "."):
            index, local = name[len(layers_name) + 1 :].split(".", 1)
            layers[int(index)].append((local, shape))
        else:
            edges["embedding" if name in early else "head"].append((name, shape))
    shared = [f"{a} = {b}" for a, b in tied.items() if (layers_name + ".") in a or (layers_name + ".") in b]
    if shared:
        raise UserError(
            f"layers share parameters ({', '.join(shared[:3])}), which streaming does not support",
            remedy="this family is not supported by the host engine",
        )
    every = model.named_parameters(remove_duplicate=False)
    frozen = frozenset(name for name, parameter in every if not parameter.requires_grad)
    # What is computed in fp32 needs all of its bits: it is laid out like what is trained, and not updated.
    exact = fp32_parameter_names(model, torch.bfloat16) if frozen and isinstance(model, PreTrainedModel) else set()
    weights_alone = frozen - exact

    def unit(name: str, prefix: str, shapes: list[tuple[str, tuple[int, ...]]], layer: int | None = None) -> Unit:
        return Unit(name, prefix, _layout(shapes, [n for n, _ in shapes if prefix + n in weights_alone]), layer)

    units = (
        unit("embedding", "", edges["embedding"]),
        *(unit(f"layer.{i}", f"{layers_name}.{i}.", shapes, i) for i, shapes in enumerate(layers)),
        unit("head", "", edges["head"]),
    )
    return Structure(model, base_name, layers_name, units, tied, frozen, undecayed_parameters(model))


def fp32_parameter_names(model: PreTrainedModel, compute_dtype: torch.dtype) -> set[str]:
    """Full names of parameters and persistent buffers that transformers keeps in fp32 when a model computes in `compute_dtype`.

    These are the names in transformers' loading rules, and tensors that the family's code always creates in fp32 (some routers);
    the latter are found only if the model was built for `compute_dtype`.
    """
    if compute_dtype == torch.float32:
        return set()
    state = model.state_dict()
    names: set[str] = set()
    if model.config.dtype == compute_dtype:
        names = {name for name, tensor in state.items() if tensor.dtype == torch.float32}
    plan = model._get_dtype_plan(compute_dtype)
    if plan:
        pattern, _, _ = build_glob_alternation(list(plan))
        names |= {name for name in state if pattern.search(name)}
    return names


def undecayed_parameters(model: nn.Module) -> frozenset[str]:
    """Full names of parameters of norms, and of those that a model marks (`_no_weight_decay`, as Mamba does)."""
    found = set()
    for path, module in model.named_modules():
        is_norm = isinstance(module, nn.LayerNorm | nn.GroupNorm | nn.RMSNorm) or _NORM_CLASS.search(
            type(module).__name__
        )
        for name, parameter in module.named_parameters(recurse=False):
            if is_norm or getattr(parameter, "_no_weight_decay", False):
                found.add(f"{path}.{name}" if path else name)
    return frozenset(found)


_NORM_CLASS = re.compile(r"Norm(?!al)")


def _layout(shapes: list[tuple[str, tuple[int, ...]]], frozen: Collection[str]) -> FlatLayout:
    """Lay out matrices first, then norms and biases: one contiguous range with weight decay and one without, one kernel each.

    Frozen tensors come behind both.
    """
    return FlatLayout.of(sorted(shapes, key=lambda named: len(named[1]) < 2), frozen)


def _base_name(model: nn.Module) -> str:
    """Attribute that holds the base model; the CausalLM calls it and applies the head to its hidden states."""
    name = getattr(model, "base_model_prefix", "")
    if name and isinstance(getattr(model, name, None), nn.Module):
        return name
    children = [n for n, child in model.named_children() if any(isinstance(m, nn.ModuleList) for m in child.modules())]
    if len(children) == 1:
        return children[0]
    raise UserError(
        f"{type(model).__name__} has no base model that can be separated from its head",
        remedy="only decoder-only models with AutoModelForCausalLM are supported",
    )


def _find_layers(model: nn.Module, base_name: str) -> str:
    base = model.get_submodule(base_name)
    config: Any = getattr(base, "config", None) or getattr(model, "config", None)
    count = getattr(config, "num_hidden_layers", None)
    if count is None and hasattr(config, "get_text_config"):
        count = getattr(config.get_text_config(), "num_hidden_layers", None)
    lists = {name: module for name, module in base.named_modules() if isinstance(module, nn.ModuleList)}
    found = [
        name
        for name, module in lists.items()
        # Skip lists inside layers, which may have `count` entries too.
        if len(module) == count and not any(name.startswith(outer + ".") for outer in lists)
    ]
    if not found or not count:
        raise UserError(
            f"{type(model).__name__}: no stack of {count} decoder layers found under '{base_name}'",
            remedy="only decoder-only models with one stack of `num_hidden_layers` layers are supported",
        )
    return f"{base_name}.{min(found, key=lambda name: name.count('.'))}"  # the outermost


class _FirstLayerReached(Exception):
    pass


class LayerStandIn(nn.Module):
    """Takes a layer's place in HF's layer stack: the layer's attributes, but no parameters.

    HF's loops read attributes such as `attention_type` from their layers. Attributes not found here are looked up in the real
    layer, which is kept out of the module tree so that it is not moved, bound or counted.
    """

    def __init__(self, layer: nn.Module):
        super().__init__()
        object.__setattr__(self, "_layer", layer)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "_layer"), name)


class _Stop(LayerStandIn):
    """Ends the forward of `_read_before_layers`."""

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _FirstLayerReached


class _ReadRecorder(TorchFunctionMode):
    """Records which of the given tensors (id -> name) are arguments of torch functions."""

    def __init__(self, names: dict[int, str]):
        super().__init__()
        self._names = names
        self.read: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and id(leaf) in self._names:
                self.read.add(self._names[id(leaf)])
        return func(*args, **(kwargs or {}))


def _read_before_layers(model: nn.Module, base_name: str, layers_name: str) -> set[str]:
    """Full names of the parameters that the base model's forward reads before the first layer. See [Note: embedding or head]."""
    prefix, layers_prefix = base_name + ".", layers_name + "."
    shell_names = [n for n, _ in model.named_parameters() if n.startswith(prefix) and not n.startswith(layers_prefix)]
    # Each is a single zero expanded to the parameter's shape: no memory, however large the vocabulary.
    parameters = {name: model.get_parameter(name) for name in shell_names}
    zeros = {name: torch.zeros((), dtype=p.dtype).expand(p.shape) for name, p in parameters.items()}
    stops = nn.ModuleList(_Stop(layer) for layer in model.get_submodule(layers_name))  # type: ignore[arg-type]
    base = with_submodule(model, layers_name, stops).get_submodule(base_name)
    bound = {name.removeprefix(prefix): tensor for name, tensor in zeros.items()}
    ids = torch.zeros((1, 8), dtype=torch.int64)
    recorder = _ReadRecorder({id(tensor): name for name, tensor in zeros.items()})
    try:
        with torch.no_grad(), recorder:
            functional_call(base, bound, kwargs={"input_ids": ids, "use_cache": False})
    except _FirstLayerReached:
        return recorder.read
    except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError) as error:
        logger.debug("forward before the first layer failed (%s): all its parameters go to the embedding", error)
    return set(shell_names)


def attention_shape(config: Any) -> tuple[int, int, int] | None:
    """(heads, key-value heads, head size) of a text config; None if it has no attention heads or its layers differ."""
    try:
        heads, dim = getattr(config, "num_attention_heads", None), getattr(config, "head_dim", None)
        kv_heads = getattr(config, "num_key_value_heads", None)
    except RuntimeError:  # transformers raises for config values that differ between layers (Gemma 4)
        return None
    if not isinstance(heads, int):
        return None
    return heads, kv_heads or heads, dim or config.hidden_size // heads


def attention_window(config: Any) -> int | None:
    """Smallest attention window of any layer, in tokens; None if every layer sees the whole row."""
    text = config.get_text_config()
    try:
        kinds = getattr(text, "layer_types", None)
        sizes = [getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size")]
    except RuntimeError:  # as in `attention_shape`
        return None
    if kinds is not None and not any("sliding" in kind or "chunked" in kind for kind in kinds):
        return None
    return min((size for size in sizes if isinstance(size, int) and size > 0), default=None)


def shallow_copy(module: nn.Module) -> nn.Module:
    """Copy a module without its submodules and tensors; replacing one of them in the copy does not change `module`."""
    twin = copy.copy(module)
    for attribute in ("_modules", "_parameters", "_buffers"):
        setattr(twin, attribute, dict(getattr(module, attribute)))
    return twin


def owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """(module that holds the tensor, attribute name in it) of a full parameter or buffer name."""
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def with_submodule(root: nn.Module, path: str, replacement: nn.Module) -> nn.Module:
    """Copy `root` with `replacement` at `path`. Only modules along the path are copied, shallowly; `root` is not changed."""
    twin = shallow_copy(root)
    first, _, rest = path.partition(".")
    child = twin._modules[first]
    assert child is not None
    twin._modules[first] = with_submodule(child, rest, replacement) if rest else replacement
    return twin


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that are part of a checkpoint, by full name (a router's correction bias, for example)."""
    names = set(model.state_dict().keys())
    return {name: buffer for name, buffer in model.named_buffers() if name in names}
