"""Random state: each step is a pure function of (seed, step), and a recompute replays what its forward drew."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

RandomState = tuple[torch.Tensor, torch.Tensor | None]
"""State of the CPU generator and of the device's, if it has one of its own."""


def capture(device: torch.device) -> RandomState:
    """The state that the next random operation starts from. No device synchronisation."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def restore(device: torch.device, state: RandomState) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)


@contextlib.contextmanager
def replayed(device: torch.device, state: RandomState) -> Iterator[None]:
    """Draw inside what was drawn after `state` was captured; the generators go on afterwards as if nothing had happened."""
    current = capture(device)
    restore(device, state)
    try:
        yield
    finally:
        restore(device, current)


@contextlib.contextmanager
def seeded(device: torch.device, seed: int, step: int) -> Iterator[None]:
    """Random operations inside depend on (seed, step) alone: not on what ran before, so that resuming or evaluating in
    between changes nothing. The caller's generators are left as they were."""
    current = capture(device)
    number = (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9) % 2**63
    # Not torch.manual_seed: it also seeds the generators of all other devices, which nobody would set back, and writes down a
    # stack trace for each kind of device that is not in use.
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.default_generators[_index(device)].manual_seed(number)
    try:
        yield
    finally:
        restore(device, current)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
