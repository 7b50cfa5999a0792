"""For random records and random templates, the trained tokens are the assistant's words and the end of the turn, always."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import tiny_tokenizer as tiny
from megatrain.data.encoder import Encoder
from megatrain.data.render import ChatRenderer, Rendered
from megatrain.data.samples import ChatSample

WORDS = [
    "s",
    "a",
    "user",
    "assistant",
    "assistant:",
    ":",
    "the capital of France",
    " is",
    "1",
    "<b>",
    "<think",
    "</th",
    "]",
    "\n",
    "é",
    "<|im_end|>",
]
TEXTS = st.one_of(
    st.lists(st.sampled_from(WORDS), min_size=1, max_size=5).map("".join),
    st.text(min_size=1, max_size=20).filter(lambda text: "\ufdd0" not in text),
).filter(lambda text: bool(text.strip()))


@dataclass(frozen=True)
class Template:
    """A template of common parts, and what it makes of an answer."""

    before: str  # the role
    after: str
    end: str  # of an answer
    other_end: str  # of other messages
    prompt: bool  # has a generation prompt
    opens: bool  # which opens a thought
    tagged: bool
    thoughts: str  # written "always", "last" (dropped from earlier turns), or "never"

    @property
    def jinja(self) -> str:
        shown = {"always": "m.thought", "last": "(m.thought and loop.last)", "never": "false"}[self.thoughts]
        thought = f"{{% if {shown} %}}{{{{ '<think>' + m.thought + '</think>' }}}}{{% endif %}}"
        answer = thought.replace("m.thought", "m.reasoning_content") + "{{ m.content }}" + self.end
        if self.tagged:
            answer = "{% generation %}" + answer + "{% endgeneration %}"
        opener = "{{ '<think>\n' }}" if self.opens else ""
        generation = (
            f"{{% if add_generation_prompt %}}{self._header('assistant')}{opener}{{% endif %}}" if self.prompt else ""
        )
        return (
            "{% for m in messages %}"
            f"{{{{ {self.before!r} + m.role + {self.after!r} }}}}"
            f"{{% if m.role == 'assistant' %}}{answer}{{% else %}}{{{{ m.content + {self.other_end!r} }}}}{{% endif %}}"
            "{% endfor %}" + generation
        )

    def _header(self, role: str) -> str:
        return f"{{{{ {self.before + role + self.after!r} }}}}"

    def wanted(self, content: str, thought: str) -> str:
        if self.prompt and self.opens:
            return f"{thought}\n</think>\n\n{content}{self.end}"
        return (f"<think>{thought}</think>" if thought else "") + content + self.end


@st.composite
def templates(draw: st.DrawFn) -> Template:
    prompt = draw(st.booleans())
    opens = prompt and draw(st.booleans())
    return Template(
        before=draw(st.sampled_from(["<|im_start|>", "", "[", "### "])),
        after=draw(st.sampled_from(["\n", ": ", ":", "]\n", "\n\n", "<|assistant|>", " ", "<|user|>\n"])),
        end=draw(st.sampled_from(["<|im_end|>", "<|tool|>"])),
        other_end=draw(st.sampled_from(["\n", "<|im_end|>\n", "<|im_end|>", " "])),
        prompt=prompt,
        opens=opens,
        tagged=prompt and not opens and draw(st.booleans()),
        thoughts="never" if opens else draw(st.sampled_from(["always", "last"])) if prompt else "never",
    )


def _runs(tokenizer: object, samples: list[tuple[np.ndarray, np.ndarray]]) -> list[str]:
    """The trained tokens, run by run."""
    found = []
    for ids, mask in samples:
        borders = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
        for begin, end in zip(borders[::2], borders[1::2], strict=True):
            found.append(tokenizer.decode(ids[begin:end].tolist(), clean_up_tokenization_spaces=False))  # type: ignore[attr-defined]
    return found


SHORT = Template("", ": ", "<|im_end|>", "\n", prompt=False, opens=False, tagged=False, thoughts="never")
SPACED = Template("", ": ", "<|im_end|>", "\n", prompt=True, opens=False, tagged=False, thoughts="always")
OPENED = Template(
    "<|im_start|>", "\n", "<|im_end|>", "<|im_end|>\n", prompt=True, opens=True, tagged=False, thoughts="never"
)


@settings(max_examples=200, deadline=None)
@given(
    templates(),
    st.lists(
        st.tuples(TEXTS, st.one_of(st.just(""), st.sampled_from(["hm", "so: <b>", "1\n2"])), TEXTS),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from(["bytes", "greedy"]),
)
@example(SHORT, [("pick", "", "s"), ("pick", "", "assistant: s")], "bytes")
@example(SPACED, [("no cloud", "", "sunny"), ("x", "hm", " capital")], "bytes")
@example(OPENED, [("x", "", "<b>"), ("x", "hm", "1")], "bytes")
def test_the_trained_tokens_are_the_words_and_the_end(
    template: Template, turns: list[tuple[str, str, str]], kind: str
) -> None:
    """`greedy`: a tokenizer whose special tokens take in the whitespace after them.

    Special tokens in these messages are not marked as text, as the builder marks them (test_specials.py): a greedy one would
    rightly take in whitespace of an answer that spells it out.
    """
    assume(kind != "greedy" or not any(re.search(r"\|>\s", text) for turn in turns for text in turn))
    tokenizer = tiny.make_tokenizer(template.jinja, kind=kind)
    messages, wanted = [], []
    for question, thought, answer in turns:
        thought = thought if template.prompt else ""
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        if thought:
            messages[-1]["reasoning_content"] = thought
        wanted.append(template.wanted(answer, thought))
    sample = ChatSample(messages, (None,) * len(messages))
    texts = ChatRenderer(tokenizer, None, "assistant").render(sample)
    samples = Encoder(tokenizer).masked_ids(texts)
    assert _runs(tokenizer, samples) == wanted
    # The first answer follows the ids that inference has.
    if template.prompt:
        prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True)["input_ids"]
        assert samples[0][0][: len(prompt)].tolist() == prompt
        assert samples[0][1].argmax() == len(prompt)


@settings(max_examples=150, deadline=None)
@given(st.one_of(st.just(""), TEXTS), TEXTS, st.sampled_from(["bytes", "gemma"]))
@example("Report: no cloud.\nWeather: ", "sunny", "bytes")
@example("Question?\n\n", "answer", "bytes")
def test_every_token_of_a_completion_is_trained(prompt: str, completion: str, kind: str) -> None:
    tokenizer = tiny.make_tokenizer(kind=kind)
    text = prompt + completion
    ((ids, mask),) = Encoder(tokenizer).masked_ids([Rendered(text, ((len(prompt), len(text)),), (len(prompt),))])
    before = tokenizer(prompt, add_special_tokens=False)["input_ids"] if prompt else []
    after = tokenizer(completion, add_special_tokens=False)["input_ids"]
    assert ids.tolist() == before + after
    assert mask.tolist() == [False] * len(before) + [True] * len(after)
