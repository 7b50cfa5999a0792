"""Rates of the host's AdamW for each storage type of the moments: split masters, bf16 gradients, planes larger than any cache.

Use: python benchmarks/adamw_moments.py [--elements N] [THREADS...]     by default 1 thread and all cores
"""

from __future__ import annotations

import argparse
import os

import torch

from megatrain.host_memory.layout import BLOCK_ELEMENTS, FlatLayout
from megatrain.host_memory.store import UnitPlanes, split_
from megatrain.machine.timing import seconds_of
from megatrain.optim.adamw import AdamW, Moments
from megatrain.optim.spec import Segment
from megatrain.optim.updater import CpuUpdater

KINDS: tuple[Moments, ...] = ("fp32", "bf16", "int8")


def planes_of(optim: AdamW, elements: int) -> UnitPlanes:
    """Masters and moments of typical magnitude."""
    made = {"hi": torch.empty(elements, dtype=torch.bfloat16), "lo": torch.empty(elements, dtype=torch.int16)}
    split_(torch.randn(elements) * 0.02, made["hi"], made["lo"])
    for kind, dtype in optim.state_dtypes.items():
        made[kind] = torch.zeros(-(-elements // BLOCK_ELEMENTS) if kind.endswith(".scale") else elements, dtype=dtype)
    return UnitPlanes.of("unit", FlatLayout((), elements), made)


def rate(moments: Moments, elements: int, threads: int) -> float:
    """[1e9 parameters/s], after an update that makes the moments."""
    optim = AdamW(moments=moments)
    planes, grad = planes_of(optim, elements), (torch.randn(elements) * 1e-4).bfloat16()
    segments, coefficients = (Segment(0, elements, 0.01, 1.0),), optim.coefficients(2, 1e-5)
    with CpuUpdater(threads) as updater:
        return (
            elements
            / 1e9
            / seconds_of(lambda: updater.submit_update("unit", optim, planes, grad, segments, coefficients).result(), 5)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("threads", nargs="*", type=int, default=[1, len(os.sched_getaffinity(0))])
    parser.add_argument("--elements", type=int, default=1 << 27)
    words = parser.parse_args()
    print("threads" + "".join(f"{kind:>20}" for kind in KINDS) + "   G parameters/s (over fp32)")
    for threads in words.threads:
        rates = [rate(kind, words.elements, threads) for kind in KINDS]
        print(f"{threads:7}" + "".join(f"{r:12.3f} ({r / rates[0]:4.2f})" for r in rates), flush=True)


if __name__ == "__main__":
    main()
