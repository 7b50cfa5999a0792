"""`megatrain doctor`: the machine's figures in a table, and what is wrong with it, each with its cause.

`findings` is a pure function of the figures and of what the system says; `doctor` measures, asks and prints.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from ruamel.yaml import YAML

from megatrain.machine import system
from megatrain.machine.machine import Machine
from megatrain.machine.probe import GIB, bus_id, cache_file, gpu_of, probe
from megatrain.optim.adamw import AdamW

BYTES_PER_UPDATE = AdamW().update_bytes(2)


@dataclass(frozen=True)
class Surroundings:
    """What the system says, beside what was measured.

    Attributes:
        all_cores: Of the machine.
        affinity: Cores that the process's affinity allows.
        cpu_quota: Cores' worth of time that the container gives, None without a limit.
        nodes: Memory node -> its cores.
        allowed_cpus: Numbers of the cores that the affinity allows.
        link: Of the GPU.
        total_host_bytes: Of the machine, whatever this process may use.
        locked_limit: `ulimit -l` in bytes, None without a limit.
        wsl: Linux inside Windows.
        torch_threads: That torch computes with.
        disk_free_bytes: Where runs are written.
    """

    all_cores: int
    affinity: int
    cpu_quota: float | None
    nodes: Mapping[int, set[int]]
    allowed_cpus: frozenset[int]
    link: system.Link | None
    total_host_bytes: int
    locked_limit: int | None
    wsl: bool
    torch_threads: int
    disk_free_bytes: int


def doctor(device: str = "auto", *, again: bool = False, form: str = "text", folder: Path | None = None) -> str:
    """Measure, or take the cached figures, and describe them.

    Args:
        device: As for `probe`.
        again: Measure, whatever is cached.
        form: `text` with warnings, or the figures as `json` or `yaml` (a machine file).
        folder: Where runs are written.
    """
    folder = folder or Path.cwd()
    gpu = gpu_of(device)
    if again:
        cache_file(gpu).unlink(missing_ok=True)
    machine = probe(device, disk_folder=folder)
    if form == "json":
        return machine.as_json()
    if form == "yaml":
        return machine_yaml(machine)
    around = surroundings(gpu, folder)
    problems = findings(machine, around)
    verdict = [f"warning: {problem}" for problem in problems] or ["nothing is wrong with this machine"]
    return "\n".join([*table(machine, around), "", *verdict])


def machine_yaml(machine: Machine) -> str:
    """A machine file, for `--machine`."""
    out = io.StringIO()
    yaml = YAML()
    yaml.default_flow_style = None
    yaml.dump({name: value for name, value in machine.as_dict().items() if value is not None}, out)
    return out.getvalue()


def surroundings(gpu: torch.device | None, folder: Path) -> Surroundings:
    """Ask the system."""
    return Surroundings(
        all_cores=system.all_cores(),
        affinity=len(os.sched_getaffinity(0)),
        cpu_quota=system.cpu_quota(),
        nodes=system.node_cpus(),
        allowed_cpus=frozenset(os.sched_getaffinity(0)),
        link=system.device_link(bus_id(gpu)) if gpu is not None else None,
        total_host_bytes=psutil.virtual_memory().total,
        locked_limit=system.locked_memory_limit(),
        wsl=system.is_wsl(),
        torch_threads=torch.get_num_threads(),
        disk_free_bytes=psutil.disk_usage(str(folder)).free,
    )


def table(machine: Machine, around: Surroundings) -> list[str]:
    """The figures, one a line."""
    rates = ", ".join(f"{count}: {rate:.2f}" for count, rate in sorted(machine.adamw_gparams.items()))
    best = machine.adamw_gparams[machine.threads]
    total_gib, free_gib = around.total_host_bytes / GIB, around.disk_free_bytes / GIB
    rows = [
        ("cores", f"{machine.cores} usable of {around.all_cores}"),
        (
            "memory nodes",
            f"{machine.numa_nodes}"
            + (f", the GPU on node {machine.device_node}" if machine.device_node is not None else ""),
        ),
        (
            "host memory",
            f"{machine.host_gib:.1f} GiB available of {total_gib:.1f}, {machine.host_bandwidth_gbps:.0f} GB/s",
        ),
        ("AdamW by threads", f"{rates} G parameters/s; the best moves {best * BYTES_PER_UPDATE:.0f} GB/s"),
        (
            "disk",
            f"{machine.disk_write_gbps:.2f} GB/s written, {machine.disk_read_gbps:.2f} read, {free_gib:.0f} GiB free",
        ),
    ]
    if machine.device_gib > 0:
        attention = ", ".join(f"{name} {ms:.2f} ms" for name, ms in machine.attention_ms.items()) or "no fast backend"
        streaming = machine.adamw_streaming_gparams
        rows += [
            ("device memory", f"{machine.device_gib:.1f} GiB, {machine.device_bandwidth_gbps:.0f} GB/s"),
            (
                "link",
                f"{machine.link or 'unknown'}: {machine.h2d_gbps:.1f} GB/s in, {machine.d2h_gbps:.1f} out, "
                f"{machine.both_gbps:.1f} each at once",
            ),
            ("AdamW while streaming", f"{streaming:.2f} G parameters/s" if streaming else "not measured"),
            ("AdamW on the GPU", f"{machine.device_adamw_gparams:.0f} G parameters/s"),
            ("matrix products", f"{machine.matrix_tflops:.0f} TFLOP/s in bf16"),
            ("attention, 16k tokens", attention),
            (
                "pinning",
                "no limit met" if machine.pin_limit_gib is None else f"limit near {machine.pin_limit_gib:.1f} GiB",
            ),
        ]
    width = max(len(name) for name, _ in rows)
    return [machine.name, *(f"  {name:{width}}  {text}" for name, text in rows)]


def findings(machine: Machine, around: Surroundings) -> list[str]:
    """What is wrong, each with its cause and what to do. Pure."""
    found = [*_core_findings(machine, around), *_memory_findings(machine, around)]
    if machine.device_gib > 0:
        found += _device_findings(machine, around)
    if 0 < machine.disk_write_gbps < 0.3:
        found.append(
            f"the disk writes {machine.disk_write_gbps:.2f} GB/s: a checkpoint of 8 B parameters (96 GB) takes "
            f"{96 / machine.disk_write_gbps / 60:.0f} minutes; set run.dir to a local disk"
        )
    return found


def _core_findings(machine: Machine, around: Surroundings) -> list[str]:
    found = []
    if machine.cores <= 2 < around.all_cores:
        if around.cpu_quota is not None and around.cpu_quota < around.affinity:
            cause = f"the container's quota is {around.cpu_quota:g} cores: raise its CPU limit"
        else:
            cause = "the process's affinity or its batch job allows no more: ask for more (--cpus-per-task, taskset)"
        found.append(f"{machine.cores} of {around.all_cores} cores are visible, and AdamW needs them; {cause}")
    elif around.cpu_quota is not None and around.cpu_quota < around.affinity:
        found.append(
            f"the container's quota is {around.cpu_quota:g} cores while {around.affinity} are visible: threads beyond it are "
            "stopped in the middle of a step; raise its CPU limit, or set run.threads"
        )
    rates = machine.adamw_gparams
    if len(rates) > 1 and rates[max(rates)] < 1.3 * rates[min(rates)] and machine.cores > 2:
        found.append(
            f"AdamW with {max(rates)} threads is hardly faster than with {min(rates)} ({rates[max(rates)]:.2f} and "
            f"{rates[min(rates)]:.2f} G parameters/s): threads share one core "
            "(OMP_PROC_BIND, GOMP_CPU_AFFINITY, a quota), or the memory is slow"
        )
    return found


def _memory_findings(machine: Machine, around: Surroundings) -> list[str]:
    found = []
    moved = machine.adamw_gparams[machine.threads] * BYTES_PER_UPDATE
    if moved < 0.5 * machine.host_bandwidth_gbps:
        cause = (
            "few threads" if machine.threads == 1 else "threads on another memory node, a busy machine, or an old CPU"
        )
        found.append(
            f"AdamW moves {moved:.0f} GB/s of the {machine.host_bandwidth_gbps:.0f} GB/s that host memory gives: {cause}"
        )
    used_nodes = [node for node, cpus in around.nodes.items() if cpus & around.allowed_cpus]
    if machine.device_node is not None and used_nodes and machine.device_node not in used_nodes:
        found.append(
            f"the process runs on memory node {used_nodes[0]}, the GPU hangs on node {machine.device_node}: copies cross between "
            f"them; start with `numactl --cpunodebind={machine.device_node} --preferred={machine.device_node}`"
        )
    if machine.host_gib * GIB < 0.6 * around.total_host_bytes:
        found.append(
            f"{machine.host_gib:.0f} GiB of {around.total_host_bytes / GIB:.0f} GiB host memory are available: "
            "a container limit, or other processes"
        )
    return found


def _device_findings(machine: Machine, around: Surroundings) -> list[str]:
    found = []
    link = around.link
    if link is not None and link.lanes < link.most_lanes:
        found.append(
            f"the GPU runs on {link.lanes} of {link.most_lanes} PCIe lanes: "
            "another slot, a riser, or the board's sharing of lanes"
        )
    if link is not None and link.usable_gbps and min(machine.h2d_gbps, machine.d2h_gbps) < 0.7 * link.usable_gbps:
        found.append(
            f"copies reach {min(machine.h2d_gbps, machine.d2h_gbps):.0f} GB/s where {link} gives about {link.usable_gbps:.0f}: "
            "memory on another node, IOMMU or virtualisation, or other traffic on the link"
        )
    if machine.pin_limit_gib is not None:
        cause = "Windows lets WSL pin only a part of its memory" if around.wsl else "a limit of the system or container"
        limit = f" (ulimit -l: {around.locked_limit / GIB:.2f} GiB)" if around.locked_limit is not None else ""
        found.append(
            f"pinning stopped at {machine.pin_limit_gib:.1f} GiB: {cause}{limit}; "
            "memory.pin: staged works with small pinned buffers"
        )
    if not machine.attention_ms:
        found.append(
            "no fused attention backend works for 32 heads of 128 in bf16: long rows will be slow and need much memory"
        )
    return found
