"""Random state: each step depends on (seed, step) alone, and a recompute replays the random numbers of its forward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

RandomState = tuple[torch.Tensor, torch.Tensor | None]
"""State of the CPU's generator and of the device's (None on a CPU)."""


def capture(device: torch.device) -> RandomState:
    """The current state of the generators. Does not synchronise with the device."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def restore(device: torch.device, state: RandomState) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)


@contextlib.contextmanager
def replayed(device: torch.device, state: RandomState) -> Iterator[None]:
    """Repeat inside the random numbers that followed `state`; the generators are restored afterwards."""
    current = capture(device)
    restore(device, state)
    try:
        yield
    finally:
        restore(device, current)


@contextlib.contextmanager
def seeded(device: torch.device, seed: int, step: int) -> Iterator[None]:
    """Make random operations inside depend on (seed, step) alone, so that resuming, or evaluating in between, changes nothing.
    The generators are restored afterwards."""
    current = capture(device)
    number = (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9) % 2**63
    # Not torch.manual_seed: it also seeds all other devices, which are not restored, and records a stack trace for each kind of
    # device that is not in use.
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.default_generators[_index(device)].manual_seed(number)
    try:
        yield
    finally:
        restore(device, current)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
