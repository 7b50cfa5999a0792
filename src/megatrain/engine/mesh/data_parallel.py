"""The mesh of processes, sharded data parallel on it (FSDP2), and the box of each parameter that a rank holds.

The DeviceMesh is (pipeline, replicate, fsdp, tensor), where fsdp is shard x context: FSDP treats both alike. Context groups are
separate process groups.

[Note: sums, not means]
The loss of a microbatch is already divided by the target tokens of the whole step, so gradients are summed over ranks and
microbatches, never averaged: the divide factor is 1 and every reduction is a sum.

[Note: boxes]
Tensor parallel splits a parameter along one dimension; FSDP splits the result along dimension 0; both split as `torch.chunk`
does. So a rank holds a box of the whole parameter: offsets and sizes. Loading, gathering and saving work with boxes and need
nothing of DTensor's (strided) placements.

[Note: modules in fp32]
Some families compute their routers in fp32 whatever the rest computes in. An FSDP unit has one compute dtype, so exactly the
modules that hold such parameters are FSDP units by themselves. Some of them are never called (their parent reads the weights), so
the layer gathers these units, and they stay gathered until the end of its backward.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from megatrain.engine.mesh import launch
from megatrain.engine.mesh.layout import Coordinate, Layout
from megatrain.engine.mesh.stage import Stage
from megatrain.errors import UserError

MASTERS_POLICY = MixedPrecisionPolicy(cast_forward_inputs=False)
"""Compute in the masters' dtype."""
BF16_POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
_FP32_POLICY = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)


@dataclass(frozen=True)
class Devices:
    """This process's place in the mesh, and its process groups.

    Attributes:
        layout: The resolved layout.
        at: This rank's coordinate.
        device: This rank's device.
        mesh: (pipeline, replicate, fsdp, tensor).
        context_group: Ranks that share rows; None without context parallel.
        tie_group: First and last pipeline rank, if they differ and this rank is one of them; else None.
        save_group: All ranks, over gloo, for background saves only.
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

    @classmethod
    def build(cls, layout: Layout, device: torch.device) -> Devices:
        """Make all process groups. Collective: every rank calls it once, after `init_process_group`."""
        assert dist.get_world_size() == layout.world, (dist.get_world_size(), layout)
        mesh = mesh_of(layout, device.type)
        for name in mesh.mesh_dim_names or ():
            # `init_device_mesh` takes no timeout; torch's own trainers set it this way.
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
    """This rank's group of the given indices along one dimension; None if it is in none. Every rank makes every group."""
    mine = None
    for rank in range(layout.world):
        start = layout.coordinate(rank)
        if getattr(start, dimension) != indices[0]:
            continue
        ranks = [layout.rank(start._replace(**{dimension: i})) for i in indices]
        group = dist.new_group(ranks, timeout=launch.collective_timeout())
        if layout.rank(at) in ranks:
            assert isinstance(group, dist.ProcessGroup), ranks
            mine = group
    return mine


@dataclass(frozen=True)
class Box:
    """A part of a whole tensor of a `shape`, which may be empty (a size of 0)."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    tensor_dim: int | None
    """The dimension split by tensor parallel; None if all its ranks hold the same."""

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(o, o + s) for o, s in zip(self.offsets, self.sizes, strict=True))


def box_of(shape: tuple[int, ...], tensor_dim: int | None, tensor: tuple[int, int], fsdp: tuple[int, int]) -> Box:
    """The box of one rank, at (rank, number of ranks) of its tensor and fsdp groups; see [Note: boxes]."""
    offsets, sizes = [0] * len(shape), list(shape)
    if tensor_dim is not None:
        offsets[tensor_dim], sizes[tensor_dim] = _chunk(shape[tensor_dim], *tensor)
    start, size = _chunk(sizes[0], *fsdp)
    offsets[0] += start
    sizes[0] = size
    return Box(shape, tuple(offsets), tuple(sizes), tensor_dim)


def _chunk(length: int, index: int, count: int) -> tuple[int, int]:
    """(start, size) of a chunk as `torch.chunk` splits; chunks at the end may be empty."""
    width = -(-length // count)
    start = min(index * width, length)
    return start, min(width, length - start)


def modules_in_fp32(layer: nn.Module, fp32_names: Collection[str], prefix: str) -> list[nn.Module]:
    """The outermost modules inside a layer, named `prefix`, whose parameters all stay in fp32.

    See [Note: modules in fp32]. Raises a UserError if a module holds such a parameter beside others.
    """
    left = {name for name, _ in layer.named_parameters(prefix=prefix) if name in fp32_names}
    found: list[nn.Module] = []
    for path, module in layer.named_modules(prefix=prefix):
        inside = {name for name, _ in module.named_parameters(prefix=path)}
        if inside and inside <= left and path != prefix:
            found.append(module)
            left -= inside
    if left:
        what = f"{min(left)} must stay in fp32 but sits in a module that computes in bf16, which is not supported"
        raise UserError(what, "precision.compute_dtype", "use fp32")
    return found


def shard(
    stage: Stage, devices: Devices, policy: MixedPrecisionPolicy, keep_unsharded: bool, fp32_names: Collection[str] = ()
) -> dict[str, Box]:
    """Materialise a stage, layer by layer, and shard it over the fsdp ranks.

    Args:
        stage: With parameters on meta. Afterwards they are uninitialised sharded DTensors.
        keep_unsharded: Keep parameters gathered from forward to backward: a pipeline schedule runs a stage many times.
        fp32_names: Parameters that compute in fp32 whatever the policy.

    Returns:
        Each parameter's box by Hugging Face name, tied ones under each of the stage's names.
    """
    boxes: dict[str, Box] = {}
    layout, at = devices.layout, devices.at
    for name, parameter in stage.model.named_parameters(remove_duplicate=False):
        shape, dim = list(parameter.shape), None
        if name in stage.split:
            dim, length = stage.split[name]
            shape[dim] = length
        boxes[name] = box_of(tuple(shape), dim, (at.tensor, layout.tensor), (devices.fsdp_rank, layout.fsdp))
    mesh = devices.fsdp_mesh
    for path, layer in stage.named_own_layers():
        _materialise(layer, devices.device)
        for module in modules_in_fp32(layer, fp32_names, path):
            unit = fully_shard(module, mesh=mesh, mp_policy=_FP32_POLICY, reshard_after_forward=False)
            layer.register_forward_pre_hook(functools.partial(_gather, unit))
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=not keep_unsharded)
    _materialise(stage, devices.device)
    fully_shard(stage, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    for name, parameter in local_parameters(stage).items():
        found, expected = tuple(local(parameter).shape), boxes[name].sizes
        assert found == expected or (0 in expected and local(parameter).numel() == 0), (name, found, expected)
    return boxes


def _materialise(module: nn.Module, device: torch.device) -> None:
    """Give parameters on meta uninitialised storage; ties stay ties, buffers move."""
    made: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for leaf, parameter in owner._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in made:
                empty = torch.empty_like(parameter, device=device)
                made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            owner._parameters[leaf] = made[id(parameter)]
        for leaf, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[leaf] = buffer.to(device)


def _gather(unit: FSDPModule, layer: nn.Module, args: Any) -> None:
    unit.unshard()


def local_parameters(stage: Stage) -> dict[str, nn.Parameter]:
    """A stage's sharded parameters by Hugging Face name, tied ones once."""
    return {name.removeprefix("model."): p for name, p in stage.named_parameters()}


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
