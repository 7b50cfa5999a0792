"""Checks of a run that take a second: paths, folders, and settings that cannot work.

    preflight   a run: its folder, the checkpoint it resumes from, model and data files, optimizer, device, schedule
    open_model  the files of the model: config and tokenizer

Every check adds its problems to one list. Nothing is tokenised, built or compared here; see prepare.py for that.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.checkpoint.reader import check_model_folder, saved_extra
from megatrain.config.schema import ChangeName, ParallelConfig, RunConfig
from megatrain.data.load import check_row_length
from megatrain.data.render import read_template
from megatrain.data.sources import find_files
from megatrain.engine.mesh import launch
from megatrain.engine.plan import MOST_THREADS, device_of
from megatrain.errors import Problems, UserError
from megatrain.metrics.trackers import missing_trackers
from megatrain.models.build import find_model_folder, known_positions, load_model_config
from megatrain.models.folder import offline, refuse_unsafe_folder
from megatrain.optim.configured import optimizer
from megatrain.optim.schedule import Schedule, whole_steps
from megatrain.run.folder import RunFolder, nearest_existing
from megatrain.run.resume import Start, Steps, refuse_known_changes
from megatrain.units import counted

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class ModelFiles:
    """A model folder whose small files could be read.

    Attributes:
        folder: The local folder behind `model.path`.
        config: The model's config.
        tokenizer: The Hugging Face tokenizer.
    """

    folder: Path
    config: PreTrainedConfig
    tokenizer: Any

    @property
    def vocab_size(self) -> int:
        """Rows of the model's embedding."""
        return self.config.get_text_config().vocab_size

    @property
    def positions(self) -> int | None:
        """Longest row that the model has positions for; None: no limit."""
        return known_positions(self.config)


def preflight(
    run: RunConfig, problems: Problems, *, resume: str | None, allowed: Collection[ChangeName]
) -> tuple[Start, ModelFiles | None]:
    """Run every fast check; what is wrong goes into `problems`. Returns the run's start and the model's files."""
    start, folder = Start(), Path(run.run.dir)
    with problems.collect():
        if (checkpoint := RunFolder(folder).resume_point(resume)) is not None:
            start = Start(checkpoint, saved_extra(checkpoint))
    with problems.collect():
        if not folder.is_file():  # `resume_point` reports a file
            refuse_unwritable(folder, "set run.dir to another place")
    with problems.collect():
        optimizer(run)
    with problems.collect():
        device_of(run.run.device)
    if run.run.threads is not None and run.run.threads > MOST_THREADS:
        what = f"{run.run.threads} threads are more than the {MOST_THREADS} that this machine can use"
        problems.found.append(UserError(what, "run.threads", "leave it out to use the cores of the process"))
    if launch.rank() == 0:  # which alone writes to trackers
        problems.found += missing_trackers(run.metrics.trackers)
    if run.engine == "host":
        for name in ParallelConfig.model_fields:
            if getattr(run.parallel, name) != getattr(ParallelConfig(), name):
                what, remedy = "is a setting of the mesh engine", "set engine: mesh, or leave it out"
                problems.found.append(UserError(what, f"parallel.{name}", remedy))
    steps = None
    if run.schedule.steps is not None:
        with problems.collect():
            steps = steps_of(run)
    with problems.collect():
        refuse_known_changes(run, start, steps, allowed)
    model = preflight_model(run, problems)
    if model is not None and run.model.init == "pretrained" and start.start_from is None:
        with problems.collect():
            check_model_folder(model.folder)  # the keys of all weight files, against the index if there is one
    preflight_data(run, problems, model)
    return start, model


def preflight_model(run: RunConfig, problems: Problems) -> ModelFiles | None:
    """`open_model`; its error goes into `problems`."""
    with problems.collect():
        return open_model(run)
    return None


def preflight_data(run: RunConfig, problems: Problems, model: ModelFiles | None) -> None:
    """Checks of the data that need no tokenizer: files, template and cache exist, rows fit the model."""
    val = run.data.val.sources or () if run.data.val is not None else ()
    for name, sources in (("data.train", run.data.train), ("data.val.sources", val)):
        for number, source in enumerate(sources):
            with problems.collect():
                find_files(source.path, f"{name}[{number}].path", subset=source.subset, split=source.split)
    if run.data.chat_template is not None:
        with problems.collect():
            read_template(run.data.chat_template)
    if run.data.cache_dir is not None and not (cache := Path(run.data.cache_dir).expanduser()).is_dir():
        with problems.collect():  # an existing cache need not be writable
            refuse_unwritable(cache, "set data.cache_dir to another place")
    if model is not None:
        with problems.collect():
            check_row_length(run.data.max_tokens, model.positions)


def open_model(run: RunConfig) -> ModelFiles:
    """Config and tokenizer of a run's model.

    Raises:
        UserError: There is no such model, or it has no usable tokenizer.
    """
    folder = find_model_folder(run.model.path)
    config = load_model_config(folder, run.model.trust_remote_code)
    return ModelFiles(folder, config, load_tokenizer(folder, run.model.trust_remote_code))


def load_tokenizer(folder: Path, trust_remote_code: bool) -> Any:
    """The tokenizer in a model folder.

    Raises:
        UserError: The folder has none, or it cannot be read.
    """
    from transformers import AutoTokenizer

    refuse_unsafe_folder(folder, trust_remote_code)
    try:
        with offline():
            found = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
        if found.chat_template is not None and not isinstance(found.chat_template, str | dict):
            raise TypeError(f"its chat template is a {type(found.chat_template).__name__}")
        return found
    except Exception as error:  # files of somebody else; the tokenizers library raises nothing more specific
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"has no usable tokenizer: {reason}",
            str(folder),
            "put the tokenizer's files (tokenizer.json, ...) into the folder",
        ) from error


def steps_of(run: RunConfig, steps_per_epoch: int | None = None) -> Steps:
    """Length and learning rates of a run.

    Args:
        run: The config.
        steps_per_epoch: Counted after packing; None where the config gives the number of steps.

    Raises:
        UserError: The warm-up does not fit.
    """
    section = run.schedule
    assert steps_per_epoch is not None or section.steps is not None, "a length in epochs needs the data"
    total = section.total_steps(steps_per_epoch or 0)
    # A share is less than the whole, and only rounding makes it all of a short run; a trial run of one step must work.
    share = whole_steps(section.warmup_ratio, total) if section.warmup_ratio else 0
    warmup = min(share, total - 1) if section.warmup_ratio else section.warmup_steps or 0
    if warmup >= total:
        raise UserError(
            f"a warm-up of {counted(warmup, 'step')} does not fit into a run of {total}"
            + (f" ({steps_per_epoch} per epoch)" if steps_per_epoch is not None else ""),
            "schedule.warmup_steps",
            "shorten the warm-up, or train longer (schedule.epochs, schedule.steps) or in smaller steps "
            "(batch.tokens_per_step)",
        )
    schedule = Schedule(section.kind, total, warmup, section.min_lr_ratio, section.decay_ratio)
    return Steps(total, warmup, lambda step: run.optim.learning_rate * schedule.lr_factor(step))


def refuse_unwritable(folder: Path, remedy: str) -> None:
    """Raise if a folder cannot be created or written to.

    Raises:
        UserError: Names the folder, or the nearest existing one above it.
    """
    place = nearest_existing(folder)
    if not place.is_dir():
        raise UserError("is a file, not a folder", str(place), remedy)
    if not os.access(place, os.W_OK):
        raise UserError("is not writable", str(place), remedy)
