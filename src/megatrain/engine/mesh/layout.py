"""A layout: how many ranks each dimension of the mesh has, and what every rank is responsible for. Pure plain data.

[Note: the order of ranks]
Ranks count through (pipeline, replicate, shard, context, tensor), tensor fastest: tensor neighbours exchange most and sit on one
host, pipeline neighbours exchange least and may be far apart. Shard and context ranks together hold one copy of the
parameters (FSDP shards over both), because the ranks of a context group see different tokens of the same rows, which for a
gradient is the same as different rows.

Shapes: B rows of the whole step, T tokens per row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatrain.errors import UserError

TENSOR_STYLES = frozenset(
    {
        "colwise",
        "rowwise",
        "replicated_with_grad_allreduce",
        "colwise_gather_output",
        "embedding_rowwise",
        "moe_tp_experts",
        "packed_colwise",
    }
)
"""The styles of Hugging Face's `tp_plan` that tensor_parallel.py translates. Some releases add the embedding to the plan of
a tied model; embedding and head are split by vocabulary in any case. Experts are split by expert (expert_parallel.py),
whatever the plan says of their matrices (`packed_colwise`, `rowwise`)."""

TENSOR_FAMILIES = frozenset(
    "llama qwen2 qwen3 mistral ministral gemma gemma2 gemma3_text granite smollm3 arcee seed_oss ernie4_5 "
    "mixtral qwen3_moe".split()
)
"""Model types whose gradients under tensor parallel are part of the test suite."""

CONTEXT_FAMILIES = TENSOR_FAMILIES | frozenset({"olmo2"})
"""Model types whose gradients under context parallel are part of the test suite."""

LAYER_KINDS = frozenset({"full_attention", "sliding_attention"})
"""The `layer_types` whose attention context parallel computes."""


@dataclass(frozen=True)
class ScheduleKind:
    """A pipeline schedule.

    Attributes:
        name: As written in the config.
        virtual: Smallest and largest number of stages per rank; None is no limit.
        vee: Stages run down the ranks and back up: rank r holds stages r and 2 * pipeline - 1 - r.
        splits_backward: Gradients of inputs and of weights are computed apart. See [Note: two halves] in deferred.py.
        rounds: The number of microbatches must divide into rounds of about `pipeline` microbatches.
    """

    name: str
    virtual: tuple[int, int | None]
    vee: bool = False
    splits_backward: bool = False
    rounds: bool = False


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


@dataclass(frozen=True)
class Coordinate:
    """Where a rank stands in the mesh: its index in each dimension."""

    pipeline: int
    replicate: int
    shard: int
    context: int
    tensor: int


@dataclass(frozen=True)
class Layout:
    """How a model and its batches are spread over processes.

    Attributes:
        tensor: Ranks that share the matrices of a layer.
        pipeline: Ranks that share the layers.
        virtual: Stages per pipeline rank.
        context: Ranks that share the tokens of a row.
        replicate: Copies of the sharded model.
        shard: Data ranks that share one copy of parameters, gradients and optimizer; None takes what the world leaves.
        sequence: Norms and residuals are split over the tensor ranks, by tokens.
        schedule: One of `SCHEDULES`; without pipeline ranks it is not used.
        microbatches: Pieces into which each data rank cuts its rows, run one after the other. None is as few as the
            schedule allows.
        stage_layers: Layers of each stage, in the order of the model. None is even by parameters.
    """

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    context: int = 1
    replicate: int = 1
    shard: int | None = None
    sequence: bool = True
    schedule: str = "1f1b"
    microbatches: int | None = None
    stage_layers: tuple[int, ...] | None = None

    # ---------------------------------------------------------------- numbers

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
    def sizes(self) -> tuple[int, int, int, int, int]:
        """Of (pipeline, replicate, shard, context, tensor)."""
        return self.pipeline, self.replicate, self._shard, self.context, self.tensor

    @property
    def _shard(self) -> int:
        assert self.shard is not None, "resolve the layout first"
        return self.shard

    @property
    def row_multiple(self) -> int:
        """The rows of a step are padded to a multiple of this."""
        return self.data * self.pieces

    @property
    def token_multiple(self) -> int:
        """The tokens of a row are padded to a multiple of this: two chunks per context rank, equal parts per tensor rank."""
        return (2 * self.context if self.context > 1 else 1) * self.tensor

    @property
    def pieces(self) -> int:
        """Microbatches of a step on each data rank."""
        if self.microbatches is not None:
            return self.microbatches
        return self.least_microbatches

    @property
    def least_microbatches(self) -> int:
        if self.pipeline == 1:
            return 1
        return self.stages if self.schedule == "dualpipev" else self.pipeline

    def resolved(self, world: int) -> Layout:
        """The same layout with `shard` filled in. What does not divide is left for `problems` to say."""
        if self.shard is not None:
            return self
        others = self.pipeline * self.replicate * self.context * self.tensor
        return dataclasses.replace(self, shard=max(1, world // others) if others > 0 else 1)

    # ---------------------------------------------------------------- places

    def coordinate(self, rank: int) -> Coordinate:
        index = []
        for size in reversed(self.sizes):
            rank, remainder = divmod(rank, size)
            index.append(remainder)
        return Coordinate(*reversed(index))

    def rank(self, at: Coordinate) -> int:
        rank = 0
        for size, index in zip(self.sizes, dataclasses.astuple(at), strict=True):
            rank = rank * size + index
        return rank

    def stages_of(self, pipeline_rank: int) -> tuple[int, ...]:
        """The stages that a pipeline rank holds, in the order of the model."""
        if self.kind.vee and self.pipeline > 1:
            return pipeline_rank, 2 * self.pipeline - 1 - pipeline_rank
        return tuple(range(pipeline_rank, self.stages, self.pipeline))

    def holder_of(self, stage: int) -> int:
        """The pipeline rank that holds a stage."""
        return next(rank for rank in range(self.pipeline) if stage in self.stages_of(rank))

    # ---------------------------------------------------------------- checks

    def problems(self, config: Any, world: int, rows: int | None = None) -> list[str]:
        """Everything that makes this layout impossible, each with what would fit. Needs no process group.

        Args:
            config: The model's Hugging Face config.
            world: Number of processes.
            rows: Rows of a step, if known.
        """
        found = list(self._size_problems())
        if found:
            return found
        full = self.resolved(world)
        found += full._world_problems(world, self.shard is None)
        found += full._schedule_problems()
        text = config.get_text_config()
        found += full._pipeline_problems(text)
        found += full._tensor_problems(text)
        found += full._context_problems(text)
        found += full._dropout_problems(text)
        if rows is not None and rows < full.row_multiple:
            found.append(
                f"{rows} rows per step are fewer than {full.data} data ranks x {full.pieces} microbatches = "
                f"{full.row_multiple}: some ranks would compute padding only; take at least {full.row_multiple} rows"
            )
        return found

    def checked(self, config: Any, world: int, rows: int | None = None) -> Layout:
        """The resolved layout, or a UserError with all problems."""
        found = self.problems(config, world, rows)
        if found:
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
            yield f"schedule {self.schedule!r} is unknown; there are {', '.join(SCHEDULES)}"

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
        kind = self.kind
        least, most = kind.virtual
        if self.virtual < least or (most is not None and self.virtual > most):
            needed = f"exactly {least}" if most == least else f"at least {least}"
            others = [k.name for k in SCHEDULES.values() if _within(self.virtual, k.virtual)]
            yield (
                f"schedule {kind.name} needs {needed} virtual stages per rank, not {self.virtual}; "
                f"with virtual {self.virtual} {' or '.join(others)} would fit"
            )
        pieces = self.pieces
        if pieces < self.least_microbatches:
            yield (
                f"microbatches {pieces} are fewer than the {self.least_microbatches} that schedule {kind.name} needs on "
                f"{self.pipeline} pipeline ranks; {self.least_microbatches} would fit"
            )
        elif kind.rounds and pieces % max(1, pieces // self.pipeline):
            fits = [n for n in range(self.pipeline, pieces + self.pipeline + 1) if n % max(1, n // self.pipeline) == 0]
            near = sorted(fits, key=lambda n: abs(n - pieces))[:2]
            yield (
                f"microbatches {pieces} do not divide into the rounds of schedule {kind.name}; "
                f"{' or '.join(map(str, sorted(near)))} would fit"
            )

    def _pipeline_problems(self, config: Any) -> Iterator[str]:
        layers = config.num_hidden_layers
        if self.stages > layers:
            fits = list(range(1, layers // self.virtual + 1))
            yield (
                f"{layers} layers cannot fill pipeline {self.pipeline} x virtual {self.virtual} = {self.stages} stages; "
                + (f"pipeline {fits[-1]} would fit" if fits else f"virtual {layers // self.pipeline or 1} would fit")
            )
        given = self.stage_layers
        if given is not None and (len(given) != self.stages or sum(given) != layers or min(given) < 1):
            yield (
                f"stage_layers {list(given)} are not {self.stages} stages with {layers} layers in all, at least one each"
            )

    def _tensor_problems(self, config: Any) -> Iterator[str]:
        if self.tensor == 1:
            return
        if not self.sequence:
            yield (
                "tensor parallel without sequence parallel (sequence: false) is not supported: it costs five "
                "all-reduces a layer; set sequence: true"
            )
        plan = getattr(config, "base_model_tp_plan", None)
        if config.model_type not in TENSOR_FAMILIES:
            yield _unproven(config.model_type, "tensor", TENSOR_FAMILIES)
        if not plan:
            yield f"{config.model_type} has no tensor-parallel plan in transformers; tensor 1 would fit"
        else:
            unknown = sorted({style for style in plan.values() if style not in TENSOR_STYLES})
            if unknown:
                yield (
                    f"{config.model_type}'s plan uses the styles {', '.join(unknown)}, which are not supported; "
                    "tensor 1 would fit"
                )
        for name in ("intermediate_size", "num_experts", "num_local_experts"):
            value = getattr(config, name, None)
            if isinstance(value, int) and value % self.tensor:
                yield f"{name} {value} is not a multiple of tensor {self.tensor}; {_divisors(value)} would fit"
        rows = getattr(config, "vocab_size", None)
        if isinstance(rows, int) and -(-rows // self.tensor) * (self.tensor - 1) >= rows:  # cut as torch.chunk does
            yield f"vocab_size {rows} leaves a rank of tensor {self.tensor} without a row; a smaller tensor would fit"

    def _context_problems(self, config: Any) -> Iterator[str]:
        if self.context == 1:
            return
        if config.model_type not in CONTEXT_FAMILIES:
            yield _unproven(config.model_type, "context", CONTEXT_FAMILIES)
        unknown = sorted(set(getattr(config, "layer_types", None) or ()) - LAYER_KINDS)
        if unknown:
            yield f"context parallel cannot split layers of kind {', '.join(unknown)}; context 1 would fit"

    def _dropout_problems(self, config: Any) -> Iterator[str]:
        if self.tensor == self.context == 1:
            return
        for name in dropout_keys(config):
            yield (
                f"{name} {getattr(config, name)} would differ between the ranks of a tensor or context group; "
                f"set it to 0 or take tensor 1, context 1"
            )


def whole_attention(config: Any, tensor: int) -> bool:
    """Whether the heads of a model do not divide over the tensor ranks, so that each of them computes the whole attention."""
    text = config.get_text_config()
    counts = [getattr(text, name, None) for name in ("num_attention_heads", "num_key_value_heads")]
    return any(isinstance(count, int) and count % tensor != 0 for count in counts)


def dropout_keys(config: Any) -> list[str]:
    """Names of the config's random parts that are switched on."""
    names = [
        n
        for n in vars(config)
        if ("dropout" in n or n.endswith(("pdrop", "router_jitter_noise", "input_jitter_noise")))
    ]
    return [n for n in sorted(names) if isinstance(getattr(config, n), float) and getattr(config, n) > 0.0]


def split_layers(
    layers: int, stages: int, layer_weight: float, embedding_weight: float, head_weight: float
) -> list[range]:
    """Cut the layers into `stages` runs so that the heaviest stage is as light as possible; every layer is in one.

    Args:
        layers: L, at least `stages`.
        stages: S.
        layer_weight: Of each layer (parameters, or any other measure).
        embedding_weight: Counted on the first stage.
        head_weight: Counted on the last stage.
    """
    assert 1 <= stages <= layers, (layers, stages)
    extra = [0.0] * stages
    extra[0] += embedding_weight
    extra[-1] += head_weight
    counts = [1] * stages
    for _ in range(layers - stages):
        # Giving each next layer to the stage that stays lightest is optimal for equal layers; ties go to the middle,
        # where nothing else is held.
        counts[
            min(range(stages), key=lambda s: (extra[s] + (counts[s] + 1) * layer_weight, abs(2 * s - stages + 1)))
        ] += 1
    starts = [sum(counts[:s]) for s in range(stages + 1)]
    result = [range(a, b) for a, b in zip(starts, starts[1:], strict=False)]
    assert sum(map(len, result)) == layers and all(map(len, result)), (layers, result)
    return result


def zigzag(tokens: int, parts: int) -> list[list[int]]:
    """Positions of each context rank: chunk r from the front and chunk r from the back, so that causal work is equal.

    Args:
        tokens: T, a multiple of 2 * parts.
        parts: Context ranks.
    """
    assert tokens % (2 * parts) == 0, (tokens, parts)
    size = tokens // (2 * parts)
    chunks = [list(range(c * size, (c + 1) * size)) for c in range(2 * parts)]
    return [chunks[r] + chunks[2 * parts - 1 - r] for r in range(parts)]


def _unproven(model_type: str, dimension: str, proven: frozenset[str]) -> str:
    names = ", ".join(sorted(proven))
    return f"{model_type} has not been proven with {dimension} parallel; {dimension} 1 would fit (proven: {names})"


def _within(value: int, bounds: tuple[int, int | None]) -> bool:
    return value >= bounds[0] and (bounds[1] is None or value <= bounds[1])


def _divisors(value: int) -> str:
    found: Sequence[int] = [n for n in range(1, min(value, 128) + 1) if value % n == 0]
    return "tensor " + " or ".join(map(str, found))
