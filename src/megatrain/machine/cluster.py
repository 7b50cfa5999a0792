"""`Cluster`: the figures of many equal nodes that plans for `engine: mesh` are made of, and their files.

GB = 10^9 bytes, GiB = 2^30 bytes, rates are what a program reaches, not what a data sheet says (`peak_tflops` alone is the data
sheet's, because that is what MFU is measured against). docs/planner.md describes the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from megatrain.errors import UserError
from megatrain.machine.machine import is_figure, name_problems, read_figures
from megatrain.units import GIB

SHORT_ROW, LONG_ROW = 1024, 32768
"""Tokens of the rows in which attention is measured."""


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal GPUs, a fast link inside a node and a network between nodes.

    Attributes:
        name: For people.
        gpus_per_node: GPUs that share the fast link.
        device_gib: Memory of a GPU that a process can have.
        peak_tflops: bf16 without sparsity, of the data sheet; MFU is a share of it.
        matrix_tflops: bf16 matrix products of a layer's sizes, reached.
        attention_tflops: Causal attention, forward and backward together, reached in rows of 1,024 tokens.
        attention_long_tflops: The same in rows of 32,768 tokens.
        device_bandwidth_gbps: Of the GPU's memory, read and written bytes together, reached.
        node_gbps: Of the link inside a node, for each GPU and direction, reached by collectives.
        network_gbps: Of the network between nodes, for each GPU and direction, reached by collectives (400 Gb/s are 50).
        node_latency_us, network_latency_us: Of one step of a collective.
        to_host_gbps: Copies of a GPU to its host, all GPUs of a node at once.
        gather_gbps: Of one process that gathers a checkpoint's units over gloo.
        storage_write_gbps, storage_read_gbps: Of one process that writes or reads a checkpoint; one of each host does.
        storage_write_limit_gbps, storage_read_limit_gbps: Of the file system, for all hosts together; None: it has no limit.
        mtbf_hours: Mean time between failures of one GPU with its share of node and network.
        restart_minutes: From a failure to the first step, reading the checkpoint aside.
    """

    name: str
    gpus_per_node: int
    device_gib: float
    peak_tflops: float
    matrix_tflops: float
    attention_tflops: float
    attention_long_tflops: float
    device_bandwidth_gbps: float
    node_gbps: float
    network_gbps: float
    node_latency_us: float = 4.0
    network_latency_us: float = 12.0
    to_host_gbps: float = 20.0
    gather_gbps: float = 2.0
    storage_write_gbps: float = 2.0
    storage_read_gbps: float = 5.0
    storage_write_limit_gbps: float | None = None
    storage_read_limit_gbps: float | None = None
    mtbf_hours: float = 50_000.0
    restart_minutes: float = 10.0

    @property
    def device_bytes(self) -> int:
        return int(self.device_gib * GIB)

    def attention_rate(self, tokens: int) -> float:
        """FLOPs a second of causal attention in rows of `tokens` tokens: seconds per FLOP are a line in 1 / tokens through the
        two measured lengths."""
        short, long = self.attention_tflops, self.attention_long_tflops
        slope = (1 / short - 1 / long) / (1 / SHORT_ROW - 1 / LONG_ROW)
        return 1e12 / (1 / long + slope * (1 / max(tokens, SHORT_ROW) - 1 / LONG_ROW))


def cluster_from(data: Mapping[str, Any], where: str) -> Cluster:
    """A cluster from plain data.

    Args:
        where: The file's name, for errors.

    Raises:
        UserError: A field is unknown, missing, or not a positive number; all problems at once.
    """
    problems = [*name_problems(data, Cluster)]
    for field in fields(Cluster):
        if field.name in data:
            problems += _problems_of(field.name, data[field.name])
    if problems:
        raise UserError("; ".join(problems), where, "docs/planner.md describes the fields; docs/machines has examples")
    return Cluster(**data)


def load_cluster(path: str | Path) -> Cluster:
    """A cluster from its file, YAML or JSON.

    Raises:
        UserError: The file is missing or not a cluster's.
    """
    data = read_figures(path)
    if "gpus_per_node" not in data:
        raise UserError(
            "is the file of one machine, not of a cluster", str(path), "give a file with gpus_per_node (docs/machines)"
        )
    return cluster_from(data, str(path))


def _problems_of(name: str, value: Any) -> list[str]:
    if name == "name":
        return [] if isinstance(value, str) else [f"name should be text, found {value!r}"]
    if not is_figure(value) or not value > 0:
        return [f"{name} should be a positive number, found {value!r}"]
    if name == "gpus_per_node" and not isinstance(value, int):
        return [f"gpus_per_node should be a whole number, found {value!r}"]
    return []
