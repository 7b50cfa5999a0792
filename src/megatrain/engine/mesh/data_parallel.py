"""Sharded data parallel (FSDP2), and which box of a whole parameter each rank holds.

[Note: sums, not means]
The loss of a microbatch is already divided by the target tokens of the whole step, so gradients are added over ranks and
microbatches, never averaged: the divide factor is 1 and every reduction a sum.

[Note: boxes]
Tensor parallel cuts a parameter along one dimension, FSDP cuts what is left along dimension 0, both as `torch.chunk` does. What
a rank holds is therefore a box of the whole parameter: offsets and sizes. Loading, gathering and saving work with boxes and
need nothing of DTensor's (strided) placements.

[Note: what stays in fp32]
Some families compute their routers in fp32 whatever the rest computes in. An FSDP unit has one type to compute in, so the modules
that hold such parameters, and no others, are units of their own. Some are never called, their parent reads the weights: so the
layer gathers these units, and they stay gathered until the end of its backward.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from megatrain.engine.mesh.devices import Devices
from megatrain.engine.mesh.stage import Stage
from megatrain.errors import UserError

FP32_POLICY = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)


@dataclass(frozen=True)
class Box:
    """A part of a whole tensor.

    Attributes:
        shape: Of the whole tensor.
        offsets, sizes: Of the part; a size of 0 is nothing.
        tensor_dim: The dimension that tensor parallel cut, None where all its ranks hold the same.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    tensor_dim: int | None

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(o, o + s) for o, s in zip(self.offsets, self.sizes, strict=True))


def box_of(shape: tuple[int, ...], tensor_dim: int | None, tensor: tuple[int, int], fsdp: tuple[int, int]) -> Box:
    """The box of one rank; see [Note: boxes].

    Args:
        shape: Of the whole parameter.
        tensor_dim: The dimension tensor parallel cuts, or None.
        tensor, fsdp: (rank, number of ranks) of each.
    """
    offsets, sizes = [0] * len(shape), list(shape)
    if tensor_dim is not None:
        offsets[tensor_dim], sizes[tensor_dim] = _chunk(shape[tensor_dim], *tensor)
    start, size = _chunk(sizes[0], *fsdp)
    offsets[0] += start
    sizes[0] = size
    return Box(shape, tuple(offsets), tuple(sizes), tensor_dim)


def _chunk(length: int, index: int, count: int) -> tuple[int, int]:
    """(start, size) of a piece as `torch.chunk` cuts; pieces at the end may be empty."""
    width = -(-length // count)
    start = min(index * width, length)
    return start, min(width, length - start)


def materialise(module: nn.Module, device: torch.device) -> None:
    """Give parameters on meta their storage, unfilled; ties stay ties, buffers move."""
    made: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for leaf, parameter in owner._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(
                    torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad
                )
            owner._parameters[leaf] = made[id(parameter)]
        for leaf, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[leaf] = buffer.to(device)


def modules_in_fp32(layer: nn.Module, kept: Collection[str], prefix: str) -> list[nn.Module]:
    """The outermost modules inside a layer all of whose parameters are kept in fp32. See [Note: what stays in fp32].

    Args:
        kept: Full names of such parameters, and maybe of others.
        prefix: Of the layer's names.

    Raises:
        UserError: A parameter sits beside others that are not kept.
    """
    left = {name for name, _ in layer.named_parameters(prefix=prefix) if name in kept}
    found: list[nn.Module] = []
    for path, module in layer.named_modules(prefix=prefix):
        inside = {name for name, _ in module.named_parameters(prefix=path)}
        if inside and inside <= left and path != prefix:
            found.append(module)
            left -= inside
    if left:
        raise UserError(
            f"{min(left)} must stay in fp32 and sits in a module that computes in bf16, which is not done here",
            "precision.compute_dtype",
            "fp32 compute would fit",
        )
    return found


def shard(
    stage: Stage,
    devices: Devices,
    policy: MixedPrecisionPolicy,
    keep_unsharded: bool,
    in_fp32: Collection[str] = frozenset(),
) -> dict[str, Box]:
    """Materialise a stage, layer by layer, and shard it over the fsdp ranks.

    Args:
        stage: With parameters on meta. Afterwards they are sharded DTensors, unfilled.
        devices: The mesh.
        policy: Compute and reduction types.
        keep_unsharded: Parameters stay gathered from forward to backward: pipeline schedules go through a stage many
            times.
        in_fp32: Names of parameters that compute in fp32 whatever the policy.

    Returns:
        Box of each parameter by Hugging Face name, tied ones under each of the stage's names.
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
        materialise(layer, devices.device)
        for module in modules_in_fp32(layer, in_fp32, path):
            unit = fully_shard(module, mesh=mesh, mp_policy=FP32_POLICY, reshard_after_forward=False)
            layer.register_forward_pre_hook(functools.partial(_gather, unit))
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=not keep_unsharded)
    materialise(stage, devices.device)
    fully_shard(stage, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    _check_boxes(stage, boxes)
    return boxes


def _gather(unit: FSDPModule, layer: nn.Module, args: Any) -> None:
    unit.unshard()


def local_parameters(stage: Stage) -> dict[str, nn.Parameter]:
    """The sharded parameters of a stage by Hugging Face name, tied ones once."""
    return {name.removeprefix("model."): p for name, p in stage.named_parameters()}


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _check_boxes(stage: Stage, boxes: Mapping[str, Box]) -> None:
    for name, parameter in local_parameters(stage).items():
        found, expected = tuple(local(parameter).shape), boxes[name].sizes
        assert found == expected or (0 in expected and local(parameter).numel() == 0), (name, found, expected)
