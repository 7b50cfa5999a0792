"""Chats to text, through the checkpoint's own template, with the characters that are trained.

[Note: which characters are trained]
Where the template marks the model's words (`{% generation %}`), its marks are used. Elsewhere an assistant turn is what
the template adds to the conversation before it:

    prompt  = the messages before the turn, with the generation prompt     <|user|>hi<|end|><|assistant|>
    ending  = the messages up to and with the turn                         <|user|>hi<|end|><|assistant|>hello<|end|>
    trained = ending minus prompt                                                                        hello<|end|>

This holds only if the prompt is a prefix of the ending, which is checked for every turn of every sample.

[Note: history that is rewritten]
Some templates render a turn differently once it lies in the past (thinking models drop their thoughts). Such a turn is
trained as the model will produce it: as the end of a text of its own. Turns whose ending is a prefix of a later turn's
ending share that text; one conversation becomes as few samples as that allows, usually one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.data.formats import ChatSample
from megatrain.data.rejects import SampleRejected
from megatrain.errors import UserError

GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Span:
    """Trained characters `begin:end` of a text.

    Attributes:
        turn_end: Where the turn's rendering ends, when this is the last span of a turn: before that place a token must
            end the turn, and it is trained. None: the span is taken as it is.
    """

    begin: int
    end: int
    turn_end: int | None = None


@dataclass(frozen=True)
class Rendered:
    """A text and its trained spans, in order."""

    text: str
    spans: tuple[Span, ...]


class ChatRenderer:
    """Renders conversations with one template.

    Args:
        tokenizer: A Hugging Face tokenizer.
        template_file: A jinja template to use instead of the tokenizer's.
        train_on: assistant | last_assistant | all.

    Attributes:
        name: The template in words, for errors.
        split: Conversations that became several samples, because the template rewrites history.
        unlike_prompt: Turns whose rendering does not begin with the whole generation prompt.
    """

    def __init__(self, tokenizer: Any, template_file: str | None, train_on: str):
        self._tokenizer = tokenizer
        self.train_on = train_on
        self._template: str | None = None
        if template_file is not None:
            file = Path(template_file).expanduser()
            if not file.is_file():
                raise UserError(
                    f"{template_file} does not exist", "data.chat_template", "give a file with a jinja template"
                )
            self._template = file.read_text(encoding="utf-8")
            self.name = f"the chat template {template_file}"
        else:
            self.name = f"the chat template of {getattr(tokenizer, 'name_or_path', '') or 'the tokenizer'}"
        self.split = 0
        self.unlike_prompt = 0

    @property
    def source(self) -> str:
        """The template's own text; what a cache must know of it."""
        return repr(self._template if self._template is not None else self._tokenizer.chat_template)

    def render(self, sample: ChatSample) -> list[Rendered]:
        """The texts that train a conversation; several only if the template rewrites history.

        Raises:
            SampleRejected: The template refuses this conversation, or nothing in it is trained.
            UserError: The template cannot be trained with.
        """
        if self._template is None and not self._tokenizer.chat_template:
            raise UserError(
                f"{getattr(self._tokenizer, 'name_or_path', '') or 'the tokenizer'} has no chat template, and the data is chats",
                where="data.chat_template",
                remedy="give a file with a jinja template (data.chat_template: chat.jinja), or start from an instruct checkpoint",
            )
        if self.train_on == "all":
            return [self._whole(sample)]
        turns = [i for i, message in enumerate(sample.messages) if message["role"] == "assistant"]
        turns = turns[-1:] if self.train_on == "last_assistant" else turns
        turns = [i for i in turns if i >= sample.answers_from and sample.flags[i] is not False]
        if not turns:
            raise SampleRejected("no message is trained: the assistant's are flagged 0")
        tagged = self._has_tags(sample)
        texts: list[Rendered] = []
        for turn in reversed(turns):
            one = self._turn(sample, turn, tagged)
            # [Note: history that is rewritten]
            if texts and texts[-1].text.startswith(one.text):
                texts[-1] = Rendered(texts[-1].text, one.spans + texts[-1].spans)
            else:
                texts.append(one)
        self.split += len(texts) > 1
        return texts[::-1]

    # ---- one turn

    def _turn(self, sample: ChatSample, turn: int, tagged: bool) -> Rendered:
        """The text that ends with the assistant message `turn`, and that turn's spans."""
        before, upto = sample.messages[:turn], sample.messages[: turn + 1]
        if tagged:
            text, marks = self._marks(upto, sample)
            begin = _common_prefix(self._text(before, sample), text)
            marks = [(b, e) for b, e in marks if b >= begin and e > b]
            if not marks:
                raise UserError(
                    f"{self.name} marks no token of an assistant message as generated: nothing would be trained",
                    remedy="repair its {% generation %} blocks, or remove them: spans are then found from the prompts",
                )
            *inner, (last_begin, last_end) = marks
            return Rendered(text, (*(Span(b, e) for b, e in inner), Span(last_begin, last_end, turn_end=len(text))))
        text = self._text(upto, sample)
        begin = self._answer_begin(sample, turn, text)
        if not text[begin:].strip():
            raise UserError(
                f"{self.name} renders an assistant message as nothing: no token would be trained",
                remedy="correct the template; see the message's content and role in it",
            )
        return Rendered(text, (Span(begin, len(text), turn_end=len(text)),))

    def _answer_begin(self, sample: ChatSample, turn: int, text: str) -> int:
        """Where the model's words begin in `text`, which ends with the assistant message `turn`."""
        message, before = sample.messages[turn], sample.messages[:turn]
        history = self._text(before, sample)
        prompt = self._text(before, sample, generation=True)
        if not text.startswith(prompt):
            shared = _common_prefix(prompt, text)
            if not text.startswith(history) or shared < len(history):
                raise UserError(
                    f"{self.name} renders an assistant message differently from the prompt that asks for it: "
                    f"{_around(prompt, shared)} against {_around(text, shared)}",
                    remedy="mark the assistant's words with {% generation %} in a template file (data.chat_template), "
                    "or train on all tokens (data.train_on: all)",
                )
            # The prompt goes on where the turn does not, as with prompts that open a thought: trained from there.
            self.unlike_prompt += 1
            return shared
        begin = len(prompt)
        at = text.find(message["content"].strip(), begin) if message["content"] else -1
        if prompt == history and at > begin and not message.get("reasoning_content"):
            # A template without a generation prompt: the turn's header is not the model's to write.
            header = text[begin:at]
            begin += len(header.rstrip(" "))
        return begin

    def _whole(self, sample: ChatSample) -> Rendered:
        """`train_on: all`: everything but the messages flagged 0."""
        text = self._text(sample.messages, sample)
        spans, begin = [], 0
        for i, flag in enumerate(sample.flags):
            if flag is not False:
                continue
            ends = [self._text(sample.messages[:i], sample) if i else "", self._text(sample.messages[: i + 1], sample)]
            if not all(text.startswith(end) for end in ends):
                raise UserError(
                    f"{self.name} rewrites earlier messages, so that a message flagged 0 cannot be told from the others",
                    remedy="train on the assistant (data.train_on: assistant), or remove the flags",
                )
            spans.append(Span(begin, len(ends[0])))
            begin = len(ends[1])
        spans.append(Span(begin, len(text)))
        return Rendered(text, tuple(span for span in spans if span.end > span.begin))

    # ---- the template

    def _has_tags(self, sample: ChatSample) -> bool:
        template = self._tokenizer.get_chat_template(self._template, sample.tools)
        return GENERATION_TAG.search(template) is not None

    def _text(self, messages: list[dict[str, Any]], sample: ChatSample, generation: bool = False) -> str:
        with _Refusals():
            return self._tokenizer.apply_chat_template(
                messages,
                tools=sample.tools,
                chat_template=self._template,
                add_generation_prompt=generation,
                tokenize=False,
            )

    def _marks(self, messages: list[dict[str, Any]], sample: ChatSample) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the characters inside `{% generation %}`.

        `apply_chat_template` gives these as a mask of tokens only, and only by tokenising each text by itself.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        with _Refusals():
            texts, marks = render_jinja_template(
                conversations=[messages],
                tools=sample.tools,  # pyright: ignore[reportArgumentType]  (a list of schemas is one of its kinds)
                chat_template=self._tokenizer.get_chat_template(self._template, sample.tools),
                return_assistant_tokens_mask=True,
                **self._tokenizer.special_tokens_map,
            )
        return texts[0], [(int(begin), int(end)) for begin, end in marks[0]]


class _Refusals:
    """Turns what a template raises on a conversation into its rejection."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        from jinja2 import TemplateError, TemplateSyntaxError

        if isinstance(error, TemplateSyntaxError):
            raise UserError(
                f"the chat template is not valid jinja: {error.message} (its line {error.lineno})",
                where="data.chat_template",
                remedy="correct the template",
            ) from error
        # Templates are programs: a message without the key they expect fails as any program would.
        if isinstance(error, TemplateError | TypeError | ValueError | LookupError | AttributeError):
            raise SampleRejected("the chat template refuses it", str(error).split("\n", 1)[0]) from error


def _common_prefix(a: str, b: str) -> int:
    """Length of the longest common prefix."""
    if b.startswith(a):
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _around(text: str, place: int) -> str:
    return repr(text[max(0, place - 20) : place + 20])
