"""`probe`: measure what plans are made of. Half a minute on a large machine, once; the figures are kept in the user's cache.

Every measurement says how large it is and takes medians. Memory that a measurement needs is given back before the next one.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from megatrain.errors import UserError
from megatrain.host_memory.arena import Arena, PinRefused
from megatrain.host_memory.available import available_host_bytes
from megatrain.host_memory.layout import FlatLayout
from megatrain.host_memory.store import UnitPlanes
from megatrain.machine import system
from megatrain.machine.machine import LONG_ROW, SHORT_ROW, Machine, machine_from
from megatrain.optim.adamw import AdamW
from megatrain.optim.spec import OptimizerSpec, segments_of
from megatrain.optim.updater import CpuUpdater
from megatrain.units import GIB

logger = logging.getLogger(__name__)

VERSION = 1
"""Of what is measured and how; an older cache is measured again."""
COPY_BYTES = 1 << 30
ADAMW_ELEMENTS = 1 << 26
DISK_BYTES = 1 << 30
MATRIX_SIZES = ((8192, 8192, 8192), (16384, 4096, 12288))


def probe(device: str | torch.device = "auto", *, cache: bool = True, disk_folder: Path | None = None) -> Machine:
    """This machine's figures.

    Args:
        device: `auto`, `cpu`, `cuda`, `cuda:1`.
        cache: Use the figures of an earlier call on the same hardware with the same torch, and keep new ones.
        disk_folder: Where the disk is measured; by default the current folder.

    Raises:
        UserError: There is no such device.
    """
    gpu = gpu_of(device)
    file = cache_file(gpu)
    if cache:
        found = _cached(file)
        if found is not None:
            return found
    started = time.perf_counter()
    logger.info("measuring this machine; the figures are kept in %s", file if cache else "no file")
    machine = measure(gpu, disk_folder or Path.cwd())
    logger.info("measured in %.0f s", time.perf_counter() - started)
    if cache:
        _keep(machine, file)
    return machine


def known_machine(device: str | torch.device) -> Machine | None:
    """The figures of an earlier `probe` on this hardware, None where there was none. Measures nothing."""
    return _cached(cache_file(gpu_of(device)))


def measure(gpu: torch.device | None, disk_folder: Path, *, scale: float = 1.0) -> Machine:
    """Measure everything, whatever is cached.

    Args:
        gpu: A CUDA device, or None.
        disk_folder: Where the disk is measured.
        scale: On the sizes of what is measured; tests take small ones.
    """
    cores = system.usable_cores()
    adamw = adamw_rates(cores, int(ADAMW_ELEMENTS * scale))
    write, read = disk_rates(disk_folder, int(DISK_BYTES * scale))
    facts: dict[str, object] = {
        "name": f"{cores} cores",
        "device_gib": 0.0,
        "host_gib": round(available_host_bytes() / GIB, 1),
        "cores": cores,
        "host_bandwidth_gbps": host_bandwidth(cores, int(COPY_BYTES * scale)),
        "adamw_gparams": adamw,
        "disk_write_gbps": write,
        "disk_read_gbps": read,
        "numa_nodes": len(system.node_cpus()),
        "versions": f"torch {torch.__version__}",
    }
    if gpu is not None:
        best = max(adamw, key=lambda count: adamw[count])
        facts |= _device_facts(gpu, best, int(ADAMW_ELEMENTS * scale), int(COPY_BYTES * scale))
        facts["name"] = f"{torch.cuda.get_device_name(gpu)}, {cores} cores, {facts['host_gib']:.0f} GiB"
    return machine_from(facts, "the probe")


# ---------------------------------------------------------------------------------------------------------------------
# Host


def adamw_rates(cores: int, elements: int, counts: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)) -> dict[int, float]:
    """AdamW on host planes by number of threads [1e9 parameters a second]."""
    wanted = sorted({count for count in counts if count < cores} | {cores})
    with _planes(elements) as run:
        return {count: round(run(count), 3) for count in wanted}


@contextlib.contextmanager
def _planes(elements: int) -> Iterator[Callable[[int], float]]:
    """Planes of `elements` in four units; inside, a function from threads to the rate of AdamW on them."""
    part = elements // 4
    optim, cpu = AdamW(), torch.device("cpu")
    units = [_filled(optim, part, cpu) for _ in range(4)]
    segments = segments_of([("weight", (part, 1), 0, part)], optim)
    coefficients = optim.coefficients(10, 1e-6)

    def rate(threads: int) -> float:
        with CpuUpdater(threads) as updater:

            def update() -> None:
                jobs = [
                    updater.submit_update(f"unit.{i}", optim, planes, grad, segments, coefficients)
                    for i, (planes, grad) in enumerate(units)
                ]
                for job in jobs:
                    job.result()

            return 4 * part / 1e9 / seconds_of(update)

    yield rate


def _filled(optim: OptimizerSpec, elements: int, device: torch.device) -> tuple[UnitPlanes, torch.Tensor]:
    """Split planes of a unit and its bf16 gradient, with values of ordinary size."""
    dtypes = {"hi": torch.bfloat16, "lo": torch.int16, **optim.state_dtypes}
    planes = {kind: torch.full((elements,), 1e-3, device=device).to(dtype) for kind, dtype in dtypes.items()}
    grad = torch.full((elements,), 1e-3, dtype=torch.bfloat16, device=device)
    return UnitPlanes.of("unit", FlatLayout((), elements), planes), grad


def host_bandwidth(cores: int, nbytes: int) -> float:
    """Read and written bytes together of a copy with all cores [GB/s]."""
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
    before = torch.get_num_threads()
    torch.set_num_threads(cores)
    try:
        return round(2 * nbytes / 1e9 / seconds_of(lambda: target.copy_(source)), 2)
    finally:
        torch.set_num_threads(before)


def disk_rates(folder: Path, nbytes: int) -> tuple[float, float]:
    """(write with fsync, read) [GB/s]; the page cache is left out of reading where the system lets us."""
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


def _device_facts(gpu: torch.device, threads: int, elements: int, nbytes: int) -> dict[str, object]:
    from megatrain.device.attention import measured_backends

    free, total = torch.cuda.mem_get_info(gpu)
    copies, streaming, limit = _copies(gpu, threads, elements, nbytes)
    heads, dim = 32, 128
    attention = measured_backends(heads, 8, dim, SHORT_ROW, torch.bfloat16, gpu)
    long_attention = measured_backends(heads, 8, dim, LONG_ROW, torch.bfloat16, gpu)
    bus = bus_id(gpu)
    facts: dict[str, object] = {
        "device_gib": round(min(free + torch.cuda.memory_reserved(gpu), total) / GIB, 2),
        **copies,
        "adamw_streaming_gparams": streaming,
        "device_adamw_gparams": _device_adamw(gpu, elements),
        "matrix_tflops": matrix_tflops(gpu),
        "device_bandwidth_gbps": _device_bandwidth(gpu, nbytes),
        "attention_ms": {backend.name: round(ms, 3) for backend, ms in attention},
        "device_node": system.device_node(bus),
        "pin_limit_gib": limit,
        "link": str(system.device_link(bus) or ""),
        "versions": f"torch {torch.__version__}, CUDA {torch.version.cuda}",
    }
    # of one causal forward and backward: 3.5 forwards of 4 T^2 d / 2 per head
    for name, found, tokens, rows in (
        ("attention_tflops", attention, SHORT_ROW, 16384 // SHORT_ROW),
        ("attention_long_tflops", long_attention, LONG_ROW, 1),
    ):
        if found:
            facts[name] = round(3.5 * rows * heads * 4 * tokens**2 * dim / 2 / found[0][1] / 1e9, 1)
    torch.cuda.empty_cache()
    return facts


def bus_id(gpu: torch.device) -> str:
    """The PCI address of a CUDA device, as the system writes it."""
    properties = torch.cuda.get_device_properties(gpu)
    domain = getattr(properties, "pci_domain_id", 0)
    return f"{domain:04x}:{getattr(properties, 'pci_bus_id', 0):02x}:{getattr(properties, 'pci_device_id', 0):02x}.0"


def _copies(
    gpu: torch.device, threads: int, elements: int, nbytes: int
) -> tuple[dict[str, object], float | None, float | None]:
    """(rates of the link, AdamW while weights stream, limit of pinning [GiB])."""
    limit = None
    with Arena(nbytes) as source, Arena(nbytes) as sink:
        for arena in (source, sink):
            try:
                arena.register([])
            except PinRefused as refusal:
                limit = round(refusal.pinned_bytes / GIB, 2)
                logger.warning("%s", refusal)
        here, there = source.tensor(0, nbytes, torch.uint8), sink.tensor(0, nbytes, torch.uint8)
        first = torch.empty(nbytes, dtype=torch.uint8, device=gpu)
        second = torch.empty(nbytes, dtype=torch.uint8, device=gpu)
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

        def waited(run: Callable[[], None]) -> Callable[[], None]:
            def whole() -> None:
                run()
                torch.cuda.synchronize(gpu)

            return whole

        gb = nbytes / 1e9
        rates: dict[str, object] = {
            "h2d_gbps": round(gb / seconds_of(waited(copy_in)), 2),
            "d2h_gbps": round(gb / seconds_of(waited(copy_out)), 2),
            "both_gbps": round(gb / seconds_of(waited(both)), 2),
        }
        with _planes(elements) as run:
            for _ in range(64):  # more than the updates take: they are measured while these are in the queue
                copy_in()
            streaming = round(run(threads), 3)
            torch.cuda.synchronize(gpu)
        return rates, streaming, limit


def _device_adamw(gpu: torch.device, elements: int) -> float:
    optim = AdamW()
    planes, grad = _filled(optim, elements, gpu)
    segments = segments_of([("weight", (elements, 1), 0, elements)], optim)
    coefficients = optim.coefficients(10, 1e-6)
    seconds = device_seconds(lambda: optim.update_on_device(planes, grad, segments, coefficients), gpu)
    return round(elements / 1e9 / seconds, 1)


def matrix_tflops(gpu: torch.device) -> float:
    """bf16 products with fp32 accumulation: the best of a square one and one of a layer's size."""
    best = 0.0
    for rows, inner, columns in MATRIX_SIZES:
        left = torch.randn(rows, inner, dtype=torch.bfloat16, device=gpu)
        right = torch.randn(inner, columns, dtype=torch.bfloat16, device=gpu)
        seconds = device_seconds(functools.partial(torch.mm, left, right), gpu, repeat=10)
        best = max(best, 2 * rows * inner * columns / 1e12 / seconds)
    return round(best, 1)


def _device_bandwidth(gpu: torch.device, nbytes: int) -> float:
    source = torch.ones(nbytes, dtype=torch.uint8, device=gpu)
    target = torch.empty_like(source)
    return round(2 * nbytes / 1e9 / device_seconds(lambda: target.copy_(source), gpu), 0)


# ---------------------------------------------------------------------------------------------------------------------
# Clocks


def seconds_of(run: Callable[[], object], repeat: int = 3) -> float:
    """Median seconds of a call, after one that does not count."""
    run()
    times = []
    for _ in range(repeat):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def device_seconds(run: Callable[[], object], device: torch.device, repeat: int = 5) -> float:
    """Median seconds of what a call puts on the device's current stream, after two that do not count; a clock on a CPU."""
    if device.type != "cuda":
        return seconds_of(run, repeat)
    run()
    run()
    times = []
    for _ in range(repeat):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def sustained_seconds(run: Callable[[], object], device: torch.device, times: int) -> float:
    """Mean seconds of a call that is made `times` times back to back, after two that do not count: at the clock that the
    device can hold, where `device_seconds` sees the one of a short burst."""

    def all_of_them() -> None:
        for _ in range(times):
            run()

    run()
    run()
    if device.type != "cuda":
        return seconds_of(all_of_them, 1) / times
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    all_of_them()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / times


# ---------------------------------------------------------------------------------------------------------------------
# Cache


def cache_file(gpu: torch.device | None) -> Path:
    """Where the figures of this hardware with this torch are kept."""
    parts = [VERSION, torch.__version__, os.uname().nodename, system.usable_cores(), system.all_cores()]
    if gpu is not None:
        parts += [torch.cuda.get_device_name(gpu), gpu.index, torch.cuda.device_count(), torch.version.cuda]
    key = hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "megatrain" / f"machine-{key}.json"


def _cached(file: Path) -> Machine | None:
    try:
        data = json.loads(file.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("%s is not readable (%s); measuring again", file, error)
        return None
    try:
        # the memory that is available changes all the time, the rates do not
        return machine_from({**data, "host_gib": round(available_host_bytes() / GIB, 1)}, str(file))
    except UserError as error:
        logger.warning("%s; measuring again", error)
        return None


def _keep(machine: Machine, file: Path) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as writer:
            writer.write(machine.as_json())
        Path(writer.name).replace(file)
    except OSError as error:
        logger.warning("the machine's figures could not be kept: %s", error)


def gpu_of(device: str | torch.device) -> torch.device | None:
    """The CUDA device meant, None for the CPU."""
    if str(device) == "cpu" or (str(device) == "auto" and not torch.cuda.is_available()):
        return None
    if not torch.cuda.is_available():
        raise UserError("no CUDA device is available", f"device: {device}", "use auto or cpu")
    found = torch.device("cuda" if str(device) == "auto" else device)
    return torch.device("cuda", found.index if found.index is not None else torch.cuda.current_device())
