"""Texts to token ids and masks, in batches through the tokenizer's own threads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatrain.data.render import Rendered, Span
from megatrain.errors import UserError

IdArray = np.ndarray
"""uint32 token ids."""


class NoTurnEnd(Exception):
    """No token that ends the turn follows an assistant message."""


class Encoder:
    """A tokenizer, as the data part uses it.

    Attributes:
        prefix: Ids put before a document of plain text (BOS, if the tokenizer adds it by itself).
        suffix: Ids put behind one; the last is EOS, if the tokenizer has one.
        bos: Id of the token that begins a text, or None.
        pad: Id that fills rows; it is masked by position, so that it may equal EOS.
        straddled: Tokens that hold the last character of a prompt and the first of an answer; they are not trained.
    """

    def __init__(self, tokenizer: Any):
        from tokenizers import Tokenizer

        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._backend: Tokenizer | None = backend if isinstance(backend, Tokenizer) else None
        if self._backend is not None:
            # A tokenizer.json may carry the truncation of some earlier use.
            self._backend.no_truncation()
            self._backend.no_padding()
        self.bos: int | None = tokenizer.bos_token_id
        eos: int | None = tokenizer.eos_token_id
        self.pad: int = next((i for i in (tokenizer.pad_token_id, eos) if i is not None), 0)
        self.prefix, self.suffix = self._document_ends(eos)
        specials = set(tokenizer.all_special_ids)
        specials |= {i for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special}
        self._is_special = np.zeros(max(specials, default=0) + 1, dtype=bool)
        self._is_special[list(specials)] = True
        self.straddled = 0

    def _document_ends(self, eos: int | None) -> tuple[list[int], list[int]]:
        bare = self._tokenizer("a", add_special_tokens=False)["input_ids"]
        full = self._tokenizer("a", add_special_tokens=True)["input_ids"]
        at = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), None)
        if at is None:
            raise UserError(f"the tokenizer changes a text when it adds its special tokens: {bare} became {full}")
        prefix, suffix = list(full[:at]), list(full[at + len(bare) :])
        if eos is not None and suffix[-1:] != [eos]:
            suffix.append(eos)
        return prefix, suffix

    def fingerprint(self) -> str:
        """A hash of everything that decides the ids of a text."""
        import tokenizers
        import transformers

        state = self._backend.to_str() if self._backend is not None else json.dumps(self._tokenizer.get_vocab())
        ends = [self.prefix, self.suffix, sorted(self._tokenizer.special_tokens_map.items(), key=str)]
        versions = [type(self._tokenizer).__name__, tokenizers.__version__, transformers.__version__]
        return hashlib.sha256("\n".join([state, repr(ends), *versions]).encode()).hexdigest()

    def ids(self, texts: Sequence[str]) -> list[IdArray]:
        """The ids of each text, nothing added. This is the fast path: no offsets are kept."""
        if self._backend is None:
            rows = self._tokenizer(list(texts), add_special_tokens=False)["input_ids"]
            return [np.asarray(row, dtype=np.uint32) for row in rows]
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def masked_ids(self, texts: Sequence[Rendered]) -> list[tuple[IdArray, np.ndarray] | NoTurnEnd]:
        """The ids of each text, and which of them are trained (bool).

        Each text is tokenised once, as a whole; its spans become tokens through the tokenizer's offsets. A text with a
        turn that no token ends gives a `NoTurnEnd` in its place.

        Raises:
            UserError: The tokenizer knows no offsets.
        """
        if self._backend is None:
            raise UserError(
                f"the tokenizer ({type(self._tokenizer).__name__}) does not tell which characters a token covers",
                remedy="use a checkpoint with a tokenizer.json; masks cannot be made without it",
            )
        results: list[tuple[IdArray, np.ndarray] | NoTurnEnd] = []
        encodings = self._backend.encode_batch([text.text for text in texts], add_special_tokens=False)
        for rendered, encoding in zip(texts, encodings, strict=True):
            ids = np.asarray(encoding.ids, dtype=np.uint32)
            offsets = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2)
            try:
                results.append((ids, self._mask(rendered, ids, offsets)))
            except NoTurnEnd as error:
                results.append(error)
        return results

    def _mask(self, rendered: Rendered, ids: IdArray, offsets: np.ndarray) -> np.ndarray:
        mask = np.zeros(len(ids), dtype=bool)
        begins, ends = offsets[:, 0], offsets[:, 1]
        special = self._special(ids)
        for span in rendered.spans:
            # A token that lies on the border is the prompt's: generation never starts in the middle of a token.
            inside = (begins >= span.begin) & (begins < span.end) & (ends > span.begin)
            self.straddled += bool(((begins < span.begin) & (ends > span.begin)).any())
            chosen = np.flatnonzero(inside)
            if len(chosen) and span.turn_end is not None:
                first, last = int(chosen[0]), int(chosen[-1])
                mask[first : _turn_end(rendered.text, span, begins, ends, special, first, last) + 1] = True
            else:
                mask[chosen] = True
        return mask

    def _special(self, ids: IdArray) -> np.ndarray:
        known = ids < len(self._is_special)
        return known & self._is_special[np.where(known, ids, 0)]


def _turn_end(
    text: str, span: Span, begins: np.ndarray, ends: np.ndarray, special: np.ndarray, first: int, last: int
) -> int:
    """Index of the token that ends a turn, given the tokens `first..last` of its span.

    Blanks behind that token, which most templates write, are not the model's words. Where the template's generation
    block stops before the token, it is looked for up to the end of the turn.
    """
    inner = last
    while inner > first and not special[inner] and not text[begins[inner] : ends[inner]].strip():
        inner -= 1
    if special[inner]:
        return inner
    outer = last + 1
    while outer < len(begins) and begins[outer] < (span.turn_end or 0):
        if special[outer]:
            return outer
        if text[begins[outer] : ends[outer]].strip():
            break
        outer += 1
    raise NoTurnEnd
