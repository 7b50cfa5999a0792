"""`megatrain init`: write a commented config with values that suit a model and data.

check the model  -->  tokenize the data (kept in the cache for the run)  -->  choose values  -->  write  -->  check the config
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatrain.config.load import load_config
from megatrain.config.schema import RunConfig
from megatrain.data import packing
from megatrain.data.load import OpenedData, open_data
from megatrain.errors import Problems, UserError
from megatrain.metrics.logger import RunLogger, quiet_libraries
from megatrain.run.preflight import preflight_data, preflight_model, refuse_unwritable
from megatrain.run.prepare import check
from megatrain.text import one_line, visible
from megatrain.units import counted

STREAM_TOKENS, LEAST_TOKENS = 2048, 512
MOST_STEP_TOKENS, WANTED_STEPS = 262_144, 50
VAL_SAMPLES, VAL_FRACTIONS = 20, (0.01, 0.02, 0.05, 0.1)
LEAST_STEPS_WITH_WARMUP = 4


@dataclass(frozen=True)
class Lengths:
    """The lengths that determine the row length."""

    samples: np.ndarray  # (S,) tokens of each sample that must stay whole; empty if all data is plain text
    has_streams: bool  # whether there is plain text, which may be cut anywhere
    tokens: int  # of all data
    positions: int | None  # of the model; None: unlimited


@dataclass(frozen=True)
class Rows:
    max_tokens: int
    too_long: int  # samples longer than a row
    tokens_per_step: int
    tokens: int  # of all other samples


def init_config(model: str, data: Sequence[str], out: Path, *, columns: Mapping[str, str] | None = None) -> RunConfig:
    """Write a config for fine-tuning `model` (see `model.path`) on `data` (see `data.train`) to `out`, and check it.

    `columns`: the format's column names -> the files', where they differ.

    Raises:
        UserError: Model or data cannot be used, `out` exists, or the check of the written file fails.
        PlanRefused: The run does not fit this machine; the file is written nevertheless.
    """
    if out.exists():
        raise UserError("already exists", str(out), "give another name: --out NAME.yaml")
    quiet_libraries()
    with RunLogger() as log:
        draft = _draft(model, data, columns or {})
        problems = Problems()
        with problems.collect():
            refuse_unwritable(out.parent, "choose another path: --out")
        files = preflight_model(draft, problems)
        preflight_data(draft, problems, files)
        problems.raise_all()
        assert files is not None, "the model could not be opened without a problem"
        opened = open_data(draft.data, files.tokenizer, vocab_size=files.vocab_size, log=log.info)
        lengths = _lengths(opened, files.positions)
        rows = choose_rows(lengths)
        text = _text(draft, opened, lengths, rows, out)
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot be written: {error.strerror}", str(out), "choose another path: --out") from None
        log.info(f"wrote {out}; checking it")
    run = load_config(out)
    check(run)
    return run


def choose_rows(lengths: Lengths) -> Rows:
    """Choose row length and step size.

    A row holds the longest sample, rounded up to a power of two, within the model's positions. A step is the largest power
    of two of rows that still gives `WANTED_STEPS` steps per epoch.
    """
    longest = int(lengths.samples.max(initial=0))
    wanted = max(LEAST_TOKENS, 2 ** math.ceil(math.log2(longest))) if longest else 0
    if lengths.has_streams:
        wanted = max(wanted, STREAM_TOKENS)
    max_tokens = min(wanted, lengths.positions) if lengths.positions else wanted
    long = lengths.samples > max_tokens
    tokens = lengths.tokens - int(lengths.samples[long].sum())
    rows = 1
    while 2 * rows * max_tokens <= min(MOST_STEP_TOKENS, tokens / WANTED_STEPS):
        rows *= 2
    return Rows(max_tokens, int(long.sum()), rows * max_tokens, tokens)


def choose_fraction(hashes: Sequence[np.ndarray]) -> float | None:
    """The smallest fraction that holds out `VAL_SAMPLES` samples, else the largest; None if there are too few samples."""
    for fraction in VAL_FRACTIONS:
        held = sum(int(packing.in_fraction(own, fraction).sum()) for own in hashes)
        if held >= VAL_SAMPLES or (fraction == VAL_FRACTIONS[-1] and 0 < held < sum(map(len, hashes))):
            return fraction
    return None


def _draft(model: str, data: Sequence[str], columns: Mapping[str, str]) -> RunConfig:
    smallest = 2
    train = {"train": [{"path": path, "columns": columns} for path in data], "max_tokens": smallest}
    batch, folder = {"tokens_per_step": smallest}, {"dir": "unused"}
    return load_config({"model": {"path": model}, "data": train, "batch": batch, "run": folder})


def parse_columns(words: Sequence[str]) -> dict[str, str]:
    """Parse `FORMAT_NAME=COLUMN` words into a mapping; UserError for other words."""
    pairs = [word.partition("=") for word in words]
    for word, (own, _, column) in zip(words, pairs, strict=True):
        if not own or not column:
            remedy = "as in --columns instruction=question output=answer"
            raise UserError(f"{word!r} is not NAME=COLUMN", "--columns", remedy)
    return {own: column for own, _, column in pairs}


def _lengths(opened: OpenedData, positions: int | None) -> Lengths:
    whole = [part.lengths for part in opened.train if part.store.kind == "samples"]
    return Lengths(
        samples=np.concatenate([np.zeros(0, np.int64), *whole]),
        has_streams=len(whole) < len(opened.train),
        tokens=sum(int(part.lengths.sum()) for part in opened.train),
        positions=positions,
    )


def _has_weights(run: RunConfig) -> bool:
    from megatrain.models.build import find_model_folder

    folder = find_model_folder(run.model.path)
    # Weights in formats we cannot read count too: the check refuses them, instead of training from random weights.
    return any(file.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5") for file in folder.iterdir())


def _text(draft: RunConfig, opened: OpenedData, lengths: Lengths, rows: Rows, out: Path) -> str:
    """The YAML: ten keys, each with its meaning and the reason for its value."""
    chats, has_weights, name = len(lengths.samples) > 0, _has_weights(draft), one_line(str(out))
    fraction = choose_fraction([part.store.hashes for part in opened.train])
    steps = max(1, math.ceil(rows.tokens * (1 - (fraction or 0.0)) / rows.tokens_per_step))
    lines = [
        "# Config of a megatrain run. `megatrain train --help-all` and docs/config.md describe all keys.",
        f"# First look at the data: `megatrain data {name}`. Then train: `megatrain train {name}`.",
        "",
        "model:",
        f"  path: {_quoted(draft.model.path)}  # Hugging Face folder, or a hub id in the local cache",
    ]
    if not has_weights:
        lines.append("  init: random  # the folder has no weights: train from scratch")
    lines += ["", "data:", "  train:  # files, folders, globs; add weight: 0.5 to use half of a source in each epoch"]
    for part in opened.train:
        lines += [f"    # {one_line('; '.join(part.store.meta['readings']))}: {counted(len(part.store), 'sample')}"]
        lines += [f"    - path: {_quoted(part.source.path)}"]
        if part.source.columns:
            named = ", ".join(f"{_quoted(own)}: {_quoted(column)}" for own, column in part.source.columns.items())
            lines += [f"      columns: {{{named}}}  # the format's name: the file's column"]
    if fraction is None:
        lines.append("  val: null  # too few samples to hold some out: give a separate file to measure progress")
    else:
        lines.append(f"  val: {{fraction: {fraction:g}}}  # held out for validation; the same samples in every run")
    lines.append(f"  max_tokens: {rows.max_tokens}  # tokens per row; {_why_rows(lengths)}")
    if rows.too_long:
        share = rows.too_long / len(lengths.samples)
        lines.append(
            f"  overflow: drop  # {counted(rows.too_long, 'sample')} ({share:.1%}) longer than the model's positions: "
            "drop | truncate | split | error"
        )
    in_chats = "train on the answers of chats; all: on every token"
    in_text = "for chats: train on the answers; plain text is always trained in full"
    lines += [
        f"  train_on: assistant  # {in_chats if chats else in_text}",
        "",
        "batch:",
        f"  tokens_per_step: {rows.tokens_per_step}  # tokens per optimizer step, a multiple of data.max_tokens; "
        f"about {counted(steps, 'step')} per epoch",
        "",
        "optim:",
        f"  learning_rate: {'1e-5' if has_weights else '3e-4'}  # peak; "
        + ("1e-5 suits full fine-tuning, 5e-6 is gentler" if has_weights else "suits training from scratch"),
        "",
        "schedule:",
        f"  warmup_ratio: {0.03 if steps >= LEAST_STEPS_WITH_WARMUP else 0}  # share of all steps in which the learning rate "
        "rises, before a cosine decay",
        "  epochs: 1  # passes over the data; or set steps: N",
        "",
        "run:",
        f"  dir: {_quoted(_free_folder(draft))}  # checkpoints, metrics and loss.png; nothing in it is overwritten",
        "",
    ]
    return "\n".join(lines)


def _why_rows(lengths: Lengths) -> str:
    if not len(lengths.samples):
        return "plain text fills rows of any length"
    longest = f"the longest sample has {int(lengths.samples.max()):,}"
    limit = f", the model has {lengths.positions:,} positions" if lengths.positions else ""
    return longest + limit


def _quoted(text: str) -> str:
    """Quote as JSON, which is valid YAML, unless the text is a plain word."""
    plain = all(c.isalnum() or c in "/._-" for c in text) and text[:1].isalpha() | text.startswith(("/", "./"))
    return (
        text
        if plain and text.lower() not in ("null", "true", "false")
        else json.dumps(text, ensure_ascii=visible(text) != text)
    )


def _free_folder(draft: RunConfig) -> str:
    model, data = draft.model.path, draft.data.train[0].path
    stem = Path(data.rstrip("/*")).name.split(".")[0] or "data"
    base = f"runs/{Path(model.rstrip('/')).name}-{''.join(c if c.isalnum() or c in '-_' else '-' for c in stem)}"
    free, number = base, 1
    while Path(free).exists():
        number += 1
        free = f"{base}-{number}"
    return free
