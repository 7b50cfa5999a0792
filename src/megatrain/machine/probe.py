"""`probe`: measure this machine for the planner. Takes half a minute on a large machine, once; results go to the user's cache.

Measurements take medians, and free their memory before the next one. Cores, NUMA nodes and the GPU's link are read from the
system.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from megatrain.device.allocator import configure_allocator
from megatrain.device.attention import measured_backends
from megatrain.errors import UserError
from megatrain.host_memory.arena import Arena, PinRefused
from megatrain.host_memory.available import available_host_bytes
from megatrain.host_memory.layout import FlatLayout
from megatrain.host_memory.store import UnitPlanes
from megatrain.machine.gpus import facts_of_gpus
from megatrain.machine.machine import LONG_ROW, SHORT_ROW, Machine, machine_from
from megatrain.machine.system import bus_id, device_link, device_node, node_cpus, usable_cores
from megatrain.machine.timing import device_seconds, seconds_of
from megatrain.optim.adamw import AdamW
from megatrain.optim.spec import Segment, StepCoefficients, segments_of
from megatrain.optim.updater import CpuUpdater
from megatrain.paths import user_cache
from megatrain.units import GIB

logger = logging.getLogger(__name__)

VERSION = 3
"""Version of the measurements; figures cached by another version are measured again."""
COPY_BYTES = 1 << 30
ADAMW_ELEMENTS = 1 << 26
DISK_BYTES = 1 << 30
THREADS = (1, 2, 4, 8, 16, 32, 64, 128)
MATRIX_SIZES = ((8192, 8192, 8192), (16384, 4096, 12288))


def probe(device: str | torch.device = "auto", *, disk_folder: Path | None = None) -> Machine:
    """This machine's figures: cached ones of the same hardware and torch version, else measured and cached.

    Measures the disk of `disk_folder`, by default the current folder. Raises UserError if there is no such device.
    """
    gpu = gpu_of(device)
    if gpu is not None:
        configure_allocator(gpu)
    file = cache_file(gpu)
    found = _cached(file)
    if found is not None:
        return found
    started = time.perf_counter()
    logger.info("measuring this machine; figures go to %s", file)
    machine = measure(gpu, disk_folder or Path.cwd())
    logger.info("measured in %.0f s", time.perf_counter() - started)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as writer:
            writer.write(machine.as_json())
        Path(writer.name).replace(file)
    except OSError as error:
        logger.warning("the machine's figures could not be cached: %s", error)
    return machine


def known_machine(device: str | torch.device) -> Machine | None:
    """Cached figures of this hardware, or None. Measures nothing."""
    return _cached(cache_file(gpu_of(device)))


def measure(gpu: torch.device | None, disk_folder: Path) -> Machine:
    """Measure the host, the disk of `disk_folder`, and the GPU if one is given."""
    cores = usable_cores()
    rate = _adamw_on_host(ADAMW_ELEMENTS)
    adamw = {threads: rate(threads) for threads in sorted({count for count in THREADS if count < cores} | {cores})}
    write, read = disk_rates(disk_folder, DISK_BYTES)
    facts: dict[str, object] = {
        "name": f"{cores} cores",
        "device_gib": 0.0,
        "host_gib": round(available_host_bytes() / GIB, 1),
        "cores": cores,
        "host_bandwidth_gbps": host_bandwidth(cores, COPY_BYTES),
        "adamw_gparams": adamw,
        "disk_write_gbps": write,
        "disk_read_gbps": read,
        "numa_nodes": len(node_cpus()),
        "versions": f"torch {torch.__version__}",
    }
    if gpu is not None:
        facts |= _link_facts(gpu, COPY_BYTES, functools.partial(rate, max(adamw, key=lambda count: adamw[count])))
        facts |= _device_facts(gpu, ADAMW_ELEMENTS, COPY_BYTES)
        facts |= facts_of_gpus(gpu, COPY_BYTES // 4)
        facts["name"] = f"{torch.cuda.get_device_name(gpu)}, {cores} cores, {facts['host_gib']:.0f} GiB"
    return machine_from(facts, "the probe")


# ---------------------------------------------------------------------------------------------------------------------
# Host


def _adamw_on_host(elements: int) -> Callable[[int], float]:
    """A function from threads to the rate of AdamW on four units of `elements` in all [1e9 parameters/s]."""
    part = elements // 4
    optim, units, segments, coefficients = _updates(4, part, torch.device("cpu"))

    def rate(threads: int) -> float:
        with CpuUpdater(threads) as updater:

            def update() -> None:
                jobs = [
                    updater.submit_update(f"unit.{i}", optim, planes, grad, segments, coefficients)
                    for i, (planes, grad) in enumerate(units)
                ]
                for job in jobs:
                    job.result()

            return round(4 * part / 1e9 / seconds_of(update), 3)

    return rate


def _updates(
    count: int, elements: int, device: torch.device
) -> tuple[AdamW, list[tuple[UnitPlanes, torch.Tensor]], tuple[Segment, ...], StepCoefficients]:
    """AdamW, `count` units of split planes and bf16 gradients, filled with values of typical magnitude, and a step's numbers."""
    optim = AdamW()
    dtypes = {"hi": torch.bfloat16, "lo": torch.int16, **optim.state_dtypes, "grad": torch.bfloat16}
    units = []
    for _ in range(count):
        planes = {kind: torch.full((elements,), 1e-3, device=device).to(dtype) for kind, dtype in dtypes.items()}
        units.append((UnitPlanes.of("unit", FlatLayout((), elements), planes), planes["grad"]))
    segments = segments_of([("weight", (elements, 1), 0, elements)], optim)
    return optim, units, segments, optim.coefficients(10, 1e-6)


def host_bandwidth(cores: int, nbytes: int) -> float:
    """Bytes read and written by a copy with all cores [GB/s]."""
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
    before = torch.get_num_threads()
    torch.set_num_threads(cores)
    try:
        return round(2 * nbytes / 1e9 / seconds_of(lambda: target.copy_(source)), 2)
    finally:
        torch.set_num_threads(before)


def disk_rates(folder: Path, nbytes: int) -> tuple[float, float]:
    """(write with fsync, read) [GB/s]; reads bypass the page cache where the system allows it. Zeros if it cannot be measured."""
    block = os.urandom(1 << 20) * 16
    count = max(1, nbytes // len(block))
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-", buffering=0) as file:
            started = time.perf_counter()
            for _ in range(count):
                file.write(block)
            os.fsync(file.fileno())
            write = count * len(block) / 1e9 / (time.perf_counter() - started)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            started = time.perf_counter()
            while file.read(len(block)):
                pass
            return round(write, 3), round(count * len(block) / 1e9 / (time.perf_counter() - started), 3)
    except OSError as error:
        logger.warning("the disk at %s was not measured: %s", folder, error)
        return 0.0, 0.0


# ---------------------------------------------------------------------------------------------------------------------
# Device


def _device_facts(gpu: torch.device, elements: int, nbytes: int) -> dict[str, object]:
    optim, units, segments, coefficients = _updates(1, elements, gpu)
    adamw_s = device_seconds(lambda: optim.update_on_device(*units[0], segments, coefficients), gpu)
    units.clear()
    source = torch.ones(nbytes, dtype=torch.uint8, device=gpu)
    target = torch.empty_like(source)
    copy_s = device_seconds(functools.partial(target.copy_, source), gpu)
    del source, target
    heads, dim = 32, 128
    attention = measured_backends(heads, 8, dim, SHORT_ROW, torch.bfloat16, gpu)
    long_attention = measured_backends(heads, 8, dim, LONG_ROW, torch.bfloat16, gpu)
    facts: dict[str, object] = {
        "device_adamw_gparams": round(elements / 1e9 / adamw_s, 1),
        "device_bandwidth_gbps": round(2 * nbytes / 1e9 / copy_s, 0),
        "matrix_tflops": matrix_tflops(gpu),
        "attention_ms": {backend.name: round(ms, 3) for backend, ms in attention},
        "device_node": device_node(bus_id(gpu)),
        "link": str(device_link(bus_id(gpu)) or ""),
        "versions": f"torch {torch.__version__}, CUDA {torch.version.cuda}",
    }
    # a causal forward and backward are 3.5 forwards of 4 T^2 d / 2 per head
    for name, found, tokens, rows in (
        ("attention_tflops", attention, SHORT_ROW, 16384 // SHORT_ROW),
        ("attention_long_tflops", long_attention, LONG_ROW, 1),
    ):
        if found:
            facts[name] = round(3.5 * rows * heads * 4 * tokens**2 * dim / 2 / found[0][1] / 1e9, 1)
    torch.cuda.empty_cache()
    return facts


def _link_facts(gpu: torch.device, nbytes: int, adamw_rate: Callable[[], float]) -> dict[str, object]:
    """Free memory, link rates, the rate of AdamW on the host while weights stream, and the pinning limit."""
    free, total = torch.cuda.mem_get_info(gpu)
    limit = None
    with Arena(nbytes) as source, Arena(nbytes) as sink:
        for arena in (source, sink):
            try:
                arena.register([])
            except PinRefused as refusal:
                limit = round(refusal.pinned_bytes / GIB, 2)
                logger.warning("%s", refusal)
        here, there = source.tensor(0, nbytes, torch.uint8), sink.tensor(0, nbytes, torch.uint8)
        first, second = (torch.empty(nbytes, dtype=torch.uint8, device=gpu) for _ in range(2))
        into, out = torch.cuda.Stream(gpu), torch.cuda.Stream(gpu)

        def copy_in() -> None:
            with torch.cuda.stream(into):
                first.copy_(here, non_blocking=True)

        def copy_out() -> None:
            with torch.cuda.stream(out):
                there.copy_(second, non_blocking=True)

        def both() -> None:
            copy_in()
            copy_out()

        def waited(run: Callable[[], None]) -> None:
            run()
            torch.cuda.synchronize(gpu)

        gb = nbytes / 1e9
        facts: dict[str, object] = {
            f"{name}_gbps": round(gb / seconds_of(functools.partial(waited, copy)), 2)
            for name, copy in (("h2d", copy_in), ("d2h", copy_out), ("both", both))
        }
        for _ in range(64):  # takes longer than the updates, so that they run during the copies
            copy_in()
        facts["adamw_streaming_gparams"] = adamw_rate()
        torch.cuda.synchronize(gpu)
    available_gib = round(min(free + torch.cuda.memory_reserved(gpu), total) / GIB, 2)
    return {**facts, "device_gib": available_gib, "pin_limit_gib": limit}


def matrix_tflops(gpu: torch.device) -> float:
    """bf16 products with fp32 accumulation: the better of a square product and one of a layer's size."""
    best = 0.0
    for rows, inner, columns in MATRIX_SIZES:
        left = torch.randn(rows, inner, dtype=torch.bfloat16, device=gpu)
        right = torch.randn(inner, columns, dtype=torch.bfloat16, device=gpu)
        seconds = device_seconds(functools.partial(torch.mm, left, right), gpu, repeat=10)
        best = max(best, 2 * rows * inner * columns / 1e12 / seconds)
    return round(best, 1)


# ---------------------------------------------------------------------------------------------------------------------
# Cache


def cache_file(gpu: torch.device | None) -> Path:
    """Cache file for this hardware and this torch version."""
    parts = [VERSION, torch.__version__, os.uname().nodename, usable_cores(), os.cpu_count()]
    if gpu is not None:
        parts += [torch.cuda.get_device_name(gpu), gpu.index, torch.cuda.device_count(), torch.version.cuda]
    key = hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()
    return user_cache() / f"machine-{key}.json"


def _cached(file: Path) -> Machine | None:
    try:
        # available memory changes all the time, rates do not
        figures = {**json.loads(file.read_text()), "host_gib": round(available_host_bytes() / GIB, 1)}
        return machine_from(figures, str(file))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, UserError) as error:
        logger.warning("cannot use %s (%s); measuring again", file, error)
        return None


def gpu_of(device: str | torch.device) -> torch.device | None:
    """The CUDA device that a setting names, with its index; None for the CPU."""
    if str(device) == "cpu" or (str(device) == "auto" and not torch.cuda.is_available()):
        return None
    if not torch.cuda.is_available():
        raise UserError("no CUDA device is available", f"device: {device}", "use auto or cpu")
    found = torch.device("cuda" if str(device) == "auto" else device)
    return torch.device("cuda", found.index if found.index is not None else torch.cuda.current_device())
