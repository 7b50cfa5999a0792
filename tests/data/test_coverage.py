"""What a chat template leaves out of a conversation is found, and nothing else is reported."""

from __future__ import annotations

from typing import Any

import pytest

import tiny_tokenizer as tiny
from megatrain.data.formats import ChatSample, SampleRejected
from megatrain.data.render import ChatRenderer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city, as measured",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Name"},
                    "n": {"type": "integer", "enum": [1, 7], "minimum": 1},
                },
                "required": ["city"],
            },
        },
    }
]
ARGUMENTS = {"city": "Oslo", "n": 7, "wind": True, "day": None, "at": {"x": [0.5, "é\n"]}}

HEAD = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
TAIL = "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
SCHEMAS = "{% if tools %}{{ tools | tojson }}{% endif %}"
THOUGHT = "{% if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}"
CALLS = "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
FULL = SCHEMAS + HEAD + THOUGHT + "{{ m.content or '' }}" + CALLS + TAIL

XML = (
    "{% for t in tools or [] %}{{ t.function.name }}: {{ t.function.description | upper }}"
    "{% for name, p in t.function.parameters.properties.items() %}"
    "{{ name }}={{ p.type }} {{ p.description }} {{ p.enum }} {{ p.minimum }}"
    "{% endfor %}{% endfor %}" + HEAD + THOUGHT + "{{ (m.content or '') | trim }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}{% for k, v in c.function.arguments.items() %}"
    "<key>{{ k }}</key><value>{{ v if v is string else v | tojson }}</value>{% endfor %}</call>{% endfor %}" + TAIL
)
"""Writes everything, but hardly anything as it stands in the record."""


def _sample(**changed: Any) -> ChatSample:
    call = {"type": "function", "id": "1", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "m", "name": "get_weather", "tool_call_id": "1"},
        {"role": "assistant", "content": "It is cold today, and it will stay so."},
        {"role": "system", "content": "Be brief from here on, please."},
        {"role": "developer", "content": "t"},
        {"role": "user", "content": "and \n tomorrow? Answer as before, please."},
        {"role": "assistant", "content": "e"},
    ]
    return ChatSample(messages, (None,) * len(messages), **{"tools": TOOLS, **changed})


def _left_out(template: str, sample: ChatSample | None = None, train_on: str = "assistant") -> set[str]:
    sample = sample or _sample()
    renderer = ChatRenderer(tiny.make_tokenizer(template), None, train_on, "warn")
    renderer.render(sample)
    found = renderer.take_left_out()
    assert set(found.values()) <= {1}
    strict = ChatRenderer(tiny.make_tokenizer(template), None, train_on)
    if found:
        with pytest.raises(SampleRejected, match="the chat template of tiny leaves out ") as refusal:
            strict.render(sample)
        assert all(part in str(refusal.value) for part in found)
        return set(found)
    strict.render(sample)
    return set()


@pytest.mark.parametrize("train_on", ["assistant", "all"])
@pytest.mark.parametrize("template", [FULL, XML])
def test_nothing_is_reported_of_templates_that_write_everything(template: str, train_on: str) -> None:
    assert _left_out(template, train_on=train_on) == set()


ROLES = {
    "system": {"system messages", "later system messages"},
    "developer": {"developer messages"},
    "user": {"user messages"},
    "tool": {"tool results"},
}


@pytest.mark.parametrize("train_on", ["assistant", "all"])
@pytest.mark.parametrize("role", ROLES)
def test_messages_of_a_role_without_a_branch_are_found(role: str, train_on: str) -> None:
    """Short ones too, whose text occurs elsewhere by chance."""
    template = FULL.replace("{{ m.content or '' }}", "{{ (m.content or '') if m.role != '" + role + "' else '' }}")
    assert _left_out(template, train_on=train_on) == ROLES[role]


def test_a_later_system_message_is_told_from_the_first() -> None:
    template = FULL.replace(
        "{{ m.content or '' }}", "{{ (m.content or '') if m.role != 'system' or loop.first else '' }}"
    )
    assert _left_out(template) == {"later system messages"}


@pytest.mark.parametrize(
    ("part", "written", "instead"),
    [
        ("tool schemas", SCHEMAS, ""),
        ("thoughts", THOUGHT, ""),
        ("arguments of tool calls", "c.function | tojson", "c.function.name"),
        ("tool calls", "c.function | tojson", "c.function.arguments | tojson"),
        ("names of tool parameters", "tools | tojson", "tools[0].function.name + tools[0].function.description"),
        (
            "description in tool schemas",
            "tools | tojson",
            "tools[0].function.name + (tools[0].function.parameters | tojson)",
        ),
    ],
)
def test_each_part_that_is_dropped_is_named(part: str, written: str, instead: str) -> None:
    assert part in _left_out(FULL.replace(written, instead))


@pytest.mark.parametrize(
    ("dropped", "is_found"),
    [("wind", True), ("day", True), ("n", True), ("at", True), ("city", True), ("none", False)],
)
def test_every_key_and_value_of_a_call_counts(dropped: str, is_found: bool) -> None:
    """Also `true`, null and numbers, which occur elsewhere."""
    template = XML.replace("c.function.arguments.items() %}", f"c.function.arguments.items() if k != '{dropped}' %}}")
    assert (_left_out(template) == {"arguments of tool calls"}) == is_found
    only_key = XML.replace("{{ v if v", f"{{{{ '' if k == '{dropped}' else v if v")
    assert (_left_out(only_key) == {"arguments of tool calls"}) == is_found


def test_details_of_schemas_are_named_alone_only_if_the_tool_is_there() -> None:
    assert _left_out(FULL.replace(SCHEMAS, "")) == {"tool schemas"}
    assert _left_out(XML.replace(" {{ p.minimum }}", "")) == {"minimum in tool schemas"}


@pytest.mark.parametrize(
    ("expression", "is_found"),
    [
        ("m.content[10:]", True), ("m.content[:30]", True),
        ("m.content.split('</think>')[-1]", True), ("m.content | upper", False), ("m.content | tojson", False),
        ("m.content.split() | join('\n')", False), ("m.content | replace(' ', '_')", False), ("m.content | trim", False),
    ],
)  # fmt: skip
def test_a_part_of_a_text_that_is_dropped_is_found_and_another_form_is_none(expression: str, is_found: bool) -> None:
    content = '<think>\nThis is easy.\n</think>\n\n It is a number, and "one" of the best ones.\n\nI am sure.'
    sample = ChatSample([{"role": "user", "content": "x"}, {"role": "assistant", "content": content}], (None, None))
    found = _left_out(HEAD + "{{ " + expression + " }}" + TAIL if "[" not in expression else HEAD + "{{ ("
                      + expression + ") if m.role == 'assistant' else m.content }}" + TAIL, sample)  # fmt: skip
    assert bool(found & {"part of an answer's content"}) == is_found


def test_thoughts_of_answers_that_are_not_trained_may_be_dropped() -> None:
    """Thinking templates drop them on purpose, and the model never sees them."""
    sample = ChatSample(
        [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "<think>hm hm hm hm hm hm hm</think>two", "reasoning_content": "hm"},
            {"role": "user", "content": "three"},
            {"role": "assistant", "content": "four"},
        ],
        (None, False, None, None),
    )
    template = HEAD + "{{ m.content.split('</think>')[-1] }}" + TAIL
    assert _left_out(template, sample) == set()
    assert _left_out(template, sample, "last_assistant") == set()
    assert _left_out(template, sample, "all") == set()
    trained = ChatSample(sample.messages, (None, None, None, None))
    assert _left_out(template, trained, "all") == {"part of an answer's content", "thoughts"}


def test_results_for_short_values_depend_on_the_keywords_of_a_record() -> None:
    template = FULL.replace(THOUGHT, "{% if not quiet %}" + THOUGHT + "{% endif %}")
    renderer = ChatRenderer(tiny.make_tokenizer(template), None, "assistant")
    renderer.render(_sample())
    with pytest.raises(SampleRejected, match="leaves out thoughts"):
        renderer.render(_sample(keywords={"quiet": True}))


def test_a_template_that_refuses_changed_values_is_no_reason_to_reject() -> None:
    """A template may look at a value: the changed one is refused, the record's own is written."""
    check = "{% if m.role == 'user' and m.content != 'a' %}{{ raise_exception('no') }}{% endif %}"
    sample = ChatSample([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], (None, None))
    assert _left_out(HEAD + check + "{{ m.content }}" + TAIL, sample) == set()


def test_results_for_short_values_serve_all_conversations_of_the_same_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = ChatRenderer(tiny.make_tokenizer(), None, "assistant")
    rendered: list[str] = []
    render = renderer._render
    monkeypatch.setattr(renderer, "_render", lambda *args, **kwargs: rendered.append("") or render(*args, **kwargs))
    counts = []
    for answer in ("a", "b", "c", "a longer answer, but not a sure one"):
        before = len(rendered)
        renderer.render(
            ChatSample([{"role": "user", "content": "x"}, {"role": "assistant", "content": answer}], (None, None))
        )
        counts.append(len(rendered) - before)
    assert counts[1] == counts[2] < counts[0]
    assert counts[1] == 2, "prompt and text"
