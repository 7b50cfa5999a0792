"""The tokens of a tensor group: between blocks each rank has its part of them, inside a block all ranks have all.

Shapes: B rows, L tokens, S = L / tensor, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

TOKEN_DIM = 1


def gather_at_entry(
    module: nn.Module, mesh: DeviceMesh, hand_over: Callable[[DTensor], Any] = lambda whole: whole
) -> nn.Module:
    """Let a module be called with this rank's tokens (B, S, D), its first argument, and see those of all ranks (B, L, D).

    Args:
        module: Gets a hook in front of its forward.
        mesh: The tensor dimension.
        hand_over: Makes what the module sees of the replicated tokens.
    """

    def gather(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden_BSD = args[0] if args else kwargs["hidden_states"]
        split = DTensor.from_local(hidden_BSD, mesh, [Shard(TOKEN_DIM)], run_check=False)
        whole_BLD = hand_over(split.redistribute(placements=[Replicate()]))
        return ((whole_BLD, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": whole_BLD})

    module.register_forward_pre_hook(gather, with_kwargs=True)
    return module
