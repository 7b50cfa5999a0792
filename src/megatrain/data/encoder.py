"""Text to token ids and masks, through the tokenizer.

[Note: prompt ids and answer ids]
At inference the prompt is tokenized without the answer, and the answer's ids follow. A text tokenized as a whole may have other
ids: after `Weather: ` the answer `sunny` would share the token ` sunny` with the prompt. So every text is cut where an answer
begins and where it ends, and the pieces are tokenized one by one. Then every token belongs to one side.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from megatrain.data.pieces import ContinuedEncoder, Cutter, Piece, adds_prefix, continuation
from megatrain.data.render import Rendered
from megatrain.data.specials import MARK, MarkedEncoder, special_tokens
from megatrain.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as FastTokenizer

CONTEXT_CHARS = 64
"""Characters before a piece that its ids may depend on."""
MOST_CONTEXTS = 4096
"""Cached ids of contexts."""


class Encoder:
    """Turns texts into token ids and masks, in batches, on the tokenizer's threads."""

    def __init__(self, tokenizer: Any):
        from tokenizers import Tokenizer

        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._backend = _Backend(backend, tokenizer) if isinstance(backend, Tokenizer) else None
        self.bos: int | None = tokenizer.bos_token_id
        eos: int | None = tokenizer.eos_token_id
        # Fills rows. Padding is masked by position, so the id may equal EOS.
        self.pad: int = next((i for i in (tokenizer.pad_token_id, eos) if i is not None), 0)
        bare = tokenizer("a", add_special_tokens=False)["input_ids"]
        full = tokenizer("a", add_special_tokens=True)["input_ids"]
        at = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), None)
        if at is None:
            raise UserError(f"the tokenizer changes a text when it adds special tokens: {bare} became {full}")
        # Before a plain text document (BOS, if the tokenizer adds it by itself), and after it (last EOS, if there is one).
        self.prefix, self.suffix = list(full[:at]), list(full[at + len(bare) :])
        if eos is not None and self.suffix[-1:] != [eos]:
            self.suffix.append(eos)
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        self._greedy = tuple(token.content for token in added if token.rstrip)  # they take in the whitespace after them
        self._continued = self._encode
        self._anywhere = True
        if isinstance(backend, Tokenizer):
            self._anywhere = type(backend.model).__name__ != "Unigram"
            if adds_prefix(backend):
                self._continued = ContinuedEncoder(
                    self._encode, lambda: _Backend(continuation(backend), tokenizer), [*added]
                )
        self._bare = self._is_bare()
        self._context_ids: dict[str, list[int]] = {}

    def fingerprint(self) -> str:
        """Hash of everything that determines the ids of a text."""
        import tokenizers
        import transformers

        state = self._backend.state if self._backend is not None else json.dumps(self._tokenizer.get_vocab())
        ends = [self.prefix, self.suffix, sorted(self._tokenizer.special_tokens_map.items(), key=str)]
        versions = [type(self._tokenizer).__name__, tokenizers.__version__, transformers.__version__]
        return hashlib.sha256("\n".join([state, repr(ends), *versions]).encode()).hexdigest()

    def cutter(self) -> Cutter:
        """Cuts long documents into pieces for `ids`."""
        if self._backend is None:
            return Cutter(None, self._encode)
        return Cutter(
            self._encode, self._continued, anywhere=json.loads(self._backend.state)["model"]["type"] != "Unigram"
        )

    def ids(self, pieces: Sequence[Piece]) -> list[np.ndarray]:
        """The ids (uint32) of each piece of a document, without special tokens. See [Note: cutting a document]."""
        first = [text for text, continues in pieces if not continues]
        more = [text for text, continues in pieces if continues]
        if self._continued == self._encode:  # one call keeps all threads busy
            return [np.asarray(row, dtype=np.uint32) for row in self._encode([text for text, _ in pieces])]
        encoded = {False: iter(self._encode(first)), True: iter(self._continued(more))}
        return [np.asarray(next(encoded[continues]), dtype=np.uint32) for _, continues in pieces]

    def masked_ids(self, texts: Sequence[Rendered]) -> list[tuple[np.ndarray, np.ndarray]]:
        """The ids (uint32) of each text, and which of them are trained (bool). See [Note: prompt ids and answer ids]."""
        pieces = [[*rendered.pieces()] for rendered in texts]
        contexts = [
            [self._context(rendered.text, begin) for begin, _, _ in p]
            for rendered, p in zip(texts, pieces, strict=True)
        ]
        jobs = [
            context + rendered.text[begin:end]
            for rendered, own, before in zip(texts, pieces, contexts, strict=True)
            for (begin, end, _), context in zip(own, before, strict=True)
        ]
        encoded = iter(self._encode(jobs))
        results = []
        for rendered, own, before in zip(texts, pieces, contexts, strict=True):
            ids: list[int] = []
            lengths, trained = [], []
            for (begin, end, is_trained), context in zip(own, before, strict=True):
                new = next(encoded)
                if context:
                    new = self._after(context, rendered.text[begin:end], new, is_trained)
                ids += new
                lengths.append(len(new))
                trained.append(is_trained)
            mask = np.repeat(np.asarray(trained, dtype=bool), lengths)
            results.append((np.asarray(ids, dtype=np.uint32), mask))
        return results

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without special tokens that the tokenizer would add."""
        if not texts:
            return []
        if self._backend is not None:
            return self._backend(texts)
        if any(MARK in text for text in texts):
            what = f"the tokenizer ({type(self._tokenizer).__name__}) cannot read special tokens as text"
            raise UserError(what, "data.special_tokens", "set it to control or reject, or use a tokenizer.json")
        return self._tokenizer(list(texts), add_special_tokens=False)["input_ids"]

    # ---- pieces of a text

    def _is_bare(self) -> bool:
        """Whether a piece of a text has the same ids alone as after the text before it.

        Not so for tokenizers that put a space before a text (Llama 2, Mistral), or whose special tokens take in the
        whitespace around them (Phi 3).
        """
        decoder = getattr(self._tokenizer, "added_tokens_decoder", {})
        if self._backend is None or any(token.lstrip or token.rstrip for token in decoder.values()):
            return False
        probes = ["a", "The", "1", "\u00e9", "word and word"]
        special = [text for text in self._tokenizer.all_special_tokens if text][:1]
        for before in ("x\n", "1 =", *special):
            alone, *together = self._encode([before, *(before + probe for probe in probes)])
            if together != [alone + ids for ids in self._encode(probes)]:
                return False
        return True

    def _context(self, text: str, begin: int) -> str:
        """The end of the text before a piece, which its ids may depend on; empty for a tokenizer without such dependence."""
        return "" if self._bare else text[max(0, begin - CONTEXT_CHARS) : begin]

    def _after(self, context: str, piece: str, together: list[int], exact: bool) -> list[int]:
        """The ids of a piece, from its ids together with the context before it.

        `exact`: the piece must keep its leading whitespace, even if the special token before it would take it in.
        """
        lost = exact and piece[:1].isspace() and context.rstrip().endswith(self._greedy)
        alone = self._known_ids(context)
        if not lost and together[: len(alone)] == alone:
            return together[len(alone) :]
        # The context joins the piece: continue after something else.
        for neutral in ("\n", "a", "."):
            alone, together = self._encode([neutral, neutral + piece])
            if together[: len(alone)] == alone:
                return together[len(alone) :]
        return self._encode([piece])[0]

    def _known_ids(self, context: str) -> list[int]:
        """The ids of a context; most are the header of an answer, and the same in every sample."""
        ids = self._context_ids.get(context)
        if ids is None:
            if len(self._context_ids) >= MOST_CONTEXTS:
                self._context_ids.clear()
            ids = self._context_ids[context] = self._encode([context])[0]
        return ids


class _Backend:
    """Encodes texts with a fast tokenizer, also texts with marks: see [Note: marks] in specials.py."""

    def __init__(self, backend: FastTokenizer, tokenizer: Any):
        self._backend, self._tokenizer = backend, tokenizer
        # A tokenizer.json may contain truncation and padding from an earlier use.
        backend.no_truncation()
        backend.no_padding()
        self._marked: MarkedEncoder | None = None

    @property
    def state(self) -> str:
        return self._backend.to_str()

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        if not any(MARK in text for text in texts):
            return [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]
        if self._marked is None:
            self._marked = MarkedEncoder(self._backend, special_tokens(self._tokenizer))
        marked = iter(self._marked([text for text in texts if MARK in text]))
        plain = iter(self([text for text in texts if MARK not in text]))
        return [next(marked if MARK in text else plain) for text in texts]
