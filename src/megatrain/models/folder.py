"""What a model folder must not do before transformers reads it: lead out of itself, or to the network.

The files of a folder are checked, and the names in its configs: transformers opens what they name. The rules for names and links
are those of [Note: names in a folder] in paths.py.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from megatrain.errors import UserError
from megatrain.paths import read_json, refuse_names, regular_file
from megatrain.units import gibs

READ_BY_TRANSFORMERS = re.compile(
    r"(config|generation_config|(pre)?processor_config|special_tokens_map|added_tokens)\.json"
    r"|(tokenizer|vocab|merges|chat_template|tekken).*\.(json|txt)|.*\.(model|tiktoken|jinja|safetensors|index\.json)"
)
"""Files of a folder that transformers, or megatrain, reads; `*.py` too, where code in the folder may run."""
TEMPLATE_FOLDER = "additional_chat_templates"
OBJECTS = (
    "config.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json", "added_tokens.json",
)  # fmt: skip
"""Small files that hold one JSON object each."""
SMALL_BYTES = 1 << 30
"""Largest file besides weights: transformers reads them whole."""
NEVER_OPENED = frozenset({"special_tokens_map_file", "added_tokens_file"})
"""Keys of tokenizer_config.json that hold a path of the machine on which it was written. transformers ignores them."""

_offline_lock = threading.Lock()
_offline_users = 0
_was_offline = False


@contextmanager
def offline() -> Iterator[None]:
    """Inside the block huggingface_hub, which transformers asks for files, uses only its cache: nothing is downloaded."""
    global _offline_users, _was_offline
    with _offline_lock:
        if _offline_users == 0:
            _was_offline, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
        _offline_users += 1
    try:
        yield
    finally:
        with _offline_lock:
            _offline_users -= 1
            if _offline_users == 0:
                constants.HF_HUB_OFFLINE = _was_offline


def refuse_unsafe_folder(folder: Path, trust_remote_code: bool = False) -> None:
    """Check the files of a model folder and the names in its configs. Reads only its small JSON files.

    Args:
        folder: The folder; it exists.
        trust_remote_code: Whether Python files in it may run, and are checked too.

    Raises:
        UserError: A file is a link that leads out of the folder, a device or the like, too large, or no JSON; or a config names
            a file outside of the folder.
    """
    templates = folder / TEMPLATE_FOLDER
    found = [*folder.iterdir(), *(templates.glob("*.jinja") if templates.is_dir() else ())]
    inside = sorted(path.relative_to(folder).as_posix() for path in found)
    for name in inside:
        file = folder / name
        wanted = READ_BY_TRANSFORMERS.fullmatch(name) or (trust_remote_code and name.endswith(".py"))
        if not wanted or (file.is_dir() and not name.endswith((".json", ".safetensors"))):
            continue
        size = regular_file(folder, name).stat().st_size
        if size > SMALL_BYTES and not name.endswith(".safetensors"):
            has, most = gibs(size, SMALL_BYTES)
            raise UserError(f"has {has}; at most {most} are read", str(file))
    for name in OBJECTS:
        if name in inside:
            value = read_json(folder, name, constants=True)
            if not isinstance(value, dict):
                raise UserError("not a JSON object", str(folder / name), "get an intact copy of the folder")
            if name in ("config.json", "tokenizer_config.json"):
                _refuse_named_files(folder, name, value)


def _refuse_named_files(folder: Path, name: str, config: dict[str, Any]) -> None:
    """Raise for the files that a config names, unless they are plain names of files in the folder."""
    named: list[Any] = [config["transformers_weights"]] if config.get("transformers_weights") is not None else []
    code = config.get("auto_map")
    for value in code.values() if isinstance(code, dict) else [code]:
        for reference in value if isinstance(value, list) else [value]:
            if isinstance(reference, str):  # `ORG/NAME--module.Class`: from a repository in the cache
                named.append(reference.rpartition("--")[2].rpartition(".")[0] + ".py")
    tokenizers = config.get("fast_tokenizer_files")
    named += tokenizers if isinstance(tokenizers, list) else []
    if name == "tokenizer_config.json":
        # Paths of another machine are common here. They do no harm where they lead to nothing.
        paths = [config[key] for key in config if key.endswith("_file") and key not in NEVER_OPENED]
        named += [path for path in paths if isinstance(path, str) and _leads_to_something(folder, path)]
    refuse_names(dict.fromkeys(map(_hashable, named)), folder / name)


def _leads_to_something(folder: Path, path: str) -> bool:
    try:
        return os.path.lexists(folder / path)
    except ValueError:  # a zero byte
        return True


def _hashable(value: Any) -> Any:
    return value if isinstance(value, str) else repr(value) + "/"
