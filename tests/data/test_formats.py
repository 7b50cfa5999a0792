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


def _call(arguments: Any, **more: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments, **more}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


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


def test_the_template_gets_tools_and_calls_as_objects_and_nulls_as_they_are() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 2}', "strict": True}}
    sample = _chat(
        TURNS[0],
        {"role": "assistant", "content": None, "tool_calls": [call], "name": None},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": "1", "tool_calls": None},
        TURNS[1],
        tools=json.dumps([{"type": "function", "function": {"name": "f"}}]),
    )
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 2}, "strict": True}}]
    assert sample.messages[1:4] == [
        {"role": "assistant", "content": None, "tool_calls": calls, "name": None},
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "content": "4", "tool_call_id": "1", "tool_calls": None},
    ]
    assert sample.tools == [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    "call",
    [
        {"name": "f", "arguments": {"x": 2}},
        {"name": "f", "parameters": {"x": 2}},
        {"function": "f", "args": '{"x": 2}'},
        {"id": "1", "function": {"name": "f", "arguments": '{"x": 2}'}},
        {"function": {"name": "f"}, "arguments": {"x": 2}},
    ],
)
def test_the_forms_of_a_tool_call_become_one(call: dict[str, Any]) -> None:
    for turn in ({"role": "assistant", "tool_calls": [call]}, {"role": "assistant", "function_call": call}):
        (made,) = _chat(TURNS[0], turn).messages[1]["tool_calls"]
        assert made == {"type": "function", "function": {"name": "f", "arguments": {"x": 2}}} | (
            {"id": "1"} if "id" in call else {}
        )


def test_openais_older_functions_are_tools_and_results() -> None:
    function = {"name": "f", "parameters": {"type": "object"}}
    sample = _chat(
        TURNS[0],
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "4"},
        TURNS[1],
        functions=[function],
    )
    assert [message["role"] for message in sample.messages] == ["user", "assistant", "tool", "assistant"]
    assert sample.messages[2]["name"] == "f"
    assert sample.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}
    assert sample.tools == [{"type": "function", "function": function}]


def test_a_system_prompt_beside_the_messages_is_their_first() -> None:
    for name in ("system", "system_prompt", "system_message"):
        sample = _chat(*TURNS, **{name: "Be brief"})
        assert sample.messages[0] == {"role": "system", "content": "Be brief"}
    own = [{"role": "system", "content": "Be brief"}, *TURNS]
    assert _chat(*own, system="Be brief").messages == own, "the same twice is one"
    with pytest.raises(SampleRejected, match="beside the messages and another one in them"):
        _chat(*own, system="Be long")
    sample = _sample({"prompt": TURNS[:1], "completion": TURNS[1:], "system": "Be brief"})
    assert ([m["role"] for m in sample.messages], sample.answers_from) == (["system", "user", "assistant"], 2)


def test_keywords_of_the_record_go_to_the_template() -> None:
    kwargs = {"enable_thinking": False, "custom_instructions": None}
    assert _chat(*TURNS, chat_template_kwargs=kwargs).keywords == kwargs
    assert _chat(*TURNS, chat_template_kwargs=json.dumps(kwargs)).keywords == kwargs
    assert _chat(*TURNS, reasoning_effort="low", enable_thinking=None).keywords == {"reasoning_effort": "low"}
    with pytest.raises(SampleRejected, match="chat_template_kwargs sets tools, which the data decide"):
        _chat(*TURNS, chat_template_kwargs={"tools": []})
    with pytest.raises(SampleRejected, match="enable_thinking and another one in chat_template_kwargs"):
        _chat(*TURNS, chat_template_kwargs=kwargs, enable_thinking=True)


def test_columns_that_are_not_read_are_counted_unless_they_are_empty_or_left_out_on_purpose() -> None:
    reading = find_reading([{"messages": TURNS}], "auto", {}, "file", ignore=("score",))
    for record in ({"id": 7, "text": "x", "note": None}, {"id": 8, "url": "", "tags": [], "score": 3}):
        reading.sample({"messages": TURNS, **record})
    assert reading.unread == {"id": 2, "text": 1}


def test_a_column_that_appears_late_in_a_file_is_read() -> None:
    reading = find_reading([{"messages": TURNS}], "auto", {}, "file")
    tools = [{"type": "function", "function": {"name": "f"}}]
    late = reading.sample({"messages": TURNS, "tools": tools})
    assert isinstance(late, ChatSample)
    assert late.tools == tools
    with pytest.raises(SampleRejected, match="undesirable"):
        reading.sample({"messages": TURNS, "label": False})


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"label": False}, "marked as undesirable: its label is false"),
        ({"label": "False"}, "marked as undesirable"),
        ({"kto_tag": 0}, "marked as undesirable: its kto_tag is false"),
        ({"label": 3}, "label is neither true nor false"),
        ({"split": "Test"}, "held out: its split is test"),
        ({"images": ["a.png"]}, "it has images: only text can be trained"),
        ({"image": "a.png"}, "it has image: only text can be trained"),
        ({"loss_weight": 0.0}, "its loss_weight is 0"),
        ({"weight": 0.5}, "its weight is not 1: samples cannot be weighted (0.5)"),
    ],
)
def test_columns_that_say_whether_a_record_is_trained_are_heeded_in_every_format(more: dict, reason: str) -> None:
    harmless = {"label": True, "split": "train", "images": [], "weight": 1}
    for record in ({"messages": TURNS}, {"instruction": "a", "output": "b"}, {"prompt": "a", "completion": "b"}):
        with pytest.raises(SampleRejected) as caught:
            _sample({**record, **more})
        assert str(caught.value).startswith(reason)
        assert _sample({**record, **harmless}) == _sample(record)
        reading = find_reading([{**record, **more}], "auto", {}, "file", ignore=tuple(more))
        assert reading.sample({**record, **more}) == _sample(record), "`ignore` is the way out"


def test_a_mask_with_another_name_can_be_mapped_or_left_out() -> None:
    record = {"input_ids": [5, 6], "my_mask": [0, 1], "special_tokens_mask": [1, 0]}
    assert _sample(record, loss_mask="my_mask") == TokenSample([5, 6], [False, True])
    assert find_reading([record], "auto", {}, "file", ignore=("my_mask",)).sample(record) == TokenSample([5, 6])


def test_a_class_label_beside_plain_text_is_only_named() -> None:
    reading = find_reading([{"text": "a"}], "auto", {}, "file")
    assert reading.sample({"text": "a", "label": 0}) == TextSample("a")
    assert reading.unread == {"label": 1}


@pytest.mark.parametrize(
    ("more", "want"),
    [
        ({"attention_mask": [1, 1, 1, 0]}, ([5, 6, 7], None)),
        ({"attention_mask": [0, 1, 1, 1]}, ([6, 7, 8], None)),
        ({"completion_mask": [0, 0, 1, 1]}, ([5, 6, 7, 8], [False, False, True, True])),
        ({"assistant_masks": [0, 1, 0, 1]}, ([5, 6, 7, 8], [False, True, False, True])),
        ({"loss_mask": [0, 1, 1, 1], "labels": [5, 6, 7, -100]}, ([5, 6, 7, 8], [False, True, True, False])),
        ({"labels": [-100, 6, 7, -100], "attention_mask": [1, 1, 1, 0]}, ([5, 6, 7], [False, True, True])),
        ({"position_ids": [0, 1, 2, 3], "seq_lengths": [4]}, ([5, 6, 7, 8], None)),
    ],
)
def test_masks_beside_token_ids_select_tokens(more: dict, want: tuple) -> None:
    assert _sample({"input_ids": [5, 6, 7, 8], **more}) == TokenSample(*want)


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
        ({"messages": [{"role": "user", "content": "a", "mask": 1}, TURNS[1]]}, "mask of a message: its meaning"),
        ({"messages": [TURNS[0], {**TURNS[1], "train": True, "weight": 0}]}, "a message with contradicting flags"),
        ({"messages": [TURNS[0], {**TURNS[1], "reasoning": "a", "thinking": "b"}]}, "a message with two different"),
        ({"messages": [TURNS[0], _call("{'x': 2}")]}, "the arguments of a tool call are not a JSON object"),
        ({"messages": [TURNS[0], _call('{"x": 2')]}, "the arguments of a tool call are not a JSON object"),
        ({"messages": [TURNS[0], _call('"x"')]}, "the arguments of a tool call are not a JSON object"),
        ({"messages": [TURNS[0], _call([2])]}, "the arguments of a tool call are not a JSON object"),
        ({"messages": [TURNS[0], _call('{"x": NaN}')]}, "the arguments of a tool call are not a JSON object"),
        ({"messages": [TURNS[0], _call('{"x": 1, "x": 2}')]}, "the arguments of a tool call are not a JSON object"),
        ({"messages": [TURNS[0], _call({"x": 2}, parameters={"x": 3})]}, "a tool call with arguments twice"),
        ({"messages": [TURNS[0], {**_call("{}"), "function_call": {"name": "g"}}]}, "a message with both tool_calls"),
        ({"messages": TURNS, "tools": [{"name": "f"}], "functions": [{"name": "g"}]}, "both tools and functions"),
        ({"messages": TURNS, "chat_template_kwargs": "low"}, "chat_template_kwargs is not an object (str)"),
        ({"prompt": "a", "completion": "b", "tools": [{"name": "f"}]}, "tools beside a prompt as text"),
        ({"prompt": "a", "completion": "b", "system_prompt": "c"}, "system beside a prompt as text"),
        ({"input_ids": [1, 2], "attention_mask": [0, 0]}, "attention_mask is 0 everywhere"),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, "attention_mask has zeros between ones"),
        ({"input_ids": [1, 2], "attention_mask": [1, 2]}, "attention_mask is not a list of 0 and 1"),
        ({"input_ids": [1, 2], "prompt_mask": [1, 0]}, "prompt_mask beside input_ids: its meaning for training is unclear"),
        ({"input_ids": [1, 2], "completion_mask": [1]}, "completion_mask is not as long as input_ids"),
        ({"input_ids": [1, 2], "position_ids": [0, 0]}, "position_ids are not 0, 1, 2, ...: the record is packed"),
        ({"input_ids": [1, 2], "seq_lengths": [1, 1]}, "seq_lengths has several entries"),
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
