"""Tokenizing needs memory for one batch, however large the files are."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

WORDS = "the quick brown fox jumps over the lazy dog while nobody looks "
MOST_GROWTH_MIB = 48
"""For tokenizing a batch of 1 MB, file buffers, and the index of the rows."""


def _growth_mib(folder: Path, kind: str, size_mib: int) -> float:
    """By how many MiB tokenizing `size_mib` of data raises peak memory above that of tokenizing 0.5 MiB."""
    code = """
        import json, resource, sys
        from pathlib import Path
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast
        from megatrain.config.schema import DataConfig, SourceConfig
        from megatrain.data import load_data

        folder, kind, words, size = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]) << 20

        def write(name, size):
            # written in pieces, so that this process stays small
            line = words * 20
            with (folder / name).open("w") as file:
                for _ in range(size // len(line) + 1):
                    if kind == "txt":
                        file.write(line)
                    elif kind == "jsonl":
                        file.write(json.dumps({"text": line}) + "\\n")
                    else:
                        file.write(json.dumps({"prompt": "say it: ", "completion": line}) + "\\n")
            return str(folder / name)

        vocabulary = {word: number for number, word in enumerate(["[UNK]", "[EOS]", *sorted(set(words.split()))])}
        backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", eos_token="[EOS]")

        def peak(name, size):
            source = SourceConfig(path=write(name, size))
            rows, _ = load_data(
                DataConfig(train=(source,), max_tokens=512, cache_dir=str(folder / "cache")), tokenizer, log=lambda line: None
            )
            assert rows.stats.tokens * 6 > size / 2, rows.stats
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

        suffix = "txt" if kind == "txt" else "jsonl"
        before = peak(f"small.{suffix}", 1 << 19)
        print(peak(f"large.{suffix}", size) - before)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(folder), kind, WORDS, str(size_mib)],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


@pytest.mark.parametrize(("kind", "size_mib"), [("txt", 64), ("prompts", 64)])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, kind: str, size_mib: int) -> None:
    assert _growth_mib(tmp_path, kind, size_mib) < MOST_GROWTH_MIB


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["txt", "jsonl", "prompts"])
def test_memory_does_not_grow_with_300_mib(tmp_path: Path, kind: str) -> None:
    assert _growth_mib(tmp_path, kind, 300) < MOST_GROWTH_MIB
