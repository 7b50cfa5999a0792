"""Samples to text: chats are rendered by the chat template, with the ranges that are trained. `encoder.py` turns texts into ids.

[Note: which characters are trained]
An answer is what the model writes after the prompt that it gets at inference:

    prompt = messages before the turn, with the generation prompt      <|user|>hi<|end|><|assistant|>
    text   = messages up to and including the turn                     <|user|>hi<|end|><|assistant|>hello<|end|>
    answer = text minus prompt                                                                       hello<|end|>

This requires the prompt to be a prefix of the text, which is checked for every turn of every sample. If the generation prompt
has more than the rendered turn (it opens a thought, or ends in a space), the answer is joined to the prompt as it is, see
`_joined`. A template without a generation prompt gets the turn's header as its prompt, see `_header`. If the template marks
the model's words with `{% generation %}`, only the marked part of an answer is trained.

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

import contextlib
import datetime
import functools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from megatrain.data.coverage import Coverage
from megatrain.data.formats import ChatSample, SampleRejected
from megatrain.data.specials import MARK
from megatrain.data.template_names import TemplateNames, names_of
from megatrain.data.values import WrittenObject, common_prefix, dumps
from megatrain.errors import UserError
from megatrain.units import counted

GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
OPENED_THOUGHT = re.compile(r"(<(\w+)>|\[([A-Z]+)\]|<\|START_(\w+)\|>)\s*$")
"""A generation prompt that ends by opening a thought: `<think>`, `[THINK]`, `<|START_THINKING|>`."""
CLOSED_THOUGHT = re.compile(r"<(\w+)>\s*</\1>\s*$")
"""A generation prompt that forbids thoughts."""
THOUGHT_END = re.compile(r"</\w+>\s*")
EMPTY_THOUGHT = re.compile(r"(<\w+>|\[[A-Z]+\]|<\|START_\w+\|>)?\s*(</\w+>|\[/[A-Z]+\]|<\|END_\w+\|>)")
SENTINEL = "zqxHEADzqx"
REASONING = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True)
class Rendered:
    """A text, the character ranges `begin:end` of it that are trained, in order, and where inference hands over to the model."""

    text: str
    spans: tuple[tuple[int, int], ...]
    cuts: tuple[int, ...] = ()  # ends of prompts

    def pieces(self) -> Iterator[tuple[int, int, bool]]:
        """(begin, end, trained) of the ranges that are tokenized one by one. See [Note: prompt ids and answer ids]."""
        borders = sorted({0, len(self.text), *self.cuts, *(place for span in self.spans for place in span)})
        for begin, end in zip(borders, borders[1:], strict=False):
            yield begin, end, any(first <= begin and end <= last for first, last in self.spans)


class ChatRenderer:
    """Renders conversations with the tokenizer's template, or with the jinja template in a file.

    Args:
        left_out: What to do with a conversation of which the template leaves something out: `reject` it, or `warn`.
        keywords: For the template; those of a conversation come first.
        date: Date that the template reads instead of today's, YYYY-MM-DD.
    """

    def __init__(
        self,
        tokenizer: Any,
        template_file: str | None,
        train_on: str,
        left_out: Literal["reject", "warn"] = "reject",
        keywords: Mapping[str, Any] | None = None,
        date: str | None = None,
    ):
        self._tokenizer, self.train_on, self.on_left_out = tokenizer, train_on, left_out
        self._model = getattr(tokenizer, "name_or_path", "") or "the tokenizer"
        self.name = f"the chat template {template_file or f'of {self._model}'}"  # in errors
        self._template = read_template(template_file) if template_file is not None else None
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        self._special = tuple({*tokenizer.all_special_tokens, *(token.content for token in added if token.special)})
        self._keywords = dict(keywords or {})
        self._date = datetime.datetime.fromisoformat(date) if date is not None else datetime.datetime.now()
        self._remarks: Counter[str] = Counter()
        self._left_out: Counter[str] = Counter()
        self._coverage = Coverage()
        self._generation_prompts: dict[str, str] = {}  # by the role of the message before
        self._headers: dict[str, str] = {}  # of templates without a generation prompt, by the same
        self._text_arguments = False  # whether the template takes the arguments of calls as JSON text
        self.turn_ends: set[str] = set()  # tokens that ended the answers since `take_turn_ends`

    def take_notes(self) -> list[str]:
        """Remarks for the log since the last call."""
        remarks, self._remarks = self._remarks, Counter()
        return [
            f"{'warning: ' if what.startswith('leaves out') else ''}{self.name} {what} ({counted(count, 'time')})"
            for what, count in sorted(remarks.items())
        ]

    def take_left_out(self) -> dict[str, int]:
        """Parts that the template left out since the last call, each with the number of samples."""
        left_out, self._left_out = self._left_out, Counter()
        return dict(sorted(left_out.items()))

    def probe_turn_ends(self) -> list[str]:
        """The tokens with which the template ends an answer, found by rendering one."""
        remarks, before = self._remarks.copy(), set(self.turn_ends)
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": SENTINEL}]
        with contextlib.suppress(SampleRejected, UserError):
            self._turn(ChatSample(messages, (None, None)), 1, tagged=False)
        ends, self.turn_ends, self._remarks = self.turn_ends, before, remarks
        return sorted(ends)

    def take_turn_ends(self) -> list[int]:
        """Ids of the tokens that ended the trained answers since the last call."""
        ends, self.turn_ends = self.turn_ends, set()
        return sorted(self._tokenizer.convert_tokens_to_ids(token) for token in ends)

    @property
    def has_template(self) -> bool:
        return self._template is not None or bool(self._tokenizer.chat_template)

    @property
    def source(self) -> str:
        """The template's text, which is part of the cache key."""
        return repr(self._template if self._template is not None else self._tokenizer.chat_template)

    @functools.cached_property
    def names(self) -> TemplateNames:
        """What the template mentions."""
        template = self._template if self._template is not None else self._tokenizer.chat_template
        return names_of(template.values() if isinstance(template, dict) else [template] if template else [])

    @property
    def settings(self) -> tuple[str, ...]:
        """Everything that determines the texts, for the cache key."""
        date = self._date.date().isoformat() if "strftime_now" in self.source else ""
        return self.train_on, self.on_left_out, self.source, repr(sorted(self._keywords.items())), date

    def render(self, sample: ChatSample) -> list[Rendered]:
        """Render a conversation to one text, or to several if the template rewrites history.

        Raises:
            SampleRejected: The template refuses this conversation or leaves part of it out, or nothing in it is trained.
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
        turns = [i for i, message in enumerate(sample.messages) if message["role"] == "assistant"]
        if self.train_on == "all":
            whole = self._whole(sample)
            trained = [i for i in turns if sample.flags[i] is not False]
            self._check_left_out(sample, [(len(sample.messages) - 1, whole.text, whole.text)], trained)
            self._learn_turn_end(sample, turns[-1])
            return [whole]
        turns = turns[-1:] if self.train_on == "last_assistant" else turns
        turns = [i for i in turns if i >= sample.answers_from and sample.flags[i] is not False]
        if not turns:
            raise SampleRejected("no message is trained: all of the assistant's are flagged 0")
        tagged = self._has_tags(sample)
        texts: list[Rendered] = []
        rendered: list[tuple[int, str, str]] = []  # turn, text, answer
        for turn in reversed(turns):
            one = self._turn(sample, turn, tagged)
            rendered.append((turn, one.text, one.text[one.cuts[-1] :]))
            # [Note: rewritten history]
            if texts and texts[-1].text.startswith(one.text):
                last = texts[-1]
                texts[-1] = Rendered(last.text, one.spans + last.spans, one.cuts + last.cuts)
            else:
                texts.append(one)
        self._check_left_out(sample, rendered, turns)
        if len(texts) > 1:
            self._remarks["rewrites earlier turns; these conversations were split into a sample per turn"] += 1
        if turns[-1] < len(sample.messages) - 1 and self.train_on == "assistant":
            self._remarks["is not asked for the messages after the last trained answer, which are not read"] += 1
        return texts[::-1]

    # ---- one turn

    def _turn(self, sample: ChatSample, turn: int, tagged: bool) -> Rendered:
        """The text up to and including the assistant message `turn`, and the spans of that message."""
        return self._ended(sample, turn, self._answered(sample, turn, tagged))

    def _answered(self, sample: ChatSample, turn: int, tagged: bool) -> Rendered:
        """As `_turn`, but the last span ends where the template's text for the turn ends."""
        before, upto = sample.messages[:turn], sample.messages[: turn + 1]
        prompt = self._text(before, sample, generation=True)
        text, marks = self._render(upto, sample, marks=tagged)
        begin = len(prompt)
        if not text.startswith(prompt):
            if tagged:
                what = "has generation blocks that do not fit its generation prompt: answers are trained whole"
                self._remarks[what] += 1
            text = self._joined(sample, turn, prompt, text)
            return Rendered(text, ((begin, len(text)),), (begin,))
        if not tagged:
            begin += len(self._header(sample, turn, prompt, text))
            return Rendered(text, ((begin, len(text)),), (begin,))
        history = common_prefix(self._text(before, sample), text)
        spans = tuple((first, last) for first, last in marks if first >= history and last > first)
        if not spans:
            what = f"{self.name} marks no token of an assistant message as generated, so nothing would be trained"
            remedy = "correct its {% generation %} blocks, or remove them: answers are then found from the prompts"
            raise UserError(what, remedy=remedy)
        return Rendered(text, spans, (begin,))

    def _header(self, sample: ChatSample, turn: int, prompt: str, text: str) -> str:
        """What a template without a generation prompt writes between the history and the answer; empty with one.

        It is what stands before the content of a turn whose content is a word that occurs nowhere else.
        """
        before = sample.messages[:turn]
        kind = before[-1]["role"] if before else ""
        known = self._generation_prompts.get(kind)
        if known and prompt.endswith(known):
            return ""
        history = self._text(before, sample) if before else ""
        if prompt != history:
            if prompt.startswith(history):
                self._generation_prompts[kind] = prompt[len(history) :]
            return ""
        answer = text[len(prompt) :]
        header = self._headers.get(kind)
        if header is None or not answer.startswith(header):
            marked = self._text([*before, {"role": "assistant", "content": SENTINEL}], sample)
            found = marked.removeprefix(prompt).partition(SENTINEL)
            header = found[0] if marked.startswith(prompt) and found[1] else ""
            # After `[/INST]` the model itself writes the space before its first word.
            header = header[: common_prefix(header, answer)] if header.strip() else ""
            self._headers[kind] = header
        if header:
            what = f"writes no generation prompt: generation must begin after {header!r}, which no tool adds by itself"
            self._remarks[what] += 1
        return header

    def _joined(self, sample: ChatSample, turn: int, prompt: str, text: str) -> str:
        """The prompt and the answer, where the generation prompt has text that the rendered turn lacks.

        An opened thought is continued with the record's thought, or closed if it has none, as the model must do at inference.
        """
        history = self._text(sample.messages[:turn], sample) if turn else ""
        shared = common_prefix(prompt, text)
        if not text.startswith(history) or shared < len(history):
            answer = self._answer_after(
                sample, turn, prompt.removeprefix(history) if prompt.startswith(history) else "", text
            )
            if answer:
                self._remarks["renders earlier messages differently before and after an answer: as before it"] += 1
                return prompt + answer
            raise SampleRejected(
                f"{self.name} renders an assistant message differently from the prompt before it (mark the answers with "
                "{% generation %} in a template file, data.chat_template, or train on all tokens, data.train_on: all)",
                f"{_around(prompt, shared)} against {_around(text, shared)}",
            )
        closed = CLOSED_THOUGHT.search(prompt, len(history))
        opened = OPENED_THOUGHT.search(prompt, len(history))
        for thought in (closed, opened):
            if thought is not None and thought.start() < shared < thought.end(1):
                shared = thought.start()  # `<table>` and `<think>` begin alike
        extra, answer = prompt[shared:], text[shared:]
        message = sample.messages[turn]
        content = message.get("content") or ""
        if closed is not None:
            self._remarks["closes the thought in the generation prompt: answers are trained without thoughts"] += 1
            return prompt + answer[max((match.end() for match in THOUGHT_END.finditer(answer)), default=0) :].lstrip()
        if opened is None or opened.start() < shared:
            self._remarks[
                "adds text to the generation prompt that the answers do not have; it was put before them"
            ] += 1
            return prompt + (answer.lstrip() if extra[-1:].isspace() and not content[:1].isspace() else answer)
        opener = opened[1]
        closer = f"</{opened[2]}>" if opened[2] else f"[/{opened[3]}]" if opened[3] else f"<|END_{opened[4]}|>"
        if closer in answer:  # the thought is there, without its opener
            return prompt + answer.lstrip()
        thought, _, words = content.rpartition(closer)
        if thought:  # as the record writes it
            space = words[: len(words) - len(words.lstrip())]
            return prompt + thought.lstrip().removeprefix(opener).lstrip() + closer + space + answer.lstrip()
        answer = answer if content[:1].isspace() else answer.lstrip("\n")
        thought = next((message[key].strip() for key in REASONING if message.get(key)), "")
        if not thought:
            self._remarks[f"opens a thought in the generation prompt; answers without one begin with {closer}"] += 1
        # `<think>` alone on a line, or with the thought on its line, as the generation prompt begins it
        return prompt + (f"{thought}\n{closer}\n\n{answer}" if extra.endswith("\n") else f"{thought}{closer}{answer}")

    def _answer_after(self, sample: ChatSample, turn: int, generation_prompt: str, text: str) -> str:
        """The answer in `text`, behind its own generation prompt; empty if that is not found.

        Some templates render earlier messages otherwise once the answer is there: gpt-oss drops the thoughts before it.
        """
        marked = self._text([*sample.messages[:turn], {"role": "assistant", "content": SENTINEL}], sample)
        at = text.rfind(generation_prompt, 0, common_prefix(marked, text)) if generation_prompt else -1
        return text[at + len(generation_prompt) :] if at >= 0 else ""

    def _ended(self, sample: ChatSample, turn: int, rendered: Rendered) -> Rendered:
        """The text with its last span extended to the end-of-turn token. See [Note: the end of a turn]."""
        text, (*inner, (begin, end)), cuts = rendered.text, rendered.spans, rendered.cuts
        words = text[begin:end].rstrip()
        if words.endswith(self._special):
            token = max((token for token in self._special if words.endswith(token)), key=len)
            if not inner:
                self._check_not_empty(sample.messages[turn], words.removesuffix(token))
            self.turn_ends.add(token)
            return Rendered(text, (*inner, (begin, begin + len(words))), cuts)
        if not inner:
            self._check_not_empty(sample.messages[turn], words)
        # A generation block may end before the token.
        after = text[end:].lstrip()
        if token := self._special_at(after):
            self.turn_ends.add(token)
            return Rendered(text, (*inner, (begin, len(text) - len(after) + len(token))), cuts)
        # without thoughts, which a following message would remove
        answered = [{k: v for k, v in one.items() if k not in REASONING} for one in sample.messages[: turn + 1]]
        following = sample.messages[turn + 1 : turn + 2] or [{"role": "user", "content": "x"}]
        upto, more = self._text(answered, sample), self._text([*answered, *following], sample)
        after = more.removeprefix(upto) if more.startswith(upto) else ""
        token = self._special_at(after.lstrip())
        if not token:
            what = f"{self.name} writes no special token after an answer: the model would not learn to stop"
            raise UserError(what, remedy="add {{ eos_token }} there in a template file (data.chat_template)")
        self._remarks[f"ends an answer only with the {token} of the next turn; generation must stop at that token"] += 1
        self.turn_ends.add(token)
        text += after[: after.index(token) + len(token)]
        return Rendered(text, (*inner, (begin, len(text))), cuts)

    def _check_not_empty(self, message: Mapping[str, Any], words: str) -> None:
        """Refuse a turn of which nothing but its end token, and perhaps an empty thought, would be trained."""
        if not words.strip() or (
            not (message.get("content") or "").strip() and not EMPTY_THOUGHT.sub("", words).strip()
        ):
            what = (
                "leaves out tool calls, and writes an empty answer"
                if message.get("tool_calls")
                else "writes an empty answer"
            )
            raise SampleRejected(f"{self.name} {what}")

    def _special_at(self, text: str) -> str:
        """The special token at the beginning of a text, or an empty string."""
        return max((token for token in self._special if text.startswith(token)), key=len, default="")

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

    def _learn_turn_end(self, sample: ChatSample, turn: int) -> None:
        """Fill `turn_ends` for `train_on: all`, which needs no spans of answers."""
        if not self.turn_ends:
            try:
                self._turn(sample, turn, tagged=False)
            except (SampleRejected, UserError):
                return  # all tokens are trained, wherever an answer ends

    # ---- what the template leaves out

    def _check_left_out(
        self, sample: ChatSample, rendered: Sequence[tuple[int, str, str]], turns: Sequence[int]
    ) -> None:
        """Reject or count a conversation of which the template leaves something out. `rendered`: (turn, text, answer)."""

        def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
            changed = replace(sample, messages=messages, tools=tools)
            if self.train_on == "all":
                return self._text(messages, changed)
            return self._answered(changed, len(messages) - 1, tagged=False).text

        remarks = self._remarks.copy()
        parts = self._coverage.left_out(
            sample.messages, sample.tools, rendered, set(turns), render, tuple(map(repr, sample.keywords.items()))
        )
        self._remarks = remarks  # without those of changed conversations
        if not parts:
            return
        self._left_out.update(parts)
        listed = ", ".join(parts)
        if self.on_left_out == "reject":
            raise SampleRejected(f"{self.name} leaves out {listed} (data.left_out: warn would train without)")
        self._remarks[f"leaves out {listed}; these samples are trained without"] += 1

    # ---- rendering

    def _with_fitting_calls(self, sample: ChatSample) -> ChatSample:
        """Adapt a conversation to a template that fails on nulls, or on objects as arguments of tool calls.

        Values stay as the record has them wherever the template takes them: templates that test `content is none` (DeepSeek)
        need the null, and most others fail on it or write it as the word None.
        """
        calls = [call for message in sample.messages for call in message.get("tool_calls") or ()]
        if not calls and not any("content" not in one or None in one.values() for one in sample.messages):
            return sample
        filled = replace(sample, messages=[_without_nulls(message) for message in sample.messages])
        if filled.messages == sample.messages:
            filled = sample
        text, refused = "", None
        for given in (sample, filled) if filled is not sample else (sample,):
            for as_text in (False, True) if calls and not self._text_arguments else (bool(calls),):
                fitting = _with_text_arguments(given) if as_text else given
                try:
                    text = self._text(fitting.messages, fitting)
                except SampleRejected as refusal:
                    if not _is_wrong_type(refusal):
                        raise
                    refused = refused or refusal
                    continue
                if given is not filled and "None" in text:
                    other = _with_text_arguments(filled) if as_text else filled
                    with contextlib.suppress(SampleRejected):
                        if self._text(other.messages, other).count("None") < text.count("None"):
                            return other  # `{{ message.content }}` writes null as the word None
                self._text_arguments = self._text_arguments or as_text
                written = [] if as_text else [call["function"]["arguments"] for call in calls]
                as_python = any(a and str(a) in text and dumps(a) not in text for a in written)
                return _with_text_arguments(fitting) if as_python else fitting
        assert refused is not None
        raise refused

    def _has_tags(self, sample: ChatSample) -> bool:
        with _refusals():
            template = self._tokenizer.get_chat_template(self._template, sample.tools)
            return GENERATION_TAG.search(template) is not None

    def _text(self, messages: list[dict[str, Any]], sample: ChatSample, generation: bool = False) -> str:
        return self._render(messages, sample, generation)[0]

    def _render(
        self, messages: list[dict[str, Any]], sample: ChatSample, generation: bool = False, marks: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text, and with `marks` the character ranges inside `{% generation %}`.

        The template is compiled by transformers, but called here: `apply_chat_template` drops nulls from messages and turns
        `WrittenFloat` into plain floats.
        """
        from transformers.utils import chat_template_utils as templates

        with _refusals():
            compiled = templates._compile_jinja_template(
                self._tokenizer.get_chat_template(self._template, sample.tools)
            )
            compiled.environment.filters["tojson"] = _tojson
            values = {
                **self._tokenizer.special_tokens_map,
                "documents": None,
                "strftime_now": self._date.strftime,
                **self._keywords,
                **sample.keywords,
                "messages": messages,
                "tools": sample.tools,
                "add_generation_prompt": generation,
            }
            if not marks:
                return compiled.render(**values), []
            text, spans = templates._render_with_assistant_indices(compiled_template=compiled, **values)
        return text, [(int(begin), int(end)) for begin, end in spans]


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """The filter `tojson` as transformers has it, with the digits of numbers as they were written."""
    text = dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return text.replace("\\ufdd0", MARK) if ensure_ascii else text


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
    from jinja2 import TemplateSyntaxError

    try:
        yield
    except TemplateSyntaxError as error:
        what = f"the chat template is not valid jinja: {error.message} (its line {error.lineno})"
        raise UserError(what, "data.chat_template", "correct the template") from error
    except (UserError, SampleRejected, MemoryError):
        raise
    # Templates are programs, and fail in any way: a missing key, a division by zero, endless recursion.
    except Exception as error:
        raise SampleRejected("the chat template refuses it", str(error).split("\n", 1)[0]) from error


def _is_wrong_type(refusal: SampleRejected) -> bool:
    """Whether a template failed because a value had another type than it expects, or was absent."""
    from jinja2 import UndefinedError

    return isinstance(refusal.__cause__, TypeError | UndefinedError)


def _without_nulls(message: dict[str, Any]) -> dict[str, Any]:
    """The message without nulls, and with an empty content instead of none."""
    return {"content": "", **{key: value for key, value in message.items() if value is not None}}


def _with_text_arguments(sample: ChatSample) -> ChatSample:
    """The conversation with the arguments of its tool calls as JSON text, as the record wrote them."""
    messages = []
    for message in sample.messages:
        calls = message.get("tool_calls")
        messages.append({**message, "tool_calls": [_with_text(call) for call in calls]} if calls else message)
    return replace(sample, messages=messages)


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    if isinstance(arguments, str):
        return call
    text = arguments.written if isinstance(arguments, WrittenObject) else dumps(arguments)
    return {**call, "function": {**call["function"], "arguments": text}}


def _around(text: str, place: int) -> str:
    return repr(text[max(0, place - 20) : place + 20])
