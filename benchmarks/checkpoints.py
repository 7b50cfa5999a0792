"""Cost of background saves, and time to resume: a Qwen3 shape on one GPU, placed by the plan.

Use: python benchmarks/checkpoints.py run SHAPE ROWS TOKENS FOLDER MACHINE_FILE   steps during two background saves
     python benchmarks/checkpoints.py resume SHAPE ROWS TOKENS FOLDER MACHINE_FILE eager|lazy   until the first step
`run` saves twice: on request, and as `megatrain train` saves every N steps, with the memory for copies prepared in advance.
It leaves the second checkpoint in FOLDER for `resume`. The disk's rate is measured before, with one file of 8 GiB written in
pieces of 64 MiB and synced.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import time
from pathlib import Path

import psutil
import torch

from megatrain.commands.work import Work, engine_for, random_batch
from megatrain.engine.host.engine import HostEngine
from megatrain.units import GIB


def disk_rate(folder: Path, size: int = 8 * GIB, piece: int = 64 << 20) -> float:
    """Rate of a sequential write, sync included [GiB/s]."""
    data, path = os.urandom(piece), folder / "disk-rate"
    started = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(size // piece):
            file.write(data)
        os.fsync(file.fileno())
    seconds = time.perf_counter() - started
    path.unlink()
    return size / GIB / seconds


def step_of(engine: HostEngine, rows: int, tokens: int, number: int) -> float:
    batch = random_batch(512, rows, tokens, number)
    started = time.perf_counter()
    engine.train_step(batch)
    return time.perf_counter() - started


def resident_gib() -> float:
    return psutil.Process().memory_info().rss / GIB


def run(engine: HostEngine, rows: int, tokens: int, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    plain = [step_of(engine, rows, tokens, number) for number in range(7)][2:]
    alone = statistics.median(plain)
    peak = torch.cuda.max_memory_allocated() / GIB
    print(
        f"without a save: {alone:.3f} s a step ({rows * tokens / alone:.0f} tokens/s), {[round(s, 3) for s in plain]}"
    )
    print(f"peak HBM {peak:.1f} GiB, RSS {resident_gib():.1f} GiB", flush=True)
    rate = disk_rate(folder)
    print(f"the disk alone writes {rate:.2f} GiB/s", flush=True)
    print("a save on request:")
    saved(engine, rows, tokens, folder / "ckpt", alone, rate)
    shutil.rmtree(folder / "ckpt")
    engine.prepare_save()
    before = [step_of(engine, rows, tokens, 90 + number) for number in range(round(30 / alone))]
    print(
        f"memory prepared during {len(before)} steps, {statistics.mean(before):.3f} s each on average, {opening(before)}"
    )
    print("a prepared save:")
    saved(engine, rows, tokens, folder / "ckpt", alone, rate)


def opening(seconds: list[float], count: int = 8) -> str:
    return f"the first {[round(s, 2) for s in seconds[:count]]}"


def saved(engine: HostEngine, rows: int, tokens: int, checkpoint: Path, alone: float, rate: float) -> None:
    """Save in the background while training. A step takes `alone` seconds without a save, the disk writes `rate` GiB/s."""
    save = engine.save(checkpoint, background=True)
    during, most = [], 0.0
    while not save.done():
        during.append(step_of(engine, rows, tokens, 100 + len(during)))
        most = max(most, resident_gib())
    progress = save.result()
    lost = sum(during) - alone * len(during)
    written = progress.written_bytes / GIB
    print(
        f"{written:.1f} GiB, {progress.seconds:.1f} s of which {progress.read_back_s:.1f} s "
        f"read back; {progress.bytes_per_s / GIB:.2f} GiB/s written ({progress.bytes_per_s / GIB / rate:.2f} of the disk)\n"
        f"{len(during)} steps during the save, {statistics.mean(during):.3f} s each on average "
        f"({100 * lost / (alone * len(during)):.1f}% more than without), the longest {max(during):.3f} s, {opening(during)}\n"
        f"updates waited {progress.waited_s:.2f} s, {progress.copied_bytes / GIB:.1f} GiB copied, most RSS {most:.1f} GiB, "
        f"now {resident_gib():.1f} GiB",
        flush=True,
    )


def forget_pages(folder: Path) -> None:
    """Drop the files from the page cache, so that they are read from the disk."""
    os.sync()
    descriptors = [os.open(path, os.O_RDONLY) for path in folder.rglob("*") if path.is_file()]
    for descriptor in descriptors:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def resume(engine: HostEngine, rows: int, tokens: int, folder: Path, lazy: bool) -> None:
    started = time.perf_counter()
    engine.load(folder / "ckpt", wait=not lazy)
    loaded = time.perf_counter()
    step_of(engine, rows, tokens, 200)
    first = time.perf_counter()
    most = psutil.Process().memory_info()
    print(
        f"{'lazy' if lazy else 'eager'}: load {loaded - started:.1f} s, first step (compiles) "
        f"{first - loaded:.1f} s, together {first - started:.1f} s; RSS {most.rss / GIB:.1f} GiB",
        flush=True,
    )


if __name__ == "__main__":
    what, shape, rows, tokens, folder, machine_file, *rest = sys.argv[1:]
    size, place = (int(rows), int(tokens)), Path(folder)
    if what == "resume":
        forget_pages(place)
    began = time.perf_counter()
    init = "random" if what == "run" else "empty"
    with engine_for(Work(shape, *size, machine_file=machine_file, say=print), init) as engine:
        print(f"engine made in {time.perf_counter() - began:.1f} s", flush=True)
        run(engine, *size, place) if what == "run" else resume(engine, *size, place, lazy=rest == ["lazy"])
