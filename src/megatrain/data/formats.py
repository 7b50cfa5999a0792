"""Sample formats: which columns each needs, and how a record becomes a sample. docs/data.md lists the formats.

A record becomes one of the kinds of sample in `samples.py`. Text and unlabelled tokens are streams, cut wherever a row ends; the
other kinds stay whole. What the objective is trained on decides between them: pairs need the format `preference`, labels any chat
or prompt with a column `label`. A faulty record raises `SampleRejected`; a file that fits no format raises `UserError`.

[Note: columns]
Every column of a file is one of four things: used by the format; known to change what should be trained, and used or refused
record by record (`KNOWN`); left out by the user (`ignore`); or not read, and then named in the log. Columns may appear late in a
file, so this is decided for each record, not from the first ones.
"""

from __future__ import annotations

import difflib
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from megatrain.data import conversations, preference, pretokenised
from megatrain.data.conversations import KEYWORDS, from_json, is_empty, string
from megatrain.data.samples import (
    ChatSample,
    DataKind,
    Fields,
    LabelledSample,
    PromptSample,
    Sample,
    SampleRejected,
    TextSample,
    TokenSample,
)
from megatrain.errors import UserError

__all__ = ["ChatSample", "PromptSample", "Sample", "SampleRejected", "TextSample", "TokenSample"]


@dataclass(frozen=True)
class Format:
    """Columns of a format, and its conversion of a record to a sample."""

    required: tuple[str, ...]
    optional: tuple[str, ...]
    convert: Callable[[Fields], Sample]
    known: tuple[str, ...] = ()
    """Columns of `KNOWN` that are checked beside the format's own."""


@dataclass(frozen=True)
class Reading:
    """A format, applied to the columns of a file."""

    name: str
    columns: Mapping[str, str]
    """The format's column names -> the file's, as far as the first records have them."""
    kind: Literal["stream", "samples", "pairs", "labels"]
    own_names: Mapping[str, str]
    """Every column of the file that is used -> the format's name of it, also if the first records lack it."""
    ignored: frozenset[str] = frozenset()
    unread: Counter[str] = field(default_factory=Counter, compare=False)
    """Columns of the file that were not read -> records that have a value there. Counted by `sample`."""
    wanted: DataKind = "samples"

    def sample(self, record: Mapping[str, Any]) -> Sample:
        """Convert a record; SampleRejected if it is faulty."""
        fields: dict[str, Any] = {}
        own_names = self.own_names
        for column, value in record.items():
            own = own_names.get(column)
            if own is None:
                if column not in self.ignored and not is_empty(value):
                    if self.name == "tokens" and "mask" in column.lower() and column not in pretokenised.HARMLESS:
                        what = f"{column} beside input_ids: its meaning for training is unclear"
                        raise SampleRejected(what, f"columns: {{loss_mask: {column}}}, or ignore: [{column}]")
                    self.unread[column] += 1
                continue
            if isinstance(value, SampleRejected):
                raise SampleRejected(f"{column}: {value.reason}")
            if own in fields and not is_empty(value):
                if not is_empty(fields[own]) and fields[own] != value:
                    raise SampleRejected(f"two columns for {own}", column)
                fields[own] = value
            else:
                fields.setdefault(own, value)
        form = FORMATS[self.name]
        for own in form.known:
            if own == "label" and self.wanted == "labels":
                continue
            if own in fields and not is_empty(fields[own]):
                KNOWN[own](next(column for column in record if own_names.get(column) == own), fields[own])
        converted = form.convert(fields)
        if self.wanted != "labels":
            return converted
        return LabelledSample(preference.judged(converted), preference.label_of(fields.get("label")))

    def describe(self) -> str:
        present = [own if own == column else f"{own}={column}" for own, column in self.columns.items()]
        return f"format {self.name} (columns {', '.join(present)})"


def find_reading(
    records: Sequence[Mapping[str, Any]],
    format: str,
    mapping: Mapping[str, str],
    where: str,
    ignore: Sequence[str] = (),
    wanted: DataKind = "samples",
) -> Reading:
    """Determine the format of the file `where` from its first records (at least one).

    Args:
        format: A format's name, or `auto`.
        mapping: The user's `columns:`.
        ignore: Columns to leave out.
        wanted: What the objective is trained on.

    Raises:
        UserError: The format is unknown, the mapping names a missing column, or no format fits the columns or the objective.
    """
    present = [column for column in dict.fromkeys(c for record in records for c in record) if column not in ignore]
    _check_mapping(mapping, present, where)
    # A column that the mapping renames loses its own name.
    own_names = {column: column for column in present if column not in mapping.values()}
    own_names |= {column: own for own, column in mapping.items()}
    column_of = {own: column for column, own in own_names.items()}
    turns = next((column_of[own] for own in TURN_COLUMNS if own in column_of), None)

    name = format if format != "auto" else _guess(records, column_of, turns)
    if format == "auto" and (wanted == "pairs" or (name is None and _has_pairs(column_of))):
        name = "preference"
    _check_wanted(name, wanted, column_of, where)
    if name is not None and name not in FORMATS:
        raise UserError(f"format: {name} is unknown", where, _closest(name, list(FORMATS)))
    is_chat = name in ("messages", "sharegpt")
    required = FORMATS[name].required if name is not None else ()
    missing = [own for own in required if own not in column_of] if not is_chat else [] if turns else ["messages"]
    if name is None or missing:
        problem = f"format {name} needs {' and '.join(missing)}" if name else "they fit no format"
        listed = ", ".join(present[:12]) + (f" and {len(present) - 12} more" if len(present) > 12 else "")
        what = f"the columns are {listed or '(none)'}: {problem}"
        raise UserError(what, where, _columns_remedy(present, records, name))
    form = FORMATS[name]
    names = _all_names(form, mapping, turns if is_chat or name == "preference" else None)
    used: dict[str, str] = {}
    for column in present:
        own = names.get(column)
        if own is not None and (own in (*form.required, *form.optional) or own == "messages"):
            used.setdefault(own, column)
    order = {own: number for number, own in enumerate(("messages", *form.required, *form.optional))}
    used = dict(sorted(used.items(), key=lambda item: order[item[0]]))
    names = {column: own for column, own in names.items() if column not in ignore}
    is_stream = name in ("text", "lines") or (name == "tokens" and not any(own in used for own in pretokenised.MASKS))
    return Reading(name, used, "stream" if is_stream else wanted, names, frozenset(ignore), wanted=wanted)


def _has_pairs(column_of: Mapping[str, str]) -> bool:
    return all(own in column_of for own in FORMATS["preference"].required)


def _check_wanted(name: str | None, wanted: DataKind, column_of: Mapping[str, str], where: str) -> None:
    """Raise a UserError if a format has not what the objective is trained on."""
    listed = ", ".join(list(column_of.values())[:12]) or "(none)"
    if wanted == "pairs" and (name != "preference" or not _has_pairs(column_of)):
        what = f"the objective needs pairs of answers, columns chosen and rejected; the columns are {listed}"
        raise UserError(what, where, "name them (columns: {chosen: ..., rejected: ...})")
    if wanted != "pairs" and name == "preference":
        what = "columns chosen and rejected are pairs of answers, which this objective is not trained on"
        remedy = "to train the preferred answers alone: format: prompt_completion, columns: {completion: chosen}"
        raise UserError(what, where, remedy)
    if wanted == "labels":
        has_label = any(own in column_of for own in ("label", *ALIASES["label"]))
        if not has_label or name in ("text", "lines", "tokens"):
            what = f"the objective needs answers with a column label, true or false; the columns are {listed}"
            raise UserError(what, where, "name it (columns: {label: ...})")


def _all_names(form: Format, mapping: Mapping[str, str], turns: str | None) -> dict[str, str]:
    """All columns that a record may have for this format -> the format's name of each.

    A column that `mapping` renames loses its own name, and a name that is mapped has no other column.
    """
    own_names = [own for own in (*form.required, *form.optional, *form.known) if own not in mapping]
    names = {column: own for own in own_names for column in (own, *ALIASES.get(own, ()))}
    if turns is not None:  # both formats of chats call the list of turns messages
        names = {column: own for column, own in names.items() if column not in TURN_COLUMNS} | {turns: "messages"}
    wanted = {*form.required, *form.optional, *form.known}
    names = {column: own for column, own in names.items() if column not in mapping.values()}
    return (
        names
        | {column: own for own, column in mapping.items() if own in wanted}
        | ({turns: "messages"} if turns else {})
    )


ALIASES: dict[str, tuple[str, ...]] = {
    "system": ("system_prompt", "system_message"),
    "chat_template_kwargs": ("template_kwargs",),
    "assistant_masks": ("assistant_mask", "assistant_tokens_mask"),
    "loss_mask": ("loss_masks",),
    "label": ("kto_tag", "desirable"),
    "images": ("image", "videos", "video", "audios", "audio"),
    "weight": ("loss_weight", "sample_weight"),
}
"""Other names of a column with the same meaning."""


TURN_COLUMNS = ("messages", "conversations", "conversation")


def _check_mapping(mapping: Mapping[str, str], present: Sequence[str], where: str) -> None:
    known = list(dict.fromkeys(own for f in FORMATS.values() for own in (*f.required, *f.optional)))
    known.append("label")
    for own, column in mapping.items():
        if own not in known and own in present and column in known:
            turned = ", ".join(f"{value}: {key}" for key, value in mapping.items())
            what = f"columns: {own}: {column} is the wrong way round: the format's name comes first"
            raise UserError(what, where, f"write columns: {{{turned}}}")
        if own not in known:
            raise UserError(f"columns: {own} is not a column of any format", where, _closest(own, known))
        if column not in present:
            raise UserError(f"columns: {own}: {column} is not in the file", where, _closest(column, present))


def _guess(records: Sequence[Mapping[str, Any]], column_of: Mapping[str, str], turns: str | None) -> str | None:
    if turns is not None:
        for record in records:
            value = from_json(record.get(turns))
            if isinstance(value, list) and value and isinstance(value[0], dict):
                return "sharegpt" if "from" in value[0] else "messages"
        return "messages"
    candidates = ("prompt_completion", "alpaca", "text", "tokens")
    return next((name for name in candidates if all(own in column_of for own in FORMATS[name].required)), None)


def _closest(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]}?" if close else f"use one of {', '.join(names)}"


QUESTIONS = ("question", "query", "instruction", "prompt", "problem", "input", "q", "user", "human", "source")
ANSWERS = ("answer", "response", "output", "completion", "solution", "reply", "a", "assistant", "target")
"""Common names of such columns: suggested in a remedy, never assumed."""


def _columns_remedy(present: Sequence[str], records: Sequence[Mapping[str, Any]], name: str | None) -> str:
    """A `columns:` to write: question and answer if there are two text columns, since plain text would lose one."""
    strings = [c for c in present if any(isinstance(record.get(c), str) for record in records)]
    offers = []
    asked, given = ("prompt", "completion") if name == "prompt_completion" else ("instruction", "output")
    if len(strings) > 1 and name not in ("text", "lines"):
        answer = next((c for usual in ANSWERS for c in strings if c.lower() == usual), None)
        others = [c for c in strings if c != answer]
        question = next((c for usual in QUESTIONS for c in others if c.lower() == usual), others[0])
        answer = answer or next(c for c in strings if c != question)
        words = shlex.join([f"{asked}={question}", f"{given}={answer}"])
        offers.append(f"columns: {{{asked}: {question}, {given}: {answer}}} (megatrain init: --columns {words})")
    column = next(iter([*strings, *present]), "body")
    offers.append(f"columns: {{text: {column}}}" + (" to train that column alone, as plain text" if offers else ""))
    needs = ", ".join(f"{own} ({', '.join(f.required)})" for own, f in FORMATS.items() if own != "lines")
    return f"set {', or '.join(offers)}. Formats and their columns: {needs}"


# ---- records to samples


def _text(fields: Fields) -> TextSample:
    text = string(fields, "text")
    if not text.strip():
        raise SampleRejected("empty text")
    return TextSample(text)


_BESIDE = ("system", "tools", "functions", "chat_template_kwargs", *KEYWORDS)
"""Columns beside the messages of a conversation."""
FORMATS: dict[str, Format] = {
    "text": Format(("text",), (), _text, ("split", "weight")),
    "lines": Format(("text",), (), _text),
    "messages": Format(("messages",), _BESIDE, conversations.openai),
    "sharegpt": Format(("conversations",), _BESIDE, conversations.sharegpt),
    "alpaca": Format(
        ("instruction", "output"),
        ("input", "history", *_BESIDE),
        conversations.alpaca,
    ),
    "prompt_completion": Format(
        ("prompt", "completion"),
        _BESIDE,
        conversations.prompt_completion,
    ),
    "preference": Format(
        ("chosen", "rejected"),
        ("prompt", "instruction", "input", "history", *_BESIDE),
        preference.pair,
        ("images", "split", "weight"),
    ),
    "tokens": Format(("input_ids",), (*pretokenised.MASKS, *pretokenised.CHECKED), pretokenised.tokens, ("split", "weight")),
}  # fmt: skip


def _check_label(name: str, value: object) -> None:
    """Desirability (KTO): false marks an answer that a model should not give."""
    word = value.strip().lower() if isinstance(value, str) else value
    if word in (True, "true", "1"):
        return
    if word in (False, "false", "0"):
        raise SampleRejected(f"marked as undesirable: its {name} is false")
    raise SampleRejected(
        f"{name} is neither true nor false, so it may mean that the answer is a bad one", repr(value)[:40]
    )


def _check_images(name: str, value: object) -> None:
    raise SampleRejected(f"it has {name}: only text can be trained")


def _check_split(name: str, value: object) -> None:
    words = ("test", "testing", "validation", "valid", "val", "dev", "eval", "evaluation")
    if isinstance(value, str) and value.strip().lower() in words:
        raise SampleRejected(f"held out: its {name} is {value.strip().lower()}")


def _check_weight(name: str, value: object) -> None:
    try:
        weight = float(value)  # pyright: ignore[reportArgumentType]  (a table has numbers as text)
    except (TypeError, ValueError):
        weight = -1.0
    if weight == 0:
        raise SampleRejected(f"its {name} is 0")
    if weight != 1:
        raise SampleRejected(f"its {name} is not 1: samples cannot be weighted", repr(value)[:40])


KNOWN: dict[str, Callable[[str, Any], None]] = {
    "label": _check_label, "images": _check_images, "split": _check_split, "weight": _check_weight,
}  # fmt: skip
"""Columns that decide whether a record is trained, whatever its format: each check takes the column's name and a value that is
not empty, and raises SampleRejected. See [Note: columns]; `ignore` of a source leaves such a column out."""
FORMATS |= {
    name: replace(FORMATS[name], known=tuple(KNOWN)) for name in ("messages", "sharegpt", "alpaca", "prompt_completion")
}
