"""Long documents are tokenized in pieces, which together have the ids of the whole.

[Note: cutting a document]
Tokenizers slow down on long texts, and tokenize several texts in parallel, so a long document is cut. A cut is safe where the
tokenizer starts a new token whatever stands before and after. Two things can go wrong:
- Some tokenizers put a space before every text (Llama 2, Mistral). Pieces after the first are encoded by a copy of the tokenizer
  that does not (`continuation`).
- Merges may reach across the cut: in Chinese text, a row of dashes, a run of spaces. So every cut is checked: the characters
  around it are tokenized together and apart, twice, with different beginnings, because in a periodic text the tokens depend on
  where it begins. A cut that fails is moved. If no place is safe, the piece grows.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

PIECE_CHARS = 16_384
"""Size of a piece."""
MOST_CHARS = 1 << 22
"""A piece that grows beyond this is cut at an unchecked place, which the log says."""
_BEFORE = (61, 48)
_AFTER = 48
"""Characters around a cut that are tokenized to check it."""
_TRIES = 4
_PUNCTUATION = "\u3002\uff0c\uff01\uff1f\u3001.,"

Encode = Callable[[Sequence[str]], list[list[int]]]
Piece = tuple[str, bool]
"""A piece of a document, and whether it continues the piece before it."""


class Cutter:
    """Cuts one document after another.

    Args:
        encode: Ids of texts, without special tokens that the tokenizer would add; None: cut nothing.
        continued: The same for pieces that continue others.
        anywhere: Whether places inside a word may be tried. Not for a unigram model, which chooses the best ids of a whole word:
            in a periodic one several are equally good, and the choice depends on its end.
    """

    def __init__(self, encode: Encode | None, continued: Encode, anywhere: bool = True):
        self._encode, self._continued, self._anywhere = encode, continued, anywhere
        self._rest = ""
        self._continues = False
        self.unchecked = 0  # cuts at places that may change ids

    def feed(self, text: str, last: bool) -> list[Piece]:
        """Pieces of the current document, continued by `text`; all remaining ones if it is the `last` part."""
        text = self._rest + text
        pieces: list[Piece] = []
        begin = 0
        while len(text) - begin > PIECE_CHARS + _AFTER:
            end = self._end(text, begin)
            if end is None:
                break
            pieces.append((text[begin:end], self._continues))
            self._continues, begin = True, end
        self._rest = text[begin:]
        if last:
            pieces.append((self._rest, self._continues))
            self._rest, self._continues = "", False
        return pieces

    def _end(self, text: str, begin: int) -> int | None:
        """The end of the piece that begins at `begin`; None if the document must go on first, or be taken as it is."""
        if self._encode is None:
            return None
        limit = begin + PIECE_CHARS
        while limit + _AFTER <= len(text):
            for at in candidates(text, limit - PIECE_CHARS // 2, limit, self._anywhere):
                if self.is_safe(text, at):
                    return at
            limit += PIECE_CHARS
        if len(text) - begin > MOST_CHARS:
            self.unchecked += 1
            return begin + MOST_CHARS
        return None

    def is_safe(self, text: str, at: int) -> bool:
        """Whether a cut before the character `at` does not change the ids around it."""
        assert self._encode is not None
        after = text[at : at + _AFTER]
        lefts = [text[max(0, at - chars) : at] for chars in _BEFORE]
        texts = [*lefts, *(left + after for left in lefts)]
        if self._continued == self._encode:  # one call
            *encoded, right = self._encode([*texts, after])
        else:
            encoded, (right,) = self._encode(texts), self._continued([after])
        return all(alone + right == whole for alone, whole in zip(encoded[:2], encoded[2:], strict=True))


def candidates(text: str, first: int, limit: int, anywhere: bool = True) -> Iterator[int]:
    """Places to cut after `first` and up to `limit`, the most promising ones first, few of each kind.

    Before a single space followed by a letter, where common tokenizers start a new word; before a newline between two letters or
    digits; after punctuation; anywhere.
    """
    yield from itertools.islice(_places(text, " ", first, limit, _is_before_word), _TRIES)
    yield from itertools.islice(_places(text, "\n", first, limit, _is_between_lines), _TRIES)
    for mark in _PUNCTUATION:
        yield from (at + 1 for at in itertools.islice(_places(text, mark, first, limit - 1, _is_before_text), 1))
    if anywhere:
        yield from range(limit, first, -(limit - first) // _TRIES - 1)


def _places(text: str, mark: str, first: int, limit: int, fits: Callable[[str, int], bool]) -> Iterator[int]:
    at = limit + 1
    while (at := text.rfind(mark, first + 1, at)) >= 0:
        if fits(text, at):
            yield at


def _is_before_word(text: str, at: int) -> bool:
    return text[at + 1].isalpha() and not text[at - 1].isspace()


def _is_between_lines(text: str, at: int) -> bool:
    return text[at - 1].isalnum() and text[at + 1].isalnum()


def _is_before_text(text: str, at: int) -> bool:
    return not text[at + 1].isspace()


def adds_prefix(backend: Tokenizer) -> bool:
    """Whether a tokenizer puts a space before a text."""
    parts = [
        json.loads(part.__getstate__()) for part in (backend.normalizer, backend.pre_tokenizer) if part is not None
    ]
    return any(_without_prefix(part) != part for part in parts)


def continuation(backend: Tokenizer) -> Tokenizer:
    """A copy of a tokenizer that puts no space before a text."""
    state = json.loads(backend.to_str())
    changed = {name: _without_prefix(state.get(name)) for name in ("normalizer", "pre_tokenizer")}
    return Tokenizer.from_str(json.dumps({**state, **changed}))


def _without_prefix(part: Any) -> Any:
    """A normalizer or pre-tokenizer, as JSON, that adds nothing at the beginning of a text."""
    if not isinstance(part, dict):
        return part
    for key in ("normalizers", "pretokenizers"):
        if isinstance(part.get(key), list):
            kept = [_without_prefix(one) for one in part[key] if one.get("type") != "Prepend"]
            return {**part, key: kept}
    if part.get("type") == "Prepend":
        return None
    if part.get("type") == "Metaspace":
        return {**part, "prepend_scheme": "never"}
    if part.get("type") == "ByteLevel":
        return {**part, "add_prefix_space": False}
    return part


class ContinuedEncoder:
    """Encodes pieces that continue others, for a tokenizer that puts a space before a text.

    It also puts one after each special token inside a text, and must there: only the part before the first one is encoded
    without.

    Args:
        encode: For the rest of a piece.
        bare: Makes an encoder with the tokenizer's `continuation`, when it is needed.
        added: The tokens that are found in a text before anything else.
    """

    def __init__(self, encode: Encode, bare: Callable[[], Encode], added: Sequence[AddedToken]):
        self._encode = encode
        self._bare = functools.cache(bare)
        # a token with `lstrip` takes in the whitespace before it
        words = [(r"\s*" if token.lstrip else "") + re.escape(token.content) for token in added]
        self._added = re.compile("|".join(words)) if words else None

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        cuts = [self._cut(text) for text in texts]
        heads = self._bare()([text[:cut] for text, cut in zip(texts, cuts, strict=True)])
        rests = iter(self._encode([text[cut:] for text, cut in zip(texts, cuts, strict=True) if cut < len(text)]))
        return [
            [*head, *(next(rests) if cut < len(text) else ())]
            for head, text, cut in zip(heads, texts, cuts, strict=True)
        ]

    def _cut(self, text: str) -> int:
        found = self._added.search(text) if self._added is not None else None
        return found.start() if found is not None else len(text)
