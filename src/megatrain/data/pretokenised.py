"""Records that hold token ids, with the masks that tools write beside them."""

from __future__ import annotations

from typing import Any

from megatrain.data.samples import Fields, SampleRejected, TokenSample

MASKS = ("labels", "completion_mask", "assistant_masks", "loss_mask")
"""Columns that select the trained tokens; a token is trained if all of them say so."""
CHECKED = ("attention_mask", "position_ids", "seq_lengths")
"""`attention_mask` 0 is padding. The others may say that a record holds several documents, which is refused."""

HARMLESS = ("special_tokens_mask",)
"""Masks of which none says what is trained."""


def tokens(fields: Fields) -> TokenSample:
    ids = fields.get("input_ids")
    if not (isinstance(ids, list) and set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < 2**31):
        raise SampleRejected("input_ids is not a list of token ids")
    begin, end = _attended(fields, len(ids))
    _refuse_packed(fields, begin, end)
    trained: list[bool] | None = None
    for name in MASKS:
        if (mask := fields.get(name)) is None:
            continue
        _check_length(name, mask, len(ids))
        own = _labelled(ids[begin:end], mask[begin:end]) if name == "labels" else _flags(name, mask[begin:end])
        trained = own if trained is None else [a and b for a, b in zip(trained, own, strict=True)]
    return TokenSample(ids[begin:end] if (begin, end) != (0, len(ids)) else ids, trained)


def _attended(fields: Fields, length: int) -> tuple[int, int]:
    """The range of tokens whose `attention_mask` is 1."""
    mask = fields.get("attention_mask")
    if mask is None:
        return 0, length
    _check_length("attention_mask", mask, length)
    flags = _flags("attention_mask", mask)
    if all(flags):
        return 0, length
    if not any(flags):
        raise SampleRejected("attention_mask is 0 everywhere")
    begin, end = flags.index(True), length - flags[::-1].index(True)
    if not all(flags[begin:end]):
        raise SampleRejected("attention_mask has zeros between ones")
    return begin, end


def _refuse_packed(fields: Fields, begin: int, end: int) -> None:
    """Refuse a record that holds several documents: they would attend to each other."""
    positions, lengths = fields.get("position_ids"), fields.get("seq_lengths")
    if isinstance(positions, list) and positions[begin:end] != list(range(end - begin)):
        raise SampleRejected("position_ids are not 0, 1, 2, ...: the record is packed already")
    if isinstance(lengths, list) and len(lengths) > 1:
        raise SampleRejected("seq_lengths has several entries: the record is packed already")


def _labelled(ids: list[int], labels: list[Any]) -> list[bool]:
    try:
        other = {label for label, token in zip(labels, ids, strict=True) if label != token}
    except TypeError:  # a list, say
        other = {None}
    if not other <= {-100}:
        # A target is always the row's next token; labels can only select.
        raise SampleRejected("labels differ from input_ids where they are not -100")
    return [label != -100 for label in labels]


def _flags(name: str, mask: list[Any]) -> list[bool]:
    if not all(flag in (0, 1) for flag in mask):
        raise SampleRejected(f"{name} is not a list of 0 and 1")
    return [bool(flag) for flag in mask]


def _check_length(name: str, mask: object, length: int) -> None:
    if not isinstance(mask, list) or len(mask) != length:
        raise SampleRejected(f"{name} is not as long as input_ids")
