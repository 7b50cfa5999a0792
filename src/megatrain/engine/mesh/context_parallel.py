"""Context parallel: the tokens of a row are shared by several ranks; attention gathers keys and values.

Each rank holds two chunks of a row, one from the front and one from the back (`layout.zigzag`), so that the causal work is the
same everywhere. Everything but attention works token by token. Attention is an entry of Hugging Face's `AttentionInterface`:
it gathers the keys and values of the row from all ranks of the context group, and masks by the position in the row and by
document, so packed rows and sliding windows are exact.

Shapes: B rows, T tokens of the row, L = T / context local tokens, H query heads, K key heads, E head size. Gathered tokens are in
the order of the ranks, not of the row; `TokenMap.row_positions` says where each of them belongs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from transformers import AttentionInterface, AttentionMaskInterface

from megatrain.engine.mesh.layout import zigzag
from megatrain.errors import UserError

NAME = "megatrain_context_parallel"
"""As an `attn_implementation` of transformers."""

ARGUMENT = "context_tokens"
"""The keyword that carries a `TokenMap` through Hugging Face's forward into the attention."""


@dataclass
class TokenMap:
    """Which tokens of a microbatch are where, in one context group.

    Attributes:
        group: The context group.
        row_positions: (T,) positions in the row of the gathered tokens.
        documents: (B, T) document of each gathered token, None where every row is one document.
        local: Which of the gathered tokens are this rank's.
    """

    group: dist.ProcessGroup
    row_positions: torch.Tensor
    documents: torch.Tensor | None
    local: slice
    _masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None) -> torch.Tensor:
        """(B or 1, 1, L, T), True where a local query may see a gathered key."""
        if window not in self._masks:
            distance = self.row_positions[self.local, None] - self.row_positions[None, :]
            seen = (distance >= 0)[None]
            if window is not None:
                seen = seen & (distance < window)[None]
            if self.documents is not None:
                seen = seen & (self.documents[:, self.local, None] == self.documents[:, None, :])
            self._masks[window] = seen.unsqueeze(1)
        return self._masks[window]


def zigzag_order(tokens: int, parts: int) -> torch.Tensor:
    """(T,) the row positions in the order of the ranks: rank r holds entries r * T / parts to (r + 1) * T / parts."""
    return torch.tensor(zigzag(tokens, parts)).flatten()


def documents_of(position_ids_BT: torch.Tensor) -> torch.Tensor:
    """Documents from positions, as transformers finds them: one starts wherever positions do not go on by one."""
    starts = torch.zeros_like(position_ids_BT)
    starts[:, 1:] = (position_ids_BT.diff(dim=1) != 1).long()
    return starts.cumsum(dim=1)


# torch 2.13 renamed the two and warns at each call of the old names.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class _GatherTokens(torch.autograd.Function):
    """(2, B, K, L, E) -> (2, B, K, T, E); the backward sums every rank's gradient of this rank's tokens."""

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
    """Attention of local queries to the whole row, by transformers' attention protocol.

    Args:
        module: HF's attention module.
        query: (B, H, L, E).
        key, value: (B, K, L, E).
        attention_mask: None; the mask comes from the `TokenMap`.
        dropout: Must be 0.
        scaling: Factor on the scores; 1 / sqrt(E) by default.
        sliding_window: Of this layer, as the flash-attention kernels take it.
        softcap: Scores pass through `softcap * tanh(scores / softcap)`.
        extras: `context_tokens`, the `TokenMap`; others must be of no consequence.

    Returns:
        (B, L, H, E), and None for the weights.
    """
    tokens = extras.get(ARGUMENT)
    if not isinstance(tokens, TokenMap):
        raise UserError(
            f"{type(module).__name__} does not get the model's keyword arguments",
            remedy="this family cannot run with context parallel",
        )
    _refuse_unknown(module, attention_mask, dropout, sliding_window, extras)
    keys, values = _GatherTokens.apply(torch.stack([key, value]), tokens.group).unbind()  # type: ignore[attr-defined]
    mask = tokens.mask(sliding_window)
    repeats = query.shape[1] // keys.shape[1]
    if repeats > 1:
        # Not `enable_gqa`: CUDA's fused kernels take it or a mask. With both the scores would be held, in fp32.
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
        problems.append("brings a mask of its own")
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
        raise UserError(
            f"{type(module).__name__} {', '.join(problems)}", remedy="this family cannot run with context parallel"
        )


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None


def register() -> None:
    """Make `NAME` known to transformers. Safe to call again."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, _no_mask)


register()
