"""GPU time of a training step by kernel, and the gaps between kernels.

Use: python benchmarks/kernel_times.py SHAPE ROWS TOKENS [MACHINE_FILE [option=value ...]]
     python benchmarks/kernel_times.py qwen3-8b 8 1024 docs/machines/h200.yaml
SHAPE is one of `megatrain bench --shape`; the engine follows the plan, options replace its fields.
Prints clock and power of the GPU under load, the kernels of one step by time, and the gaps between them.
"""

from __future__ import annotations

import collections
import subprocess
import sys
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from megatrain.commands.work import Work, engine_for, plan_overrides, random_batch


def clocks() -> str:
    """SM clock [MHz], power [W], throttle reasons and temperature, from the driver."""
    fields = "clocks.sm,power.draw,clocks_event_reasons.active,temperature.gpu"
    found = subprocess.run(
        ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"], capture_output=True, text=True
    )
    return found.stdout.strip() or found.stderr.strip()


def kernels_of(run: Any) -> tuple[list[tuple[str, float, float]], float]:
    """(name, start, end) [us] of all GPU activity during `run`, by start; and the wall time [ms]."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
    events = [e for e in recorded.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sorted(
        (e.name, e.time_range.start, e.time_range.end) for e in events if e.time_range.end > e.time_range.start
    ), start.elapsed_time(end)


def table(found: list[tuple[str, float, float]], lines: int = 34) -> None:
    total: dict[str, list[float]] = collections.defaultdict(list)
    for name, start, end in found:
        total[name].append(end - start)
    for name, times in sorted(total.items(), key=lambda item: -sum(item[1]))[:lines]:
        print(f"{sum(times) / 1e3:9.2f} ms {len(times):5d} x {sum(times) / len(times):9.1f} us  {name[:130]}")
    spans = sorted((start, end) for _, start, end in found)
    busy, last = 0.0, spans[0][0]
    gaps = []
    for start, end in spans:
        if start > last:
            gaps.append(start - last)
        busy += max(0.0, end - max(start, last))
        last = max(last, end)
    longest = [round(gap) for gap in sorted(gaps)[-6:]]
    print(f"busy {busy / 1e3:.1f} of {(last - spans[0][0]) / 1e3:.1f} ms; {len(gaps)} gaps, the longest {longest} us")


def main(shape: str, rows: int, tokens: int, machine_file: str | None, words: list[str]) -> None:
    overrides = plan_overrides(words)
    work = Work(shape, rows, tokens, machine_file=machine_file, overrides=overrides, say=print)
    with engine_for(work) as engine:
        batches = [random_batch(1000, rows, tokens, step) for step in range(8)]
        for batch in batches:
            result = engine.train_step(batch)
            print({name: round(value, 4) for name, value in result.seconds.items()}, clocks(), flush=True)
        found, elapsed = kernels_of(lambda: engine.train_step(batches[0]))
    print(f"one step: {elapsed:.1f} ms")
    table(found)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] if len(sys.argv) > 4 else None, sys.argv[5:])
