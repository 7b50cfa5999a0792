"""Conversations: from the columns of a chat record to a `ChatSample` as templates take it.

Nothing is dropped here: a message keeps all its keys, and what cannot be passed on rejects the sample. Values stay as they were
written: null stays null, absent stays absent, numbers keep their digits (`values.py`).
"""

from __future__ import annotations

import math
from typing import Any

from megatrain.data import values
from megatrain.data.samples import ChatSample, Fields, PromptSample, Sample, SampleRejected

ROLES = {
    "system": "system", "developer": "developer", "user": "user", "assistant": "assistant", "tool": "tool",
    # OpenAI's older name of a result
    "function": "tool",
    # sharegpt's names
    "human": "user", "gpt": "assistant", "model": "assistant", "chatgpt": "assistant", "bot": "assistant",
    "observation": "tool", "function_response": "tool", "function_call": "assistant",
}  # fmt: skip
FLAGS = ("train", "trainable", "weight", "loss_weight", "loss", "loss_mask")
"""Keys of a message that say whether it is trained."""
UNCLEAR_FLAGS = ("mask", "masked", "training_detail", "train_detail", "message_field_training_detail")
"""Keys of a message that restrict training in ways that are not supported, or that have two opposite meanings."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning, the standard one first. All of them are passed to the template, as transformers does."""
ARGUMENTS = ("arguments", "parameters", "args", "input", "kwargs")
KEYWORDS = ("enable_thinking", "reasoning_effort", "documents")
"""Columns that are template keywords by themselves; others are in `chat_template_kwargs`."""
RESERVED = ("messages", "conversation", "chat_template", "tools", "tokenize", "add_generation_prompt", "continue_final_message",
            "strftime_now", "raise_exception")  # fmt: skip


def alpaca(fields: Fields) -> ChatSample:
    messages = question_of(fields)
    messages.append({"role": "assistant", "content": string(fields, "output")})
    return chat_of(fields, messages, (None,) * len(messages))


def question_of(fields: Fields) -> list[dict[str, Any]]:
    """The messages before the answer, from `history`, `instruction` and `input`."""
    messages: list[dict[str, Any]] = []
    history = from_json(fields.get("history")) or []
    if not isinstance(history, list):
        raise SampleRejected("history is not a list of pairs", type(history).__name__)
    for pair in history:
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(turn, str) and turn for turn in pair)):
            raise SampleRejected("history is not a list of pairs")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    question = "\n".join(part for part in (string(fields, "instruction"), string(fields, "input")) if part)
    messages.append({"role": "user", "content": question})
    return messages


def openai(fields: Fields) -> ChatSample:
    return chat_of(fields, *turns_of(fields.get("messages"), "role", "content"))


def sharegpt(fields: Fields) -> ChatSample:
    return chat_of(fields, *turns_of(fields.get("messages"), "from", "value"))


def prompt_completion(fields: Fields) -> Sample:
    prompt, completion = (from_json(fields.get(name), lists_only=True) for name in ("prompt", "completion"))
    if isinstance(prompt, list) and isinstance(completion, list):
        before, before_flags = turns_of(prompt, "role", "content")
        after, after_flags = turns_of(completion, "role", "content")
        return chat_of(fields, [*before, *after], before_flags + after_flags, len(before))
    for name in ("system", "tools", "functions", "documents"):
        if not is_empty(fields.get(name)):
            what = f"{name} beside a prompt as text, which no template renders"
            raise SampleRejected(what, "columns: {instruction: ..., output: ...} uses the template")
    prompt, completion = string(fields, "prompt"), string(fields, "completion")
    if not completion:
        raise SampleRejected("empty completion")
    return PromptSample(prompt, completion)


def string(fields: Fields, name: str) -> str:
    """The value of a text column; empty if it is missing or null."""
    value = fields.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise SampleRejected(f"{name} is not a string", type(value).__name__)
    return value


def is_empty(value: object) -> bool:
    """Whether a cell says nothing: null, NaN (pandas' null), or an empty string, list or object."""
    return (
        value is None
        or (isinstance(value, str | list | dict) and not value)
        or (isinstance(value, float) and math.isnan(value))
    )


def from_json(value: object, lists_only: bool = False) -> Any:
    """Parse lists and objects that are stored as JSON text, as tables and some JSON files do."""
    if isinstance(value, str) and value.lstrip().startswith(("[",) if lists_only else ("[", "{")):
        try:
            parsed = values.parse_exact(value)
        except ValueError:
            return value
        if not lists_only or (isinstance(parsed, list) and parsed and isinstance(parsed[0], dict)):
            return parsed
    return value


def chat_of(
    fields: Fields, messages: list[dict[str, Any]], flags: tuple[bool | None, ...], answers_from: int = 0
) -> ChatSample:
    """The sample with the record's system prompt, tools and template keywords; rejects faults that templates ignore."""
    if system := string(fields, "system"):
        own = [message.get("content") for message in messages if message["role"] in ("system", "developer")]
        if own and own[0] != system:
            raise SampleRejected("a system prompt beside the messages and another one in them")
        if not own:
            messages, flags = [{"role": "system", "content": system}, *messages], (None, *flags)
            answers_from += bool(answers_from)
    sample = ChatSample(messages, flags, _tools(fields), answers_from, _keywords(fields))
    for message in messages:
        empty = not (message.get("content") or "").strip() and not message.get("tool_calls")
        if empty and message["role"] in ("user", "assistant"):
            raise SampleRejected(f"an empty {message['role']} message")
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers or answers[-1] < answers_from:
        raise SampleRejected("no assistant message")
    if answers[0] == 0 or all(message["role"] in ("system", "developer") for message in messages[: answers[0]]):
        raise SampleRejected("the assistant speaks first")
    return sample


def turns_of(value: object, role_key: str, content_key: str) -> tuple[list[dict[str, Any]], tuple[bool | None, ...]]:
    """The messages of a list of turns, and for each whether it is flagged for training (None: not stated)."""
    turns = from_json(value)
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
    """A turn in the form templates take: a known role, content as a string or null, calls with objects as arguments."""
    word = turn.get(role_key)
    role = ROLES.get(word.lower()) if isinstance(word, str) else None
    if role is None:
        raise SampleRejected(f"unknown role {word!r}")
    message: dict[str, Any] = {"role": role}
    if content_key in turn:
        message["content"] = turn[content_key]
    for key, value in turn.items():
        if key not in _TAKEN and key not in (role_key, content_key):
            if key in ("role", "content") and not is_empty(value):
                raise SampleRejected(f"a message with both {role_key} and {key}")
            message.setdefault(key, value)
    content, calls = turn.get(content_key), from_json(turn.get("tool_calls"))
    reasoning = [turn[key] for key in REASONING if turn.get(key) is not None]
    if calls is not None and not isinstance(calls, list):
        raise SampleRejected("tool_calls is not a list", type(calls).__name__)
    if isinstance(content, list):
        content, more_reasoning, more_calls = _parts(content)
        reasoning += [more_reasoning] if more_reasoning else []
        calls = [*(calls or []), *more_calls] if more_calls else calls
    if word == "function_call":  # sharegpt: the value is the call
        given = from_json(content)
        content, calls = None, given if isinstance(given, list) else [given]
    if not is_empty(older := turn.get("function_call")):
        if calls:
            raise SampleRejected("a message with both tool_calls and function_call")
        calls = [from_json(older)]
    if content is not None and not isinstance(content, str):
        raise SampleRejected("content is not text", type(content).__name__)
    if not all(isinstance(one, str) for one in reasoning):
        raise SampleRejected("reasoning is not text", type(reasoning[0]).__name__)
    if len({one for one in reasoning if one}) > 1:
        raise SampleRejected("a message with two different reasonings")
    if "content" in message or content is not None:
        message["content"] = content
    if reasoning:
        words = next((one for one in reasoning if one), "")
        message["reasoning_content"], message["thinking"] = words, words
    if calls is not None:
        message["tool_calls"] = [_tool_call(call) for call in calls]
    elif "tool_calls" in turn:
        message["tool_calls"] = None
    return message


_TAKEN = frozenset(("tool_calls", "function_call", *FLAGS))


def _parts(parts: list[Any]) -> tuple[str | None, str, list[Any]]:
    """Content parts -> text, reasoning, tool calls."""
    texts, reasoning, calls = [], [], []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, dict):
            raise SampleRejected("a content part is not an object", type(part).__name__)
        kind = part.get("type")
        value = next((part[key] for key in ("text", "value", kind) if part.get(key) is not None), None)
        if kind == "tool_call":
            calls.append(from_json(value))
        elif kind not in ("text", "reasoning", "thinking"):
            raise SampleRejected(f"a content part of type {kind!r}: only text can be trained")
        elif not isinstance(value, str):
            raise SampleRejected("a content part without text")
        else:
            (texts if kind == "text" else reasoning).append(value)
    return "".join(texts) if texts or not calls else None, "".join(reasoning), calls


def _tool_call(call: object) -> dict[str, Any]:
    """A call in the form templates take: {type: function, function: {name, arguments: object}}, with all its other keys."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if isinstance(function, str) and isinstance(call, dict):  # {function: NAME, arguments: ...}
        function = {**{k: v for k, v in call.items() if k != "function"}, "name": function}
        call = function
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise SampleRejected("a tool call without a function name")
    holders = [function] if function is call else [function, call]
    found = [(key, holder[key]) for holder in holders for key in ARGUMENTS if not is_empty(holder.get(key))]
    if len(found) > 1:
        raise SampleRejected("a tool call with arguments twice", ", ".join(key for key, _ in found))
    arguments = _arguments(found[0][1]) if found else {}
    inner = {k: v for k, v in function.items() if k not in ARGUMENTS and (function is not call or k not in _OUTER)}
    outer = {
        k: v
        for k, v in call.items()
        if k not in ARGUMENTS and k != "function" and (function is not call or k in _OUTER)
    }
    return {"type": "function", **outer, "function": {**inner, "arguments": arguments}}


_OUTER = ("id", "type", "index")


def _arguments(value: object) -> dict[str, Any]:
    """A call's arguments as an object."""
    if isinstance(value, str):
        value = {} if not value.strip() else values.parse_object(value)
    elif isinstance(value, dict) and _has_nan(value):
        value = None
    if not isinstance(value, dict):
        raise SampleRejected("the arguments of a tool call are not a JSON object")
    return value


def _has_nan(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(_has_nan(item) for item in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, float) and not math.isfinite(value)


def _flag(turn: dict[str, Any]) -> bool | None:
    for key in UNCLEAR_FLAGS:
        if not is_empty(turn.get(key)):
            raise SampleRejected(f"{key} of a message: its meaning for training is unclear", "use train: true or false")
    found: bool | None = None
    for key in FLAGS:
        value = turn.get(key)
        if value is not None:
            if value not in (0, 1):
                raise SampleRejected(f"{key} of a message is neither 0 nor 1", str(value))
            if found is not None and found != bool(value):
                raise SampleRejected("a message with contradicting flags for training")
            found = bool(value)
    return found


def _tools(fields: Fields) -> list[dict[str, Any]] | None:
    tools, functions = from_json(fields.get("tools")), from_json(fields.get("functions"))
    if functions and not tools:  # OpenAI's older form: the functions without their wrapping
        listed = _schemas(functions, "functions")
        return [tool if "function" in tool else {"type": "function", "function": tool} for tool in listed]
    if functions:
        raise SampleRejected("both tools and functions")
    return _schemas(tools, "tools") if tools else None


def _schemas(value: object, name: str) -> list[dict[str, Any]]:
    listed = [from_json(tool) for tool in value] if isinstance(value, list) else value
    if not isinstance(listed, list) or not all(isinstance(tool, dict) for tool in listed):
        raise SampleRejected(f"{name} is not a list of JSON schemas", type(listed).__name__)
    return listed


def _keywords(fields: Fields) -> dict[str, Any]:
    """The record's keywords for the template."""
    given = from_json(fields.get("chat_template_kwargs"))
    if is_empty(given):
        given = {}
    if not isinstance(given, dict):
        raise SampleRejected("chat_template_kwargs is not an object", type(given).__name__)
    keywords = dict(given)
    for name in KEYWORDS:
        value = fields.get(name)
        if not is_empty(value):
            if name in keywords and keywords[name] != value:
                raise SampleRejected(f"{name} and another one in chat_template_kwargs")
            keywords[name] = from_json(value) if name == "documents" else value
    for name in keywords:
        if name in RESERVED:
            raise SampleRejected(f"chat_template_kwargs sets {name}, which the data decide")
    return keywords
