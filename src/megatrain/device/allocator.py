"""torch's allocator of device memory: the setting that it needs, and the signs that it is short of memory.

[Note: expandable segments]
Unless told otherwise, torch's allocator takes blocks of memory from the driver and never joins them. The sizes of a step
differ (kept activations, logits, gradients of the edges), so blocks that are free but too small pile up, until a request fails:
then the allocator waits for the device, gives everything back and asks again, in every step. With 24 GiB and a model of 8B this
takes half as long again as the step itself. Expandable segments map physical memory where it is needed and leave no such gaps.
"""

from __future__ import annotations

import functools
import logging
import os
from dataclasses import dataclass

import torch

logger = logging.getLogger(__name__)

SETTING = "expandable_segments:True"
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def configure_allocator(device: torch.device) -> None:
    """Make the allocator use expandable segments, before the first allocation on a GPU. A user's own setting stays.

    See [Note: expandable segments].
    """
    if device.type == "cuda":
        _configure()


@functools.cache
def _configure() -> None:
    name = next((name for name in VARIABLES if os.environ.get(name)), None)
    if name is None:
        # The public name of the same function, torch.cuda.memory._set_allocator_settings, warns that it is deprecated.
        torch._C._accelerator_setAllocatorSettings(SETTING)  # pyright: ignore[reportAttributeAccessIssue]
    elif SETTING.lower() not in os.environ[name].lower().replace(" ", ""):
        logger.warning(
            "%s=%s is used as it is, without %s: device memory may fragment, which slows steps down",
            name, os.environ[name], SETTING,
        )  # fmt: skip


@dataclass(frozen=True)
class AllocatorFigures:
    """What the allocator of one device has done since the process began, and its overhead.

    Attributes:
        retries: Requests that failed at first: everything free was given back to the driver, and they were repeated.
        gap_bytes: Peak of what it reserved, above the peak of what tensors used; None on a CPU.
    """

    retries: int = 0
    gap_bytes: int | None = None


def allocator_figures(device: torch.device) -> AllocatorFigures:
    """The figures of a device."""
    if device.type != "cuda":
        return AllocatorFigures()
    stats = torch.cuda.memory_stats(device)
    peak_reserved, peak_used = stats.get("reserved_bytes.all.peak", 0), stats.get("allocated_bytes.all.peak", 0)
    return AllocatorFigures(stats.get("num_alloc_retries", 0), peak_reserved - peak_used)
