"""`megatrain bench`: training steps of a shape with random weights and synthetic tokens, beside the plan and two bounds."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from megatrain.commands.bench.bounds import measure_bounds, release
from megatrain.commands.bench.report import Report, Say, conclude, report_text
from megatrain.commands.bench.shapes import folder_of, structure_of
from megatrain.engine.host.engine import HostEngine
from megatrain.engine.parity_check import token_wise
from megatrain.engine.plan import ExecutionPlan
from megatrain.errors import UserError
from megatrain.machine.machine import Machine, load_machine
from megatrain.machine.probe import probe
from megatrain.optim.adamw import AdamW
from megatrain.planner.choice import Caps, Options, StepSize
from megatrain.planner.model_cost import ModelShape, shape_of_structure
from megatrain.planner.plan import DEVICE_FRACTION, Plan, caps_for, plan
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
    overrides: Mapping[str, Any] | None = None,
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
        overrides: Fields of `ExecutionPlan` that replace the plan's.
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
        followed = limits.applied_to(_followed(made, overrides), on_gpu)
        report = Report(shape, rows, tokens, structure.param_count, device, followed.as_dict())
        _measure_steps(report, folder, followed, device, steps, warmup, say)
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
    overrides: Mapping[str, Any] | None = None,
    init: Literal["random", "empty"] = "random",
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
        with _engine(folder, device, limits.applied_to(_followed(made, overrides), _on_gpu(device)), init) as engine:
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

    def applied_to(self, plan: ExecutionPlan, on_gpu: bool) -> ExecutionPlan:
        """The plan with these caps, where it has none."""
        return replace(
            plan,
            device_gib=plan.device_gib or (self.device_gib if on_gpu else None),
            host_gib=plan.host_gib or self.host_gib,
        )


def _planned(model: ModelShape, machine: Machine, step: StepSize, limits: _Limits, here: bool) -> Plan | None:
    """The plan; None on a machine without a GPU."""
    if machine.device_gib <= 0:
        return None
    return plan(model, machine, step, limits.caps(machine, here), Options(), steps=None)


def _followed(made: Plan | None, overrides: Mapping[str, Any] | None) -> ExecutionPlan:
    """What the engine follows: the plan if there is one, with some fields replaced."""
    return replace(made.execution if made else ExecutionPlan(), **(overrides or {}))


def _engine(folder: Path, device: str, plan: ExecutionPlan, init: Literal["random", "empty"] = "random") -> HostEngine:
    optim = AdamW(learning_rate=1e-5, max_grad_norm=1.0 if plan.gradient_plane else None)
    return HostEngine(folder, plan, device=device, optim=optim, verify="never", init=init)


def _measure_steps(
    report: Report,
    folder: Path,
    plan: ExecutionPlan,
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
    engine = _engine(folder, device, plan)
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
            counters = engine.counters()
            seconds["loaded_bytes"] = float(counters["weight_bytes"])
            seconds["sent_bytes"] = float(counters["gradient_bytes"])
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


def plan_overrides(words: Sequence[str]) -> dict[str, Any]:
    """`NAME=VALUE` words as fields of `ExecutionPlan`; a value is JSON, or a plain word.

    `activations={"0": "keep"}` names layers, `placement={"head": "device"}` units, `offload_input=[0, 1]` layers.

    Raises:
        UserError: A plan has no such field, or the value is of another kind.
    """
    known = {field.name: str(field.type) for field in fields(ExecutionPlan)}
    found: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if name not in known or not equals:
            raise UserError(f"{word!r} is no NAME=VALUE of ExecutionPlan", "--option", f"names are {', '.join(known)}")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        if not _is_kind(value, known[name]):
            raise UserError(f"{name} should be {known[name].replace('None', 'null')}, found {text!r}", "--option")
        if name == "activations" and isinstance(value, dict):
            value = {int(layer): policy for layer, policy in value.items()}
        found[name] = frozenset(value) if isinstance(value, list) else value
    return found


def _is_kind(value: object, kind: str) -> bool:
    """Whether a JSON value is one of a field whose annotation is `kind`; a plan checks words itself."""
    if value is None:
        return "None" in kind
    if isinstance(value, bool):
        return "bool" in kind
    if isinstance(value, int | float):
        return "float" in kind or ("int" in kind.split(" | ") and isinstance(value, int))
    names = {str: ("Literal", "Place", "Policy"), dict: ("Mapping",), list: ("frozenset",)}
    return any(name in kind for name in names[type(value)])
