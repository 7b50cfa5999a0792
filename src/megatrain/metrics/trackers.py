"""Trackers: the numbers of every step to TensorBoard, Weights & Biases or trackio, if configured.

[Note: a tracker may not stop a run]
Each tracker runs in its own daemon thread, fed by a queue. Training puts numbers into the queue and never waits; an error of the
tracker ends that tracker with a warning that names it, and nothing else. At the end of a run the trackers get a few seconds to
empty their queues; one that hangs is left behind with a warning. `metrics.jsonl` has everything in any case.
Before the start it is different: a tracker that was asked for and is not installed is an error (`missing_trackers`), because
nobody reads the warnings of a run that has begun well.
"""

from __future__ import annotations

import importlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatrain.errors import UserError
from megatrain.metrics.record import StepRecord

CLOSE_S = 20.0
"""How long the end of a run waits for all its trackers together."""
_GROUPS = {
    "train": ("loss", "grad_norm", "learning_rate", "epoch", "skipped_steps"),
    "val": ("val_loss",),
    "speed": ("processed_tokens_per_s", "trained_tokens_per_s", "step_s", "data_wait_s"),
    "experts": ("aux_loss", "expert_max_load", "expert_max_share", "expert_idle"),
    "memory": ("host_rss_bytes", "device_peak_bytes"),
}
"""Group of names at a tracker -> fields of a record in it."""
_PIPELINE = ("computed_s", "overlap", "slot_switch_s", "adamw_params_per_s", "adamw_share", "gpu_utilisation")


class Service(NamedTuple):
    """The client of one tracker, used by one thread only."""

    log: Callable[[Mapping[str, float], int], None]  # values, step
    close: Callable[[], None]


class Trackers:
    """The trackers of a run, by keys of `SERVICES`. See [Note: a tracker may not stop a run].

    At the tracker the run has the name of its folder; `warn` is called from any thread.
    """

    def __init__(
        self, names: Sequence[str], folder: Path, project: str, config: Mapping[str, Any], warn: Callable[[str], None]
    ):
        self._feeds = [_Feed(name, lambda make=SERVICES[name]: make(folder, project, config), warn) for name in names]
        self._warn = warn

    def write(self, record: StepRecord) -> None:
        """Hand a step to all trackers. Does not wait for them."""
        values = numbers_of(record)
        for feed in self._feeds:
            if feed.is_alive():  # else the queue of a failed tracker would grow for the rest of the run
                feed.waiting.put((values, record.step))

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, *_: object) -> None:
        """Let the trackers finish, for at most `CLOSE_S`."""
        end = time.monotonic() + CLOSE_S
        for feed in self._feeds:
            feed.waiting.put(None)
        for feed in self._feeds:
            feed.join(max(0.0, end - time.monotonic()))
            if feed.is_alive():
                missing = "its last steps may be missing (metrics.jsonl has them)"
                self._warn(f"{feed.tracker} did not finish in time: {missing}")


def numbers_of(record: StepRecord) -> dict[str, float]:
    """The numbers of a step for a tracker, by `group/name`; figures that the step does not have are left out."""
    found = {
        f"{group}/{name.removeprefix('val_')}": getattr(record, name)
        for group, names in _GROUPS.items()
        for name in names
    }
    if record.step == 0:  # before the first step there is only a validation
        found = {"val/loss": record.val_loss}
    else:
        found |= {f"split/{name}_s": seconds for name, seconds in record.split_s.items()}
        if (pipeline := record.pipeline) is not None:
            found |= {f"pipeline/{name}": getattr(pipeline, name) for name in _PIPELINE}
            found |= {f"pipeline/waited_{name}_s": seconds for name, seconds in pipeline.waited_s.items()}
            links = {"h2d": pipeline.h2d, "d2h": pipeline.d2h}
            found |= {f"pipeline/{name}_gbps": link.gbps for name, link in links.items() if link is not None}
    return {name: float(value) for name, value in found.items() if value is not None}


class _Feed(threading.Thread):
    """The thread and the queue of one tracker; None in the queue ends it."""

    def __init__(self, tracker: str, connect: Callable[[], Service], warn: Callable[[str], None]):
        super().__init__(name=f"tracker {tracker}", daemon=True)
        self.tracker, self._connect, self._warn = tracker, connect, warn
        self.waiting: queue.SimpleQueue[tuple[dict[str, float], int] | None] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        try:
            service = self._connect()
            while (item := self.waiting.get()) is not None:
                service.log(*item)
            service.close()
        except (Exception, SystemExit) as error:  # noqa: BLE001  whatever a tracker raises, the run continues
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            self._warn(f"{self.tracker} stopped: {reason}; the run continues, metrics.jsonl has everything")


PACKAGES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "trackio": "trackio"}
"""Tracker -> the module that it needs. The name of a tracker is also the name of the extra that installs it."""


def missing_trackers(names: Sequence[str]) -> list[UserError]:
    """An error for each tracker that cannot be imported, whatever its import raises."""
    found = []
    for name in names:
        try:
            importlib.import_module(PACKAGES[name])
        except Exception as error:  # noqa: BLE001  a broken installation raises anything
            lines = str(error).strip().splitlines() or [type(error).__name__]
            what = f"{name} is not installed" if isinstance(error, ImportError) else f"{name} cannot be imported"
            remedy = f"pip install 'megatrain[{name}]', or leave {name} out"
            found.append(UserError(f"{what}: {lines[0]}", "metrics.trackers", remedy))
    return found


def _tensorboard(folder: Path, project: str, config: Mapping[str, Any]) -> Service:
    """Event files in `tensorboard/` of the run's folder; nothing is sent anywhere."""
    make = importlib.import_module(PACKAGES["tensorboard"]).SummaryWriter
    writer = make(log_dir=str(folder / "tensorboard"))

    def log(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return Service(log, writer.close)


def _wandb(folder: Path, project: str, config: Mapping[str, Any]) -> Service:
    """Never asks for a login: without a key it runs offline, in `wandb/` of the run's folder."""
    wandb = importlib.import_module(PACKAGES["wandb"])
    known = {"mode": "offline"} if not _wandb_knows_the_user(wandb) else {}
    run = wandb.init(project=project, name=folder.name, dir=str(folder), config=dict(config), **known)
    return Service(lambda values, step: run.log(dict(values), step=step), run.finish)


def _wandb_knows_the_user(wandb: Any) -> bool:
    """Whether `wandb.init` needs no login prompt."""
    if wandb.setup().settings.mode != "online":
        return True  # the user has chosen a mode
    try:
        return bool(wandb.login(prompt=False))
    except TypeError:  # releases before 0.31 have no `prompt`
        return bool(wandb.api.api_key)


def _trackio(folder: Path, project: str, config: Mapping[str, Any]) -> Service:
    trackio = importlib.import_module(PACKAGES["trackio"])
    trackio.init(project=project, name=folder.name, config=dict(config))
    return Service(lambda values, step: trackio.log(dict(values), step=step), trackio.finish)


SERVICES: dict[str, Callable[[Path, str, Mapping[str, Any]], Service]] = {
    "tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio,
}  # fmt: skip
