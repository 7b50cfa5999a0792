"""docs/data.md lists everything that can be read."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from megatrain.config.schema import SourceConfig
from megatrain.data.files import COMPRESSED_SUFFIXES, RECORD_SUFFIXES, TEXT_SUFFIX
from megatrain.data.formats import FORMATS

TEXT = (Path(__file__).parents[2] / "docs" / "data.md").read_text()


def test_every_format_is_listed_with_its_columns() -> None:
    for name, format in FORMATS.items():
        row = next(line for line in TEXT.splitlines() if line.startswith(f"| `{name}` |"))
        if name != "lines":  # takes what `text` takes, from plain text
            for column in (*format.required, *format.optional):
                assert column in row, (name, column)


def test_every_format_can_be_set_in_the_config() -> None:
    of_pairs = {"preference"}  # for objectives over pairs, which a config cannot choose
    assert set(get_args(SourceConfig.model_fields["format"].annotation)) == {"auto", *FORMATS} - of_pairs


def test_every_suffix_is_listed() -> None:
    for suffix in (*RECORD_SUFFIXES, TEXT_SUFFIX):
        assert suffix.removeprefix(".") in TEXT
    for suffix in COMPRESSED_SUFFIXES:
        assert suffix in TEXT
