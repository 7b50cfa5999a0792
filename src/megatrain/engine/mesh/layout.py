"""`Layout`: the size of each mesh dimension and what each rank is responsible for; `MeshPlan`: how a mesh engine runs it.

Pure plain data: no torch, no process group.

[Note: the order of ranks]
Ranks are numbered over (pipeline, replicate, shard, context, tensor), tensor fastest: tensor neighbours exchange the most data
and share a host, pipeline neighbours exchange the least and may be far apart. Shard and context ranks together hold one copy of
the parameters (FSDP shards over both): the ranks of a context group see different tokens of the same rows, which for a gradient
is the same as seeing different rows.

Shapes: B rows of the whole step, T tokens per row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from megatrain.engine.batches import BatchShape
from megatrain.errors import UserError
from megatrain.models.build import dropout_keys
from megatrain.models.rope import scaling_by_length
from megatrain.units import counted

TENSOR_FAMILIES = frozenset(
    "llama qwen2 qwen3 mistral ministral gemma gemma2 gemma3_text granite smollm3 arcee seed_oss ernie4_5 "
    "mixtral qwen2_moe qwen3_moe".split()
)
"""Model types whose gradients under tensor parallel are part of the test suite."""

CONTEXT_FAMILIES = TENSOR_FAMILIES | frozenset({"olmo2"})
"""Model types whose gradients under context parallel are part of the test suite."""

LAYER_KINDS = frozenset({"full_attention", "sliding_attention"})
"""The `layer_types` that context parallel supports."""


@dataclass(frozen=True)
class ScheduleKind:
    """A pipeline schedule.

    Attributes:
        name: As written in the config.
        virtual: Minimum and maximum number of stages per rank; no maximum if None.
        vee: Stages run down the ranks and back up: rank r holds stages r and 2 * pipeline - 1 - r.
        splits_backward: Gradients of inputs and of weights are computed separately. See [Note: two halves] in zero_bubble.py.
        rounds: The number of microbatches must divide into rounds of about `pipeline` microbatches.
    """

    name: str
    virtual: tuple[int, int | None]
    vee: bool = False
    splits_backward: bool = False
    rounds: bool = False

    def allows(self, virtual: int) -> bool:
        """Whether the schedule runs with this number of stages per rank."""
        least, most = self.virtual
        return virtual >= least and (most is None or virtual <= most)


SCHEDULES: dict[str, ScheduleKind] = {
    kind.name: kind
    for kind in (
        ScheduleKind("1f1b", (1, 1)),
        ScheduleKind("interleaved", (2, None), rounds=True),
        ScheduleKind("zb1p", (1, None), splits_backward=True, rounds=True),
        ScheduleKind("zbv", (2, 2), vee=True, splits_backward=True),
        ScheduleKind("dualpipev", (2, 2), vee=True, splits_backward=True),
    )
}


class Coordinate(NamedTuple):
    """A rank's index in each dimension of the mesh."""

    pipeline: int
    replicate: int
    shard: int
    context: int
    tensor: int


@dataclass(frozen=True)
class Layout:
    """How a model and its batches are spread over processes.

    Attributes:
        tensor: Ranks that share the matrices of a layer; norms and residuals are split over them by tokens.
        pipeline: Ranks that share the layers.
        virtual: Stages per pipeline rank.
        context: Ranks that share the tokens of a row.
        replicate: Copies of the sharded model.
        shard: Data ranks that share one copy of parameters, gradients and optimizer; None: all ranks that are left.
        schedule: One of `SCHEDULES`; unused without pipeline ranks.
        microbatches: Microbatches per step on each data rank; None: the fewest the schedule allows.
        stage_layers: Number of layers of each stage, in model order. None: even by parameters.
    """

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    context: int = 1
    replicate: int = 1
    shard: int | None = None
    schedule: str = "1f1b"
    microbatches: int | None = None
    stage_layers: tuple[int, ...] | None = None

    @property
    def stages(self) -> int:
        return self.pipeline * self.virtual

    @property
    def data(self) -> int:
        """Ranks that see different rows."""
        return self.replicate * self._shard

    @property
    def fsdp(self) -> int:
        """Ranks that share one copy of the parameters; see [Note: the order of ranks]."""
        return self._shard * self.context

    @property
    def world(self) -> int:
        return self.pipeline * self.data * self.context * self.tensor

    @property
    def kind(self) -> ScheduleKind:
        return SCHEDULES[self.schedule]

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule computes gradients of inputs and of weights separately."""
        return self.pipeline > 1 and self.kind.splits_backward

    def recomputes(self, policy: str) -> bool:
        """Whether layers are recomputed under an `activations.policy`.

        A schedule that splits the backward is chosen for speed: it recomputes only if asked to by name.
        """
        return policy not in (("keep", "auto") if self.splits_backward else ("keep",))

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """(pipeline, replicate, shard, context, tensor)."""
        return self.pipeline, self.replicate, self._shard, self.context, self.tensor

    @property
    def _shard(self) -> int:
        assert self.shard is not None, "resolve the layout first"
        return self.shard

    @property
    def row_multiple(self) -> int:
        """The rows of a step are padded to a multiple of this."""
        return self.data * self.microbatch_count

    @property
    def token_multiple(self) -> int:
        """The tokens of a row are padded to a multiple of this: two chunks per context rank, equal parts per tensor rank."""
        return (2 * self.context if self.context > 1 else 1) * self.tensor

    @property
    def microbatch_count(self) -> int:
        """Microbatches of a step on each data rank."""
        return self.min_microbatches if self.microbatches is None else self.microbatches

    @property
    def min_microbatches(self) -> int:
        """The fewest microbatches the schedule runs with."""
        if self.pipeline == 1:
            return 1
        return self.stages if self.schedule == "dualpipev" else self.pipeline

    def resolved(self, world: int) -> Layout:
        """The same layout with `shard` filled in. Sizes that do not divide are left for `problems` to report."""
        if self.shard is not None:
            return self
        others = self.pipeline * self.replicate * self.context * self.tensor
        return dataclasses.replace(self, shard=max(1, world // others) if others > 0 else 1)

    def coordinate(self, rank: int) -> Coordinate:
        index = []
        for size in reversed(self.sizes):
            rank, remainder = divmod(rank, size)
            index.append(remainder)
        return Coordinate(*reversed(index))

    def rank(self, at: Coordinate) -> int:
        rank = 0
        for size, index in zip(self.sizes, at, strict=True):
            rank = rank * size + index
        return rank

    def stages_of(self, pipeline_rank: int) -> tuple[int, ...]:
        """The stages a pipeline rank holds, in model order."""
        if self.kind.vee and self.pipeline > 1:
            return pipeline_rank, 2 * self.pipeline - 1 - pipeline_rank
        return tuple(range(pipeline_rank, self.stages, self.pipeline))

    def holder_of(self, stage: int) -> int:
        """The pipeline rank that holds a stage."""
        return next(rank for rank in range(self.pipeline) if stage in self.stages_of(rank))

    def problems(self, config: Any, world: int, rows: int | None = None) -> list[str]:
        """Every reason why this layout cannot run, each with sizes that would fit. Needs no process group.

        Args:
            config: The model's Hugging Face config.
            world: Number of processes.
            rows: Rows of a step, if known.
        """
        if found := list(self._size_problems()):
            return found
        full, text = self.resolved(world), config.get_text_config()
        found += [
            *full._world_problems(world, self.shard is None),
            *full._schedule_problems(),
            *full._pipeline_problems(text),
            *full._tensor_problems(text),
            *full._context_problems(text),
        ]
        if rows is not None and rows < (needed := full.row_multiple):
            count = full.microbatch_count
            microbatches = f"{count} {'microbatch' if count == 1 else 'microbatches'}"
            found.append(
                f"a step has {counted(rows, 'row')}, fewer than {counted(full.data, 'data rank')} x {microbatches} = "
                f"{needed}: some ranks would compute only padding; use at least {needed} rows "
                f"(batch.tokens_per_step: {needed} x data.max_tokens)"
            )
        return found

    def checked(self, config: Any, world: int, rows: int | None = None) -> Layout:
        """The resolved layout. Raises a UserError with all problems if it cannot run."""
        if found := self.problems(config, world, rows):
            raise UserError("this layout cannot run:\n  - " + "\n  - ".join(found), "parallel")
        return self.resolved(world)

    def _size_problems(self) -> Iterator[str]:
        for name in ("tensor", "pipeline", "virtual", "context", "replicate", "shard", "microbatches"):
            value = getattr(self, name)
            if value is None and name in ("shard", "microbatches"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                yield f"{name} = {value!r} is not a whole number of at least 1"
        if self.schedule not in SCHEDULES:
            yield f"schedule {self.schedule!r} is unknown; known are {', '.join(SCHEDULES)}"

    def _world_problems(self, world: int, shard_is_free: bool) -> Iterator[str]:
        if self.world == world:
            return
        others = self.pipeline * self.replicate * self.context * self.tensor
        text = (
            f"pipeline {self.pipeline} x replicate {self.replicate} x shard {self.shard} x context {self.context} x "
            f"tensor {self.tensor} = {self.world} ranks, but there are {world} processes"
        )
        if world % others == 0 and not shard_is_free:
            yield f"{text}; shard {world // others} would fit"
        else:
            below = (world // others) * others
            fits = [str(n) for n in (below, below + others) if n > 0]
            yield f"{text}; start {' or '.join(fits)} processes, or choose sizes whose product divides {world}"

    def _schedule_problems(self) -> Iterator[str]:
        if self.pipeline == 1:
            if self.virtual > 1:
                yield f"virtual {self.virtual} needs pipeline ranks; set virtual 1 or pipeline 2 or more"
            return
        kind, count = self.kind, self.microbatch_count
        if not kind.allows(self.virtual):
            least, most = kind.virtual
            needed = f"exactly {least}" if most == least else f"at least {least}"
            others = [k.name for k in SCHEDULES.values() if k.allows(self.virtual)]
            yield (
                f"schedule {kind.name} needs {needed} virtual stages per rank, not {self.virtual}; "
                f"with virtual {self.virtual} {' or '.join(others)} would fit"
            )
        if count < self.min_microbatches:
            yield (
                f"microbatches {count} are fewer than the {self.min_microbatches} that schedule {kind.name} needs on "
                f"{self.pipeline} pipeline ranks; {self.min_microbatches} would fit"
            )
        elif kind.rounds and count % max(1, count // self.pipeline):
            fits = [n for n in range(self.pipeline, count + self.pipeline + 1) if n % max(1, n // self.pipeline) == 0]
            near = sorted(fits, key=lambda n: abs(n - count))[:2]
            yield (
                f"microbatches {count} do not divide into the rounds of schedule {kind.name}; "
                f"{' or '.join(map(str, sorted(near)))} would fit"
            )

    def _pipeline_problems(self, config: Any) -> Iterator[str]:
        layers = config.num_hidden_layers
        if self.stages > layers:
            most = layers // self.virtual
            yield (
                f"{layers} layers cannot fill pipeline {self.pipeline} x virtual {self.virtual} = {self.stages} stages; "
                + (f"pipeline {most} would fit" if most else f"virtual {layers // self.pipeline or 1} would fit")
            )
        given = self.stage_layers
        if given is not None and (len(given) != self.stages or sum(given) != layers or min(given) < 1):
            yield (
                f"stage_layers {list(given)} must be {self.stages} numbers of at least 1 that add up to {layers} layers"
            )

    def _tensor_problems(self, config: Any) -> Iterator[str]:
        if self.tensor == 1:
            return
        if config.model_type not in TENSOR_FAMILIES:
            yield _untested(config.model_type, "tensor", TENSOR_FAMILIES)
        if not getattr(config, "base_model_tp_plan", None):
            yield f"{config.model_type} has no tensor-parallel plan in transformers; tensor 1 would fit"
        for name in ("intermediate_size", "shared_expert_intermediate_size", "num_experts", "num_local_experts"):
            value = getattr(config, name, None)
            if isinstance(value, int) and value % self.tensor:
                fits = [str(n) for n in range(1, min(value, 128) + 1) if value % n == 0]
                yield f"{name} {value} is not a multiple of tensor {self.tensor}; tensor {' or '.join(fits)} would fit"
        rows = getattr(config, "vocab_size", None)
        if isinstance(rows, int) and -(-rows // self.tensor) * (self.tensor - 1) >= rows:  # split as torch.chunk does
            yield f"vocab_size {rows} leaves a rank of tensor {self.tensor} without a row; a smaller tensor would fit"

    def _context_problems(self, config: Any) -> Iterator[str]:
        if self.context > 1 and config.model_type not in CONTEXT_FAMILIES:
            yield _untested(config.model_type, "context", CONTEXT_FAMILIES)
        unknown = sorted(set(getattr(config, "layer_types", None) or ()) - LAYER_KINDS)
        if self.context > 1 and unknown:
            yield f"context parallel cannot split layers of kind {', '.join(unknown)}; context 1 would fit"
        if self.context > 1 and (scaling := scaling_by_length(config)) is not None:
            yield f"context parallel splits documents, and the rotary scaling {scaling[0]} needs their length: use context 1"
        for name in dropout_keys(config) if self.context * self.tensor > 1 else ():
            yield (
                f"{name} {getattr(config, name)} would differ between the ranks of a tensor or context group; "
                f"set it to 0, or use tensor 1 and context 1"
            )


@dataclass(frozen=True)
class MeshPlan:
    """How a mesh engine runs a model.

    Attributes:
        layout: How the model is spread over processes. The engine resolves `shard`.
        recompute: Keep only each layer's input and recompute the layer in the backward.
        compile: Compile the layers: `auto` on a GPU, `on` everywhere, `off` never. Context ranks, mixtures under tensor
            parallel, and schedules that split the backward run eager.
        compute_dtype: bf16 with fp32 masters, moments and reductions; fp32; fp64 (tests only). auto: bf16 on a GPU, else fp32.
        attn_implementation: Hugging Face's name of an attention implementation; context parallel brings its own.
        deterministic: Use only kernels that give the same bits every time (on a GPU).
        train_shape, eval_shape: Shapes that batches are padded to where layers are compiled; None: batches as they come.
        reduced_by: The config line that makes the latest reduction permanent; empty for a plan as configured.
    """

    layout: Layout
    recompute: bool = False
    compile: Literal["auto", "on", "off"] = "auto"
    compute_dtype: Literal["auto", "bf16", "fp32", "fp64"] = "auto"
    attn_implementation: str | None = None
    deterministic: bool = False
    train_shape: BatchShape | None = None
    eval_shape: BatchShape | None = None
    reduced_by: str = field(default="", compare=False)

    def reduced(self, rows: int) -> MeshPlan | None:
        """The next plan to try when a device runs out of memory: slower, with the same result. None: nothing is left.

        First recompute, then twice the microbatches each time. The layout must be resolved.

        Args:
            rows: Rows of a step.
        """
        if not self.recompute:
            return dataclasses.replace(self, recompute=True, reduced_by="activations.policy: recompute")
        count = 2 * self.layout.microbatch_count
        if count > rows // self.layout.data:
            return None
        layout = dataclasses.replace(self.layout, microbatches=count)
        return dataclasses.replace(self, layout=layout, reduced_by=f"parallel.microbatches: {count}")


def whole_attention(config: Any, tensor: int) -> bool:
    """Whether a model's heads do not divide over the tensor ranks, so that each rank computes the whole attention."""
    text = config.get_text_config()
    counts = [getattr(text, name, None) for name in ("num_attention_heads", "num_key_value_heads")]
    return any(isinstance(count, int) and count % tensor != 0 for count in counts)


def split_layers(
    layers: int, stages: int, layer_weight: float, embedding_weight: float, head_weight: float
) -> list[range]:
    """Split the layers into `stages` consecutive ranges so that the heaviest stage is as light as possible.

    Weights are parameters or any other measure; the embedding's is added to the first stage, the head's to the last.
    """
    assert 1 <= stages <= layers, (layers, stages)
    extra = [0.0] * stages
    extra[0] += embedding_weight
    extra[-1] += head_weight
    counts = [1] * stages

    def next_weight(stage: int) -> tuple[float, int]:
        return extra[stage] + (counts[stage] + 1) * layer_weight, abs(2 * stage - stages + 1)

    # Giving each layer to the stage that stays lightest is optimal for equal layers. Ties go to the middle stages, which hold
    # neither embedding nor head.
    for _ in range(layers - stages):
        counts[min(range(stages), key=next_weight)] += 1
    return ranges_of(counts)


def ranges_of(counts: list[int] | tuple[int, ...]) -> list[range]:
    """Consecutive ranges of the given lengths, from 0."""
    starts = [sum(counts[:s]) for s in range(len(counts) + 1)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=False)]


def _untested(model_type: str, dimension: str, tested: frozenset[str]) -> str:
    return (
        f"{model_type} is not tested with {dimension} parallel; {dimension} 1 would fit "
        f"(tested: {', '.join(sorted(tested))})"
    )
