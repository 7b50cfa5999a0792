"""How a step is cut, and what its layers keep for the backward: what the ladder changes and the step runner follows."""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.models.templates import Variant


@dataclass(frozen=True)
class StepShape:
    """How a step is cut.

    Attributes:
        windows: Accumulation windows.
        microbatch_rows: Rows that a layer computes together.
        head_tokens: Target tokens whose logits exist at the same time.
        segment: 1 keeps every layer's input, K keeps every K-th and computes a layer a third time.
        kept: Layers whose activations are kept.
        selective: Layers whose activations are kept in part.
        attention: Layers that keep what their attention gave, and recompute all else.
        mlp: Layers that keep the products of their MLP's matrices, and recompute all else. All others are recomputed.
    """

    accumulation_steps: int
    microbatch_rows: int
    head_tokens: int
    segment: int
    kept: frozenset[int] = frozenset()
    selective: frozenset[int] = frozenset()
    attention: frozenset[int] = frozenset()
    mlp: frozenset[int] = frozenset()

    def variants(self) -> dict[int, Variant]:
        """Variant of each layer that is not recomputed from its input alone."""
        sets: dict[Variant, frozenset[int]] = {
            "attention": self.attention, "mlp": self.mlp, "selective": self.selective, "keep": self.kept
        }  # fmt: skip
        return {layer: variant for variant, layers in sets.items() for layer in layers}
