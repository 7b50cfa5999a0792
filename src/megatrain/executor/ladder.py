"""Out of device memory is an event: the ladder of denser settings that a step is tried again with.

Weights change only after a step's gradients are complete, so a step that ran out of memory can be dropped and computed again.
Each rung needs less device memory than the one before and computes the same sums:
    recompute  activations are computed again instead of kept
    chunks     half as many rows of a layer at a time
    head       half as many tokens whose logits exist at the same time
    offload    the inputs of all layers wait in host memory
What was chosen stays for the rest of the run and is said in the words of the config, to be pasted there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatrain.executor.step import StepShape

LEAST_HEAD_TOKENS = 64


@dataclass(frozen=True)
class Denser:
    """What the ladder has changed so far.

    Attributes:
        recompute: No activations are kept.
        chunk_rows: Bound on the rows of a chunk.
        head_tokens: Bound on the tokens of a token chunk.
        offload: All layer inputs wait in host memory.
    """

    recompute: bool = False
    chunk_rows: int | None = None
    head_tokens: int | None = None
    offload: bool = False

    def applied_to(self, shape: StepShape) -> StepShape:
        """The planned cut of a step, made denser."""
        if self.recompute:
            shape = replace(shape, kept=frozenset(), selective=frozenset(), attention=frozenset(), mlp=frozenset())
        if self.chunk_rows is not None:
            shape = replace(shape, chunk_rows=min(shape.chunk_rows, self.chunk_rows))
        if self.head_tokens is not None:
            shape = replace(shape, head_tokens=min(shape.head_tokens, self.head_tokens))
        return shape

    def next(self, shape: StepShape, rows: int) -> tuple[Denser, str] | None:
        """The next rung.

        Args:
            shape: The cut that ran out of memory, this object applied.
            rows: Rows of a window.

        Returns:
            (what to go on with, the change in the words of the config), None at the end of the ladder.
        """
        if shape.variants():
            return replace(self, recompute=True), "activations.policy: recompute"
        if min(shape.chunk_rows, rows) > 1:
            fewer = min(shape.chunk_rows, rows) // 2
            return replace(self, chunk_rows=fewer), f"batch.chunk_rows: {fewer}"
        if shape.head_tokens > LEAST_HEAD_TOKENS:
            fewer = max(LEAST_HEAD_TOKENS, shape.head_tokens // 2)
            return replace(self, head_tokens=fewer), f"batch.head_chunk_tokens: {fewer}"
        if not self.offload and shape.segment == 1:
            return replace(self, offload=True), "activations.offload: on"
        return None
