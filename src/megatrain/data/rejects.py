"""Samples that cannot be used: counted by reason, with the places of the first few. Too many of them are an error."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatrain.errors import UserError

EXAMPLES = 3
"""Places kept for each reason."""
MAX_REASONS = 40
"""Further reasons are counted together: a template may quote the sample in its message, which makes every reason unique."""
EARLY_CHECK = 200
"""After this many samples, a source most of whose samples are rejected is refused right away instead of after hours."""


class SampleRejected(Exception):
    """One sample cannot be used. The builder catches and counts it.

    Args:
        reason: The same text for every sample with this fault.
        detail: Specific to this sample.
    """

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason} ({detail})" if detail else reason)
        self.reason, self.detail = reason, detail


@dataclass
class Rejects:
    """The rejected samples of one source.

    Attributes:
        seen: All samples read, rejected ones included.
        counts: Rejected samples by reason.
        examples: The first places of each reason.
    """

    seen: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    @property
    def share(self) -> float:
        return self.total / max(self.seen, 1)

    def add(self, problem: SampleRejected, place: str) -> None:
        reason = problem.reason
        if reason not in self.counts and len(self.counts) >= MAX_REASONS:
            reason = "other reasons"
        self.counts[reason] = self.counts.get(reason, 0) + 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < EXAMPLES:
            examples.append(f"{place} ({problem.detail})" if problem.detail else place)

    def report(self) -> list[str]:
        """One line per reason, the most frequent first."""
        lines = []
        for reason, count in sorted(self.counts.items(), key=lambda item: (-item[1], item[0])):
            more = ", ..." if count > len(self.examples[reason]) else ""
            lines.append(f"{count} x {reason}: {', '.join(self.examples[reason])}{more}")
        return lines

    def check(self, allowed: float, where: str) -> None:
        """Raise if more than the share `allowed` was rejected.

        Raises:
            UserError: With all reasons and their places.
        """
        if self.total == 0 or self.share <= allowed:
            return
        enough = min(1.0, -(-self.total * 1000 // self.seen) / 1000)  # rounded up, so that setting it is enough
        raise UserError(
            f"{self.total:,} of {self.seen:,} samples cannot be used ({self.share:.1%}; {allowed:.1%} allowed):\n    "
            + "\n    ".join(self.report()),
            where=where,
            remedy="check that this is the right file, and its format"
            if self.total == self.seen
            else f"repair them, or set data.allow_rejects to {enough:g} to train without them",
        )

    def check_early(self, allowed: float, where: str) -> None:
        """Refuse a source that is plainly wrong long before its end."""
        if self.seen == EARLY_CHECK and self.share > max(allowed, 0.5):
            self.check(allowed, where)
