"""Tensor parallel with sequence parallel: Hugging Face's `tp_plan` on plain tensors, and a loss over split logits.

[Note: plain parameters]
Before FSDP sees them, the parameters that ranks share are replaced by this rank's parts: plain tensors, in Hugging Face's own
modules, whose code runs unchanged on fewer heads, columns, experts or rows of the vocabulary. What is communicated is said by
hooks at the entry and exit of blocks (`megatrain.engine.mesh.tokens`). `Stage.split` remembers which dimension was cut.
(With DTensors, whose every operation is dispatched in Python, a small layer took three times as much of the processor, and FSDP
added up shares of gradients with every microbatch.)

[Note: what moves in a layer]
The residual stream is split by tokens. A block (attention, MLP) gathers the tokens once at its entry, for all its
projections, computes its share of heads or columns, and its row-wise output scatters the sum back to tokens: one all-gather and
one reduce-scatter forward, the reverse backward. So a layer has two of each in either direction, and nothing else moves.

[Note: shares of gradients]
What tensor ranks hold alike (norms, routers, biases of row-wise products, a whole attention) sees other tokens or heads on each
of them, so its gradient is this rank's share of a sum, whatever the module. `Gradients` adds the shares up once per step.

[Note: whole attention]
Where heads, or key-value heads, do not divide, every rank computes the whole attention: it gathers the tokens, its projections
are whole, and it keeps its own tokens of what the last of them takes. That costs the attention's work on every rank; the MLP,
embedding and head are split as ever.

[Note: vocabulary]
Embedding and head are split by rows of the vocabulary as `torch.chunk` splits them: ceil(V / tensor) rows each, fewer on the
last rank. Logits are never gathered.

Shapes: B rows, L tokens, S = L / tensor, N = B * L, V vocabulary, W = this rank's part of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatrain.engine.mesh.expert_parallel import mixture_block, own_experts
from megatrain.engine.mesh.layout import whole_attention
from megatrain.engine.mesh.stage import Stage
from megatrain.engine.mesh.tokens import RowWise, TensorGroup, add_up, gather_at_entry, own_tokens, split_tokens
from megatrain.engine.objective import IGNORED
from megatrain.errors import UserError
from megatrain.models.structure import Structure


@dataclass(frozen=True)
class Style:
    """What becomes of one module.

    Attributes:
        dims: Which dimension of a parameter is cut, by the parameter's name in the module; others stay whole.
        every: The dimension that is cut of parameters that `dims` does not name, None for none.
        prepare: Called with the module, whose parameters are already cut.
        owns: Whether the style is meant for the module's own parameters at all.
    """

    dims: Mapping[str, int]
    every: int | None = None
    prepare: Callable[[Any, TensorGroup], object] | None = None
    owns: bool = True


def _take_own_tokens(linear: nn.Module, group: TensorGroup) -> None:
    linear.register_forward_pre_hook(partial(_own, group))


def _own(group: TensorGroup, linear: nn.Module, args: tuple[torch.Tensor]) -> torch.Tensor:
    return own_tokens(args[0], group)


def _own_rows(embedding: nn.Embedding, group: TensorGroup) -> None:
    """Token ids (B, L) -> their embeddings (B, L, D), added up over the ranks, each of which has W rows of the vocabulary."""
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


BLOCK = Style({}, prepare=gather_at_entry, owns=False)
"""A block whose projections are column-wise."""
COLUMNS = Style({"weight": 0, "bias": 0})
ROWS = Style({"weight": 1}, prepare=RowWise.make_of)
WHOLE = Style({})
"""Whatever is computed by every rank with the same parameters, on its own tokens or heads."""
WHOLE_EXIT = Style({}, prepare=_take_own_tokens)
"""See [Note: whole attention]."""
MIXTURE = Style({}, prepare=mixture_block, owns=False)
EXPERTS = Style({}, every=0, prepare=own_experts)
EMBEDDING = Style({"weight": 0}, prepare=_own_rows)
HEAD = Style({"weight": 0, "bias": 0}, prepare=gather_at_entry)
MIXTURE_STYLE = "moe_tp_experts"
"""Of the experts, in Hugging Face's plans."""


def parallelize(stage: Stage, structure: Structure, mesh: DeviceMesh) -> None:
    """Split a stage's modules, on meta or real, over the tensor group. Ties between embedding and head stay ties.

    Args:
        stage: The stage; parameters that are cut are replaced by this rank's parts, and `stage.split` says which.
        structure: Of the whole model.
        mesh: The tensor dimension.

    Raises:
        UserError: A style or a parameter of the family has no translation.
    """
    group = TensorGroup.of(mesh)
    plan = _full_plan(stage.model, structure)
    styles = _edge_styles(stage, structure)
    for index in stage.part.layers:
        prefix = f"{structure.layers_name}.{index}"
        layer = stage.model.get_submodule(prefix)
        found = _layer_styles(layer, prefix, structure, plan, whole_attention(stage.model.config, group.size))
        styles |= {f"{prefix}.{name}": style for name, style in found.items()}
    _refuse_unplaced(stage.model, styles)
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for path, style in styles.items():
        module = stage.model.get_submodule(path)
        _cut_parameters(module, path, style, group, stage.split, made)
        if style.prepare is not None:
            style.prepare(module, group)
    if stage.part.first:
        stage.enter = partial(split_tokens, group=group)
    if stage.part.last:
        vocabulary = _vocabulary(stage, structure)
        stage.loss_sum = partial(_split_vocabulary_loss, group=mesh.get_group(), vocabulary=vocabulary)


def _cut_parameters(
    module: nn.Module,
    path: str,
    style: Style,
    group: TensorGroup,
    split: dict[str, tuple[int, int]],
    made: dict[int, tuple[nn.Parameter, nn.Parameter]],
) -> None:
    """Of the module itself. `made`: by identity of a whole parameter, it and its part, for ties between modules."""
    for leaf, whole in list(module.named_parameters(recurse=False)):
        dim = style.dims.get(leaf, style.every)
        if dim is None:
            continue
        if id(whole) not in made:
            part = nn.Parameter(group.part(whole.detach(), dim), requires_grad=whole.requires_grad)
            made[id(whole)] = whole, part
        split[f"{path}.{leaf}"] = dim, whole.shape[dim]
        module._parameters[leaf] = made[id(whole)][1]


def _refuse_unplaced(model: nn.Module, styles: Mapping[str, Style]) -> None:
    where, remedy = f"model type {model.config.model_type}", "set parallel.tensor to 1"  # type: ignore[union-attr]
    placed = {path for path, style in styles.items() if style.owns}
    left = [name for name, _ in model.named_parameters() if name.rpartition(".")[0] not in placed]
    if left:
        raise UserError(f"{', '.join(left[:3])} have no place in the tensor-parallel plan", where, remedy)
    for path, style in styles.items():
        kind = type(model.get_submodule(path))
        if style in (COLUMNS, ROWS, WHOLE_EXIT) and kind.forward is not nn.Linear.forward:
            raise UserError(f"{path} is a {kind.__name__}, which cannot be split as a linear module", where, remedy)


def splits_experts(model: nn.Module) -> bool:
    """Whether ranks of a tensor group would share the experts of some layers."""
    plan = getattr(model.config, "base_model_tp_plan", None) or {}  # type: ignore[union-attr]
    return MIXTURE_STYLE in plan.values()


def _full_plan(model: nn.Module, structure: Structure) -> dict[str, str]:
    """Style by full module name, layer numbers as `*`."""
    base = getattr(model.config, "base_model_tp_plan", None) or {}  # type: ignore[union-attr]
    return {f"{structure.base_name}.{name}": style for name, style in base.items()}


def _layer_styles(
    layer: nn.Module, prefix: str, structure: Structure, plan: Mapping[str, str], whole: bool
) -> dict[str, Style]:
    """Style of each module of one layer, by its name inside the layer. `whole`: see [Note: whole attention]."""
    found = {name: _planned_style(f"{prefix}.{name}", plan) for name, _ in layer.named_modules() if name}
    # Inside these blocks tokens are whole, so a norm there needs a plan of its own.
    blocks = {name.rpartition(".")[0] for name, style in found.items() if style == "colwise"}
    styles: dict[str, Style] = dict.fromkeys(blocks, BLOCK)
    for name, style in found.items():
        module = layer.get_submodule(name)
        if whole and style is not None and name.rpartition(".")[0].endswith("attn"):
            styles[name] = WHOLE_EXIT if style == "rowwise" else WHOLE
        elif style == "colwise":
            styles[name] = COLUMNS
        elif style == "rowwise":
            styles[name] = ROWS
        elif style == "replicated_with_grad_allreduce":
            styles[name] = WHOLE
        elif style == MIXTURE_STYLE:
            styles |= _mixture_styles(layer, name)
        elif style is not None:
            raise UserError(
                f"style {style!r} of {prefix}.{name} is not supported",
                f"model type {structure.model.config.model_type}",  # type: ignore[union-attr]
                "set parallel.tensor to 1",
            )
        elif _is_norm(module) and not any(name.startswith(block + ".") for block in blocks):
            styles[name] = WHOLE
    return styles


def _mixture_styles(layer: nn.Module, experts: str) -> dict[str, Style]:
    """Of the block that holds the experts, of the experts, and of whatever else in the block has parameters: the router."""
    block = experts.rpartition(".")[0]
    inside = {f"{block}.{name}": module for name, module in layer.get_submodule(block).named_modules() if name}
    routers = {
        name: WHOLE
        for name, module in inside.items()
        if not f"{name}.".startswith(f"{experts}.") and next(module.parameters(recurse=False), None) is not None
    }
    return {block: MIXTURE, experts: EXPERTS, **routers}


def _planned_style(full_name: str, plan: Mapping[str, str]) -> str | None:
    return plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", full_name))


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Norm") and next(module.parameters(recurse=False), None) is not None


def _edge_styles(stage: Stage, structure: Structure) -> dict[str, Style]:
    """Embedding by vocabulary rows, final norm by tokens, head by vocabulary rows."""
    styles: dict[str, Style] = {}
    layers = structure.layers_name + "."
    for name, module in stage.model.named_modules():
        if name.startswith(layers) or next(module.parameters(recurse=False), None) is None:
            continue
        if isinstance(module, nn.Embedding):
            styles[name] = EMBEDDING
        elif isinstance(module, nn.Linear) and not name.startswith(structure.base_name + "."):
            styles[name] = HEAD
        elif _is_norm(module):
            styles[name] = WHOLE
    return styles


def _vocabulary(stage: Stage, structure: Structure) -> int:
    """Rows of the head's weight, all ranks together."""
    base = structure.base_name + "."
    sizes = {length for name, (_, length) in stage.split.items() if not name.startswith(base)}
    assert len(sizes) == 1, sizes
    return sizes.pop()


class _SplitVocabularyLoss(torch.autograd.Function):
    """Sum of cross entropies of logits (N, W) that are split over a group by vocabulary; the same number on every rank."""

    @staticmethod
    def forward(
        ctx: Any, logits_NW: torch.Tensor, labels_N: torch.Tensor, first: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        wide = logits_NW if logits_NW.dtype == torch.float64 else logits_NW.float()
        largest_N = wide.max(dim=1).values
        dist.all_reduce(largest_N, op=dist.ReduceOp.MAX, group=group)
        exp_NW = (wide - largest_N[:, None]).exp()
        local_N = labels_N - first
        mine_N = (labels_N != IGNORED) & (local_N >= 0) & (local_N < wide.shape[1])
        index_N = local_N.clamp(0, wide.shape[1] - 1)
        target_N = torch.where(mine_N, wide.gather(1, index_N[:, None])[:, 0] - largest_N, 0.0)
        sums = torch.stack([exp_NW.sum(dim=1), target_N])
        dist.all_reduce(sums, group=group)
        valid_N = labels_N != IGNORED
        ctx.save_for_backward(exp_NW, sums[0], mine_N, index_N, valid_N)
        ctx.dtype = logits_NW.dtype
        return torch.where(valid_N, sums[0].log() - sums[1], 0.0).sum()

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        exp_NW, sums_N, mine_N, index_N, valid_N = ctx.saved_tensors
        gradient = exp_NW / sums_N[:, None]
        gradient.scatter_add_(1, index_N[:, None], -mine_N.to(gradient.dtype)[:, None])
        gradient *= (valid_N * scale)[:, None]
        return gradient.to(ctx.dtype), None, None, None


def _split_vocabulary_loss(
    logits_NW: torch.Tensor, labels_N: torch.Tensor, group: dist.ProcessGroup, vocabulary: int
) -> torch.Tensor:
    width = -(-vocabulary // dist.get_world_size(group))  # see [Note: vocabulary]
    first = width * dist.get_rank(group)
    return _SplitVocabularyLoss.apply(logits_NW, labels_N, first, group)  # type: ignore[return-value]
