"""What of the data travels with the trained model: the chat template, and the tokens at which generation stops.

[Note: what was trained is what is shipped]
A checkpoint is a model folder. Its tokenizer must render chats as they were trained, and its generation must stop where the
trained answers end. So a template from `data.chat_template` replaces the model's own in every checkpoint, together
with the copies of it that transformers would prefer. Keywords from `data.chat_template_kwargs` become its defaults. And a token
that ended answers in training, like `<|im_end|>` in a base model whose end token is `<|endoftext|>`, joins `eos_token_id` of
generation_config.json. An export copies both.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from megatrain.config.schema import RunConfig
from megatrain.data.render import read_template
from megatrain.data.rows import PackedRows

GENERATION_CONFIG = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
OTHER_TEMPLATES = ("chat_template.json", "additional_chat_templates/")
"""Further places in which transformers finds templates. A trailing slash: all files of the folder."""

Files = dict[str, bytes | None]
"""Content of a checkpoint's files by name, instead of the model folder's; None: the file is left out."""


def shipped_files(
    run: RunConfig, model_folder: Path, config: Any, tokenizer: Any, rows: PackedRows, log: Callable[[str], None]
) -> Files:
    """Files of a run's checkpoints that differ from the model folder's. Logs the stop tokens that are added.

    Args:
        run: The config.
        model_folder: The local folder behind `model.path`.
        config: The model's Hugging Face config.
        tokenizer: Names the stop tokens.
        rows: The training rows.
        log: Takes a line for the user.
    """
    files: Files = {}
    ends = trained_ends(rows)
    given, keywords = run.data.chat_template, run.data.chat_template_kwargs
    if (given is not None or keywords) and any(group.store.meta.get("turn_ends") for group in rows.groups):
        template = read_template(given) if given is not None else tokenizer.chat_template
        if isinstance(template, str):
            files |= _template_files(with_defaults(template, keywords), model_folder)
            defaults = f", with {', '.join(keywords)} as trained" if keywords else ""
            log(f"checkpoints get the chat template {given or f'of {model_folder}'}{defaults}")
        else:
            what = "several chat templates: data.chat_template_kwargs do not become their defaults"
            log(f"warning: {model_folder} has {what}; give them whenever you ask the trained model")
    generation: dict[str, Any] = read_json(model_folder / GENERATION_CONFIG)
    known = stop_tokens(generation, config)
    if added := [token for token in ends if token not in known]:
        if not generation:  # as transformers derives it
            generation = {"_from_model_config": True}
            for key in ("bos_token_id", "pad_token_id"):
                if (value := getattr(config.get_text_config(), key, None)) is not None:
                    generation[key] = value
        generation["eos_token_id"] = [*known, *added]
        files[GENERATION_CONFIG] = (json.dumps(generation, indent=2) + "\n").encode()
        names = ", ".join(str(tokenizer.convert_ids_to_tokens(token)) for token in added)
        log(
            f"trained answers end with {names}, at which {model_folder} does not stop: added to eos_token_id of checkpoints"
        )
    return files


def with_defaults(template: str, keywords: Mapping[str, Any]) -> str:
    """A template that renders without keywords as `template` does with them. Other values may still be given."""
    if not keywords:
        return template
    lines = [
        f"{{%- if {name} is not defined %}}{{%- set {name} = {_jinja(value)} %}}{{%- endif %}}"
        for name, value in keywords.items()
    ]
    return "".join(lines) + "\n" + template  # jinja drops the newline after a block


def _jinja(value: Any) -> str:
    """A value from YAML as a literal of jinja."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_jinja(key)}: {_jinja(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_jinja(item) for item in value) + "]"
    return "none" if value is None else json.dumps(value)


def trained_ends(rows: PackedRows) -> list[int]:
    """The tokens that ended answers in the training data."""
    return sorted({int(token) for group in rows.groups for token in group.store.meta.get("turn_ends", ())})


def stop_tokens(generation: Mapping[str, Any], config: Any) -> list[int]:
    """Where generation stops, according to generation_config.json, or else to config.json."""
    found = generation.get("eos_token_id")
    if found is None and not generation:
        found = getattr(config.get_text_config(), "eos_token_id", None)
    return [] if found is None else [found] if isinstance(found, int) else list(found)


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _template_files(template: str, model_folder: Path) -> Files:
    """The template as the only one of the folder."""
    files: Files = {TEMPLATE: template.encode(), **dict(_left_out(model_folder))}
    settings = read_json(model_folder / TOKENIZER_CONFIG)
    if settings.pop("chat_template", None) is not None:
        files[TOKENIZER_CONFIG] = (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode()
    return files


def _left_out(model_folder: Path) -> Iterable[tuple[str, None]]:
    for name in OTHER_TEMPLATES:
        found = sorted((model_folder / name).glob("*")) if name.endswith("/") else [model_folder / name]
        yield from ((file.relative_to(model_folder).as_posix(), None) for file in found if file.is_file())
