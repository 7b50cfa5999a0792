"""What the driver says of a GPU: utilisation and memory, where the optional package nvidia-ml-py is installed."""

from __future__ import annotations

import importlib
import logging
import time
from typing import Any

import torch

logger = logging.getLogger(__name__)

EVERY_S = 1.0
"""A question takes the driver up to a millisecond, and its figures are means over about a second anyway."""


class GpuMeter:
    """Asks NVML once a second at most. Without it, or when it refuses, the figures are None and nothing else happens.

    Args:
        device: A CUDA device, or a CPU, which has no figures.
    """

    def __init__(self, device: torch.device):
        self._handle: Any = None
        self._nvml: Any = None
        self._next_s = 0.0
        self._figures: tuple[float | None, int | None] = (None, None)
        if device.type == "cuda":
            self._open(device)

    def read(self) -> tuple[float | None, int | None]:
        """(share of the last second in which some kernel ran, bytes in use on the whole device), None where unknown."""
        now = time.monotonic()
        if self._handle is not None and now >= self._next_s:
            self._next_s = now + EVERY_S
            try:
                used = int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)
                self._figures = (self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100.0, used)
            except self._nvml.NVMLError as error:
                self._give_up(error)
        return self._figures

    def _open(self, device: torch.device) -> None:
        try:
            self._nvml = importlib.import_module("pynvml")
        except ImportError:
            logger.debug("nvidia-ml-py is not installed: no GPU utilisation in the metrics")
            return
        try:
            self._nvml.nvmlInit()
            # By UUID: CUDA may number the devices otherwise than the driver (CUDA_VISIBLE_DEVICES).
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
        except self._nvml.NVMLError as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        logger.info("NVML gives no figures (%s): no GPU utilisation in the metrics", error)
        self._handle, self._figures = None, (None, None)
