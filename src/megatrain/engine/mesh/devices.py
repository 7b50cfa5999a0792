"""The mesh of processes: torch's DeviceMesh for FSDP, tensor and pipeline, and the groups beside it.

The DeviceMesh is (pipeline, replicate, fsdp, tensor), where fsdp is shard x context: FSDP treats both alike. The context groups
are process groups of their own.
"""

from __future__ import annotations

import dataclasses
import datetime
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from megatrain.engine.mesh import launch
from megatrain.engine.mesh.layout import Coordinate, Layout


@dataclass(frozen=True)
class Devices:
    """This process in its mesh.

    Attributes:
        layout: The resolved layout.
        at: Where this rank stands.
        device: Its device.
        mesh: (pipeline, replicate, fsdp, tensor).
        context_group: Ranks that share rows, None without context parallel.
        tie_group: This rank and the one at the other end of the pipeline, None unless this rank holds one of two
            ends that are apart.
        save_group: All ranks, with gloo, for saves in the background alone.
    """

    layout: Layout
    at: Coordinate
    device: torch.device
    mesh: DeviceMesh
    context_group: dist.ProcessGroup | None
    tie_group: dist.ProcessGroup | None
    save_group: dist.ProcessGroup

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        return self.mesh["replicate", "fsdp"] if self.layout.replicate > 1 else self.mesh["fsdp"]

    @property
    def fsdp_rank(self) -> int:
        return self.at.shard * self.layout.context + self.at.context

    @property
    def data_rank(self) -> int:
        return self.at.replicate * self.layout.data // self.layout.replicate + self.at.shard

    @classmethod
    def build(cls, layout: Layout, device: torch.device) -> Devices:
        """Make all process groups. Collective: every rank calls it once, after `init_process_group`."""
        assert dist.get_world_size() == layout.world, (dist.get_world_size(), layout)
        mesh = mesh_of(layout, device.type)
        for name in mesh.mesh_dim_names or ():
            # `init_device_mesh` takes no timeout; torch's own trainers set it so.
            _set_pg_timeout(launch.collective_timeout(), mesh[name].get_group())
        at = layout.coordinate(dist.get_rank())
        context_group = None
        if layout.context > 1:
            context_group = _my_group(layout, at, "context", list(range(layout.context)))
        tie_group = None
        ends = sorted({layout.holder_of(0), layout.holder_of(layout.stages - 1)})
        if len(ends) == 2:
            tie_group = _my_group(layout, at, "pipeline", ends)
        # Rank 0 may write for a long time between two messages.
        save_group = dist.new_group(backend="gloo", timeout=datetime.timedelta(days=1))
        assert isinstance(save_group, dist.ProcessGroup)
        return cls(layout, at, device, mesh, context_group, tie_group, save_group)


def mesh_of(layout: Layout, device_type: str) -> DeviceMesh:
    """(pipeline, replicate, fsdp, tensor). Collective."""
    return init_device_mesh(
        device_type,
        (layout.pipeline, layout.replicate, layout.fsdp, layout.tensor),
        mesh_dim_names=("pipeline", "replicate", "fsdp", "tensor"),
    )


def _my_group(layout: Layout, at: Coordinate, dimension: str, indices: list[int]) -> dist.ProcessGroup | None:
    """The group along one dimension, with the given indices, that this rank is in. Every rank makes every group."""
    mine = None
    for rank in range(layout.world):
        start = layout.coordinate(rank)
        if getattr(start, dimension) != indices[0]:
            continue
        ranks = [layout.rank(dataclasses.replace(start, **{dimension: i})) for i in indices]
        group = dist.new_group(ranks, timeout=launch.collective_timeout())
        if layout.rank(at) in ranks:
            assert isinstance(group, dist.ProcessGroup), ranks
            mine = group
    return mine
