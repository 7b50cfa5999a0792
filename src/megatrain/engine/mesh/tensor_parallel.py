"""Tensor parallel with sequence parallel: Hugging Face's `tp_plan` on plain tensors, experts by expert, vocabulary by rows.

[Note: plain parameters]
Before FSDP sees them, the parameters that tensor ranks share are replaced by this rank's parts: plain tensors in Hugging Face's
own modules, whose code runs unchanged on fewer heads, columns, experts or rows of the vocabulary. Communication happens in hooks
at the entry and exit of blocks (tensor_collectives.py). `Stage.split` records which dimension was split. (With DTensors, whose
every operation is dispatched in Python, a small layer took three times the CPU time, and FSDP summed up shares of gradients with
every microbatch.)

[Note: communication of a layer]
The residual stream is split by tokens. A block (attention, MLP) gathers the tokens once at its entry, for all its projections,
computes its share of heads or columns, and its row-wise output scatters the sum back to tokens: one all-gather and one
reduce-scatter forward, the reverse backward. So a layer has two of each in either direction, and nothing else moves.

[Note: shares of gradients]
Parameters that every tensor rank holds whole (norms, routers, biases of row-wise products, a whole attention) see different
tokens or heads on each rank, so their gradient is this rank's share of a sum, whatever the module. `Gradients` sums the shares
once a step.

[Note: whole attention]
If heads or key-value heads do not divide, every rank computes the whole attention: it gathers the tokens, its projections are
whole, and the last of them takes only the rank's own tokens. Every rank then does the attention's full work; MLP, embedding and
head are split as usual.

[Note: vocabulary]
Embedding and head are split by rows of the vocabulary as `torch.chunk` does: ceil(V / tensor) rows each, fewer on the last rank.
Logits are never gathered: see [Note: split logits] in head.py.

[Note: experts of a tensor group]
Hugging Face keeps a layer's experts in matrices stacked by expert, (E, out, in). They are split by expert, E / tensor on each
rank: whole experts instead of slices of each, so that a rank's part stays one box of the parameter and a product keeps its
width. The block gathers the tokens once at its entry, like any other. The router runs on all of them on every rank and chooses
the same everywhere; a rank picks the (token, expert) pairs of its own experts, runs them through Hugging Face's own code as
tokens with one expert each, and sums the results by token. That is a partial sum, which is scattered to tokens at the block's
exit. For the router and the incoming tokens, each rank's gradient is a partial sum too: its own experts' share.

[Note: a rank without pairs]
A microbatch may leave a rank's experts without a token. Tokens, router and parameters take part in the graph anyway, with zero
rows: the backward's collectives, of this group and of FSDP, must run on every rank or on none.

[Note: shared experts]
A shared expert inside the block computes every token. Its matrices are split by columns and rows like those of an MLP; its
result is a partial sum, too, and is scattered with that of the routed experts. Its gate (one number a token) is whole on every
rank, like the router.

Shapes: B rows, L tokens, S = L / tensor, N = B * L, V vocabulary, W = this rank's part of it, D hidden size, K experts per token,
M pairs of this rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatrain.engine.mesh.head import VocabularySplit
from megatrain.engine.mesh.layout import whole_attention
from megatrain.engine.mesh.stage import Stage
from megatrain.engine.mesh.tensor_collectives import (
    RowWise,
    TensorGroup,
    add_up,
    gather_at_entry,
    gather_tokens,
    scatter_at_exit,
    split_tokens,
    take_own_at_entry,
)
from megatrain.errors import UserError
from megatrain.models.structure import Structure


@dataclass(frozen=True)
class Style:
    """How one module is split.

    Attributes:
        dims: Parameter name in the module -> the dimension along which it is split.
        every: The dimension for all other parameters; None: they stay whole.
        prepare: Called with the module after its parameters have been split.
        owns: Whether the style covers the module's own parameters.
    """

    dims: Mapping[str, int]
    every: int | None = None
    prepare: Callable[[Any, TensorGroup], object] | None = None
    owns: bool = True


def _own_rows(embedding: nn.Embedding, group: TensorGroup) -> None:
    """Token ids (B, L) -> embeddings (B, L, D), summed over the ranks, each of which holds W rows of the vocabulary."""
    first = -(-embedding.num_embeddings // group.size) * group.rank  # see [Note: vocabulary]
    count = embedding.weight.shape[0]
    padding = embedding.padding_idx  # a row whose gradient is zero
    embedding.padding_idx = padding - first if padding is not None and first <= padding < first + count else None
    plain = embedding.forward

    def forward(ids_BL: torch.Tensor) -> torch.Tensor:
        local_BL = ids_BL - first
        others_BL = (local_BL < 0) | (local_BL >= count)
        found_BLD = plain(local_BL.masked_fill(others_BL, 0))
        return add_up(found_BLD.masked_fill(others_BL[..., None], 0), group)

    embedding.forward = forward  # type: ignore[method-assign]


def _mixture_block(block: nn.Module, group: TensorGroup) -> None:
    """Router and experts: gather tokens (B, S, D) at the entry, scatter the partial sums (B, L, D) at the exit."""
    gather_at_entry(block, group)
    scatter_at_exit(block, group)


def own_experts(experts: Any, group: TensorGroup) -> None:
    """Let a module of E experts compute with the E / tensor experts whose parameters it holds."""
    count = experts.num_experts // group.size
    experts.num_experts = count
    experts.forward = partial(_own_experts_forward, experts, type(experts).forward, count * group.rank, count)


def _own_experts_forward(
    experts: nn.Module, plain: Any, first: int, count: int,
    hidden_ND: torch.Tensor, index_NK: torch.Tensor, weights_NK: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """This rank's share of the sum over experts (N, D)."""
    tokens_M, choice_M = torch.where((index_NK >= first) & (index_NK < first + count))
    given_MD, weights_M1 = hidden_ND[tokens_M], weights_NK[tokens_M, choice_M, None]
    if len(tokens_M) > 0:
        out_MD = plain(experts, given_MD, index_NK[tokens_M, choice_M, None] - first, weights_M1)
    else:  # see [Note: a rank without pairs]
        out_MD = given_MD * weights_M1 + sum(parameter.flatten()[0] for parameter in experts.parameters())
    return torch.zeros_like(hidden_ND).index_add(0, tokens_M, out_MD.to(hidden_ND.dtype))


BLOCK = Style({}, prepare=gather_at_entry, owns=False)
"""A block whose projections are column-wise."""
COLUMNS = Style({"weight": 0, "bias": 0})
ROWS = Style({"weight": 1}, prepare=RowWise.make_of)
PARTIAL_ROWS = Style({"weight": 1})
"""A row-wise product inside a block that adds the ranks' sums up at its exit."""
WHOLE = Style({})
"""Computed by every rank with the same parameters, on its own tokens or heads."""
WHOLE_EXIT = Style({}, prepare=take_own_at_entry)
"""See [Note: whole attention]."""
MIXTURE = Style({}, prepare=_mixture_block, owns=False)
EXPERTS = Style({}, every=0, prepare=own_experts)
EMBEDDING = Style({"weight": 0}, prepare=_own_rows)
HEAD = Style({"weight": 0, "bias": 0})
PLANNED = {"colwise": COLUMNS, "rowwise": ROWS, "replicated_with_grad_allreduce": WHOLE}
"""Styles of linear modules and norms by their names in Hugging Face's plans."""
SHARED_EXPERT = {"gate_proj": COLUMNS, "up_proj": COLUMNS, "down_proj": PARTIAL_ROWS}
"""The linear modules of a shared expert."""
MIXTURE_STYLE = "moe_tp_experts"
"""The experts' style in Hugging Face's plans."""


def parallelize(stage: Stage, structure: Structure, mesh: DeviceMesh) -> None:
    """Split a stage's modules, on meta or real, over the tensor group. Ties between embedding and head stay ties.

    Args:
        stage: Parameters that are split are replaced by this rank's parts and recorded in `stage.split`.
        structure: The whole model's.
        mesh: The tensor dimension.

    Raises:
        UserError: A style or a parameter of the family is not supported.
    """
    group = TensorGroup.of(mesh)
    config: Any = stage.model.config
    plan = {f"{structure.base_name}.{name}": style for name, style in _base_plan(config).items()}
    styles = _edge_styles(stage, structure)
    for prefix, layer in stage.named_own_layers():
        found = _layer_styles(layer, prefix, config.model_type, plan, whole_attention(config, group.size))
        styles |= {f"{prefix}.{name}": style for name, style in found.items()}
    _refuse_uncovered(stage.model, styles)
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for path, style in styles.items():
        module = stage.model.get_submodule(path)
        _split_parameters(module, path, style, group, stage.split, made)
        if style.prepare is not None:
            style.prepare(module, group)
    if stage.part.first:
        stage.enter = partial(split_tokens, group=group)
    if stage.part.last:
        stage.leave = partial(gather_tokens, group=group)
        width = -(-_vocabulary(stage, structure) // group.size)  # see [Note: vocabulary]
        stage.head.split = VocabularySplit(mesh.get_group(), width * group.rank)


def splits_experts(model: nn.Module) -> bool:
    """Whether ranks of a tensor group would share the experts of some layers."""
    return MIXTURE_STYLE in _base_plan(model.config).values()


def _base_plan(config: Any) -> dict[str, str]:
    """Hugging Face's style by module name in the base model, with layer numbers as `*`."""
    return getattr(config, "base_model_tp_plan", None) or {}


def _split_parameters(
    module: nn.Module, path: str, style: Style, group: TensorGroup,
    split: dict[str, tuple[int, int]], made: dict[int, tuple[nn.Parameter, nn.Parameter]],
) -> None:  # fmt: skip
    """Split the module's own parameters. `made`: a whole parameter's id -> it and its part, for ties between modules."""
    for leaf, whole in list(module.named_parameters(recurse=False)):
        dim = style.dims.get(leaf, style.every)
        if dim is None:
            continue
        if id(whole) not in made:
            part = nn.Parameter(group.part(whole.detach(), dim), requires_grad=whole.requires_grad)
            made[id(whole)] = whole, part
        split[f"{path}.{leaf}"] = dim, whole.shape[dim]
        module._parameters[leaf] = made[id(whole)][1]


def _refuse_uncovered(model: nn.Module, styles: Mapping[str, Style]) -> None:
    """Raise a UserError for parameters without a style, and for modules that a style cannot split."""
    where, remedy = f"model type {model.config.model_type}", "set parallel.tensor to 1"  # type: ignore[union-attr]
    covered = {path for path, style in styles.items() if style.owns}
    left = [name for name, _ in model.named_parameters() if name.rpartition(".")[0] not in covered]
    if left:
        raise UserError(f"the tensor-parallel plan does not cover {', '.join(left[:3])}", where, remedy)
    for path, style in styles.items():
        kind = type(model.get_submodule(path))
        if style in (COLUMNS, ROWS, PARTIAL_ROWS, WHOLE_EXIT) and kind.forward is not nn.Linear.forward:
            raise UserError(f"{path} is a {kind.__name__}, which cannot be split as a linear module", where, remedy)


def _layer_styles(
    layer: nn.Module, prefix: str, model_type: str, plan: Mapping[str, str], whole: bool
) -> dict[str, Style]:
    """Style of each module of one layer, by its name inside the layer. `whole`: see [Note: whole attention]."""
    found = {name: _planned_style(f"{prefix}.{name}", plan) for name, _ in layer.named_modules() if name}
    # Inside these blocks all tokens are present, so a norm in there needs a style in the plan.
    blocks = {name.rpartition(".")[0] for name, style in found.items() if style == "colwise"}
    styles: dict[str, Style] = dict.fromkeys(blocks, BLOCK)
    for name, style in found.items():
        if style is None:
            if _is_norm(layer.get_submodule(name)) and not any(name.startswith(block + ".") for block in blocks):
                styles[name] = WHOLE
        elif whole and name.rpartition(".")[0].endswith("attn"):
            styles[name] = WHOLE_EXIT if style == "rowwise" else WHOLE
        elif style in PLANNED:
            styles[name] = PLANNED[style]
        elif style == MIXTURE_STYLE:
            styles |= _mixture_styles(layer, name)
        else:
            what = f"style {style!r} of {prefix}.{name} is not supported"
            raise UserError(what, f"model type {model_type}", "set parallel.tensor to 1")
    return styles


def _mixture_styles(layer: nn.Module, experts: str) -> dict[str, Style]:
    """Styles of the block that holds the experts, of the experts, of shared experts, and of the router: everything else with
    parameters in it. See [Note: shared experts]."""
    block = experts.rpartition(".")[0]
    inside = {f"{block}.{name}": module for name, module in layer.get_submodule(block).named_modules() if name}
    styles = {block: MIXTURE, experts: EXPERTS}
    for name, module in inside.items():
        if f"{name}.".startswith(f"{experts}.") or not _has_parameters(module):
            continue
        parent, _, leaf = name.rpartition(".")
        shared = all(f"{parent}.{part}" in inside for part in SHARED_EXPERT)
        styles[name] = SHARED_EXPERT.get(leaf, WHOLE) if shared else WHOLE
        if styles[name] is PARTIAL_ROWS and getattr(module, "bias", None) is not None:
            raise UserError(
                f"the bias of {name} would be added by every tensor rank", remedy="set parallel.tensor to 1"
            )
    return styles


def _planned_style(full_name: str, plan: Mapping[str, str]) -> str | None:
    return plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", full_name))


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Norm") and _has_parameters(module)


def _edge_styles(stage: Stage, structure: Structure) -> dict[str, Style]:
    """Embedding and head by vocabulary rows, whatever the plan says of them; final norm by tokens."""
    styles: dict[str, Style] = {}
    layers = structure.layers_name + "."
    for name, module in stage.model.named_modules():
        if name.startswith(layers) or not _has_parameters(module):
            continue
        if isinstance(module, nn.Embedding):
            styles[name] = EMBEDDING
        elif isinstance(module, nn.Linear) and not name.startswith(structure.base_name + "."):
            styles[name] = HEAD
        elif _is_norm(module):
            styles[name] = WHOLE
    return styles


def _vocabulary(stage: Stage, structure: Structure) -> int:
    """Rows of the head's weight over all ranks."""
    base = structure.base_name + "."
    sizes = {length for name, (_, length) in stage.split.items() if not name.startswith(base)}
    assert len(sizes) == 1, sizes
    return sizes.pop()
