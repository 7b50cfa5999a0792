"""What a record becomes: one of the kinds of sample, or a rejection with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


class SampleRejected(Exception):
    """One sample cannot be used. `reason` is the same text for every sample with this fault, `detail` is its own."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason} ({detail})" if detail else reason)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class TextSample:
    text: str


@dataclass(frozen=True)
class PromptSample:
    """Plain text without a chat template; only the completion is trained."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class ChatSample:
    """A conversation, with everything that the record says about it.

    Attributes:
        messages: As chat templates take them. `content` is a string, or None where the record has null, or absent where it is
            absent (a message with only tool calls). All other keys are the record's own.
        flags: For each message, whether the record wants it trained; None: not stated.
        tools: JSON schemas for the template.
        answers_from: Index of the first message that may be trained; those before it are the prompt.
        keywords: The record's own keywords for the template, such as `enable_thinking`.
    """

    messages: list[dict[str, Any]]
    flags: tuple[bool | None, ...]
    tools: list[dict[str, Any]] | None = None
    answers_from: int = 0
    keywords: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenSample:
    """Token ids; `trained` has one entry per id, or is None if all are trained."""

    input_ids: list[int]
    trained: list[bool] | None = None


@dataclass(frozen=True)
class PairSample:
    """Two answers to one prompt, the preferred one and the other."""

    chosen: PromptSample | ChatSample
    rejected: PromptSample | ChatSample


@dataclass(frozen=True)
class LabelledSample:
    """An answer that is labelled good (desirable) or bad."""

    sample: PromptSample | ChatSample
    good: bool


Sample = TextSample | PromptSample | ChatSample | TokenSample | PairSample | LabelledSample
DataKind = Literal["samples", "pairs", "labels"]
"""What an objective is trained on: single samples; a preferred and a rejected answer; answers that are labelled good or bad."""
Fields = Mapping[str, Any]
"""A record, keyed by the format's column names."""
