"""JSON values keep what was written: digits of numbers, nulls, absent keys."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from megatrain.data.samples import SampleRejected
from megatrain.data.values import WrittenFloat, dumps, has_digits, parse_exact, parse_line, parse_object, without_nulls

NUMBERS = ["0", "-1", "1.5", "1.10", "1E3", "1e-7", "-0.0", "0.30000000000000004", "98765432109876543210123",
           "18446744073709551617", "2512292042121000001", "3.141592653589793238462643", "1.0", "-2.50e+10"]  # fmt: skip


@pytest.mark.parametrize("number", NUMBERS)
def test_a_number_is_written_with_its_own_digits(number: str) -> None:
    text = f'{{"a": [{number}, {{"b": {number}}}], "c": "x"}}'
    value = parse_line(text.encode())
    assert dumps(value) == text
    assert str(value["a"][0]) == number, "also where a template writes it without tojson"
    assert value["a"][0] == json.loads(number), "and it is still a number"


def test_values_written_and_read_are_those_of_json_except_for_digits() -> None:
    random.seed(0)
    for _ in range(300):
        text = _random_json(3)
        value = parse_line(text.encode())
        assert value == json.loads(text)
        assert dumps(value, separators=(",", ":")) == text
        assert dumps(value, indent=2, sort_keys=True) == _with_digits(value, indent=2, sort_keys=True)


def _random_json(depth: int) -> str:
    kind = random.randrange(6 if depth else 4)
    if kind < 2:
        return random.choice(NUMBERS)
    if kind < 4:
        return random.choice(['"a"', "null", "true", '"1.10"', '"caf\u00e9"'])
    items = [_random_json(depth - 1) for _ in range(random.randrange(4))]
    return (
        f"[{','.join(items)}]"
        if kind == 4
        else f"{{{','.join(f'{chr(97 + i)!r}:{x}' for i, x in enumerate(items))}}}".replace("'", '"')
    )


def _with_digits(value: Any, **options: Any) -> str:
    """A slow reference: floats are written one at a time, by an encoder in Python."""
    if not has_digits(value):
        return json.dumps(value, ensure_ascii=False, **options)
    numbers: list[str] = []

    def replaced(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: replaced(item[key]) for key in sorted(item)}
        if isinstance(item, list):
            return [replaced(one) for one in item]
        if isinstance(item, WrittenFloat):
            numbers.append(item.written)
            return f"number {len(numbers) - 1}."
        return item

    text = json.dumps(replaced(value), ensure_ascii=False, **options)
    for number, written in enumerate(numbers):
        text = text.replace(f'"number {number}."', written)
    return text


def test_json_lines_may_hold_nan_and_half_a_character_where_nobody_reads_them() -> None:
    value = parse_line(b'{"text": "hi", "score": NaN, "bad": "\\ud83d", "deep": [{"x": Infinity}]}')
    assert value["text"] == "hi"
    assert value["score"] != value["score"]
    assert isinstance(value["bad"], SampleRejected)
    for broken in (b'{"text": "hi"', b"{'text': 'hi'}", b"", b"\xff", b"[" * 100_000):
        with pytest.raises(ValueError):
            parse_line(broken)


def test_an_object_as_text_is_strict_and_remembers_its_text() -> None:
    parsed = parse_object('{"a":  1.10, "b": null}')
    assert parsed is not None
    assert (parsed, parsed.written) == ({"a": 1.1, "b": None}, '{"a":  1.10, "b": null}')
    for text in ('{"a": NaN}', '{"a": 1, "a": 1}', '{"a": "\\ud83d"}', "[1]", "3", "x", "{'a': 1}", '{"a": 1} x'):
        assert parse_object(text) is None, text


def test_nulls_that_a_table_filled_in_are_absent_again() -> None:
    call = {"function": {"name": "f", "arguments": {"city": "Paris", "unit": None}}, "id": None}
    messages = [
        {"role": "assistant", "content": None, "name": None, "tool_calls": [call]},
        {"role": "user", "content": "hi", "name": None, "tool_calls": None},
    ]
    assert without_nulls(messages) == [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "f", "arguments": {"city": "Paris"}}}],
        },
        {"role": "user", "content": "hi"},
    ]
    assert without_nulls([None, 1]) == [None, 1], "the elements of a list are its own"
    assert without_nulls({"a": [[{"b": None}]], "c": None}) == {"a": [[{}]]}


def test_parse_exact_refuses_endless_nesting() -> None:
    with pytest.raises(ValueError):
        parse_exact("[" * 100_000)
