"""Data: from files to rows of tokens.

sources   files, and datasets in the local Hugging Face cache -> records with their places
formats   records -> samples (text, chats, prompts, tokens), or why one cannot be used
render    samples -> text with trained characters -> token ids with masks
build     sources -> token stores, through a cache (`store`: ids in memory-mapped files)
packing   samples -> rows
rows      rows -> batches; step number -> rows
load      all of the above
"""

from __future__ import annotations

from megatrain.data.load import load_data
from megatrain.data.rows import PackedRows, RowStats, StepLoader

__all__ = ["PackedRows", "RowStats", "StepLoader", "load_data"]
