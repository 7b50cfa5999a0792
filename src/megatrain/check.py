"""Everything that can be known about a run before it trains: `megatrain check`, and the first thing `train` does.

Model folder, tokenizer, data, schedule, disk and memory are looked at in this order. Each look either succeeds or adds
its problem to the list; what depends on a failed one is left out. All problems are raised together.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatrain import ledger
from megatrain.config.schema import RunConfig
from megatrain.errors import MegatrainError, PlanRefused, UserError
from megatrain.metrics.logger import RunLogger, quiet_libraries
from megatrain.run_folder import RunFolder

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from megatrain.data.loader import StepLoader
    from megatrain.data.rows import PackedRows
    from megatrain.executor.engine import HostEngine
    from megatrain.mesh.denser import Setting
    from megatrain.mesh.engine import MeshEngine
    from megatrain.mesh.layout import Layout
    from megatrain.optim.adamw import AdamW

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """A run whose parts are known to be there and to fit together.

    Attributes:
        run: The config.
        model_folder: The local folder behind `model.path`.
        start_from: The checkpoint to resume from; None for a run from the beginning.
        loader: Training batches.
        val: Held-out rows.
        total_steps: Length of the run in optimizer steps.
        learning_rate_at: Learning rate of a step, 0 the first.
        fingerprint: What decides the order of the data; a resumed run compares it.
    """

    run: RunConfig
    model_folder: Path
    start_from: Path | None
    loader: StepLoader
    val: PackedRows | None
    total_steps: int
    learning_rate_at: Callable[[int], float]
    fingerprint: dict[str, Any]


class Problems:
    """Collects what is wrong, to say it all at once."""

    def __init__(self) -> None:
        self.found: list[MegatrainError] = []

    @contextmanager
    def collect(self) -> Iterator[None]:
        """An error of ours inside the block becomes an entry; the block ends there."""
        try:
            yield
        except MegatrainError as error:
            self.found.append(error)

    def raise_all(self) -> None:
        """Raise one error for everything found, or return if there is nothing.

        Raises:
            PlanRefused: The run does not fit the machine, and nothing else is wrong.
            UserError: Anything else.
        """
        if len(self.found) == 1:
            raise self.found[0]
        if self.found:
            text = "\n".join([f"{len(self.found)} problems", *(_indented(str(error)) for error in self.found)])
            raise PlanRefused(text) if all(isinstance(e, PlanRefused) for e in self.found) else UserError(text)


def check(run: RunConfig, *, resume: str | None = None) -> None:
    """Look at everything that `train` would need, and say what was found.

    Args:
        run: The config; see `load_config`.
        resume: As for `train`.

    Raises:
        UserError, PlanRefused: What would stop `train`, all problems in one error.
    """
    quiet_libraries()
    with RunLogger() as log:
        prepare(run, resume=resume, log=log.info)
        log.info("all checks passed")


def prepare(run: RunConfig, *, resume: str | None, log: Callable[[str], None]) -> Prepared:
    """Check a run and return its parts. Data are tokenised here, or read from the cache; weights are not read.

    Raises:
        UserError, PlanRefused: All problems in one error.
    """
    problems = Problems()
    start_from = None
    with problems.collect():
        start_from = RunFolder(run.run.dir).resume_point(resume)
    with problems.collect():
        _check_folder(run)
    with problems.collect():
        optimizer(run)
    if run.engine == "mesh":
        with problems.collect():
            check_mesh(run)
    model = data = schedule = None
    with problems.collect():
        model = _look_at_model(run, log)
    if model is not None:
        with problems.collect():
            if run.model.init == "pretrained":
                _check_weights(model.folder)
        with problems.collect():
            data = _look_at_data(run, model, log)
        if run.engine == "host":
            with problems.collect():
                _check_memory(run, model, log)
    else:
        _find_data_files(run, problems)
    if data is not None or run.schedule.steps is not None:
        with problems.collect():
            schedule = _look_at_schedule(run, data, log)
    if model is not None and schedule is not None:
        with problems.collect():
            _check_disk(run, model, schedule.total_steps, log)
    problems.raise_all()
    assert model is not None and data is not None and schedule is not None, "a look failed without a problem"
    return Prepared(
        run=run,
        model_folder=model.folder,
        start_from=start_from,
        loader=data.loader,
        val=data.val,
        total_steps=schedule.total_steps,
        learning_rate_at=schedule.learning_rate_at,
        fingerprint=data.fingerprint,
    )


def prepare_eval(run: RunConfig, *, log: Callable[[str], None]) -> tuple[Path, PackedRows]:
    """Check what an evaluation needs, and return the model's folder and the held-out rows.

    Raises:
        UserError, PlanRefused: All problems in one error.
    """
    problems, model, data = Problems(), None, None
    with problems.collect():
        if run.data.val is None:
            raise UserError(
                "is not set: there is nothing to evaluate on", "data.val", "give {fraction: 0.01} or a path"
            )
    with problems.collect():
        model = _look_at_model(run, log)
    if model is not None:
        with problems.collect():
            if run.model.init == "pretrained":
                _check_weights(model.folder)
        with problems.collect():
            data = _look_at_data(run, model, log)
    problems.raise_all()
    assert model is not None, "a look failed without a problem"
    assert data is not None, "a look failed without a problem"
    assert data.val is not None, "data.val is set, but there are no held-out rows"
    return model.folder, data.val


def check_mesh(run: RunConfig) -> Layout:
    """The resolved layout of a run with `engine: mesh`. Needs the model's config and the number of processes, no more.

    Raises:
        UserError: All reasons why it cannot run.
    """
    from megatrain.config.schema import ActivationsConfig, BatchConfig, MemoryConfig, PrecisionConfig, RunSection
    from megatrain.mesh import launch
    from megatrain.mesh.layout import Layout
    from megatrain.models.build import find_model_folder, load_model_config

    problems = Problems()
    sections = [
        ("memory", run.memory, MemoryConfig(), tuple(MemoryConfig.model_fields)),
        ("batch", run.batch, BatchConfig(tokens_per_step=run.batch.tokens_per_step), ("chunk_rows", "windows")),
        ("activations", run.activations, ActivationsConfig(), ("segment", "offload")),
        ("precision", run.precision, PrecisionConfig(), ("grad_transport",)),
        ("run", run.run, RunSection(dir=run.run.dir), ("threads",)),
    ]
    for section, given, default, names in sections:
        for name in names:
            if getattr(given, name) != getattr(default, name):
                problems.found.append(
                    UserError("is a setting of the host engine", f"{section}.{name}", "leave it out with engine: mesh")
                )
    if run.precision.compute_dtype == "fp16":
        problems.found.append(
            UserError("fp16 is not computed by the mesh engine", "precision.compute_dtype", "use bf16 or fp32")
        )
    layout = Layout(**run.parallel.sizes_for(launch.world_size()))
    with problems.collect():
        config = load_model_config(find_model_folder(run.model.path), run.model.trust_remote_code)
        layout = layout.checked(config, launch.world_size(), run.rows_per_step)
        _check_mesh_memory(run, layout, config)
    problems.raise_all()
    return layout


def _check_mesh_memory(run: RunConfig, layout: Layout, config: PreTrainedConfig) -> None:
    """Refuse a layout whose parameters, gradients and moments alone are more than a GPU has; on a CPU nothing is known."""
    import torch

    from megatrain.mesh.memory import memory_problem
    from megatrain.models.build import build_meta_model
    from megatrain.models.structure import take_apart

    device_bytes = _gpu_bytes(run)
    if device_bytes is None:
        return
    meta = build_meta_model(config, compute_dtype=torch.float32, trust_remote_code=run.model.trust_remote_code)
    compute_bytes = 4 if run.precision.compute_dtype == "fp32" else 2
    problem = memory_problem(take_apart(meta), layout, device_bytes, compute_bytes)
    if problem is not None:
        raise UserError(
            f"this layout does not fit: {problem}", "parallel", "`megatrain plan --world N` ranks those that do"
        )


def _gpu_bytes(run: RunConfig) -> int | None:
    """Memory of this process's GPU, without starting to use it; None on a CPU."""
    import torch

    from megatrain.mesh import launch

    if run.run.device == "cpu" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(launch.device_of_rank(run.run.device)).total_memory


def make_engine(
    run: RunConfig, model_folder: Path, *, for_training: bool = True, weights: bool = True, rung: int = 0
) -> HostEngine | MeshEngine:
    """The engine of a run whose parts have been checked. Reads the weights, or makes random ones.

    Args:
        model_folder: The local folder behind `model.path`.
        for_training: False leaves out the memory of gradients.
        weights: False leaves the weights to a checkpoint that is loaded next.
        rung: With engine: mesh, of `mesh_ladder`.
    """
    if run.engine == "mesh":
        return _make_mesh_engine(run, model_folder, weights, rung)
    from megatrain.executor.engine import HostEngine
    from megatrain.optim.adamw import AdamW
    from megatrain.planner.run import planned_options

    planned: dict[str, Any] = {
        # fp16 refuses to do without the plane, although an evaluation never uses it
        "gradient_plane": run.memory.gradient_plane and run.precision.compute_dtype == "fp16",
        "chunk_rows": run.batch.chunk_rows,
        "head_chunk_tokens": run.batch.head_chunk_tokens,
        "compile": run.activations.compile,
        "threads": run.run.threads,
    }
    return HostEngine(
        model_folder,
        device=run.run.device,
        optim=optimizer(run) if for_training else AdamW(max_grad_norm=None),
        compute_dtype=run.precision.compute_dtype,
        grad_transport=run.precision.grad_transport,
        pin=run.memory.pin,
        host_gib=None if run.memory.host_gib == "auto" else run.memory.host_gib,
        device_gib=None if run.memory.device_gib == "auto" else run.memory.device_gib,
        init="empty" if not weights else "random" if run.model.init == "random" else None,
        seed=run.run.seed,
        trust_remote_code=run.model.trust_remote_code,
        attn_implementation=run.model.attn_implementation,
        verify="never",  # `prepare` has verified the family
        **(planned_options(run) if for_training else planned),
    )


def mesh_ladder(run: RunConfig) -> list[Setting]:
    """The configured setting of a run with `engine: mesh` and the denser ones behind it."""
    from megatrain.mesh.denser import ladder

    layout = check_mesh(run)
    splits = layout.pipeline > 1 and layout.kind.splits_backward
    policy = run.activations.policy
    if splits and policy in ("recompute", "selective"):
        logger.warning(
            "activations.policy: %s was asked for; schedule %s keeps all activations instead", policy, layout.schedule
        )
    elif policy == "selective":
        logger.warning("activations.policy: selective was asked for; the mesh engine recomputes whole layers instead")
    return ladder(layout, policy != "keep" and not splits, run.rows_per_step)


def _make_mesh_engine(run: RunConfig, model_folder: Path, weights: bool, rung: int) -> MeshEngine:
    from megatrain.mesh.engine import MeshEngine

    rungs = mesh_ladder(run)
    setting = rungs[min(rung, len(rungs) - 1)]
    if rung > 0:
        logger.warning(
            "the run has run out of memory %d times: it goes on with %s (RUN/denser)", rung, setting.key or "the config"
        )
    compute = run.precision.compute_dtype
    assert compute != "fp16", "refused by check_mesh"
    return MeshEngine(
        model_folder,
        setting.layout,
        device=run.run.device,
        optim=optimizer(run),
        compute_dtype=compute,
        recompute=setting.recompute,
        compile=run.activations.compile,
        init="empty" if not weights else "random" if run.model.init == "random" else None,
        seed=run.run.seed,
        trust_remote_code=run.model.trust_remote_code,
        attn_implementation=run.model.attn_implementation,
    )


def optimizer(run: RunConfig) -> AdamW:
    """The optimizer that the config describes."""
    from megatrain.optim.adamw import AdamW, ParamGroup

    section = run.optim
    return AdamW(
        learning_rate=section.learning_rate,
        betas=section.betas,
        eps=section.eps,
        weight_decay=section.weight_decay,
        max_grad_norm=section.max_grad_norm,
        groups=tuple(ParamGroup(group.pattern, group.weight_decay, group.lr_scale) for group in section.groups),
    )


@dataclass(frozen=True)
class _Model:
    """What is known of a model without its weights."""

    folder: Path
    vocab_size: int
    max_positions: int | None
    shape: ledger.ModelShape
    compute_dtype: ledger.ComputeDtype
    device: Literal["cpu", "cuda"]


@dataclass(frozen=True)
class _Data:
    loader: StepLoader
    val: PackedRows | None
    fingerprint: dict[str, Any]


@dataclass(frozen=True)
class _Schedule:
    total_steps: int
    learning_rate_at: Callable[[int], float]


def _check_folder(run: RunConfig) -> None:
    place = ledger.nearest_existing(Path(run.run.dir))
    if not os.access(place, os.W_OK):
        raise UserError("is not writable", str(place), "set run.dir to another place")


def _look_at_model(run: RunConfig, log: Callable[[str], None]) -> _Model:
    """Config and structure of the model, built without storage."""
    import torch

    from megatrain.executor.gate import verify_family, verify_packing
    from megatrain.executor.settings import compute_dtype_of, device_of
    from megatrain.models.build import build_meta_model, find_model_folder, load_model_config
    from megatrain.models.structure import take_apart
    from megatrain.optim.adamw import unmatched_groups

    folder = find_model_folder(run.model.path)
    config = load_model_config(folder, run.model.trust_remote_code)
    device = device_of(run.run.device)
    dtype = compute_dtype_of(run.precision.compute_dtype, device)
    model = build_meta_model(
        config,
        compute_dtype=dtype,
        attn_implementation=run.model.attn_implementation,
        trust_remote_code=run.model.trust_remote_code,
    )
    structure = take_apart(model)
    if run.engine == "host":
        verify_family(config, trust_remote_code=run.model.trust_remote_code)
    if run.data.packing:
        verify_packing(
            config,
            attn_implementation=run.model.attn_implementation,
            trust_remote_code=run.model.trust_remote_code,
        )
    names = [name for unit in structure.units for _, name in unit.full_names()]
    for group in unmatched_groups(names, optimizer(run)):
        raise UserError(
            f"no parameter matches the pattern {group.pattern!r}", "optim.groups", f"names are like {names[1]}"
        )
    text = config.get_text_config()
    shape = ledger.ModelShape(
        params=sum(unit.layout.numel for unit in structure.units),
        largest_layer=max(unit.layout.numel for unit in structure.layers),
        edges=structure.embedding.layout.numel + structure.head.layout.numel,
        layers=len(structure.layers),
        hidden_size=text.hidden_size,
    )
    short: dict[torch.dtype, ledger.ComputeDtype] = {
        torch.bfloat16: "bf16",
        torch.float16: "fp16",
        torch.float32: "fp32",
    }
    log(
        f"model {folder}: {type(model).__name__}, {_count(structure.param_count)} parameters in {shape.layers} layers; "
        f"computes in {short[dtype]} on {device}, fp32 master weights and moments"
    )
    return _Model(
        folder=folder,
        vocab_size=text.vocab_size,
        max_positions=getattr(text, "max_position_embeddings", None),
        shape=shape,
        compute_dtype=short[dtype],
        device="cuda" if device.type == "cuda" else "cpu",
    )


def _check_weights(folder: Path) -> None:
    """The headers of all weight files, against the index if there is one."""
    from megatrain.models.weights import find_weight_files

    find_weight_files(folder)


def load_tokenizer(folder: Path, trust_remote_code: bool) -> Any:
    """The tokenizer that lies in a model folder.

    Raises:
        UserError: There is none, or it cannot be read.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"has no usable tokenizer: {reason}",
            str(folder),
            "put the tokenizer's files (tokenizer.json, ...) into the folder",
        ) from error


def open_tokenizer(run: RunConfig) -> tuple[Any, int, int | None]:
    """The tokenizer of a run's model, rows of the model's embedding, and the most positions it knows (None: no limit).

    Raises:
        UserError: There is no such model, or it has no usable tokenizer.
    """
    from megatrain.models.build import find_model_folder, load_model_config

    folder = find_model_folder(run.model.path)
    text = load_model_config(folder, run.model.trust_remote_code).get_text_config()
    tokenizer = load_tokenizer(folder, run.model.trust_remote_code)
    return tokenizer, text.vocab_size, getattr(text, "max_position_embeddings", None)


def _look_at_data(run: RunConfig, model: _Model, log: Callable[[str], None]) -> _Data:
    from megatrain.data import load_data
    from megatrain.data.loader import StepLoader

    tokenizer = load_tokenizer(model.folder, run.model.trust_remote_code)
    rows, val = load_data(
        run.data,
        tokenizer,
        vocab_size=model.vocab_size,
        model_max_length=model.max_positions,
        seed=run.run.seed,
        log=log,
    )
    loader = StepLoader(rows, run.rows_per_step, seed=run.run.seed)
    fingerprint = {
        "rows": len(rows),
        "rows_per_epoch": loader.rows_per_epoch,
        "tokens": rows.stats.tokens,
        "max_tokens": run.data.max_tokens,
        "rows_per_step": run.rows_per_step,
        "seed": run.run.seed,
    }
    return _Data(loader, val, fingerprint)


def _find_data_files(run: RunConfig, problems: Problems) -> None:
    """What can be said of the data without a tokenizer: whether they are there."""
    from megatrain.data.sources import find_files

    val = run.data.val.sources or () if run.data.val is not None else ()
    for name, sources in (("data.train", run.data.train), ("data.val.sources", val)):
        for number, source in enumerate(sources):
            with problems.collect():
                find_files(source.path, f"{name}[{number}].path", subset=source.subset, split=source.split)


def _look_at_schedule(run: RunConfig, data: _Data | None, log: Callable[[str], None]) -> _Schedule:
    """Steps per epoch are counted after packing, so that they are the run's real ones.

    Args:
        data: May be missing where the config gives the number of steps.
    """
    from megatrain.optim.schedule import Schedule, whole_steps

    section = run.schedule
    total = section.total_steps(data.loader.steps_per_epoch if data is not None else 0)
    per_epoch = f" ({data.loader.steps_per_epoch} per epoch)" if data is not None else ""
    warmup = whole_steps(section.warmup_ratio, total) if section.warmup_ratio else section.warmup_steps or 0
    if warmup >= total:
        raise UserError(
            f"a warm-up of {warmup} steps does not fit into a run of {total}{per_epoch}",
            "schedule.warmup_ratio" if section.warmup_ratio else "schedule.warmup_steps",
            "shorten the warm-up, or train longer (schedule.epochs, schedule.steps) or in smaller steps "
            "(batch.tokens_per_step)",
        )
    schedule = Schedule(section.kind, total, warmup, section.min_lr_ratio, section.decay_ratio)
    log(
        f"{total} steps of {run.batch.tokens_per_step:,} tokens{per_epoch}; "
        f"{section.kind} schedule, {warmup} steps of warm-up to {run.optim.learning_rate:g}"
    )
    return _Schedule(total, lambda step: run.optim.learning_rate * schedule.lr_factor(step))


def _check_memory(run: RunConfig, model: _Model, log: Callable[[str], None]) -> None:
    """Compare the run with the machine's memory: by the plan on a GPU, by the planes on a CPU. Raises PlanRefused."""
    if model.device == "cuda":
        from megatrain.planner.report import plan_text
        from megatrain.planner.run import plan_run

        log(plan_text(plan_run(run)))
        return
    needed = ledger.memory_ledger(model.shape, run, device=model.device, compute_dtype=model.compute_dtype)
    host_available = ledger.host_available_bytes(run.memory.host_gib)
    log(f"host memory: {ledger.gib(needed.host_bytes)} needed, {ledger.gib(host_available)} available")
    ledger.refuse_if_too_large(needed, host_available=host_available, device_available=None, run=run)


def _check_disk(run: RunConfig, model: _Model, total_steps: int, log: Callable[[str], None]) -> None:
    one, count = ledger.checkpoint_bytes(model.shape), ledger.checkpoints_at_once(run, total_steps)
    log(f"disk: {ledger.gib(one)} a checkpoint, at most {count} at once, in {run.run.dir}")
    ledger.refuse_if_disk_too_small(run, one, count)


def _count(number: int) -> str:
    for scale, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= scale:
            return f"{number / scale:.3g} {letter}"
    return str(number)


def _indented(text: str) -> str:
    return "\n".join(("  - " if number == 0 else "    ") + line for number, line in enumerate(text.splitlines()))
