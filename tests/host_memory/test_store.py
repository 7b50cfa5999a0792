"""The store: planes by kind in exactly the bytes that the layouts need, on the host or on the device."""

from __future__ import annotations

import pytest
import torch

from megatrain.host_memory.arena import PAGE_BYTES
from megatrain.host_memory.layout import FlatLayout
from megatrain.host_memory.store import HostStore

LAYOUTS = [(f"layer.{i}", FlatLayout.of([("a.weight", (70, 100)), ("b", (9,))])) for i in range(3)]
STATES = {"momentum": torch.float32, "small": torch.bfloat16}


def store_of(**options) -> HostStore:
    options = {"split": True, "states": STATES, "grad_dtype": torch.bfloat16, **options}
    return HostStore(LAYOUTS, device=torch.device("cpu"), **options)


@pytest.mark.parametrize("split", [True, False], ids=["split", "whole"])
def test_bytes_follow_from_the_kinds_of_planes(split: bool) -> None:
    widths = {"momentum": 4, "small": 2, "grad": 2} | ({"hi": 2, "lo": 2} if split else {"hi": 4})
    store = store_of(split=split, resident=["layer.1"])
    numel = LAYOUTS[0][1].numel
    pages = {kind: 2 * -(-width * numel // PAGE_BYTES) * PAGE_BYTES for kind, width in widths.items()}
    assert store.plane_bytes() == pages
    assert store.resident_bytes == numel * sum(width for kind, width in widths.items() if kind != "grad")
    assert list(store.units["layer.0"].states) == ["momentum", "small"]
    store.close()


def test_a_unit_that_leaves_the_device_keeps_its_state() -> None:
    store = store_of(resident=["layer.1"])
    unit = store.units["layer.1"]
    assert unit.resident and unit.grad is None
    for number, plane in enumerate(unit.state().values()):
        plane.fill_(number + 1)
    store.move_to_host("layer.1")
    assert not unit.resident and unit.grad is not None and store.resident_bytes == 0
    assert {kind: set(plane.tolist()) for kind, plane in unit.state().items()} == {
        "hi": {1.0}, "lo": {2}, "momentum": {3.0}, "small": {4.0},
    }  # fmt: skip
    store.close()


def test_widened_gradient_planes_are_fp32_on_the_host_only() -> None:
    store = store_of(resident=["layer.0", "layer.1"])
    store.move_to_host("layer.1")
    store.widen_gradients()
    grads = {name: unit.grad for name, unit in store.units.items()}
    assert grads["layer.0"] is None
    assert all(g is not None and g.dtype == torch.float32 for name, g in grads.items() if name != "layer.0")
    assert store.plane_bytes()["grad"] == 2 * -(-4 * LAYOUTS[0][1].numel // PAGE_BYTES) * PAGE_BYTES
    store.close()
