"""Rotary embeddings whose frequencies depend on a length: each document gets those of its length.

[Note: frequencies by length]
Two scalings of rotary embeddings look at the length of the sequence. `longrope` (Phi 3) has two sets of frequencies, for
sequences up to `original_max_position_embeddings` and for longer ones. `dynamic` computes new frequencies for every length beyond
`max_position_embeddings`. transformers takes the largest position of the whole batch for the length. So a long neighbour in the
batch, or padding, would change the frequencies of all documents, and with them loss and gradients. `dynamic` also remembers the
longest sequence so far, so a step would depend on the steps before it.

Here the embeddings of a batch are computed once for each length that makes a difference, by the family's own code,
and every token takes those of its document. Documents are told apart by positions that restart, as attention does it.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


def by_length(kind: str) -> bool:
    """Whether a scaling (`rope_type`) depends on the length; `su` is an older name of longrope."""
    return kind in ("longrope", "su") or "dynamic" in kind


def scaling_by_length(config: Any) -> tuple[str, int] | None:
    """(scaling, the longest length without an effect) if a model's rotary frequencies depend on lengths, else None."""
    text = config.get_text_config()
    for rope in rope_parameters_of(text):
        kind = str(rope.get("rope_type", rope.get("type")))
        if by_length(kind):
            original = rope.get("original_max_position_embeddings")
            original = original or getattr(text, "original_max_position_embeddings", None)
            return kind, int(text.max_position_embeddings if "dynamic" in kind or original is None else original)
    return None


def rope_parameters_of(config: Any) -> Iterator[dict[str, Any]]:
    """The rotary parameters of a config; one for each kind of layer if they differ."""
    for name in ("rope_parameters", "rope_scaling"):
        found = getattr(config, name, None)
        if isinstance(found, dict):
            yield found
            yield from (part for part in found.values() if isinstance(part, dict))


def separate_lengths(model: nn.Module) -> None:
    """Give each document of a batch the frequencies of its length. See [Note: frequencies by length].

    Changes modules that follow transformers' `dynamic_rope_update`; others are found by the parity check.
    """
    changed = False
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if any(
            isinstance(kind, str) and by_length(kind)
            for kind in (kinds.values() if isinstance(kinds, dict) else [kinds])
        ):
            module.forward = types.MethodType(_forward, module)  # a deep copy binds it to the copied module
            changed = True
    base = getattr(model, getattr(model, "base_model_prefix", ""), model)
    if changed and isinstance(base, nn.Module):
        base.register_forward_pre_hook(_give_positions, with_kwargs=True)


def _give_positions(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Before a forward with padding but no positions: the default ones, except that padding repeats the last one."""
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2 and kwargs.get("position_ids") is None:
        kwargs = {**kwargs, "position_ids": (mask.long().cumsum(dim=1) - 1).clamp(min=0)}
    return args, kwargs


def document_lengths(position_ids_BT: Tensor) -> Tensor:
    """(B, T): the largest position of the document that each token is in, plus one. Asynchronous."""
    starts = torch.zeros_like(position_ids_BT)
    starts[:, 1:] = (position_ids_BT.diff(dim=1) != 1).long()
    document = starts.cumsum(dim=1)
    largest = torch.zeros_like(position_ids_BT).scatter_reduce(1, document, position_ids_BT, "amax")
    return largest.gather(1, document) + 1


def _forward(self: Any, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
    """The family's forward, once for each length that makes a difference. Waits for the device to know them."""
    kind = self.rope_type[layer_type] if isinstance(self.rope_type, dict) else self.rope_type
    more = () if layer_type is None else (layer_type,)

    def plain(positions: Tensor) -> Any:
        if "dynamic" in kind:
            _forget(self, "" if layer_type is None else f"{layer_type}_")
        return type(self).forward(self, x, positions, *more)

    if not by_length(kind) or position_ids.ndim != 2:
        return plain(position_ids)
    lengths_BT = document_lengths(position_ids)
    if "dynamic" in kind:
        classes_BT = lengths_BT.clamp(min=self.original_max_seq_len)
    else:
        rope = self.config.rope_parameters
        rope = rope if layer_type is None else rope[layer_type]
        classes_BT = (lengths_BT > rope["original_max_position_embeddings"]).long()
    found: Any = None
    present = classes_BT.unique().tolist()
    if len(present) == 1:
        return plain(position_ids)
    for one in present:
        inside_BT = classes_BT == one
        made = plain(torch.where(inside_BT, position_ids, 0))
        found = made if found is None else _merged(inside_BT, made, found)
    return found


def _merged(inside_BT: Tensor, new: Any, old: Any) -> Any:
    if isinstance(new, tuple):
        return tuple(_merged(inside_BT, one, other) for one, other in zip(new, old, strict=True))
    return torch.where(inside_BT[..., None], new, old)


def _forget(module: Any, prefix: str) -> None:
    """Make a `dynamic` embedding as new, without the longest length so far."""
    setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
    original = getattr(module, f"{prefix}original_inv_freq")
    module.register_buffer(f"{prefix}inv_freq", original.clone(), persistent=False)
