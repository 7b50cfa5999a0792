"""A user's objective: unlikelihood training (Welleck et al., "Neural Text Generation with Unlikelihood Training", 2020)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatrain.engine.objective import Objective, Targets


class Unlikelihood(Objective):
    """-log p of a target, and -log(1 - p) of the targets that `batch["unlikely"]` flags."""

    batch_keys = ("unlikely",)

    def loss(self, logprobs_N: torch.Tensor, targets: Targets) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        unlikely_N = targets.values["unlikely"].bool()
        others_N = torch.log1p(-logprobs_N.exp().clamp(max=1 - 1e-6))
        losses_N = torch.where(unlikely_N, -others_N, -logprobs_N)
        return losses_N.sum(), {"unlikelihood": losses_N[unlikely_N].sum()}
