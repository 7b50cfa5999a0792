"""Masks right to the token, and nothing left out in silence, for templates shaped like those of twelve families, and for those
in installed packages.

What is expected is computed apart from the product: prompts by transformers, answers by hand (see family_templates.py).
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

from family_templates import (
    CONVERSATIONS,
    FAMILIES,
    REFUSED,
    family_of,
    installed_families,
    installed_templates,
    tokenizer_of,
    tools_of,
)
from megatrain.data.encoder import Encoder
from megatrain.data.render import ChatRenderer
from megatrain.data.samples import ChatSample, SampleRejected


def _rendered(family: str, conversation: str, left_out: Any = "reject") -> list[tuple[list[int], list[bool]]]:
    tokenizer, messages = tokenizer_of(family), copy.deepcopy(CONVERSATIONS[conversation])
    sample = ChatSample(messages, (None,) * len(messages), tools=tools_of(conversation))
    texts = ChatRenderer(tokenizer, None, "assistant", left_out).render(sample)
    return [(ids.tolist(), mask.tolist()) for ids, mask in Encoder(tokenizer).masked_ids(texts)]


CASES = [(family, conversation) for family in (*FAMILIES, *installed_families()) for conversation in CONVERSATIONS]


@pytest.mark.parametrize(("family", "conversation"), CASES, ids=[f"{f}-{c}" for f, c in CASES])
def test_every_answer_is_trained_after_its_prompt_or_the_part_that_is_missing_is_named(
    family: str, conversation: str
) -> None:
    parts = family_of(family).left_out.get(conversation)
    if parts is None:
        _check_tokens(family, conversation)
        return
    with pytest.raises(SampleRejected) as refusal:
        _rendered(family, conversation)
    if parts is REFUSED:
        assert refusal.value.reason == "the chat template refuses it"
        return
    assert refusal.value.reason.startswith(f"the chat template of {family} leaves out ")
    assert all(part in refusal.value.reason for part in parts)


def _check_tokens(family: str, conversation: str) -> None:
    tokenizer, messages = tokenizer_of(family), CONVERSATIONS[conversation]
    wanted = []  # (prompt ids, answer ids) of each answer
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            before = copy.deepcopy(messages[:i])
            text = tokenizer.apply_chat_template(
                before, tools=tools_of(conversation), add_generation_prompt=True, tokenize=False
            )
            prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
            answer = tokenizer(family_of(family).answer(message), add_special_tokens=False)["input_ids"]
            wanted.append((prompt, answer))
    samples = _rendered(family, conversation)
    assert len(samples) == family_of(family).samples.get(conversation, 1)
    found = []
    for ids, mask in samples:
        expected = [False] * len(ids)
        for prompt, answer in wanted:
            end = len(prompt) + len(answer)
            if ids[:end] == prompt + answer and (prompt, answer) not in found and any(mask[len(prompt) : end]):
                expected[len(prompt) : end] = [True] * len(answer)
                found.append((prompt, answer))
        assert mask == expected, tokenizer.decode([i for i, one in zip(ids, mask, strict=True) if one])
    assert found == wanted


def test_what_is_missing_is_trained_without_if_the_config_says_so() -> None:
    ((ids, mask),) = _rendered("Llama 3", "thought", "warn")
    tokenizer = tokenizer_of("Llama 3")
    assert tokenizer.decode([i for i, one in zip(ids, mask, strict=True) if one]) == "It is two.<|eot_id|>"


def test_the_table_has_nine_conversations_and_twelve_families() -> None:
    assert (len(CONVERSATIONS), len(FAMILIES)) == (9, 12)


def test_no_installed_template_is_forgotten() -> None:
    """A new release of transformers may bring another one: add it to the table."""
    assert installed_templates().keys() == installed_families().keys()
