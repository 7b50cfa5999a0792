"""`megatrain data`: show the data of a run as tokens, before anything is trained.

Lengths are counted first, so they are shown even if the rows cannot be made (`overflow: error`). The preview shows tokens as the
model sees them, special tokens included: trained tokens in green on a terminal, in brackets elsewhere. Control characters of a
sample are shown as codes, and all its lines are indented, so none looks like a line of the command.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from rich.text import Text

from megatrain.config.schema import RunConfig
from megatrain.data import packing
from megatrain.data.load import Part, open_data, pack_data
from megatrain.data.rows import StepLoader
from megatrain.errors import Problems, UserError
from megatrain.metrics.logger import RunLogger, quiet_libraries
from megatrain.run.preflight import preflight_data, preflight_model
from megatrain.text import visible
from megatrain.units import counted

if TYPE_CHECKING:
    from megatrain.data.rows import PackedRows, RowGroup
    from megatrain.data.store import TokenStore

TRAINED, MASKED = "bold green", "dim"
_BAR = 40
_HEAD_SHARE = 0.75  # of the tokens shown of a long sample are its beginning; the rest is its end
_BROKEN = "\ufffd"  # decoded from an incomplete character


class Bin(NamedTuple):
    """Number of samples with `begin` to `end` tokens, inclusive."""

    begin: int
    end: int
    count: int


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens, all trained or all masked, as text; or `left_out` tokens that are not shown."""

    text: str
    trained: bool
    left_out: int = 0


def inspect_data(run: RunConfig, *, samples: int = 3, most_tokens: int = 400) -> None:
    """Print the sources, rejects, lengths and rows of a run, and some samples of each source.

    Of each sample at most `most_tokens` are shown, without its middle. No weights are read. Raises as `check`.
    """
    quiet_libraries()
    with RunLogger() as log:
        problems = Problems()
        files = preflight_model(run, problems)
        preflight_data(run, problems, files)
        problems.raise_all()
        assert files is not None, "the model could not be opened without a problem"
        limits = {"vocab_size": files.vocab_size, "model_max_length": files.positions}
        opened = open_data(run.data, files.tokenizer, **limits, log=log.info)
        seen = set()
        for part in (*opened.train, *opened.val):
            if part.store.folder not in seen:
                _show_report(part, log)
            seen.add(part.store.folder)
        for part in opened.train:
            _show_lengths(part, run.data.max_tokens, log)
        preview = _Preview(files.tokenizer, log, most_tokens, run.run.seed)
        log.info("")
        log.info("rows")
        try:
            train, val = pack_data(run.data, opened, run.run.seed, log.info)
        except UserError:
            # Without rows, show the samples themselves: the user needs them to solve the problem.
            log.info("  none: see the error at the end; the samples below are whole")
            for number, part in enumerate(opened.train):
                preview.of_part(part, samples, number)
            raise
        _show_rows(run, train, log)
        for number, group in enumerate(train.groups):
            preview.of_rows(group, samples, number)
        if val is not None and run.data.val is not None and run.data.val.sources is not None:
            log.info("")
            log.info("held-out samples")
            for number, group in enumerate(val.groups):
                preview.of_rows(group, 1, number)


def histogram(lengths: np.ndarray, max_tokens: int) -> list[Bin]:
    """Counts by length in doubling bins. A bin ends at the row length, which separates the samples that are too long."""
    longest = int(lengths.max(initial=1))
    # bins below the shortest sample would be empty
    first = int(lengths.min(initial=longest))
    edges = {2**power for power in range(longest.bit_length() + 1) if first < 2**power <= longest}
    begins = sorted({first, *edges} | ({max_tokens + 1} if first < max_tokens + 1 <= longest else set()))
    ends = [*(begin - 1 for begin in begins[1:]), longest]
    return [Bin(b, e, int(((lengths >= b) & (lengths <= e)).sum())) for b, e in zip(begins, ends, strict=True)]


def pieces_of(tokenizer: Any, ids: np.ndarray, trained: np.ndarray, most_tokens: int) -> list[Piece]:
    """A sample's tokens as text, split where training begins or ends; without its middle if longer than `most_tokens`.

    `ids`, `trained`: (N,) ids, and which of them are targets (bool).
    """
    if len(ids) <= most_tokens:
        return list(_pieces(tokenizer, ids, trained))
    head = max(1, int(most_tokens * _HEAD_SHARE))
    tail = len(ids) - max(1, most_tokens - head)
    head = _before_character(tokenizer, ids, head) or head
    tail = _nearest(lambda begin: begin < len(ids) and not _text(tokenizer, ids[begin:]).startswith(_BROKEN), tail, 1)
    return [
        *_pieces(tokenizer, ids[:head], trained[:head]),
        Piece("", False, left_out=tail - head),
        *_pieces(tokenizer, ids[tail:], trained[tail:]),
    ]


def _before_character(tokenizer: Any, ids: np.ndarray, end: int) -> int:
    """Number of tokens of `ids[:end]` up to its last complete character; 0 if there is none."""
    return _nearest(lambda end: end <= 0 or not _text(tokenizer, ids[:end]).endswith(_BROKEN), end, -1)


def _nearest(is_whole: Callable[[int], bool], cut: int, direction: int) -> int:
    """The first position from `cut` on that is not inside a character (of at most four bytes); else `cut`."""
    return next((place for place in range(cut, cut + 4 * direction, direction) if is_whole(place)), cut)


def _text(tokenizer: Any, ids: np.ndarray) -> str:
    return tokenizer.decode(ids.tolist(), skip_special_tokens=False)


def _pieces(tokenizer: Any, ids: np.ndarray, trained: np.ndarray) -> Iterator[Piece]:
    borders = [0, *(np.flatnonzero(np.diff(trained.astype(np.int8))) + 1).tolist(), len(ids)]
    # A character made of several tokens is shown with its last token.
    ends = [*(_before_character(tokenizer, ids, border) for border in borders[1:-1]), len(ids)]
    before = ""
    for begin, end, kind in zip([0, *ends], ends, borders, strict=False):
        if begin >= end:
            continue
        # Some tokenizers drop leading whitespace in decode: take what the tokens add to the text before them.
        upto = _text(tokenizer, ids[:end])
        own = _text(tokenizer, ids[begin:end])
        yield Piece(upto[len(before) :] if upto.startswith(before) else own, bool(trained[kind]))
        before = upto


def marked(pieces: Sequence[Piece], *, colours: bool, marks: tuple[str, str]) -> Text:
    """Pieces for a console: coloured, or with marks around trained ones. All lines are indented."""
    text = Text("  ")
    for piece in pieces:
        if piece.left_out:
            text.append(f"\n  ... {counted(piece.left_out, 'token')} left out ...\n  ", style="italic")
            continue
        shown = visible(piece.text).replace("\n", "\n  ")  # a sample must not look like a line of ours
        if colours:
            text.append(shown, style=TRAINED if piece.trained else MASKED)
        else:
            text.append(f"{marks[0]}{shown}{marks[1]}" if piece.trained else shown)
    return text


def _show_report(part: Part, log: RunLogger) -> None:
    """What was read of a source, and what was not."""
    meta = part.store.meta
    rejects, not_read = meta["rejects"], meta["not_read"]
    counts = sorted(rejects["counts"].items(), key=lambda item: -item[1])
    rows = {
        "read": meta["readings"],
        "columns not read": [", ".join(not_read["columns"])] if not_read["columns"] else [],
        "keys and keywords that the template does not read": [", ".join((*not_read["keys"], *not_read["keywords"]))]
        if not_read["keys"] or not_read["keywords"]
        else [],
        "rejected": [f"{count:,} of {rejects['seen']:,}: {reason}" for reason, count in counts],
        "left out by the template": [f"{count:,} x {what}" for what, count in meta["left_out"].items()],
        "special tokens in text": [f"{count:,} x {token}" for token, count in meta["special"].items()],
    }
    log.info("")
    log.info(part.source.path)
    for name, lines in rows.items():
        if lines or name not in ("keys and keywords that the template does not read",):
            log.info(f"  {name}: {'; '.join(lines) or 'none'}")


def _show_lengths(part: Part, max_tokens: int, log: RunLogger) -> None:
    lengths = part.lengths
    if not len(lengths):
        return
    stream = part.store.kind == "stream"
    log.info("")
    log.info(f"{part.source.path}: lengths of {len(lengths):,} {'documents' if stream else 'samples'} [tokens]")
    bins = histogram(lengths, max_tokens)
    most = max(one.count for one in bins)
    bar = log.printable("█", "#")
    for one in bins:
        width = -(-one.count * _BAR // most)
        too_long = "  longer than data.max_tokens" if one.begin > max_tokens and one.count and not stream else ""
        log.info(f"  {one.begin:>9,} .. {one.end:>9,}  {bar * width:<{_BAR}} {one.count:>9,}{too_long}")
    half, nine, all_but_one = (int(value) for value in np.percentile(lengths, [50, 90, 99], method="higher"))
    longest = int(np.argmax(lengths))
    log.info(
        f"  median {half:,}, 90% up to {nine:,}, 99% up to {all_but_one:,}; longest {int(lengths[longest]):,} "
        f"({part.store.place(int(part.chosen[longest]))})"
    )
    if not stream and (long := int((lengths > max_tokens).sum())):
        share = f"{long:,} of {len(lengths):,} ({long / len(lengths):.1%})"
        log.info(f"  {share} are longer than data.max_tokens ({max_tokens:,})")


def _show_rows(run: RunConfig, rows: PackedRows, log: RunLogger) -> None:
    if len(rows.groups) > 1:
        for group in rows.groups:
            stats = group.stats
            filled = f", {stats.efficiency:.1%} filled" if group.padded else ""
            rest = f"{filled}, {stats.targets:,} trained; weight {group.weight:g}"
            log.info(f"  {group.name}: {counted(stats.rows, 'row')}{rest}")
    loader = StepLoader(rows, run.rows_per_step, run.run.seed)
    log.info(
        f"an epoch: {counted(loader.rows_per_epoch, 'row')} in {counted(loader.steps_per_epoch, 'step')} of "
        f"{counted(run.rows_per_step, 'row')}; the run: {counted(run.schedule.total_steps(loader.steps_per_epoch), 'step')}"
    )


class _Preview:
    """Shows samples as the model sees them, chosen at random by a fixed seed."""

    def __init__(self, tokenizer: Any, log: RunLogger, most_tokens: int, seed: int):
        self._tokenizer, self._log, self._most_tokens, self._seed = tokenizer, log, most_tokens, seed
        self._marks = (log.printable("⟦", "[["), log.printable("⟧", "]]"))

    def of_rows(self, group: RowGroup, samples: int, number: int) -> None:
        """Show samples as they are in the rows of source `number`, possibly cut."""
        segments = group.segments
        for one in packing.permutation(len(segments.lengths), self._seed, 2, number)[:samples].tolist():
            self._show(group.store, int(segments.samples[one]), int(segments.offsets[one]), int(segments.lengths[one]))

    def of_part(self, part: Part, samples: int, number: int) -> None:
        """Show whole samples of source `number`."""
        for one in packing.permutation(len(part.chosen), self._seed, 2, number)[:samples].tolist():
            self._show(part.store, int(part.chosen[one]), 0, int(part.lengths[one]))

    def _show(self, store: TokenStore, sample: int, offset: int, length: int) -> None:
        ids, trained = store.run(sample, offset, length)
        log, marks = self._log, self._marks
        kinds = "in green" if log.colours else f"in {marks[0]}{marks[1]}"
        log.info("")
        log.info(f"--- {store.place(sample)}: {counted(len(ids), 'token')}, {int(trained.sum()):,} trained, {kinds}")
        pieces = pieces_of(self._tokenizer, ids, trained, self._most_tokens)
        log.show(marked(pieces, colours=log.colours, marks=marks))
