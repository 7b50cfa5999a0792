"""Where each dimension of a mesh lies in a cluster, how long its collectives take, and how much it sends.

[Note: where a dimension lies]
Ranks count tensor fastest, then context, shard, replicate, pipeline (engine/mesh/layout.py), and fill nodes one after the other.
A group's members are `stride` ranks apart, so `gpus_per_node / stride` of them share a node. A group inside one node uses the
node's link. A group that spans nodes is a ring that leaves each node through the network ports of its members there: k members
have k ports, and the slower of the node's link and those ports decides.

[Note: the ring]
Gathering or scattering S bytes over n ranks moves S (n - 1) / n through each; an all-reduce does both. Each step of the ring
costs one latency; the steps are one for each member inside a node, then one for each further node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatrain.engine.mesh.layout import Layout
from megatrain.machine.machine import Cluster
from megatrain.planner.cluster.candidate import Candidate, Request

Dimension = Literal["tensor", "context", "fsdp", "replicate", "pipeline"]
DIMENSIONS: tuple[Dimension, ...] = ("tensor", "context", "fsdp", "replicate", "pipeline")


@dataclass(frozen=True)
class Group:
    """The ranks along one dimension.

    Attributes:
        per_node: Ranks that share a node, of `size`.
        gbps: Rate at which one of them sends and receives [GB/s].
        latency_s: Latency of one collective.
        inside: Whether the group lies inside one node.
    """

    size: int
    per_node: int
    gbps: float
    latency_s: float
    inside: bool

    def moved(self, nbytes: float) -> float:
        """Bytes through each rank for one gather or scatter of `nbytes`."""
        return nbytes * (self.size - 1) / self.size

    def gather_s(self, nbytes: float) -> float:
        """Seconds to gather or scatter `nbytes`, all ranks' parts together."""
        return self.moved(nbytes) / (self.gbps * 1e9) + self.latency_s if self.size > 1 else 0.0

    def all_reduce_s(self, nbytes: float) -> float:
        """Seconds to sum `nbytes` of each rank."""
        return 2 * self.gather_s(nbytes)


def group_of(layout: Layout, cluster: Cluster, dimension: Dimension) -> Group:
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


def send_s(layout: Layout, cluster: Cluster, nbytes: float) -> float:
    """Seconds to send `nbytes` from one pipeline rank to the next."""
    if group_of(layout, cluster, "pipeline").per_node > 1:
        return nbytes / (cluster.node_gbps * 1e9) + cluster.node_latency_us * 1e-6
    return nbytes / (cluster.network_gbps * 1e9) + cluster.network_latency_us * 1e-6


@dataclass(frozen=True)
class Traffic:
    """Bytes that the busiest GPU sends along one dimension in a step, over the `node` link or the `network`."""

    nbytes: float
    link: str
    per_node: int
    size: int


def traffic(request: Request, candidate: Candidate) -> dict[Dimension, Traffic]:
    """Traffic of the busiest GPU in a step, by dimension; see engine/mesh/tensor_parallel.py and context_parallel.py."""
    layout, inventory, count = candidate.layout, request.inventory, candidate.layout.microbatch_count
    hidden = request.hidden_bytes(candidate)
    passes = 3 if candidate.recompute else 2
    ranks = range(layout.pipeline)
    layers = max(sum(len(part.layers) for part in inventory.own_parts(layout, rank)) for rank in ranks)
    whole = max(inventory.rank(layout, rank, fsdp=1) for rank in ranks)
    groups: dict[Dimension, Group] = {name: group_of(layout, request.cluster, name) for name in DIMENSIONS}
    reductions = 1 if layout.pipeline > 1 else count
    gathers = 1 if layout.pipeline > 1 else 2 * count
    sent: dict[Dimension, float] = {
        "tensor": 4 * passes * layers * count * groups["tensor"].moved(hidden),
        "context": passes * layers * count * groups["context"].moved(request.key_value_bytes(candidate)),
        "fsdp": groups["fsdp"].moved((gathers * request.compute_bytes + 4 * reductions) * whole),
        "replicate": reductions * 2 * groups["replicate"].moved(4 * whole / layout.fsdp),
        "pipeline": 2 * layout.virtual * count * hidden / layout.tensor,
    }
    found: dict[Dimension, Traffic] = {}
    for name, group in groups.items():
        if group.size > 1:
            inside = group.per_node > 1 if name == "pipeline" else group.inside
            found[name] = Traffic(sent[name], "node" if inside else "network", group.per_node, group.size)
    return found
