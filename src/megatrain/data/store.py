"""Token store: the samples of one source as flat arrays in a folder, memory-mapped.

tokens.bin   uint32 (N,)   ids of all samples, one after another
trained.bin  uint8  (N,)   1 where a token is a target; only in stores of samples, since a stream is trained in full
ends.bin     int64  (S,)   where each sample ends in tokens.bin
targets.bin  int64  (S,)   targets of each sample: its trained tokens, except its first token
hashes.bin   uint64 (S,)   hash of each sample's content, for splits that depend neither on order nor on other samples
fingerprints.bin uint64 (S,)  hash of each sample's ids and targets
files.bin    int32  (S,)   number of the file the sample came from
lines.bin    int64  (S,)   its line or row there
roles.bin    uint8  (S,)   only in stores of groups: what a sequence is in its group, see [Note: groups] in groups.py
meta.json                  everything small; written last, which marks the store complete
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from megatrain.errors import UserError

VERSION = 5
"""Part of every cache key: raise it when the same data would be stored differently."""
META = "meta.json"
_COLUMNS: dict[str, type[np.generic]] = {
    "tokens": np.uint32, "trained": np.uint8, "ends": np.int64, "targets": np.int64, "hashes": np.uint64,
    "fingerprints": np.uint64,
    "files": np.int32, "lines": np.int64, "roles": np.uint8,
}  # fmt: skip

Kind = Literal["stream", "samples", "pairs", "labels"]
"""Whether rows may cut the samples anywhere (`stream`) or keep them whole, alone (`samples`) or in groups of two."""
GROUPED = ("pairs", "labels")


def place(path: str, unit: str, number: int) -> str:
    """Where a record is: `file:12`, or `file row 12` if `unit` is not `line`."""
    return f"{path}:{number}" if unit == "line" else f"{path} {unit} {number}"


class StoreWriter:
    """Writes a store sample by sample into an existing, empty folder; only file buffers are held in memory."""

    def __init__(self, folder: Path, kind: Kind):
        self._folder, self._kind = folder, kind
        absent = {"trained"} if kind == "stream" else set()
        absent |= set() if kind in GROUPED else {"roles"}
        names = [name for name in _COLUMNS if name not in absent]
        self._files: dict[str, BinaryIO] = {name: (folder / f"{name}.bin").open("wb", 1 << 20) for name in names}
        self._open_tokens = 0
        self.samples = self.tokens = self.targets = 0
        self._largest_id, self._largest_id_sample = -1, 0
        self._fingerprint = hashlib.blake2b(digest_size=8)

    @property
    def at_document_start(self) -> bool:
        return self._open_tokens == 0

    def extend(self, ids: np.ndarray) -> None:
        """Append tokens to the current document of a stream."""
        self._put("tokens", ids)
        self._fingerprint.update(np.ascontiguousarray(ids, dtype=np.uint32).data)
        self._open_tokens += len(ids)
        largest = int(ids.max(initial=0))
        if largest > self._largest_id:
            self._largest_id, self._largest_id_sample = largest, self.samples

    def end_document(self, file: int, line: int, content_hash: int) -> None:
        """End the current document; one without tokens is skipped."""
        if self._open_tokens:
            self._end(max(self._open_tokens - 1, 0), file, line, content_hash)

    def add(
        self, ids: np.ndarray, trained: np.ndarray, file: int, line: int, content_hash: int, role: int | None = None
    ) -> None:
        """Append a whole sample: ids and mask of the same length, and its role in a store of groups."""
        self.extend(ids)
        self._put("trained", trained)
        self._fingerprint.update(np.ascontiguousarray(trained, dtype=np.uint8).data)
        if role is not None:
            self._put("roles", np.array([role]))
            self._fingerprint.update(bytes([role]))
        self._end(int(trained[1:].sum()), file, line, content_hash)

    def finish(self, meta: dict[str, Any]) -> None:
        """Close the files and write `meta` with their sizes."""
        import orjson

        self.close()
        sizes = {name: (self._folder / f"{name}.bin").stat().st_size for name in self._files}
        own = {"kind": self._kind, "samples": self.samples, "tokens": self.tokens, "sizes": sizes}
        own |= {"largest_id": self._largest_id, "largest_id_sample": self._largest_id_sample}
        (self._folder / META).write_bytes(orjson.dumps({**meta, **own}, option=orjson.OPT_INDENT_2))

    def close(self) -> None:
        for stream in self._files.values():
            stream.close()

    def _put(self, column: str, values: np.ndarray) -> None:
        self._files[column].write(np.ascontiguousarray(values, dtype=_COLUMNS[column]).data)

    def _end(self, targets: int, file: int, line: int, content_hash: int) -> None:
        self.tokens += self._open_tokens
        self.targets += targets
        self.samples += 1
        self._open_tokens = 0
        fingerprint = int.from_bytes(self._fingerprint.digest(), "little")
        self._fingerprint = hashlib.blake2b(digest_size=8)
        row = {"ends": self.tokens, "targets": targets, "hashes": content_hash, "fingerprints": fingerprint}
        row |= {"files": file, "lines": line}
        for column, value in row.items():
            self._put(column, np.array([value], dtype=_COLUMNS[column]))


@dataclass(frozen=True)
class TokenStore:
    """A complete store, read through memory maps."""

    folder: Path
    meta: dict[str, Any]

    @classmethod
    def open(cls, folder: Path) -> TokenStore | None:
        """The store in `folder`; None if it is missing or incomplete."""
        import orjson

        try:
            meta = orjson.loads((folder / META).read_bytes())
            complete = all((folder / f"{name}.bin").stat().st_size == size for name, size in meta["sizes"].items())
        except (OSError, orjson.JSONDecodeError):
            return None
        return cls(folder, meta) if complete else None

    def __len__(self) -> int:
        return self.meta["samples"]

    @property
    def kind(self) -> Kind:
        return self.meta["kind"]

    @cached_property
    def tokens(self) -> np.ndarray:
        return self._map("tokens")

    @cached_property
    def trained(self) -> np.ndarray | None:
        """(N,) uint8; None: every token is trained."""
        return self._map("trained") if self.kind != "stream" else None

    @property
    def grouped(self) -> bool:
        """Whether samples 2p and 2p + 1 belong together."""
        return self.kind in GROUPED

    @cached_property
    def roles(self) -> np.ndarray:
        """(S,) uint8, in a store of groups."""
        return self._map("roles")

    @cached_property
    def starts(self) -> np.ndarray:
        """(S,) int64: where each sample begins in `tokens`."""
        return np.concatenate([[0], self._map("ends")[:-1]])

    @cached_property
    def lengths(self) -> np.ndarray:
        """(S,) int64: tokens of each sample."""
        return self._map("ends") - self.starts

    @cached_property
    def targets(self) -> np.ndarray:
        return self._map("targets")

    @cached_property
    def hashes(self) -> np.ndarray:
        return self._map("hashes")

    @cached_property
    def fingerprints(self) -> np.ndarray:
        return self._map("fingerprints")

    def run(self, sample: int, offset: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """A run of a sample's tokens, from `offset`: ids (uint32), and which are targets (bool); its first token never is."""
        begin = int(self.starts[sample]) + offset
        trained = np.ones(length, bool) if self.trained is None else self.trained[begin : begin + length] == 1
        trained[:1] = False
        return self.tokens[begin : begin + length], trained

    def place(self, sample: int) -> str:
        """Where a sample came from: `file:line` or `file row N`."""
        file = self.meta["files"][int(self._map("files")[sample])]
        return place(file["path"], file["unit"], int(self._map("lines")[sample]))

    def check_ids(self, vocab_size: int) -> None:
        """Raise a UserError, with the largest id and its sample, if an id is outside the model's vocabulary."""
        if (largest := self.meta["largest_id"]) >= vocab_size:
            what = f"token id {largest} is outside the model's vocabulary of {vocab_size}"
            remedy = "use the model's own tokenizer (tokens added to it need a larger embedding)"
            raise UserError(what, self.place(self.meta["largest_id_sample"]), remedy)

    def _map(self, column: str) -> np.ndarray:
        return np.memmap(self.folder / f"{column}.bin", dtype=_COLUMNS[column], mode="r")
