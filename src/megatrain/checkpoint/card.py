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
    if checkpoint.resolve().parent.name != "checkpoints" or not (folder / "config.yaml").is_file():
        return None
    try:
        config = load_config(folder / "config.yaml")
    except UserError:  # of another version
        config = None
    try:
        records = [record for record in read_records(folder / "metrics.jsonl") if record.step <= step]
    except UserError:  # damaged
        records = []
    return RunFiles(folder.name, config, records, folder / CURVE if (folder / CURVE).is_file() else None)


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
        f"# {run.name if run is not None else checkpoint.resolve().name}",
        f"Trained with megatrain {__version__}: fp32 master weights and AdamW moments, exported from `{checkpoint.name}`.",
    ]
    if (checkpoint / CARD).is_file():
        parts.append(f"The card of the model that training started from is in `{SOURCE_CARD}`.")
    parts.append(_table(_facts(extra, step, model, dtype, run)))
    if run is not None and run.curve is not None:
        parts.append(f"![Loss, learning rate, gradient norm and speed over the steps]({CURVE})")
    if run is not None and run.config is not None:
        parts += ["## Data", _data(run.config), "## Config", f"```yaml\n{dump_config(run.config)}```"]
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
        license=_license_of(checkpoint / CARD),
        base_model=_base_model(extra, model, run),
    )
    return f"---\n{metadata.to_yaml()}\n---"


def _license_of(card: Path) -> Any:
    """The license in a card's metadata; None without a card or readable metadata."""
    try:
        return (metadata_load(card) or {}).get("license") if card.is_file() else None
    except (ValueError, YAMLError):
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


def _table(rows: Mapping[str, str]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def _data(config: RunConfig) -> str:
    section = config.data
    lines = [
        f"- `{source.path}`" + (f", weight {source.weight:g}" if source.weight != 1 else "") for source in section.train
    ]
    if section.val is not None and section.val.fraction is not None:
        lines.append(f"- held out: {section.val.fraction:.2%} of the above")
    elif section.val is not None:
        lines += [f"- held out: `{source.path}`" for source in section.val.sources or ()]
    return "\n".join([*lines, f"- trained on: {section.train_on}; longer than a row: {section.overflow}"])
