"""What the routers of a mixture of experts did in a step, over all rows and ranks. See [Note: the auxiliary loss] in
models/routers.py.

[Note: counts before slopes]
The backward needs the counts of the whole step. With one accumulation step they are complete behind the forward. With several,
the first backward would run before the last forward: then all forwards run once more, in front, without gradients.

Shapes: B rows, T tokens, N tokens of a microbatch, L layers, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatrain.device.shards import Shards
from megatrain.models.routers import Routed, RouterLoss


class Routing:
    """Sums over the routers of one step. All tensors are on the device; nothing here waits for it.

    Args:
        loss: The auxiliary loss, None without.
        routers: Routers of each layer.
        mask_BT: 0 where a token is padding, of this rank's rows.
        shards: The ranks.
    """

    def __init__(self, loss: RouterLoss | None, routers: Sequence[int], mask_BT: torch.Tensor, shards: Shards):
        self.loss, self._shards = loss, shards
        self._mask_BT = mask_BT.float()
        self._pass_BT = self._mask_BT
        self._complete, self._dtype = False, torch.float32
        self._loads: dict[int, torch.Tensor] = {}
        self._tokens = self._mask_BT.sum(dtype=torch.float64)
        self._routed = self._tokens * sum(routers)
        self._balance: torch.Tensor | None = None
        if loss is not None:
            self._balance = torch.zeros(2, loss.experts, dtype=torch.float64, device=mask_BT.device)
        self.slopes: torch.Tensor | None = None
        """(2, E): the gradient of every layer's `Routed.balance`, from `complete` on."""

    def begin_pass(self, rows: slice) -> None:
        """The rows of the accumulation step that follows."""
        self._pass_BT = self._mask_BT[rows]

    def mask_N(self, rows: slice) -> torch.Tensor:
        """0 where a token is padding, of a microbatch of this accumulation step."""
        return self._pass_BT[rows].reshape(-1)

    def add(self, layer: int, routed: Routed) -> None:
        """Count what a layer did with a microbatch, unless everything has been counted before."""
        if self._complete:
            return
        if routed.balance is not None:
            assert self._balance is not None
            self._balance += routed.balance.detach()
            self._dtype = routed.balance.dtype
        if routed.load is not None:
            held = self._loads.get(layer)
            self._loads[layer] = routed.load.double() if held is None else held + routed.load

    def complete(self, scale: float) -> None:
        """Every row of the step has been routed: add the ranks up, once. Collective.

        Args:
            scale: Factor on the gradient of the auxiliary loss, its coefficient aside.
        """
        if self._complete:
            return
        self._complete = True
        parts = [torch.stack([self._routed, self._tokens]), *self._loads.values()]
        if self._balance is not None:
            parts.append(self._balance.reshape(-1))
        if self._shards.many:
            sums = self._shards.total(torch.cat(parts)).split([len(part) for part in parts])
        else:
            sums = tuple(parts)
        self._routed, self._tokens = sums[0]
        self._loads = dict(zip(self._loads, sums[1:], strict=False))
        if self.loss is not None:
            self._balance = sums[-1].reshape(2, -1)
            counts_E = self._balance[0]
            slopes_E = counts_E * (scale * self.loss.coefficient * self.loss.experts / self._routed.square())
            self.slopes = torch.stack([torch.zeros_like(slopes_E), slopes_E]).to(self._dtype)

    def load(self, layer: int) -> torch.Tensor:
        """(E,) tokens of each expert of a layer, over all ranks; on the CPU. Waits for the device."""
        assert self._complete
        return self._loads[layer].cpu()

    def figures(self) -> dict[str, torch.Tensor]:
        """The step's figures, see `StepResult.routing`; scalars, the same on all ranks."""
        assert self._complete
        found: dict[str, torch.Tensor] = {}
        if self.loss is not None:
            assert self._balance is not None
            product = (self._balance[0] * self._balance[1]).sum()
            found["aux_loss"] = self.loss.experts * product / self._routed.square()
        if self._loads:
            loads = list(self._loads.values())
            found["max_load"] = torch.stack([load.max() / load.mean().clamp(min=1e-9) for load in loads]).max()
            found["max_share"] = torch.stack([load.max() for load in loads]).max() / self._tokens.clamp(min=1)
            found["idle"] = torch.cat([load == 0 for load in loads]).double().mean()
        return found
