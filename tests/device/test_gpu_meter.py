"""Figures of the driver are optional: a missing package or a refusal leaves them out and stops nothing."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatrain.device import gpu_meter
from megatrain.device.gpu_meter import GpuFigures, GpuMeter

GPU = torch.device("cuda", 0)


class NvmlError(Exception):
    pass


class Nvml:
    """The part of pynvml that is used."""

    NVMLError = NvmlError

    def __init__(self) -> None:
        self.broken: set[str] = set()
        self.uuids: list[str] = []

    def _answer(self, name: str, value: Any) -> Any:
        if name in self.broken:
            raise NvmlError(f"{name} is not supported")
        return value

    def nvmlInit(self) -> None:
        self._answer("init", None)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.uuids.append(uuid)
        return self._answer("handle", "handle")

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return self._answer("memory", SimpleNamespace(used=123))

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return self._answer("utilisation", SimpleNamespace(gpu=87))


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    """NVML of a GPU that does not exist, asked as often as the test likes."""
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1-2-3"))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 77)
    monkeypatch.setattr(gpu_meter, "EVERY_S", 0.0)
    return nvml


def test_the_figures_are_those_of_the_device(nvml: Nvml) -> None:
    assert GpuMeter(GPU).read() == GpuFigures(0.87, 123, 77)
    assert nvml.uuids == ["GPU-1-2-3"]


def test_the_driver_is_not_asked_again_within_a_second(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_meter, "EVERY_S", 60.0)
    meter = GpuMeter(GPU)
    first = meter.read()
    nvml.broken.add("memory")
    assert meter.read() == first


@pytest.mark.parametrize("broken", ["init", "handle", "memory", "utilisation"])
def test_a_refusal_is_said_once(broken: str, nvml: Nvml, caplog: pytest.LogCaptureFixture) -> None:
    nvml.broken.add(broken)
    with caplog.at_level(logging.INFO):
        meter = GpuMeter(GPU)
        assert [meter.read() for _ in range(3)] == [GpuFigures(None, None, 77)] * 3
    assert caplog.text.count("is not supported") == 1


def test_without_the_package_only_the_driver_is_missing(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert GpuMeter(GPU).read() == GpuFigures(None, None, 77)


def test_a_cpu_has_none() -> None:
    assert GpuMeter(torch.device("cpu")).read() == GpuFigures()
