"""Model FLOPs utilisation: what share of the machine's matrix peak a run's steps put into the model.

[Note: MFU]
    FLOPs of a step = 3 x (processed tokens x layers + trained tokens x head)
    layers          = matrix products + causal attention of a forward, per token, counted from the layers' own code
    head            = 2 x vocabulary x hidden
    MFU             = FLOPs of a step / (seconds of the step x matrix peak x GPUs)

3: a backward is two forwards. Recomputation is work, but none of the model's, and does not count; nor does padding. The head
counts trained tokens only, because no logits are computed of others. Attention is linear in the length of a document, not of
the row that it shares; a sliding window counts as full causal attention. The peak is the one that this machine showed with bf16
matrices of a layer's sizes (`megatrain doctor`), not a data sheet's. Where it was not measured, or the run does not compute in
bf16 or fp16, there is no MFU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megatrain.config.schema import RunConfig

if TYPE_CHECKING:
    from pathlib import Path

    from megatrain.planner.model_cost import ModelShape


@dataclass(frozen=True)
class Utilisation:
    """Counts the model's FLOPs of steps; see [Note: MFU].

    Attributes:
        shape: The model.
        peak_tflops: Measured matrix peak of all GPUs of the run together [TFLOP/s].
    """

    shape: ModelShape
    peak_tflops: float

    def mfu(self, document_tokens: np.ndarray, trained_tokens: int, seconds: float) -> float:
        """MFU of a step, 0 to 1.

        Args:
            document_tokens: (D,) tokens of each document of the step; padding is none.
            trained_tokens: Target tokens.
            seconds: Wall time.
        """
        return self.flops(document_tokens, trained_tokens) / (seconds * self.peak_tflops * 1e12)

    def flops(self, document_tokens: np.ndarray, trained_tokens: int) -> float:
        """The model's FLOPs of a step, forward and backward."""
        processed = float(document_tokens.sum())
        head = 2.0 * self.shape.head_matrix
        layers = 0.0
        if processed:
            # Linear in the length, so that the mean over tokens of their document's length gives the exact sum.
            length = float((document_tokens.astype(np.float64) ** 2).sum()) / processed
            layers = self.shape.forward_flops(length) - head
        return 3.0 * (processed * layers + trained_tokens * head)


def utilisation_of(run: RunConfig, model_folder: Path) -> Utilisation | None:
    """What counts a run's FLOPs; None where no peak was measured that fits the run."""
    import torch

    from megatrain.engine.mesh import launch
    from megatrain.engine.plan import compute_dtype_of, device_of
    from megatrain.machine.probe import known_machine
    from megatrain.models.build import load_model_config
    from megatrain.planner.model_cost import shape_of

    device = device_of(run.run.device)
    compute = compute_dtype_of(run.precision.compute_dtype, device)
    machine = known_machine(device) if device.type == "cuda" else None
    if machine is None or compute not in (torch.bfloat16, torch.float16):
        return None
    devices = launch.world_size() if run.engine == "mesh" else 1
    config = load_model_config(model_folder, run.model.trust_remote_code)
    shape = shape_of(
        config,
        attn_implementation=run.model.attn_implementation,
        trust_remote_code=run.model.trust_remote_code,
    )
    return Utilisation(shape, machine.matrix_tflops * devices)
