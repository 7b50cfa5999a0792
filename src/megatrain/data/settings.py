"""What the data part must know of a run: plain values, checked by whoever reads the config.

`load_data` takes any object with these attributes; the `data:` section of a run's config is one. The dataclasses here
are for one's own loop and for tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


class SourceLike(Protocol):
    """One source of samples. See `SourceSettings` for the meaning of each."""

    @property
    def path(self) -> str: ...
    @property
    def weight(self) -> float: ...
    @property
    def format(self) -> str: ...
    @property
    def columns(self) -> Mapping[str, str]: ...
    @property
    def subset(self) -> str | None: ...
    @property
    def split(self) -> str | None: ...


class ValLike(Protocol):
    @property
    def fraction(self) -> float | None: ...
    @property
    def sources(self) -> Sequence[SourceLike] | None: ...


class DataLike(Protocol):
    """All of `data:`. See `DataSettings` for the meaning of each."""

    @property
    def train(self) -> Sequence[SourceLike]: ...
    @property
    def val(self) -> ValLike | None: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def overflow(self) -> str: ...
    @property
    def train_on(self) -> str: ...
    @property
    def packing(self) -> bool: ...
    @property
    def chat_template(self) -> str | None: ...
    @property
    def allow_rejects(self) -> float: ...
    @property
    def cache_dir(self) -> str | None: ...


@dataclass(frozen=True)
class SourceSettings:
    """One source of samples."""

    path: str
    """File, folder, glob, or the id of a data set in the local cache of the Hugging Face hub."""
    weight: float = 1.0
    """Passes over the source per epoch: 0.5 takes half of its rows, another half in the next epoch; 2 takes each twice."""
    format: str = "auto"
    """A name of `formats.FORMATS`, or `auto`: found from the columns."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """The format's column names -> the file's, where they differ."""
    subset: str | None = None
    """Of a data set of the hub; None: its default."""
    split: str | None = None
    """Of a data set of the hub; None: train."""


@dataclass(frozen=True)
class ValSettings:
    """What is held out: a share of the training samples, or sources of its own. Exactly one is given."""

    fraction: float | None = None
    sources: tuple[SourceSettings, ...] | None = None


@dataclass(frozen=True)
class DataSettings:
    train: tuple[SourceSettings, ...]
    val: ValSettings | None = None
    max_tokens: int = 2048
    """Length of a row."""
    overflow: str = "error"
    """What happens to a sample longer than a row: error | drop | truncate | split."""
    train_on: str = "assistant"
    """Which tokens of a chat are targets: assistant | last_assistant | all."""
    packing: bool = True
    """Several samples share a row; otherwise each has its own."""
    chat_template: str | None = None
    """File with a jinja template; None: the tokenizer's own."""
    allow_rejects: float = 0.01
    """Share of the samples that may be malformed before it is an error."""
    cache_dir: str | None = None
    """Folder of the token cache; None: `~/.cache/megatrain/tokens`."""
