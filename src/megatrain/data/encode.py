"""Texts to token ids and masks, in batches through the tokenizer's own threads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatrain.data.render import Rendered
from megatrain.errors import UserError

IdArray = np.ndarray
"""uint32 token ids."""


class Encoder:
    """A tokenizer, as the data part uses it.

    Attributes:
        prefix: Ids put before a document of plain text (BOS, if the tokenizer adds it by itself).
        suffix: Ids put behind one; the last is EOS, if the tokenizer has one.
        bos: Id of the token that begins a text, or None.
        pad: Id that fills rows; it is masked by position, so that it may equal EOS.
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
        self._straddled = 0

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

    def take_notes(self) -> list[str]:
        """What was noticed since the last call, for people."""
        straddled, self._straddled = self._straddled, 0
        begin = (
            "1 answer begins inside a token of its"
            if straddled == 1
            else f"{straddled:,} answers begin inside a token of their"
        )
        return [f"{begin} prompt; it is not trained"] if straddled else []

    def ids(self, texts: Sequence[str]) -> list[IdArray]:
        """The ids of each text, nothing added. This is the fast path: no offsets are kept."""
        if self._backend is None:
            rows = self._tokenizer(list(texts), add_special_tokens=False)["input_ids"]
            return [np.asarray(row, dtype=np.uint32) for row in rows]
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def masked_ids(self, texts: Sequence[Rendered]) -> list[tuple[IdArray, np.ndarray]]:
        """The ids of each text, and which of them are trained (bool).

        Each text is tokenised once, as a whole; its spans become tokens through the tokenizer's offsets.

        Raises:
            UserError: The tokenizer knows no offsets.
        """
        if self._backend is None:
            raise UserError(
                f"the tokenizer ({type(self._tokenizer).__name__}) does not tell which characters a token covers",
                remedy="use a checkpoint with a tokenizer.json; masks cannot be made without it",
            )
        encodings = self._backend.encode_batch([text.text for text in texts], add_special_tokens=False)
        results = []
        for rendered, encoding in zip(texts, encodings, strict=True):
            offsets = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2)
            results.append((np.asarray(encoding.ids, dtype=np.uint32), self._mask(rendered.spans, offsets)))
        return results

    def _mask(self, spans: Sequence[tuple[int, int]], offsets: np.ndarray) -> np.ndarray:
        """Which tokens, given as (N, 2) ranges of characters, lie in a span."""
        mask = np.zeros(len(offsets), dtype=bool)
        begins, ends = offsets[:, 0], offsets[:, 1]
        for begin, end in spans:
            # A token that lies on the border is the prompt's: generation never starts in the middle of a token.
            mask |= (begins >= begin) & (begins < end) & (ends > begin)
            self._straddled += bool(((begins < begin) & (ends > begin)).any())
        return mask
