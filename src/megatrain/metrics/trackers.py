"""Numbers to services that were asked for: TensorBoard, Weights & Biases, trackio. The run's files never depend on them.

[Note: a service may not stop a run]
Each service lives in a daemon thread of its own, fed by a queue. Training puts numbers into the queue and never waits; what a
service raises ends that service with a warning that names it, and nothing else. At the end of a run each gets a few seconds to
empty its queue; a service that hangs is left behind with a warning. `metrics.jsonl` has everything in any case.
"""

from __future__ import annotations

import importlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from megatrain.metrics.record import StepRecord

CLOSE_S = 20.0
"""How long the end of a run waits for all its services together."""


class Service(Protocol):
    """One service, used by one thread only."""

    def log(self, values: Mapping[str, float], step: int) -> None: ...
    def close(self) -> None: ...


class Trackers:
    """The services of a run. See [Note: a service may not stop a run].

    Args:
        names: Services, each of `SERVICES`.
        folder: The run's folder; its name is the run's name at the service.
        project: The project at the service.
        config: The run's config, as nested plain values.
        warn: Takes a line for people; called from any thread.
    """

    def __init__(
        self, names: Sequence[str], folder: Path, project: str, config: Mapping[str, Any], warn: Callable[[str], None]
    ):
        self._feeds = [_Feed(name, _opener(name, folder, project, config), warn) for name in names]
        self._warn = warn

    def write(self, record: StepRecord) -> None:
        """Hand a step to all services; returns at once."""
        values = numbers_of(record)
        for feed in self._feeds:
            feed.put(values, record.step)

    def close(self) -> None:
        """Let the services finish, for `CLOSE_S` at most."""
        end = time.monotonic() + CLOSE_S
        for feed in self._feeds:
            feed.end()
        for feed in self._feeds:
            if not feed.wait(max(0.0, end - time.monotonic())):
                self._warn(
                    f"{feed.name} did not finish in time; its last steps may be missing there (metrics.jsonl has them)"
                )

    def __enter__(self) -> Trackers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def numbers_of(record: StepRecord) -> dict[str, float]:
    """What a service gets of a step: `train/...`, `val/...`, `speed/...`; what the step does not have is left out."""
    plain = asdict(record)
    groups = {
        "train": ("loss", "grad_norm", "learning_rate", "epoch", "skipped_steps"),
        "val": ("val_loss",),
        "speed": ("processed_tokens_per_s", "trained_tokens_per_s", "step_s", "data_wait_s"),
        "memory": ("host_rss_bytes", "device_peak_bytes"),
    }
    found = {
        f"{group}/{name.removeprefix('val_')}": float(plain[name])
        for group, names in groups.items()
        for name in names
        if plain[name] is not None
    }
    if record.step == 0:  # before the first step there is only a validation
        return {name: value for name, value in found.items() if name.startswith("val/")}
    return found | {f"split/{name}_s": seconds for name, seconds in record.split_s.items()} | _of_pipeline(record)


def _of_pipeline(record: StepRecord) -> dict[str, float]:
    """`pipeline/...`: the figures that are one number each, and the waits."""
    pipeline = record.pipeline
    if pipeline is None:
        return {}
    names = ("computed_s", "overlap", "slot_switch_s", "adamw_params_per_s", "adamw_share", "gpu_utilisation")
    found = {name: getattr(pipeline, name) for name in names}
    found |= {f"waited_{name}_s": seconds for name, seconds in pipeline.waited_s.items()}
    for name, link in (("h2d", pipeline.h2d), ("d2h", pipeline.d2h)):
        found[f"{name}_gbps"] = link.gbps if link is not None else None
    return {f"pipeline/{name}": value for name, value in found.items() if value is not None}


class _Feed:
    """The thread and the queue of one service."""

    def __init__(self, name: str, open_service: Callable[[], Service], warn: Callable[[str], None]):
        self.name, self._open, self._warn = name, open_service, warn
        self._waiting: queue.SimpleQueue[tuple[dict[str, float], int] | None] = queue.SimpleQueue()
        self._gone = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, values: dict[str, float], step: int) -> None:
        if not self._gone.is_set():  # else the queue of a service that failed would grow for the rest of the run
            self._waiting.put((values, step))

    def end(self) -> None:
        self._waiting.put(None)

    def wait(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            service = self._open()
            while (item := self._waiting.get()) is not None:
                service.log(*item)
            service.close()
        except (Exception, SystemExit) as error:  # noqa: BLE001  case 37: whatever a service does, the run goes on
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            self._warn(f"{self.name} gets no more numbers: {reason}; the run goes on, metrics.jsonl has everything")
        finally:
            self._gone.set()


def _opener(name: str, folder: Path, project: str, config: Mapping[str, Any]) -> Callable[[], Service]:
    return lambda: SERVICES[name](folder, project, config)


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
    """Never asks for a login: without a key the run is kept offline, in `wandb/` of the run's folder."""

    def __init__(self, folder: Path, project: str, config: Mapping[str, Any]):
        wandb = _module("wandb", "wandb")
        known = {"mode": "offline"} if not _wandb_knows_the_user(wandb) else {}
        self._run = wandb.init(project=project, name=folder.name, dir=str(folder), config=dict(config), **known)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def _wandb_knows_the_user(wandb: Any) -> bool:
    """Whether `wandb.init` can go on without asking."""
    if wandb.setup().settings.mode != "online":
        return True  # the user has chosen what happens
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
