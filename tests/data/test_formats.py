"""Records become samples; a faulty record is rejected with a reason that can be counted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatrain.data.formats import ChatSample, PromptSample, SampleRejected, TextSample, TokenSample, find_reading
from megatrain.errors import UserError

TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


def _sample(record: dict[str, Any], format: str = "auto", **columns: str) -> Any:
    return find_reading([record], format, columns, "file").sample(record)


def _chat(*turns: dict[str, Any], **more: Any) -> ChatSample:
    return _sample({"messages": list(turns), **more})


@pytest.mark.parametrize(
    ("record", "name", "kind"),
    [
        ({"text": "a", "url": "b"}, "text", "stream"),
        ({"messages": TURNS, "text": "rendered"}, "messages", "samples"),
        ({"conversations": TURNS}, "messages", "samples"),
        ({"conversations": [{"from": "human", "value": "hi"}], "id": 1}, "sharegpt", "samples"),
        ({"messages": json.dumps(TURNS)}, "messages", "samples"),
        ({"instruction": "a", "output": "b"}, "alpaca", "samples"),
        ({"prompt": "a", "completion": "b"}, "prompt_completion", "samples"),
        ({"input_ids": [1, 2]}, "tokens", "stream"),
        ({"input_ids": [1, 2], "labels": [-100, 2]}, "tokens", "samples"),
    ],
)
def test_the_format_is_detected_from_the_columns(record: dict, name: str, kind: str) -> None:
    reading = find_reading([record], "auto", {}, "file")
    assert (reading.name, reading.kind) == (name, kind)


def test_columns_map_the_formats_names_to_the_files() -> None:
    record = {"body": "hello", "text": "not this"}
    assert _sample(record, text="body") == TextSample("hello")
    sample = _sample({"q": "why", "a": "so"}, instruction="q", output="a")
    assert [m["content"] for m in sample.messages] == ["why", "so"]
    reading = find_reading([{"q": "why", "a": "so"}], "auto", {"instruction": "q", "output": "a"}, "file")
    assert reading.describe() == "format alpaca (columns instruction=q, output=a)"


@pytest.mark.parametrize(
    ("record", "format", "columns", "said"),
    [
        (
            {"body": "x"},
            "auto",
            {},
            r"the columns are body: they fit no format\n  -> set columns: {text: body}",
        ),
        ({"prompt": "x", "chosen": "y"}, "auto", {}, "prompt, chosen: they fit no format"),
        ({"text": "x"}, "alpaca", {}, "format alpaca needs instruction and output"),
        ({"text": "x"}, "messages", {}, "format messages needs messages"),
        ({"text": "x"}, "alpacca", {}, "alpacca is unknown\n  -> did you mean alpaca"),
        ({"text": "x"}, "auto", {"txet": "text"}, "txet is not a column of any format\n  -> did you mean text"),
        ({"body": "x"}, "auto", {"text": "boby"}, "boby is not in the file\n  -> did you mean body"),
        (
            {"id": 7, "answer": "so", "question": "why"},
            "auto",
            {},
            r"they fit no format\n  -> set columns: {instruction: question, output: answer} "
            r"\(megatrain init: --columns instruction=question output=answer\), or columns: {text: answer}",
        ),
        ({"left": "a", "right": "b"}, "prompt_completion", {}, "\n  -> .* columns: {prompt: left, completion: right}"),
        ({"left": "a", "right": "b"}, "text", {}, "\n  -> set columns: {text: left}"),
        ({"left": "a", "right": "b"}, "auto", {}, "\n  -> .* columns: {instruction: left, output: right}"),
        (
            {"question": "why", "answer": "so"},
            "auto",
            {"question": "instruction", "answer": "output"},
            "the wrong way round: the format's name comes first\n"
            "  -> write columns: {instruction: question, output: answer}",
        ),
    ],
)
def test_columns_that_fit_no_format_are_an_error_with_a_remedy(
    record: dict, format: str, columns: dict, said: str
) -> None:
    with pytest.raises(UserError, match=f"^file: .*{said}"):
        find_reading([record], format, columns, "file")


def test_alpaca_joins_instruction_and_input() -> None:
    record = {"instruction": "Add", "input": "1 and 2", "output": "3", "system": "Be brief", "history": [["a", "b"]]}
    assert [(m["role"], m["content"]) for m in _sample(record).messages] == [
        ("system", "Be brief"), ("user", "a"), ("assistant", "b"), ("user", "Add\n1 and 2"), ("assistant", "3"),
    ]  # fmt: skip


def test_content_parts_are_joined_by_kind() -> None:
    parts = [
        {"type": "reasoning", "value": "hmm"},
        {"type": "text", "text": "Hello"},
        {"type": "text", "value": " there"},
        {"type": "tool_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
    ]
    message = _chat(TURNS[0], {"role": "assistant", "content": parts}).messages[1]
    assert message["content"] == "Hello there"
    assert message["reasoning_content"] == message["thinking"] == "hmm"
    assert message["tool_calls"] == [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]


def test_training_flags_are_read_from_messages_and_hidden_from_the_template() -> None:
    turns = [{**TURNS[0], "loss_weight": 0.0}, {**TURNS[1], "weight": 1}, TURNS[0], {**TURNS[1], "train": False}]
    sample = _chat(*turns)
    assert sample.flags == (False, True, None, False)
    assert all(set(message) == {"role", "content"} for message in sample.messages)


def test_the_template_gets_tools_and_calls_as_objects_without_nulls() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 2}'}}
    sample = _chat(
        TURNS[0],
        {"role": "assistant", "content": None, "tool_calls": [call], "name": None},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
        TURNS[1],
        tools=json.dumps([{"type": "function", "function": {"name": "f"}}]),
    )
    assert sample.messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 2}}}],
    }
    assert sample.messages[2]["tool_call_id"] == "1"
    assert sample.tools == [{"type": "function", "function": {"name": "f"}}]


def test_sharegpt_names_become_roles() -> None:
    turns = [("human", "hi"), ("function_call", '{"name": "f", "arguments": {}}'), ("observation", "4"), ("gpt", "ho")]
    record = {"conversations": [{"from": who, "value": what} for who, what in turns], "system": "Be brief"}
    sample = _sample(record)
    assert [m["role"] for m in sample.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert sample.messages[2]["tool_calls"][0]["function"]["name"] == "f"


def test_prompt_and_completion_are_strings_or_messages() -> None:
    assert _sample({"prompt": "1+1=", "completion": "2"}) == PromptSample("1+1=", "2")
    sample = _sample({"prompt": [*TURNS, TURNS[0]], "completion": [TURNS[1]]})
    assert sample.answers_from == 3
    assert _sample({"prompt": "[1] says", "completion": "[2]"}) == PromptSample("[1] says", "[2]")


def test_labels_select_the_trained_tokens() -> None:
    assert _sample({"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}) == TokenSample([5, 6, 7], [False, True, True])


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"text": ""}, "empty text"),
        ({"text": None}, "empty text"),
        ({"text": 3}, "text is not a string (int)"),
        ({"messages": []}, "no messages"),
        ({"messages": None}, "messages is not a list (NoneType)"),
        ({"messages": ["hi"]}, "a message is not an object (str)"),
        ({"messages": [{"role": "usr", "content": "hi"}]}, "unknown role 'usr'"),
        ({"messages": [{"content": "hi"}]}, "unknown role None"),
        ({"messages": [TURNS[0]]}, "no assistant message"),
        ({"messages": TURNS[::-1]}, "the assistant speaks first"),
        ({"messages": [TURNS[0], {"role": "assistant", "content": " "}]}, "an empty assistant message"),
        ({"messages": [{"role": "user", "content": None}, TURNS[1]]}, "an empty user message"),
        ({"messages": [{"role": "user", "content": 7}, TURNS[1]]}, "content is not text (int)"),
        ({"messages": [{**TURNS[0], "weight": 0.5}, TURNS[1]]}, "weight of a message is neither 0 nor 1 (0.5)"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}, TURNS[1]]}, "a content part of type 'image'"),
        ({"messages": [TURNS[0], {**TURNS[1], "tool_calls": [{"x": 1}]}]}, "a tool call without a function name"),
        ({"messages": TURNS, "tools": "search"}, "tools is not a list of JSON schemas (str)"),
        ({"instruction": "a", "output": ""}, "an empty assistant message"),
        ({"instruction": "", "output": "b"}, "an empty user message"),
        ({"instruction": "a", "output": ["b"]}, "output is not a string (list)"),
        ({"instruction": "a", "output": "b", "history": [["a"]]}, "history is not a list of pairs"),
        ({"prompt": "a", "completion": ""}, "empty completion"),
        ({"input_ids": [1, -2]}, "input_ids is not a list of token ids"),
        ({"input_ids": [1.5]}, "input_ids is not a list of token ids"),
        ({"input_ids": [1, 2], "labels": [1]}, "labels is not as long as input_ids"),
        ({"input_ids": [1, 2], "labels": [-100, 3]}, "labels differ from input_ids where they are not -100"),
    ],
)  # fmt: skip
def test_a_faulty_sample_is_rejected_with_a_reason(record: dict, reason: str) -> None:
    with pytest.raises(SampleRejected) as caught:
        _sample(record)
    assert str(caught.value).startswith(reason)
