"""Which tokens of a chat are trained, for the kinds of chat template found in checkpoints."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

import tiny_tokenizer as tiny
from megatrain.data.encoder import Encoder
from megatrain.data.formats import ChatSample, SampleRejected, find_reading
from megatrain.data.render import ChatRenderer, Rendered
from megatrain.errors import UserError

CHAT = [("user", "What is one?"), ("assistant", "A number."), ("user", "And two?"), ("assistant", " Also\n a number ")]


def _sample(turns: list[tuple[str, str]], flags: list[bool | None] | None = None, **more: Any) -> ChatSample:
    messages = [{"role": role, "content": content} for role, content in turns]
    return ChatSample(messages, tuple(flags or [None] * len(turns)), **more)


def _trained(
    tokenizer: PreTrainedTokenizerFast, sample: ChatSample, train_on: str = "assistant"
) -> list[tuple[list[int], np.ndarray]]:
    """(ids, mask) of each text that the sample is rendered to."""
    texts = ChatRenderer(tokenizer, None, train_on).render(sample)
    return [(ids.tolist(), mask) for ids, mask in Encoder(tokenizer).masked_ids(texts)]


def _trained_text(tokenizer: PreTrainedTokenizerFast, sample: ChatSample, train_on: str = "assistant") -> list[str]:
    """The trained tokens of each text, runs separated by ` | `."""
    texts = []
    for ids, mask in _trained(tokenizer, sample, train_on):
        borders = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
        runs = [tokenizer.decode(ids[begin:end]) for begin, end in zip(borders[::2], borders[1::2], strict=True)]
        texts.append(" | ".join(runs))
    return texts


@pytest.mark.parametrize("template", [tiny.CHATML, tiny.CHATML_TAGGED, tiny.CHATML_TAGGED_SHORT])
def test_exactly_the_answers_and_their_end_tokens_are_trained(template: str) -> None:
    """Compared with turns tokenized one by one, which special tokens at their borders make equivalent."""
    tokenizer = tiny.make_tokenizer(template)
    ((ids, mask),) = _trained(tokenizer, _sample(CHAT))
    want_ids, want_mask = [], []
    for role, content in CHAT:
        for text, trained in (
            (f"<|im_start|>{role}\n", False),
            (f"{content}<|im_end|>", role == "assistant"),
            ("\n", False),
        ):
            piece = tokenizer(text, add_special_tokens=False)["input_ids"]
            want_ids += piece
            want_mask += [trained] * len(piece)
    assert ids == want_ids
    assert mask.tolist() == want_mask


def test_ids_equal_those_of_apply_chat_template() -> None:
    for template in (tiny.CHATML, tiny.CHATML_TAGGED, tiny.HEADERS_WITH_BOS):
        tokenizer = tiny.make_tokenizer(template, adds_bos=True)
        sample = _sample(CHAT)
        ((ids, _),) = _trained(tokenizer, sample)
        assert ids == tokenizer.apply_chat_template(sample.messages, return_dict=True)["input_ids"]


def test_the_mask_of_generation_blocks_equals_hugging_faces() -> None:
    tokenizer = tiny.make_tokenizer(tiny.CHATML_TAGGED)
    # Older transformers lose the mask of an answer that begins with a space.
    sample = _sample([(role, content.strip()) for role, content in CHAT])
    want = tokenizer.apply_chat_template(sample.messages, return_dict=True, return_assistant_tokens_mask=True)
    ((ids, mask),) = _trained(tokenizer, sample)
    assert ids == want["input_ids"]
    assert mask.tolist() == [bool(flag) for flag in want["assistant_masks"]]


def test_the_tokenizer_adds_no_second_bos_to_that_of_the_template() -> None:
    tokenizer = tiny.make_tokenizer(tiny.HEADERS_WITH_BOS, adds_bos=True)
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    ((ids, mask),) = _trained(tokenizer, _sample(CHAT))
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1
    assert not mask[0]


def test_eos_is_trained_even_if_it_is_the_padding_token() -> None:
    """Masks are by position."""
    tokenizer = tiny.make_tokenizer(tiny.CHATML, pad="<|im_end|>")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    ((ids, mask),) = _trained(tokenizer, _sample(CHAT))
    ends = np.flatnonzero(np.array(ids) == tokenizer.eos_token_id)
    assert mask[ends].tolist() == [False, True, False, True]


def test_last_assistant_and_flags_restrict_what_is_trained() -> None:
    for template in (tiny.CHATML, tiny.CHATML_TAGGED):
        tokenizer = tiny.make_tokenizer(template)
        assert _trained_text(tokenizer, _sample(CHAT), "last_assistant") == [" Also\n a number <|im_end|>"]
        assert _trained_text(tokenizer, _sample(CHAT, [None, None, None, False])) == ["A number.<|im_end|>"]
        assert _trained_text(tokenizer, _sample(CHAT, [None, False, True, True])) == [" Also\n a number <|im_end|>"]
        assert _trained_text(tokenizer, _sample(CHAT, answers_from=2)) == [" Also\n a number <|im_end|>"]
        with pytest.raises(SampleRejected, match="flagged 0"):
            _trained(tokenizer, _sample(CHAT, [None, False, None, False]))


def test_train_on_all_trains_everything_except_messages_flagged_0() -> None:
    tokenizer = tiny.make_tokenizer()
    ((_, mask),) = _trained(tokenizer, _sample(CHAT), "all")
    assert mask.all()
    assert _trained_text(tokenizer, _sample(CHAT, [False, None, False, None]), "all") == [
        "<|im_start|>assistant\nA number.<|im_end|>\n | <|im_start|>assistant\n Also\n a number <|im_end|>\n"
    ]


def test_rewritten_history_becomes_one_text_per_turn() -> None:
    """Every answer is trained with its reasoning, after the history as the model will see it."""
    tokenizer = tiny.make_tokenizer(tiny.THINKING)
    sample = _sample(CHAT)
    sample.messages[1]["reasoning_content"] = "easy"
    renderer = ChatRenderer(tokenizer, None, "assistant")
    first, second = renderer.render(sample)
    assert renderer.take_notes() == [
        "the chat template of tiny rewrites earlier turns; these conversations were split into a sample per turn (1 time)"
    ]
    assert renderer.take_notes() == []
    assert first.text.endswith("<think>\neasy\n</think>\n\nA number.<|im_end|>\n")
    assert "easy" not in second.text
    assert _trained_text(tokenizer, sample) == [
        "<think>\neasy\n</think>\n\nA number.<|im_end|>",
        "<think>\n\n</think>\n\n Also\n a number <|im_end|>",
    ]


def test_turns_without_a_question_in_between_share_a_text() -> None:
    """Reasoning is kept between the tool calls of one answer, so nothing is rewritten there."""
    tokenizer = tiny.make_tokenizer(tiny.THINKING)
    sample = _sample([("user", "one?"), ("assistant", "call"), ("tool", "1"), ("assistant", "It is 1")])
    assert len(_trained_text(tokenizer, sample)) == 1
    assert _trained_text(tokenizer, sample)[0].count("<think>") == 2


@pytest.mark.parametrize(
    ("content", "thought", "trained"),
    [
        ("A number.", "", "\n</think>\n\nA number.<|im_end|>"),
        ("A number.", "easy", "easy\n</think>\n\nA number.<|im_end|>"),
        ("<think>\neasy\n</think>\n\nA number.", "", "easy\n</think>\n\nA number.<|im_end|>"),
        ("<think>easy</think> A number.", "", "easy</think> A number.<|im_end|>"),
        ("easy\n</think>\n\nA number.", "", "easy\n</think>\n\nA number.<|im_end|>"),
    ],
)
@pytest.mark.parametrize("template", [tiny.OPENED_THOUGHT, tiny.OPENED_THOUGHT_RAW])
def test_a_thought_that_the_generation_prompt_opens_is_continued_and_closed(
    template: str, content: str, thought: str, trained: str
) -> None:
    """The ids are those of the prompt at inference, and then the answer's."""
    tokenizer = tiny.make_tokenizer(template)
    sample = _sample([CHAT[0], ("assistant", content)])
    if thought:
        sample.messages[1]["reasoning_content"] = thought
    ((ids, mask),) = _trained(tokenizer, sample)
    prompt = tokenizer.apply_chat_template(sample.messages[:1], add_generation_prompt=True)["input_ids"]
    assert tokenizer.decode(prompt).endswith("<think>\n")
    assert ids[: len(prompt)] == prompt
    assert tokenizer.decode([i for i, one in zip(ids, mask, strict=True) if one]) == trained
    assert mask[len(prompt) :].tolist()[: len(tokenizer(trained)["input_ids"])].count(False) == 0


def test_an_empty_thought_that_is_added_is_told() -> None:
    renderer = ChatRenderer(tiny.make_tokenizer(tiny.OPENED_THOUGHT), None, "assistant")
    renderer.render(_sample(CHAT[:2]))
    assert renderer.take_notes() == [
        "the chat template of tiny opens a thought in the generation prompt; answers without one begin with </think> (1 time)"
    ]


def test_a_generation_prompt_that_forbids_thoughts_leaves_them_out() -> None:
    tokenizer = tiny.make_tokenizer(tiny.CLOSED_THOUGHT)
    assert _trained_text(tokenizer, _sample(CHAT[:2])) == ["A number.<|im_end|>"]
    sample = _sample(CHAT[:2])
    sample.messages[1]["reasoning_content"] = "easy"
    with pytest.raises(SampleRejected, match="the chat template of tiny leaves out thoughts"):
        _trained(tokenizer, sample)
    (text,) = ChatRenderer(tokenizer, None, "assistant", "warn").render(sample)
    assert text.text.endswith("<think>\n\n</think>\n\nA number.<|im_end|>\n")


def test_an_answer_that_begins_like_an_opened_thought_is_not_mixed_up_with_it() -> None:
    tokenizer = tiny.make_tokenizer(tiny.OPENED_THOUGHT)
    assert _trained_text(tokenizer, _sample([CHAT[0], ("assistant", "<table>")])) == [
        "\n</think>\n\n<table><|im_end|>",
    ]


def test_a_template_without_a_generation_prompt_does_not_train_headers() -> None:
    tokenizer = tiny.make_tokenizer(tiny.NO_GENERATION_PROMPT)
    assert _trained_text(tokenizer, _sample(CHAT[:2])) == ["A number.<|im_end|>"]


def test_a_template_with_empty_generation_blocks_is_an_error() -> None:
    tokenizer = tiny.make_tokenizer(tiny.CHATML_TAGGED_WRONG)
    with pytest.raises(UserError, match="the chat template of tiny marks no token"):
        _trained(tokenizer, _sample(CHAT))


def test_a_template_without_an_end_of_turn_is_an_error() -> None:
    with pytest.raises(UserError, match="the chat template of tiny writes no special token after an answer"):
        _trained(tiny.make_tokenizer(tiny.NO_TURN_END), _sample(CHAT))


def test_if_the_next_turns_token_ends_answers_it_is_trained_after_every_answer() -> None:
    """For templates that write no end of turn."""
    tokenizer = tiny.make_tokenizer(tiny.NEXT_TURN_ENDS)
    renderer = ChatRenderer(tokenizer, None, "assistant")
    assert _trained_text(tokenizer, _sample(CHAT)) == ["A number.<|user|> |  Also\n a number <|user|>"]
    turns = [("user", "one?"), ("assistant", "call"), ("tool", "1"), ("assistant", "It is 1")]
    assert _trained_text(tokenizer, _sample(turns)) == ["call<|tool|> | It is 1<|user|>"]
    thinking = _sample(CHAT)
    thinking.messages[1]["reasoning_content"] = "easy"
    assert _trained_text(tokenizer, thinking) == [
        "<think>easy</think>A number.<|user|>",
        " Also\n a number <|user|>",
    ]
    renderer.render(thinking)
    assert any("only with the <|user|> of the next turn" in note for note in renderer.take_notes())


def test_a_thought_that_the_template_drops_is_found() -> None:
    sample = _sample([("user", "one?"), ("assistant", "<think>hm</think> A number.")])
    assert _trained_text(tiny.make_tokenizer(tiny.CHATML), sample) == ["<think>hm</think> A number.<|im_end|>"]
    tokenizer = tiny.make_tokenizer(tiny.NO_THOUGHTS)
    with pytest.raises(SampleRejected, match="leaves out part of an answer's content"):
        _trained(tokenizer, sample)
    renderer = ChatRenderer(tokenizer, None, "assistant", "warn")
    renderer.render(sample)
    assert renderer.take_left_out() == {"part of an answer's content": 1}
    assert renderer.take_left_out() == {}
    assert renderer.take_notes() == [
        "warning: the chat template of tiny leaves out part of an answer's content; these samples are trained without (1 time)"
    ]


@pytest.mark.parametrize("template", [tiny.TEXT_CALLS, tiny.PRINTED_CALLS, tiny.OBJECT_CALLS])
def test_tool_call_arguments_have_the_form_the_template_accepts(template: str) -> None:
    sample = _sample([("user", "one?"), ("assistant", "call"), ("tool", "1"), ("assistant", "It is 1")])
    sample.messages[1]["tool_calls"] = [{"type": "function", "function": {"name": "f", "arguments": {"x": True}}}]
    tokenizer = tiny.make_tokenizer(template)
    for _ in range(2):
        (text,) = ChatRenderer(tokenizer, None, "assistant", "warn").render(sample)
        (begin, end), _ = text.spans
        assert text.text[begin:end].replace(" ", "") == 'call{"x":true}<|im_end|>'


def test_a_call_that_the_template_drops_is_never_trained_as_an_empty_answer() -> None:
    sample = _sample([("user", "one?"), ("assistant", ""), ("tool", "1"), ("assistant", "It is 1")])
    sample.messages[1]["tool_calls"] = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    for left_out in ("reject", "warn"):
        for template in (tiny.CHATML, tiny.THINKING, tiny.OPENED_THOUGHT):
            with pytest.raises(SampleRejected, match="leaves out tool calls, and writes an empty answer"):
                ChatRenderer(tiny.make_tokenizer(template), None, "assistant", left_out).render(sample)


def test_a_template_whose_turns_do_not_extend_their_prompts_rejects_its_samples() -> None:
    template = tiny.CHATML.replace("'<|im_start|>assistant\n'", "'<|assistant|>\n'")
    with pytest.raises(SampleRejected, match="the chat template of tiny renders an assistant message differently"):
        _trained(tiny.make_tokenizer("{{ messages | length }}" + template), _sample(CHAT))


def test_an_answer_that_changes_the_messages_before_it_follows_the_prompt_without_it() -> None:
    """At inference the template does not know the answer yet."""
    tokenizer = tiny.make_tokenizer("{{ messages | length }}" + tiny.CHATML)
    for (ids, mask), turn in zip(_trained(tokenizer, _sample(CHAT)), (1, 3), strict=True):
        messages = _sample(CHAT).messages
        prompt = tokenizer.apply_chat_template(messages[:turn], add_generation_prompt=True)["input_ids"]
        answer = tokenizer(f"{messages[turn]['content']}<|im_end|>")["input_ids"]
        assert ids == [*prompt, *answer, *tokenizer("\n")["input_ids"]]
        assert mask.tolist() == [False] * len(prompt) + [True] * len(answer) + [False]


def test_no_template_is_an_error_with_a_remedy() -> None:
    with pytest.raises(UserError, match=r"tiny has no chat template.*\n  -> give a jinja template file"):
        ChatRenderer(tiny.make_tokenizer(None), None, "assistant").render(_sample(CHAT))


def test_a_template_file_replaces_the_tokenizers(tmp_path: Any) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(tiny.CHATML)
    renderer = ChatRenderer(tiny.make_tokenizer(None), str(file), "assistant")
    assert renderer.render(_sample(CHAT[:2]))[0].text.startswith("<|im_start|>user\n")
    file.write_text("{% for m in messages %}{{ m.content }}")
    with pytest.raises(UserError, match="not valid jinja"):
        ChatRenderer(tiny.make_tokenizer(None), str(file), "assistant").render(_sample(CHAT))
    with pytest.raises(UserError, match=r"gone.jinja does not exist"):
        ChatRenderer(tiny.make_tokenizer(None), str(tmp_path / "gone.jinja"), "assistant")


def test_a_refusal_of_the_template_rejects_the_sample_with_its_message() -> None:
    tokenizer = tiny.make_tokenizer(tiny.ALTERNATING)
    with pytest.raises(SampleRejected, match=r"the chat template refuses it \(Conversation roles must alternate"):
        _trained(tokenizer, _sample([("user", "a"), ("user", "b"), ("assistant", "c")]))


@pytest.mark.parametrize("answer", ["s", "a", "t", ":", "ant", "assistant", "assistant: s", "user", " s"])
def test_short_answers_are_found_behind_the_header_of_a_template_without_a_generation_prompt(answer: str) -> None:
    tokenizer = tiny.make_tokenizer(tiny.PLAIN_HEADERS)
    sample = _sample([("user", "pick"), ("assistant", answer), ("user", "again"), ("assistant", "s")])
    assert _trained_text(tokenizer, sample) == [f"{answer}<|im_end|> | s<|im_end|>"]


def test_after_a_prompt_that_ends_in_a_space_all_of_the_answer_is_trained() -> None:
    """The tokenizer has a token ` capital`, which would join the space and the answer."""
    tokenizer = tiny.make_tokenizer(tiny.SPACE_BEFORE_ANSWERS)
    sample = _sample([("user", "the"), ("assistant", "capital"), ("user", "the"), ("assistant", "is")])
    ((ids, mask),) = _trained(tokenizer, sample)
    prompt = tokenizer.apply_chat_template(sample.messages[:1], add_generation_prompt=True)["input_ids"]
    answer = tokenizer("capital<|im_end|>")["input_ids"]
    assert len(tokenizer(" capital")["input_ids"]) == 1
    assert ids[: len(prompt + answer)] == prompt + answer
    assert mask[: len(prompt + answer)].tolist() == [False] * len(prompt) + [True] * len(answer)
    assert _trained_text(tokenizer, sample) == ["capital<|im_end|> | is<|im_end|>"]


@pytest.mark.parametrize("kind", sorted(tiny.KINDS))
@pytest.mark.parametrize("header", ["", "x\n\n", "x: ", "x:", "<|assistant|>", "<|assistant|>\n", "the capi"])
@pytest.mark.parametrize("answer", ["tal of", " a", "\n\nthe", "1", "a<|im_end|>", " ", "<|im_end|>", "é"])
def test_pieces_keep_the_ids_of_the_prompt_and_the_words_of_the_answer(kind: str, header: str, answer: str) -> None:
    """For tokenizers that join words, put a space before a text, or take whitespace into special tokens."""
    tokenizer = tiny.make_tokenizer(kind=kind)
    text = f"{header}{answer}<|im_end|>\n"
    end = len(text) - 1
    ((ids, mask),) = Encoder(tokenizer).masked_ids([Rendered(text, ((len(header), end),), (len(header),))])
    prompt = tokenizer(header, add_special_tokens=False)["input_ids"] if header else []
    assert ids.tolist()[: len(prompt)] == prompt
    first = int(mask.argmax())
    assert first == len(prompt)
    assert mask[first:].tolist() == sorted(mask[first:].tolist(), reverse=True)
    trained = [int(i) for i in ids[mask]]
    # decode drops the first space of a text for some tokenizers: decode behind a letter
    letter = tokenizer("x", add_special_tokens=False)["input_ids"]
    decoded = tokenizer.decode(letter + trained, clean_up_tokenization_spaces=False)[1:]
    if (not header and kind in ("mistral", "llama2")) or (header == "<|assistant|>" and kind == "llama2"):
        assert decoded in (f" {answer}<|im_end|>", f"{answer}<|im_end|>")  # the tokenizer puts a space there
    else:
        assert decoded == f"{answer}<|im_end|>"


def test_plain_text_ids_equal_those_of_the_tokenizer() -> None:
    tokenizer = tiny.make_tokenizer(adds_bos=True)
    encoder = Encoder(tokenizer)
    texts = ["The dog.", "", " über 词 \n\n x", "a" * 5000]
    assert [ids.tolist() for ids in encoder.ids([(text, False) for text in texts])] == tokenizer(
        texts, add_special_tokens=False
    )["input_ids"]
    assert encoder.prefix == [tokenizer.bos_token_id]
    assert encoder.suffix == [tokenizer.eos_token_id]


def test_truncation_settings_in_the_tokenizer_file_are_ignored() -> None:
    """They would cut samples silently."""
    tokenizer = tiny.make_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(8)
    assert len(Encoder(tokenizer).ids([("the dog " * 100, False)])[0]) > 100


NULL_CONTENT_CALLS = tiny.CHATML.replace(
    "m['content'] + '<|im_end|>\n' }}",
    "'' }}{% if m['content'] is none %}{{ 'CALL ' + m['tool_calls'][0]['function']['arguments'] }}"
    "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}",
)
"""Writes calls only where the content is null, and concatenates arguments as text, like DeepSeek V3."""
PRINTED_CONTENT = tiny.OBJECT_CALLS.replace("+ m['content'] + (", "}}{{ m['content'] }}{{ (")
"""Prints a null content as the word None."""


@pytest.mark.parametrize(
    ("template", "written"),
    [
        (NULL_CONTENT_CALLS, 'CALL {"x":  1.10}<|im_end|>'),
        (tiny.OBJECT_CALLS, '{"x": 1.10}<|im_end|>'),
        (tiny.TEXT_CALLS, '{"x":  1.10}<|im_end|>'),
        (PRINTED_CONTENT, '{"x": 1.10}<|im_end|>'),
    ],
)
def test_a_null_content_stays_null_where_the_template_knows_it_and_is_empty_elsewhere(
    template: str, written: str
) -> None:
    arguments = '{"x":  1.10}'
    for turn in ({"content": None}, {}):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        record = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", **turn, "tool_calls": [call]}]}
        sample = find_reading([record], "auto", {}, "file").sample(record)
        assert isinstance(sample, ChatSample)
        if turn or template is not NULL_CONTENT_CALLS:  # an absent content is not null
            (text,) = ChatRenderer(tiny.make_tokenizer(template), None, "assistant", "warn").render(sample)
            ((begin, end),) = text.spans
            assert text.text[begin:end] == written
