"""The config of a run: every section and field, with its meaning and unit at the field.

All models are frozen and refuse unknown keys. Values are checked here, once; below the entry nothing checks them again.
`load.py` makes a RunConfig from a YAML file and overrides and turns pydantic's errors into errors with line numbers.
The order of the fields is the order of the help and of the resolved config.
"""

from __future__ import annotations

import re
from math import ceil
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, model_validator
from pydantic_core import PydanticCustomError

# Errors of checks across sections; their context entry "at" says which field the message belongs to.
CROSS_SECTION = "cross_section"
AT_TOKENS_PER_STEP = ("batch", "tokens_per_step")
AT_GRADIENT_PLANE = ("memory", "gradient_plane")


def _number(value: object) -> object:
    """Refuse text and booleans, which pydantic would read as numbers: in a config they are slips, never intentions."""
    if isinstance(value, bool):
        raise ValueError("expected a number, found a boolean")
    if isinstance(value, str):
        raise ValueError(f"expected a number, found the text {value!r}")
    return value


def _regex(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"is not a regular expression: {error}") from None
    return value


def _path(value: str) -> str:
    if "\0" in value:
        raise ValueError("has a NUL character in it, which no path can have")
    return value


def _gib(value: object) -> object:
    if value != "auto" and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
        raise ValueError("should be auto or a positive number of GiB")
    return value


def _pair(value: object) -> object:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError("should be a list of two numbers, like [0.9, 0.999]")
    return value


Int = Annotated[int, BeforeValidator(_number)]
Float = Annotated[float, BeforeValidator(_number)]
PositiveInt = Annotated[Int, Field(gt=0)]
PathText = Annotated[str, AfterValidator(_path)]
GiB = Annotated[Literal["auto"] | float, BeforeValidator(_gib)]
Fraction = Annotated[Float, Field(ge=0, le=1)]
Beta = Annotated[Float, Field(ge=0, lt=1)]
Betas = Annotated[tuple[Beta, Beta], BeforeValidator(_pair)]

ChangeName = Literal["data", "batch", "seed", "schedule", "optim", "precision"]
"""What may be allowed to differ between a checkpoint's run and the one that goes on from it; see resume.py."""


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class ModelConfig(Section):
    """Which model is trained."""

    path: PathText = Field(
        min_length=1, description="Hugging Face model folder, or a hub id that is in the local cache"
    )
    init: Literal["pretrained", "random"] = Field(
        default="pretrained",
        description="pretrained: read the folder's weights; random: the model class's own init, from its config alone",
    )
    trust_remote_code: StrictBool = Field(
        default=False, description="run Python code that the model folder brings along"
    )
    attn_implementation: str | None = Field(
        default=None,
        description="attention implementation by its transformers name (sdpa, eager, ...); null: the model's default",
    )


class SourceConfig(Section):
    """One source of training samples."""

    path: PathText = Field(
        min_length=1,
        description="file, folder, glob, or the id of a data set in the local cache of the Hugging Face hub",
    )
    weight: Annotated[Float, Field(gt=0)] = Field(
        default=1.0,
        description="how often the source is used per epoch: 0.5 takes half of its samples, 2 takes each twice",
    )
    format: Literal["auto", "text", "lines", "messages", "sharegpt", "alpaca", "prompt_completion", "tokens"] = Field(
        default="auto", description="format of the samples; auto: found from the columns and printed"
    )
    columns: dict[str, str] = Field(
        default={}, description="the format's column names -> the file's, where they differ"
    )
    subset: str | None = Field(default=None, description="subset of a data set of the hub; null: its default one")
    split: str | None = Field(default=None, description="split of a data set of the hub; null: train")


def _as_sources(value: object) -> object:
    """A path, a list of paths and a list of sources all mean a list of sources."""
    if isinstance(value, str | dict | SourceConfig):
        value = [value]
    if isinstance(value, list | tuple):
        return tuple({"path": item} if isinstance(item, str) else item for item in value)
    return value


Sources = Annotated[tuple[SourceConfig, ...], BeforeValidator(_as_sources), Field(min_length=1)]


class ValConfig(Section):
    """What is held out: a stable fraction of the training samples, or sources of its own."""

    fraction: Annotated[Float, Field(gt=0, lt=1)] | None = Field(
        default=None, description="share of the training samples that is held out; the same samples in every run"
    )
    sources: Sources | None = Field(default=None, description="held-out sources, written like data.train")

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, value: object) -> object:
        if isinstance(value, str | list | tuple):
            return {"sources": value}
        if isinstance(value, dict) and "path" in value:
            rest = {key: item for key, item in value.items() if key == "fraction"}
            return {**rest, "sources": {key: item for key, item in value.items() if key != "fraction"}}
        return value

    @model_validator(mode="after")
    def _one_of_two(self) -> ValConfig:
        if (self.fraction is None) == (self.sources is None):
            raise ValueError("give either a fraction or sources")
        return self


class DataConfig(Section):
    """The samples and how they become rows of tokens."""

    train: Sources = Field(
        description="a path, or a list of paths or of {path, weight, format, columns, subset, split}"
    )
    val: ValConfig | None = Field(
        default=None, description="{fraction: 0.01}, or sources like data.train; null: no validation"
    )
    max_tokens: Annotated[Int, Field(ge=2)] = Field(default=2048, description="length of a row [tokens]")
    overflow: Literal["error", "drop", "truncate", "split"] = Field(
        default="error", description="what happens to a sample longer than max_tokens"
    )
    train_on: Literal["assistant", "last_assistant", "all"] = Field(
        default="assistant", description="which tokens of a chat are trained; plain text is trained in full"
    )
    packing: StrictBool = Field(
        default=True, description="put several samples into one row; they do not see each other"
    )
    chat_template: PathText | None = Field(
        default=None, description="file with a jinja chat template; null: the tokenizer's own"
    )
    allow_rejects: Fraction = Field(
        default=0.01, description="share of samples that may be malformed before it is an error"
    )
    cache_dir: PathText | None = Field(
        default=None, description="folder of the tokenised cache; null: the user's cache folder"
    )


class BatchConfig(Section):
    """The size of an optimizer step, and how it is cut. The cut changes memory and speed, never the result."""

    tokens_per_step: PositiveInt = Field(description="tokens of one optimizer step, a multiple of data.max_tokens")
    microbatch_rows: PositiveInt | None = Field(
        default=None, description="rows computed together; null: the engine chooses"
    )
    head_chunk_tokens: PositiveInt | None = Field(
        default=None, description="tokens whose logits exist at the same time; null: the engine chooses"
    )
    accumulation_steps: PositiveInt = Field(
        default=1, description="passes over the layers per step; more need less memory for layer inputs"
    )


class GroupConfig(Section):
    """Parameters with settings of their own; the first group that matches a parameter wins."""

    pattern: Annotated[str, AfterValidator(_regex)] = Field(
        description="regular expression, searched in the parameter's Hugging Face name"
    )
    weight_decay: Annotated[Float, Field(ge=0)] | None = Field(default=None, description="null: optim.weight_decay")
    lr_scale: Annotated[Float, Field(ge=0)] = Field(default=1.0, description="factor on the learning rate")


class OptimConfig(Section):
    """AdamW with fp32 master weights and moments."""

    learning_rate: Annotated[Float, Field(gt=0)] = Field(default=1e-5, description="peak learning rate")
    weight_decay: Annotated[Float, Field(ge=0)] = Field(
        default=0.01, description="decoupled decay; never on norms and biases"
    )
    betas: Betas = Field(default=(0.9, 0.999), description="decay of the first and second moment")
    eps: Annotated[Float, Field(gt=0)] = Field(default=1e-8, description="term added to the denominator")
    max_grad_norm: Annotated[Float, Field(gt=0)] | None = Field(
        default=1.0, description="clip the global gradient norm to this; null: no clipping"
    )
    groups: tuple[GroupConfig, ...] = Field(default=(), description="list of {pattern, weight_decay, lr_scale}")


class ScheduleConfig(Section):
    """The learning rate over the run, and how long the run is."""

    kind: Literal["constant", "linear", "cosine", "wsd"] = Field(
        default="cosine",
        description="shape after the warm-up; wsd: constant, then a decay over the last decay_ratio",
    )
    warmup_ratio: Annotated[Float, Field(ge=0, lt=1)] | None = Field(
        default=None, description="warm-up as a share of all steps"
    )
    warmup_steps: Annotated[Int, Field(ge=0)] | None = Field(
        default=None, description="warm-up [steps]; instead of warmup_ratio"
    )
    min_lr_ratio: Fraction = Field(default=0.0, description="floor of the decay, as a share of the peak learning rate")
    decay_ratio: Annotated[Float, Field(gt=0, le=1)] = Field(
        default=0.1, description="wsd: share of all steps that decay"
    )
    epochs: Annotated[Float, Field(gt=0)] | None = Field(
        default=None, description="passes over the data; 1 if steps is not given"
    )
    steps: PositiveInt | None = Field(
        default=None, description="length of the run [optimizer steps]; instead of epochs"
    )

    @model_validator(mode="after")
    def _one_length(self) -> ScheduleConfig:
        if self.warmup_ratio is not None and self.warmup_steps is not None:
            raise ValueError("give warmup_ratio or warmup_steps, and leave the other out or null")
        if self.epochs is not None and self.steps is not None:
            raise ValueError("give epochs or steps, and leave the other out or null")
        return self

    def total_steps(self, steps_per_epoch: int) -> int:
        """Length of the run in optimizer steps. A started step of the last epoch counts as a whole one."""
        if self.steps is not None:
            return self.steps
        epochs = 1.0 if self.epochs is None else self.epochs
        # 0.1 * 30 is 3.0000000000000004: rounding first keeps ceil from adding a step that nobody asked for
        return max(1, ceil(round(epochs * steps_per_epoch, 6)))


class MemoryConfig(Section):
    """Host and device memory."""

    pin: Literal["auto", "all", "staged"] = Field(
        default="auto",
        description="all: page-locked planes; staged: ordinary planes and pinned staging buffers; "
        "auto: all where the system's limit allows",
    )
    weight_slots: Annotated[Int, Field(ge=2)] = Field(default=2, description="device buffers for layer weights")
    gradient_slabs: Annotated[Int, Field(ge=1)] = Field(
        default=12, description="pinned host buffers for gradients in flight"
    )
    gradient_plane: StrictBool = Field(
        default=True,
        description="keep a whole step's gradients in host memory, 2 or 4 bytes a parameter; false: AdamW takes them as "
        "they arrive, without clipping, accumulation, or skipping of steps that are not finite",
    )
    host_gib: GiB = Field(
        default="auto",
        description="host memory that the run may use [GiB]; auto: what is available, container limits included",
    )
    device_gib: GiB = Field(default="auto", description="device memory that the run may use [GiB]; auto: what is free")
    device_fraction: Annotated[Float, Field(gt=0, le=1)] = Field(
        default=0.92, description="share of that memory that the plan fills; the rest is for what no formula sees"
    )
    host_reserve_gib: Annotated[Float, Field(ge=0)] = Field(
        default=0.5,
        description="host memory that must stay available [GiB]: the plan leaves it free, and a run that comes below it saves "
        "and ends (exit code 3) before the system kills it",
    )


class ActivationsConfig(Section):
    """What is kept between forward and backward."""

    policy: Literal["auto", "keep", "selective", "recompute"] = Field(
        default="auto",
        description="keep: all that the backward needs; selective: matrix products and attention, cheap work is done again; "
        "recompute: each layer's input, the rest is computed again; auto: per layer, as the plan finds it fastest "
        "(on the CPU recompute)",
    )
    attention: Literal["auto", "keep", "recompute"] = Field(
        default="auto",
        description="of recomputed layers: keep: what attention gave stays, all else is done again (in long rows attention "
        "is most of the work); recompute: not even that; auto: as policy says, or the plan",
    )
    mlp: Literal["auto", "keep", "recompute"] = Field(
        default="auto",
        description="likewise for the products of the MLP's matrices; keep with attention: keep is policy: keep",
    )
    mlp_chunk_tokens: PositiveInt | None = Field(
        default=None,
        description="compute MLPs in chunks of so many tokens, where they compute each token by itself [tokens]; null: as the "
        "plan finds it needed",
    )
    compile: Literal["auto", "off"] = Field(
        default="auto", description="auto: layers are compiled on a GPU; a family that cannot be compiled runs eager"
    )
    offload_input: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="layer inputs wait in host memory for their backward: auto: as many as must; on: all of recomputed layers",
    )
    segment: PositiveInt | None = Field(
        default=None,
        description="keep only every K-th layer's input, at the price of one more forward; null: every layer's",
    )

    @model_validator(mode="after")
    def _one_policy(self) -> ActivationsConfig:
        parts = [name for name in ("attention", "mlp") if getattr(self, name) != "auto"]
        if parts and self.policy in ("keep", "selective"):
            raise ValueError(f"policy: {self.policy} decides for whole layers: leave {' and '.join(parts)} at auto")
        kept = [name for name in parts if getattr(self, name) == "keep"]
        if kept and self.segment is not None:
            raise ValueError(f"segment drops all but inputs: leave {' and '.join(kept)} at auto, or segment at null")
        return self

    @property
    def layer_policy(self) -> Literal["auto", "keep", "selective", "attention", "mlp", "recompute"]:
        """What `policy`, `attention` and `mlp` come to for a layer."""
        parts = (self.attention, self.mlp)
        if parts == ("keep", "keep"):
            return "keep"
        if "keep" in parts:
            return "attention" if self.attention == "keep" else "mlp"
        if "recompute" in parts or (self.segment is not None and self.policy == "auto"):
            return "recompute"
        return self.policy


class PrecisionConfig(Section):
    """Number formats. Master weights and moments are fp32 in every mode."""

    compute_dtype: Literal["auto", "bf16", "fp16", "fp32"] = Field(
        default="auto", description="format of forward and backward; auto: bf16 where the device computes it, else fp32"
    )
    grad_transport: Literal["auto", "bf16", "fp32"] = Field(
        default="auto",
        description="format in which gradients travel to the host; auto: fp32 with fp32 compute, else bf16",
    )


class LayoutConfig(Section):
    """How the mesh engine spreads a run over processes. The product of all sizes is their number."""

    tensor: PositiveInt = Field(default=1, description="ranks that share the matrices of a layer")
    pipeline: PositiveInt = Field(default=1, description="ranks that share the layers")
    virtual: PositiveInt = Field(default=1, description="stages per pipeline rank")
    context: PositiveInt = Field(default=1, description="ranks that share the tokens of a row")
    replicate: PositiveInt = Field(default=1, description="copies of the sharded model")
    shard: PositiveInt | None = Field(
        default=None, description="ranks that share one copy of parameters and optimizer; null: all that are left"
    )
    schedule: Literal["1f1b", "interleaved", "zb1p", "zbv", "dualpipev"] = Field(
        default="1f1b", description="pipeline schedule"
    )
    microbatches: PositiveInt | None = Field(
        default=None,
        description="pieces of each data rank's rows, one after the other; null: as few as the schedule needs",
    )
    stage_layers: tuple[PositiveInt, ...] | None = Field(
        default=None, description="layers of each stage, in the order of the model; null: even by parameters"
    )


class ParallelConfig(LayoutConfig):
    """How the mesh engine spreads a run over processes (engine: mesh). The product of all sizes is their number."""

    by_world_size: dict[Annotated[int, Field(gt=0)], LayoutConfig] = Field(
        default={},
        description="number of processes -> these sizes instead, {8: {tensor: 2, pipeline: 2}, 4: {tensor: 2}}: what a run "
        "goes on with when it is started again with fewer nodes",
    )

    def sizes_for(self, processes: int) -> dict[str, Any]:
        """The sizes that count with so many processes."""
        chosen = self.by_world_size.get(processes, self)
        return {name: getattr(chosen, name) for name in LayoutConfig.model_fields}


class EvalConfig(Section):
    """Loss on the held-out samples (data.val)."""

    every_steps: PositiveInt | None = Field(
        default=None, description="evaluate after every N steps; null: not during the run"
    )
    at_start: StrictBool = Field(default=False, description="evaluate before the first step")
    at_end: StrictBool = Field(default=True, description="evaluate after the last step")


class CheckpointConfig(Section):
    """When the run is saved. Each checkpoint is a folder that transformers loads as it is."""

    every_steps: PositiveInt | None = Field(
        default=500, description="save after every N steps; null: not during the run"
    )
    keep: PositiveInt | None = Field(default=2, description="how many of the run's newest checkpoints stay; null: all")
    keep_every: PositiveInt | None = Field(
        default=None, description="checkpoints of every N-th step stay as well, whatever keep says"
    )
    at_end: StrictBool = Field(default=True, description="save after the last step")
    background: StrictBool = Field(
        default=True, description="write while training goes on; the checkpoint is of one consistent step all the same"
    )
    buffer_gib: GiB = Field(
        default="auto",
        description="host memory for copies of layers whose next update comes before they are written [GiB]; more waits "
        "less on a slow disk; auto: half of what is free when a save begins, but two layers at least; never the host's last GiB",
    )
    on_error: Literal["warn", "stop"] = Field(
        default="stop",
        description="a save that fails: warn: training goes on and the next one is tried; stop: the run ends",
    )
    weights_every_steps: PositiveInt | None = Field(
        default=None, description="write bf16 weights alone to RUN/weights every N steps; all stay; null: never"
    )


Seconds = Annotated[Float, Field(gt=0)] | None


class WatchdogConfig(Section):
    """When a rank is taken to hang (engine: mesh): stacks of all ranks go to RUN/hangs, exit code 75, torchrun starts again."""

    start_s: Seconds = Field(
        default=3600.0, description="model, data and checkpoint are there [s]; null: however long it takes"
    )
    first_step_s: Seconds = Field(default=1200.0, description="the first step of a process [s]")
    step_s: Seconds = Field(default=600.0, description="every other step [s]")
    save_s: Seconds = Field(
        default=1800.0, description="what training waits for of a save [s]: of its copies, or of the save before it"
    )
    load_s: Seconds = Field(default=3600.0, description="a checkpoint is loaded during the run, by a rollback [s]")
    evaluation_s: Seconds = Field(default=600.0, description="one batch of an evaluation [s]")
    mfu_floor: Annotated[Float, Field(gt=0, lt=1)] | None = Field(
        default=None, description="warn when MFU is under this for some steps in a row, 0.4 for 40%; null: never"
    )
    sample_every_steps: PositiveInt | None = Field(
        default=500, description="profile a step now and then for exposed communication and stragglers; null: never"
    )


class RunSection(Section):
    """Where the run lives and what it runs on."""

    dir: PathText = Field(
        min_length=1, description="the run's folder; must be empty or missing unless the run is resumed"
    )
    seed: Annotated[Int, Field(ge=0)] = Field(default=0, description="seed of data order, random init and dropout")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: cuda if there is one")
    threads: PositiveInt | None = Field(
        default=None, description="threads of the optimizer; null: the cores of this process"
    )
    max_bad_steps: PositiveInt = Field(default=10, description="N steps in a row that were not finite are a divergence")
    loss_spike: Annotated[Float, Field(gt=1)] | None = Field(
        default=None,
        description="a loss above this multiple of the median of the last 20 is a divergence too; null: never",
    )
    on_divergence: Literal["stop", "rollback"] = Field(
        default="stop",
        description="stop: the run ends (exit code 4); rollback: it goes on from the newest checkpoint before the divergence, "
        "with the data behind it",
    )
    max_rollbacks: PositiveInt = Field(default=3, description="most rollbacks of a run; then it ends as with stop")
    allow_changes: tuple[ChangeName, ...] = Field(
        default=(),
        description="list of what may differ from the checkpoint's run when a run goes on: data, batch (tokens per step), "
        "seed, schedule (learning rates of steps already taken), optim, precision",
    )


class MetricsConfig(Section):
    """Where the numbers of a run go beside its own files, which always have them."""

    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = Field(
        default=(),
        description="any of tensorboard, wandb and trackio: services that get every step too; a service that fails or hangs "
        "never stops the run",
    )
    project: str = Field(default="megatrain", min_length=1, description="the project at the services")
    instruments: StrictBool = Field(
        default=True, description="time copies, waits and updates of every step; the rules of alerts need it"
    )


AlertAction = Literal["warn", "save", "stop", "rollback"]
Share = Annotated[Float, Field(gt=0, lt=1)]


class AlertsConfig(Section):
    """Rules that watch the pipeline; see docs/pipeline.md. null switches a rule off. Actions: warn: a line in the log, once
    until it is over; save: and a checkpoint; stop: and the run ends as by a signal; rollback: and it goes back to the newest
    checkpoint."""

    steps: PositiveInt = Field(default=10, description="so many steps in a row must break a rule")
    link_share: Share | None = Field(
        default=0.6, description="alert when copies reach less of the link's measured rate while the GPU waits for them"
    )
    link_share_action: AlertAction = Field(default="warn", description="what follows an alert of link_share")
    gpu_busy: Share | None = Field(
        default=0.8, description="alert when the GPU works for less of a step, for no reason that another rule names"
    )
    gpu_busy_action: AlertAction = Field(default="warn", description="what follows an alert of gpu_busy")
    speed: Share | None = Field(
        default=0.7, description="alert when tokens/s are below this multiple of the median of the last 50 steps"
    )
    speed_action: AlertAction = Field(default="warn", description="what follows an alert of speed")
    device_memory: Share | None = Field(
        default=0.85,
        description="alert when the peak takes more of the device's memory, and more than memory.device_fraction too",
    )
    device_memory_action: AlertAction = Field(default="warn", description="what follows an alert of device_memory")
    slab_wait: Share | None = Field(
        default=0.05, description="alert when more of a step is spent waiting for a free gradient slab"
    )
    slab_wait_action: AlertAction = Field(default="warn", description="what follows an alert of slab_wait")
    optimizer_wait: Share | None = Field(
        default=0.2, description="alert when the GPU waits for AdamW for more of a step"
    )
    optimizer_wait_action: AlertAction = Field(default="warn", description="what follows an alert of optimizer_wait")
    data_wait: Share | None = Field(default=0.1, description="alert when more of a step is spent waiting for the batch")
    data_wait_action: AlertAction = Field(default="warn", description="what follows an alert of data_wait")


class RunConfig(Section):
    """A whole run."""

    model: ModelConfig
    engine: Literal["host", "mesh"] = Field(
        default="host",
        description="host: state in host memory, layers stream through the device; mesh: state sharded over the devices "
        "of many processes (torchrun)",
    )
    data: DataConfig
    batch: BatchConfig
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    memory: MemoryConfig = MemoryConfig()
    activations: ActivationsConfig = ActivationsConfig()
    precision: PrecisionConfig = PrecisionConfig()
    parallel: ParallelConfig = ParallelConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    metrics: MetricsConfig = MetricsConfig()
    alerts: AlertsConfig = AlertsConfig()
    run: RunSection

    @model_validator(mode="before")
    @classmethod
    def _empty_sections(cls, value: Any) -> Any:
        """`optim:` with nothing below it is null in YAML; it means the section's defaults."""
        if isinstance(value, dict):
            return {key: {} if item is None and key != "engine" else item for key, item in value.items()}
        return value

    @model_validator(mode="after")
    def _whole_rows(self) -> RunConfig:
        rows, rest = divmod(self.batch.tokens_per_step, self.data.max_tokens)
        if rest:
            near = [n * self.data.max_tokens for n in (rows, rows + 1) if n]
            raise PydanticCustomError(
                CROSS_SECTION,
                "must be a multiple of data.max_tokens ({max_tokens}), for example {near}",
                {"max_tokens": self.data.max_tokens, "near": " or ".join(map(str, near)), "at": AT_TOKENS_PER_STEP},
            )
        return self

    @model_validator(mode="after")
    def _gradient_plane(self) -> RunConfig:
        needs = [
            (
                self.optim.max_grad_norm is not None,
                "clipping needs it (optim.max_grad_norm: null switches clipping off)",
            ),
            (self.batch.accumulation_steps > 1, "batch.accumulation_steps > 1 needs it"),
            (self.precision.compute_dtype == "fp16", "precision.compute_dtype: fp16 needs it"),
        ]
        if not self.memory.gradient_plane and any(needed for needed, _ in needs):
            why = "; ".join(reason for needed, reason in needs if needed)
            raise PydanticCustomError(CROSS_SECTION, "cannot be false: {why}", {"why": why, "at": AT_GRADIENT_PLANE})
        return self

    @property
    def rows_per_step(self) -> int:
        """Rows of `data.max_tokens` tokens in one optimizer step."""
        return self.batch.tokens_per_step // self.data.max_tokens
