"""Validation of batches, before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatrain.engine.objective import IGNORED, find_targets
from megatrain.errors import UserError

KEYS = ("input_ids", "labels", "position_ids", "document_ids", "attention_mask")


def checked(
    batch: Mapping[str, torch.Tensor],
    vocabulary: int,
    most_positions: int | None = None,
    more_keys: Sequence[str] = (),
) -> tuple[dict[str, torch.Tensor], int]:
    """Validate a batch and bring it into the form that engines compute.

    Document ids become positions that restart, by which HF's code tells documents apart. Default positions (0..T-1 in every row)
    are dropped, because without them HF takes its plain causal path, and so is a mask that hides nothing.

    Args:
        batch: int64 CPU tensors of one shape (rows, T).
        vocabulary: Number of token ids.
        most_positions: Positions that the model has a table for; None: no limit.
        more_keys: The objective's `batch_keys`: tensors of any type, of the same shape.

    Returns:
        (`input_ids`, `labels`, the objective's tensors and where needed `position_ids`, `attention_mask`; number of target
        tokens).
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
    document_ids = tensors.pop("document_ids", None)
    if document_ids is not None:
        tensors["position_ids"] = _positions(document_ids, tensors.get("position_ids"))
    positions = tensors.get("position_ids")
    if positions is not None and torch.equal(positions, torch.arange(shape[1]).expand(shape)):
        del tensors["position_ids"]
    mask = tensors.get("attention_mask")
    if mask is not None and bool(mask.all()):
        del tensors["attention_mask"]
    if "attention_mask" in tensors and "position_ids" in tensors and document_ids is not None:
        raise UserError("document_ids and attention_mask together", "batch", "make the padding a separate document")
    return tensors, len(find_targets(tensors["labels"]))


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


def _refuse_where(wrong: torch.Tensor, values: torch.Tensor, name: str, what: str, remedy: str) -> None:
    """Raise for the first wrong value, with its place; `what` says why it is wrong."""
    if bool(wrong.any()):
        row, column = (int(i) for i in wrong.nonzero()[0])
        raise UserError(f"holds {int(values[row, column])}, {what}", f"batch[{name!r}][{row}, {column}]", remedy)


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
