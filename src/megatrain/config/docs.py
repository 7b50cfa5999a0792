"""docs/config.md and docs/config.schema.json, made from the schema:

    python -m megatrain.config.docs          write both
    python -m megatrain.config.docs --check  exit code 1 if they are not what the schema says

An editor that speaks YAML's language server completes and checks a config that begins with
`# yaml-language-server: $schema=PATH/config.schema.json`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from megatrain.config.help import default_text, type_text
from megatrain.config.load import fields, model_in
from megatrain.config.schema import RunConfig

FOLDER = Path(__file__).parents[3] / "docs"
MARKDOWN, SCHEMA = "config.md", "config.schema.json"

_HEAD = """\
# Every key of a config

<!-- Made from src/megatrain/config/schema.py by `python -m megatrain.config.docs`; a test keeps it fresh. -->

A config is a YAML 1.2 file of sections. Four keys have no default: `model.path`, `data.train`, `batch.tokens_per_step` and
`run.dir`; `megatrain init MODEL DATA` writes a file with these and six more that are worth a thought. An unknown key is an error,
with its line and the key that was probably meant. Every key is also an option of the command line, which wins over the file:
`megatrain train run.yaml --optim.learning_rate 2e-5 --data.packing false`. Items of lists go by their number:
`--data.train.0.weight 0.5`. `true` and `false` are the only booleans, and `null` means what the key says of it. Relative paths
start at the current directory.

Below, N is a whole number, X a number, TEXT a text, and YAML something with parts.

For completion and checks in an editor, let the file begin with
`# yaml-language-server: $schema=config.schema.json`, with the path of [config.schema.json](config.schema.json).
"""


def markdown() -> str:
    """The text of docs/config.md: sections and keys in the order of the YAML."""
    lines = [_HEAD]
    for loc, info in fields():
        name = ".".join(map(str, loc))
        section = model_in(info.annotation)
        if len(loc) == 1 and section is not None:
            lines += [f"\n## {name}", _doc(section), ""]
            continue
        if len(loc) == 1:
            lines.append(f"\n## {name}")
        default = "required" if info.is_required() else f"default {_code(default_text(info))}"
        kind = type_text(info).replace("|", " or ")
        lines.append(f"- `{name}` ({kind}; {default}): {info.description}")
    return "\n".join(lines) + "\n"


def json_schema() -> dict[str, Any]:
    """A JSON schema of everything that a config may say, the short forms of sources included."""
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
        # a section without keys is null in YAML, and means its defaults
        if name not in schema["required"] and name != "engine":
            schema["properties"][name] = {"anyOf": [schema["properties"][name], {"type": "null"}]}
    schema = _with_limits(schema)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "megatrain config"}


# pydantic leaves a limit under its own name where a validator stands before it
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
    """File name -> what it should hold."""
    return {MARKDOWN: markdown(), SCHEMA: json.dumps(json_schema(), indent=1) + "\n"}


def stale(folder: Path) -> list[Path]:
    """The files that are missing, or are not what the schema says."""
    wanted = {folder / name: text for name, text in texts().items()}
    return [path for path, text in wanted.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write docs/config.md and docs/config.schema.json from the schema.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if they are not fresh")
    parser.add_argument("--folder", type=Path, default=FOLDER, help=f"default: {FOLDER.name}/ of the repository")
    arguments = parser.parse_args(argv)
    old = stale(arguments.folder)
    for path in old:
        if not arguments.check:
            path.write_text(texts()[path.name], encoding="utf-8")
        sys.stdout.write(f"{path.name} {'is not fresh' if arguments.check else 'written'}\n")
    return 1 if old and arguments.check else 0


def _doc(section: type[BaseModel]) -> str:
    return " ".join((section.__doc__ or "").split())


def _code(text: str) -> str:
    return f"`{text}`"


if __name__ == "__main__":
    sys.exit(main())
