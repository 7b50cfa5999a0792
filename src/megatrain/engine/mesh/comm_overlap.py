"""How much of a step a GPU spends on communication that no computation hides, from the kernels of one profiled step.

[Note: exposed]
A kernel of NCCL is communication, everything else on the device (copies too) is computation. Communication is exposed where no
computation runs at the same time. A receive between stages also spins while the sender is not ready, so a pipeline's bubble shows
up as exposed messages; exposed collectives (parameters, gradients, sequence parallel) are listed apart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch._C._autograd import DeviceType

Interval = tuple[float, float]
"""(begin, end), in seconds."""


@dataclass(frozen=True)
class Kernel:
    """Something that ran on the device."""

    name: str
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Shares:
    """Where the time of a step went on one device, in seconds.

    Attributes:
        span_s: From the first kernel to the end of the last.
        compute_s: With at least one computation running.
        collectives_s: Collectives alone.
        messages_s: Messages between stages alone.
        idle_s: Nothing ran.
    """

    span_s: float
    compute_s: float
    collectives_s: float
    messages_s: float
    idle_s: float


def shares(kernels: Sequence[Kernel]) -> Shares:
    """See [Note: exposed]."""
    compute, collectives, messages = [], [], []
    for kernel in kernels:
        name = kernel.name.lower()
        kind = compute if "nccl" not in name else messages if "sendrecv" in name else collectives
        kind.append((kernel.begin_s, kernel.end_s))
    everything = union([*compute, *collectives, *messages])
    if not everything:
        return Shares(0.0, 0.0, 0.0, 0.0, 0.0)
    busy, with_collectives = union(compute), union([*compute, *collectives])
    span = everything[-1][1] - everything[0][0]
    return Shares(
        span_s=span,
        compute_s=length(busy),
        collectives_s=length(with_collectives) - length(busy),
        messages_s=length(everything) - length(with_collectives),
        idle_s=span - length(everything),
    )


def union(intervals: Sequence[Interval]) -> list[Interval]:
    """The same time as intervals that do not touch, in order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def length(intervals: Sequence[Interval]) -> float:
    """Of intervals that do not overlap."""
    return sum(end - begin for begin, end in intervals)


@contextlib.contextmanager
def kernels_of(device: torch.device) -> Iterator[list[Kernel]]:
    """Fills the list with what ran on a CUDA device inside the block; empty on a CPU. It takes a second or two."""
    found: list[Kernel] = []
    if device.type != "cuda":
        yield found
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        yield found
        torch.cuda.synchronize(device)
    results = profile.profiler
    assert results is not None and results.kineto_results is not None
    for event in results.kineto_results.events():
        if event.device_type() == DeviceType.CUDA and event.duration_ns() > 0 and not _annotation(event):
            begin = event.start_ns() / 1e9
            found.append(Kernel(event.name(), begin, begin + event.duration_ns() / 1e9))


def _annotation(event: object) -> bool:
    """Ranges that the host has named cover kernels and run nothing themselves."""
    kind = getattr(event, "activity_type", None)
    return kind is not None and "annotation" in str(kind())
