"""Where each dimension of a mesh lies in a cluster, and what its collectives take.

[Note: where a dimension lies]
Ranks count tensor fastest, then context, shard, replicate, pipeline (engine/mesh/layout.py), and fill nodes one after the
other. A group's members are `stride` ranks apart, so `gpus_per_node / stride` of them share a node. A group inside
one node uses the node's link. One that spans nodes is a ring that leaves each node through the network ports of its
members there: k members have k ports, and the slower of the node's link and those ports decides.

[Note: the ring]
Gathering or scattering S bytes over n ranks moves S (n - 1) / n through each; an all-reduce does both. Each step of
the ring costs one latency; the steps are one for each member inside a node, then one for each further node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatrain.engine.mesh.layout import Layout
from megatrain.machine.machine import Cluster

Dimension = Literal["tensor", "context", "fsdp", "replicate", "pipeline"]
DIMENSIONS: tuple[Dimension, ...] = ("tensor", "context", "fsdp", "replicate", "pipeline")


@dataclass(frozen=True)
class Group:
    """The ranks along one dimension.

    Attributes:
        size: Ranks.
        per_node: How many of them share a node.
        gbps: What one of them sends and receives [GB/s].
        latency_s: Of one collective.
        inside: Whether it lies inside one node.
    """

    size: int
    per_node: int
    gbps: float
    latency_s: float
    inside: bool

    @property
    def link(self) -> str:
        return "node" if self.inside else "network"

    def moved(self, nbytes: float) -> float:
        """Bytes through each rank for one gather or scatter of `nbytes`."""
        return nbytes * (self.size - 1) / self.size

    def gather(self, nbytes: float) -> float:
        """Seconds to gather or scatter `nbytes`, all ranks' parts together."""
        return self.moved(nbytes) / (self.gbps * 1e9) + self.latency_s if self.size > 1 else 0.0

    def all_reduce(self, nbytes: float) -> float:
        """Seconds to add up `nbytes` of each rank."""
        return 2 * self.gather(nbytes)


def group(layout: Layout, cluster: Cluster, dimension: Dimension) -> Group:
    """The group along a dimension of a resolved layout; see [Note: where a dimension lies]."""
    _, replicate, shard, context, tensor = layout.sizes
    stride, size = {
        "tensor": (1, tensor),
        "context": (tensor, context),
        "fsdp": (tensor, shard * context),
        "replicate": (tensor * context * shard, replicate),
        "pipeline": (tensor * context * shard * replicate, layout.pipeline),
    }[dimension]
    per_node = min(size, max(1, cluster.gpus_per_node // max(1, stride)))
    nodes = -(-size // per_node)
    inside = nodes == 1
    gbps = cluster.node_gbps if inside else min(cluster.node_gbps, per_node * cluster.network_gbps)
    latency_us = (per_node - 1) * cluster.node_latency_us + (nodes - 1) * cluster.network_latency_us
    return Group(size, per_node, gbps, latency_us * 1e-6, inside)


def send_seconds(layout: Layout, cluster: Cluster, nbytes: float) -> float:
    """Seconds from one pipeline rank to the next."""
    ring = group(layout, cluster, "pipeline")
    inside = ring.per_node > 1
    gbps = cluster.node_gbps if inside else cluster.network_gbps
    latency_us = cluster.node_latency_us if inside else cluster.network_latency_us
    return nbytes / (gbps * 1e9) + latency_us * 1e-6
