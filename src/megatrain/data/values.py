"""JSON values as they were written: exact integers, the digits of floats, nulls.

`orjson` is fast and turns integers beyond 64 bits into floats; `json` keeps integers but writes 1.10 as 1.1. Numbers matter in
tool calls, schemas and template keywords, which become text again, so values with such numbers are parsed by `parse_exact`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from megatrain.data.samples import SampleRejected


class WrittenFloat(float):
    """A float that is written with the digits of its source: 1.10, 1E3."""

    __slots__ = ("written",)
    written: str

    def __new__(cls, written: str) -> WrittenFloat:
        self = super().__new__(cls, written)
        self.written = written
        return self

    def __repr__(self) -> str:
        return self.written

    __str__ = __repr__


class WrittenObject(dict[str, Any]):
    """A JSON object that came as text, which templates that want text get back unchanged."""

    __slots__ = ("written",)
    written: str


def parse_line(text: bytes) -> Any:
    """A JSON value, exact; also with NaN and infinities, which some writers of JSON lines emit.

    Cells (values of the outermost object) that cannot be encoded as UTF-8 are `SampleRejected` instances: only a sample that
    reads such a cell is faulty.

    Raises:
        ValueError: It is not JSON.
    """
    import orjson

    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        try:
            value = parse_exact(text.decode())
        except ValueError:
            raise error from None
        return _with_faulty_cells(value)
    return parse_exact(text.decode()) if _has_floats(value) else value


def parse_exact(text: str) -> Any:
    """A JSON value with all digits, slower than orjson. ValueError if it is not JSON."""
    try:
        return json.loads(text, parse_float=_float)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def parse_object(text: str) -> WrittenObject | None:
    """A JSON object without duplicate keys, NaN or half characters, exact; None for any other text."""
    try:
        value = json.loads(text, parse_float=_float, parse_constant=_no_constant, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or ("\\u" in text and not _is_unicode(value)):
        return None
    parsed = WrittenObject(value)
    parsed.written = text
    return parsed


def has_digits(value: Any) -> bool:
    """Whether a value holds a `WrittenFloat`, so that `dumps` is needed to write it."""
    return next(_written_floats(value, False), None) is not None


def dumps(value: Any, **options: Any) -> str:
    """`json.dumps` with the digits of every `WrittenFloat`."""
    options.setdefault("ensure_ascii", False)
    text = json.dumps(value, **options)
    written = list(_written_floats(value, bool(options.get("sort_keys"))))
    if not written:
        return text
    # json writes a subclass of float like the float: a number in a string's place marks each one, in the order of writing.
    marks = iter(written)
    marked = json.dumps(_marked(value), **options)
    return re.sub(f'"{_MARK}"', lambda _: next(marks).written, marked)


def without_nulls(value: Any) -> Any:
    """A value of a columnar file without the nulls that it filled in for absent keys.

    Such a file gives every object the keys of all others. A null `content` of a message is kept: there it is how an assistant
    message with tool calls is written.
    """
    if isinstance(value, dict):
        is_message = "role" in value or "from" in value
        return {
            key: without_nulls(item)
            for key, item in value.items()
            if item is not None or (is_message and key in ("content", "value"))
        }
    if isinstance(value, list):
        return [without_nulls(item) for item in value] if value and isinstance(value[0], dict | list) else value
    return value


_MARK = "__megatrain_written_float__"


def _marked(value: Any) -> Any:
    if isinstance(value, WrittenFloat):
        return _MARK
    if isinstance(value, dict):
        return {key: _marked(item) for key, item in value.items()}
    return [_marked(item) for item in value] if isinstance(value, list | tuple) else value


def _written_floats(value: Any, in_key_order: bool) -> Iterator[WrittenFloat]:
    if isinstance(value, WrittenFloat):
        yield value
    elif isinstance(value, dict):
        for key in sorted(value) if in_key_order else value:
            yield from _written_floats(value[key], in_key_order)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _written_floats(item, in_key_order)


def _float(written: str) -> float:
    value = float(written)
    return value if repr(value) == written else WrittenFloat(written)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a key twice")
    return value


def _has_floats(value: Any) -> bool:
    """Whether a value of orjson holds a float, which may have been an integer beyond 64 bits."""
    if isinstance(value, dict):
        return any(_has_floats(item) for item in value.values())
    if isinstance(value, list):
        kinds = set(map(type, value))
        return float in kinds or (not kinds.isdisjoint(_NESTED) and any(_has_floats(item) for item in value))
    return type(value) is float


_NESTED = {dict, list}


def _with_faulty_cells(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {
        key: item if _is_unicode(item) else SampleRejected("half of a surrogate pair") for key, item in value.items()
    }


def _is_unicode(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def common_prefix(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Length of the longest common prefix of two texts, or of two lists."""
    if a == b[: len(a)]:
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
