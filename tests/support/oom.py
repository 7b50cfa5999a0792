"""Device OOM on purpose, at any torch operation that makes a tensor, wherever it is called."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

Site = str
"""The function of megatrain that allocates, by itself or through autograd and HF's code: `engine/host/head.py backward`."""
HOST = ("engine/batches.py", "engine/objective.py find_targets", "elsewhere")
"""Sites that make host tensors on any device."""


class Allocations(TorchDispatchMode):
    """Counts allocations by site, and makes one of them fail.

    Args:
        fail: (site, its n-th allocation from 1), None to count only.
        device: Type of the device that runs out of memory.

    Attributes:
        seen: Allocations of each site.
        failed: Whether the chosen allocation has failed.
    """

    def __init__(self, fail: tuple[Site, int] | None = None, device: str = "cpu"):
        super().__init__()
        self._fail, self._device = fail, device
        self.seen: Counter[Site] = Counter()
        self.failed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func._schema.returns
        site = _site() if returned and all(one.alias_info is None for one in returned) else "elsewhere"
        if not site.startswith(HOST) and self._on_the_device((args, kwargs)):
            self.seen[site] += 1
            if not self.failed and self._fail == (site, self.seen[site]):
                self.failed = True
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return func(*args, **(kwargs or {}))

    def _on_the_device(self, arguments: Any) -> bool:
        places = [getattr(leaf, "device", leaf) for leaf in pytree.tree_leaves(arguments)]
        return self._device == "cpu" or any(isinstance(p, torch.device) and p.type == self._device for p in places)


def _site() -> Site:
    frame = sys._getframe(2)
    while frame is not None:
        _, found, path = frame.f_code.co_filename.rpartition("/megatrain/")
        if found:
            return f"{path} {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere" if threading.current_thread() is threading.main_thread() else "autograd's thread of the device"
