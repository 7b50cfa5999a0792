"""`megatrain doctor`: the machine's figures as a table, and its problems with their causes.

`findings` is a pure function of the measured figures and of the system's facts; `doctor` collects both and formats the result.
"""

from __future__ import annotations

import io
import os
import resource
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
import torch
from ruamel.yaml import YAML

from megatrain.machine.gpus import equal_gpus, pairs_without_peer_access
from megatrain.machine.machine import Machine
from megatrain.machine.probe import cache_file, gpu_of, probe
from megatrain.machine.system import Link, bus_id, cpu_quota, device_link, device_node, is_wsl, node_cpus
from megatrain.optim.adamw import AdamW
from megatrain.units import GIB

BYTES_PER_UPDATE = AdamW().update_bytes(2)
"""Memory traffic of AdamW per parameter: hi, lo, gradient, m, v read; hi, lo, m, v written."""


@dataclass(frozen=True)
class Surroundings:
    """Facts from the system, in addition to the measured figures."""

    all_cores: int  # cores of the machine
    allowed_cpus: frozenset[int]  # cores in the process's affinity
    cpu_quota: float | None  # CPU quota of the container in cores, None without a limit
    nodes: Mapping[int, set[int]]  # NUMA node -> its cores
    link: Link | None  # of the GPU
    total_host_bytes: int  # memory of the machine, including memory that this process may not use
    locked_limit: int | None  # `ulimit -l` in bytes, None without a limit
    wsl: bool  # Linux inside Windows
    disk_free_bytes: int  # where runs are written
    gpu_nodes: Mapping[int, int | None] = field(default_factory=dict)  # NUMA node of each GPU like this one, by index
    no_peer_access: Sequence[tuple[int, int]] = ()  # pairs of these GPUs whose copies pass through the host

    @property
    def quota_binds(self) -> bool:
        """Whether the container's quota is below the number of visible cores."""
        return self.cpu_quota is not None and self.cpu_quota < len(self.allowed_cpus)


def doctor(device: str = "auto", *, again: bool = False, form: str = "text", folder: Path | None = None) -> str:
    """The machine's figures, cached or measured (`again`): as `text` with warnings, or alone as `json` or `yaml`.

    `folder` is where runs are written, by default the current folder.
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
    verdict = [f"warning: {problem}" for problem in findings(machine, around)] or ["no problems found"]
    return "\n".join([*table(machine, around), "", *verdict])


def machine_yaml(machine: Machine) -> str:
    """The text of a machine file, for `--machine`."""
    out, yaml = io.StringIO(), YAML()
    yaml.default_flow_style = None
    yaml.dump({name: value for name, value in asdict(machine).items() if value is not None}, out)
    return out.getvalue()


def surroundings(gpu: torch.device | None, folder: Path) -> Surroundings:
    gpus = equal_gpus(gpu) if gpu is not None else []
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)  # CUDA's pinned memory is exempt on most systems
    return Surroundings(
        all_cores=os.cpu_count() or 1,
        allowed_cpus=frozenset(os.sched_getaffinity(0)),
        cpu_quota=cpu_quota(),
        nodes=node_cpus(),
        link=device_link(bus_id(gpu)) if gpu is not None else None,
        total_host_bytes=psutil.virtual_memory().total,
        locked_limit=None if locked == resource.RLIM_INFINITY else locked,
        wsl=is_wsl(),
        disk_free_bytes=psutil.disk_usage(str(folder)).free,
        gpu_nodes={each.index: device_node(bus_id(each)) for each in gpus},
        no_peer_access=pairs_without_peer_access(gpus),
    )


def table(machine: Machine, around: Surroundings) -> list[str]:
    """The figures, one a line."""
    rates = ", ".join(f"{count}: {rate:.2f}" for count, rate in sorted(machine.adamw_gparams.items()))
    best = machine.adamw_gparams[machine.threads]
    total_gib, free_gib = around.total_host_bytes / GIB, around.disk_free_bytes / GIB
    memory = f"{machine.host_gib:.1f} GiB available of {total_gib:.1f}, {machine.host_bandwidth_gbps:.0f} GB/s"
    disk = f"{machine.disk_write_gbps:.2f} GB/s written, {machine.disk_read_gbps:.2f} read, {free_gib:.0f} GiB free"
    gpu_node = f", GPU on node {machine.device_node}" if machine.device_node is not None else ""
    rows = [
        ("cores", f"{machine.cores} usable of {around.all_cores}"),
        ("NUMA nodes", f"{machine.numa_nodes}{gpu_node}"),
        ("host memory", memory),
        ("AdamW by threads", f"{rates} G parameters/s; the best moves {best * BYTES_PER_UPDATE:.0f} GB/s"),
        ("disk", disk),
    ]
    if machine.device_gib > 0:
        attention = ", ".join(f"{name} {ms:.2f} ms" for name, ms in machine.attention_ms.items()) or "no fast backend"
        copies = f"{machine.h2d_gbps:.1f} GB/s in, {machine.d2h_gbps:.1f} out, {machine.both_gbps:.1f} each at once"
        streaming, limit = machine.adamw_streaming_gparams, machine.pin_limit_gib
        rows += [
            ("device memory", f"{machine.device_gib:.1f} GiB, {machine.device_bandwidth_gbps:.0f} GB/s"),
            ("link", f"{machine.link or 'unknown'}: {copies}"),
            *_rows_of_gpus(machine, around),
            ("AdamW while streaming", f"{streaming:.2f} G parameters/s" if streaming else "not measured"),
            ("AdamW on the GPU", f"{machine.device_adamw_gparams:.0f} G parameters/s"),
            ("matrix products", f"{machine.matrix_tflops:.0f} TFLOP/s in bf16"),
            ("attention, 16k tokens", attention),
            ("pinning", "no limit met" if limit is None else f"limit near {limit:.1f} GiB"),
        ]
    width = max(len(name) for name, _ in rows)
    return [machine.name, *(f"  {name:{width}}  {text}" for name, text in rows)]


def _rows_of_gpus(machine: Machine, around: Surroundings) -> list[tuple[str, str]]:
    """Rows about several equal GPUs."""
    if machine.gpus == 1:
        return []
    blind = ", ".join(f"{one}-{other}" for one, other in around.no_peer_access)
    peers = (
        f"{machine.peer_gbps:.0f} GB/s from them in collectives; peer access {f'not {blind}' if blind else 'to all'}"
    )
    nodes = ", ".join(f"GPU {gpu}: {'?' if node is None else node}" for gpu, node in around.gpu_nodes.items())
    rows = [("other GPUs", f"{machine.gpus - 1}; {peers}"), ("nodes of GPUs", nodes or "unknown")]
    if machine.all_gpus_gbps is not None:
        alone = ", ".join(f"{rate:.1f}" for _, rate in sorted(machine.gpu_link_gbps.items()))
        rows.append(("links of all GPUs", f"{alone} GB/s each way alone, {machine.all_gpus_gbps:.1f} all at once"))
    return rows


def findings(machine: Machine, around: Surroundings) -> list[str]:
    """The machine's problems, each with its cause and a remedy. Pure."""
    found = [*_core_findings(machine, around), *_memory_findings(machine, around)]
    if machine.device_gib > 0:
        found += [*_device_findings(machine, around), *_findings_of_gpus(machine, around)]
    if 0 < machine.disk_write_gbps < 0.3:
        found.append(
            f"the disk writes {machine.disk_write_gbps:.2f} GB/s: a checkpoint of 8 B parameters (96 GB) takes "
            f"{96 / machine.disk_write_gbps / 60:.0f} minutes; set run.dir to a local disk"
        )
    return found


def _core_findings(machine: Machine, around: Surroundings) -> list[str]:
    found = []
    visible = len(around.allowed_cpus)
    if machine.cores <= 2 < around.all_cores:
        if around.quota_binds:
            cause = f"the container's quota is {around.cpu_quota:g} cores: raise its CPU limit"
        else:
            cause = "the process's affinity or its batch job limits it: request more (--cpus-per-task, taskset)"
        found.append(f"only {machine.cores} of {around.all_cores} cores are usable, and AdamW needs cores; {cause}")
    elif around.quota_binds:
        found.append(
            f"the container's quota is {around.cpu_quota:g} cores while {visible} are visible: threads beyond the quota are "
            "throttled in the middle of a step; raise its CPU limit, or set run.threads"
        )
    rates = machine.adamw_gparams
    most, fewest = max(rates), min(rates)
    if len(rates) > 1 and rates[most] < 1.3 * rates[fewest] and machine.cores > 2:
        found.append(
            f"AdamW with {most} threads is hardly faster than with {fewest} ({rates[most]:.2f} and {rates[fewest]:.2f} "
            "G parameters/s): threads share one core (OMP_PROC_BIND, GOMP_CPU_AFFINITY, a quota), or the memory is slow"
        )
    return found


def _memory_findings(machine: Machine, around: Surroundings) -> list[str]:
    found = []
    moved = machine.adamw_gparams[machine.threads] * BYTES_PER_UPDATE
    if moved < 0.5 * machine.host_bandwidth_gbps:
        one = machine.threads == 1
        cause = "too few threads" if one else "threads on another NUMA node, a busy machine, or an old CPU"
        found.append(
            f"AdamW moves {moved:.0f} GB/s of the {machine.host_bandwidth_gbps:.0f} GB/s that host memory gives: {cause}"
        )
    node = machine.device_node
    used_nodes = [number for number, cpus in around.nodes.items() if cpus & around.allowed_cpus]
    if node is not None and used_nodes and node not in used_nodes:
        found.append(
            f"the process runs on NUMA node {used_nodes[0]}, the GPU is attached to node {node}: copies cross between them; "
            f"start with `numactl --cpunodebind={node} --preferred={node}`"
        )
    if machine.host_gib * GIB < 0.6 * around.total_host_bytes:
        found.append(
            f"{machine.host_gib:.0f} GiB of {around.total_host_bytes / GIB:.0f} GiB host memory are available: "
            "a container limit, or other processes"
        )
    return found


def _device_findings(machine: Machine, around: Surroundings) -> list[str]:
    found = []
    link, slower = around.link, min(machine.h2d_gbps, machine.d2h_gbps)
    if link is not None and link.lanes < link.most_lanes:
        found.append(
            f"the GPU uses {link.lanes} of {link.most_lanes} PCIe lanes: a narrower slot, a riser, or lanes shared on the board"
        )
    if link is not None and link.usable_gbps and slower < 0.7 * link.usable_gbps:
        found.append(
            f"copies reach {slower:.0f} GB/s where {link} gives about {link.usable_gbps:.0f}: "
            "memory on another NUMA node, IOMMU or virtualisation, or other traffic on the link"
        )
    if machine.pin_limit_gib is not None:
        cause = "Windows lets WSL pin only part of its memory" if around.wsl else "a limit of the system or container"
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


def _findings_of_gpus(machine: Machine, around: Surroundings) -> list[str]:
    found = []
    rates = machine.gpu_link_gbps
    if machine.all_gpus_gbps is not None and rates and machine.all_gpus_gbps < 0.8 * min(rates.values()):
        found.append(
            f"a GPU's copies reach {machine.all_gpus_gbps:.0f} GB/s each way while all {machine.gpus} GPUs copy, "
            f"{min(rates.values()):.0f} alone: they share a PCIe switch or the host's memory bandwidth; plans count with it"
        )
    if rates and min(rates.values()) < 0.8 * max(rates.values()):
        slowest = min(rates, key=lambda gpu: rates[gpu])
        found.append(
            f"GPU {slowest} copies at {rates[slowest]:.0f} GB/s each way, another at {max(rates.values()):.0f}: "
            "a narrower slot, or memory on another NUMA node; all ranks wait for it"
        )
    if around.no_peer_access:
        one, other = around.no_peer_access[0]
        found.append(
            f"no peer access between GPUs {one} and {other}: collectives pass through host memory "
            "(consumer cards, or IOMMU and PCIe access control of a virtual machine)"
        )
    return found
