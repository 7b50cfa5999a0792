"""Chats to text, through the checkpoint's own template, with the characters that are trained.

[Note: which characters are trained]
Where the template marks the model's words (`{% generation %}`), its marks are used. Elsewhere an assistant turn is what
the template adds to the conversation before it:

    prompt  = the messages before the turn, with the generation prompt     <|user|>hi<|end|><|assistant|>
    ending  = the messages up to and with the turn                         <|user|>hi<|end|><|assistant|>hello<|end|>
    trained = ending minus prompt                                                                        hello<|end|>

This holds only if the prompt is a prefix of the ending, which is checked for every turn of every sample.

[Note: the end of a turn]
The token that ends a turn is trained: else the model would not learn to stop. It is the special token that the template
writes behind the answer; blanks behind it are not the model's words. Some templates write none, because the next turn's
first token ends the one before it (`<|user|>`, `<|observation|>`): then that token is trained, behind the last turn too.

[Note: history that is rewritten]
Some templates render a turn differently once it lies in the past (thinking models drop their thoughts). Such a turn is
trained as the model will produce it: as the end of a text of its own. Turns whose ending is a prefix of a later turn's
ending share that text; one conversation becomes as few samples as that allows, usually one.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatrain.data.formats import ChatSample
from megatrain.data.rejects import SampleRejected
from megatrain.errors import UserError
from megatrain.units import counted

GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Rendered:
    """A text and the ranges `begin:end` of its characters that are trained, in order."""

    text: str
    spans: tuple[tuple[int, int], ...]


class ChatRenderer:
    """Renders conversations with one template.

    Args:
        tokenizer: A Hugging Face tokenizer.
        template_file: A jinja template to use instead of the tokenizer's.
        train_on: assistant | last_assistant | all.

    Attributes:
        name: The template in words, for errors.
    """

    def __init__(self, tokenizer: Any, template_file: str | None, train_on: str):
        self._tokenizer = tokenizer
        self.train_on = train_on
        self._template: str | None = None
        if template_file is not None:
            self._template = read_template(template_file)
            self.name = f"the chat template {template_file}"
        else:
            self.name = f"the chat template of {getattr(tokenizer, 'name_or_path', '') or 'the tokenizer'}"
        self._special = _special_tokens(tokenizer)
        self._happened: Counter[str] = Counter()

    def take_notes(self) -> list[str]:
        """What was noticed since the last call, for people."""
        happened, self._happened = self._happened, Counter()
        return [f"{self.name} {what} ({counted(count, 'time')})" for what, count in sorted(happened.items())]

    @property
    def has_template(self) -> bool:
        """Whether conversations can be rendered at all."""
        return self._template is not None or bool(self._tokenizer.chat_template)

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
        if not self.has_template:
            raise UserError(
                f"{getattr(self._tokenizer, 'name_or_path', '') or 'the tokenizer'} has no chat template, and the data is chats",
                where="data.chat_template",
                remedy="give a file with a jinja template (data.chat_template: chat.jinja), or take an instruct checkpoint; "
                "questions and answers in two columns need none as columns: {prompt: QUESTIONS, completion: ANSWERS}",
            )
        sample = self._with_fitting_calls(sample)
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
        if len(texts) > 1:
            self._happened["rewrites earlier turns; such conversations were expanded into a sample per turn"] += 1
        return texts[::-1]

    # ---- one turn

    def _turn(self, sample: ChatSample, turn: int, tagged: bool) -> Rendered:
        """The text that ends with the assistant message `turn`, and that turn's spans."""
        before, upto = sample.messages[:turn], sample.messages[: turn + 1]
        if tagged:
            text, marks = self._marks(upto, sample)
            history = _common_prefix(self._text(before, sample), text)
            spans = [(begin, end) for begin, end in marks if begin >= history and end > begin]
            if not spans:
                raise UserError(
                    f"{self.name} marks no token of an assistant message as generated: nothing would be trained",
                    remedy="repair its {% generation %} blocks, or remove them: spans are then found from the prompts",
                )
        else:
            text = self._text(upto, sample)
            spans = [(self._answer_begin(sample, turn, text), len(text))]
            if not text[spans[0][0] :].strip():
                raise UserError(
                    f"{self.name} renders an assistant message as nothing: no token would be trained",
                    remedy="correct the template; see the message's content and role in it",
                )
        message = sample.messages[turn]
        for what in ("content", "reasoning_content"):
            if not _holds(text[spans[0][0] :], message.get(what, "")):
                self._happened[f"leaves out words of an answer's {what}; they are not trained"] += 1
        return self._ended(sample, turn, text, spans)

    def _ended(self, sample: ChatSample, turn: int, text: str, spans: list[tuple[int, int]]) -> Rendered:
        """[Note: the end of a turn]"""
        *inner, (begin, end) = spans
        words = text[begin:end].rstrip()
        if words.endswith(self._special):
            return Rendered(text, (*inner, (begin, begin + len(words))))
        # A generation block may stop before the token.
        behind = text[end:].lstrip()
        if token := self._special_at(behind):
            return Rendered(text, (*inner, (begin, len(text) - len(behind) + len(token))))
        answer = {k: v for k, v in sample.messages[turn].items() if k not in ("reasoning_content", "thinking")}
        following = sample.messages[turn + 1 : turn + 2] or [{"role": "user", "content": "x"}]
        upto = self._text([*sample.messages[:turn], answer], sample)
        more = self._text([*sample.messages[:turn], answer, *following], sample)
        behind = more.removeprefix(upto) if more.startswith(upto) else ""
        token = self._special_at(behind.lstrip())
        if not token:
            raise UserError(
                f"{self.name} puts no special token behind the assistant's words: the model would not learn to stop",
                remedy="write {{ eos_token }} there in a template file (data.chat_template)",
            )
        self._happened[f"ends an answer only by the {token} of the next turn; generation must stop there"] += 1
        text += behind[: behind.index(token) + len(token)]
        return Rendered(text, (*inner, (begin, len(text))))

    def _special_at(self, text: str) -> str:
        """The special token that a text begins with, or nothing."""
        return max((token for token in self._special if text.startswith(token)), key=len, default="")

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
            self._happened["writes a generation prompt that goes on where the answers do not"] += 1
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
        spans: list[tuple[int, int]] = []
        begin = 0
        for i, flag in enumerate(sample.flags):
            if flag is not False:
                continue
            ends = [self._text(sample.messages[:i], sample) if i else "", self._text(sample.messages[: i + 1], sample)]
            if not all(text.startswith(end) for end in ends):
                raise UserError(
                    f"{self.name} rewrites earlier messages, so that a message flagged 0 cannot be told from the others",
                    remedy="train on the assistant (data.train_on: assistant), or remove the flags",
                )
            spans.append((begin, len(ends[0])))
            begin = len(ends[1])
        spans.append((begin, len(text)))
        return Rendered(text, tuple(span for span in spans if span[1] > span[0]))

    # ---- the template

    def _with_fitting_calls(self, sample: ChatSample) -> ChatSample:
        """Most templates take the arguments of a tool call as an object; some join them as JSON text."""
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
        with _Refusals():
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


def read_template(path: str) -> str:
    """The text of a template file.

    Raises:
        UserError: It is no file that can be read.
    """
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
    raise UserError(f"{path} {what}", "data.chat_template", "give a file with a jinja template")


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


def _special_tokens(tokenizer: Any) -> tuple[str, ...]:
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    return tuple({*tokenizer.all_special_tokens, *(token.content for token in added if token.special)})


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
    """Whether words are in a text, blanks aside."""
    return words.strip() in text or "".join(words.split()) in "".join(text.split())


def _common_prefix(a: str, b: str) -> int:
    """Length of the longest common prefix."""
    if b.startswith(a):
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _around(text: str, place: int) -> str:
    return repr(text[max(0, place - 20) : place + 20])
