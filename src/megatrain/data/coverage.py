"""What a chat template leaves out of a conversation.

Templates leave things out silently: tool schemas, calls, roles they have no branch for, thoughts. Every value that a record
holds must be in the text that is trained, or have changed it.

[Note: how left-out parts are found]
1. A long value that stands in the text is there. Whitespace and JSON escapes may differ.
2. A short value may stand in the text by chance (the answer `a` in `assistant`). So the conversation is rendered once more
   with a word that occurs nowhere else in the place of each short value, and the words are looked for. The result holds for all
   conversations with short values in the same places, so few are rendered twice.
3. A value that is not found may be written in another way (a type as `str`, a list as a table), or in part. So it is changed
   in several places: if a change does not change the text, that place was left out.

Not looked for: the words of JSON schema (`type`, `required`), booleans in schemas, ids of calls, and the thoughts of answers
that are not trained, which most templates drop on purpose.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from megatrain.data.formats import SampleRejected

Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]] | None
Render = Callable[[Messages, Tools], str]
Path = tuple[Any, ...]

SURE_CHARS = 16
"""A text of this length does not occur in a rendered conversation by chance."""
MOST_SHAPES = 4096
"""Cached results of step 2."""
MOST_CHANGES = 8
"""Places in which a value that is not found is changed."""
REASONING = ("reasoning_content", "reasoning", "thinking")
_SCHEMA_WORDS = ("type", "required", "strict", "additionalProperties", "nullable")
_THOUGHT = re.compile(r"^.*(</\w+>|\[/[A-Z]+\])", re.DOTALL)
_WORD = re.compile(r"(?<![<\[/|\w])\w{2,}(?![>\]|\w])")


@dataclass(frozen=True)
class Value:
    """A value of the record that must be in the text. `paths`: its places below (messages, tools), all with the same value."""

    part: str  # what it is, for messages
    paths: tuple[Path, ...]
    value: Any
    is_key: bool = False


class Coverage:
    """Finds left-out parts, and remembers the results for short values."""

    def __init__(self) -> None:
        self._known: dict[object, tuple[str, ...]] = {}
        self._keywords: tuple[str, ...] = ()

    def left_out(
        self,
        messages: Messages,
        tools: Tools,
        rendered: Sequence[tuple[int, str, str]],
        trained: AbstractSet[int],
        render: Render,
        keywords: tuple[str, ...] = (),
    ) -> list[str]:
        """The parts of a conversation that are left out, each named once.

        Args:
            rendered: For each trained turn its number, the text up to its end, and the part of the text in which the turn
                itself must be.
            trained: The assistant messages that are trained.
            render: Renders other messages and tools in the same way.
            keywords: What else the rendering depends on.
        """
        self._keywords = keywords
        found: dict[str, None] = {}
        last = max(turn for turn, _, _ in rendered)
        for turn, text, own in rendered:
            values = list(_message_values(turn, messages[turn], thoughts=True))
            found |= dict.fromkeys(self._missing(values, own, messages[: turn + 1], tools, render))
            if turn == last:
                separately = {turn for turn, _, _ in rendered}
                values = [] if tools is None else list(_tool_values(tools))
                for i, message in enumerate(messages[:turn]):
                    if i not in separately:
                        values += _message_values(i, message, thoughts=i in trained)
                found |= dict.fromkeys(self._missing(values, text, messages[: turn + 1], tools, render))
        return _summary(list(found))

    def _missing(self, values: list[Value], text: str, messages: Messages, tools: Tools, render: Render) -> list[str]:
        short, missing = [], []
        squeezed = ""
        for one in values:
            value = one.value.strip() if isinstance(one.value, str) else one.value
            if not isinstance(value, str) or len(value) < SURE_CHARS:
                short.append(one)
            elif value not in text:
                squeezed = squeezed or "".join(text.split())
                if not any(form in squeezed for form in _forms(value)):
                    missing.append(one)
        parts = [one.part for one in missing if _is_left_out(one, messages, tools, render)]
        return parts + (list(self._missing_short(short, messages, tools, render)) if short else [])

    def _missing_short(self, values: list[Value], messages: Messages, tools: Tools, render: Render) -> tuple[str, ...]:
        """Step 2 of the note."""
        shape = (
            tuple((one.paths[0], one.is_key, _kind(one.value)) for one in values),
            tuple((message["role"], *message) for message in messages),
            tools is not None,
            self._keywords,
        )
        known = self._known.get(shape)
        if known is None:
            if len(self._known) >= MOST_SHAPES:
                self._known.clear()
            known = self._known[shape] = tuple(self._probe(values, messages, tools, render))
        return known

    def _probe(self, values: list[Value], messages: Messages, tools: Tools, render: Render) -> Iterator[str]:
        root = {"messages": messages, "tools": tools}
        marks = {number: _mark(one.value, number) for number, one in enumerate(values)}
        texts = {}
        for keys in {one.is_key for one in values}:  # apart: a template may look at a key to write its value
            changes = {path: marks[n] for n, one in enumerate(values) if one.is_key == keys for path in one.paths}
            changes = {path: mark for path, mark in changes.items() if mark is not None}
            try:
                changed = _edited(root, (), {} if keys else changes, changes if keys else {})
                texts[keys] = render(changed["messages"], changed["tools"])
            except SampleRejected:
                texts[keys] = ""  # the template looks at a value: each is changed alone
        for number, one in enumerate(values):
            written = marks[number] is not None and str(marks[number]) in texts[one.is_key]
            if not written and _is_left_out(one, messages, tools, render):
                yield one.part


# ---- the values of a record


def _message_values(number: int, message: dict[str, Any], thoughts: bool) -> Iterator[Value]:
    role = message["role"]
    at: Path = ("messages", number)
    content = message.get("content")
    if isinstance(content, str) and content.strip():
        if role == "assistant" and not thoughts and not _THOUGHT.sub("", content).strip():
            content = ""  # a thought and nothing else
        part = {"assistant": "part of an answer's content", "tool": "tool results"}.get(role, f"{role} messages")
        if role == "system" and number:
            part = "later system messages"
        elif role == "assistant" and not thoughts:
            content = _THOUGHT.sub("", content)
        if content.strip():
            yield Value(part, ((*at, "content"),), content)
    elif isinstance(content, list):
        for i, item in enumerate(content):
            if isinstance(item, dict) and isinstance(item.get("text"), str) and item["text"].strip():
                yield Value(f"{role} messages", ((*at, "content", i, "text"),), item["text"])
    names = [name for name in REASONING if isinstance(message.get(name), str) and message[name].strip()]
    if names and thoughts:
        yield Value("thoughts", tuple((*at, name) for name in names), message[names[0]])
    for i, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        here = (*at, "tool_calls", i, "function")
        yield Value("tool calls", ((*here, "name"),), function["name"])
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            if arguments.strip() not in ("", "{}"):
                yield Value("arguments of tool calls", ((*here, "arguments"),), arguments)
        else:
            yield from _tree("arguments of tool calls", (*here, "arguments"), arguments)


def _tree(part: str, path: Path, value: Any) -> Iterator[Value]:
    """All keys and values of free-form JSON."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield Value(part, ((*path, key),), key, is_key=True)
            yield from _tree(part, (*path, key), item)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _tree(part, (*path, i), item)
    elif not (isinstance(value, str) and not value.strip()):
        yield Value(part, (path,), value)


def _tool_values(tools: list[dict[str, Any]]) -> Iterator[Value]:
    for i, tool in enumerate(tools):
        yield from _schema(("tools", i), tool)


def _schema(path: Path, value: Any, key: str = "") -> Iterator[Value]:
    """The names and texts of a JSON schema: everything but its own words."""
    if isinstance(value, dict):
        free = key in ("properties", "$defs", "definitions")
        for name, item in value.items():
            if free:
                yield Value("names of tool parameters", ((*path, name),), name, is_key=True)
            if free or name not in _SCHEMA_WORDS:
                yield from _schema((*path, name), item, "" if free else name)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _schema((*path, i), item, key)
    elif (isinstance(value, str) and value.strip()) or (isinstance(value, int | float) and not isinstance(value, bool)):
        is_tool = key == "name" and len(path) <= 4
        yield Value("tool schemas" if is_tool else f"{key} in tool schemas", (path,), value)


def _summary(parts: list[str]) -> list[str]:
    """The parts, without the details of schemas that are left out as a whole."""
    if "tool schemas" in parts:
        return [part for part in parts if not part.endswith(" in tool schemas") and part != "names of tool parameters"]
    return parts


# ---- changes


def _forms(value: str) -> Iterator[str]:
    """Ways to write a text, without whitespace."""
    yield "".join(value.split())
    yield "".join(json.dumps(value, ensure_ascii=False)[1:-1].split())
    yield "".join(json.dumps(value)[1:-1].split())


def _kind(value: Any) -> object:
    """What a result depends on besides the places: the value itself if no mark can stand for it."""
    return value if value is None or isinstance(value, bool) else type(value)


def _mark(value: Any, number: int) -> Any:
    """A value of the same type that occurs nowhere else; None if there is none."""
    if isinstance(value, str):
        return f"zqx{number}xqz"
    if isinstance(value, bool) or value is None:
        return None
    return 731_000_017 + number if isinstance(value, int) else 731_000_017.5 + number


def _edited(value: Any, path: Path, edits: dict[Path, Any], keys: dict[Path, Any]) -> Any:
    """A copy with the values at `edits` and the keys at `keys` replaced."""
    if path in edits:
        return edits[path]
    if isinstance(value, dict):
        return {keys.get((*path, key), key): _edited(item, (*path, key), edits, keys) for key, item in value.items()}
    if isinstance(value, list):
        return [_edited(item, (*path, i), edits, keys) for i, item in enumerate(value)]
    return value


def _is_left_out(one: Value, messages: Messages, tools: Tools, render: Render) -> bool:
    """Step 3 of the note: whether some change of the value does not change the text."""
    root = {"messages": messages, "tools": tools}
    text = render(messages, tools)
    for other in _changes(one.value):
        edits = {} if one.is_key else dict.fromkeys(one.paths, other)
        keys = dict.fromkeys(one.paths, other) if one.is_key else {}
        try:
            changed = _edited(root, (), edits, keys)
            if render(changed["messages"], changed["tools"]) == text:
                return True
        except SampleRejected:
            continue  # the template looks at the value
    return False


def _changes(value: Any) -> Iterator[Any]:
    """The value, changed in one place each: for a text one letter at its begin, middle and end, and in some lines."""
    if not isinstance(value, str):
        yield "zqx" if value is None else (not value) if isinstance(value, bool) else value + 1
        return
    words = [match.start() for match in _WORD.finditer(value)]
    if not words:
        yield value + "zqx"
        return
    lines = [next((w for w in words if w > match.start()), words[-1]) for match in re.finditer(r"\n", value)]
    for place in sorted({words[0], words[len(words) // 2], words[-1], *lines[: MOST_CHANGES - 3]}):
        yield value[:place] + ("q" if value[place] not in "qQ" else "z") + value[place + 1 :]
