"""What `--help` and docs/config.md say of the keys of a config: type, default and meaning, made from the schema."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Collection
from types import NoneType
from typing import Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from megatrain.config.load import alternatives, fields, model_in
from megatrain.config.schema import RunConfig

MAIN_KEYS = frozenset(
    (
        "model.path data.train data.val data.max_tokens data.overflow data.train_on batch.tokens_per_step optim.learning_rate "
        "optim.weight_decay schedule.warmup_ratio schedule.epochs schedule.steps eval.every_steps checkpoint.every_steps "
        "checkpoint.keep run.dir run.seed"
    ).split()
)
"""What a run usually sets: the short help."""
_NAME_WIDTH, _LEAST_WIDTH, _MOST_WIDTH = 36, 72, 120


def section_names() -> list[str]:
    """The sections of a config, and `engine`, in the order of the YAML."""
    return list(RunConfig.model_fields)


def describe_keys(section: str | None = None, only: Collection[str] | None = None) -> str:
    """Keys with type, meaning and default, grouped by section in the order of the YAML, for `--help`.

    Args:
        section: Those of one section; None: of all.
        only: These alone, without the sections' headings.
    """
    lines: list[str] = []
    width = min(max(shutil.get_terminal_size((100, 24)).columns, _LEAST_WIDTH), _MOST_WIDTH)
    for loc, info in fields():
        name = ".".join(map(str, loc))
        if section not in (None, loc[0]) or (only is not None and name not in only):
            continue
        if len(loc) == 1 and info.description is None:
            heading = model_in(info.annotation)
            assert heading is not None, f"{name} has neither description nor keys"
            lines += ["", f"{name}: {' '.join((heading.__doc__ or '').split())}"]
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
    """A field's default as YAML writes it."""
    value = info.default
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(list(value) if isinstance(value, tuple) else value)


def type_text(info: FieldInfo) -> str:
    """What a field takes, in a word: its choices, N, X, TEXT, or YAML for what has parts."""
    words: list[str] = []
    for kind in alternatives(info.annotation):
        if get_origin(kind) is Literal:
            words += map(str, get_args(kind))
        elif kind is not NoneType:
            words.append({str: "TEXT", int: "N", float: "X", bool: "true|false"}.get(kind, "YAML"))
    return "|".join(words)
