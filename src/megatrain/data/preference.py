"""Records of preferences: which prompt two answers have, and whether an answer is labelled good or bad.

[Note: where the prompt is]
The answers `chosen` and `rejected` are texts, messages or lists of messages. Their prompt is, in this order:
- in the answers themselves, if they are whole conversations: the messages with which both begin. The record's other columns
  (`prompt`, `messages`) then only repeat it;
- messages: the column `messages` (`conversations`), or `prompt` as a list;
- `instruction` and `input`, as in the format alpaca;
- `prompt` as a text: before a message it is the user's, before a text it is plain text without the template;
- the text with which both answers begin, up to the last word that they share.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatrain.data.conversations import chat_of, from_json, is_empty, question_of, string, turns_of
from megatrain.data.samples import ChatSample, Fields, PairSample, PromptSample, Sample, SampleRejected
from megatrain.data.values import common_prefix

Messages = list[dict[str, Any]]


def pair(fields: Fields) -> PairSample:
    """A record of the format `preference`. See [Note: where the prompt is]."""
    chosen, rejected = (_answer(fields, name) for name in ("chosen", "rejected"))
    if chosen == rejected:
        raise SampleRejected("chosen and rejected are equal")
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise SampleRejected("one answer is a text and the other a message")
    if isinstance(chosen, str) and isinstance(rejected, str):
        return _texts(fields, chosen, rejected)
    assert isinstance(chosen, list) and isinstance(rejected, list)
    return _chats(fields, _messages(chosen), _messages(rejected))


def judged(sample: Sample) -> PromptSample | ChatSample:
    """A labelled sample's answer, which is its last: earlier ones are part of the prompt."""
    if isinstance(sample, ChatSample):
        last = max(i for i, message in enumerate(sample.messages) if message["role"] == "assistant")
        return replace(sample, answers_from=sample.answers_from or last)
    assert isinstance(sample, PromptSample), sample
    if not sample.prompt.strip():
        raise SampleRejected("an empty prompt")
    return sample


def label_of(value: object) -> bool:
    """Whether an answer is labelled good."""
    word = value.strip().lower() if isinstance(value, str) else value
    if is_empty(word):
        raise SampleRejected("no label")
    if word in (True, "true", "1"):
        return True
    if word in (False, "false", "0"):
        return False
    raise SampleRejected("its label is neither true nor false", repr(value)[:40])


def _answer(fields: Fields, name: str) -> str | Messages:
    value = from_json(fields.get(name), lists_only=True)
    if is_empty(value) or (isinstance(value, str) and not value.strip()):
        raise SampleRejected(f"no {name} answer")
    value = [value] if isinstance(value, dict) else value
    if isinstance(value, list) and all(isinstance(one, dict) for one in value):
        return value
    if not isinstance(value, str):
        raise SampleRejected(f"{name} is neither a text nor messages", type(value).__name__)
    return value


def _texts(fields: Fields, chosen: str, rejected: str) -> PairSample:
    before = _prompt_messages(fields)
    if before is not None:
        said = [[{"role": "assistant", "content": answer}] for answer in (chosen, rejected)]
        return _pair_after(fields, before, said[0], said[1])
    prompt = string(fields, "prompt")
    if not prompt:
        prompt = _common_text(chosen, rejected)
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
        if not chosen.strip() or not rejected.strip():
            raise SampleRejected("one answer is the beginning of the other, so their prompt is unknown")
    if not prompt.strip():
        raise SampleRejected("an empty prompt" if not is_empty(fields.get("prompt")) else "no prompt")
    for name in ("system", "tools", "functions", "documents"):
        if not is_empty(fields.get(name)):
            what = f"{name} beside a prompt as text, which no template renders"
            raise SampleRejected(what, "columns: {instruction: ..., chosen: ..., rejected: ...} uses the template")
    return PairSample(PromptSample(prompt, chosen), PromptSample(prompt, rejected))


def _chats(fields: Fields, chosen: Messages, rejected: Messages) -> PairSample:
    given, prompt = _prompt_messages(fields), fields.get("prompt")
    prompt = prompt if isinstance(prompt, str) else None
    if all(said[0]["role"] != "assistant" for said in (chosen, rejected)):
        before = chosen[: common_prefix(chosen, rejected)]
        if given is not None and given != before and given not in (chosen, rejected):
            raise SampleRejected("whole conversations as answers, and another prompt beside them")
        if prompt and prompt not in [message.get("content") for message in before]:
            raise SampleRejected("whole conversations as answers, and another prompt beside them")
        if not before:
            raise SampleRejected("chosen and rejected answer different prompts")
        return _pair_after(fields, before, chosen[len(before) :], rejected[len(before) :])
    if given is None:
        if not (prompt or "").strip():
            raise SampleRejected("an empty prompt" if prompt is not None else "no prompt")
        given = [{"role": "user", "content": prompt}]
    return _pair_after(fields, given, chosen, rejected)


def _pair_after(fields: Fields, before: Messages, chosen: Messages, rejected: Messages) -> PairSample:
    """Both answers after the same messages."""
    if all(message["role"] in ("system", "developer") for message in before):
        raise SampleRejected("an empty prompt")
    for name, said in (("chosen", chosen), ("rejected", rejected)):
        if not said:
            raise SampleRejected(f"no {name} answer")
        if said[0]["role"] != "assistant":
            raise SampleRejected("chosen and rejected answer different prompts")
    first, second = (
        chat_of(fields, [*before, *said], (None,) * (len(before) + len(said)), len(before))
        for said in (chosen, rejected)
    )
    return PairSample(first, second)


def _prompt_messages(fields: Fields) -> Messages | None:
    """The prompt where it is messages, or an instruction; None: it is a text, or in the answers."""
    found: dict[str, Messages] = {}
    if not is_empty(fields.get("messages")):
        found["messages"] = _messages(fields["messages"])
    prompt = from_json(fields.get("prompt"), lists_only=True)
    if isinstance(prompt, list) and prompt:
        found["prompt"] = _messages(prompt)
    if not is_empty(fields.get("instruction")) or not is_empty(fields.get("input")):
        found["instruction"] = question_of(fields)
    if len(found) > 1:
        raise SampleRejected("two prompts", " and ".join(found))
    return next(iter(found.values()), None)


def _messages(value: Any) -> Messages:
    turns = from_json(value)
    sharegpt = isinstance(turns, list) and turns and isinstance(turns[0], dict) and "from" in turns[0]
    return turns_of(turns, *(("from", "value") if sharegpt else ("role", "content")))[0]


def _common_text(chosen: str, rejected: str) -> str:
    """What both begin with, without the beginning of a word, and without the space before the first different one."""
    shared = chosen[: common_prefix(chosen, rejected)]
    if any(len(text) > len(shared) and not text[len(shared)].isspace() for text in (chosen, rejected)):
        while shared and not shared[-1].isspace():
            shared = shared[:-1]
    return shared.removesuffix(" ")
