"""Model FLOPs utilisation: the share of the matrix peak of a run's GPUs that its steps put into the model.

[Note: MFU]
    FLOPs of a step = 3 x (processed tokens x layers + trained tokens x head)
    layers          = matrix products + causal attention of a forward, per token, counted from the layers' own code
    head            = 2 x vocabulary x hidden
    MFU             = FLOPs of a step / (seconds of the step x matrix peak x GPUs)

3: a backward costs two forwards. Recomputation is not the model's work and does not count; neither does padding. The head counts
trained tokens only, because no logits are computed for others. Attention is linear in the length of a document, not of the row
that it shares; a sliding window counts as full causal attention. The peak is the one measured on this machine with bf16 matrices
of a layer's sizes (`megatrain doctor`), not a data sheet's. Runs that do not compute in bf16 or fp16 have no MFU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from megatrain.planner.model_cost import ModelShape


@dataclass(frozen=True)
class Utilisation:
    """Computes the MFU of steps; see [Note: MFU]. `document_tokens`: (D,) tokens of each document of a step, without padding."""

    shape: ModelShape
    peak_tflops: float  # measured matrix peak of all GPUs of the run together [TFLOP/s]

    def mfu(self, document_tokens: np.ndarray, trained_tokens: int, seconds: float) -> float:
        """MFU of a step, 0 to 1."""
        return self.flops(document_tokens, trained_tokens) / (seconds * self.peak_tflops * 1e12)

    def flops(self, document_tokens: np.ndarray, trained_tokens: int) -> float:
        """The model's FLOPs of a step, forward and backward."""
        processed = float(document_tokens.sum())
        head = 2.0 * self.shape.head_matrix
        layers = 0.0
        if processed:
            # Linear in the length, so the mean over tokens of their document's length gives the exact sum.
            length = float((document_tokens.astype(np.float64) ** 2).sum()) / processed
            layers = self.shape.forward_flops(length) - head
        return 3.0 * (processed * layers + trained_tokens * head)
