"""What a decoder layer computes and could save, counted by running HF's own code on meta tensors.

[Note: what a layer saves]
A compiled layer that keeps everything saves, beside its weights, the inputs and outputs of its matrix products and of its
attention, each tensor once: the pointwise work between them (norms, rotary embedding, activation functions, residual sums) is
fused and computed again from those. Checked on an H200 at Qwen3-8B's shape: 137.6 kB a token measured, 137.5 kB counted.

[Note: linear in the row's length]
Per token, every count is a + b x T: scores of an attention without a fused kernel, and the attention's products, grow with the
row's length T. So a layer is traced at two short lengths, and no tensor of the real length is ever made.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NoReturn

import torch
from torch import nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from megatrain.models.chunked_mlp import Place, modules_in_chunks
from megatrain.models.structure import LayerStandIn, Structure, Unit, with_submodule

logger = logging.getLogger(__name__)

TRACED_LENGTHS = (128, 256)
"""Multiples of the blocks of linear attention; a model with fewer positions is traced at shorter ones."""
TOP_K_NAMES = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "top_k_experts",
    "top_k",
)


@dataclass(frozen=True)
class Line:
    """A quantity per token as a function of the row's length T [tokens]: constant + slope x T."""

    constant: float
    slope: float = 0.0

    def at(self, tokens: float) -> float:
        return self.constant + self.slope * tokens

    @classmethod
    def through(cls, lengths: tuple[int, int], values: tuple[float, float]) -> Line:
        """Through the values at two lengths."""
        short, long = lengths
        slope = (values[1] - values[0]) / (long - short)
        return cls(values[0] - slope * short, slope)


@dataclass(frozen=True)
class LayerCost:
    """A decoder layer, per token; see [Note: linear in the row's length].

    Attributes:
        saved_bytes: All that a backward can use, the layer's own output included: the `keep` policy.
        product_flops: Of the forward's matrix products.
        attention_flops: Of the forward's fused attention; half of the full square where it is causal.
        attention_saved_bytes: What the `attention` policy keeps: outputs of fused attention, logarithms of its sums.
        attention_input_bytes: Queries, keys and values, whose gradients the attention's backward makes.
        token_wise_bytes: The part of `saved_bytes` inside modules that may be computed in chunks of tokens.
        token_wise_product_bytes: Of these, results of matrix products that a backward reads: what the `mlp` policy keeps.
        token_wise_flops: The part of `product_flops` inside these modules.
        token_wise_parameters: Of these modules, not per token.
    """

    saved_bytes: Line
    product_flops: Line
    attention_flops: Line
    attention_saved_bytes: Line = Line(0.0)
    attention_input_bytes: Line = Line(0.0)
    token_wise_bytes: Line = Line(0.0)
    token_wise_product_bytes: Line = Line(0.0)
    token_wise_flops: Line = Line(0.0)
    token_wise_parameters: int = 0


def trace_layer(
    structure: Structure, unit: Unit, arguments: Captured, token_wise: Mapping[Place, str] | None = None
) -> LayerCost:
    """Count one layer. Where its code does not run on meta tensors, estimate it from its matrices, with a warning.

    Args:
        structure, unit: The model, and the layer in it.
        arguments: What the layer is called with at a length.
        token_wise: Modules that may be computed in chunks of tokens, see `token_wise_places`.
    """
    config: Any = structure.model.config
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or TRACED_LENGTHS[1]
    lengths = TRACED_LENGTHS if positions >= TRACED_LENGTHS[1] else (max(1, positions // 4), max(2, positions // 2))
    try:
        counts = [_run(structure, unit, arguments(length), token_wise or {}) for length in lengths]
    except _NO_VALUES as error:
        logger.warning(
            "%s: the layer's code does not run without values (%s); its memory and time are estimated from its matrices",
            unit.name,
            str(error).splitlines()[0] if str(error) else type(error).__name__,
        )
        return _from_matrices(structure, unit)
    lines = {
        one.name: Line.through(lengths, (getattr(counts[0], one.name), getattr(counts[1], one.name)))
        for one in fields(_Counts)
        if one.name != "token_wise_parameters"
    }
    return LayerCost(**lines, token_wise_parameters=counts[0].token_wise_parameters)


_NO_VALUES = (
    NotImplementedError, RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError, AssertionError, StopIteration
)  # fmt: skip
"""What HF's code of some family raises on tensors without values."""

Captured = Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]


class _Reached(Exception):
    """The first layer was called; carries its arguments."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]):
        super().__init__()
        self.args_, self.kwargs = args, kwargs


class _Capture(LayerStandIn):
    """Ends the forward at the first layer, with what it was called with."""

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _Reached(args, kwargs)


def layer_arguments(
    structure: Structure, ids_BT: torch.Tensor, buffers: dict[str, torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What HF's loop calls the first layer with, on the device of `ids_BT`; all of the shell's parameters are zero.

    Args:
        structure: The model taken apart, parameters on meta.
        ids_BT: (B, T) int64.
        buffers: The model's buffers by full name, on the same device.
    """
    prefix, layers_prefix = structure.base_name + ".", structure.layers_name + "."
    base_parameters = {
        name: p
        for name, p in structure.model.named_parameters()
        if name.startswith(prefix) and layers_prefix not in name
    }
    # One zero, seen as a tensor of the shape: torch.zeros would write to all of an embedding's gigabytes.
    bound = {
        name.removeprefix(prefix): torch.zeros((), dtype=p.dtype, device=ids_BT.device).expand(p.shape)
        for name, p in base_parameters.items()
    }
    bound |= {name.removeprefix(prefix): b for name, b in buffers.items() if name.startswith(prefix)}
    bound = {name: tensor for name, tensor in bound.items() if not (prefix + name).startswith(layers_prefix)}
    stops = nn.ModuleList(_Capture(layer) for layer in structure.layer_stack())
    base = with_submodule(structure.model, structure.layers_name, stops).get_submodule(structure.base_name)
    try:
        with torch.no_grad():
            functional_call(base, bound, kwargs={"input_ids": ids_BT, "use_cache": False})
    except _Reached as reached:
        return reached.args_, reached.kwargs
    raise AssertionError("the base model's forward reached no layer")


# ---------------------------------------------------------------------------------------------------------------------
# Counting


@dataclass(frozen=True)
class _Counts:
    """As `LayerCost`, at one length."""

    saved_bytes: float
    product_flops: float
    attention_flops: float
    attention_saved_bytes: float
    attention_input_bytes: float
    token_wise_bytes: float
    token_wise_product_bytes: float
    token_wise_flops: float
    token_wise_parameters: int


def _run(
    structure: Structure,
    unit: Unit,
    captured: tuple[tuple[Any, ...], dict[str, Any]],
    token_wise: Mapping[Place, str],
) -> _Counts:
    assert unit.layer is not None, unit.name
    layer = structure.layer_stack()[unit.layer]
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), captured)
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    hidden_BTD = next(leaf for leaf in leaves if leaf.ndim == 3 and leaf.is_floating_point())
    tokens = hidden_BTD.shape[0] * hidden_BTD.shape[1]
    state = {name: tensor.to("meta") for name, tensor in (*layer.named_parameters(), *layer.named_buffers())}
    ledger = _Saved({tensor.untyped_storage()._cdata for tensor in (*state.values(), *leaves)})
    paths = modules_in_chunks(layer, token_wise, ())
    with (
        torch.no_grad(),
        _experts_in_closed_form(layer, structure, ledger),
        _token_wise_apart(layer, paths, ledger),
        _Attention(ledger),
        _Products(ledger),
    ):
        functional_call(layer, state, args, kwargs)
    counted = {
        one.name: getattr(ledger, one.name) / tokens for one in fields(_Counts) if one.name != "token_wise_parameters"
    }
    parameters = sum(p.numel() for path in paths for p in layer.get_submodule(path).parameters())
    return _Counts(**counted, token_wise_parameters=parameters)


class _Saved:
    """Storages that the backward could use, each once; see [Note: what a layer saves].

    Args:
        known: Storages that are no activation of this layer: its weights and its inputs.
    """

    def __init__(self, known: set[int]):
        self._seen = known
        self._alive: list[torch.Tensor] = []  # so that no address is used twice
        self.saved_bytes = self.product_flops = self.attention_flops = 0.0
        self.attention_saved_bytes = self.attention_input_bytes = 0.0
        self.token_wise_bytes = self.token_wise_product_bytes = self.token_wise_flops = 0.0
        self._products: dict[int, int] = {}  # bytes of the results of token-wise products, by storage
        self.token_wise = False
        """Whether a token-wise module is running."""

    def add(self, *tensors: Any) -> None:
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self._seen:
                self._seen.add(tensor.untyped_storage()._cdata)
                self._alive.append(tensor)
                self.add_bytes(tensor.untyped_storage().nbytes())

    def add_bytes(self, nbytes: float) -> None:
        self.saved_bytes += nbytes
        self.token_wise_bytes += nbytes * self.token_wise

    def leave(self, out: Any) -> None:
        """A token-wise module gave `out`: if that is a product's result, no backward of the module reads it."""
        if isinstance(out, torch.Tensor):
            self.token_wise_product_bytes -= self._products.get(out.untyped_storage()._cdata, 0)

    def add_product(self, left: Any, right: Any, out: Any, flops: float) -> None:
        self.add(left, right, out)
        self.product_flops += flops
        if self.token_wise:
            self.token_wise_flops += flops
            self.token_wise_product_bytes += out.untyped_storage().nbytes()
            self._products[out.untyped_storage()._cdata] = out.untyped_storage().nbytes()


class _Attention(TorchFunctionMode):
    """Counts scaled_dot_product_attention as the fused kernel that it is on a GPU; on meta it would be its plain formula."""

    def __init__(self, ledger: _Saved):
        super().__init__()
        self._ledger = ledger

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        named = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
        q_BHTd, k_BHTd, v_BHTd = named["query"], named["key"], named["value"]
        batch, heads, length, _ = q_BHTd.shape
        # the kernel writes (B, T, H, d), so that what follows needs no copy
        out = q_BHTd.new_empty(batch, length, heads, v_BHTd.shape[-1]).transpose(1, 2)
        sums = q_BHTd.new_empty(batch, heads, length, dtype=torch.float32)
        self._ledger.add(q_BHTd, k_BHTd, v_BHTd, out, sums)
        self._ledger.attention_saved_bytes += out.nbytes + sums.nbytes
        self._ledger.attention_input_bytes += q_BHTd.nbytes + k_BHTd.nbytes + v_BHTd.nbytes
        share = 0.5 if named.get("is_causal") or named.get("attn_mask") is not None else 1.0
        width = q_BHTd.shape[-1] + v_BHTd.shape[-1]
        self._ledger.attention_flops += 2 * batch * heads * length * k_BHTd.shape[2] * width * share
        return out


class _Products(TorchDispatchMode):
    """Counts matrix products and convolutions, whatever way they were written."""

    def __init__(self, ledger: _Saved):
        super().__init__()
        self._ledger = ledger

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        operands = _operands(func, args)
        if operands is not None:
            left, right, flops = operands
            self._ledger.add_product(left, right, out, flops)
        return out


def _operands(func: Any, args: Any) -> tuple[torch.Tensor, torch.Tensor, float] | None:
    """(left, right, FLOPs) of a product, None of anything else."""
    aten = torch.ops.aten
    if func in (aten.mm.default, aten.bmm.default):
        left, right = args[:2]
    elif func in (aten.addmm.default, aten.baddbmm.default):
        left, right = args[1:3]
    elif func is aten.convolution.default:
        left, right = args[:2]
        return left, right, 2.0 * left.numel() * right.numel() / max(1, right.shape[0])
    else:
        return None
    return left, right, 2.0 * left.numel() * right.shape[-1]


@contextlib.contextmanager
def _experts_in_closed_form(layer: nn.Module, structure: Structure, ledger: _Saved) -> Iterator[None]:
    """Inside, routed experts are counted and not run: which tokens go where depends on values, how many do not.

    Experts are the modules that hold several matrices of one shape for each expert, (E, out, in), as transformers keeps them.
    """
    top_k = _top_k(structure)
    patched: list[nn.Module] = []
    for module in layer.modules():
        stacked = [p for p in module.parameters(recurse=False) if p.ndim == 3 and p.shape[0] > 1]
        if len(stacked) < 2 or len({p.shape[0] for p in stacked}) != 1:
            continue

        def count(hidden: torch.Tensor, *_: Any, stacked: list[nn.Parameter] = stacked, **__: Any) -> torch.Tensor:
            tokens = hidden.numel() // hidden.shape[-1]
            chosen = min(top_k or stacked[0].shape[0], stacked[0].shape[0])
            for matrices in stacked:
                elements = matrices.shape[1] + matrices.shape[2]
                flops = 2.0 * tokens * chosen * matrices.shape[1] * matrices.shape[2]
                ledger.add_bytes(tokens * chosen * elements * hidden.element_size())
                ledger.product_flops += flops
                ledger.token_wise_flops += flops * ledger.token_wise
            return torch.empty_like(hidden)

        module.forward = count  # type: ignore[method-assign]
        patched.append(module)
    try:
        yield
    finally:
        for module in patched:
            del module.forward


@contextlib.contextmanager
def _token_wise_apart(layer: nn.Module, paths: Sequence[str], ledger: _Saved) -> Iterator[None]:
    """Inside, what modules that may be computed in chunks save is counted apart too; their input is not theirs."""

    def counted(module: nn.Module) -> Callable[[torch.Tensor], Any]:
        def forward(hidden: torch.Tensor) -> Any:
            ledger.add(hidden)
            ledger.token_wise = True
            try:
                out = type(module).forward(module, hidden)
            finally:
                ledger.token_wise = False
            ledger.leave(out)
            return out

        return forward

    modules = [layer.get_submodule(path) for path in paths]
    for module in modules:
        module.forward = counted(module)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def _top_k(structure: Structure) -> int | None:
    config: Any = structure.model.config
    text = config.get_text_config()
    found = [value for name in TOP_K_NAMES if isinstance(value := getattr(text, name, None), int)]
    return found[0] if found else None


def _from_matrices(structure: Structure, unit: Unit) -> LayerCost:
    """Every matrix reads and writes an activation of its own; attention and routing are left out."""
    saved = flops = 0.0
    top_k = _top_k(structure)
    for entry in unit.layout.entries:
        if len(entry.shape) >= 2:
            uses = min(top_k or entry.shape[0], entry.shape[0]) if len(entry.shape) == 3 else 1
            rows, columns = entry.shape[-2:]
            saved += 2 * uses * (rows + columns)
            flops += 2.0 * uses * rows * columns
    return LayerCost(Line(saved), Line(flops), Line(0.0))
