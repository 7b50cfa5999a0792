"""Data: from files to rows of tokens.

sources   files -> records with their places
formats   records -> samples (text, chats, prompts, tokens)
render    chats -> text and trained characters, by the checkpoint's template
encode    text -> ids and masks
store     ids in memory-mapped files; build fills them, through a cache
packing   samples -> rows
rows      rows -> arrays of a batch
loader    step number -> batch
load      all of it
"""

from __future__ import annotations

from megatrain.data.load import load_data
from megatrain.data.loader import StepLoader
from megatrain.data.rows import PackedRows, RowStats
from megatrain.data.settings import DataSettings, SourceSettings, ValSettings

__all__ = ["DataSettings", "PackedRows", "RowStats", "SourceSettings", "StepLoader", "ValSettings", "load_data"]
