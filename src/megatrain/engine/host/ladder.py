"""Out of device memory is an event: the ladder of denser settings that a step is tried again with.

Weights change only after a step's gradients are complete, so a step that ran out of memory can be dropped and computed again.
Each rung needs less device memory than the one before and computes the same sums:
    recompute  activations are computed again instead of kept
    chunks     half as many rows of a layer at a time
    head       half as many tokens whose logits exist at the same time
    mlp        MLPs of one long row in chunks of tokens: of a quarter of the row, then of half as many tokens
    offload    the inputs of all layers wait in host memory
    windows    twice as many accumulation windows; gradients are summed in fp32 on the host then
    residents  half as many units live on the device
What was chosen stays for the rest of the run, resumed or not, and is said in the words of the config, to be pasted there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeVar

from megatrain.engine.host.settings import Placement
from megatrain.engine.plan import StepShape
from megatrain.units import size_lines

DEFAULT_CHUNK_TOKENS, LEAST_HEAD_TOKENS = 16384, 64
LEAST_MLP_TOKENS = 1024
"""What one chunk of an MLP takes is nothing beside what the row's hidden states take long before that."""


@dataclass(frozen=True)
class Cut:
    """How steps are cut as long as they fit.

    Attributes:
        microbatch_rows: Rows that a layer computes together; None: as many as hold 16,384 tokens.
        head_tokens: Target tokens whose logits exist at the same time.
        segment: Of which every layer but the first computes its input again.
        placement: What is kept for the backward.
    """

    microbatch_rows: int | None
    head_tokens: int
    segment: int
    placement: Placement

    def shape(self, rows: int, tokens: int, accumulation_steps: int) -> StepShape:
        """The cut of a step on so many rows of so many tokens."""
        return StepShape(
            accumulation_steps=min(accumulation_steps, rows),
            microbatch_rows=self.microbatch_rows or max(1, DEFAULT_CHUNK_TOKENS // tokens),
            head_tokens=self.head_tokens,
            segment=self.segment,
            kept=self.placement.kept,
            selective=self.placement.selective,
            attention=self.placement.attention,
            mlp=self.placement.mlp,
        )


@dataclass(frozen=True)
class Failure:
    """What is known of an allocation that failed.

    Attributes:
        asked: The allocator's own words.
        where: Phase and layer.
        ledger: Bytes by purpose at that moment.
    """

    asked: str
    where: str
    ledger: Mapping[str, int]

    def __str__(self) -> str:
        lines = size_lines(self.ledger, smallest_bytes=1)
        return "\n".join([f"out of device memory in {self.where}: {self.asked}", *lines])


@dataclass(frozen=True)
class Situation:
    """What the ladder must know beside the cut of the step that failed.

    Attributes:
        rows: Of the batch.
        tokens: Of a row.
        training: False in an evaluation, where nothing is kept, offloaded or accumulated.
        offload: Whether the host has room for the inputs of all layers.
        more_windows: Whether the engine could sum gradients over more windows.
        resident: Units that live on the device.
        mlps: Whether MLPs can be computed in chunks of tokens.
        mlp_tokens: Of such a chunk now; None: they are computed whole.
    """

    rows: int
    tokens: int
    training: bool
    offload: bool
    more_windows: bool
    resident: int
    mlps: bool
    mlp_tokens: int | None = None


@dataclass(frozen=True)
class Denser:
    """What the ladder has changed so far.

    Attributes:
        recompute: No activations are kept.
        microbatch_rows: Bound on the rows of a chunk.
        head_tokens: Bound on the tokens of a token chunk.
        mlp_tokens: Bound on the tokens of an MLP's chunk.
        offload: All layer inputs wait in host memory.
        windows: At least so many accumulation windows.
        resident: At most so many units live on the device.
        device_fraction: Share of the device's memory that a plan may fill so that it places no more than these.
    """

    recompute: bool = False
    microbatch_rows: int | None = None
    head_tokens: int | None = None
    mlp_tokens: int | None = None
    offload: bool = False
    accumulation_steps: int | None = None
    resident: int | None = None
    device_fraction: float | None = None

    def applied_to(self, shape: StepShape) -> StepShape:
        """The planned cut of a step, made denser."""
        if self.recompute:
            shape = replace(shape, kept=frozenset(), selective=frozenset(), attention=frozenset(), mlp=frozenset())
        if self.microbatch_rows is not None:
            shape = replace(shape, microbatch_rows=min(shape.microbatch_rows, self.microbatch_rows))
        if self.head_tokens is not None:
            shape = replace(shape, head_tokens=min(shape.head_tokens, self.head_tokens))
        return shape

    def next(self, shape: StepShape, now: Situation) -> Denser | None:
        """The next rung; None at the end of the ladder.

        Args:
            shape: The cut that ran out of memory, this object applied.
            now: Everything else.
        """
        rows = -(-now.rows // shape.accumulation_steps) if now.training else now.rows
        if now.training and shape.variants():
            return replace(self, recompute=True)
        if min(shape.microbatch_rows, rows) > 1:
            return replace(self, microbatch_rows=min(shape.microbatch_rows, rows) // 2)
        if shape.head_tokens > LEAST_HEAD_TOKENS:
            return replace(self, head_tokens=max(LEAST_HEAD_TOKENS, shape.head_tokens // 2))
        if now.mlps and (smaller := _smaller_mlp_chunk(now.tokens, now.mlp_tokens)):
            return replace(self, mlp_tokens=smaller)
        if now.offload and not self.offload and shape.segment == 1:
            return replace(self, offload=True)
        if now.more_windows and shape.accumulation_steps < now.rows:
            return replace(self, accumulation_steps=min(2 * shape.accumulation_steps, now.rows))
        if now.resident:
            return replace(self, resident=now.resident // 2)
        return None

    def joined(self, other: Denser) -> Denser:
        """As dense as both."""
        return Denser(
            recompute=self.recompute or other.recompute,
            microbatch_rows=_least(self.microbatch_rows, other.microbatch_rows),
            head_tokens=_least(self.head_tokens, other.head_tokens),
            mlp_tokens=_least(self.mlp_tokens, other.mlp_tokens),
            offload=self.offload or other.offload,
            accumulation_steps=max(self.accumulation_steps or 0, other.accumulation_steps or 0) or None,
            resident=_least(self.resident, other.resident),
            device_fraction=_least(self.device_fraction, other.device_fraction),
        )

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """What was changed, as sections and keys of a config."""
        changed: dict[str, dict[str, Any]] = {
            "activations": {
                "policy": "recompute" if self.recompute else None,
                "mlp_chunk_tokens": self.mlp_tokens,
                "offload_input": "on" if self.offload else None,
            },
            "batch": {
                "microbatch_rows": self.microbatch_rows,
                "head_chunk_tokens": self.head_tokens,
                "accumulation_steps": self.accumulation_steps,
            },
            "memory": {"device_fraction": self.device_fraction},
        }
        found = {name: {k: v for k, v in keys.items() if v is not None} for name, keys in changed.items()}
        return {name: keys for name, keys in found.items() if keys}

    @property
    def changes(self) -> tuple[str, ...]:
        """The same as `section.key: value`."""
        return tuple(f"{name}.{key}: {value}" for name, keys in self.settings.items() for key, value in keys.items())

    def step_from(self, before: Denser) -> str:
        """The rung between the two, for people."""
        if self.resident != before.resident:
            return f"{self.resident} units on the device (memory.device_fraction: {self.device_fraction})"
        return ", ".join(change for change in self.changes if change not in before.changes)

    @property
    def yaml(self) -> str:
        """The same as lines to paste into a config."""
        lines = []
        for name, keys in self.settings.items():
            lines += [f"{name}:", *(f"  {key}: {value}" for key, value in keys.items())]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Denser:
        """From a checkpoint; names of a newer version are left out."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in plain.items() if name in known})


N = TypeVar("N", int, float)


def _least(*bounds: N | None) -> N | None:
    return min((bound for bound in bounds if bound is not None), default=None)


def _smaller_mlp_chunk(row: int, chunk: int | None) -> int | None:
    """Tokens of the next smaller chunk of an MLP, None at the end.

    Args:
        row: Tokens that a layer computes together: those of one row.
        chunk: Of an MLP's chunk now; None: whole rows.
    """
    chunk = min(chunk or row, row)
    quarter = 1 << (max(4, row) // 4).bit_length() - 1
    smaller = max(LEAST_MLP_TOKENS, chunk // 2 if chunk < row else quarter)
    return smaller if smaller < chunk else None
