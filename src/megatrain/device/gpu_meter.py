"""What the driver says of a GPU: utilisation and memory, where the optional package nvidia-ml-py is installed."""

from __future__ import annotations

import importlib
import logging
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

logger = logging.getLogger(__name__)

EVERY_S = 1.0
"""A question takes a good part of a millisecond, and the driver's figures are means over about a second anyway."""


@dataclass(frozen=True)
class GpuFigures:
    """None where unknown.

    Attributes:
        utilisation: Share of the last second in which some kernel ran.
        used_bytes: In use on the whole device, by all processes.
        reserved_bytes: By this process's allocator.
    """

    utilisation: float | None = None
    used_bytes: int | None = None
    reserved_bytes: int | None = None


class GpuMeter:
    """Asks driver and allocator once a second at most. Without NVML, or when it refuses, its figures are None.

    Args:
        device: A CUDA device, or a CPU, which has no figures.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._handle: Any = None
        self._nvml: Any = None
        self._next_s = 0.0
        self._figures = GpuFigures()
        if device.type == "cuda":
            self._open(device)

    def read(self) -> GpuFigures:
        """The figures, a second old at most."""
        now = time.monotonic()
        if self._device.type == "cuda" and now >= self._next_s:
            self._next_s = now + EVERY_S
            self._figures = replace(self._of_nvml(), reserved_bytes=torch.cuda.memory_reserved(self._device))
        return self._figures

    def _of_nvml(self) -> GpuFigures:
        if self._handle is None:
            return GpuFigures()
        try:
            used = int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)
            return GpuFigures(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100.0, used)
        except self._nvml.NVMLError as error:
            self._give_up(error)
            return GpuFigures()

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
        self._handle = None
