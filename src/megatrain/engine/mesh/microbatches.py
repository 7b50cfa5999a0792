"""From the batch of a whole step to the microbatches of one rank.

Every rank is given the same batch; which rows and tokens are its own follows from its coordinate. Rows and tokens are padded,
at the end, to what the layout needs: padding predicts nothing, and no real token sees it.

Shapes: B rows, T tokens, padded to what the layout divides; L = T / context tokens of one rank.
"""

from __future__ import annotations

import torch

from megatrain.engine.mesh.context_parallel import documents_of, zigzag_order
from megatrain.engine.mesh.layout import Coordinate, Layout
from megatrain.engine.objective import IGNORED
from megatrain.errors import UserError

Batch = dict[str, torch.Tensor]


def without_mask(batch: Batch) -> Batch:
    """Drop an attention mask that says nothing to a causal model: padding at the ends of rows, without targets in it.

    Raises:
        UserError: The mask says something else.
    """
    mask = batch.get("attention_mask")
    if mask is None:
        return batch
    rest = {name: tensor for name, tensor in batch.items() if name != "attention_mask"}
    holes = bool((mask[:, 1:] > mask[:, :-1]).any())
    targets = bool((batch["labels"][mask == 0] != IGNORED).any())
    if holes or targets:
        raise UserError(
            "masks tokens before real ones" if holes else "masks tokens that are targets",
            "batch['attention_mask']",
            "the mesh engine takes padding at the end of rows only; separate documents by document_ids",
        )
    return rest


def microbatches(batch: Batch, layout: Layout, at: Coordinate, device: torch.device) -> list[Batch]:
    """The microbatches of one rank.

    Args:
        batch: `input_ids`, `labels` (B, T), unshifted, and where they say something `position_ids`; the same on all ranks.
        layout: The resolved layout.
        at: This rank's coordinate.
        device: Where they go.

    Returns:
        Per microbatch `input_ids`, `labels` (rows, L), the labels shifted: what each token should predict; and
        `position_ids` (rows, L), `documents` (rows, T) where the model needs them.
    """
    padded = _padded(batch, layout)
    rows, tokens = padded["input_ids"].shape
    data_rank = at.replicate * (layout.data // layout.replicate) + at.shard
    mine = rows // layout.data
    own = {name: tensor[data_rank * mine : (data_rank + 1) * mine] for name, tensor in padded.items()}
    positions = own.get("position_ids")
    if layout.context > 1:
        order = zigzag_order(tokens, layout.context)
        local = order[at.context * tokens // layout.context : (at.context + 1) * tokens // layout.context]
        if positions is not None:
            own["documents"] = documents_of(positions)[:, order]
        else:
            own["position_ids"] = torch.arange(tokens).expand(mine, tokens)
        for name in ("input_ids", "labels", "position_ids"):
            own[name] = own[name][:, local]
    size = mine // layout.pieces
    return [
        {name: tensor[i * size : (i + 1) * size].contiguous().to(device) for name, tensor in own.items()}
        for i in range(layout.pieces)
    ]


def _padded(batch: Batch, layout: Layout) -> Batch:
    """Shift the labels, then pad rows and tokens at the end."""
    rows, tokens = batch["input_ids"].shape
    more_rows, more_tokens = -rows % layout.row_multiple, -tokens % layout.token_multiple
    labels = torch.full_like(batch["labels"], IGNORED)
    labels[:, :-1] = batch["labels"][:, 1:]
    padded = {
        "input_ids": torch.nn.functional.pad(batch["input_ids"], (0, more_tokens, 0, more_rows)),
        "labels": torch.nn.functional.pad(labels, (0, more_tokens, 0, more_rows), value=IGNORED),
    }
    if "position_ids" in batch:
        positions = torch.arange(tokens + more_tokens).repeat(rows + more_rows, 1)
        positions[:, tokens:] -= tokens  # the padding is a document of its own
        positions[:rows, :tokens] = batch["position_ids"]
        padded["position_ids"] = positions
    return padded
