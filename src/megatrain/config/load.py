"""Load a config: from a YAML file and overrides to a RunConfig, with all problems in one error.

    YAML 1.2 file --> plain data + line of each key --> overrides written into the data --> one pydantic validation

A problem is shown with its place: `run.yaml:14 batch.tokens_per_step: ...; did you mean "..."?`, or `--batch.x: ...` if the
value came from an override. Relative paths in a config are relative to the current directory, not to the file, so a config can
be copied into the run's folder and keep its meaning.

Why not a library: of pydantic-settings, jsonargparse and tyro, none knows the line of a key in the file, reports an unknown
option with a suggestion and together with all other problems, or overrides one item of `data.train`.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from megatrain.config import schema
from megatrain.config.schema import RunConfig
from megatrain.errors import UserError
from megatrain.text import visible

Loc = tuple[str | int, ...]  # path of a value: ("data", "train", 0, "path")

_OTHER_NAMES = {
    "optim.learning_rate": "lr",
    "optim.max_grad_norm": "max_grad_clip gradient_clipping",
    "data.max_tokens": "max_seq_len max_seq_length max_length cutoff_len sequence_length",
    "data.train": "dataset train_file",
    "data.val": "validation_file",
    "model.path": "model_name_or_path name_or_path",
    "batch.tokens_per_step": "batch_size gradient_accumulation_steps",
    "batch.microbatch_rows": "per_device_train_batch_size chunk_rows",
    "batch.accumulation_steps": "windows",
    "activations.offload_input": "offload",
    "precision.compute_dtype": "dtype",
    "schedule.epochs": "num_train_epochs num_epochs",
    "schedule.steps": "max_steps num_steps",
    "schedule.kind": "lr_scheduler_type",
    "schedule.warmup_ratio": "warmup",
    "checkpoint.every_steps": "save_steps",
    "checkpoint.keep": "save_total_limit",
    "eval.every_steps": "eval_steps",
    "run.dir": "output_dir",
}
"""Names of a key in other trainers and in earlier versions, for suggestions."""
_NO_KEYS = {
    "parallel.sequence": "sequence parallel has no key: it is always on with parallel.tensor above 1",
    "parallel.expert": "expert parallel has no key: tensor ranks share the experts of a layer (parallel.tensor)",
    "parallel.data": "data parallel has no key: it is parallel.shard (FSDP) and parallel.replicate (HSDP)",
}
"""Keys that do not exist and never did, for what other trainers have a switch -> what to do instead."""
_ALIASES = {name: key for key, names in _OTHER_NAMES.items() for name in names.split()}


@dataclass(frozen=True)
class Override:
    """One `--section.key value` of the command line."""

    loc: Loc
    text: str
    flag: str  # as written, for messages


@dataclass
class _Document:
    data: dict[str, Any]  # before validation
    name: str  # of the file, for messages
    lines: dict[Loc, int] = field(default_factory=dict)  # line of each key and list item, from 1
    flags: dict[Loc, str] = field(default_factory=dict)  # values that came from an override

    def line(self, loc: Loc) -> int:
        """Line of the nearest key that is in the file, or 0."""
        return next((self.lines[loc[:end]] for end in range(len(loc), 0, -1) if loc[:end] in self.lines), 0)

    def place(self, loc: Loc) -> str:
        """`run.yaml:14 batch.tokens_per_step`, with the line of the nearest key that is in the file."""
        dotted = ".".join(map(str, loc))
        for end in range(len(loc), 0, -1):
            if flag := self.flags.get(loc[:end]):
                return flag if end == len(loc) else f"{flag} ({dotted})"
        line = self.line(loc)
        return f"{self.name}:{line} {dotted}" if line else f"{self.name} {dotted}"


def load_config(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """Read, override and validate a config.

    Args:
        source: A YAML file, or its content as nested dicts.
        overrides: Command line words: `--optim.learning_rate 2e-5`, `--optim.learning-rate=2e-5` or
            `optim.learning_rate=2e-5`. Values are YAML.

    Raises:
        UserError: The file cannot be read, or the config is wrong; the message lists all problems.
    """
    document = _Document(_plain(source), "config") if isinstance(source, Mapping) else _from_file(Path(source))
    given, rest = split_overrides(overrides)
    if rest:
        raise UserError(f"not an override: {rest[0]!r}", remedy="write --section.key VALUE")
    for override in given:
        _apply(override, document)
    try:
        return RunConfig.model_validate(document.data)
    except ValidationError as error:
        raise _user_error(error, document) from None


def dump_config(run: RunConfig) -> str:
    """The config with all defaults, as YAML; `load_config` reads it back to an equal RunConfig."""
    out = io.StringIO()
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # pyright: ignore[reportAttributeAccessIssue]
    data = run.model_dump(mode="json", exclude_none=False)
    if run.data.val is not None:  # its two forms exclude each other; a null for the other would only confuse
        data["data"]["val"] = run.data.val.model_dump(mode="json", exclude_none=True)
    yaml.dump(data, out)
    if visible(out.getvalue()) != out.getvalue():  # a name with marks of direction: write it by codes
        yaml.allow_unicode, out = False, io.StringIO()
        yaml.dump(data, out)
    return out.getvalue()


# ---- reading

MOST_BYTES = 4 << 20
MOST_NODES, MOST_DEPTH, MOST_BRACKETS = 100_000, 100, 300
"""Limits of a config: far above any real one, far below a data file given by mistake or nested aliases."""
_GIVE = "give the path of a run's YAML file"


def _from_file(path: Path) -> _Document:
    try:
        if path.is_file() and (size := path.stat().st_size) > MOST_BYTES:
            raise UserError(f"is too large for a config: {size:,} bytes", str(path), _GIVE)
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError("no such file", str(path), _GIVE) from None
    except UnicodeDecodeError as error:
        raise UserError(f"is not UTF-8 text ({error.reason} at byte {error.start})", str(path)) from None
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", str(path)) from None
    try:
        root = _parsed(text)
    except _TooMuch as error:
        raise UserError(str(error), str(path), "write the values out, without aliases of aliases") from None
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        problem = (error.problem or error.context or "malformed").splitlines()[0]
        is_yaml = path.suffix.lower() in (".yaml", ".yml", "")
        remedy = "check indentation, colons and quotes" if is_yaml else _GIVE
        raise UserError(f"is not valid YAML: {problem}", f"{path}{line}", remedy) from None
    except YAMLError as error:
        raise UserError(f"is not valid YAML: {str(error).splitlines()[0]}", str(path)) from None
    if not isinstance(root, dict):
        found = "nothing" if root is None else f"a {type(_plain(root)).__name__}"
        what = f"should contain the sections model, data, batch, run, ...; found {found}"
        raise UserError(what, str(path), "see `megatrain train --help-all` for all keys")
    return _Document(_plain(root), str(path), dict(_lines(root)))


_BRACKETS = {"[": 1, "{": 1, "]": -1, "}": -1}


class _TooMuch(Exception):
    """The YAML is too large or too deep for a config."""


def _parsed(text: str) -> Any:
    """Parse YAML, with ruamel's types.

    An alias is one object in several places, so a short text may expand to more values than fit into memory, or to an
    infinite one. Values are counted as often as they occur, before anything copies them.

    Raises:
        _TooMuch: Too many values, or nested too deeply.
        YAMLError: Not valid YAML.
    """
    # The parser would take minutes to overflow the stack. Brackets inside strings count too, which no real config reaches.
    deepest = max(itertools.accumulate(_BRACKETS.get(character, 0) for character in text), default=0)
    if deepest > MOST_BRACKETS:
        raise _TooMuch("is nested too deeply")
    try:
        root = YAML(typ="rt").load(text)
    except RecursionError:
        raise _TooMuch("is nested too deeply") from None
    count, waiting = 0, [(root, 0)]
    while waiting:
        node, depth = waiting.pop()
        inner = list(node.values()) if isinstance(node, Mapping) else node if isinstance(node, list) else ()
        count += 1 + len(inner)
        if depth > MOST_DEPTH:
            raise _TooMuch(f"is nested more than {MOST_DEPTH} levels deep")
        if count > MOST_NODES:
            raise _TooMuch(f"expands to more than {MOST_NODES:,} values")
        waiting += [(one, depth + 1) for one in inner]
    return root


def _plain(node: Any) -> Any:
    """Copy without ruamel's types, whose numbers and strings keep their spelling and would show it in error messages."""
    if isinstance(node, Mapping):
        return {str(key): _plain(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_plain(value) for value in node]
    for kind in (bool, int, float, str):
        if isinstance(node, kind):
            return kind(node)
    return node


def _lines(node: Any, loc: Loc = ()) -> Iterator[tuple[Loc, int]]:
    position = getattr(node, "lc", None)
    if position is None or not isinstance(node, dict | list):
        return
    for key in node if isinstance(node, dict) else range(len(node)):
        place = (*loc, str(key) if isinstance(node, dict) else key)
        # keys from a merge (<<) have no line
        if position.data and key in position.data:
            yield place, position.data[key][0] + 1
        yield from _lines(node[key], place)


# ---- overrides


def split_overrides(words: Sequence[str]) -> tuple[list[Override], list[str]]:
    """Separate the overrides of a command line from its other words.

    An override is `--a.b VALUE`, `--a.b=VALUE` or `a.b=VALUE`. A boolean needs no value: `--data.packing` means true.
    """
    overrides: list[Override] = []
    rest: list[str] = []
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        match = re.fullmatch(r"(?P<dashes>--)?(?P<key>[A-Za-z][\w-]*(?:\.[\w-]+)*)(?P<value>=.*)?", word, re.DOTALL)
        if match is None or not (match["dashes"] or match["value"]) or not _is_config_key(match["key"]):
            rest.append(word)
            continue
        loc = tuple(int(p) if p.isdigit() else p for p in match["key"].replace("-", "_").split("."))
        flag = f"{match['dashes'] or ''}{match['key']}"
        if match["value"] is not None:
            text = match["value"][1:]
        elif position < len(words) and not words[position].startswith("--"):
            text = words[position]
            position += 1
        elif _field_type(loc) is bool:
            text = "true"
        else:
            raise UserError("has no value", flag, f"write {flag} VALUE")
        overrides.append(Override(loc, text, flag))
    return overrides, rest


def _is_config_key(key: str) -> bool:
    """A name without a dot is a key only if it is not a section: `--checkpoint PATH` is an argument of a command."""
    return "." in key or (key in RunConfig.model_fields and model_in(RunConfig.model_fields[key].annotation) is None)


def _apply(override: Override, document: _Document) -> None:
    node: Any = document.data
    for depth, key in enumerate(override.loc[:-1]):
        inside = ".".join(map(str, override.loc[: depth + 1]))
        if isinstance(node, list):
            node = _list_item(node, key, override)
        elif node.get(key) is None:
            node[key] = node = {}
        else:
            node = node[key]
        if not isinstance(node, dict | list):
            raise UserError(f"{inside} is {node!r} here, which has no keys", override.flag, f"set --{inside} itself")
    last = override.loc[-1]
    if isinstance(node, list):
        _list_item(node, last, override)
        node[int(last)] = _parse_value(override)
    else:
        node[last] = _parse_value(override)
    document.flags[override.loc] = override.flag


def _list_item(node: list[Any], key: str | int, override: Override) -> Any:
    if not isinstance(key, int) or key >= len(node):
        raise UserError(f"{key!r} is not an item of a list of {len(node)}", override.flag, "count from 0")
    return node[key]


def _parse_value(override: Override) -> Any:
    """A text key takes the word as it is (a folder may be called 2024); all other keys parse it as YAML."""
    if _field_type(override.loc) is str and override.text != "null":
        return override.text
    try:
        return _plain(_parsed(override.text))
    except _TooMuch as error:
        raise UserError(str(error), override.flag) from None
    except YAMLError:
        return override.text  # `*.jsonl` is a glob for data.train; if text is wrong here, validation fails


def _field_at(loc: Loc) -> FieldInfo | None:
    model: type[BaseModel] | None = RunConfig
    found: FieldInfo | None = None
    for key in (key for key in loc if isinstance(key, str)):
        if model is None or key not in model.model_fields:
            return None
        found = model.model_fields[key]
        model = model_in(found.annotation)
    return found


def _field_type(loc: Loc) -> Any:
    """The type of a key without `| None`; None if the key does not exist or takes several types."""
    info = _field_at(loc)
    if info is None or isinstance(loc[-1], int):
        return None
    kinds = [kind for kind in alternatives(info.annotation) if kind is not NoneType]
    return kinds[0] if len(kinds) == 1 else None


def alternatives(annotation: Any) -> list[Any]:
    """The types that a field accepts: the members of a union, without annotations."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return alternatives(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return [kind for part in get_args(annotation) for kind in alternatives(part)]
    return [annotation]


def model_in(annotation: Any) -> type[BaseModel] | None:
    """The section type that a field contains, directly or in a list; None for a plain value."""
    for kind in alternatives(annotation):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
        if get_origin(kind) is tuple and (inner := model_in(get_args(kind)[0])):
            return inner
    return None


# ---- problems


def _user_error(error: ValidationError, document: _Document) -> UserError:
    found = sorted(error.errors(include_url=False), key=lambda details: document.line(details["loc"]))
    lines = [_problem(details, document) for details in found]
    if len(lines) == 1:
        return UserError(lines[0])
    return UserError("\n".join([f"{len(lines)} problems in the config", *(f"  {line}" for line in lines)]))


# pydantic's messages name Python types; a config is YAML.
_EXPECTED = {
    "a list": "tuple_type",
    "a section with keys": "dict_type model_type model_attributes_type",
    "text": "string_type",
    "a text that is not empty": "string_too_short",
    "a whole number": "int_type int_from_float",
    "a number": "float_type", "a finite number": "finite_number", "true or false": "bool_type",
    "a list with at least one item": "too_short",
}  # fmt: skip
_SHOULD_BE = {error: expected for expected, errors in _EXPECTED.items() for error in errors.split()}
_SHOWN_CHARS = 120


def _shown(value: Any) -> str:
    """A value roughly as YAML writes it; a long one is cut."""
    text = {"None": "null", "True": "true", "False": "false"}.get(repr(value), repr(value))
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def _problem(details: ErrorDetails, document: _Document) -> str:
    context = details.get("ctx", {})
    loc: Loc = context.get("at", details["loc"])
    place, found = document.place(loc), details["input"]
    match details["type"]:
        case "missing":
            return f"{place}: missing; {_expected(loc)}"
        case "extra_forbidden":
            dotted = ".".join(map(str, loc))
            if dotted in _NO_KEYS:
                return f"{place}: unknown key; {_NO_KEYS[dotted]}"
            suggestion = suggest_key(dotted)
            return f"{place}: unknown key" + (f'; did you mean "{suggestion}"?' if suggestion else "")
        case "literal_error":
            near = get_close_matches(str(found), re.findall(r"'([^']*)'", context["expected"]), n=1)
            hint = f'; did you mean "{near[0]}"?' if near else ""
            return f"{place}: should be {context['expected']}, found {_shown(found)}{hint}"
        case "bool_type" if str(found).lower() in ("yes", "no", "on", "off", "true", "false"):
            return f"{place}: found the text {found!r}; a boolean is written true or false"
        case schema.CROSS_SECTION:
            value: Any = document.data
            for key in loc:
                value = value[key]
            return f"{place}: {details['msg']}, found {_shown(value)}"
        case "greater_than_equal":
            return f"{place}: should be {context['ge']} or more, found {_shown(found)}"
        case "less_than_equal":
            return f"{place}: should be {context['le']} or less, found {_shown(found)}"
        case kind if kind in _SHOULD_BE:
            return f"{place}: should be {_SHOULD_BE[kind]}, found {_shown(found)}"
    text = details["msg"].removeprefix("Value error, ").replace("Input should", "should")
    # a message about a whole section already names its keys
    names_it = isinstance(found, dict | BaseModel) or "found" in text
    return f"{place}: {text}" if names_it else f"{place}: {text}, found {_shown(found)}"


def _expected(loc: Loc) -> str:
    info = _field_at(loc)
    assert info is not None, f"a missing key {loc} that the schema does not know"
    if info.description:
        return info.description
    section = model_in(info.annotation)
    assert section is not None, f"{loc} has neither description nor keys"
    needed = [name for name, item in section.model_fields.items() if item.is_required()]
    return f"a section with {', '.join(needed)}"


def suggest_key(dotted: str) -> str | None:
    """The key that an unknown one most likely means, as a dotted path: `schedule.warmup_ratio` for `optim.warmup_ratio`."""
    *section, wrong = dotted.replace("-", "_").lower().split(".")
    if wrong in _ALIASES:
        return _ALIASES[wrong]
    section = [name for name in section if not name.isdigit()]
    own: dict[str, str] = {}  # last name -> key, of the same section
    leaves: dict[str, str] = {}  # and of all sections
    for loc, _ in fields():
        *parents, name = [str(key) for key in loc if key != "N"]
        leaves.setdefault(name, ".".join([*parents, name]))
        if parents == section:
            own[name] = ".".join([*parents, name])
    for names, cutoff in ((own, 0.6), (leaves, 0.75)):
        if near := get_close_matches(wrong, names, n=1, cutoff=cutoff):
            return names[near[0]]
    return None


def fields(model: type[BaseModel] = RunConfig, loc: Loc = ()) -> Iterator[tuple[Loc, FieldInfo]]:
    """Every key of the config with its field, in YAML order; "N" stands for an index into a list."""
    for name, info in model.model_fields.items():
        place = (*loc, name)
        yield place, info
        if inner := model_in(info.annotation):
            many = any(get_origin(kind) is tuple for kind in alternatives(info.annotation))
            yield from fields(inner, (*place, "N") if many else place)
