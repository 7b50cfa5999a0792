"""`megatrain bench`: training steps of a shape with random weights and synthetic tokens, beside the plan and two bounds."""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from megatrain.commands.bench.bounds import measure_bounds, release
from megatrain.commands.bench.report import Report, Say, conclude, report_text
from megatrain.commands.bench.shapes import folder_of, structure_of
from megatrain.engine.host.engine import HostEngine
from megatrain.engine.parity_check import token_wise
from megatrain.errors import UserError
from megatrain.machine.machine import Machine, load_machine
from megatrain.machine.probe import probe
from megatrain.optim.adamw import AdamW
from megatrain.planner.choice import Caps, Options, StepSize
from megatrain.planner.model_cost import ModelShape, shape_of_structure
from megatrain.planner.plan import DEVICE_FRACTION, Plan, caps_for, engine_options, plan
from megatrain.planner.report import plan_text
from megatrain.planner.run import available_caps
from megatrain.units import abbreviated, gib

logger = logging.getLogger(__name__)


LEAST_WARMUP = 2
"""The first AdamW update is the first to touch its moments (and may still compile); what that costs shows in the second step."""


def bench(
    shape: str,
    *,
    rows: int,
    tokens: int,
    steps: int = 6,
    warmup: int = 2,
    device: str = "auto",
    device_gib: float | None = None,
    host_gib: float | None = None,
    device_fraction: float | None = None,
    machine_file: str | Path | None = None,
    bounds: bool = True,
    overrides: dict[str, Any] | None = None,
    say: Say = logger.info,
) -> Report:
    """Run steps and measure them. Says what it finds as it goes.

    Args:
        shape: A name of `QWEN3` or `CONFIGS`, or a model folder (its config is used, its weights are not).
        rows, tokens: Of a step: rows of so many tokens.
        steps, warmup: Steps that count, and steps before them, `LEAST_WARMUP` at least.
        device: As for the engine.
        device_gib, host_gib: Caps, to rehearse a smaller machine.
        device_fraction: Share of the device's memory that the plan may fill; None for the usual one.
        machine_file: Figures of the machine instead of a probe.
        bounds: Whether the bounds are measured too.
        overrides: Keyword arguments of `HostEngine` that replace the plan's.
        say: Where text for people goes.

    Raises:
        UserError: The shape is not known.
        PlanRefused: The step does not fit.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder, on_gpu = folder_of(shape, Path(scratch)), _on_gpu(device)
        limits = _Limits(device_gib, host_gib, device_fraction or DEVICE_FRACTION)
        structure = structure_of(folder, torch.bfloat16)
        model = shape_of_structure(structure, shape, token_wise(structure.model.config))  # type: ignore[arg-type]
        machine = load_machine(machine_file) if machine_file else probe(device)
        made = _planned(model, machine, StepSize(rows, tokens), limits, here=machine_file is None)
        if made is not None:
            say(plan_text(made))
        arguments = (engine_options(made) if made else {}) | (overrides or {})
        report = Report(shape, rows, tokens, structure.param_count, device, _plain(arguments))
        arguments |= limits.as_arguments(on_gpu)
        _measure_steps(report, folder, arguments, device, steps, warmup, say)
        if bounds:
            measure_bounds(report, structure, model, made, say)
        conclude(report, model, made, machine, on_gpu)
        say(report_text(report))
        return report


@contextlib.contextmanager
def engine_for(
    shape: str,
    *,
    rows: int,
    tokens: int,
    device: str = "auto",
    device_gib: float | None = None,
    host_gib: float | None = None,
    device_fraction: float | None = None,
    machine_file: str | Path | None = None,
    overrides: dict[str, Any] | None = None,
    say: Say = logger.info,
) -> Iterator[HostEngine]:
    """The engine that `bench` measures, with the same arguments."""
    with tempfile.TemporaryDirectory() as scratch:
        folder, made = folder_of(shape, Path(scratch)), None
        limits = _Limits(device_gib, host_gib, device_fraction or DEVICE_FRACTION)
        if _on_gpu(device):
            machine = load_machine(machine_file) if machine_file else probe(device)
            model = shape_of_structure(structure_of(folder, torch.bfloat16), shape)
            made = _planned(model, machine, StepSize(rows, tokens), limits, here=machine_file is None)
        if made is not None:
            say(plan_text(made))
        arguments = (engine_options(made) if made else {}) | (overrides or {})
        arguments |= limits.as_arguments(_on_gpu(device))
        with _engine(folder, device, arguments) as engine:
            yield engine


def random_batch(vocabulary: int, rows: int, tokens: int, step: int) -> dict[str, torch.Tensor]:
    """Rows of random tokens, all of them targets."""
    ids = torch.randint(0, vocabulary, (rows, tokens), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids.clone()}


def _on_gpu(device: str) -> bool:
    return device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())


@dataclass(frozen=True)
class _Limits:
    """What a benchmark may use: caps in GiB, None for all that there is, and a share of the device."""

    device_gib: float | None = None
    host_gib: float | None = None
    device_fraction: float = DEVICE_FRACTION

    def caps(self, machine: Machine, here: bool) -> Caps:
        """In bytes; on this machine no more than is free."""
        given = caps_for(machine, **asdict(self))
        free = available_caps(machine, self.device_fraction) if here else given
        return Caps(min(given.host_bytes, free.host_bytes), min(given.device_bytes, free.device_bytes))

    def as_arguments(self, on_gpu: bool) -> dict[str, Any]:
        """For the engine."""
        caps = {"device_gib": self.device_gib if on_gpu else None, "host_gib": self.host_gib}
        return {name: cap for name, cap in caps.items() if cap}


def _planned(model: ModelShape, machine: Machine, step: StepSize, limits: _Limits, here: bool) -> Plan | None:
    """The plan; None on a machine without a GPU."""
    if machine.device_gib <= 0:
        return None
    return plan(model, machine, step, limits.caps(machine, here), Options(), steps=None)


def _engine(folder: Path, device: str, arguments: dict[str, Any]) -> HostEngine:
    optim = AdamW(learning_rate=1e-5, max_grad_norm=1.0 if arguments.get("gradient_plane", True) else None)
    return HostEngine(folder, device=device, optim=optim, verify="never", **{"init": "random", **arguments})


def _plain(arguments: dict[str, Any]) -> dict[str, Any]:
    """For JSON: tuples of layer numbers as their count is not enough to run it again, so they stay lists."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in arguments.items()}


def _measure_steps(
    report: Report,
    folder: Path,
    arguments: dict[str, Any],
    device: str,
    steps: int,
    warmup: int,
    say: Say,
) -> None:
    if warmup < LEAST_WARMUP:
        say(
            f"warm-up: {LEAST_WARMUP} steps instead of {warmup}, as the first update touches memory under the second step"
        )
        warmup = LEAST_WARMUP
    process = psutil.Process(os.getpid())
    started = time.perf_counter()
    engine = _engine(folder, device, arguments)
    try:
        report.device = str(engine.device)
        say(f"engine made in {time.perf_counter() - started:.1f} s, {abbreviated(report.parameters)} parameters")
        vocabulary = engine.config.get_text_config().vocab_size
        found: list[dict[str, float]] = []
        for step in range(warmup + steps):
            if step == warmup and engine.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(engine.device)
            began = time.perf_counter()
            batch = random_batch(vocabulary, report.rows, report.tokens, step)
            data = time.perf_counter() - began
            result = engine.train_step(batch)
            seconds = {**result.seconds, "data": data}
            seconds["loaded_bytes"], seconds["sent_bytes"] = (
                engine._flows.weights.loaded_bytes,
                engine._flows.gradients.sent_bytes,
            )
            report.host_peak = max(report.host_peak, process.memory_info().rss)
            split = ", ".join(f"{name} {value:.3f}" for name, value in result.seconds.items())
            note = " (warm-up)" if step < warmup else ""
            loss, norm = result.loss or float("nan"), result.grad_norm or float("nan")
            say(f"step {step}{note}: loss {loss:.4f} norm {norm:.3f} [{split}]")
            if step >= warmup:
                found.append(seconds)
        memory = engine.memory()
    finally:
        engine.close()
        del engine
        release()
    report.steps = [seconds["step"] for seconds in found]
    medians = {name: statistics.median(seconds.get(name, 0.0) for seconds in found) for name in found[-1]}
    report.pcie = {"loaded_bytes": medians.pop("loaded_bytes"), "sent_bytes": medians.pop("sent_bytes")}
    report.seconds = medians
    report.device_peak = memory["device_peak"]
    report.tokens_per_second = report.rows * report.tokens / medians["step"]
    say(
        f"median {medians['step']:.3f} s a step, {report.tokens_per_second:,.0f} tokens/s, "
        f"peak HBM {gib(report.device_peak)}, RSS {gib(report.host_peak)}"
    )


GIVEN_OTHERWISE = ("self", "model", "device", "optim", "verify", "disturb")


def engine_overrides(words: Sequence[str]) -> dict[str, Any]:
    """`NAME=VALUE` words as keyword arguments of `HostEngine`; a value is JSON, or a plain word.

    Raises:
        UserError: The engine has no such argument, it is given otherwise, or the value is of another kind.
    """
    parameters = inspect.signature(HostEngine.__init__).parameters
    known = {name: str(given.annotation) for name, given in parameters.items() if name not in GIVEN_OTHERWISE}
    found: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if name not in known or not equals:
            raise UserError(f"{word!r} is no NAME=VALUE of HostEngine", "--option", f"names are {', '.join(known)}")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        if known[name].startswith(("int", "float", "bool")) and isinstance(value, str | list | dict):
            raise UserError(f"{name} should be {known[name].replace('None', 'null')}, found {text!r}", "--option")
        found[name] = [value] if known[name].startswith("Collection") and isinstance(value, int) else value
    return found
