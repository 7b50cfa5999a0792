"""From the `data` section of a config to rows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatrain.config.schema import DataConfig, SourceConfig
from megatrain.data import packing
from megatrain.data.build import Builder, Log
from megatrain.data.encoder import Encoder
from megatrain.data.groups import CHOSEN, OTHER
from megatrain.data.render import ChatRenderer
from megatrain.data.rows import PackedRows, RowGroup
from megatrain.data.samples import DataKind
from megatrain.data.specials import SpecialTokens
from megatrain.data.store import TokenStore
from megatrain.errors import Problems, UserError
from megatrain.units import counted

logger = logging.getLogger(__name__)

MUCH_DROPPED = 0.1
"""Warn if a larger share of a source's samples is dropped as too long; that is rarely intended."""


@dataclass(frozen=True)
class Part:
    """A tokenized source, and the samples of it that are used."""

    source: SourceConfig
    store: TokenStore  # all samples of the source
    chosen: np.ndarray  # (C,) int64: numbers of the samples used here

    @property
    def lengths(self) -> np.ndarray:
        """(C,) int64: tokens of each chosen sample, before any is cut."""
        return self.store.lengths[self.chosen]

    def needs(self, packing: bool) -> np.ndarray:
        """Tokens that a row must hold, of each sample; of a group with packing the sum, else the longer one."""
        if not self.store.grouped:
            return self.lengths
        both = self.lengths.reshape(-1, 2)
        return both.sum(axis=1) if packing else both.max(axis=1)


@dataclass(frozen=True)
class OpenedData:
    """All data of a run as tokens, before packing."""

    train: tuple[Part, ...]
    val: tuple[Part, ...]  # empty without `data.val`
    pad_id: int


def load_data(
    data: DataConfig,
    tokenizer: Any,
    *,
    vocab_size: int | None = None,
    model_max_length: int | None = None,
    seed: int = 0,
    date: str | None = None,
    log: Log | None = None,
    wanted: DataKind = "samples",
) -> tuple[PackedRows, PackedRows | None]:
    """Read, render, tokenize (or load from the cache) and pack all data of a run.

    Args:
        vocab_size: Rows of the model's embedding. Larger ids are an error here instead of in the step that uses them.
        model_max_length: Positions of the model; None: not checked.
        seed: Determines which samples share a row.
        date: The day that chat templates read, YYYY-MM-DD; None: `data.date`, else today.
        log: Takes a line of text for the user; None: `logging`.
        wanted: What the objective is trained on.

    Returns:
        The training rows, and the held-out rows (None without `data.val`).

    Raises:
        UserError: The data cannot be used; names file and line.
    """
    log = log or logger.info
    limits = {"vocab_size": vocab_size, "model_max_length": model_max_length}
    opened = open_data(data, tokenizer, **limits, date=date, log=log, wanted=wanted)
    return pack_data(data, opened, seed, log)


def load_val(
    data: DataConfig,
    tokenizer: Any,
    *,
    vocab_size: int | None,
    model_max_length: int | None,
    seed: int,
    date: str | None,
    log: Log,
    wanted: DataKind = "samples",
) -> PackedRows:
    """As `load_data`, but only the held-out rows, without the errors about training rows. `data.val` must be set."""
    limits = {"vocab_size": vocab_size, "model_max_length": model_max_length}
    opened = open_data(data, tokenizer, **limits, date=date, log=log, wanted=wanted)
    return _rows(data, opened.pad_id, opened.val, "val", seed, log)


def open_data(
    data: DataConfig,
    tokenizer: Any,
    *,
    vocab_size: int | None = None,
    model_max_length: int | None = None,
    date: str | None = None,
    log: Log,
    wanted: DataKind = "samples",
) -> OpenedData:
    """The first half of `load_data`: everything except packing. The result does not depend on `data.max_tokens`."""
    check_row_length(data.max_tokens, model_max_length)
    cache = Path(data.cache_dir).expanduser() if data.cache_dir else Path.home() / ".cache" / "megatrain" / "tokens"
    encoder = Encoder(tokenizer)
    renderer = ChatRenderer(
        tokenizer, data.chat_template, data.train_on, data.left_out, data.chat_template_kwargs, data.date or date
    )
    specials = SpecialTokens(tokenizer, data.special_tokens)
    builder = Builder(encoder, renderer, specials, cache, data.allow_rejects, log, wanted)

    _peek_all(builder, data)
    train = _open(builder, data.train, "data.train", vocab_size)
    if data.val is None:
        return OpenedData(tuple(train), (), encoder.pad)
    if data.val.fraction is not None:
        return OpenedData(*_split(train, data.val.fraction), encoder.pad)
    val = _open(builder, data.val.sources or (), "data.val.sources", vocab_size)
    known = np.unique(np.concatenate([part.store.hashes for part in train]))
    for part in val:
        if shared := int(np.isin(part.store.hashes, known).sum()):
            samples = f"{shared:,} of {len(part.store):,} samples of {part.source.path}"
            log(f"warning: {samples} are also in the training data")
    return OpenedData(tuple(train), tuple(val), encoder.pad)


def check_row_length(max_tokens: int, model_max_length: int | None) -> None:
    """Raise a UserError if rows are longer than the model's positions (None: unlimited)."""
    if model_max_length is not None and max_tokens > model_max_length:
        what = f"rows of {max_tokens} tokens are longer than the {model_max_length} positions of the model"
        remedy = (
            f"set data.max_tokens to {model_max_length} or less, or raise max_position_embeddings in the model's config"
        )
        raise UserError(what, "data.max_tokens", remedy)


def pack_data(data: DataConfig, opened: OpenedData, seed: int, log: Log) -> tuple[PackedRows, PackedRows | None]:
    """The second half of `load_data`: rows of `data.max_tokens`; UserError if samples are longer, or none is left."""
    train = _rows(data, opened.pad_id, opened.train, "train", seed, log)
    return train, _rows(data, opened.pad_id, opened.val, "val", seed, log) if opened.val else None


def _peek_all(builder: Builder, data: DataConfig) -> None:
    """Raise one error for the problems of all sources before the first is tokenized, which may take long."""
    val = data.val.sources or () if data.val is not None else ()
    named = [(source, f"data.train[{i}]") for i, source in enumerate(data.train)]
    named += [(source, f"data.val.sources[{i}]") for i, source in enumerate(val)]
    problems = Problems()
    for source, where in named if len(named) > 1 else ():
        with problems.collect():
            builder.peek(source, where)
    problems.raise_all()


def _open(builder: Builder, sources: Sequence[SourceConfig], where: str, vocab_size: int | None) -> list[Part]:
    parts = []
    for i, source in enumerate(sources):
        store = builder.open(source, f"{where}[{i}]")
        if vocab_size is not None:
            store.check_ids(vocab_size)
        parts.append(Part(source, store, np.arange(len(store))))
    return parts


def _split(parts: Sequence[Part], fraction: float) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """Training and validation samples of each source."""
    held_out = [packing.in_fraction(part.store.hashes, fraction) for part in parts]
    train = tuple(Part(p.source, p.store, np.flatnonzero(~out)) for p, out in zip(parts, held_out, strict=True))
    val = tuple(Part(p.source, p.store, np.flatnonzero(out)) for p, out in zip(parts, held_out, strict=True))
    for name, side in (("validation", val), ("training", train)):
        if not any(len(part.chosen) for part in side):
            samples = sum(len(part.store) for part in parts)
            raise UserError(
                f"a fraction of {fraction} of {counted(samples, 'sample')} leaves none for {name}"
                if samples > 1
                else "the data is a single sample, which cannot be split into training and validation",
                where="data.val.fraction",
                remedy="choose another fraction, or give separate files (data.val.sources); a .txt file is one sample, "
                "or with format: lines one sample per line",
            )
    return train, val


def _rows(data: DataConfig, pad_id: int, parts: Sequence[Part], name: str, seed: int, log: Log) -> PackedRows:
    if data.overflow == "error":
        _refuse_overflow(parts, data.max_tokens, data.packing)
    groups = []
    for part in parts:
        segments = _segments(data, part, seed, log)
        source = part.source
        groups.append(RowGroup(source.path, source.weight, part.store, segments, data.max_tokens, padded=data.packing))
    rows = PackedRows(tuple(groups), data.max_tokens, data.packing, pad_id)
    if len(rows) == 0:
        what = f"no samples are left for {name} with overflow: {data.overflow} and rows of {data.max_tokens} tokens"
        raise UserError(what, "data.overflow", "raise data.max_tokens, or use overflow: split")
    stats = rows.stats
    if stats.targets == 0:
        raise UserError(
            f"no token of {name} would be trained: its {counted(stats.samples, 'sample')} have {counted(stats.tokens, 'token')}, "
            "and the first token of a document is never a target",
            where="data.train" if name == "train" else "data.val",
            remedy="check that this is the right file, and its format; a document needs at least two tokens",
        )
    filled = f" of {data.max_tokens} tokens, {stats.efficiency:.1%} filled" if data.packing else ", one sample each"
    what = _counted_samples(rows)
    log(
        f"{name}: {what} in {counted(stats.rows, 'row')}{filled}; {counted(stats.tokens, 'token')}, "
        f"{stats.targets:,} trained; longest {stats.longest:,}"
    )
    return rows


def _counted_samples(rows: PackedRows) -> str:
    """`12 samples`, `6 pairs (12 sequences)`, `6 labelled answers (4 good, 12 sequences)`"""
    samples = rows.stats.samples
    if not rows.grouped:
        return counted(samples, "sample")
    roles = np.concatenate([group.store.roles[np.unique(group.segments.samples)] for group in rows.groups])
    if not (roles == OTHER).any():
        return f"{counted(samples // 2, 'pair')} ({samples:,} sequences)"
    return f"{counted(samples // 2, 'labelled answer')} ({(roles == CHOSEN).sum():,} good; {samples:,} sequences)"


def _segments(data: DataConfig, part: Part, seed: int, log: Log) -> packing.Segments:
    store, chosen, lengths = part.store, part.chosen, part.lengths
    if store.kind == "stream":
        cut = packing.cut_stream if data.packing else packing.one_per_row_stream
        return cut(chosen, lengths, data.max_tokens)

    def targets_in(sample: int, offset: int, length: int) -> int:
        return int(store.run(sample, offset, length)[1].sum())

    if store.grouped and data.overflow == "split":
        raise UserError("two sequences that are compared cannot be split", "data.overflow", "use drop or truncate")
    cut = (chosen, lengths, data.max_tokens, data.overflow, targets_in)
    pieces = packing.cut_groups(*cut, data.packing) if store.grouped else packing.cut_samples(*cut)
    count, noun, others = (len(lengths) // 2, "group", "") if store.grouped else (len(lengths), "sample", " or split")
    if pieces.too_long:
        lost = f"; {pieces.lost:,} left out" if pieces.lost else ""
        share = pieces.too_long / count
        text = (
            f"{part.source.path}: {pieces.too_long:,} of {counted(count, noun)} "
            f"({share:.1%}) longer than {data.max_tokens} tokens: {data.overflow}{lost}"
        )
        much = data.overflow == "drop" and share > MUCH_DROPPED
        log(f"warning: {text}; raise data.max_tokens, or set data.overflow to truncate{others}" if much else text)
    if not data.packing:
        return packing.one_per_row(pieces)
    return packing.pack(pieces, data.max_tokens, seed, of=2 if store.grouped else 1)


def _refuse_overflow(parts: Sequence[Part], max_tokens: int, packed: bool) -> None:
    """Raise if any sample does not fit into a row; one error for all sources."""
    lines, longest = [], (0, "")
    for part in parts:
        lengths = part.needs(packed)
        if part.store.kind == "stream" or not (long := int((lengths > max_tokens).sum())):
            continue
        at = int(np.argmax(lengths))
        grouped = part.store.grouped
        longest = max(longest, (int(lengths[at]), part.store.place(int(part.chosen[2 * at if grouped else at]))))
        noun = ("groups, of two sequences in one row," if packed else "groups") if grouped else "samples"
        lines.append(f"{part.source.path}: {long:,} of {len(lengths):,} {noun} longer than {max_tokens} tokens")
    if lines:
        ways = "drop or truncate" if any(part.store.grouped for part in parts) else "drop, truncate or split"
        raise UserError(
            "; ".join(lines) + f"; the longest has {longest[0]:,} ({longest[1]})",
            where="data.max_tokens",
            remedy=f"raise data.max_tokens to {longest[0]}, or set data.overflow to {ways}",
        )
