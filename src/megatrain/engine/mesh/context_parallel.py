"""Context parallel: several ranks share the tokens of a row; attention gathers keys and values.

Each rank holds two chunks of a row, one from the front and one from the back (`zigzag_order`), so that causal work is equal.
Everything but attention works token by token. Attention is an entry of Hugging Face's `AttentionInterface`: it gathers the row's
keys and values from all ranks of the context group and masks by position in the row and by document, so packed rows and sliding
windows are exact.

Shapes: B rows, T tokens of the row, L = T / context local tokens, H query heads, K key heads, E head size. Gathered tokens are in
rank order, not in row order; `TokenMap.row_positions` gives their places in the row.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from transformers import AttentionInterface, AttentionMaskInterface

from megatrain.errors import UserError

NAME = "megatrain_context_parallel"
"""The `attn_implementation` registered with transformers."""

ARGUMENT = "context_tokens"
"""The keyword that carries a `TokenMap` through Hugging Face's forward into the attention."""

UNSUPPORTED = "this family cannot run with context parallel"


@dataclass
class TokenMap:
    """Where the tokens of a microbatch are in one context group.

    Attributes:
        row_positions: (T,) positions in the row of the gathered tokens.
        documents: (B, T) document of each gathered token; None if every row is one document.
        local: The gathered tokens that belong to this rank.
    """

    group: dist.ProcessGroup
    row_positions: torch.Tensor
    documents: torch.Tensor | None
    local: slice
    _masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls, group: dist.ProcessGroup, device: torch.device, tokens: int, documents: torch.Tensor | None
    ) -> TokenMap:
        """The map of a microbatch with L = `tokens` tokens on each rank."""
        ranks, first = dist.get_world_size(group), dist.get_rank(group) * tokens
        return cls(group, zigzag_order(tokens * ranks, ranks).to(device), documents, slice(first, first + tokens))

    def mask(self, window: int | None) -> torch.Tensor:
        """(B or 1, 1, L, T), True if a local query may attend to a gathered key."""
        if window not in self._masks:
            distance = self.row_positions[self.local, None] - self.row_positions[None, :]
            seen = (distance >= 0)[None]
            if window is not None:
                seen = seen & (distance < window)[None]
            if self.documents is not None:
                seen = seen & (self.documents[:, self.local, None] == self.documents[:, None, :])
            self._masks[window] = seen.unsqueeze(1)
        return self._masks[window]


@functools.lru_cache(maxsize=8)
def zigzag_order(tokens: int, ranks: int) -> torch.Tensor:
    """(T,) row positions in rank order; T is a multiple of 2 * ranks. Do not modify it.

    Rank r holds entries r * T / ranks to (r + 1) * T / ranks: chunk r from the front and chunk r from the back of the row, so
    that causal work is equal.
    """
    assert tokens % (2 * ranks) == 0, (tokens, ranks)
    chunks = torch.arange(tokens).view(2 * ranks, -1)
    return torch.cat([torch.cat([chunks[rank], chunks[-1 - rank]]) for rank in range(ranks)])


def documents_of(position_ids_BT: torch.Tensor) -> torch.Tensor:
    """Document numbers from positions, as transformers derives them: a new one wherever positions do not increase by one."""
    starts = torch.zeros_like(position_ids_BT)
    starts[:, 1:] = (position_ids_BT.diff(dim=1) != 1).long()
    return starts.cumsum(dim=1)


# torch 2.13 renamed both and warns at each call of the old names.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class _GatherTokens(torch.autograd.Function):
    """(2, B, K, L, E) -> (2, B, K, T, E); the backward sums all ranks' gradients of this rank's tokens."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        parts = dist.get_world_size(group)
        gathered = local.new_empty((parts * local.shape[0], *local.shape[1:]))
        _all_gather(gathered, local.contiguous(), group=group)
        return torch.cat(gathered.chunk(parts), dim=-2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        parts = dist.get_world_size(ctx.group)
        stacked = torch.cat(gradient.chunk(parts, dim=-2))
        local = gradient.new_empty((stacked.shape[0] // parts, *stacked.shape[1:]))
        _reduce_scatter(local, stacked.contiguous(), group=ctx.group)
        return local, None


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **extras: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of local queries (B, H, L, E) to the row's keys and values (B, K, L, E on each rank), as transformers calls it.

    The mask comes from the `TokenMap` in `extras`, so `attention_mask` must be None, and `dropout` 0. With `softcap`, scores
    become `softcap * tanh(scores / softcap)`.

    Returns:
        (B, L, H, E), and None for the attention weights.
    """
    tokens = extras.get(ARGUMENT)
    if not isinstance(tokens, TokenMap):
        raise UserError(f"{type(module).__name__} does not receive the model's keyword arguments", remedy=UNSUPPORTED)
    _refuse_unknown(module, attention_mask, dropout, sliding_window, extras)
    keys, values = _GatherTokens.apply(torch.stack([key, value]), tokens.group).unbind()  # type: ignore[attr-defined]
    mask = tokens.mask(sliding_window)
    repeats = query.shape[1] // keys.shape[1]
    if repeats > 1:
        # Not `enable_gqa`: CUDA's fused kernels support it or a mask. With both, all scores would be materialised in fp32.
        keys, values = keys.repeat_interleave(repeats, dim=1), values.repeat_interleave(repeats, dim=1)
    if softcap is None:
        out = torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling)
    else:
        out = _capped(query, keys, values, mask, scaling, softcap)
    return out.transpose(1, 2).contiguous(), None


def _capped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None,
    softcap: float,
) -> torch.Tensor:
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype) @ value


def _refuse_unknown(
    module: torch.nn.Module, mask: Any, dropout: float, window: int | None, extras: Mapping[str, Any]
) -> None:
    problems = []
    if mask is not None:
        problems.append("passes its own mask")
    if dropout:
        problems.append(f"has attention dropout {dropout}")
    if not getattr(module, "is_causal", True):
        problems.append("is not causal")
    for name in ("s_aux", "position_bias", "head_mask"):
        if extras.get(name) is not None:
            problems.append(f"uses {name}")
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    index = getattr(module, "layer_idx", None)
    if kinds and isinstance(index, int) and (kinds[index] == "sliding_attention") != (window is not None):
        problems.append(f"is a {kinds[index]} layer called with sliding_window={window}")
    if problems:
        raise UserError(f"{type(module).__name__} {', '.join(problems)}", remedy=UNSUPPORTED)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, _no_mask)
