"""Special tokens that are spelt out in the data.

[Note: special tokens in text]
A tokenizer turns the characters `<|im_end|>` into the token that ends a turn, wherever they stand. In a user's message they would
forge a turn; in an answer about chat formats the model would learn to stop in the middle. `data.special_tokens` decides:

`text`     tokenized as the characters that they are
`control`  tokenized as control tokens, as transformers does
`reject`   such samples are rejected
`auto`     text in the messages of a chat, where the template writes all control tokens; control in plain text and in prompts,
           which may have been rendered before. Tags that an answer writes itself (thoughts, tool calls) stay control tokens there

They are counted and named in each case. The end token at the very end of a text or a message is none of them: it is where it
belongs, and no second one is added.

[Note: marks]
A special token that is text is marked: a noncharacter stands after its first character (`<\\ufdd0|im_end|>`), through the chat
template up to the tokenizer. There marks are removed, and special tokens without a mark are encoded by a copy of the tokenizer
that knows them by other names and takes no other text for a special token.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from tokenizers import AddedToken, Tokenizer

from megatrain.data.samples import ChatSample, PromptSample, SampleRejected

MARK = "\ufdd0"
_ALIAS = "\ufdd1"
_OWN_WORDS = re.compile(
    r"</?\|?(think|thinking|thought|reasoning|reflection|tool_call|tool_calls|function_call|answer)\|?>"
    r"|\[/?(THINK|TOOL_CALLS|ARGS|CALL_ID)\]|<\|(START|END)_(THINKING|ACTION|RESPONSE)\|>|<\|python_tag\|>"
)
"""Special tokens that an answer contains of itself."""

Mode = Literal["auto", "text", "control", "reject"]


def special_tokens(tokenizer: Any) -> list[str]:
    """All special tokens of a tokenizer, the longest first."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    found = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
    return sorted((token for token in found if token), key=lambda token: (-len(token), token))


class SpecialTokens:
    """Finds special tokens in samples, and marks those that are text."""

    def __init__(self, tokenizer: Any, mode: Mode = "auto"):
        self.mode = mode
        self._eos: str | None = tokenizer.eos_token
        tokens = special_tokens(tokenizer)
        self._starts = tuple({token[:2] for token in tokens})
        self._pattern = re.compile("|".join(re.escape(token) for token in tokens) or r"(?!)")
        self.found: Counter[str] = Counter()  # by token, since `take`
        self.samples = 0  # samples with any
        self.dropped_ends = 0  # messages that ended in an end token of their own

    def take(self) -> dict[str, int]:
        """How often each special token was found since the last call."""
        found, self.found, self.samples, self.dropped_ends = self.found, Counter(), 0, 0
        return dict(sorted(found.items()))

    def ends_itself(self, text: str) -> bool:
        """Whether a text ends with the tokenizer's end token."""
        return self._eos is not None and text.rstrip().endswith(self._eos)

    def in_text(self, text: str, last: bool = True) -> str:
        """A plain text as it is to be tokenized. `last`: it is the end of its document.

        Raises:
            SampleRejected: It holds special tokens, and `mode` is `reject`.
        """
        _refuse_marks(text)
        if not any(start in text for start in self._starts):
            return text
        body, end = self._apart(text) if last else (text, "")
        found = Counter(self._pattern.findall(body))
        if not found:
            return text
        self._count(found)
        return self._marked(body) + end if self.mode == "text" else text

    def in_prompt(self, sample: PromptSample) -> PromptSample:
        """As `in_text`, for a prompt and its completion."""
        whole = sample.prompt + sample.completion
        _refuse_marks(whole)
        if not any(start in whole for start in self._starts):
            return sample
        body, end = self._apart(sample.completion)
        found = Counter(self._pattern.findall(sample.prompt)) + Counter(self._pattern.findall(body))
        if not found:
            return sample
        self._count(found)
        if self.mode != "text":
            return sample
        return PromptSample(self._marked(sample.prompt), self._marked(body) + end)

    def in_chat(self, sample: ChatSample, ends: Sequence[str]) -> ChatSample:
        """A conversation as it is to be rendered.

        Args:
            ends: Tokens that end a turn. The template writes them, so at the end of a message they are dropped.
        """
        found: Counter[str] = Counter()
        messages = [self._message(message, ends, found) for message in sample.messages]
        tools, keywords = (self._walk(value, found, False) for value in (sample.tools, dict(sample.keywords)))
        if found:
            self._count(found)
        return replace(sample, messages=messages, tools=tools, keywords=keywords)

    def _message(self, message: dict[str, Any], ends: Sequence[str], found: Counter[str]) -> dict[str, Any]:
        content = message.get("content")
        if isinstance(content, str) and any(start in content for start in self._starts):
            bare = content
            while end := next((end for end in ends if bare.rstrip().endswith(end)), None):
                bare = bare.rstrip().removesuffix(end)
            if bare != content:
                self.dropped_ends += 1
                message = {**message, "content": bare}
        return self._walk(message, found, message["role"] == "assistant")

    def _walk(self, value: Any, found: Counter[str], is_answer: bool) -> Any:
        """A value with its special tokens marked, if they are text; the same object if it has none."""
        if isinstance(value, str):
            _refuse_marks(value)
            if not any(start in value for start in self._starts):
                return value
            tokens = self._pattern.findall(value)
            if is_answer and self.mode == "auto":
                tokens = [token for token in tokens if not _OWN_WORDS.fullmatch(token)]
            found.update(tokens)
            return self._marked(value, is_answer) if tokens and self.mode in ("auto", "text") else value
        if isinstance(value, dict):
            walked = {key: self._walk(item, found, is_answer) for key, item in value.items()}
            return value if all(walked[key] is item for key, item in value.items()) else walked
        if isinstance(value, list):
            items = [self._walk(item, found, is_answer) for item in value]
            return value if all(a is b for a, b in zip(items, value, strict=True)) else items
        return value

    def _apart(self, text: str) -> tuple[str, str]:
        """A text without the end token at its end, and that end."""
        if not self.ends_itself(text):
            return text, ""
        assert self._eos is not None
        at = len(text.rstrip()) - len(self._eos)
        return text[:at], text[at:]

    def _count(self, found: Counter[str]) -> None:
        self.found += found
        self.samples += 1
        if self.mode == "reject":
            raise SampleRejected("special tokens in its text", ", ".join(sorted(found)))

    def _marked(self, text: str, is_answer: bool = False) -> str:
        def mark(match: re.Match[str]) -> str:
            own = is_answer and self.mode == "auto" and _OWN_WORDS.fullmatch(match[0])
            return match[0] if own else match[0][:1] + MARK + match[0][1:]

        return self._pattern.sub(mark, text)


def _refuse_marks(text: str) -> None:
    if MARK in text or _ALIAS in text:
        raise SampleRejected("a noncharacter (U+FDD0 or U+FDD1) in its text")


class MarkedEncoder:
    """Encodes texts with marks. See [Note: marks]."""

    def __init__(self, backend: Tokenizer, tokens: Sequence[str]):
        state = json.loads(backend.to_str())
        flags = {token["content"]: token for token in state["added_tokens"]}
        self._pattern = re.compile("|".join(re.escape(token) for token in tokens) or r"(?!)")
        self._tokenizer = Tokenizer.from_str(backend.to_str())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.add_tokens(
            [
                AddedToken(
                    _ALIAS + token,
                    special=False,
                    normalized=False,
                    **{name: flags.get(token, {}).get(name, False) for name in ("lstrip", "rstrip", "single_word")},
                )
                for token in tokens
            ]
        )
        self._ids: dict[int | None, Any] = {
            self._tokenizer.token_to_id(_ALIAS + token): backend.token_to_id(token) for token in tokens
        }

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        renamed = [self._pattern.sub(lambda match: _ALIAS + match[0], text).replace(MARK, "") for text in texts]
        return [
            [self._ids.get(i, i) for i in encoding.ids]
            for encoding in self._tokenizer.encode_batch_fast(renamed, add_special_tokens=False)
        ]
