"""The config of a run: every section and key, with its effect and unit at the field.

All models are frozen and refuse unknown keys. Values are checked here, once; the code below does not check them again.
`load.py` builds a RunConfig from a YAML file and overrides, and turns pydantic's errors into errors with line numbers.
The order of the fields is the order of the help and of the resolved config.
"""

from __future__ import annotations

import datetime
import re
from math import ceil
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, model_validator
from pydantic_core import PydanticCustomError

# Errors of checks across sections; their context entry "at" names the key that the message is about.
CROSS_SECTION = "cross_section"
AT_TOKENS_PER_STEP = ("batch", "tokens_per_step")
AT_GRADIENT_PLANE = ("memory", "gradient_plane")


def _number(value: object) -> object:
    """Refuse text and booleans, which pydantic would convert to numbers."""
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
        raise ValueError("must not contain a NUL character")
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


def _keywords(value: dict[str, Any]) -> dict[str, Any]:
    reserved = ("messages", "tools", "add_generation_prompt", "chat_template", "strftime_now")
    if taken := [name for name in value if name in reserved]:
        raise ValueError(f"{', '.join(taken)} is set by the data")
    return value


def _date(value: object) -> str:
    """YAML reads 2026-11-30 as a date."""
    return (
        value.isoformat() if isinstance(value, datetime.date) else datetime.date.fromisoformat(str(value)).isoformat()
    )


PositiveInt = Annotated[Int, Field(gt=0)]
NonNegativeInt = Annotated[Int, Field(ge=0)]
PositiveFloat = Annotated[Float, Field(gt=0)]
NonNegativeFloat = Annotated[Float, Field(ge=0)]
PathText = Annotated[str, AfterValidator(_path)]
GiB = Annotated[Literal["auto"] | float, BeforeValidator(_gib)]
Fraction = Annotated[Float, Field(ge=0, le=1)]
Share = Annotated[Float, Field(gt=0, lt=1)]
ShareOrAll = Annotated[Float, Field(gt=0, le=1)]
ShareOrNone = Annotated[Float, Field(ge=0, lt=1)]
Betas = Annotated[tuple[ShareOrNone, ShareOrNone], BeforeValidator(_pair)]

ChangeName = Literal["data", "batch", "seed", "schedule", "optim", "precision"]
"""Differences that a resumed run may be allowed to have from the checkpoint's run; see run/resume.py."""


def key(default: Any, description: str, **limits: Any) -> Any:
    """A key that may be left out."""
    return Field(default=default, description=description, **limits)


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class ModelConfig(Section):
    """The model to train."""

    path: PathText = Field(min_length=1, description="Hugging Face model folder, or a hub id in the local cache")
    init: Literal["pretrained", "random"] = key(
        "pretrained", "pretrained: read the folder's weights; random: initialize from the model's config alone"
    )
    trust_remote_code: StrictBool = key(False, "run Python code from the model folder")
    attn_implementation: str | None = key(
        None, "attention implementation by its transformers name (sdpa, eager, ...); null: the model's default"
    )
    router_aux_loss: StrictBool | NonNegativeFloat | None = key(
        None,
        "auxiliary loss that balances the experts of a mixture, over the whole step and without padding; true: on, with the "
        "coefficient of the model's config; a number: on, with this coefficient; false: off; null: as output_router_logits in "
        "the model's config says",
    )
    router_bias_update_speed: PositiveFloat | None = key(
        None,
        "step by which the routers' correction biases (e_score_correction_bias) follow the load of the experts after each "
        "optimizer step, 0.001 in DeepSeek-V3; null: they are not trained, as in transformers",
    )


class SourceConfig(Section):
    """One source of training samples."""

    path: PathText = Field(
        min_length=1, description="file, folder, glob, or id of a dataset in the local Hugging Face cache"
    )
    weight: PositiveFloat = key(
        1.0, "passes over the source per epoch: 0.5 uses half of its rows, 2 uses each row twice"
    )
    format: Literal["auto", "text", "lines", "messages", "sharegpt", "alpaca", "prompt_completion", "tokens"] = key(
        "auto", "format of the samples; auto: detected from the columns"
    )
    columns: dict[str, str] = key({}, "map of the format's column names to the file's, where they differ")
    ignore: tuple[str, ...] = key(
        (),
        "columns to leave out on purpose: not named in the log, and not checked for their meaning (label, split, ...)",
    )
    subset: str | None = key(None, "subset of a hub dataset; null: its default")
    split: str | None = key(None, "split of a hub dataset or a folder; null: train; all: every file of a folder")


def _as_sources(value: object) -> object:
    """A path, a list of paths and a list of sources all mean a list of sources."""
    if isinstance(value, str | dict | SourceConfig):
        value = [value]
    if isinstance(value, list | tuple):
        return tuple({"path": item} if isinstance(item, str) else item for item in value)
    return value


Sources = Annotated[tuple[SourceConfig, ...], BeforeValidator(_as_sources), Field(min_length=1)]


class ValConfig(Section):
    """The held-out samples: a fixed fraction of the training samples, or separate sources."""

    fraction: Share | None = key(None, "share of the training samples to hold out; the same samples in every run")
    sources: Sources | None = key(None, "held-out sources, written like data.train")

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
    """The samples, and how they become rows of tokens."""

    train: Sources = Field(
        description="a path, or a list of paths or of {path, weight, format, columns, ignore, subset, split}"
    )
    val: ValConfig | None = key(None, "{fraction: 0.01}, or sources like data.train; null: no validation")
    max_tokens: Annotated[Int, Field(ge=2)] = key(2048, "length of a row [tokens]")
    overflow: Literal["error", "drop", "truncate", "split"] = key(
        "error", "how to treat samples longer than max_tokens"
    )
    train_on: Literal["assistant", "last_assistant", "all"] = key(
        "assistant", "tokens of a chat to train on; plain text is always trained in full"
    )
    packing: StrictBool = key(True, "put several samples into one row; they do not attend to each other")
    chat_template: PathText | None = key(None, "jinja template file; null: the tokenizer's chat template")
    special_tokens: Literal["auto", "text", "control", "reject"] = key(
        "auto",
        "special tokens spelt out in the data, such as <|im_end|> in a message: read them as text or as control tokens, or "
        "reject the sample; auto: text in chats, control in plain text",
    )
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_keywords)] = key(
        {}, "keywords for the chat template, such as {enable_thinking: false}; a record's own come first"
    )
    date: Annotated[str, BeforeValidator(_date)] | None = key(
        None,
        "date that the chat template reads, YYYY-MM-DD; null: the day on which the run began, also when it is resumed",
    )
    left_out: Literal["reject", "warn"] = key(
        "reject", "a chat of which the template leaves something out: count it as malformed, or warn and train the rest"
    )
    allow_rejects: Fraction = key(0.01, "share of samples that may be malformed without an error")
    cache_dir: PathText | None = key(None, "folder of the token cache; null: ~/.cache/megatrain/tokens")


class BatchConfig(Section):
    """Size of an optimizer step, and how it is divided. The division affects memory and speed, not the result."""

    tokens_per_step: PositiveInt = Field(description="tokens per optimizer step, a multiple of data.max_tokens")
    microbatch_rows: PositiveInt | None = key(None, "rows computed together; null: chosen by the engine")
    head_chunk_tokens: PositiveInt | None = key(
        None, "tokens whose logits are computed at once; null: chosen by the engine"
    )
    accumulation_steps: PositiveInt = key(
        1,
        "passes over the layers per optimizer step, each with a part of the step's rows; more passes need less "
        "memory for layer inputs",
    )


class GroupConfig(Section):
    """Parameters with separate settings; the first group that matches a parameter applies."""

    pattern: Annotated[str, AfterValidator(_regex)] = Field(
        description="regular expression, searched in the parameter's Hugging Face name"
    )
    weight_decay: NonNegativeFloat | None = key(None, "null: optim.weight_decay")
    lr_scale: NonNegativeFloat = key(1.0, "factor on the learning rate")


class TrainConfig(Section):
    """Which parameters are trained; by default all. The others are frozen: they keep their bits and take 2 bytes each (bf16)."""

    freeze: tuple[Annotated[str, AfterValidator(_regex)], ...] = key(
        (),
        "list of regular expressions, searched in Hugging Face parameter names: these parameters are frozen (host engine)",
    )
    only: tuple[Annotated[str, AfterValidator(_regex)], ...] = key(
        (), "list of regular expressions: only these parameters are trained, but for those in freeze (host engine)"
    )


class OptimConfig(Section):
    """AdamW with fp32 master weights."""

    learning_rate: PositiveFloat = key(1e-5, "peak learning rate")
    weight_decay: NonNegativeFloat = key(0.01, "decoupled weight decay; not applied to norms and biases")
    betas: Betas = key((0.9, 0.999), "decay rates of the first and second moment")
    eps: PositiveFloat = key(1e-8, "term added to the denominator")
    moments: Literal["fp32", "bf16", "int8"] = key(
        "fp32",
        "storage of the two moments; bf16, int8 (in blocks with a scale): 4 or 6 bytes a parameter less, with stochastic "
        "rounding; the arithmetic and the weights stay fp32; the host updates int8 ten times slower than fp32 (host engine)",
    )
    max_grad_norm: PositiveFloat | None = key(1.0, "clip the global gradient norm to this value; null: no clipping")
    groups: tuple[GroupConfig, ...] = key((), "list of {pattern, weight_decay, lr_scale}")


class ScheduleConfig(Section):
    """Length of the run, and the learning rate over it."""

    kind: Literal["constant", "linear", "cosine", "wsd"] = key(
        "cosine", "shape after warmup; wsd: constant, then a decay over the last decay_ratio of the run"
    )
    warmup_ratio: ShareOrNone | None = key(None, "warmup as a share of all steps")
    warmup_steps: NonNegativeInt | None = key(None, "warmup [steps]; instead of warmup_ratio")
    min_lr_ratio: Fraction = key(0.0, "final learning rate, as a share of the peak")
    decay_ratio: ShareOrAll = key(0.1, "wsd: length of the decay, as a share of all steps")
    epochs: PositiveFloat | None = key(None, "passes over the data; 1 if steps is not given")
    steps: PositiveInt | None = key(None, "length of the run [optimizer steps]; instead of epochs")

    @model_validator(mode="after")
    def _one_length(self) -> ScheduleConfig:
        if self.warmup_ratio is not None and self.warmup_steps is not None:
            raise ValueError("give warmup_ratio or warmup_steps, and leave the other out or null")
        if self.epochs is not None and self.steps is not None:
            raise ValueError("give epochs or steps, and leave the other out or null")
        return self

    def total_steps(self, steps_per_epoch: int) -> int:
        """Length of the run in optimizer steps. A partial last epoch is rounded up to whole steps."""
        if self.steps is not None:
            return self.steps
        epochs = 1.0 if self.epochs is None else self.epochs
        # 0.1 * 30 is 3.0000000000000004: round first, so that ceil does not add a step
        return max(1, ceil(round(epochs * steps_per_epoch, 6)))


class MemoryConfig(Section):
    """Use of host and device memory."""

    pin: Literal["auto", "all", "staged"] = key(
        "auto",
        "all: pin all planes; staged: keep planes pageable and copy through pinned staging buffers; auto: all "
        "where the system allows it",
    )
    weight_slots: Literal["auto", "all"] | Annotated[Int, Field(ge=2)] = key(
        "auto",
        "device buffers that layer weights stream through; all: one for each layer, so that weights are loaded or gathered once "
        "a step; auto: 2, and all on several GPUs where it is planned to be faster",
    )
    gradient_slabs: Annotated[Int, Field(ge=1)] = key(12, "pinned host buffers for gradients in flight")
    gradient_plane: StrictBool = key(
        True,
        "keep the gradients of a whole step in host memory, 2 or 4 bytes a parameter; false: AdamW consumes them as "
        "they arrive, without clipping, accumulation, or skipping of non-finite steps",
    )
    host_gib: GiB = key("auto", "limit on host memory [GiB]; auto: what is available, within container limits")
    device_gib: GiB = key("auto", "limit on device memory [GiB]; auto: what is free")
    device_fraction: Literal["auto"] | ShareOrAll = key(
        "auto",
        "share of that device memory the plan may fill; the rest is for allocations it cannot predict. auto: all but "
        "3.5%, but at least 1.5 GiB, or 8% of a small device",
    )
    host_reserve_gib: NonNegativeFloat = key(
        0.5,
        "host memory to keep free [GiB]; a run that comes below it saves and ends (exit code 3) before the system "
        "kills it",
    )


class ActivationsConfig(Section):
    """What is kept from forward to backward, and what is recomputed."""

    policy: Literal["auto", "keep", "selective", "recompute"] = key(
        "auto",
        "keep: keep all activations; selective: keep the results of matrix products and attention, recompute the "
        "rest; recompute: keep only each layer's input; auto: per layer, the fastest plan that fits (on a CPU recompute)",
    )
    attention: Literal["auto", "keep", "recompute"] = key(
        "auto",
        "of recomputed layers; keep: keep the attention output, which saves most of the recompute with long rows; "
        "recompute: recompute it too; auto: as policy says, or the plan",
    )
    mlp: Literal["auto", "keep", "recompute"] = key(
        "auto",
        "of recomputed layers; keep: keep the MLP's matrix products; recompute: recompute them too; auto: as policy "
        "says, or the plan; keep for both attention and mlp equals policy: keep",
    )
    mlp_chunk_tokens: PositiveInt | None = key(
        None,
        "compute MLPs in chunks of this size, where they process tokens independently [tokens]; null: chosen by the "
        "plan",
    )
    compile: Literal["auto", "off"] = key(
        "auto", "auto: compile the layers on a GPU; models that cannot be compiled run eagerly"
    )
    offload_input: Literal["auto", "on", "off"] = key(
        "auto",
        "offload layer inputs to host memory until backward; auto: only as many as needed to fit; on: those of all "
        "recomputed layers",
    )
    segment: PositiveInt | None = key(
        None, "keep only every K-th layer's input, at the cost of one more forward; null: every layer's"
    )

    @model_validator(mode="after")
    def _one_policy(self) -> ActivationsConfig:
        parts = [name for name in ("attention", "mlp") if getattr(self, name) != "auto"]
        if parts and self.policy in ("keep", "selective"):
            raise ValueError(f"policy: {self.policy} applies to whole layers: leave {' and '.join(parts)} at auto")
        kept = [name for name in parts if getattr(self, name) == "keep"]
        if kept and self.segment is not None:
            raise ValueError(f"segment keeps only inputs: leave {' and '.join(kept)} at auto, or segment at null")
        return self

    @property
    def layer_policy(self) -> Literal["auto", "keep", "selective", "keep_attention", "keep_mlp", "recompute"]:
        """The policy of a layer that `policy`, `attention` and `mlp` amount to."""
        parts = (self.attention, self.mlp)
        if parts == ("keep", "keep"):
            return "keep"
        if "keep" in parts:
            return "keep_attention" if self.attention == "keep" else "keep_mlp"
        if "recompute" in parts or (self.segment is not None and self.policy == "auto"):
            return "recompute"
        return self.policy


class PrecisionConfig(Section):
    """Number formats. Master weights are always fp32."""

    compute_dtype: Literal["auto", "bf16", "fp16", "fp32"] = key(
        "auto", "dtype of forward and backward; auto: bf16 if the device supports it, else fp32"
    )
    grad_transport: Literal["auto", "bf16", "fp32"] = key(
        "auto", "dtype of gradients on their way to the host; auto: fp32 with fp32 compute, else bf16"
    )


class LayoutConfig(Section):
    """How the mesh engine distributes a run over processes. The product of all sizes is the number of processes."""

    tensor: PositiveInt = key(1, "tensor parallel ranks, which share the matrices of a layer")
    pipeline: PositiveInt = key(1, "pipeline parallel ranks, which share the layers")
    virtual: PositiveInt = key(1, "stages per pipeline rank")
    context: PositiveInt = key(1, "context parallel ranks, which share the tokens of a row")
    replicate: PositiveInt = key(1, "copies of the sharded model")
    shard: PositiveInt | None = key(
        None, "ranks that share one copy of parameters and optimizer state; null: all remaining ranks"
    )
    schedule: Literal["1f1b", "interleaved", "zb1p", "zbv", "dualpipev"] = key("1f1b", "pipeline schedule")
    microbatches: PositiveInt | None = key(
        None, "microbatches per step of each data parallel rank; null: as few as the schedule needs"
    )
    stage_layers: tuple[PositiveInt, ...] | None = key(
        None, "layers of each stage, in model order; null: balanced by parameters"
    )


class ParallelConfig(LayoutConfig):
    """How the mesh engine distributes a run over processes (engine: mesh). The product of all sizes is the number of
    processes."""

    by_world_size: dict[Annotated[int, Field(gt=0)], LayoutConfig] = key(
        {},
        "sizes for other numbers of processes, {8: {tensor: 2, pipeline: 2}, 4: {tensor: 2}}: used when the run is "
        "restarted on fewer nodes",
    )

    def sizes_for(self, processes: int) -> dict[str, Any]:
        """The sizes that apply to a number of processes."""
        chosen = self.by_world_size.get(processes, self)
        return {name: getattr(chosen, name) for name in LayoutConfig.model_fields}


class EvalConfig(Section):
    """Evaluation of the loss on the held-out samples (data.val)."""

    every_steps: PositiveInt | None = key(None, "evaluate every N steps; null: not during the run")
    at_start: StrictBool = key(False, "evaluate before the first step")
    at_end: StrictBool = key(True, "evaluate after the last step")


class CheckpointConfig(Section):
    """When and how the run is saved. Each checkpoint is a folder that transformers can load."""

    every_steps: PositiveInt | None = key(500, "save every N steps; null: not during the run")
    keep: PositiveInt | None = key(2, "number of newest checkpoints to keep; null: all")
    keep_every: PositiveInt | None = key(None, "also keep the checkpoint of every N-th step, regardless of keep")
    at_end: StrictBool = key(True, "save after the last step")
    background: StrictBool = key(
        True, "write while training continues; the checkpoint is a consistent snapshot of one step"
    )
    buffer_gib: GiB = key(
        "auto",
        "host memory for copies of layers that must be updated before they are written [GiB]; more avoids waiting "
        "for a slow disk; auto: half of what is free, at least two layers, never the last GiB",
    )
    on_error: Literal["warn", "stop"] = key(
        "stop", "when a save fails; warn: continue, and try again at the next; stop: end the run"
    )
    weights_every_steps: PositiveInt | None = key(
        None, "write only bf16 weights to RUN/weights every N steps, and keep all; null: never"
    )


Seconds = PositiveFloat | None


class WatchdogConfig(Section):
    """Time limits after which one of several ranks counts as hung. Then the stacks of all ranks are written to RUN/hangs, the
    processes exit with code 75, and are restarted. null: no limit."""

    start_s: Seconds = key(3600.0, "limit for loading model, data and checkpoint [s]")
    first_step_s: Seconds = key(1200.0, "limit for the first step of a process [s]")
    step_s: Seconds = key(600.0, "limit for every other step [s]")
    save_s: Seconds = key(1800.0, "limit for waiting on a save: on its copies, or on the previous save [s]")
    load_s: Seconds = key(3600.0, "limit for loading a checkpoint in a rollback [s]")
    evaluation_s: Seconds = key(600.0, "limit for one batch of an evaluation [s]")
    mfu_floor: Share | None = key(None, "warn when MFU stays below this, 0.4 for 40%; null: never")
    sample_every_steps: PositiveInt | None = key(
        500, "profile a step every N steps for exposed communication and stragglers; null: never"
    )


class RunSection(Section):
    """The run's folder, its device, and how it handles divergence."""

    dir: PathText = Field(min_length=1, description="folder of the run; must be empty or missing unless resumed")
    seed: NonNegativeInt = key(0, "seed of data order, random init and dropout")
    device: Literal["auto", "cpu", "cuda"] = key("auto", "auto: cuda if available")
    deterministic: Literal["auto"] | StrictBool = key(
        "auto",
        "true: on a GPU, use only kernels that give the same bits every time, so that runs repeat and resume bit for bit; "
        "false: the fastest kernels; auto: the fastest, of which only the attention of unpacked rows is known to differ from "
        "run to run. A CPU is always deterministic",
    )
    gpus: Literal["auto"] | PositiveInt = key(
        "auto",
        "processes that `megatrain train`, `eval` and `trace` start on this host, one for each GPU; they share the model's "
        "state; auto: one for each visible GPU, and one on a CPU; no effect under torchrun, which starts the processes itself",
    )
    replicate_hosts: Literal["auto"] | StrictBool = key(
        "auto",
        "several hosts with engine: host; true: each host holds the whole state, and only sums of gradients travel between "
        "hosts; false: all hosts share one copy; auto: as planned to be faster (without a GPU: one copy)",
    )
    max_restarts: NonNegativeInt = key(
        3, "how often these processes are restarted after one has failed; they continue from the newest checkpoint"
    )
    threads: PositiveInt | None = key(
        None,
        "threads of the host optimizer in each process; null: all cores of this process, divided by its neighbours",
    )
    max_bad_steps: PositiveInt = key(10, "consecutive non-finite steps that count as a divergence")
    loss_spike: Annotated[Float, Field(gt=1)] | None = key(
        None, "also count a loss above this multiple of the median of the last 20 as a divergence; null: never"
    )
    on_divergence: Literal["stop", "rollback"] = key(
        "stop",
        "stop: end the run (exit code 4); rollback: return to the newest checkpoint before the divergence, and skip "
        "the data since then",
    )
    max_rollbacks: PositiveInt = key(3, "rollbacks after which a divergence ends the run")
    allow_changes: tuple[ChangeName, ...] = key(
        (),
        "list of differences from the checkpoint's run that a resumed run may have: data, batch (tokens per step), "
        "seed, schedule (learning rates of past steps), optim, precision",
    )


class MetricsConfig(Section):
    """Metrics, besides the files in the run's folder, which are always written."""

    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = key(
        (),
        "list of services that also receive every step: tensorboard, wandb, trackio; one that is not installed is an "
        "error before the start, one that fails or hangs later never stops the run",
    )
    project: str = key("megatrain", "project name at these services", min_length=1)
    print_every_s: NonNegativeFloat = key(
        10.0,
        "shortest time between the lines of two steps on the console [s]; 0: a line for every step. log.txt has every step's",
    )
    instruments: StrictBool = key(True, "time the copies, waits and updates of every step; the alerts need it")


AlertAction = Literal["warn", "save", "stop", "rollback"]


class AlertsConfig(Section):
    """Rules that watch the pipeline; see docs/pipeline.md. null disables a rule. Actions: warn: log the alert, once until it is
    over; save: also save a checkpoint; stop: also save and end the run, exit code 0; rollback: also return to the newest
    checkpoint."""

    steps: PositiveInt = key(10, "consecutive steps that must break a rule before it alerts")
    link_share: Share | None = key(
        0.6, "minimum rate of copies that the GPU waits for, as a share of the link's measured rate"
    )
    link_share_action: AlertAction = key("warn", "action of the rule link_share")
    gpu_busy: Share | None = key(
        0.8, "minimum share of a step in which the GPU works, if no other rule explains the gap"
    )
    gpu_busy_action: AlertAction = key("warn", "action of the rule gpu_busy")
    speed: Share | None = key(0.7, "minimum tokens/s, as a multiple of the median of the last 50 steps")
    speed_action: AlertAction = key("warn", "action of the rule speed")
    device_memory: Share | None = key(
        0.85, "maximum peak, as a share of device memory; no alert below memory.device_fraction"
    )
    device_memory_action: AlertAction = key("warn", "action of the rule device_memory")
    allocation_retries: NonNegativeInt | None = key(
        0, "maximum device allocations per step that fail at first, because memory is short or fragmented"
    )
    allocation_retries_action: AlertAction = key("warn", "action of the rule allocation_retries")
    slab_wait: Share | None = key(0.05, "maximum share of a step spent waiting for a free gradient slab")
    slab_wait_action: AlertAction = key("warn", "action of the rule slab_wait")
    optimizer_wait: Share | None = key(0.2, "maximum share of a step in which the GPU waits for AdamW")
    optimizer_wait_action: AlertAction = key("warn", "action of the rule optimizer_wait")
    data_wait: Share | None = key(0.1, "maximum share of a step spent waiting for the batch")
    data_wait_action: AlertAction = key("warn", "action of the rule data_wait")
    expert_share: ShareOrAll | None = key(
        0.9, "mixture of experts: maximum share of the tokens that one expert of a layer gets"
    )
    expert_share_action: AlertAction = key("warn", "action of the rule expert_share")
    expert_idle: Share | None = key(
        0.5, "mixture of experts: maximum share of experts without tokens, in steps of 4,096 tokens or more"
    )
    expert_idle_action: AlertAction = key("warn", "action of the rule expert_idle")


class RunConfig(Section):
    """A whole run."""

    model: ModelConfig
    engine: Literal["host", "mesh"] = key(
        "host",
        "host: keep the state in host memory and stream layers through the device; mesh: shard the state over the "
        "devices of many processes (torchrun)",
    )
    data: DataConfig
    batch: BatchConfig
    train: TrainConfig = TrainConfig()
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
        needs = {
            "clipping needs it (optim.max_grad_norm: null switches clipping off)": self.optim.max_grad_norm is not None,
            "batch.accumulation_steps > 1 needs it": self.batch.accumulation_steps > 1,
            "precision.compute_dtype: fp16 needs it": self.precision.compute_dtype == "fp16",
        }
        if not self.memory.gradient_plane and any(needs.values()):
            why = "; ".join(reason for reason, needed in needs.items() if needed)
            raise PydanticCustomError(CROSS_SECTION, "cannot be false: {why}", {"why": why, "at": AT_GRADIENT_PLANE})
        return self

    @property
    def rows_per_step(self) -> int:
        """Rows of `data.max_tokens` tokens in one optimizer step."""
        return self.batch.tokens_per_step // self.data.max_tokens
