"""From the files of a source to its token store, through a cache.

The cache is a folder of stores named by the hash of all that decides their content: the files (path, size, time), format,
columns, tokenizer, template, what is trained, and versions. Row length, packing and splits come later and are no part of
it. A store is built under a temporary name and renamed when it is whole; a lock keeps a second run from building the
same one, and where locks do not work the first to rename wins. Memory is flat: a batch of about a megabyte of text, and
file buffers.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import logging
import os
import shutil
import socket
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatrain.data.encode import Encoder
from megatrain.data.formats import ChatSample, PromptSample, Reading, Sample, TextSample, TokenSample, find_reading
from megatrain.data.rejects import Rejects, SampleRejected
from megatrain.data.render import ChatRenderer, Rendered
from megatrain.data.settings import SourceLike
from megatrain.data.sources import FileProgress, Record, find_files, is_text, read_records, split_text, unit_of
from megatrain.data.store import VERSION, Kind, StoreWriter, TokenStore, place
from megatrain.errors import UserError
from megatrain.units import counted

BATCH_CHARS = 1 << 20
"""Text tokenised at once: enough for the tokenizer's threads, little enough to hold."""
PEEKED_RECORDS = 100
"""Records of each file that are looked at for its format."""
PROGRESS_SECONDS = 0.5
"""Between two words on how far a source is; who prints them may print fewer."""

Log = Callable[[str], None]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Builder:
    """What turns the records of any source into tokens."""

    encoder: Encoder
    renderer: ChatRenderer
    cache_dir: Path
    allow_rejects: float
    log: Log

    def open(self, source: SourceLike, where: str) -> TokenStore:
        """The store of a source: from the cache, or built now.

        Args:
            source: Path, format and columns are used; the weight belongs to the rows.
            where: The config's name of the source, for errors.

        Raises:
            UserError: Files are missing, unreadable, empty or of no known format, or too many samples are rejected.
        """
        files, folder, store = self._find(source, where)
        cached = store is not None
        if store is None:
            store = self._build(source, files, folder, where)
        self._report(source, store, cached)
        rejects = Rejects.from_json(store.meta["rejects"])
        rejects.check(self.allow_rejects, source.path)
        if len(store) == 0:
            raise _nothing(source.path, rejects)
        return store

    def look(self, source: SourceLike, where: str) -> None:
        """Find the format of a source's files from their first records, unless the source is in the cache.

        Raises:
            UserError: As `open`, for what the first records tell.
        """
        files, _, store = self._find(source, where)
        if store is None:
            _SourceBuild(self, source, files, where).look()

    def _find(self, source: SourceLike, where: str) -> tuple[list[Path], Path, TokenStore | None]:
        """The files of a source, the folder of its store, and the store if it is there."""
        files = find_files(source.path, f"{where}.path", subset=source.subset, split=source.split)
        folder = self.cache_dir / self._key(source, files)
        return files, folder, TokenStore.open(folder)

    def _report(self, source: SourceLike, store: TokenStore, cached: bool) -> None:
        meta = store.meta
        self.log(
            f"{source.path}: {'; '.join(meta['readings'])}: {counted(meta['rejects']['seen'], 'sample')}, "
            f"{counted(meta['tokens'], 'token')}, {meta['targets']:,} trained{' (from the cache)' if cached else ''}"
        )
        for line in (*meta["notes"], *Rejects.from_json(meta["rejects"]).report()):
            self.log(f"{source.path}: {line}")

    def _key(self, source: SourceLike, files: list[Path]) -> str:
        digest = hashlib.sha256()
        stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        settings = (source.format, sorted(source.columns.items()), self.renderer.train_on, self.renderer.source)
        for part in (VERSION, stats, settings, self.encoder.fingerprint()):
            digest.update(repr(part).encode())
        return digest.hexdigest()[:32]

    def _build(self, source: SourceLike, files: list[Path], folder: Path, where: str) -> TokenStore:
        try:
            self.cache_dir.mkdir(parents=True, exist_ok=True)
            with _only_builder(folder, self.log) as alone:
                if (store := TokenStore.open(folder)) is not None:
                    return store  # another run has built it while this one waited
                if alone:
                    _remove_leftovers(folder)
                temporary = folder.with_name(f"{folder.name}.{_owner()}")
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
                "no space for the tokenised data" if full else f"cannot be written: {error.strerror or error}",
                where=str(self.cache_dir),
                remedy="set data.cache_dir to a folder on a disk with more space"
                if full
                else "set data.cache_dir to a folder that can be written",
            ) from error
        store = TokenStore.open(folder)
        assert store is not None, f"{folder} is not whole although it was just written"
        return store


class _SourceBuild:
    """One pass over a source's files into a store that is being written."""

    def __init__(self, builder: Builder, source: SourceLike, files: list[Path], where: str):
        self._encoder, self._renderer = builder.encoder, builder.renderer
        self._allowed, self._log = builder.allow_rejects, builder.log
        self._source, self._files, self._where = source, files, where
        self._rejects = Rejects()
        self._readings: list[str] = []
        self._prompts: Counter[type[Sample]] = Counter()  # samples of the format prompt_completion
        self._for_alpaca = ""  # its columns as questions and answers
        self._read_of = [FileProgress(file) for file in files]
        self._next_word = time.monotonic() + PROGRESS_SECONDS

    def write(self, folder: Path) -> None:
        self._notes()  # those of a build that failed
        kind, samples = self._samples()
        writer = StoreWriter(folder, kind)
        try:
            (self._write_stream if kind == "stream" else self._write_samples)(writer, samples)
            self._rejects.check(self._allowed, self._source.path)
            if writer.samples == 0:
                raise _nothing(self._source.path, self._rejects)
            files = [{"path": str(file), "unit": unit_of(file)} for file in self._files]
            meta = {"readings": self._readings, "notes": self._notes(), "files": files, "targets": writer.targets}
            writer.finish({**meta, "rejects": self._rejects.to_json()})
        except BaseException:
            writer.abandon()
            raise

    def look(self) -> None:
        """Read as far as the format of each file needs it."""
        _, samples = self._samples()
        samples.close()

    def _notes(self) -> list[str]:
        return self._notes_of_prompts() + self._renderer.take_notes() + self._encoder.take_notes()

    def _notes_of_prompts(self) -> list[str]:
        """Which of its two meanings `prompt_completion` has here: strings never see a template, messages always do."""
        notes: list[str] = []
        if count := self._prompts[PromptSample]:
            notes.append(f"{counted(count, 'sample')} with prompt and completion as texts: joined as they are")
            if self._renderer.has_template:
                notes[0] += f", without {self._renderer.name} (columns: {self._for_alpaca} would use it)"
        if count := self._prompts[ChatSample]:
            notes.append(
                f"{counted(count, 'sample')} with prompt and completion as messages: rendered by {self._renderer.name}"
            )
        return notes

    # ---- records

    def _samples(self) -> tuple[Kind, Generator[tuple[int, Record, Sample]]]:
        """The kind of the source, and its samples with file number and record. Rejects are counted on the way."""
        opened: list[_OpenFile] = []
        for number, file in enumerate(self._files):
            records = self._records(number)
            first = list(itertools.islice(records, PEEKED_RECORDS))
            reading = self._reading(file, [record.value for record in first if isinstance(record.value, dict)])
            # All files are looked at before the first is read, so that a wrong one is an error at once. A single one
            # stays open; of many, each would hold a file or, as JSON, its whole content.
            again = len(self._files) > 1
            if again:
                records.close()
                self._read_of[number] = FileProgress(file)
            opened.append(_OpenFile(number, file, reading, None if again else itertools.chain(first, records)))
        by_kind: dict[Kind, Path] = {one.reading.kind: one.file for one in opened if one.reading is not None}
        if len(by_kind) > 1:
            raise UserError(
                f"{self._source.path} mixes plain text ({by_kind['stream']}) and whole samples ({by_kind['samples']})",
                where=self._where,
                remedy="give them as two sources",
            )
        kind: Kind = "samples" if "samples" in by_kind else "stream"
        return kind, self._read(opened)

    def _reading(self, file: Path, first: list[dict[str, Any]]) -> Reading | None:
        """The file's format; None if no record could be read, which the reject counts tell."""
        if not first:
            return None
        text = is_text(file)
        if text and self._source.format not in ("auto", "text", "lines"):
            raise UserError(
                f"format: {self._source.format} is not what a plain text file holds", str(file), "use text or lines"
            )
        format = "text" if text and self._source.format == "auto" else self._source.format
        reading = find_reading(first, format, {} if text else self._source.columns, str(file))
        if reading.describe() not in self._readings:
            self._readings.append(reading.describe())
        if reading.name == "prompt_completion":
            self._for_alpaca = f"{{instruction: {reading.columns['prompt']}, output: {reading.columns['completion']}}}"
        return reading

    def _read(self, opened: list[_OpenFile]) -> Generator[tuple[int, Record, Sample]]:
        for one in opened:
            inside = False  # of a text that comes in pieces; only a whole text can be an empty sample
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
                self._progress()

    def _reject(self, problem: SampleRejected, file: int, line: int) -> None:
        self._rejects.add(problem, self._place(file, line))
        self._rejects.check_early(self._allowed, self._source.path)

    def _place(self, file: int, line: int) -> str:
        path = self._files[file]
        return place(str(path), unit_of(path), line)

    def _records(self, number: int) -> Generator[Record]:
        return read_records(self._files[number], self._source.format == "lines", self._read_of[number])

    def _progress(self) -> None:
        """Say how far the source is, as a log record with its `share`: a logger for people makes a bar of it."""
        if (now := time.monotonic()) < self._next_word:
            return
        self._next_word = now + PROGRESS_SECONDS
        done = sum(one.share * one.size_bytes for one in self._read_of)
        share = done / max(sum(one.size_bytes for one in self._read_of), 1)
        words = f"{self._source.path}: {counted(self._rejects.seen, 'sample')} read"
        logger.info("%s, %.0f%%", words, 100 * share, extra={"share": share})

    # ---- streams

    def _write_stream(self, writer: StoreWriter, samples: Iterator[tuple[int, Record, Sample]]) -> None:
        """Documents one after another; long ones in pieces, which are tokenised in parallel."""
        batch: list[tuple[str, _DocumentEnd | None]] = []
        size = 0
        content_hash = hashlib.blake2b(digest_size=8)
        for file, record, sample in samples:
            if isinstance(sample, TokenSample):
                ids = np.asarray(sample.input_ids, dtype=np.uint32)
                writer.extend(ids)
                writer.end_document(file, record.line, _hash_of(ids.tobytes()))
                continue
            assert isinstance(sample, TextSample), sample
            content_hash.update(sample.text.encode())
            pieces = split_text(sample.text)
            end = None
            if not record.more:
                end = _DocumentEnd(file, record.line, int.from_bytes(content_hash.digest(), "little"))
                content_hash = hashlib.blake2b(digest_size=8)
            batch += [(piece, None) for piece in pieces[:-1]]
            batch.append((pieces[-1], end))
            size += len(sample.text)
            if size >= BATCH_CHARS:
                self._write_pieces(writer, batch)
                batch, size = [], 0
        self._write_pieces(writer, batch)

    def _write_pieces(self, writer: StoreWriter, batch: list[tuple[str, _DocumentEnd | None]]) -> None:
        prefix = np.asarray(self._encoder.prefix, dtype=np.uint32)
        suffix = np.asarray(self._encoder.suffix, dtype=np.uint32)
        for ids, (_, end) in zip(self._encoder.ids([piece for piece, _ in batch]), batch, strict=True):
            # A text that brings its own BOS gets no second one.
            if writer.at_document_start and not _begins_with(ids, prefix):
                writer.extend(prefix)
            writer.extend(ids)
            if end is not None:
                writer.extend(suffix)
                writer.end_document(end.file, end.line, end.content_hash)

    # ---- whole samples

    def _write_samples(self, writer: StoreWriter, samples: Iterator[tuple[int, Record, Sample]]) -> None:
        batch: list[tuple[Rendered, int, Record, Sample]] = []
        size = 0
        for file, record, sample in samples:
            if isinstance(sample, TokenSample):
                trained = np.asarray(sample.trained or [True] * len(sample.input_ids), dtype=bool)
                self._add(writer, np.asarray(sample.input_ids, dtype=np.uint32), trained, file, record, sample)
                continue
            try:
                texts = self._texts(sample)
            except SampleRejected as problem:
                self._reject(problem, file, record.line)
                continue
            except UserError as error:
                raise UserError(error.what, error.where or self._place(file, record.line), error.remedy) from error
            batch += [(text, file, record, sample) for text in texts]
            size += sum(len(text.text) for text in texts)
            if size >= BATCH_CHARS:
                self._write_texts(writer, batch)
                batch, size = [], 0
        self._write_texts(writer, batch)

    def _texts(self, sample: Sample) -> list[Rendered]:
        if isinstance(sample, ChatSample):
            return self._renderer.render(sample)
        assert isinstance(sample, PromptSample), sample
        text = sample.prompt + sample.completion
        begin = 0 if self._renderer.train_on == "all" else len(sample.prompt)
        return [Rendered(text, ((begin, len(text)),))]

    def _write_texts(self, writer: StoreWriter, batch: list[tuple[Rendered, int, Record, Sample]]) -> None:
        encoded = self._encoder.masked_ids([rendered for rendered, *_ in batch])
        for (ids, trained), (_, file, record, sample) in zip(encoded, batch, strict=True):
            if isinstance(sample, PromptSample):
                prefix, suffix = self._encoder.prefix, self._encoder.suffix
                prefix = [] if _begins_with(ids, np.asarray(prefix)) else prefix
                ids = np.concatenate([prefix, ids, suffix]).astype(np.uint32)
                trained = np.concatenate([np.zeros(len(prefix), bool), trained, np.ones(len(suffix), bool)])
            elif self._encoder.bos is not None and (ids[:2] == self._encoder.bos).sum() == 2:
                raise UserError(
                    f"{self._renderer.name} begins a conversation with two BOS tokens",
                    where=self._place(file, record.line),
                    remedy="remove one in a template file (data.chat_template)",
                )
            self._add(writer, ids, trained, file, record, sample)

    def _add(
        self, writer: StoreWriter, ids: np.ndarray, trained: np.ndarray, file: int, record: Record, sample: Sample
    ) -> None:
        if not trained[1:].any():
            self._reject(SampleRejected(_untrained(sample)), file, record.line)
            return
        writer.add(ids, trained, file, record.line, _hash_of(repr(sample).encode()))


@dataclass(frozen=True)
class _OpenFile:
    """A file of the source whose format is known.

    Attributes:
        records: All of its records; None: to be read from the start.
    """

    number: int
    file: Path
    reading: Reading | None
    records: Iterator[Record] | None


@dataclass(frozen=True)
class _DocumentEnd:
    """The last piece of a document carries where it came from."""

    file: int
    line: int
    content_hash: int


def _untrained(sample: Sample) -> str:
    masked = isinstance(sample, TokenSample) and sample.trained is not None and not any(sample.trained)
    return "all labels are -100: no token of it is trained" if masked else "no token of it is trained"


def _begins_with(ids: np.ndarray, prefix: np.ndarray) -> bool:
    return len(prefix) > 0 and len(ids) >= len(prefix) and bool((ids[: len(prefix)] == prefix).all())


def _hash_of(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def _nothing(path: str, rejects: Rejects) -> UserError:
    reasons = "".join(f"\n    {line}" for line in rejects.report())
    what = f"none of {rejects.seen:,} samples can be used:{reasons}" if rejects.seen else "there are no samples in it"
    return UserError(what, where=path, remedy="check that this is the right file, and its format")


# ---- the cache folder


def _owner() -> str:
    return f"{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}.tmp"


@contextlib.contextmanager
def _only_builder(folder: Path, log: Log) -> Iterator[bool]:
    """Holds the lock of a store, if there are locks. The system lets go of it when the process ends, however it ends."""
    alone = True
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log(f"another run is tokenising the same data; waiting for it ({folder})")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            # Some network file systems know no locks. Both runs then build, and the first to rename wins.
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
            log(f"{folder.parent} is on a file system without locks: two runs may tokenise the same data")
            alone = False
        yield alone


def _remove_leftovers(folder: Path) -> None:
    """Remove what a killed run of this machine left. Called under the lock: nobody here is building it now."""
    for leftover in folder.parent.glob(f"{folder.name}.{socket.gethostname()}.*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)


def _rename(temporary: Path, folder: Path) -> None:
    if folder.exists() and TokenStore.open(folder) is None:
        shutil.rmtree(folder)  # a store that is not whole, as after a crash of the machine
    try:
        temporary.rename(folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        shutil.rmtree(temporary)  # another run was first, with the same content
