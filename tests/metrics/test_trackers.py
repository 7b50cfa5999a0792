"""Trackers get the numbers when configured, and can neither stop nor block a run."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ruamel.yaml import YAML

import tiny_run
from megatrain.commands.main import main
from megatrain.metrics import trackers
from megatrain.metrics.record import Link, PipelineRecord, read_records
from megatrain.metrics.trackers import Trackers, numbers_of
from step_records import record


class Memory:
    """A service that keeps what it gets; faults on request."""

    made: list[Memory]

    def __init__(self, folder: Path, project: str, config: Mapping[str, Any]):
        self.place, self.config = (folder.name, project), config
        self.steps: list[tuple[int, dict[str, float]]] = []
        self.closed = False
        Memory.made.append(self)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.steps.append((step, dict(values)))

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def _services(monkeypatch: pytest.MonkeyPatch) -> None:
    Memory.made = []
    monkeypatch.setattr(trackers, "SERVICES", dict(trackers.SERVICES))
    monkeypatch.setattr(trackers, "PACKAGES", dict(trackers.PACKAGES))


def use(name: str, service: Any) -> None:
    trackers.SERVICES[name] = service


def test_a_service_gets_every_step_in_order(tmp_path: Path) -> None:
    use("trackio", Memory)
    warnings: list[str] = []
    with Trackers(["trackio"], tmp_path / "run7", "mine", {"a": 1}, warnings.append) as services:
        for step in range(50):
            services.write(record(step))
    (service,) = Memory.made
    assert [step for step, _ in service.steps] == list(range(50))
    assert service.place == ("run7", "mine")
    assert service.config == {"a": 1}
    assert service.closed
    assert warnings == []


def test_only_known_numbers_are_sent() -> None:
    found = numbers_of(record(3, val_loss=2.25, grad_norm=None))
    assert found["train/loss"] == 2.5
    assert found["val/loss"] == 2.25
    assert found["speed/trained_tokens_per_s"] == 1500.0
    assert found["split/forward_s"] == 0.5
    assert "train/grad_norm" not in found
    assert numbers_of(record(0, loss=None, val_loss=3.0)) == {"val/loss": 3.0}


def test_pipeline_figures_are_sent() -> None:
    link = Link(bytes=1, busy_s=1.0, gbps=40.0)
    pipeline = PipelineRecord(computed_s=1.5, waited_s={"weights": 0.25}, h2d=link, overlap=0.9)
    found = {
        name: value for name, value in numbers_of(record(3, pipeline=pipeline)).items() if name.startswith("pipeline/")
    }
    assert found == {
        "pipeline/computed_s": 1.5,
        "pipeline/waited_weights_s": 0.25,
        "pipeline/h2d_gbps": 40.0,
        "pipeline/overlap": 0.9,
    }


def broken(*_: object) -> Any:
    raise ConnectionError("no route to the service\nand more")


def leaves(*_: object) -> Any:
    sys.exit(1)  # as a command line tool that asks for a login does


@pytest.mark.parametrize(("service", "reason"), [(broken, "no route to the service;"), (leaves, "1;")])
def test_a_service_that_fails_is_named_and_dropped(tmp_path: Path, service: Any, reason: str) -> None:
    use("wandb", service)
    use("trackio", Memory)
    warnings: list[str] = []
    with Trackers(["wandb", "trackio"], tmp_path, "p", {}, warnings.append) as services:
        services.write(record(1))
    assert len(Memory.made[0].steps) == 1, "the others continue"
    assert warnings == [f"wandb stopped: {reason} the run continues, metrics.jsonl has everything"]


def test_a_service_that_fails_later_gets_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(Memory):
        def log(self, values: Mapping[str, float], step: int) -> None:
            if step == 2:
                raise OSError("quota")
            super().log(values, step)

    waiting: queue.Queue[Any] = queue.Queue()
    monkeypatch.setattr(trackers.queue, "SimpleQueue", lambda: waiting)
    use("wandb", Late)
    warnings: list[str] = []
    with Trackers(["wandb"], tmp_path, "p", {}, warnings.append) as services:
        for step in (1, 2):
            services.write(record(step))
        (thread,) = [one for one in threading.enumerate() if one.name == "tracker wandb"]
        thread.join(5)
        services.write(record(3))
        assert waiting.empty(), "numbers nobody will read are not kept"
    assert [step for step, _ in Memory.made[0].steps] == [1]
    assert len(warnings) == 1


def test_a_service_that_hangs_blocks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    use("wandb", lambda *_: release.wait(30))
    monkeypatch.setattr(trackers, "CLOSE_S", 0.2)
    warnings: list[str] = []
    start = time.monotonic()
    with Trackers(["wandb"], tmp_path, "p", {}, warnings.append) as services:
        for step in range(1000):
            services.write(record(step))
    assert time.monotonic() - start < 10
    assert warnings == ["wandb did not finish in time: its last steps may be missing (metrics.jsonl has them)"]
    release.set()


@pytest.mark.parametrize("command", ["check", "train"])
def test_a_service_that_is_not_installed_is_an_error_before_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """All of them at once, together with the other problems; nothing is loaded, no folder is made."""
    tiny_run.prepare(tmp_path)
    names = ["tensorboard", "wandb", "trackio"]
    YAML().dump(tiny_run.config(tmp_path, metrics={"trackers": names}), tmp_path / "run.yaml")
    for name in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "broken_tracker.py").write_text("raise TypeError('descriptors cannot be created')")
    monkeypatch.syspath_prepend(str(tmp_path))
    trackers.PACKAGES["tensorboard"] = "broken_tracker"
    monkeypatch.setattr("megatrain.models.build.build_meta_model", lambda *_, **__: pytest.fail("a model was built"))
    assert main([command, str(tmp_path / "run.yaml"), "--optim.groups=[]", "--run.threads=99999"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: 4 problems")
    assert "metrics.trackers: tensorboard cannot be imported: descriptors cannot be created" in shown
    for name in ("wandb", "trackio"):
        assert f"metrics.trackers: {name} is not installed" in shown
        assert f"-> pip install 'megatrain[{name}]', or leave {name} out" in shown
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("mode", "login", "given"), [("online", False, "offline"), ("online", True, None), ("disabled", False, None)]
)
def test_wandb_is_never_asked_to_log_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, login: bool, given: str | None
) -> None:
    calls: list[dict[str, Any]] = []
    run = SimpleNamespace(log=lambda values, step: None, finish=lambda: None)

    def init(**words: Any) -> Any:
        calls.append(words)
        return run

    def log_in(*, prompt: bool) -> bool:
        assert prompt is False
        return login

    wandb = SimpleNamespace(init=init, login=log_in, setup=lambda: SimpleNamespace(settings=SimpleNamespace(mode=mode)))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    warnings: list[str] = []
    with Trackers(["wandb"], tmp_path / "run", "p", {"a": 1}, warnings.append) as services:
        services.write(record(1))
    assert warnings == []
    assert calls[0].get("mode") == given
    assert calls[0]["dir"] == str(tmp_path / "run")


def test_a_run_with_a_broken_and_a_working_service_has_all_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_run.prepare(tmp_path)
    YAML().dump(tiny_run.config(tmp_path, metrics={"trackers": ["wandb", "trackio"]}), tmp_path / "run.yaml")
    use("wandb", broken)
    use("trackio", Memory)
    trackers.PACKAGES |= {"wandb": "json", "trackio": "json"}  # installed, as far as the check sees
    assert main(["train", str(tmp_path / "run.yaml")]) == 0
    assert [one.step for one in read_records(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4]
    assert [step for step, _ in Memory.made[0].steps] == [1, 2, 3, 4]
    assert Memory.made[0].config["schedule"]["steps"] == 4
    assert "warning: wandb stopped: no route to the service" in capsys.readouterr().out


def test_tensorboard_writes_event_files(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    warnings: list[str] = []
    with Trackers(["tensorboard"], tmp_path, "p", {}, warnings.append) as services:
        for step in range(1, 4):
            services.write(record(step, loss=5.0 - step))
    assert warnings == []
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 4.0), (2, 3.0), (3, 2.0)]
