"""Tensor parallel with sequence parallel: Hugging Face's `tp_plan` in torch's parallel styles, and a loss over split logits.

[Note: what moves in a layer]
The residual stream is split by tokens. A block (attention, MLP) gathers the tokens once at its entry, computes its share of
heads or columns, and its row-wise output scatters the sum back to tokens: one all-gather and one reduce-scatter forward, the
reverse backward. torch's `ColwiseParallel` alone would gather, and in the backward reduce, once per projection;
`GatherTokens` on the block hands all projections the same gathered DTensor.
Norms are replicated and see their own tokens only, so their gradients are partial sums until FSDP reduces them or
`gradients.settle` does.

[Note: whole attention]
Where heads, or key-value heads, do not divide, every rank computes the whole attention: it gathers the tokens, its projections
are replicated, and it keeps its own tokens of the output. All ranks then have the same gradients of these parameters, nothing is
added up. That costs the attention's work on every rank; the MLP, embedding and head are split as ever.

[Note: vocabulary]
Embedding and head are split by rows of the vocabulary as `torch.chunk` splits them: ceil(V / tensor) rows each, fewer on the
last rank. Logits are never gathered.

Shapes: B rows, L tokens, S = L / tensor, N = B * L, V vocabulary, W = this rank's part of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from megatrain.errors import UserError
from megatrain.loss import IGNORED
from megatrain.mesh.experts import MixtureBlock, OwnExperts, Router
from megatrain.mesh.layout import whole_attention
from megatrain.mesh.stage import Stage
from megatrain.mesh.tokens import TOKEN_DIM, gather_at_entry
from megatrain.models.structure import Structure

HEAD_DIM = 2
"""Of queries and keys (B, L, heads, E) before they are transposed, where families norm them."""


class GatherTokens(ParallelStyle):
    """On a block whose projections are column-wise: its first argument (B, S, D) becomes a replicated DTensor (B, L, D)."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return gather_at_entry(module, device_mesh)


class Whole(ParallelStyle):
    """A module that every rank computes alike, on all tokens. Its parameters are replicated, and so are their gradients.

    Args:
        split_tokens: The output (B, L, D) becomes this rank's tokens (B, S, D).
    """

    def __init__(self, split_tokens: bool = False):
        super().__init__()
        self._split_tokens = split_tokens

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        leave: Any = self._leave  # torch's annotation says that it returns nothing
        return distribute_module(module, device_mesh, self._replicate, self._enter, leave)

    def _replicate(self, name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            whole = distribute_tensor(parameter, mesh, [Replicate()], src_data_rank=self.src_data_rank)
            module.register_parameter(leaf, nn.Parameter(whole, requires_grad=parameter.requires_grad))

    @staticmethod
    def _enter(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        (given,) = inputs
        return given if isinstance(given, DTensor) else DTensor.from_local(given, mesh, [Replicate()], run_check=False)

    def _leave(self, module: nn.Module, output: Any, mesh: DeviceMesh) -> torch.Tensor:
        return (output.redistribute(placements=[Shard(TOKEN_DIM)]) if self._split_tokens else output).to_local()


def parallelize(stage: Stage, structure: Structure, mesh: DeviceMesh) -> None:
    """Split a stage's modules, on meta or real, over the tensor group. Ties between embedding and head stay ties.

    Args:
        stage: The stage; its parameters become DTensors.
        structure: Of the whole model.
        mesh: The tensor dimension.

    Raises:
        UserError: A style or a parameter of the family has no translation.
    """
    plan = _full_plan(stage.model, structure)
    for index in stage.part.layers:
        prefix = f"{structure.layers_name}.{index}"
        layer = stage.model.get_submodule(prefix)
        styles = _layer_styles(layer, prefix, structure, plan, whole_attention(stage.model.config, mesh.size()))
        _parallelize(layer, mesh, styles)
    tied = _tied_edges(stage, structure)
    _parallelize(stage.model, mesh, _edge_styles(stage, structure))
    for alias, owner in tied:
        _owner_of(stage.model, alias)[_leaf(alias)] = _owner_of(stage.model, owner)[_leaf(owner)]
    left = [name for name, p in stage.model.named_parameters() if not isinstance(p, DTensor)]
    if left:
        raise UserError(
            f"{', '.join(left[:3])} have no place in the tensor-parallel plan",
            f"model type {stage.model.config.model_type}",  # type: ignore[union-attr]
            "set parallel.tensor to 1",
        )
    if stage.part.first:
        stage.enter = partial(_split_tokens, mesh=mesh)
    if stage.part.last:
        stage.loss_sum = partial(
            _split_vocabulary_loss, group=mesh.get_group(), vocabulary=_vocabulary(stage, structure)
        )


def _split_tokens(hidden_BLD: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The same (B, L, D) on every rank -> this rank's tokens (B, S, D); the backward gathers their gradients."""
    whole = DTensor.from_local(hidden_BLD, mesh, [Replicate()], run_check=False)
    return whole.redistribute(placements=[Shard(TOKEN_DIM)]).to_local()


def _full_plan(model: nn.Module, structure: Structure) -> dict[str, str]:
    """Style by full module name, layer numbers as `*`."""
    base = getattr(model.config, "base_model_tp_plan", None) or {}  # type: ignore[union-attr]
    return {f"{structure.base_name}.{name}": style for name, style in base.items()}


def _layer_styles(
    layer: nn.Module, prefix: str, structure: Structure, plan: Mapping[str, str], whole: bool
) -> dict[str, ParallelStyle]:
    """Style of each module of one layer, by its name inside the layer. `whole`: see [Note: whole attention]."""
    found = {name: _planned_style(f"{prefix}.{name}", plan) for name, _ in layer.named_modules() if name}
    # Inside these blocks tokens are whole, so a norm there needs a plan of its own.
    blocks = {name.rpartition(".")[0] for name, style in found.items() if style == "colwise"}
    styles: dict[str, ParallelStyle] = {block: GatherTokens() for block in blocks}
    for name, style in found.items():
        module = layer.get_submodule(name)
        if whole and style is not None and name.rpartition(".")[0].endswith("attn"):
            styles[name] = Whole(split_tokens=style == "rowwise")
        elif style == "colwise":
            styles[name] = ColwiseParallel()
        elif style == "rowwise":
            styles[name] = RowwiseParallel(output_layouts=Shard(TOKEN_DIM))
        elif style == "replicated_with_grad_allreduce":
            styles[name] = SequenceParallel(sequence_dim=HEAD_DIM, use_local_output=True)
        elif style == "moe_tp_experts":
            styles |= _mixture_styles(layer, name)
        elif style is not None:
            raise UserError(
                f"style {style!r} of {prefix}.{name} is not supported",
                f"model type {structure.model.config.model_type}",  # type: ignore[union-attr]
                "set parallel.tensor to 1",
            )
        elif _is_norm(module) and not any(name.startswith(block + ".") for block in blocks):
            styles[name] = SequenceParallel(sequence_dim=TOKEN_DIM, use_local_output=True)
    return styles


def _mixture_styles(layer: nn.Module, experts: str) -> dict[str, ParallelStyle]:
    """Of the block that holds the experts, of the experts, and of whatever else in the block has parameters: the router."""
    block = experts.rpartition(".")[0]
    inside = {f"{block}.{name}": module for name, module in layer.get_submodule(block).named_modules() if name}
    routers = {
        name: Router()
        for name, module in inside.items()
        if not f"{name}.".startswith(f"{experts}.") and next(module.parameters(recurse=False), None) is not None
    }
    return {block: MixtureBlock(), experts: OwnExperts(), **routers}


def _planned_style(full_name: str, plan: Mapping[str, str]) -> str | None:
    return plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", full_name))


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Norm") and next(module.parameters(recurse=False), None) is not None


def _edge_styles(stage: Stage, structure: Structure) -> dict[str, ParallelStyle]:
    """Embedding by vocabulary rows, final norm by tokens, head by vocabulary rows."""
    styles: dict[str, ParallelStyle] = {}
    layers = structure.layers_name + "."
    for name, module in stage.model.named_modules():
        if name.startswith(layers) or next(module.parameters(recurse=False), None) is None:
            continue
        if isinstance(module, nn.Embedding):
            styles[name] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
        elif isinstance(module, nn.Linear) and not name.startswith(structure.base_name + "."):
            styles[name] = ColwiseParallel(input_layouts=Shard(TOKEN_DIM), output_layouts=Shard(-1))
        elif _is_norm(module):
            styles[name] = SequenceParallel(sequence_dim=TOKEN_DIM, use_local_output=True)
    return styles


def _parallelize(module: nn.Module, mesh: DeviceMesh, styles: Mapping[str, ParallelStyle]) -> None:
    # src_data_rank None: every rank takes its own slice, nothing is sent (parameters are on meta anyway).
    for name, style in styles.items():
        parallelize_module(module.get_submodule(name), mesh, style, src_data_rank=None)


def _tied_edges(stage: Stage, structure: Structure) -> list[tuple[str, str]]:
    """(alias, owner) of ties whose both ends are on this stage."""
    names = {name for name, _ in stage.model.named_parameters(remove_duplicate=False)}
    return [(alias, owner) for alias, owner in structure.tied.items() if alias in names and owner in names]


def _owner_of(model: nn.Module, name: str) -> dict[str, Any]:
    return model.get_submodule(name.rpartition(".")[0])._parameters


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _vocabulary(stage: Stage, structure: Structure) -> int:
    """Rows of the head's weight, all ranks together."""
    base = structure.base_name + "."
    sizes = {
        p.shape[0]
        for n, p in stage.model.named_parameters(remove_duplicate=False)
        if not n.startswith(base) and p.ndim == 2
    }
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
