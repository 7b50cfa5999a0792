"""The model card of an export: metadata for the Hugging Face hub, and how the model was trained.

A checkpoint knows the settings of its run. The run's folder, if the checkpoint is still in one, adds the whole config, the
losses, and their plot. Nothing here uses the network.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import CardData, metadata_load
from yaml import YAMLError

from megatrain import __version__
from megatrain.config.load import dump_config, load_config
from megatrain.config.schema import RunConfig
from megatrain.errors import UserError
from megatrain.metrics.record import StepRecord, read_records
from megatrain.models.build import cached_snapshot
from megatrain.paths import file_problem, regular_file
from megatrain.text import one_line

CARD = "README.md"
SOURCE_CARD = "README.source.md"
CURVE = "loss.png"
HUB_ID = r"[\w.-]+/[\w.-]+"


@dataclass(frozen=True)
class RunFiles:
    """What a run's folder says about it, up to the step of a checkpoint.

    Attributes:
        name: Name of the folder.
        config: None if it cannot be read.
        records: Records of the steps.
        curve: The plot, if there is one.
    """

    name: str
    config: RunConfig | None
    records: list[StepRecord]
    curve: Path | None


def run_of(checkpoint: Path, step: int) -> RunFiles | None:
    """The run whose folder the checkpoint is in, or None."""
    folder = checkpoint.resolve().parent.parent
    if checkpoint.resolve().parent.name != "checkpoints" or file_problem(folder, "config.yaml") is not None:
        return None
    try:
        config = load_config(folder / "config.yaml")
    except UserError:  # of another version
        config = None
    records: list[StepRecord] = []
    if file_problem(folder, "metrics.jsonl") is None:
        try:
            records = [record for record in read_records(folder / "metrics.jsonl") if record.step <= step]
        except UserError:  # damaged
            pass
    return RunFiles(folder.name, config, records, folder / CURVE if file_problem(folder, CURVE) is None else None)


def card_text(
    checkpoint: Path, extra: Mapping[str, Any], step: int, model: Mapping[str, Any], dtype: torch.dtype
) -> str:
    """The card of a checkpoint's export.

    Args:
        checkpoint: The checkpoint's folder.
        extra: What it stores about its run; see [Note: what a checkpoint remembers of its run] in run/resume.py.
        step: Optimizer steps taken.
        model: Content of its config.json.
        dtype: Dtype of the exported weights.
    """
    run = run_of(checkpoint, step)
    parts = [
        _front_matter(checkpoint, extra, model, run),
        f"# {_plain(run.name if run is not None else checkpoint.resolve().name)}",
        f"Trained with megatrain {__version__}: fp32 master weights and AdamW moments, exported from {_code(checkpoint.name)}.",
    ]
    if file_problem(checkpoint, CARD) is None:
        parts.append(f"The card of the model that training started from is in `{SOURCE_CARD}`.")
    parts.append(_table(_facts(extra, step, model, dtype, run)))
    if run is not None and run.curve is not None:
        parts.append(f"![Loss, learning rate, gradient norm and speed over the steps]({CURVE})")
    if run is not None and run.config is not None:
        text = dump_config(run.config)
        fence = "`" * (1 + max(2, *map(len, re.findall("`+", text)), 0))  # longer than any inside
        parts += ["## Data", _data(run.config), "## Config", f"{fence}yaml\n{text}{fence}"]
    parts += [
        "## Use",
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'model = AutoModelForCausalLM.from_pretrained("this folder", dtype="auto")\n'
        'tokenizer = AutoTokenizer.from_pretrained("this folder")\n```',
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(checkpoint: Path, extra: Mapping[str, Any], model: Mapping[str, Any], run: RunFiles | None) -> str:
    metadata = CardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        license=_license_of(checkpoint),
        base_model=_base_model(extra, model, run),
    )
    return f"---\n{metadata.to_yaml()}\n---"


def _license_of(checkpoint: Path) -> Any:
    """The license in the metadata of a checkpoint's card; None without a card or readable metadata."""
    try:
        return (metadata_load(regular_file(checkpoint, CARD)) or {}).get("license")
    except (UserError, ValueError, YAMLError, AttributeError):
        return None


def _base_model(extra: Mapping[str, Any], model: Mapping[str, Any], run: RunFiles | None) -> str | None:
    """The hub id of the model that training started from; None if it has none, or none is known."""
    if run is not None and run.config is not None and run.config.model.init == "random":
        return None
    path = str(extra.get("model") or model.get("_name_or_path") or "")
    in_cache = re.search(r"models--([\w.-]+?)--([\w.-]+)/snapshots/", path)
    if in_cache is not None:
        return f"{in_cache[1]}/{in_cache[2]}"
    # the path of a folder, even of one that is gone, may look like an id
    is_id = re.fullmatch(HUB_ID, path) and not Path(path).exists() and cached_snapshot(path) is not None
    return path if is_id else None


def _facts(
    extra: Mapping[str, Any], step: int, model: Mapping[str, Any], dtype: torch.dtype, run: RunFiles | None
) -> dict[str, str]:
    facts = {
        "architecture": ", ".join(model.get("architectures") or []),
        "weights": str(dtype).removeprefix("torch."),
        "optimizer steps": str(extra.get("step", step)),
    }
    if run is not None and run.records:
        losses = [record.loss for record in run.records if record.loss is not None]
        validated = [record.val_loss for record in run.records if record.val_loss is not None]
        facts["trained tokens"] = f"{sum(record.trained_tokens for record in run.records):,}"
        if losses:
            facts["training loss, first and last step"] = f"{losses[0]:.4f}, {losses[-1]:.4f}"
        if len(validated) == 1:
            facts["validation loss"] = f"{validated[0]:.4f}"
        elif validated:
            facts["validation loss, first and last"] = f"{validated[0]:.4f}, {validated[-1]:.4f}"
    settings = {**(extra.get("schedule") or {}), **(extra.get("settings") or {})}
    if "computed_in" in extra:  # what `auto` chose
        settings["precision.compute_dtype"] = extra["computed_in"]
    facts |= {name: str(value) for name, value in settings.items() if value not in (None, [])}
    data = extra.get("data") or {}
    facts |= {
        words: str(data[name])
        for name, words in (("rows_per_step", "rows per step"), ("max_tokens", "tokens per row"), ("seed", "seed"))
        if name in data
    }
    return facts | {"versions": f"torch {torch.__version__}, transformers {transformers.__version__}"}


def _plain(text: str) -> str:
    """Text from a name or a setting as Markdown that shows just that: one line, without links, HTML or cells of a table."""
    return re.sub(r"([\\`\[<|])", r"\\\1", one_line(text))


def _code(text: str) -> str:
    """Text from a name or a path as Markdown code."""
    return "`" + one_line(text).replace("`", "'") + "`"


def _table(rows: Mapping[str, str]) -> str:
    lines = (f"| {_plain(name)} | {_plain(value)} |" for name, value in rows.items())
    return "\n".join(["| | |", "|---|---|", *lines])


def _data(config: RunConfig) -> str:
    section = config.data
    lines = [
        f"- {_code(source.path)}" + (f", weight {source.weight:g}" if source.weight != 1 else "")
        for source in section.train
    ]
    if section.val is not None and section.val.fraction is not None:
        lines.append(f"- held out: {section.val.fraction:.2%} of the above")
    elif section.val is not None:
        lines += [f"- held out: {_code(source.path)}" for source in section.val.sources or ()]
    return "\n".join([*lines, f"- trained on: {section.train_on}; longer than a row: {section.overflow}"])
