"""`Machine` and `Cluster`: the figures that plans are computed from, and the YAML or JSON files that hold them.

GB = 10^9 bytes, GiB = 2^30 bytes. Rates are measured ones, except for `peak_tflops`: MFU on clusters is a share of the data
sheet's rate. docs/planner.md describes both kinds of file, docs/machines has examples.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from megatrain.errors import UserError, near_paths
from megatrain.units import GIB

SHORT_ROW, LONG_ROW = 1024, 32768
"""Row lengths at which attention is measured [tokens]."""
LARGEST = 1e15
"""Upper bound of every figure, whatever its unit, so that it can be converted to bytes and compared."""
TEXTS = ("name", "link", "versions")
MAPS = ("adamw_gparams", "attention_ms", "gpu_link_gbps")
MAY_BE_ZERO = (
    "device_gib", "host_gib", "disk_write_gbps", "disk_read_gbps", "numa_nodes", "device_node", "pin_limit_gib"
)  # fmt: skip
"""Figures of a machine that may be zero: absent, or not measured. Plans divide by the others."""


@dataclass(frozen=True)
class Machine:
    """One GPU, or several equal ones, or none; their host and the link between them."""

    name: str
    device_gib: float  # GPU memory available to a process, 0 without a GPU
    host_gib: float  # host memory available to a process
    cores: int  # CPU cores this process may use
    h2d_gbps: float = 25.0  # pinned copies to the GPU
    d2h_gbps: float = 25.0  # pinned copies from the GPU
    both_gbps: float = 20.0  # pinned copies in each direction while both are copying
    host_bandwidth_gbps: float = 50.0  # host memory, bytes read and written together
    adamw_gparams: Mapping[int, float] = field(default_factory=lambda: {1: 0.5})  # host, by threads [1e9 parameters/s]
    adamw_streaming_gparams: float | None = None  # the best of these while weights stream to the GPU
    device_adamw_gparams: float = 25.0  # AdamW on the GPU [1e9 parameters/s]
    matrix_tflops: float = 100.0  # bf16 matrix products of a layer's sizes, fp32 accumulation
    device_bandwidth_gbps: float = 800.0  # GPU memory, bytes read and written together
    attention_tflops: float = 60.0  # causal, forward and backward, fastest backend, rows of 1,024 tokens
    attention_long_tflops: float | None = None  # the same at 32,768 tokens; None if not measured
    attention_ms: Mapping[str, float] = field(default_factory=dict)  # by backend, for 16,384 tokens of 32 heads
    disk_write_gbps: float = 0.0  # the disk that runs are written to; 0 if not measured
    disk_read_gbps: float = 0.0
    numa_nodes: int = 1
    device_node: int | None = None  # NUMA node of the GPU; None if unknown
    pin_limit_gib: float | None = None  # most memory that a process may pin; None if no limit was met
    gpus: int = 1  # equal GPUs of this host; the rates above are those of one, host figures those of the whole host
    peer_gbps: float = 20.0  # what a GPU receives from the others in collectives; about 230 over NVLink
    gpu_link_gbps: Mapping[int, float] = field(default_factory=dict)  # as both_gbps, of each GPU alone, by its index
    all_gpus_gbps: float | None = None  # as both_gbps, of the slowest GPU while all copy; None: not measured
    hosts: int = 1  # equal hosts like this one, for plans
    network_gbps: float = (
        12.5  # network between hosts, of each GPU's share and each way, as collectives reach; not measured
    )
    link: str = ""  # of the GPU, as the system describes it: `PCIe 5 x16`
    versions: str = ""  # torch and CUDA used for measuring

    def link_gbps(self, ranks: int) -> tuple[float, float]:
        """(copies to a GPU alone, copies in each direction at once), while `ranks` GPUs of this host copy."""
        share = 1.0
        if self.all_gpus_gbps is not None and ranks > 1:  # what all GPUs reach together bounds what fewer reach
            share = min(1.0, self.all_gpus_gbps * self.gpus / ranks / self.both_gbps)
        return share * self.h2d_gbps, share * self.both_gbps

    @property
    def threads(self) -> int:
        """The fewest AdamW threads within 3% of the best measured rate."""
        best = max(self.adamw_gparams.values())
        return min(count for count, rate in self.adamw_gparams.items() if rate >= 0.97 * best)

    def attention_rate(self, tokens: int) -> float:
        """FLOP/s of causal attention in rows of `tokens` tokens."""
        return _attention_rate(self.attention_tflops, self.attention_long_tflops, tokens)

    def adamw_rate(self, threads: int | None = None) -> float:
        """Parameters/s of AdamW on the host while weights stream; `threads` None means the best number."""
        best = alone = self.adamw_gparams[self.threads]
        if threads is not None:
            known = sorted(self.adamw_gparams)
            below = max((count for count in known if count <= threads), default=known[0])
            alone = min(best, self.adamw_gparams[below] * threads / below)
        share = self.adamw_streaming_gparams / best if self.adamw_streaming_gparams else 0.95
        return alone * min(1.0, share) * 1e9

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal GPUs, a fast link inside a node and a network between nodes."""

    name: str
    gpus_per_node: int  # GPUs that share the fast link
    device_gib: float  # GPU memory available to a process
    peak_tflops: float  # bf16 without sparsity, from the data sheet; MFU is a share of it
    matrix_tflops: float  # bf16 matrix products of a layer's sizes
    attention_tflops: float  # causal, forward and backward, rows of 1,024 tokens
    attention_long_tflops: float  # the same in rows of 32,768 tokens
    device_bandwidth_gbps: float  # GPU memory, bytes read and written together
    node_gbps: float  # link inside a node, per GPU and direction, as reached by collectives
    network_gbps: float  # network between nodes, likewise (400 Gb/s are 50 GB/s)
    node_latency_us: float = 4.0  # one step of a collective inside a node
    network_latency_us: float = 12.0  # one step of a collective between nodes
    to_host_gbps: float = 20.0  # copies from a GPU to its host while all GPUs of the node copy
    gather_gbps: float = 2.0  # one process gathering a checkpoint's units over gloo
    storage_write_gbps: float = 2.0  # one process writing a checkpoint; there is one on each host
    storage_read_gbps: float = 5.0
    storage_write_limit_gbps: float | None = None  # the file system for all hosts together; None: no limit
    storage_read_limit_gbps: float | None = None
    mtbf_hours: float = 50_000.0  # mean time between failures of one GPU with its share of node and network
    restart_minutes: float = 10.0  # from a failure to the first step, without reading the checkpoint

    @property
    def device_bytes(self) -> int:
        return int(self.device_gib * GIB)

    def attention_rate(self, tokens: int) -> float:
        """FLOP/s of causal attention in rows of `tokens` tokens."""
        return _attention_rate(self.attention_tflops, self.attention_long_tflops, tokens)


def _attention_rate(short_tflops: float, long_tflops: float | None, tokens: int) -> float:
    """FLOP/s at a row length: seconds per FLOP are a line in 1 / tokens through the two measured lengths."""
    if long_tflops is None:
        return short_tflops * 1e12
    slope = (1 / short_tflops - 1 / long_tflops) / (1 / SHORT_ROW - 1 / LONG_ROW)
    return 1e12 / (1 / long_tflops + slope * (1 / max(tokens, SHORT_ROW) - 1 / LONG_ROW))


# ---------------------------------------------------------------------------------------------------------------------
# Files


def load_machine(path: str | Path) -> Machine:
    """The machine in a YAML or JSON file; UserError if it is missing or no machine file."""
    data = read_figures(path)
    if "gpus_per_node" in data:
        raise UserError(
            "is the file of a cluster, not of one machine", str(path), "plan for it with --world and engine: mesh"
        )
    return machine_from(data, str(path))


def load_cluster(path: str | Path) -> Cluster:
    """The cluster in a YAML or JSON file; UserError if it is missing or no cluster file."""
    data = read_figures(path)
    if "gpus_per_node" not in data:
        raise UserError(
            "is the file of one machine, not of a cluster", str(path), "give a file with gpus_per_node (docs/machines)"
        )
    return _made(Cluster, data, str(path), ())


def machine_from(data: Mapping[str, Any], where: str) -> Machine:
    """A machine from plain data; one UserError, which names `where`, for all unknown or missing keys and wrong values."""
    machine = _made(Machine, data, where, MAY_BE_ZERO)
    rates = {int(count): float(rate) for count, rate in machine.adamw_gparams.items()}
    return replace(machine, adamw_gparams=rates)


Figures = TypeVar("Figures", Machine, Cluster)


def _made(kind: type[Figures], data: Mapping[str, Any], where: str, may_be_zero: tuple[str, ...]) -> Figures:
    problems = list(_problems(kind, data, may_be_zero))
    if problems:
        raise UserError("; ".join(problems), where, "docs/planner.md describes the fields; docs/machines has examples")
    return kind(**data)


def _problems(kind: type[Figures], data: Mapping[str, Any], may_be_zero: tuple[str, ...]) -> Iterator[str]:
    known = {f.name: f for f in fields(kind)}
    for name in data:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            yield f"unknown key {name!r}" + (f'; did you mean "{near[0]}"?' if near else "")
    for name, info in known.items():
        if name not in data:
            if info.default is MISSING and info.default_factory is MISSING:
                yield f"{name} is missing"
        elif not (data[name] is None and info.default is None):
            wanted = _wanted(name, data[name], name in may_be_zero)
            if wanted:
                yield f"{name} should {wanted}, found {data[name]!r}"


def _wanted(name: str, value: Any, may_be_zero: bool) -> str | None:
    """What the value of a field should be, None if that is what it is."""
    if name in TEXTS:
        return None if isinstance(value, str) else "be text"
    if name in MAPS:
        if not isinstance(value, Mapping) or not all(_is_figure(v) and v > 0 for v in value.values()):
            return "map to positive numbers"
        threads = name == "adamw_gparams"
        return "map numbers of threads to rates" if threads and not (value and all(map(_is_count, value))) else None
    if not _is_figure(value) or value < 0 or (value == 0 and not may_be_zero):
        return "be a number" if may_be_zero else "be a positive number"
    return "be a whole number" if name in ("gpus_per_node", "gpus", "hosts") and not isinstance(value, int) else None


def _is_figure(value: Any) -> TypeGuard[int | float]:
    """Whether a value is a finite number, and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def _is_count(value: Any) -> bool:
    text = str(value)
    return text.isascii() and text.isdigit() and int(text) > 0


def read_figures(path: str | Path) -> dict[str, Any]:
    """The fields of a machine's or a cluster's file as written; UserError if it is missing or holds no fields."""
    file = Path(path)
    try:
        data = YAML(typ="safe").load(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError("no such file", str(file), near_paths(file)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot be read: {error}", str(file), "give the path of a machine file") from None
    except YAMLError as error:
        raise UserError(f"is not valid YAML: {str(error).splitlines()[0]}", str(file)) from None
    if not isinstance(data, dict):
        raise UserError("should hold the fields of a machine", str(file), "docs/machines has examples")
    return data
