"""Batches before anything is computed: validation, and padding to a declared shape.

[Note: one shape]
Compiled code is made for one shape of its inputs, and another shape costs seconds to minutes of compilation in the middle of a
run. So a run declares the shapes of its batches (`BatchShape`), and a smaller batch (the last one of an epoch or of a
validation set, or unpacked rows that are all short) is padded with rows and tokens that no target depends on. Loss and gradients
stay the same sums, because they are counted over targets.

[Note: masks that change nothing]
An attention mask that hides only the ends of rows does not change a causal model at any target, since no earlier token sees a
later one. It is dropped: without a mask, Hugging Face takes its plain causal path, which is faster, and the code does not depend
on whether some row of the batch happens to be short. But where rotary frequencies depend on the length of a document
(`models/rope.py`), padding would lengthen it. Then padding becomes a separate document, in every batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from megatrain.engine.objective import IGNORED, find_targets
from megatrain.errors import UserError

KEYS = ("input_ids", "labels", "position_ids", "document_ids", "attention_mask")


@dataclass(frozen=True)
class BatchShape:
    """The shape of all batches of one purpose. See [Note: one shape].

    Attributes:
        rows: Rows of a batch, at most.
        lengths: Tokens of a row, ascending: a batch is padded to the first that holds its rows.
        packed: Whether rows hold several documents.
    """

    rows: int
    lengths: tuple[int, ...]
    packed: bool = False

    def padded(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A checked batch with this shape. A batch that is larger already stays as it is."""
        rows, tokens = batch["input_ids"].shape
        length = next((length for length in self.lengths if length >= tokens), tokens)
        below, right = max(0, self.rows - rows), length - tokens
        if not below and not right:
            return dict(batch)
        fill = {"labels": IGNORED}
        padded = {name: F.pad(tensor, (0, right, 0, below), value=fill.get(name, 0)) for name, tensor in batch.items()}
        if "position_ids" in padded:  # padding is a separate document
            padded["position_ids"][:rows, tokens:] = torch.arange(right)
            padded["position_ids"][rows:] = torch.arange(length)
        if "attention_mask" in padded:
            padded["attention_mask"][rows:] = 1
        return padded

    def example(self, length: int) -> dict[str, torch.Tensor]:
        """A checked batch of this shape in which every token is token 0, rows of `length` tokens."""
        ids = torch.zeros(self.rows, length, dtype=torch.int64)
        if not self.packed:
            return {"input_ids": ids, "labels": ids}
        return {
            "input_ids": ids,
            "labels": ids,
            "position_ids": (torch.arange(length) % -(-length // 2)).expand_as(ids),
        }


def checked(
    batch: Mapping[str, torch.Tensor],
    vocabulary: int,
    most_positions: int | None = None,
    more_keys: Sequence[str] = (),
    by_length: bool = False,
    token_mask: bool = False,
) -> tuple[dict[str, torch.Tensor], int]:
    """Validate a batch and bring it into the form that engines compute.

    Document ids become positions that restart, by which HF's code tells documents apart. Positions given as 0..T-1 in every row
    are dropped, because without them HF takes its plain causal path. Positions that follow from document ids stay, so that all
    batches of packed rows run the same code. For masks see [Note: masks that change nothing].

    Args:
        batch: int64 CPU tensors of one shape (rows, T).
        vocabulary: Number of token ids.
        most_positions: Positions that the model has a table for; None: no limit.
        more_keys: The objective's `batch_keys`: tensors of any type, of the same shape.
        by_length: Whether the model's rotary frequencies depend on the length of a document.
        token_mask: Whether to return `token_mask`, too: the `attention_mask` as given, or ones.

    Returns:
        (`input_ids`, `labels`, the objective's tensors and where needed `position_ids`, `attention_mask`, `token_mask`; number
        of target tokens).
    """
    known = dict.fromkeys((*KEYS, *more_keys))
    unknown = [name for name in batch if name not in known]
    missing = [name for name in ("input_ids", "labels", *more_keys) if batch.get(name) is None]
    if unknown or missing:
        raise UserError(f"unknown keys {unknown}, missing keys {missing}", "batch", f"a batch has {', '.join(known)}")
    tensors = {name: tensor for name, tensor in batch.items() if tensor is not None}
    shape = tensors["input_ids"].shape
    for name, tensor in tensors.items():
        wrong_type = tensor.dtype != torch.int64 and name in KEYS
        if wrong_type or tensor.shape != shape or tensor.ndim != 2 or tensor.device.type != "cpu":
            raise UserError(
                f"is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}",
                f"batch[{name!r}]",
                f"give {'int64 ' if name in KEYS else ''}CPU tensors of one shape (rows, T), like input_ids {tuple(shape)}",
            )
    if shape[0] == 0 or shape[1] < 2:
        raise UserError(f"has shape {tuple(shape)}", "batch['input_ids']", "at least one row of two tokens is needed")
    _check_ids("input_ids", tensors["input_ids"], vocabulary, ignored=False)
    _check_ids("labels", tensors["labels"], vocabulary, ignored=True)
    if (given := tensors.get("position_ids")) is not None:
        _check_positions(given, most_positions)
    if (mask := tensors.get("attention_mask")) is not None:
        _check_mask(mask)
    if token_mask:
        tensors["token_mask"] = torch.ones_like(tensors["input_ids"]) if mask is None else mask
    document_ids = tensors.pop("document_ids", None)
    if document_ids is None and by_length:
        document_ids = _documents(tensors)
    if document_ids is not None:
        tensors["position_ids"] = _positions(document_ids, tensors.get("position_ids"))
    positions = tensors.get("position_ids")
    plain = positions is not None and torch.equal(positions, torch.arange(shape[1]).expand(shape))
    if plain and document_ids is None:
        del tensors["position_ids"]
    mask = tensors.get("attention_mask")
    if mask is not None and _hides_only_ends(mask, tensors["labels"]):
        del tensors["attention_mask"]
    if "attention_mask" in tensors and "position_ids" in tensors and document_ids is not None:
        raise UserError("document_ids and attention_mask together", "batch", "make the padding a separate document")
    return tensors, len(find_targets(tensors["labels"]))


def rows_of_rank(
    batch: Mapping[str, torch.Tensor], rank: int, ranks: int, together: int = 1
) -> dict[str, torch.Tensor]:
    """A rank's share of the rows of a checked batch, in the order of the batch. `together`: see `Objective.rows_together`.

    All shares have the same number of rows, so that all ranks compute the same passes over the same shapes: a share that would
    be shorter repeats the last row, without targets.
    """
    rows = len(batch["input_ids"])
    share = -(-rows // (ranks * together)) * together
    index = torch.arange(rank * share, (rank + 1) * share)
    repeated = index >= rows
    part = {name: tensor[index.clamp(max=rows - 1)] for name, tensor in batch.items()}
    part["labels"][repeated] = IGNORED
    if "token_mask" in part:
        part["token_mask"][repeated] = 0
    return part


def most_positions(config: Any) -> int | None:
    """Number of positions that a model has a table for; None if it computes them for rows of any length."""
    text = config.get_text_config()
    computed = getattr(text, "rope_parameters", None) is not None
    return None if computed else getattr(text, "max_position_embeddings", None)


def is_packed(batch: Mapping[str, torch.Tensor]) -> bool:
    """Whether a row of a checked batch holds several documents: its positions restart."""
    positions = batch.get("position_ids")
    return positions is not None and bool((positions[:, 1:] <= positions[:, :-1]).any())


def _check_ids(name: str, ids: torch.Tensor, vocabulary: int, ignored: bool) -> None:
    wrong = (ids < 0) | (ids >= vocabulary)
    if ignored:
        wrong &= ids != IGNORED
    remedy = "the data was made with another tokenizer than the model's"
    _refuse_where(wrong, ids, name, f"outside the vocabulary of {vocabulary}", remedy)


def _check_positions(positions: torch.Tensor, most: int | None) -> None:
    remedy = "count from 0 in each document, or leave position_ids out"
    _refuse_where(positions < 0, positions, "position_ids", "which is negative", remedy)
    if most is not None:
        what = f"beyond the model's {most} positions"
        _refuse_where(positions >= most, positions, "position_ids", what, f"{remedy}; or give shorter rows")


def _check_mask(mask: torch.Tensor) -> None:
    _refuse_where((mask != 0) & (mask != 1), mask, "attention_mask", "neither 0 nor 1", "1: a token, 0: padding")
    empty = (mask == 0).all(dim=1)
    if bool(empty.any()):
        where = f"batch['attention_mask'][{int(empty.nonzero()[0])}]"
        raise UserError("hides every token of the row", where, "leave the row out, or give it a token without a label")


def _hides_only_ends(mask: torch.Tensor, labels: torch.Tensor) -> bool:
    """Whether a mask hides nothing but tokens behind the last target of their row. See [Note: masks that change nothing]."""
    at_end = not bool((mask[:, 1:] > mask[:, :-1]).any())
    return at_end and not bool(((mask == 0) & (labels != IGNORED)).any())


def _refuse_where(wrong: torch.Tensor, values: torch.Tensor, name: str, what: str, remedy: str) -> None:
    """Raise for the first wrong value, with its place; `what` says why it is wrong."""
    if bool(wrong.any()):
        row, column = (int(i) for i in wrong.nonzero()[0])
        raise UserError(f"holds {int(values[row, column])}, {what}", f"batch[{name!r}][{row}, {column}]", remedy)


def _documents(tensors: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """Document ids by positions that restart, and with padding as a document, whose mask is removed.

    None if a mask has holes: such a row is one document.
    """
    ids, mask, positions = (tensors.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
    assert ids is not None
    starts = torch.zeros_like(ids, dtype=torch.bool)
    if mask is not None:
        begins = mask[:, 1:] > mask[:, :-1]
        if bool((begins.sum(dim=1) + mask[:, 0] > 1).any()):
            return None
        starts[:, 1:] |= mask[:, 1:] != mask[:, :-1]
        del tensors["attention_mask"]
    if positions is not None:
        starts[:, 1:] |= positions[:, 1:] != positions[:, :-1] + 1
    return starts.cumsum(dim=1)


def _positions(document_ids: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
    """Positions that restart at 0 with each document. Given ones must be equal to them."""
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    index = torch.arange(document_ids.shape[1]).expand(document_ids.shape)
    positions = index - torch.where(starts, index, 0).cummax(dim=1).values
    if given is not None and not torch.equal(given, positions):
        raise UserError(
            "do not restart at 0 with each document of document_ids, counting by one",
            "batch['position_ids']",
            "leave position_ids out: they follow from document_ids",
        )
    return positions
