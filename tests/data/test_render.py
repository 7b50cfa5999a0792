"""Which tokens of a chat are trained, for the kinds of chat template found in checkpoints."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

import tiny_tokenizer as tiny
from megatrain.data.formats import ChatSample, SampleRejected
from megatrain.data.render import ChatRenderer, Encoder, Rendered
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


def test_a_generation_prompt_that_opens_a_thought_is_trained_from_where_the_turn_differs() -> None:
    tokenizer = tiny.make_tokenizer(tiny.OPENED_THOUGHT)
    renderer = ChatRenderer(tokenizer, None, "assistant")
    assert _trained_text(tokenizer, _sample(CHAT[:2])) == ["A number.<|im_end|>"]
    renderer.render(_sample(CHAT[:2]))
    assert "adds text to the generation prompt that the answers do not have (1 time)" in renderer.take_notes()[0]


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


def test_text_that_the_template_leaves_out_is_logged() -> None:
    sample = _sample([("user", "one?"), ("assistant", "<think>hm</think> A number.")])
    for template, told in ((tiny.CHATML, False), (tiny.NO_THOUGHTS, True)):
        renderer = ChatRenderer(tiny.make_tokenizer(template), None, "assistant")
        renderer.render(sample)
        assert any("leaves out part of an answer's content" in note for note in renderer.take_notes()) == told


@pytest.mark.parametrize("template", [tiny.TEXT_CALLS, tiny.OBJECT_CALLS])
def test_tool_call_arguments_have_the_form_the_template_accepts(template: str) -> None:
    sample = _sample([("user", "one?"), ("assistant", "call"), ("tool", "1"), ("assistant", "It is 1")])
    sample.messages[1]["tool_calls"] = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
    trained = _trained_text(tiny.make_tokenizer(template), sample)[0].replace(" ", "")
    assert trained.startswith('call{"x":1}<|im_end|>')


def test_a_template_whose_turns_do_not_extend_their_prompts_is_an_error() -> None:
    template = "{{ messages | length }}" + tiny.CHATML
    with pytest.raises(UserError, match="the chat template of tiny renders an assistant message differently"):
        _trained(tiny.make_tokenizer(template), _sample(CHAT))


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


def test_a_token_across_the_border_of_prompt_and_answer_belongs_to_the_prompt() -> None:
    tokenizer = tiny.make_tokenizer()
    encoder = Encoder(tokenizer)
    text = "user: the capital<|im_end|>"
    offsets = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)["offset_mapping"]
    begin = next(b + 1 for b, e in offsets if e - b > 2 and b > 5)  # inside a token
    ((_, mask),) = encoder.masked_ids([Rendered(text, ((begin, len(text)),))])
    assert mask.tolist() == [b >= begin for b, _ in offsets]
    assert encoder.take_notes() == ["1 answer begins in the middle of a token; that token is not trained"]


def test_plain_text_ids_equal_those_of_the_tokenizer() -> None:
    tokenizer = tiny.make_tokenizer(adds_bos=True)
    encoder = Encoder(tokenizer)
    texts = ["The dog.", "", " über 词 \n\n x", "a" * 5000]
    assert [ids.tolist() for ids in encoder.ids(texts)] == tokenizer(texts, add_special_tokens=False)["input_ids"]
    assert encoder.prefix == [tokenizer.bos_token_id]
    assert encoder.suffix == [tokenizer.eos_token_id]


def test_truncation_settings_in_the_tokenizer_file_are_ignored() -> None:
    """They would cut samples silently."""
    tokenizer = tiny.make_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(8)
    assert len(Encoder(tokenizer).ids(["the dog " * 100])[0]) > 100
