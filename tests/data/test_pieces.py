"""Long documents are tokenized in pieces that have the ids of the whole, whatever the tokenizer and the text."""

from __future__ import annotations

import functools
import random

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import tiny_tokenizer as tiny
from megatrain.data import pieces
from megatrain.data.encoder import Encoder
from megatrain.data.pieces import PIECE_CHARS, Cutter, candidates

WORDS = "the weather in paris is sunny today and mild, with 12 tools: don't call __init__(self) twice!".split()
_RANDOM = random.Random(0)
TEXTS = {
    "words": " ".join(_RANDOM.choice(WORDS) for _ in range(2500)),
    "lines": "".join(_RANDOM.choice([" ", "\n", "\n\n", "\t", "  "]) + _RANDOM.choice(WORDS) for _ in range(2500)),
    "chinese": "".join(chr(0x4E00 + _RANDOM.randrange(40)) for _ in range(6000)),
    "chinese sentences": "".join(
        chr(0x4E00 + _RANDOM.randrange(40)) if _RANDOM.random() < 0.95 else "\u3002" for _ in range(6000)
    ),
    "a run": "a" * 6001,
    "runs": "".join(_RANDOM.choice(["-" * 700, " " * 301, "=" * 99, "word ", "\n" * 333]) for _ in range(30)),
    "periodic": "abcab" * 1500,
    "special tokens": "".join(_RANDOM.choice(["word ", "one", "<|im_end|>", " ", "\n"]) for _ in range(4000)),
    "combining": "e\u0301" * 3000,
}


@functools.cache
def _tokenizer(kind: str) -> PreTrainedTokenizerFast:
    corpus = [text[:3000] for name, text in TEXTS.items() if name != "special tokens"]
    special = ["<unk>", "<s>", "<|im_end|>"]
    if kind == "unigram":
        made = Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(
            vocab_size=300, special_tokens=special, unk_token="<unk>", show_progress=False
        )
    else:
        made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=False))
        trainer = trainers.BpeTrainer(
            vocab_size=500,
            special_tokens=special,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
    gpt4 = r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    made.pre_tokenizer = {
        "byte level": pre_tokenizers.ByteLevel(add_prefix_space=False),
        "byte level with a prefix": pre_tokenizers.ByteLevel(add_prefix_space=True),
        "gpt 4": pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(gpt4), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
        "metaspace first": pre_tokenizers.Metaspace(prepend_scheme="first", split=False),
        "metaspace always": pre_tokenizers.Metaspace(prepend_scheme="always"),
        "unigram": pre_tokenizers.Metaspace(prepend_scheme="always"),
        "llama 2": None,
    }[kind]
    if kind == "llama 2":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    elif kind == "gpt 4":
        made.normalizer = normalizers.NFC()
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator([text.replace(" ", "\u2581") for text in corpus] if kind == "llama 2" else corpus, trainer)
    made.add_tokens([AddedToken("<think>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="<|im_end|>")


def _pieces(encoder: Encoder, text: str, block: int) -> list[pieces.Piece]:
    """The pieces of a text that comes in blocks."""
    cutter, made = encoder.cutter(), []
    blocks = [text[at : at + block] for at in range(0, len(text), block)] or [""]
    for number, one in enumerate(blocks, 1):
        made += cutter.feed(one, last=number == len(blocks))
    assert cutter.unchecked == 0
    return made


@pytest.mark.parametrize("kind", ["byte level", "byte level with a prefix", "gpt 4", "metaspace first", "metaspace always",
                                  "unigram", "llama 2"])  # fmt: skip
@pytest.mark.parametrize("name", TEXTS)
def test_the_pieces_have_the_ids_of_the_whole(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_CHARS", 500)
    tokenizer, text = _tokenizer(kind), TEXTS[name]
    encoder = Encoder(tokenizer)
    made = _pieces(encoder, text, block=1700)
    assert "".join(piece for piece, _ in made) == text
    ids = [i for row in encoder.ids(made) for i in row.tolist()]
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    if name in ("words", "lines", "special tokens"):
        assert len(made) > len(text) / 1000, "it was cut"


def test_the_tokenizers_differ_without_the_care(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of the test above: cut anywhere and encoded one by one, the ids are others."""
    monkeypatch.setattr(pieces, "PIECE_CHARS", 500)
    for kind, name in (
        ("byte level", "chinese"),
        ("llama 2", "words"),
        ("byte level", "a run"),
        ("gpt 4", "combining"),
    ):
        tokenizer, text = _tokenizer(kind), TEXTS[name]
        apart = [text[at : at + 501] for at in range(0, len(text), 501)]
        ids = [i for row in tokenizer(apart, add_special_tokens=False)["input_ids"] for i in row]
        assert ids != tokenizer(text, add_special_tokens=False)["input_ids"], (kind, name)


def test_documents_follow_one_another_and_short_ones_are_one_piece() -> None:
    cutter = Encoder(tiny.make_tokenizer()).cutter()
    long = "The quick fox. " * 3000
    first = cutter.feed(long, last=True)
    assert [continues for _, continues in first] == [False, *[True] * (len(first) - 1)]
    assert all(len(piece) <= PIECE_CHARS + 48 for piece, _ in first)
    assert cutter.feed("short", last=True) == [("short", False)]
    assert cutter.feed("", last=True) == [("", False)]


def test_a_text_that_cannot_be_cut_safely_grows_up_to_a_limit_and_then_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pieces, "PIECE_CHARS", 200)
    monkeypatch.setattr(pieces, "MOST_CHARS", 2000)

    def one_token(texts: list[str]) -> list[list[int]]:
        return [[len(text)] for text in texts]

    cutter = Cutter(one_token, one_token)
    made = cutter.feed("x" * 5000, last=True)
    assert [len(piece) for piece, _ in made] == [2000, 2000, 1000]
    assert cutter.unchecked == 2
    whole = Cutter(None, one_token)
    assert [whole.feed("x" * 5000, last=False), len(whole.feed("x", last=True)[0][0])] == [[], 5001]


def test_words_are_cut_before_their_space_first() -> None:
    text = "some  words , of 12 lengths; " * 100
    for at in [*candidates(text, 1000, 2000)][:4]:
        assert text[at] == " "
        assert text[at + 1].isalpha()
        assert not text[at - 1].isspace()
