"""From the files of a source to its token store, through a cache.

The cache is a folder of stores, each named by a hash of everything that determines its content: the files (path, size,
time), format, columns, tokenizer, template, `train_on`, and versions. Row length, packing and splits are applied later and are
not part of it. A store is built under a temporary name and renamed once it is complete. A lock keeps a second run from building
the same store; without locks, the first to rename wins. Memory stays constant: a batch of about 256 KB of text, and file buffers.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import logging
import os
import shutil
import socket
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from filelock import FileLock, Timeout

from megatrain.config.schema import SourceConfig
from megatrain.data import formats
from megatrain.data.conversations import is_empty
from megatrain.data.encoder import Encoder
from megatrain.data.files import FileProgress, file_type, kind_of
from megatrain.data.groups import Encoded, GroupWriter
from megatrain.data.pieces import Piece
from megatrain.data.render import ChatRenderer, Rendered
from megatrain.data.samples import (
    ChatSample,
    DataKind,
    LabelledSample,
    PairSample,
    PromptSample,
    Sample,
    SampleRejected,
    TextSample,
    TokenSample,
)
from megatrain.data.sources import Record, find_files, is_text, read_records, unit_of
from megatrain.data.specials import SpecialTokens
from megatrain.data.splits import Found
from megatrain.data.store import VERSION, Kind, StoreWriter, TokenStore, place
from megatrain.errors import UserError
from megatrain.units import counted

BATCH_CHARS = 1 << 18
"""Characters tokenized at once: enough to keep the tokenizer's threads busy, little enough for signals in between."""
PEEKED_RECORDS = 100
"""Records of each file that are read to determine its format."""
PROGRESS_S = 0.5
"""Seconds between progress messages; the log may show fewer."""
EXAMPLES = 3
"""Places kept for each reason of a rejection."""
MAX_REASONS = 40
"""Further reasons are counted together: a template may quote the sample in its message, which makes every reason unique."""
MOST_TOKENS_NAMED = 8
EARLY_CHECK = 200
"""After this many samples, a source most of whose samples are rejected is refused right away instead of after hours."""

Log = Callable[[str], None]

logger = logging.getLogger(__name__)


@dataclass
class Rejects:
    """The rejected samples of one source, counted by reason, with the places of the first few."""

    seen: int = 0  # samples read, rejected ones included
    counts: dict[str, int] = field(default_factory=dict)  # by reason
    examples: dict[str, list[str]] = field(default_factory=dict)  # the first places, by reason

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    @property
    def share(self) -> float:
        return self.total / max(self.seen, 1)

    def add(self, problem: SampleRejected, place: str) -> None:
        reason = problem.reason
        if reason not in self.counts and len(self.counts) >= MAX_REASONS:
            reason = "other reasons"
        self.counts[reason] = self.counts.get(reason, 0) + 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < EXAMPLES:
            examples.append(f"{place} ({problem.detail})" if problem.detail else place)

    def report(self) -> list[str]:
        """One line per reason, the most frequent first."""
        lines = []
        for reason, count in sorted(self.counts.items(), key=lambda item: (-item[1], item[0])):
            more = ", ..." if count > len(self.examples[reason]) else ""
            lines.append(f"{count} x {reason}: {', '.join(self.examples[reason])}{more}")
        return lines

    def check(self, allowed: float, where: str) -> None:
        """Raise a UserError with all reasons and their places if more than the share `allowed` was rejected."""
        if self.total == 0 or self.share <= allowed:
            return
        enough = min(1.0, -(-self.total * 1000 // self.seen) / 1000)  # rounded up, so that setting it is enough
        raise UserError(
            f"{self.total:,} of {self.seen:,} samples cannot be used ({self.share:.1%}; {allowed:.1%} allowed):\n    "
            + "\n    ".join(self.report()),
            where=where,
            remedy="check that this is the right file, and its format"
            if self.total == self.seen
            else f"repair them, or set data.allow_rejects to {enough:g} to train without them",
        )

    def check_early(self, allowed: float, where: str) -> None:
        """Refuse a source that is plainly wrong long before its end."""
        if self.seen == EARLY_CHECK and self.share > max(allowed, 0.5):
            self.check(allowed, where)


@dataclass(frozen=True)
class Builder:
    """Turns sources into token stores."""

    encoder: Encoder
    renderer: ChatRenderer
    specials: SpecialTokens
    cache_dir: Path
    allow_rejects: float  # share of a source's samples that may be rejected
    log: Log
    wanted: DataKind = "samples"

    def open(self, source: SourceConfig, where: str) -> TokenStore:
        """The store of a source (its config key is `where`): from the cache, or built now.

        Raises:
            UserError: Files are missing, unreadable, empty or of no known format, or too many samples are rejected.
        """
        found, folder, store = self._find(source, where)
        cached = store is not None
        if store is None:
            store = self._build(source, found.files, folder, where)
        meta, rejects = store.meta, Rejects(**store.meta["rejects"])
        self.log(
            f"{source.path}: {'; '.join(meta['readings'])}: {counted(rejects.seen, 'sample')}, "
            f"{counted(meta['tokens'], 'token')}, {meta['targets']:,} trained{' (from the cache)' if cached else ''}"
        )
        for line in (*found.remarks, *meta["notes"], *rejects.report()):
            self.log(f"{source.path}: {line}")
        rejects.check(self.allow_rejects, source.path)
        if len(store) == 0:
            raise _no_samples(source.path, rejects)
        return store

    def peek(self, source: SourceConfig, where: str) -> None:
        """Check the format of a source's files by their first records, unless the source is in the cache. Raises as `open`."""
        found, _, store = self._find(source, where)
        if store is None:
            _SourceBuild(self, source, found.files, where).samples()[1].close()

    def _find(self, source: SourceConfig, where: str) -> tuple[Found, Path, TokenStore | None]:
        """The files of a source, the folder of its store, and the store if it exists."""
        found = find_files(source.path, f"{where}.path", subset=source.subset, split=source.split)
        digest = hashlib.sha256()
        stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in found.files]
        settings = (
            source.format,
            sorted(source.columns.items()),
            sorted(source.ignore),
            *self.renderer.settings,
            self.specials.mode,
            *((self.wanted,) if self.wanted != "samples" else ()),
        )
        for part in (VERSION, stats, settings, self.encoder.fingerprint()):
            digest.update(repr(part).encode())
        folder = self.cache_dir / digest.hexdigest()[:32]
        return found, folder, TokenStore.open(folder)

    def _build(self, source: SourceConfig, files: list[Path], folder: Path, where: str) -> TokenStore:
        try:
            self.cache_dir.mkdir(parents=True, exist_ok=True)
            with _only_builder(folder, self.log) as alone:
                if (store := TokenStore.open(folder)) is not None:
                    return store  # another run built it while this one waited
                if alone:
                    # left by a killed run of this machine: nobody else here can be building it, because we hold the lock
                    for leftover in folder.parent.glob(f"{folder.name}.{socket.gethostname()}.*.tmp"):
                        shutil.rmtree(leftover, ignore_errors=True)
                owner = f"{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
                temporary = folder.with_name(f"{folder.name}.{owner}.tmp")
                temporary.mkdir()
                try:
                    _SourceBuild(self, source, files, where).write(temporary)
                    _rename(temporary, folder)
                except BaseException:
                    shutil.rmtree(temporary, ignore_errors=True)
                    raise
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise UserError(
                "no space for the tokenized data" if full else f"cannot be written: {error.strerror or error}",
                where=str(self.cache_dir),
                remedy=f"set data.cache_dir to a {'folder on a disk with more space' if full else 'writable folder'}",
            ) from error
        store = TokenStore.open(folder)
        assert store is not None, f"{folder} is incomplete although it was just written"
        return store


class _SourceBuild:
    """One pass over a source's files, writing a store."""

    def __init__(self, builder: Builder, source: SourceConfig, files: list[Path], where: str):
        self._encoder, self._renderer = builder.encoder, builder.renderer
        self._allowed = builder.allow_rejects
        self._wanted: DataKind = builder.wanted
        self._source, self._files, self._where = source, files, where
        plain, named = source.format in ("text", "lines"), tuple(sorted(source.columns.values()))
        self._kinds = [kind_of(file, plain, named) for file in files]
        self._rejects = Rejects()
        self._specials = builder.specials
        self._turn_ends: list[str] | None = None  # tokens that the template writes at the end of a turn
        self._unchecked_cuts = 0
        self._readings: list[str] = []
        self._columns: list[formats.Reading] = []
        self._keys: Counter[str] = Counter()  # of messages, passed to the template: samples that have one
        self._keywords: Counter[str] = Counter()  # for the template
        self._sniffed: list[str] = []  # files called text that hold samples as JSON
        self._prompts: Counter[type[Sample]] = Counter()  # samples of the format prompt_completion, by kind
        self._as_alpaca = ""  # the columns setting that would render them with the template
        self._progress = [FileProgress(file) for file in files]
        self._next_message = time.monotonic() + PROGRESS_S

    def write(self, folder: Path) -> None:
        self._specials.take()
        self._take_notes()  # drops the remarks of a failed build
        self._renderer.take_turn_ends()
        self._renderer.take_left_out()
        kind, samples = self.samples()
        writer = StoreWriter(folder, kind)
        try:
            (self._write_stream if kind == "stream" else self._write_samples)(writer, samples)
            self._rejects.check(self._allowed, self._source.path)
            if writer.samples == 0:
                raise _no_samples(self._source.path, self._rejects)
            files = [{"path": str(f), "unit": unit_of(kind)} for f, kind in zip(self._files, self._kinds, strict=True)]
            meta = {"readings": self._readings, "notes": self._take_notes(), "files": files, "targets": writer.targets}
            turn_ends = self._renderer.take_turn_ends()
            if self._prompts[PromptSample]:
                turn_ends = sorted({*turn_ends, *self._encoder.suffix[-1:]})
            special = {"special": self._specials.take(), "not_read": self._not_read()}
            ends = {**special, "turn_ends": turn_ends, "left_out": self._renderer.take_left_out()}
            writer.finish({**meta, **ends, "rejects": asdict(self._rejects)})
        finally:
            writer.close()

    def _take_notes(self) -> list[str]:
        notes: list[str] = []
        # `prompt_completion` has two meanings: strings are joined without the template, messages are rendered by it.
        if count := self._prompts[PromptSample]:
            notes.append(f"{counted(count, 'sample')} with prompt and completion as text, joined as they are")
            if self._renderer.has_template:
                notes[0] += f", without {self._renderer.name} (columns: {self._as_alpaca} would use it)"
        if count := self._prompts[ChatSample]:
            made = f"rendered by {self._renderer.name}"
            notes.append(f"{counted(count, 'sample')} with prompt and completion as messages, {made}")
        if self._sniffed:
            named = ", ".join(self._sniffed[:EXAMPLES]) + (", ..." if len(self._sniffed) > EXAMPLES else "")
            notes.append(f"samples as JSON, not plain text (format: text would train it as text): {named}")
        if self._unchecked_cuts:
            notes.append(
                f"{counted(self._unchecked_cuts, 'place')} in long documents where the ids may not be those of the whole"
            )
        return notes + self._special_tokens() + self._unread() + self._renderer.take_notes()

    def _special_tokens(self) -> list[str]:
        """Lines about special tokens that are spelt out in the data."""
        specials, lines = self._specials, []
        if specials.dropped_ends:
            lines.append(f"{counted(specials.dropped_ends, 'message')} with an end token, which the template writes")
        if specials.found:
            named = ", ".join(f"{token} x {count:,}" for token, count in specials.found.most_common(MOST_TOKENS_NAMED))
            chats = self._turn_ends is not None
            as_text = specials.mode == "text" or (specials.mode == "auto" and chats)
            how = "rejected" if specials.mode == "reject" else "read as text" if as_text else "read as control tokens"
            where = counted(specials.samples, "sample")
            lines.append(f"special tokens in the text of {where}, {how} (data.special_tokens): {named}")
        return lines

    def _not_read(self) -> dict[str, list[str]]:
        """Columns, keys of messages and template keywords that were not read."""
        names = self._renderer.names if self._keys or self._keywords else None
        return {
            "columns": sorted(set().union(*(reading.unread for reading in self._columns))),
            "keys": sorted(key for key in self._keys if names and key not in names.words),
            "keywords": sorted(key for key in self._keywords if names and key not in names.variables),
        }

    def _unread(self) -> list[str]:
        """Lines that name what was not read, if anything."""
        unread, template = self._not_read(), self._renderer.name
        said = {
            "columns": "columns not read",
            "keys": f"keys of messages that {template} does not mention",
            "keywords": f"keywords that {template} does not read",
        }
        return [
            f"{said[what]}: {', '.join(name or '(no name)' for name in names)}"
            for what, names in unread.items()
            if names
        ]

    # ---- records

    def samples(self) -> tuple[Kind, Generator[tuple[int, Record, Sample]]]:
        """The kind of the source, and its samples with file number and record. Rejects are counted while reading.

        The call itself reads as much as the format of each file needs.
        """
        opened: list[_OpenFile] = []
        # The formats of all files are determined before any is read in full, so a wrong file is an error right away.
        for number, file in enumerate(self._files):
            records = self._records(number)
            first = list(itertools.islice(records, 1 if is_text(self._kinds[number]) else PEEKED_RECORDS))
            reading = self._reading(
                file, self._kinds[number], [record.value for record in first if isinstance(record.value, dict)]
            )
            if len(self._files) == 1:
                opened.append(_OpenFile(number, file, reading, itertools.chain(first, records)))
            else:  # many open files would use up handles and, for .json, memory for their whole content
                records.close()
                self._progress[number] = FileProgress(file)
                opened.append(_OpenFile(number, file, reading, None))
        by_kind: dict[Kind, Path] = {one.reading.kind: one.file for one in opened if one.reading is not None}
        if len(by_kind) > 1:
            mixed = f"plain text ({by_kind['stream']}) and whole samples ({by_kind['samples']})"
            raise UserError(f"{self._source.path} mixes {mixed}", self._where, "give them as two sources")
        kinds: list[Kind] = [*by_kind, "stream"]
        return kinds[0], self._read(opened)

    def _reading(self, file: Path, kind: str | None, first: list[dict[str, object]]) -> formats.Reading | None:
        """The file's format; None if none of its first records could be read, which the rejects will show."""
        if not first:
            return None
        text = is_text(kind)
        if text and self._source.format not in ("auto", "text", "lines"):
            what = f"format: {self._source.format} does not apply to a plain text file"
            raise UserError(what, str(file), "use text or lines")
        format = "text" if text and self._source.format == "auto" else self._source.format
        reading = formats.find_reading(
            first, format, {} if text else self._source.columns, str(file), self._source.ignore, self._wanted
        )
        self._columns.append(reading)
        if is_text(file_type(file)[0]) and not text:
            self._sniffed.append(file.name)
        if reading.describe() not in self._readings:
            self._readings.append(reading.describe())
        if reading.name == "prompt_completion":
            self._as_alpaca = f"{{instruction: {reading.columns['prompt']}, output: {reading.columns['completion']}}}"
        return reading

    def _read(self, opened: list[_OpenFile]) -> Generator[tuple[int, Record, Sample]]:
        for one in opened:
            inside = False  # a text that comes in pieces; only a whole text can be an empty sample
            for record in one.records or self._records(one.number):
                piece, inside = record.more or inside, record.more
                self._rejects.seen += not record.more
                try:
                    if isinstance(record.value, SampleRejected):
                        raise record.value
                    if one.reading is None:
                        raise SampleRejected("unreadable start of the file")
                    sample = TextSample(record.value["text"]) if piece else one.reading.sample(record.value)
                    self._prompts[type(sample)] += one.reading.name == "prompt_completion"
                except SampleRejected as problem:
                    self._reject(problem, one.number, record.line)
                    continue
                yield one.number, record, sample
                self._report_progress()

    def _reject(self, problem: SampleRejected, file: int, line: int) -> None:
        self._rejects.add(problem, self._place(file, line))
        self._rejects.check_early(self._allowed, self._source.path)

    def _place(self, file: int, line: int) -> str:
        path = self._files[file]
        return place(str(path), unit_of(self._kinds[file]), line)

    def _records(self, number: int) -> Generator[Record]:
        as_lines = self._source.format == "lines"
        return read_records(self._files[number], self._kinds[number], as_lines, self._progress[number])

    def _report_progress(self) -> None:
        """Log the progress as a record with the attribute `share`, which the run logger shows as a bar."""
        if (now := time.monotonic()) < self._next_message:
            return
        self._next_message = now + PROGRESS_S
        done = sum(one.share * one.size_bytes for one in self._progress)
        share = done / max(sum(one.size_bytes for one in self._progress), 1)
        words = f"{self._source.path}: {counted(self._rejects.seen, 'sample')} read"
        logger.info("%s, %.0f%%", words, 100 * share, extra={"share": share})

    # ---- streams

    def _write_stream(self, writer: StoreWriter, samples: Iterator[tuple[int, Record, Sample]]) -> None:
        """Write documents one after another; long ones in pieces, which are tokenized in parallel."""
        batch: list[tuple[Piece, _DocumentEnd | None]] = []
        size = 0
        content_hash, ends_itself, inside = hashlib.blake2b(digest_size=8), False, False
        cutter = self._encoder.cutter()
        for file, record, sample in samples:
            if isinstance(sample, TokenSample):
                if sample.trained is not None:
                    what = f"a mask, which none of the first {PEEKED_RECORDS} records has"
                    self._reject(SampleRejected(what, "set the columns in all records"), file, record.line)
                    continue
                ids = np.asarray(sample.input_ids, dtype=np.uint32)
                writer.extend(ids)
                writer.end_document(file, record.line, _hash_of(ids.tobytes()))
                continue
            assert isinstance(sample, TextSample), sample
            try:
                text = self._specials.in_text(sample.text, not record.more)
            except SampleRejected as problem:
                if record.more or inside:
                    raise UserError(str(problem), self._place(file, record.line), "it is one long sample") from None
                self._reject(problem, file, record.line)
                continue
            inside = record.more
            content_hash.update(sample.text.encode())
            if sample.text.strip():
                ends_itself = self._specials.ends_itself(sample.text)
            pieces = cutter.feed(text, last=not record.more)
            size += sum(len(piece) for piece, _ in pieces)
            batch += [(piece, None) for piece in pieces]
            if not record.more:
                content = int.from_bytes(content_hash.digest(), "little")
                batch[-1] = (pieces[-1], _DocumentEnd(file, record.line, content, ends_itself))
                content_hash, ends_itself = hashlib.blake2b(digest_size=8), False
            if size >= BATCH_CHARS:
                self._write_pieces(writer, batch)
                batch, size = [], 0
        self._write_pieces(writer, batch)
        self._unchecked_cuts = cutter.unchecked

    def _write_pieces(self, writer: StoreWriter, batch: list[tuple[Piece, _DocumentEnd | None]]) -> None:
        prefix = np.asarray(self._encoder.prefix, dtype=np.uint32)
        suffix = np.asarray(self._encoder.suffix, dtype=np.uint32)
        for ids, (_, end) in zip(self._encoder.ids([piece for piece, _ in batch]), batch, strict=True):
            # A text with its own BOS gets no second one.
            if writer.at_document_start and not _begins_with(ids, prefix):
                writer.extend(prefix)
            writer.extend(ids)
            if end is not None:
                if not end.ends_itself:
                    writer.extend(suffix)
                writer.end_document(end.file, end.line, end.content)

    # ---- whole samples

    def _write_samples(self, writer: StoreWriter, samples: Iterator[tuple[int, Record, Sample]]) -> None:
        batch: list[_Text] = []
        size = 0
        groups = GroupWriter(writer, self._reject)
        for file, record, sample in samples:
            if isinstance(sample, TokenSample):
                trained = np.asarray(sample.trained or [True] * len(sample.input_ids), dtype=bool)
                ids = np.asarray(sample.input_ids, dtype=np.uint32)
                self._add(writer, ids, trained, _Text(_NO_TEXT, file, record.line, sample, sample))
                continue
            try:
                texts = [_Text(text, file, record.line, part, sample) for part, text in self._texts(sample)]
            except SampleRejected as problem:
                self._reject(problem, file, record.line)
                continue
            except UserError as error:
                raise UserError(error.what, error.where or self._place(file, record.line), error.remedy) from error
            batch += texts
            size += sum(len(one.rendered.text) for one in texts)
            if size >= BATCH_CHARS:
                self._write_texts(writer, groups, batch)
                batch, size = [], 0
        self._write_texts(writer, groups, batch)
        groups.finish(self._source.path)

    def _texts(self, sample: Sample) -> list[tuple[ChatSample | PromptSample, Rendered]]:
        """The texts of a sample, each with the chat or prompt that it renders. Of a group one for each."""
        if isinstance(sample, PairSample):
            return [self._only_text(sample.chosen), self._only_text(sample.rejected)]
        if isinstance(sample, LabelledSample):
            return [self._only_text(sample.sample)]
        assert isinstance(sample, ChatSample | PromptSample), sample
        return [(sample, text) for text in self._texts_of(sample)]

    def _only_text(self, sample: ChatSample | PromptSample) -> tuple[ChatSample | PromptSample, Rendered]:
        texts = self._texts_of(sample)
        if len(texts) > 1:
            raise SampleRejected("the template rewrites earlier turns of the answer, so it is not one text")
        return sample, texts[0]

    def _texts_of(self, sample: ChatSample | PromptSample) -> list[Rendered]:
        if isinstance(sample, ChatSample):
            if self._turn_ends is None:
                self._turn_ends = self._renderer.probe_turn_ends() if self._renderer.has_template else []
            self._keywords.update(sample.keywords)
            for message in sample.messages:
                if not message.keys() <= _COMMON_KEYS:
                    self._keys.update(key for key in message.keys() - _COMMON_KEYS if not is_empty(message[key]))
            return self._renderer.render(self._specials.in_chat(sample, self._turn_ends))
        sample = self._specials.in_prompt(sample)
        text = sample.prompt + sample.completion
        begin = 0 if self._renderer.train_on == "all" else len(sample.prompt)
        return [Rendered(text, ((begin, len(text)),), (len(sample.prompt),))]

    def _write_texts(self, writer: StoreWriter, groups: GroupWriter, batch: list[_Text]) -> None:
        encoded = self._encoder.masked_ids([one.rendered for one in batch])
        chosen: Encoded | None = None
        for (ids, trained), one in zip(encoded, batch, strict=True):
            if isinstance(one.sample, PromptSample):
                prefix = self._encoder.prefix
                suffix = [] if self._specials.ends_itself(one.sample.completion) else self._encoder.suffix
                prefix = [] if _begins_with(ids, np.asarray(prefix)) else prefix
                ids = np.concatenate([prefix, ids, suffix]).astype(np.uint32)
                trained = np.concatenate([np.zeros(len(prefix), bool), trained, np.ones(len(suffix), bool)])
            elif self._encoder.bos is not None and (ids[:2] == self._encoder.bos).sum() == 2:
                what = f"{self._renderer.name} begins a conversation with two BOS tokens"
                remedy = "remove one in a template file (data.chat_template)"
                raise UserError(what, self._place(one.file, one.line), remedy)
            if isinstance(one.record, PairSample | LabelledSample):
                sequence = Encoded(ids, trained, one.file, one.line, _hash_of(repr(one.record).encode()))
                if isinstance(one.record, LabelledSample):
                    groups.example(sequence, one.record.good)
                elif chosen is None:
                    chosen = sequence
                else:
                    groups.pair(chosen, sequence)
                    chosen = None
            else:
                self._add(writer, ids, trained, one)

    def _add(self, writer: StoreWriter, ids: np.ndarray, trained: np.ndarray, one: _Text) -> None:
        if trained[1:].any():
            writer.add(ids, trained, one.file, one.line, _hash_of(repr(one.record).encode()))
            return
        sample = one.sample
        all_masked = isinstance(sample, TokenSample) and sample.trained is not None and not any(sample.trained)
        reason = "all labels are -100: no token of it is trained" if all_masked else "no token of it is trained"
        self._reject(SampleRejected(reason), one.file, one.line)


_NO_TEXT = Rendered("", ())


class _Text(NamedTuple):
    """A text of a record: `sample` is the chat or prompt that it renders, `record` the whole of the record."""

    rendered: Rendered
    file: int
    line: int
    sample: Sample
    record: Sample


_COMMON_KEYS = frozenset(("role", "content", "tool_calls", "reasoning_content", "thinking", "reasoning"))
"""Keys of messages whose values are looked for in the text."""


class _OpenFile(NamedTuple):
    """A file of the source whose format is known. `records` None: read it from the start."""

    number: int
    file: Path
    reading: formats.Reading | None
    records: Iterator[Record] | None


class _DocumentEnd(NamedTuple):
    """Attached to the last piece of a document."""

    file: int
    line: int
    content: int  # hash
    ends_itself: bool  # its text ends with the end token


def _begins_with(ids: np.ndarray, prefix: np.ndarray) -> bool:
    return len(prefix) > 0 and len(ids) >= len(prefix) and bool((ids[: len(prefix)] == prefix).all())


def _hash_of(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def _no_samples(path: str, rejects: Rejects) -> UserError:
    reasons = "".join(f"\n    {line}" for line in rejects.report())
    what = f"none of {rejects.seen:,} samples can be used:{reasons}" if rejects.seen else "there are no samples in it"
    return UserError(what, where=path, remedy="check that this is the right file, and its format")


@contextlib.contextmanager
def _only_builder(folder: Path, log: Log) -> Iterator[bool]:
    """Hold the lock of a store; yields False where the file system has no locks (some network file systems)."""
    lock = FileLock(f"{folder}.lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        log(f"another run is tokenizing the same data; waiting for it ({folder})")
        lock.acquire()
    except (OSError, NotImplementedError) as error:
        if getattr(error, "errno", errno.ENOSYS) not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
        log(f"{folder.parent} is on a file system without locks: two runs may tokenize the same data")
    try:
        yield lock.is_locked
    finally:
        lock.release()


def _rename(temporary: Path, folder: Path) -> None:
    if folder.exists() and TokenStore.open(folder) is None:
        shutil.rmtree(folder)  # an incomplete store, as after a crash of the machine
    try:
        temporary.rename(folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        shutil.rmtree(temporary)  # another run was first, with the same content
