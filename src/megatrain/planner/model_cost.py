"""What the planner knows of a model: element counts of its units, and what their layers compute and could save per token.

The counts come from running Hugging Face's own layer code on meta tensors, so no weights are read.

[Note: what a layer saves]
In addition to its weights, a compiled layer that keeps everything saves the inputs and outputs of its matrix products and of its
attention, each tensor once. The pointwise work between them (norms, rotary embedding, activation functions, residual sums) is
fused and recomputed from those. Checked on an H200 at Qwen3-8B's shape: 137.6 kB per token measured, 137.5 kB counted.

[Note: linear in the row length]
Per token, every count is a + b x T, where T is the row length: the products of attention, and its scores without a fused kernel,
grow with T. So a layer is traced at two short lengths, and no tensor of the real length is ever allocated.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedConfig

from megatrain.engine.parity_check import token_wise
from megatrain.models.build import build_meta_model
from megatrain.models.chunked_mlp import ModuleKey, modules_in_chunks
from megatrain.models.structure import LayerStandIn, Structure, Unit, dissect, with_submodule
from megatrain.models.templates import template_groups
from megatrain.models.trainable import Trainable

logger = logging.getLogger(__name__)

TRACED_LENGTHS = (128, 256)
"""Multiples of the block size of linear attention; a model with fewer positions is traced at shorter lengths."""
TOP_K_NAMES = (
    "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts", "top_k"
)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """A quantity per token as a function of the row length T [tokens]: constant + slope x T."""

    constant: float
    slope: float = 0.0

    def at(self, tokens: float) -> float:
        return self.constant + self.slope * tokens

    @classmethod
    def through(cls, lengths: tuple[int, int], values: tuple[float, float]) -> Line:
        """The line through the values at two lengths."""
        short, long = lengths
        slope = (values[1] - values[0]) / (long - short)
        return cls(values[0] - slope * short, slope)


@dataclass(frozen=True)
class LayerCost:
    """What a decoder layer computes and could save, per token and in bf16; see [Note: linear in the row length]."""

    saved_bytes: Line  # everything a backward can use, the layer's output included: what `keep` holds
    product_flops: Line  # matrix products of the forward
    attention_flops: Line  # fused attention of the forward; half of the full square where it is causal
    attention_saved_bytes: Line = Line(
        0.0
    )  # output of fused attention and its log-sum-exp: what `keep_attention` holds
    attention_input_bytes: Line = Line(0.0)  # queries, keys and values; attention's backward computes their gradients
    token_wise_bytes: Line = Line(0.0)  # part of `saved_bytes` in modules that may be computed in chunks of tokens
    token_wise_product_bytes: Line = Line(0.0)  # their products' results that a backward reads: what `keep_mlp` holds
    token_wise_flops: Line = Line(0.0)  # part of `product_flops` in these modules
    token_wise_parameters: int = 0  # parameters of these modules, in all


@dataclass(frozen=True)
class ModelShape:
    """A causal language model as the planner sees it."""

    name: str
    embedding: int  # elements of the unit, padding included
    layers: tuple[int, ...]  # elements of each layer
    head: int  # elements of the unit; a tied head is a final norm, or empty
    groups: tuple[int, ...]  # template group of each layer
    costs: tuple[LayerCost, ...]  # of a layer of each group
    hidden: int  # width of the hidden states
    vocabulary: int  # rows of embedding and head
    tied: bool  # embedding and head share one tensor
    frozen: tuple[int, ...] = ()  # elements of each unit that are not trained; empty: none
    norm_in_chunks: bool = False  # whether the final norm may be computed in chunks of tokens

    @property
    def parameters(self) -> int:
        return self.embedding + sum(self.layers) + self.head

    @property
    def depth(self) -> int:
        return len(self.layers)

    @cached_property
    def sizes(self) -> np.ndarray:
        """`layers` as (L,) floats."""
        return np.array(self.layers, dtype=np.float64)

    @cached_property
    def group_index(self) -> np.ndarray:
        """`groups` as (L,) integers."""
        return np.array(self.groups, dtype=np.int64)

    @cached_property
    def unit_elements(self) -> dict[str, int]:
        """Elements of each unit by name, in forward order."""
        layers = {f"layer.{i}": elements for i, elements in enumerate(self.layers)}
        return {"embedding": self.embedding, **layers, "head": self.head}

    @cached_property
    def trained_elements(self) -> dict[str, int]:
        """Trained elements of each unit by name, in forward order."""
        whole = self.unit_elements
        frozen = self.frozen or (0,) * len(whole)
        return {name: whole[name] - less for name, less in zip(whole, frozen, strict=True)}

    @cached_property
    def trained_layers(self) -> tuple[int, ...]:
        """Trained elements of each layer."""
        return tuple(self.trained_elements[f"layer.{i}"] for i in range(self.depth))

    @cached_property
    def first_trained_layer(self) -> int:
        """The first layer that has a backward; L if the head alone is trained."""
        if self.trained_elements["embedding"]:
            return 0
        return next((i for i, count in enumerate(self.trained_layers) if count), self.depth)

    @property
    def head_matrix(self) -> int:
        """Elements of the matrix that computes logits."""
        return self.vocabulary * self.hidden

    def cost(self, layer: int) -> LayerCost:
        return self.costs[self.groups[layer]]

    def forward_flops(self, tokens: float) -> float:
        """FLOPs per token of a forward, head included, in rows of `tokens` tokens."""
        costs = map(self.cost, range(self.depth))
        return sum(c.product_flops.at(tokens) + c.attention_flops.at(tokens) for c in costs) + 2.0 * self.head_matrix


def shape_of(
    config: PreTrainedConfig,
    *,
    name: str | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    trainable: Trainable | None = None,
) -> ModelShape:
    """The shape of a model from its config alone, and of what is trained of it.

    Raises:
        UserError: The model cannot be built, or has no layer stack that could be streamed.
    """
    model = build_meta_model(
        config,
        compute_dtype=torch.bfloat16,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
    )
    places = token_wise(config, attn_implementation=attn_implementation, trust_remote_code=trust_remote_code)
    if trainable is not None:
        trainable.apply(model)
    return shape_of_structure(dissect(model), name or str(config.model_type), places)


def shape_of_structure(structure: Structure, name: str, places: Mapping[ModuleKey, str] | None = None) -> ModelShape:
    """The shape of a model that was built on meta for bf16 compute and dissected.

    Args:
        places: Token-wise modules, from `parity_check.token_wise`; None: nothing is computed in chunks of tokens.
    """
    places = places or {}
    config: Any = structure.model.config
    text = config.get_text_config()
    groups = template_groups(list(structure.layer_stack()))
    buffers = dict(structure.model.named_buffers())

    def arguments(length: int) -> Any:
        return layer_arguments(structure, torch.zeros((1, length), dtype=torch.int64), buffers)

    units = [structure.layers[groups.index(group)] for group in sorted(set(groups))]
    return ModelShape(
        name=name,
        embedding=structure.embedding.layout.numel,
        layers=tuple(unit.layout.numel for unit in structure.layers),
        head=structure.head.layout.numel,
        groups=tuple(groups),
        costs=tuple(trace_layer(structure, unit, arguments, places) for unit in units),
        hidden=text.hidden_size,
        vocabulary=text.vocab_size,
        tied=any(not alias.startswith(structure.base_name + ".") for alias in structure.tied),
        frozen=tuple(unit.layout.frozen_numel for unit in structure.units) if structure.frozen else (),
        norm_in_chunks=bool(modules_in_chunks(structure.model.get_submodule(structure.base_name), places, ())),
    )


# ---------------------------------------------------------------------------------------------------------------------
# What a layer is called with

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a layer."""


class _Reached(Exception):
    """The first layer was called; carries its arguments."""

    def __init__(self, arguments: Arguments):
        super().__init__()
        self.arguments = arguments


class _Capture(LayerStandIn):
    """Ends the base model's forward at the first layer."""

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _Reached((args, kwargs))


def layer_arguments(structure: Structure, ids_BT: torch.Tensor, buffers: Mapping[str, torch.Tensor]) -> Arguments:
    """The arguments of the first layer in Hugging Face's own loop, on the device of `ids_BT`, with all parameters zero.

    Args:
        structure: The dissected model, parameters on meta.
        ids_BT: (B, T) int64.
        buffers: The model's buffers by full name, on the same device.
    """
    prefix, layers_prefix = structure.base_name + ".", structure.layers_name + "."

    def belongs(name: str) -> bool:
        return name.startswith(prefix) and not name.startswith(layers_prefix)

    # A single zero expanded to each shape: torch.zeros would write gigabytes for an embedding.
    bound = {
        name.removeprefix(prefix): torch.zeros((), dtype=p.dtype, device=ids_BT.device).expand(p.shape)
        for name, p in structure.model.named_parameters()
        if belongs(name)
    }
    bound |= {name.removeprefix(prefix): buffer for name, buffer in buffers.items() if belongs(name)}
    stops = nn.ModuleList(_Capture(layer) for layer in structure.layer_stack())
    base = with_submodule(structure.model, structure.layers_name, stops).get_submodule(structure.base_name)
    try:
        with torch.no_grad():
            functional_call(base, bound, kwargs={"input_ids": ids_BT, "use_cache": False})
    except _Reached as reached:
        return reached.arguments
    raise AssertionError("the base model's forward reached no layer")


# ---------------------------------------------------------------------------------------------------------------------
# Counting

_NEEDS_VALUES = (
    NotImplementedError, RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError, AssertionError, StopIteration
)  # fmt: skip
"""What a family's layer code may raise on tensors without values."""


def trace_layer(
    structure: Structure,
    unit: Unit,
    arguments_at: Callable[[int], Arguments],
    places: Mapping[ModuleKey, str] | None = None,
) -> LayerCost:
    """Cost of one layer. Where its code does not run on meta tensors, a warning, and an estimate from its matrices.

    Args:
        structure, unit: The model, and the layer in it.
        arguments_at: What the layer is called with at a row length.
        places: Modules that may be computed in chunks of tokens, see `find_token_wise`.
    """
    config: Any = structure.model.config
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or TRACED_LENGTHS[1]
    lengths = TRACED_LENGTHS if positions >= TRACED_LENGTHS[1] else (max(1, positions // 4), max(2, positions // 2))
    assert unit.layer is not None, unit.name
    layer = structure.layer_stack()[unit.layer]
    paths = modules_in_chunks(layer, places or {}, ())
    try:
        short, long = (_count(structure, layer, arguments_at(length), paths) for length in lengths)
    except _NEEDS_VALUES as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        logger.warning(
            "%s: the layer's code needs tensor values (%s); memory and time are estimated from its matrices",
            unit.name,
            reason,
        )
        return _from_matrices(structure, unit)
    lines = {name: Line.through(lengths, (short[name], long[name])) for name in short}
    parameters = sum(p.numel() for path in paths for p in layer.get_submodule(path).parameters())
    return LayerCost(**lines, token_wise_parameters=parameters)


def _count(structure: Structure, layer: nn.Module, captured: Arguments, paths: Sequence[str]) -> dict[str, float]:
    """The fields of `LayerCost` that are lines, per token, at the length of the captured arguments."""
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), captured)
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    hidden_BTD = next(leaf for leaf in leaves if leaf.ndim == 3 and leaf.is_floating_point())
    state = {name: tensor.to("meta") for name, tensor in (*layer.named_parameters(), *layer.named_buffers())}
    counts = _Counts(known=(*state.values(), *leaves))
    with (
        torch.no_grad(),
        _experts_counted(layer, structure, counts),
        _token_wise_counted(layer, paths, counts),
        _AttentionMode(counts),
        _ProductsMode(counts),
    ):
        functional_call(layer, state, args, kwargs)
    return {name: total / (hidden_BTD.shape[0] * hidden_BTD.shape[1]) for name, total in counts.totals.items()}


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Counts:
    """Running totals of one forward; each storage counts once. See [Note: what a layer saves].

    Args:
        known: The layer's weights and inputs, which are no activations of it.
    """

    def __init__(self, known: Sequence[torch.Tensor]):
        self._seen = {_key(tensor) for tensor in known}
        self._alive: list[torch.Tensor] = []  # keeps storages alive, so that no address is reused
        self._products: dict[int, int] = {}  # bytes of results of token-wise products, by storage
        self.token_wise = False
        """Whether a token-wise module is running."""
        self.totals = dict.fromkeys(
            (
                "saved_bytes", "product_flops", "attention_flops", "attention_saved_bytes", "attention_input_bytes",
                "token_wise_bytes", "token_wise_product_bytes", "token_wise_flops",
            ),
            0.0,
        )  # fmt: skip

    def save(self, *tensors: Any) -> None:
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and _key(tensor) not in self._seen:
                self._seen.add(_key(tensor))
                self._alive.append(tensor)
                self.save_bytes(tensor.untyped_storage().nbytes())

    def save_bytes(self, nbytes: float) -> None:
        self.totals["saved_bytes"] += nbytes
        self.totals["token_wise_bytes"] += nbytes * self.token_wise

    def compute(self, flops: float) -> None:
        self.totals["product_flops"] += flops
        self.totals["token_wise_flops"] += flops * self.token_wise

    def add_product(self, left: Any, right: Any, out: Any, flops: float) -> None:
        self.save(left, right, out)
        self.compute(flops)
        if self.token_wise:
            nbytes = out.untyped_storage().nbytes()
            self.totals["token_wise_product_bytes"] += nbytes
            self._products[_key(out)] = nbytes

    def leave_token_wise(self, out: Any) -> None:
        """A token-wise module returned `out`. If `out` is a product's result, the module's backward does not read it."""
        if isinstance(out, torch.Tensor):
            self.totals["token_wise_product_bytes"] -= self._products.get(_key(out), 0)


class _AttentionMode(TorchFunctionMode):
    """Counts scaled_dot_product_attention as the fused kernel of a GPU; on meta it would run as plain operations."""

    def __init__(self, counts: _Counts):
        super().__init__()
        self._counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        named = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
        q_BHTd, k_BHTd, v_BHTd = named["query"], named["key"], named["value"]
        batch, heads, length, _ = q_BHTd.shape
        # the kernel writes (B, T, H, d), so the next operation needs no copy
        out = q_BHTd.new_empty(batch, length, heads, v_BHTd.shape[-1]).transpose(1, 2)
        log_sum_exp = q_BHTd.new_empty(batch, heads, length, dtype=torch.float32)
        self._counts.save(q_BHTd, k_BHTd, v_BHTd, out, log_sum_exp)
        totals = self._counts.totals
        totals["attention_saved_bytes"] += out.nbytes + log_sum_exp.nbytes
        totals["attention_input_bytes"] += q_BHTd.nbytes + k_BHTd.nbytes + v_BHTd.nbytes
        share = 0.5 if named.get("is_causal") or named.get("attn_mask") is not None else 1.0
        width = q_BHTd.shape[-1] + v_BHTd.shape[-1]
        totals["attention_flops"] += 2 * batch * heads * length * k_BHTd.shape[2] * width * share
        return out


class _ProductsMode(TorchDispatchMode):
    """Counts matrix products and convolutions, however the code spells them."""

    def __init__(self, counts: _Counts):
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        aten = torch.ops.aten
        if func in (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default):
            left, right = args[:2] if func in (aten.mm.default, aten.bmm.default) else args[1:3]
            self._counts.add_product(left, right, out, 2.0 * left.numel() * right.shape[-1])
        elif func is aten.convolution.default:
            left, right = args[:2]
            self._counts.add_product(left, right, out, 2.0 * left.numel() * right.numel() / max(1, right.shape[0]))
        return out


@contextlib.contextmanager
def _forwards_replaced(replacements: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    for module, forward in replacements.items():
        module.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module in replacements:
            del module.forward


def _experts_counted(
    layer: nn.Module, structure: Structure, counts: _Counts
) -> contextlib.AbstractContextManager[None]:
    """Inside, routed experts are counted instead of run: which expert a token goes to depends on values, how many do not."""
    top_k = _top_k(structure)

    def counted(stacked: list[nn.Parameter]) -> Callable[..., torch.Tensor]:
        def forward(hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            chosen = min(top_k or stacked[0].shape[0], stacked[0].shape[0])
            uses = hidden.numel() // hidden.shape[-1] * chosen
            for matrices in stacked:
                rows, columns = matrices.shape[-2:]
                counts.save_bytes(uses * (rows + columns) * hidden.element_size())
                counts.compute(2.0 * uses * rows * columns)
            return torch.empty_like(hidden)

        return forward

    return _forwards_replaced({module: counted(stacked) for module, stacked in _stacked_experts(layer).items()})


def active_parameters(structure: Structure) -> int:
    """Parameters that compute a token: of routed experts only the chosen ones."""
    inactive, top_k = 0, _top_k(structure)
    for layer in structure.layer_stack():
        for stacked in _stacked_experts(layer).values():
            experts = stacked[0].shape[0]
            whole = sum(matrices.numel() for matrices in stacked)
            inactive += whole - whole * min(top_k or experts, experts) // experts
    return structure.param_count - inactive


def _stacked_experts(layer: nn.Module) -> dict[nn.Module, list[nn.Parameter]]:
    """Modules with several matrices of shape (E, out, in), as transformers stores experts."""
    found = {}
    for module in layer.modules():
        stacked = [p for p in module.parameters(recurse=False) if p.ndim == 3 and p.shape[0] > 1]
        if len(stacked) > 1 and len({p.shape[0] for p in stacked}) == 1:
            found[module] = stacked
    return found


def _token_wise_counted(
    layer: nn.Module, paths: Sequence[str], counts: _Counts
) -> contextlib.AbstractContextManager[None]:
    """Inside, the modules at `paths` are also counted separately; their input is not part of them."""

    def counted(module: nn.Module) -> Callable[..., Any]:
        def forward(hidden: torch.Tensor) -> Any:
            counts.save(hidden)
            counts.token_wise = True
            try:
                out = type(module).forward(module, hidden)
            finally:
                counts.token_wise = False
            counts.leave_token_wise(out)
            return out

        return forward

    return _forwards_replaced({module: counted(module) for module in map(layer.get_submodule, paths)})


def _top_k(structure: Structure) -> int | None:
    config: Any = structure.model.config
    text = config.get_text_config()
    return next((value for name in TOP_K_NAMES if isinstance(value := getattr(text, name, None), int)), None)


def _from_matrices(structure: Structure, unit: Unit) -> LayerCost:
    """An estimate: every matrix reads and writes one activation; attention and routing are left out."""
    saved = flops = 0.0
    top_k = _top_k(structure)
    for entry in unit.layout.entries:
        if len(entry.shape) >= 2:
            uses = min(top_k or entry.shape[0], entry.shape[0]) if len(entry.shape) == 3 else 1
            rows, columns = entry.shape[-2:]
            saved += 2 * uses * (rows + columns)
            flops += 2.0 * uses * rows * columns
    return LayerCost(Line(saved), Line(flops), Line(0.0))
