"""Where each dimension lies, and how long its collectives take."""

from __future__ import annotations

import pytest

from megatrain.engine.mesh.layout import Layout
from megatrain.machine.machine import Cluster
from megatrain.planner.cluster.step_time import group_of, send_s


def test_tensor_groups_lie_inside_a_node(cluster: Cluster) -> None:
    ring = group_of(Layout(tensor=8, shard=4), cluster, "tensor")
    assert ring.inside and ring.gbps == cluster.node_gbps
    assert ring.gather_s(8e9) == pytest.approx(7e9 / (cluster.node_gbps * 1e9) + 7 * cluster.node_latency_us * 1e-6)


@pytest.mark.parametrize(("tensor", "per_node"), [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_a_ring_over_nodes_has_the_ports_of_its_members(cluster: Cluster, tensor: int, per_node: int) -> None:
    ring = group_of(Layout(tensor=tensor, shard=64), cluster, "fsdp")
    assert (ring.inside, ring.per_node) == (False, per_node)
    assert ring.gbps == min(cluster.node_gbps, per_node * cluster.network_gbps)


def test_context_ranks_count_as_fsdp_ranks(cluster: Cluster) -> None:
    layout = Layout(tensor=2, context=2, shard=2)
    assert group_of(layout, cluster, "context").inside
    assert group_of(layout, cluster, "fsdp").size == 4


def test_replicas_are_far_apart_and_a_single_rank_sends_nothing(cluster: Cluster) -> None:
    layout = Layout(shard=8, replicate=4)
    assert group_of(layout, cluster, "fsdp").inside
    replicas = group_of(layout, cluster, "replicate")
    assert (replicas.inside, replicas.per_node) == (False, 1)
    assert replicas.all_reduce_s(1e9) == pytest.approx(2 * replicas.gather_s(1e9))
    assert group_of(layout, cluster, "tensor").gather_s(1e9) == 0.0


def test_pipeline_neighbours_share_a_node_only_where_there_is_room(cluster: Cluster) -> None:
    near = send_s(Layout(tensor=2, pipeline=4, shard=1), cluster, 1e9)
    far = send_s(Layout(tensor=8, pipeline=4, shard=1), cluster, 1e9)
    assert near == pytest.approx(1 / cluster.node_gbps, rel=1e-2)
    assert far == pytest.approx(1 / cluster.network_gbps, rel=1e-2)
