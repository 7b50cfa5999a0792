"""Descriptions of the config keys, made from the schema: for `--help`, docs/config.md and docs/config.schema.json.

python -m megatrain.config.docs          write both files
python -m megatrain.config.docs --check  exit code 1 if they are out of date
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
from collections.abc import Collection, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megatrain.config.load import alternatives, fields, model_in
from megatrain.config.schema import RunConfig

FOLDER = Path(__file__).parents[3] / "docs"
MARKDOWN, SCHEMA = "config.md", "config.schema.json"

MAIN_KEYS = frozenset(
    """
    model.path data.train data.val data.max_tokens data.overflow data.train_on batch.tokens_per_step optim.learning_rate
    optim.weight_decay schedule.warmup_ratio schedule.epochs schedule.steps eval.every_steps checkpoint.every_steps
    checkpoint.keep run.dir run.seed""".split()
)
"""Keys that most runs set: shown in the short help."""
_NAME_WIDTH, _LEAST_WIDTH, _MOST_WIDTH = 36, 72, 120

_HEAD = """\
# All config keys

<!-- Generated from src/megatrain/config/schema.py by `python -m megatrain.config.docs`; a test keeps it up to date. -->

A config is a YAML 1.2 file with sections. Four keys have no default: `model.path`, `data.train`, `batch.tokens_per_step` and
`run.dir`. `megatrain init MODEL DATA` writes a file with these and the few others that are worth a decision. An unknown key is an
error, with its line and the closest key.

Every key is also a command line option, which overrides the file:
`megatrain train run.yaml --optim.learning_rate 2e-5 --data.packing false`. List items are addressed by index:
`--data.train.0.weight 0.5`. The only booleans are `true` and `false`; the meaning of `null` is stated at each key. Relative paths
are relative to the current directory.

Below, N is an integer, X a number, TEXT a string, and YAML a list or section.

For completion and checks in an editor, begin the file with `# yaml-language-server: $schema=config.schema.json`, with the path to
[config.schema.json](config.schema.json).
"""


def section_names() -> list[str]:
    """The sections of a config, and `engine`, in YAML order."""
    return list(RunConfig.model_fields)


def describe_keys(section: str | None = None, only: Collection[str] | None = None) -> str:
    """Keys with type, description and default for `--help`: of one section or all, by section in YAML order; or `only` some
    keys, without headings."""
    lines: list[str] = []
    width = min(max(shutil.get_terminal_size((100, 24)).columns, _LEAST_WIDTH), _MOST_WIDTH)
    for loc, info in fields():
        name = ".".join(map(str, loc))
        if section not in (None, loc[0]) or (only is not None and name not in only):
            continue
        if len(loc) == 1 and info.description is None:
            heading = model_in(info.annotation)
            assert heading is not None, f"{name} has neither description nor keys"
            lines += ["", *textwrap.wrap(f"{name}: {_doc(heading)}", width)]
            continue
        default = "required" if info.is_required() else f"default: {default_text(info)}"
        if len(loc) == 1 and only is None:
            lines.append("")
        option = f"  --{name} {type_text(info)}"
        text = textwrap.wrap(f"{info.description} ({default})", width - _NAME_WIDTH)
        if len(option) < _NAME_WIDTH:
            option = option.ljust(_NAME_WIDTH) + text.pop(0)
        lines += [option, *(" " * _NAME_WIDTH + line for line in text)]
    return "\n".join(lines)


def default_text(info: FieldInfo) -> str:
    """A field's default as YAML."""
    value = info.default
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(list(value) if isinstance(value, tuple) else value)


def type_text(info: FieldInfo) -> str:
    """The values a field accepts: its choices, N, X, TEXT, or YAML for lists and sections."""
    words: list[str] = []
    for kind in alternatives(info.annotation):
        if get_origin(kind) is Literal:
            words += map(str, get_args(kind))
        elif kind is not NoneType:
            words.append({str: "TEXT", int: "N", float: "X", bool: "true|false"}.get(kind, "YAML"))
    return "|".join(words)


def markdown() -> str:
    """The text of docs/config.md: sections and keys in YAML order."""
    lines = [_HEAD]
    for loc, info in fields():
        name = ".".join(map(str, loc))
        section = model_in(info.annotation)
        if len(loc) == 1 and section is not None:
            lines += [f"\n## {name}", _doc(section), ""]
            continue
        if len(loc) == 1:
            lines.append(f"\n## {name}")
        default = "required" if info.is_required() else f"default `{default_text(info)}`"
        kind = type_text(info).replace("|", " or ")
        lines.append(f"- `{name}` ({kind}; {default}): {info.description}")
    return "\n".join(lines) + "\n"


def json_schema() -> dict[str, Any]:
    """A JSON schema of the config, including the short forms of sources."""
    schema = RunConfig.model_json_schema()
    data, val = (schema["$defs"][name]["properties"] for name in ("DataConfig", "ValConfig"))
    one = {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/SourceConfig"}]}
    many = {"type": "array", "minItems": 1, "items": one}
    sources = [*one["anyOf"], many]
    data["train"] = {"anyOf": sources, "description": data["train"]["description"]}
    val["sources"] = {
        "anyOf": [*sources, {"type": "null"}],
        "default": None,
        "description": val["sources"]["description"],
    }
    data["val"]["anyOf"] += sources
    for name in schema["properties"]:
        # a section without keys is null in YAML, and means the defaults
        if name not in schema["required"] and name != "engine":
            schema["properties"][name] = {"anyOf": [schema["properties"][name], {"type": "null"}]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **_with_limits(schema),
        "title": "megatrain config",
    }


# pydantic keeps its own name for a limit that has a validator before it
_LIMITS = {
    "gt": "exclusiveMinimum",
    "ge": "minimum",
    "lt": "exclusiveMaximum",
    "le": "maximum",
    "min_length": "minItems",
}


def _with_limits(node: Any) -> Any:
    if isinstance(node, dict):
        return {_LIMITS.get(key, key): _with_limits(value) for key, value in node.items()}
    return [_with_limits(item) for item in node] if isinstance(node, list) else node


def texts() -> dict[str, str]:
    """Expected content by file name."""
    return {MARKDOWN: markdown(), SCHEMA: json.dumps(json_schema(), indent=1) + "\n"}


def stale(folder: Path) -> list[Path]:
    """The files that are missing or out of date."""
    wanted = {folder / name: text for name, text in texts().items()}
    return [path for path, text in wanted.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write docs/config.md and docs/config.schema.json from the schema.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if they are out of date")
    parser.add_argument("--folder", type=Path, default=FOLDER, help=f"default: {FOLDER.name}/ in the repository")
    arguments = parser.parse_args(argv)
    old = stale(arguments.folder)
    for path in old:
        if not arguments.check:
            path.write_text(texts()[path.name], encoding="utf-8")
        sys.stdout.write(f"{path.name} {'is out of date' if arguments.check else 'written'}\n")
    return 1 if old and arguments.check else 0


def _doc(section: type[BaseModel]) -> str:
    return " ".join((section.__doc__ or "").split())


if __name__ == "__main__":
    sys.exit(main())
