"""What is planned: `Request` (a model's `Inventory`, a step, a cluster) and `Candidate` (one way to run it).

[Note: a fake group]
torch's fake process group has any number of ranks and sends nothing. On it, with parameters on meta, the engine's `cut`,
`parallelize` and `shard` run as in a real run, for any rank of any world, on a laptop. `Inventory.of` asks them once along which
dimension tensor parallel splits each parameter; counts for a thousand layouts follow from `box_of`, the engine's own formula.
`count_on_fake_group` builds a rank of one layout for real and is compared with the formula for every layout that a plan shows.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatrain.engine.mesh.data_parallel import BF16_POLICY, Devices, box_of, local, local_parameters, mesh_of, shard
from megatrain.engine.mesh.layout import Coordinate, Layout
from megatrain.engine.mesh.stage import Part, Stage, cut, plan_parts
from megatrain.engine.mesh.tensor_parallel import parallelize, splits_experts
from megatrain.errors import UserError
from megatrain.machine.machine import Cluster
from megatrain.models.structure import Structure, Unit
from megatrain.optim.adamw import AdamW
from megatrain.optim.spec import OptimizerSpec
from megatrain.planner.model_cost import ModelShape
from megatrain.planner.plan import Options, StepSize

T = TypeVar("T")


@dataclass(frozen=True)
class ParameterSplit:
    """A parameter's shape, and the dimension along which tensor parallel splits it; None: it does not."""

    shape: tuple[int, ...]
    tensor_dim: int | None


@dataclass(frozen=True, eq=False)
class Inventory:
    """A model's costs and the parameters of its units.

    Attributes:
        shape: What its layers cost.
        structure: The dissected model on meta, with fp32 parameters.
        groups: Parameters of a layer of each template group.
        tied: The copy of tied embedding parameters on a last stage that does not hold the embedding.
        kv_width: Elements of keys, and of values, per token.
    """

    shape: ModelShape
    structure: Structure
    groups: tuple[tuple[ParameterSplit, ...], ...]
    embedding: tuple[ParameterSplit, ...]
    head: tuple[ParameterSplit, ...]
    tied: tuple[ParameterSplit, ...]
    kv_width: int
    _cached: dict[tuple[Any, ...], Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, structure: Structure, shape: ModelShape) -> Inventory:
        """The inventory of a dissected model on meta, with its costs."""
        samples = [shape.groups.index(group) for group in sorted(set(shape.groups))]
        dims = _tensor_dims(structure, samples)

        def split(name: str) -> ParameterSplit:
            return ParameterSplit(tuple(structure.model.get_parameter(name).shape), dims.get(name))

        def splits(unit: Unit) -> tuple[ParameterSplit, ...]:
            return tuple(split(name) for _, name in unit.full_names())

        config = structure.model.config.get_text_config()  # type: ignore[union-attr]
        heads = getattr(config, "num_attention_heads", 1)
        head_size = getattr(config, "head_dim", None) or shape.hidden // heads
        return cls(
            shape=shape,
            structure=structure,
            groups=tuple(splits(structure.layers[index]) for index in samples),
            embedding=splits(structure.embedding),
            head=splits(structure.head),
            tied=tuple(split(owner) for owner in set(structure.tied.values())),
            kv_width=(getattr(config, "num_key_value_heads", None) or heads) * head_size,
        )

    def parts(self, layout: Layout) -> tuple[Part, ...]:
        """The layers of each stage, as the engine splits them."""
        key = ("parts", layout.stages, layout.stage_layers)
        return self._once(key, lambda: tuple(plan_parts(self.structure, layout)))

    def own_parts(self, layout: Layout, pipeline_rank: int) -> list[Part]:
        """The stages of a pipeline rank."""
        parts = self.parts(layout)
        return [parts[stage] for stage in layout.stages_of(pipeline_rank)]

    # Elements below are those of the first rank of a tensor and fsdp group, which has the most. fsdp 1: before FSDP shards them.

    def layer(self, group: int, tensor: int, fsdp: int) -> int:
        """Elements of a layer of a template group."""
        return self._once((group, tensor, fsdp), lambda: _elements(self.groups[group], tensor, fsdp))

    def edges(self, first: bool, last: bool, tensor: int, fsdp: int) -> int:
        """Elements that a stage holds beside its layers."""
        held = [*(self.embedding if first else ()), *(self.head if last else ())]
        if last and not first:
            held += self.tied
        return self._once((first, last, tensor, fsdp), lambda: _elements(held, tensor, fsdp))

    def stage(self, part: Part, tensor: int, fsdp: int) -> int:
        """Elements of a stage."""
        layers = sum(self.layer(self.shape.groups[i], tensor, fsdp) for i in part.layers)
        return layers + self.edges(part.first, part.last, tensor, fsdp)

    def rank(self, layout: Layout, pipeline_rank: int, fsdp: int) -> int:
        """Elements of a pipeline rank, all its stages together."""
        return sum(self.stage(part, layout.tensor, fsdp) for part in self.own_parts(layout, pipeline_rank))

    def _once(self, key: tuple[Any, ...], make: Callable[[], T]) -> T:
        if key not in self._cached:
            self._cached[key] = make()
        return self._cached[key]


def _elements(splits: Sequence[ParameterSplit], tensor: int, fsdp: int) -> int:
    return sum(math.prod(box_of(p.shape, p.tensor_dim, (0, tensor), (0, fsdp)).sizes) for p in splits)


def _tensor_dims(structure: Structure, samples: Sequence[int]) -> dict[str, int]:
    """The dimension along which tensor parallel splits parameters of the edges and of the sampled layers.

    Empty if it cannot split the model; `Layout.problems` says so by name.
    """
    dims: dict[str, int] = {}
    with fake_group(2, 0):
        mesh = mesh_of(Layout(tensor=2, shard=1), "cpu")["tensor"]
        for index in samples:
            part = Part(0, 1, range(index, index + 1))
            stage = Stage(cut(structure.model, structure, part), structure, part, tensor=2)
            try:
                parallelize(stage, structure, mesh)
            except UserError:
                return {}
            dims |= {name: dim for name, (dim, _) in stage.split.items()}
    return dims


@contextlib.contextmanager
def fake_group(world: int, rank: int) -> Iterator[None]:
    """A process group of `world` ranks that sends nothing, seen from one of them; see [Note: a fake group]."""
    assert not dist.is_initialized(), "a rank of a run does not plan"
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def count_on_fake_group(structure: Structure, layout: Layout, pipeline_rank: int) -> int:
    """Elements held by the first rank of a pipeline rank, counted after building its stages as the engine does."""
    at = Coordinate(pipeline_rank, 0, 0, 0, 0)
    with fake_group(layout.world, layout.rank(at)):
        world = dist.group.WORLD
        assert world is not None
        # The other groups hold no parameters.
        devices = Devices(layout, at, torch.device("meta"), mesh_of(layout, "cpu"), None, None, save_group=world)
        held = 0
        parts = plan_parts(structure, layout)
        for part in (parts[index] for index in layout.stages_of(pipeline_rank)):
            stage = Stage(cut(structure.model, structure, part), structure, part, layout.tensor)
            if layout.tensor > 1:
                parallelize(stage, structure, devices.mesh["tensor"])
            shard(stage, devices, BF16_POLICY, keep_unsharded=layout.pipeline > 1)
            held += sum(local(p).numel() for p in local_parameters(stage).values())
    return held


@dataclass(frozen=True)
class Overheads:
    """How an engine computes a layer, where engines differ. The defaults are the mesh engine's.

    Attributes:
        compiled: Layers whose pointwise work is fused: `all`, `none`, or `plain`: layers without context parallel, without
            experts shared by tensor ranks, and with a whole backward.
        tensor_overlap: Share of the tensor collectives that is hidden under matrix products.
        gathers_ahead: With a pipeline, gather all stages' parameters from the start of the step, not when the first
            microbatch arrives.
        context_attention: Work of context-parallel attention as a multiple of the causal half; 2 with a dense mask.
    """

    compiled: Literal["all", "plain", "none"] = "plain"
    tensor_overlap: float = 0.0
    gathers_ahead: bool = False
    context_attention: float = 2.0


@dataclass(frozen=True)
class Candidate:
    """One way to run a request: a resolved layout with its microbatches, layers recomputed or kept."""

    layout: Layout
    recompute: bool

    def rows(self, step: StepSize) -> int:
        """Rows of one microbatch on one data rank, padding included."""
        return -(-step.rows // self.layout.row_multiple)

    def tokens(self, step: StepSize) -> int:
        """Tokens of one microbatch on one rank; tensor ranks share them."""
        multiple = self.layout.token_multiple
        return self.rows(step) * (-(-step.tokens // multiple) * multiple) // self.layout.context

    def __str__(self) -> str:
        """The candidate in one line."""
        layout, names = self.layout, ("tensor", "pipeline", "context", "replicate", "shard")
        words = [f"{name} {size}" for name in names if (size := getattr(layout, name)) != 1]
        if layout.pipeline > 1:
            words.append(layout.schedule + (f" x{layout.virtual}" if layout.virtual > 1 else ""))
        words.append(f"{(count := layout.microbatch_count)} microbatch{'es' if count > 1 else ''}")
        words.append("recompute" if self.recompute else "keep")
        return ", ".join(words)


@dataclass(frozen=True)
class Request:
    """A model, an optimizer step of it, and a cluster.

    Attributes:
        world: Number of GPUs.
        compute_bytes: Bytes of an element in forward and backward: 2 for bf16, 4 for fp32.
        background: Checkpoints are written while training continues.
    """

    inventory: Inventory
    cluster: Cluster
    world: int
    step: StepSize
    overheads: Overheads = Overheads()
    compute_bytes: int = 2
    background: bool = True
    optim: OptimizerSpec = field(default_factory=AdamW)

    def compiled(self, layout: Layout) -> bool:
        """Whether the layers of a layout are fused."""
        mixture = layout.tensor > 1 and splits_experts(self.inventory.structure.model)
        plain = layout.context == 1 and not layout.splits_backward and not mixture
        return self.overheads.compiled == "all" or (self.overheads.compiled == "plain" and plain)

    def options(self, layout: Layout) -> Options:
        """The settings that the cost formulas of a single GPU take."""
        compute = "fp32" if self.compute_bytes == 4 else "bf16"
        return Options(compute=compute, compiled=self.compiled(layout), optim=self.optim)

    def hidden_bytes(self, candidate: Candidate) -> int:
        """Bytes of one microbatch's hidden states, of all ranks of a tensor group together."""
        return candidate.tokens(self.step) * self.inventory.shape.hidden * self.compute_bytes

    def key_value_bytes(self, candidate: Candidate) -> float:
        """Bytes of one layer's gathered keys and values of one microbatch, on one rank."""
        layout = candidate.layout
        tokens = candidate.tokens(self.step) * layout.context
        return 2 * self.inventory.kv_width * tokens * self.compute_bytes / layout.tensor
