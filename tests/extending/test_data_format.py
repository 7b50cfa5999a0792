"""The worked example of docs/extending.md: a data format is one entry, and everything behind it comes for free."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.data.formats import FORMATS, ChatSample, Format, SampleRejected, find_reading


def debate(fields) -> ChatSample:
    """A record {topic, pro, con}: the topic is asked, both sides are trained as one answer."""
    if not fields["topic"]:
        raise SampleRejected("topic is empty")
    answer = f"For: {fields['pro']}\nAgainst: {fields['con']}"
    messages = [{"role": "user", "content": fields["topic"]}, {"role": "assistant", "content": answer}]
    return ChatSample(messages, flags=(None, None))


def test_a_format_reads_records_by_its_own_column_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, "debate", Format(("topic", "pro", "con"), (), debate))
    records = [{"topic": "Cats?", "pro": "Soft.", "against": "Claws."}, {"topic": "", "pro": "a", "against": "b"}]
    reading = find_reading(records, "debate", {"con": "against"}, "debates.jsonl")
    sample = reading.sample(records[0])
    assert isinstance(sample, ChatSample)
    assert sample.messages[1]["content"] == "For: Soft.\nAgainst: Claws."
    with pytest.raises(SampleRejected, match="topic is empty"):
        reading.sample(records[1])
