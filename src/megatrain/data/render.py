"""Samples to token ids and masks: chats become text through the chat template, text becomes ids through the tokenizer.

[Note: which characters are trained]
If the template marks the model's words with `{% generation %}`, the marks are used. Otherwise an assistant turn is the text
that the template adds to the conversation before it:

    prompt  = messages before the turn, with the generation prompt      <|user|>hi<|end|><|assistant|>
    ending  = messages up to and including the turn                     <|user|>hi<|end|><|assistant|>hello<|end|>
    trained = ending minus prompt                                                                     hello<|end|>

This requires the prompt to be a prefix of the ending, which is checked for every turn of every sample.

[Note: the end of a turn]
The token that ends a turn is trained, or the model would never learn to stop. It is the special token that the template
writes after the answer; whitespace after it is not trained. Some templates write none, because the first token of the next
turn (`<|user|>`, `<|observation|>`) ends the answer: then that token is trained, after the last turn too.

[Note: rewritten history]
Some templates render a turn differently once it is in the past (thinking models drop its reasoning). Each turn is trained the
way the model will generate it, at the end of a text. Turns whose ending is a prefix of a later turn's ending share
that text, so a conversation becomes as few samples as possible, usually one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatrain.data.formats import ChatSample, SampleRejected
from megatrain.errors import UserError
from megatrain.units import counted

GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Rendered:
    """A text, and the character ranges `begin:end` of it that are trained, in order."""

    text: str
    spans: tuple[tuple[int, int], ...]


class ChatRenderer:
    """Renders conversations with the tokenizer's template, or with the jinja template in a file."""

    def __init__(self, tokenizer: Any, template_file: str | None, train_on: str):
        self._tokenizer, self.train_on = tokenizer, train_on
        self._model = getattr(tokenizer, "name_or_path", "") or "the tokenizer"
        self.name = f"the chat template {template_file or f'of {self._model}'}"  # in errors
        self._template = read_template(template_file) if template_file is not None else None
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        self._special = tuple({*tokenizer.all_special_tokens, *(token.content for token in added if token.special)})
        self._remarks: Counter[str] = Counter()

    def take_notes(self) -> list[str]:
        """Remarks for the log since the last call."""
        remarks, self._remarks = self._remarks, Counter()
        return [f"{self.name} {what} ({counted(count, 'time')})" for what, count in sorted(remarks.items())]

    @property
    def has_template(self) -> bool:
        return self._template is not None or bool(self._tokenizer.chat_template)

    @property
    def source(self) -> str:
        """The template's text, which is part of the cache key."""
        return repr(self._template if self._template is not None else self._tokenizer.chat_template)

    def render(self, sample: ChatSample) -> list[Rendered]:
        """Render a conversation to one text, or to several if the template rewrites history.

        Raises:
            SampleRejected: The template refuses this conversation, or nothing in it is trained.
            UserError: There is no template, or it cannot be used for training.
        """
        if not self.has_template:
            raise UserError(
                f"{self._model} has no chat template, but the data is chats",
                "data.chat_template",
                "give a jinja template file (data.chat_template: chat.jinja), or use an instruct model; questions and "
                "answers in two columns need no template as columns: {prompt: QUESTIONS, completion: ANSWERS}",
            )
        sample = self._with_fitting_calls(sample)
        if self.train_on == "all":
            return [self._whole(sample)]
        turns = [i for i, message in enumerate(sample.messages) if message["role"] == "assistant"]
        turns = turns[-1:] if self.train_on == "last_assistant" else turns
        turns = [i for i in turns if i >= sample.answers_from and sample.flags[i] is not False]
        if not turns:
            raise SampleRejected("no message is trained: all of the assistant's are flagged 0")
        tagged = self._has_tags(sample)
        texts: list[Rendered] = []
        for turn in reversed(turns):
            one = self._turn(sample, turn, tagged)
            # [Note: rewritten history]
            if texts and texts[-1].text.startswith(one.text):
                texts[-1] = Rendered(texts[-1].text, one.spans + texts[-1].spans)
            else:
                texts.append(one)
        if len(texts) > 1:
            self._remarks["rewrites earlier turns; these conversations were split into a sample per turn"] += 1
        return texts[::-1]

    def _turn(self, sample: ChatSample, turn: int, tagged: bool) -> Rendered:
        """The text up to and including the assistant message `turn`, and the spans of that message."""
        before, upto = sample.messages[:turn], sample.messages[: turn + 1]
        if tagged:
            text, marks = self._marks(upto, sample)
            history = _common_prefix(self._text(before, sample), text)
            spans = [(begin, end) for begin, end in marks if begin >= history and end > begin]
            if not spans:
                what = f"{self.name} marks no token of an assistant message as generated, so nothing would be trained"
                remedy = "correct its {% generation %} blocks, or remove them: answers are then found from the prompts"
                raise UserError(what, remedy=remedy)
        else:
            text = self._text(upto, sample)
            spans = [(self._answer_begin(sample, turn, text), len(text))]
            if not text[spans[0][0] :].strip():
                what = f"{self.name} renders an assistant message as nothing, so no token would be trained"
                raise UserError(what, remedy="correct the template: it must write the message's content")
        message = sample.messages[turn]
        for what in ("content", "reasoning_content"):
            if not _holds(text[spans[0][0] :], message.get(what, "")):
                self._remarks[f"leaves out part of an answer's {what}, which is not trained"] += 1
        return self._ended(sample, turn, text, spans)

    def _ended(self, sample: ChatSample, turn: int, text: str, spans: list[tuple[int, int]]) -> Rendered:
        """The text with its last span extended to the end-of-turn token. See [Note: the end of a turn]."""
        *inner, (begin, end) = spans
        words = text[begin:end].rstrip()
        if words.endswith(self._special):
            return Rendered(text, (*inner, (begin, begin + len(words))))
        # A generation block may end before the token.
        after = text[end:].lstrip()
        if token := self._special_at(after):
            return Rendered(text, (*inner, (begin, len(text) - len(after) + len(token))))
        answer = {k: v for k, v in sample.messages[turn].items() if k not in ("reasoning_content", "thinking")}
        following = sample.messages[turn + 1 : turn + 2] or [{"role": "user", "content": "x"}]
        upto = self._text([*sample.messages[:turn], answer], sample)
        more = self._text([*sample.messages[:turn], answer, *following], sample)
        after = more.removeprefix(upto) if more.startswith(upto) else ""
        token = self._special_at(after.lstrip())
        if not token:
            what = f"{self.name} writes no special token after an answer: the model would not learn to stop"
            raise UserError(what, remedy="add {{ eos_token }} there in a template file (data.chat_template)")
        self._remarks[f"ends an answer only with the {token} of the next turn; generation must stop at that token"] += 1
        text += after[: after.index(token) + len(token)]
        return Rendered(text, (*inner, (begin, len(text))))

    def _special_at(self, text: str) -> str:
        """The special token at the beginning of a text, or an empty string."""
        return max((token for token in self._special if text.startswith(token)), key=len, default="")

    def _answer_begin(self, sample: ChatSample, turn: int, text: str) -> int:
        """Index in `text`, which ends with the assistant message `turn`, where that answer begins."""
        message, before = sample.messages[turn], sample.messages[:turn]
        history = self._text(before, sample)
        prompt = self._text(before, sample, generation=True)
        if not text.startswith(prompt):
            shared = _common_prefix(prompt, text)
            if not text.startswith(history) or shared < len(history):
                raise UserError(
                    f"{self.name} renders an assistant message differently from the prompt before it: "
                    f"{_around(prompt, shared)} against {_around(text, shared)}",
                    remedy="mark the answers with {% generation %} in a template file (data.chat_template), "
                    "or train on all tokens (data.train_on: all)",
                )
            # The generation prompt adds text that the turn lacks, such as an opened thought: train from where they part.
            self._remarks["adds text to the generation prompt that the answers do not have"] += 1
            return shared
        begin = len(prompt)
        at = text.find(message["content"].strip(), begin) if message["content"] else -1
        if prompt == history and at > begin and not message.get("reasoning_content"):
            # A template without a generation prompt: the turn's header is not trained.
            header = text[begin:at]
            begin += len(header.rstrip(" "))
        return begin

    def _whole(self, sample: ChatSample) -> Rendered:
        """`train_on: all`: everything except messages flagged 0."""
        text = self._text(sample.messages, sample)
        spans: list[tuple[int, int]] = []
        begin = 0
        for i, flag in enumerate(sample.flags):
            if flag is not False:
                continue
            ends = [self._text(sample.messages[:i], sample) if i else "", self._text(sample.messages[: i + 1], sample)]
            if not all(text.startswith(end) for end in ends):
                what = f"{self.name} rewrites earlier messages, so a message flagged 0 cannot be located"
                raise UserError(what, remedy="set data.train_on: assistant, or remove the flags")
            spans.append((begin, len(ends[0])))
            begin = len(ends[1])
        spans.append((begin, len(text)))
        return Rendered(text, tuple(span for span in spans if span[1] > span[0]))

    def _with_fitting_calls(self, sample: ChatSample) -> ChatSample:
        """Convert tool call arguments to JSON text for templates that fail on objects."""
        if not any(message.get("tool_calls") for message in sample.messages):
            return sample
        try:
            self._text(sample.messages, sample)
        except SampleRejected as refusal:
            if not isinstance(refusal.__cause__, TypeError):
                raise
            return replace(sample, messages=[_with_text_arguments(message) for message in sample.messages])
        return sample

    def _has_tags(self, sample: ChatSample) -> bool:
        with _refusals():
            template = self._tokenizer.get_chat_template(self._template, sample.tools)
            return GENERATION_TAG.search(template) is not None

    def _text(self, messages: list[dict[str, Any]], sample: ChatSample, generation: bool = False) -> str:
        with _refusals():
            options = {"tools": sample.tools, "chat_template": self._template, "tokenize": False}
            return self._tokenizer.apply_chat_template(messages, add_generation_prompt=generation, **options)

    def _marks(self, messages: list[dict[str, Any]], sample: ChatSample) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the character ranges inside `{% generation %}`.

        `apply_chat_template` returns them only as a token mask, and only if it tokenizes each text itself.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        with _refusals():
            texts, marks = render_jinja_template(
                conversations=[messages],
                tools=sample.tools,  # pyright: ignore[reportArgumentType]  (a list of schemas is one of its kinds)
                chat_template=self._tokenizer.get_chat_template(self._template, sample.tools),
                return_assistant_tokens_mask=True,
                **self._tokenizer.special_tokens_map,
            )
        return texts[0], [(int(begin), int(end)) for begin, end in marks[0]]


def read_template(path: str) -> str:
    """The text of a template file; UserError if it cannot be read."""
    file = Path(path).expanduser()
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        what = "does not exist"
    except IsADirectoryError:
        what = "is a folder"
    except UnicodeDecodeError:
        what = "is not UTF-8 text"
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
    raise UserError(f"{path} {what}", "data.chat_template", "give a jinja template file")


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn an exception from a template into the rejection of the conversation."""
    from jinja2 import TemplateError, TemplateSyntaxError

    try:
        yield
    except TemplateSyntaxError as error:
        what = f"the chat template is not valid jinja: {error.message} (its line {error.lineno})"
        raise UserError(what, "data.chat_template", "correct the template") from error
    # Templates are programs: a missing key fails in any of these ways.
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise SampleRejected("the chat template refuses it", str(error).split("\n", 1)[0]) from error


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    import orjson

    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
        calls.append({**call, "function": {**call["function"], "arguments": text}})
    return {**message, "tool_calls": calls}


def _holds(text: str, words: str) -> bool:
    """Whether a text contains the words, apart from whitespace."""
    return words.strip() in text or "".join(words.split()) in "".join(text.split())


def _common_prefix(a: str, b: str) -> int:
    """Length of the longest common prefix."""
    if b.startswith(a):
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _around(text: str, place: int) -> str:
    return repr(text[max(0, place - 20) : place + 20])


class Encoder:
    """Turns texts into token ids and masks, in batches, on the tokenizer's threads."""

    def __init__(self, tokenizer: Any):
        from tokenizers import Tokenizer

        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._backend: Tokenizer | None = backend if isinstance(backend, Tokenizer) else None
        if self._backend is not None:
            # A tokenizer.json may contain truncation and padding from an earlier use.
            self._backend.no_truncation()
            self._backend.no_padding()
        self.bos: int | None = tokenizer.bos_token_id
        eos: int | None = tokenizer.eos_token_id
        # Fills rows. Padding is masked by position, so the id may equal EOS.
        self.pad: int = next((i for i in (tokenizer.pad_token_id, eos) if i is not None), 0)
        bare = tokenizer("a", add_special_tokens=False)["input_ids"]
        full = tokenizer("a", add_special_tokens=True)["input_ids"]
        at = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), None)
        if at is None:
            raise UserError(f"the tokenizer changes a text when it adds special tokens: {bare} became {full}")
        # Before a plain text document (BOS, if the tokenizer adds it by itself), and after it (last EOS, if there is one).
        self.prefix, self.suffix = list(full[:at]), list(full[at + len(bare) :])
        if eos is not None and self.suffix[-1:] != [eos]:
            self.suffix.append(eos)
        self._straddled = 0

    def fingerprint(self) -> str:
        """Hash of everything that determines the ids of a text."""
        import tokenizers
        import transformers

        state = self._backend.to_str() if self._backend is not None else json.dumps(self._tokenizer.get_vocab())
        ends = [self.prefix, self.suffix, sorted(self._tokenizer.special_tokens_map.items(), key=str)]
        versions = [type(self._tokenizer).__name__, tokenizers.__version__, transformers.__version__]
        return hashlib.sha256("\n".join([state, repr(ends), *versions]).encode()).hexdigest()

    def take_notes(self) -> list[str]:
        """Remarks for the log since the last call."""
        straddled, self._straddled = self._straddled, 0
        if not straddled:
            return []
        which = "1 answer begins" if straddled == 1 else f"{straddled:,} answers begin"
        return [f"{which} in the middle of a token; that token is not trained"]

    def ids(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids (uint32) of each text, without special tokens. Faster than `masked_ids`: no offsets are computed."""
        if self._backend is None:
            rows = self._tokenizer(list(texts), add_special_tokens=False)["input_ids"]
            return [np.asarray(row, dtype=np.uint32) for row in rows]
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def masked_ids(self, texts: Sequence[Rendered]) -> list[tuple[np.ndarray, np.ndarray]]:
        """The ids (uint32) of each text, and which of them are trained (bool).

        Each text is tokenized once, as a whole; the tokenizer's offsets (UserError if it has none) map its spans to tokens.
        """
        if self._backend is None:
            what = f"the tokenizer ({type(self._tokenizer).__name__}) has no character offsets, which masks need"
            raise UserError(what, remedy="use a checkpoint with a tokenizer.json")
        encodings = self._backend.encode_batch([text.text for text in texts], add_special_tokens=False)
        results = []
        for rendered, encoding in zip(texts, encodings, strict=True):
            offsets = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2)
            results.append((np.asarray(encoding.ids, dtype=np.uint32), self._mask(rendered.spans, offsets)))
        return results

    def _mask(self, spans: Sequence[tuple[int, int]], offsets: np.ndarray) -> np.ndarray:
        """Mask of the tokens that lie in a span. `offsets`: (N, 2) character ranges of the tokens."""
        mask = np.zeros(len(offsets), dtype=bool)
        begins, ends = offsets[:, 0], offsets[:, 1]
        for begin, end in spans:
            # A token across the border belongs to the prompt: generation never starts in the middle of a token.
            mask |= (begins >= begin) & (begins < end) & (ends > begin)
            self._straddled += bool(((begins < begin) & (ends > begin)).any())
        return mask
