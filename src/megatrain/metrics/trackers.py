"""Trackers: the numbers of every step to TensorBoard, Weights & Biases or trackio, if configured.

[Note: a tracker may not stop a run]
Each tracker runs in its own daemon thread, fed by a queue. Training puts numbers into the queue and never waits; an error of the
tracker ends that tracker with a warning that names it, and nothing else. At the end of a run the trackers get a few seconds to
empty their queues; one that hangs is left behind with a warning. `metrics.jsonl` has everything in any case.
"""

from __future__ import annotations

import importlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from megatrain.metrics.record import StepRecord

CLOSE_S = 20.0
"""How long the end of a run waits for all its trackers together."""
_GROUPS = {
    "train": ("loss", "grad_norm", "learning_rate", "epoch", "skipped_steps"),
    "val": ("val_loss",),
    "speed": ("processed_tokens_per_s", "trained_tokens_per_s", "step_s", "data_wait_s"),
    "memory": ("host_rss_bytes", "device_peak_bytes"),
}
"""Group of names at a tracker -> fields of a record in it."""
_PIPELINE = ("computed_s", "overlap", "slot_switch_s", "adamw_params_per_s", "adamw_share", "gpu_utilisation")


class Service(Protocol):
    """The client of one tracker, used by one thread only."""

    def log(self, values: Mapping[str, float], step: int) -> None: ...
    def close(self) -> None: ...


class Trackers:
    """The trackers of a run. See [Note: a tracker may not stop a run].

    Args:
        names: Keys of `SERVICES`.
        folder: The run's folder; its name is the run's name at the tracker.
        project: The project at the tracker.
        config: The run's config, as nested plain values.
        warn: Takes warnings, from any thread.
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
            feed.put(values, record.step)

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, *_: object) -> None:
        """Let the trackers finish, for at most `CLOSE_S`."""
        end = time.monotonic() + CLOSE_S
        for feed in self._feeds:
            feed.end()
        for feed in self._feeds:
            if not feed.wait(max(0.0, end - time.monotonic())):
                self._warn(
                    f"{feed.name} did not finish in time: its last steps may be missing (metrics.jsonl has them)"
                )


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


class _Feed:
    """The thread and the queue of one tracker."""

    def __init__(self, name: str, connect: Callable[[], Service], warn: Callable[[str], None]):
        self.name, self._connect, self._warn = name, connect, warn
        self._waiting: queue.SimpleQueue[tuple[dict[str, float], int] | None] = queue.SimpleQueue()
        self._gone = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, values: dict[str, float], step: int) -> None:
        if not self._gone.is_set():  # else the queue of a failed tracker would grow for the rest of the run
            self._waiting.put((values, step))

    def end(self) -> None:
        self._waiting.put(None)

    def wait(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            service = self._connect()
            while (item := self._waiting.get()) is not None:
                service.log(*item)
            service.close()
        except (Exception, SystemExit) as error:  # noqa: BLE001  whatever a tracker raises, the run continues
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            self._warn(f"{self.name} stopped: {reason}; the run continues, metrics.jsonl has everything")
        finally:
            self._gone.set()


def _module(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{error}: pip install 'megatrain[{extra}]'") from error


class _TensorBoard:
    """Event files in `tensorboard/` of the run's folder; nothing is sent anywhere."""

    def __init__(self, folder: Path, project: str, config: Mapping[str, Any]):
        writer = _module("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._writer = writer(log_dir=str(folder / "tensorboard"))

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """Never asks for a login: without a key it runs offline, in `wandb/` of the run's folder."""

    def __init__(self, folder: Path, project: str, config: Mapping[str, Any]):
        wandb = _module("wandb", "wandb")
        known = {"mode": "offline"} if not _wandb_knows_the_user(wandb) else {}
        self._run = wandb.init(project=project, name=folder.name, dir=str(folder), config=dict(config), **known)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def _wandb_knows_the_user(wandb: Any) -> bool:
    """Whether `wandb.init` needs no login prompt."""
    if wandb.setup().settings.mode != "online":
        return True  # the user has chosen a mode
    try:
        return bool(wandb.login(prompt=False))
    except TypeError:  # releases before 0.31 have no `prompt`
        return bool(wandb.api.api_key)


class _Trackio:
    def __init__(self, folder: Path, project: str, config: Mapping[str, Any]):
        self._trackio = _module("trackio", "trackio")
        self._trackio.init(project=project, name=folder.name, config=dict(config))

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._trackio.log(dict(values), step=step)

    def close(self) -> None:
        self._trackio.finish()


SERVICES: dict[str, Callable[[Path, str, Mapping[str, Any]], Service]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "trackio": _Trackio,
}
