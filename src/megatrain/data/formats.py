"""Sample formats: which columns each needs, and how a record becomes a sample. docs/data.md lists the formats.

A record becomes one of four kinds of sample. Text and unlabelled tokens are streams, cut wherever a row ends; the other
kinds stay whole. A faulty record raises `SampleRejected`; a file that fits no format raises `UserError`.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatrain.errors import UserError


class SampleRejected(Exception):
    """One sample cannot be used. `reason` is the same text for every sample with this fault, `detail` is its own."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason} ({detail})" if detail else reason)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class TextSample:
    text: str


@dataclass(frozen=True)
class PromptSample:
    """Plain text without a chat template; only the completion is trained."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class ChatSample:
    """A conversation."""

    messages: list[dict[str, Any]]  # as chat templates take them: role, content (a string), and the record's other keys
    flags: tuple[bool | None, ...]  # for each message, whether the record wants it trained; None: not stated
    tools: list[dict[str, Any]] | None = None  # JSON schemas for the template
    answers_from: int = 0  # index of the first message that may be trained; those before it are the prompt


@dataclass(frozen=True)
class TokenSample:
    """Token ids; `trained` has one entry per id, or is None if all are trained."""

    input_ids: list[int]
    trained: list[bool] | None = None


Sample = TextSample | PromptSample | ChatSample | TokenSample
Fields = Mapping[str, Any]
"""A record, keyed by the format's column names."""


@dataclass(frozen=True)
class Format:
    """Columns of a format, and its conversion of a record to a sample."""

    required: tuple[str, ...]
    optional: tuple[str, ...]
    convert: Callable[[Fields], Sample]


@dataclass(frozen=True)
class Reading:
    """A format, applied to the columns of a file."""

    name: str
    columns: Mapping[str, str]
    """The format's column names -> the file's; optional columns may be absent in a record."""
    kind: Literal["stream", "samples"]

    def sample(self, record: Mapping[str, Any]) -> Sample:
        """Convert a record; SampleRejected if it is faulty."""
        return FORMATS[self.name].convert({own: record.get(column) for own, column in self.columns.items()})

    def describe(self) -> str:
        present = [own if own == column else f"{own}={column}" for own, column in self.columns.items()]
        return f"format {self.name} (columns {', '.join(present)})"


def find_reading(records: Sequence[Mapping[str, Any]], format: str, mapping: Mapping[str, str], where: str) -> Reading:
    """Determine the format of the file `where` from its first records (at least one).

    Args:
        format: A format's name, or `auto`.
        mapping: The user's `columns:`.

    Raises:
        UserError: The format is unknown, the mapping names a missing column, or no format fits.
    """
    present = list(dict.fromkeys(column for record in records for column in record))
    _check_mapping(mapping, present, where)
    # A column that the mapping renames loses its own name.
    own_names = {column: column for column in present if column not in mapping.values()}
    own_names |= {column: own for own, column in mapping.items()}
    column_of = {own: column for column, own in own_names.items()}
    turns = next((column_of[own] for own in TURN_COLUMNS if own in column_of), None)

    name = format if format != "auto" else _guess(records, column_of, turns)
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
    used = {own: column_of[own] for own in (*required, *FORMATS[name].optional) if own in column_of}
    if is_chat:  # both formats call the list of turns messages
        used = {"messages": turns or "", **{own: column for own, column in used.items() if own not in TURN_COLUMNS}}
    is_stream = name in ("text", "lines") or (name == "tokens" and "labels" not in used)
    return Reading(name, used, "stream" if is_stream else "samples")


TURN_COLUMNS = ("messages", "conversations", "conversation")


def _check_mapping(mapping: Mapping[str, str], present: Sequence[str], where: str) -> None:
    known = list(dict.fromkeys(own for f in FORMATS.values() for own in (*f.required, *f.optional)))
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
            value = _from_json(record.get(turns))
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
    text = _string(fields, "text")
    if not text.strip():
        raise SampleRejected("empty text")
    return TextSample(text)


def _alpaca(fields: Fields) -> ChatSample:
    messages = []
    if system := _string(fields, "system"):
        messages.append({"role": "system", "content": system})
    history = _from_json(fields.get("history")) or []
    if not isinstance(history, list):
        raise SampleRejected("history is not a list of pairs", type(history).__name__)
    for pair in history:
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(turn, str) and turn for turn in pair)):
            raise SampleRejected("history is not a list of pairs")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    question = "\n".join(part for part in (_string(fields, "instruction"), _string(fields, "input")) if part)
    messages.append({"role": "user", "content": question})
    messages.append({"role": "assistant", "content": _string(fields, "output")})
    return _checked(ChatSample(messages, (None,) * len(messages)))


def _messages(fields: Fields) -> ChatSample:
    messages, flags = _turns(fields.get("messages"), "role", "content")
    return _checked(ChatSample(messages, flags, _tools(fields.get("tools"))))


def _sharegpt(fields: Fields) -> ChatSample:
    messages, flags = _turns(fields.get("messages"), "from", "value")
    if system := _string(fields, "system"):
        messages, flags = [{"role": "system", "content": system}, *messages], (None, *flags)
    return _checked(ChatSample(messages, flags, _tools(fields.get("tools"))))


def _prompt_completion(fields: Fields) -> Sample:
    prompt, completion = _from_json(fields.get("prompt"), lists_only=True), fields.get("completion")
    completion = _from_json(completion, lists_only=True)
    if isinstance(prompt, list) and isinstance(completion, list):
        before, before_flags = _turns(prompt, "role", "content")
        after, after_flags = _turns(completion, "role", "content")
        return _checked(ChatSample([*before, *after], before_flags + after_flags, answers_from=len(before)))
    prompt, completion = _string(fields, "prompt"), _string(fields, "completion")
    if not completion:
        raise SampleRejected("empty completion")
    return PromptSample(prompt, completion)


def _tokens(fields: Fields) -> TokenSample:
    ids, labels = fields.get("input_ids"), fields.get("labels")
    if not (isinstance(ids, list) and ids and all(type(i) is int and 0 <= i < 2**31 for i in ids)):
        raise SampleRejected("input_ids is not a list of token ids")
    if labels is None:
        return TokenSample(ids)
    if not isinstance(labels, list) or len(labels) != len(ids):
        raise SampleRejected("labels is not as long as input_ids")
    if any(label not in (-100, token) for label, token in zip(labels, ids, strict=True)):
        # A target is always the row's next token; labels can only select.
        raise SampleRejected("labels differ from input_ids where they are not -100")
    return TokenSample(ids, [label != -100 for label in labels])


FORMATS: dict[str, Format] = {
    "text": Format(("text",), (), _text),
    "lines": Format(("text",), (), _text),
    "messages": Format(("messages",), ("tools",), _messages),
    "sharegpt": Format(("conversations",), ("system", "tools"), _sharegpt),
    "alpaca": Format(("instruction", "output"), ("input", "system", "history"), _alpaca),
    "prompt_completion": Format(("prompt", "completion"), (), _prompt_completion),
    "tokens": Format(("input_ids",), ("labels",), _tokens),
}

ROLES = {
    "system": "system", "developer": "developer", "user": "user", "assistant": "assistant", "tool": "tool",
    # sharegpt's names
    "human": "user", "gpt": "assistant", "model": "assistant", "chatgpt": "assistant", "bot": "assistant",
    "observation": "tool", "function_response": "tool", "function_call": "assistant",
}  # fmt: skip
FLAGS = ("train", "weight", "loss_weight")
REASONING = ("reasoning_content", "reasoning", "thinking")


def _string(fields: Fields, name: str) -> str:
    """The value of a text column; empty if it is missing or null."""
    value = fields.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise SampleRejected(f"{name} is not a string", type(value).__name__)
    return value


def _from_json(value: object, lists_only: bool = False) -> Any:
    """Parse lists and objects that are stored as JSON text, as tables and some JSON files do."""
    import orjson

    if isinstance(value, str) and value.lstrip().startswith(("[",) if lists_only else ("[", "{")):
        try:
            parsed = orjson.loads(value)
        except orjson.JSONDecodeError:
            return value
        if not lists_only or (isinstance(parsed, list) and parsed and isinstance(parsed[0], dict)):
            return parsed
    return value


def _turns(value: object, role_key: str, content_key: str) -> tuple[list[dict[str, Any]], tuple[bool | None, ...]]:
    turns = _from_json(value)
    if not isinstance(turns, list):
        raise SampleRejected("messages is not a list", type(turns).__name__)
    if not turns:
        raise SampleRejected("no messages")
    messages, flags = [], []
    for turn in turns:
        if not isinstance(turn, dict):
            raise SampleRejected("a message is not an object", type(turn).__name__)
        messages.append(_message(turn, role_key, content_key))
        flags.append(_flag(turn))
    return messages, tuple(flags)


def _message(turn: dict[str, Any], role_key: str, content_key: str) -> dict[str, Any]:
    """A turn in the form templates take: no nulls, a known role, content as a string."""
    word = turn.get(role_key)
    role = ROLES.get(word.lower()) if isinstance(word, str) else None
    if role is None:
        raise SampleRejected(f"unknown role {word!r}")
    known = {role_key, content_key, "tool_calls", *FLAGS, *REASONING}
    message = {"role": role, **{k: v for k, v in turn.items() if k not in known and v is not None}}
    content, calls = turn.get(content_key), _from_json(turn.get("tool_calls")) or []
    if not isinstance(calls, list):
        raise SampleRejected("tool_calls is not a list", type(calls).__name__)
    reasoning = next((turn[key] for key in REASONING if turn.get(key)), "")
    if isinstance(content, list):
        content, more_reasoning, more_calls = _parts(content)
        reasoning, calls = reasoning or more_reasoning, calls + more_calls
    if content is not None and not isinstance(content, str):
        raise SampleRejected("content is not text", type(content).__name__)
    if not isinstance(reasoning, str):
        raise SampleRejected("reasoning is not text", type(reasoning).__name__)
    if word == "function_call":
        content, calls = "", [_from_json(content)]
    message["content"] = content or ""
    if reasoning:
        # Templates use either name.
        message["reasoning_content"] = message["thinking"] = reasoning
    if calls:
        message["tool_calls"] = [_tool_call(call) for call in calls]
    return message


def _parts(parts: list[Any]) -> tuple[str, str, list[Any]]:
    """Content parts -> text, reasoning, tool calls."""
    texts, reasoning, calls = [], [], []
    for part in parts:
        if not isinstance(part, dict):
            raise SampleRejected("a content part is not an object", type(part).__name__)
        kind = part.get("type")
        value = next((part[key] for key in ("text", "value", kind) if part.get(key) is not None), None)
        if kind == "tool_call":
            calls.append(_from_json(value))
        elif kind not in ("text", "reasoning", "thinking"):
            raise SampleRejected(f"a content part of type {kind!r}: only text can be trained")
        elif not isinstance(value, str):
            raise SampleRejected("a content part without text")
        else:
            (texts if kind == "text" else reasoning).append(value)
    return "".join(texts), "".join(reasoning), calls


def _tool_call(call: object) -> dict[str, Any]:
    """A call in the form templates take: {type: function, function: {name, arguments: object}}."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise SampleRejected("a tool call without a function name")
    arguments = _from_json(function.get("arguments")) or {}
    outer = {k: v for k, v in call.items() if k not in ("function", "name", "arguments") and v is not None}
    return {"type": "function", **outer, "function": {"name": function["name"], "arguments": arguments}}


def _flag(turn: dict[str, Any]) -> bool | None:
    for key in FLAGS:
        value = turn.get(key)
        if value is not None:
            if value not in (0, 1):
                raise SampleRejected(f"{key} of a message is neither 0 nor 1", str(value))
            return bool(value)
    return None


def _tools(value: object) -> list[dict[str, Any]] | None:
    tools = _from_json(value)
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise SampleRejected("tools is not a list of JSON schemas", type(tools).__name__)
    return tools


def _checked(sample: ChatSample) -> ChatSample:
    """Reject faults that templates render without complaint."""
    for message in sample.messages:
        empty = not message["content"].strip() and not message.get("tool_calls")
        if empty and message["role"] in ("user", "assistant"):
            raise SampleRejected(f"an empty {message['role']} message")
    answers = [i for i, message in enumerate(sample.messages) if message["role"] == "assistant"]
    if not answers or answers[-1] < sample.answers_from:
        raise SampleRejected("no assistant message")
    if answers[0] == 0 or all(message["role"] in ("system", "developer") for message in sample.messages[: answers[0]]):
        raise SampleRejected("the assistant speaks first")
    return sample
