"""`megatrain bench`: training steps of a shape with random weights and tokens, compared with the plan and with two bounds.

[Note: formulas]
model FLOPs   3 x (products + causal attention of a forward), counted from the layer's code, without recompute
MFU           model FLOPs / (seconds x matrix peak measured on this machine)
recompute     FLOPs of forwards that are computed again
PCIe          bytes of weights and gradients moved / seconds; share: of the measured rate of both directions together
overlap       1 - (step - policy bound) / (seconds that copies and CPU AdamW would take alone), between 0 and 1
other stall   step - policy bound - waits for AdamW and slabs: waits for copies, launches, the GPU's own AdamW
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from megatrain.commands.bench.bounds import Bounds, release
from megatrain.commands.bench.shapes import folder_of, structure_of
from megatrain.engine.host.engine import HostEngine
from megatrain.engine.parity_check import token_wise
from megatrain.engine.plan import ExecutionPlan
from megatrain.errors import UserError
from megatrain.machine.machine import Machine, load_machine
from megatrain.machine.probe import probe
from megatrain.optim.adamw import AdamW
from megatrain.planner.model_cost import ModelShape, shape_of_structure
from megatrain.planner.plan import Caps, Plan, StepSize
from megatrain.planner.report import plan_text
from megatrain.planner.run import DEVICE_FRACTION, available_caps, caps_for, plan_step
from megatrain.planner.timeline import recomputed_flops
from megatrain.units import abbreviated, gib

logger = logging.getLogger(__name__)

Say = Callable[[str], None]
"""Takes a line of text."""
LEAST_WARMUP = 2
"""The first AdamW update touches its moments for the first time (and may compile), which shows in the second step."""


@dataclass
class Report:
    """The result of a benchmark; its fields are the JSON.

    Attributes:
        model, rows, tokens, parameters, device: The work.
        options: The plan that was followed.
        seconds: Median seconds of a step by part: `step`; in it `forward`, `head`, `backward` (device time, stalls included),
            `update_wait`, `slab_wait`, `other_stall`; and `data` beside it.
        tokens_per_second: Tokens of the rows; all but one of a row are targets.
        tflops, mfu, recompute_tflops: See [Note: formulas]; None without a GPU.
        pcie: Bytes per step and GB/s each way, share of the measured link, overlap.
        device_peak, host_peak: Bytes; the host's is the process's resident set size.
        bound, policy_bound: Seconds. See [Note: the bounds] in bounds.py.
        plan: Prediction and measurement.
        steps: Seconds of every step.
    """

    model: str
    rows: int
    tokens: int
    parameters: int
    device: str
    options: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    tokens_per_second: float = 0.0
    tflops: float | None = None
    mfu: float | None = None
    recompute_tflops: float | None = None
    pcie: dict[str, float] = field(default_factory=dict)
    device_peak: int = 0
    host_peak: int = 0
    bound: float | None = None
    policy_bound: float | None = None
    plan: dict[str, Any] | None = None
    steps: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Work:
    """Steps of a shape on this machine, and limits and overrides of their plan.

    Attributes:
        shape: A name of `QWEN3` or `CONFIGS`, or a model folder (only its config is used).
        rows, tokens: Rows of a step, and tokens of a row.
        device: `auto`, `cpu`, `cuda`, `cuda:1`.
        device_gib, host_gib: Memory limits, to simulate a smaller machine.
        device_fraction: Share of the device's memory that the plan may fill.
        machine_file: Figures of the machine instead of a probe.
        overrides: Fields of `ExecutionPlan` that replace the plan's.
        say: Takes lines of text.
    """

    shape: str
    rows: int
    tokens: int
    device: str = "auto"
    device_gib: float | None = None
    host_gib: float | None = None
    device_fraction: float = DEVICE_FRACTION
    machine_file: str | Path | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    say: Say = logger.info

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda") or (self.device == "auto" and torch.cuda.is_available())

    def machine(self) -> Machine | None:
        """The machine to plan for; None on a CPU without a machine file."""
        if self.machine_file is not None:
            return load_machine(self.machine_file)
        return probe(self.device) if self.on_gpu else None

    def planned(self, model: ModelShape, machine: Machine | None) -> Plan | None:
        """The plan, or None without a GPU to plan for.

        Raises:
            PlanRefused: The step does not fit.
        """
        if machine is None or machine.device_gib <= 0:
            return None
        fraction = self.device_fraction
        caps = caps_for(machine, host_gib=self.host_gib, device_gib=self.device_gib, device_fraction=fraction)
        if self.machine_file is None:
            free = available_caps(machine, fraction)
            caps = Caps(min(caps.host_bytes, free.host_bytes), min(caps.device_bytes, free.device_bytes))
        made = plan_step(model, machine, StepSize(self.rows, self.tokens), caps)
        self.say(plan_text(made))
        return made

    def followed(self, made: Plan | None) -> ExecutionPlan:
        """The plan that the engine follows: limits and overrides applied."""
        plan = replace(made.execution if made else ExecutionPlan(), **self.overrides)
        return replace(
            plan,
            device_gib=plan.device_gib or (self.device_gib if self.on_gpu else None),
            host_gib=plan.host_gib or self.host_gib,
        )

    def engine(self, folder: Path, plan: ExecutionPlan, init: Literal["random", "empty"] = "random") -> HostEngine:
        optim = AdamW(learning_rate=1e-5, max_grad_norm=1.0 if plan.gradient_plane else None)
        return HostEngine(folder, plan, device=self.device, optim=optim, verify="never", init=init)


def bench(work: Work, *, steps: int = 6, warmup: int = 2, bounds: bool = True) -> Report:
    """Run steps and measure them; prints results as they come.

    Args:
        work: The steps.
        steps, warmup: Measured steps, and steps before them, `LEAST_WARMUP` at least.
        bounds: Whether to measure the bounds.

    Raises:
        UserError: The shape is unknown.
        PlanRefused: The step does not fit.
    """
    say = work.say
    with tempfile.TemporaryDirectory() as scratch:
        folder = folder_of(work.shape, Path(scratch))
        structure = structure_of(folder, torch.bfloat16)
        model = shape_of_structure(structure, work.shape, token_wise(structure.model.config))  # type: ignore[arg-type]
        machine = work.machine()
        made = work.planned(model, machine)
        followed = work.followed(made)
        report = Report(work.shape, work.rows, work.tokens, structure.param_count, work.device, followed.as_dict())
        _measure_steps(report, work, folder, followed, steps, warmup)
        if bounds:
            device = torch.device(report.device)
            found = Bounds(structure, model, work.rows, work.tokens, device, followed, made, say)
            found.measure()
            report.bound, report.policy_bound = found.bound, found.policy_bound
        _conclude(report, model, made, machine if work.on_gpu else None)
        say(report_text(report))
        return report


@contextlib.contextmanager
def engine_for(work: Work, init: Literal["random", "empty"] = "random") -> Iterator[HostEngine]:
    """The engine that `bench` measures. `empty` leaves the weights to a checkpoint that is loaded next."""
    with tempfile.TemporaryDirectory() as scratch:
        folder, machine = folder_of(work.shape, Path(scratch)), work.machine()
        made = None
        if machine is not None:
            structure = structure_of(folder, torch.bfloat16)
            places = token_wise(structure.model.config)  # type: ignore[arg-type]
            made = work.planned(shape_of_structure(structure, work.shape, places), machine)
        with work.engine(folder, work.followed(made), init) as engine:
            yield engine


def random_batch(vocabulary: int, rows: int, tokens: int, step: int) -> dict[str, torch.Tensor]:
    """Rows of random tokens, all of them targets."""
    ids_BT = torch.randint(0, vocabulary, (rows, tokens), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids_BT, "labels": ids_BT.clone()}


def _measure_steps(report: Report, work: Work, folder: Path, followed: ExecutionPlan, steps: int, warmup: int) -> None:
    say = work.say
    if warmup < LEAST_WARMUP:
        say(
            f"warm-up: {LEAST_WARMUP} steps instead of {warmup}: the first update touches its memory in the second step"
        )
        warmup = LEAST_WARMUP
    process = psutil.Process(os.getpid())
    started = time.perf_counter()
    engine = work.engine(folder, followed)
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
            counters = engine.counters()
            moved = {"loaded_bytes": counters["weight_bytes"], "sent_bytes": counters["gradient_bytes"]}
            report.host_peak = max(report.host_peak, process.memory_info().rss)
            split = ", ".join(f"{name} {value:.3f}" for name, value in result.seconds.items())
            note = " (warm-up)" if step < warmup else ""
            loss, norm = result.loss or float("nan"), result.grad_norm or float("nan")
            say(f"step {step}{note}: loss {loss:.4f} norm {norm:.3f} [{split}]")
            if step >= warmup:
                found.append({**result.seconds, "data": data, **{name: float(size) for name, size in moved.items()}})
        memory = engine.memory()
    finally:
        engine.close()
        del engine
        release()
    report.steps = [one["step"] for one in found]
    medians = {name: statistics.median(one.get(name, 0.0) for one in found) for name in found[-1]}
    report.pcie = {name: medians.pop(name) for name in ("loaded_bytes", "sent_bytes")}
    report.seconds = medians
    report.device_peak = memory["device_peak"]
    report.tokens_per_second = report.rows * report.tokens / medians["step"]
    say(
        f"median {medians['step']:.3f} s a step, {report.tokens_per_second:,.0f} tokens/s, "
        f"peak HBM {gib(report.device_peak)}, RSS {gib(report.host_peak)}"
    )


def _conclude(report: Report, model: ModelShape, made: Plan | None, machine: Machine | None) -> None:
    """Derive figures from the measurements; `machine` is None on a CPU. See [Note: formulas]."""
    step = report.seconds["step"]
    tokens = report.rows * report.tokens
    if report.policy_bound is not None:
        waits = report.seconds.get("update_wait", 0.0) + report.seconds.get("slab_wait", 0.0)
        report.seconds["other_stall"] = max(0.0, step - report.policy_bound - waits)
    if machine is not None:
        report.tflops = 3 * model.forward_flops(report.tokens) * tokens / step / 1e12
        report.mfu = report.tflops / machine.matrix_tflops
        moved = report.pcie["loaded_bytes"] + report.pcie["sent_bytes"]
        report.pcie["gbps"] = moved / step / 1e9
        report.pcie["share_of_link"] = report.pcie["gbps"] / (2 * machine.both_gbps)
    if made is None:
        return
    if machine is not None:
        report.recompute_tflops = recomputed_flops(model, made.step, made.choice) * tokens / step / 1e12
        alone = sum(seconds for name, seconds in made.timeline.busy.items() if name != "gpu")
        if report.policy_bound is not None and alone > 0:
            report.pcie["overlap"] = min(1.0, max(0.0, 1 - (step - report.policy_bound) / alone))

    def compared(planned: float, measured: float) -> dict[str, float]:
        return {"planned": planned, "measured": measured, "ratio": measured / planned if planned else 0.0}

    report.plan = {
        "step": compared(made.seconds, step),
        "device_bytes": compared(made.device_bytes, report.device_peak),
        "host_bytes": compared(made.host_bytes, report.host_peak),
        "details": made.as_dict(),
    }


def report_text(report: Report) -> str:
    """The report as lines of text."""
    seconds, pcie, step = report.seconds, report.pcie, report.seconds["step"]
    work = f"{abbreviated(report.parameters)} parameters, {report.rows} x {report.tokens} tokens on {report.device}"
    parts = ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in seconds.items() if name != "step")
    lines = [
        f"{report.model}, {work}",
        f"  {step:.3f} s a step (median of {len(report.steps)}), {report.tokens_per_second:,.0f} tokens/s",
        f"  seconds: {parts}",
    ]
    if report.tflops is not None and report.mfu is not None:
        again = f", and {report.recompute_tflops:.0f} of recompute" if report.recompute_tflops else ""
        lines.append(f"  {report.tflops:.0f} TFLOP/s of the model, MFU {report.mfu:.1%}{again}")
    if "gbps" in pcie:
        overlap = f", {pcie['overlap']:.0%} hidden (with CPU AdamW)" if "overlap" in pcie else ""
        lines.append(
            f"  PCIe: {pcie['loaded_bytes'] / 1e9:.1f} GB in, {pcie['sent_bytes'] / 1e9:.1f} GB out a step, "
            f"{pcie['gbps']:.1f} GB/s, {pcie['share_of_link']:.0%} of the link{overlap}"
        )
    for name, bound in (("bound", report.bound), ("policy bound", report.policy_bound)):
        if bound is not None:
            lines.append(f"  {name} {bound:.3f} s: the step reaches {bound / step:.3f} of it")
    if report.plan is not None:
        lines.append("  plan and measurement:")
        for name, key, text in (
            ("step", "step", lambda s: f"{s:.3f} s"),
            ("device memory", "device_bytes", gib),
            ("host memory", "host_bytes", gib),
        ):
            pair = report.plan[key]
            planned, measured = text(pair["planned"]), text(pair["measured"])
            lines.append(f"    {name:14} planned {planned:>11}, measured {measured:>11} ({pair['ratio'] - 1:+.1%})")
    return "\n".join(lines)


def report_json(report: Report) -> str:
    return json.dumps(asdict(report), indent=1)


def plan_overrides(words: Sequence[str]) -> dict[str, Any]:
    """`NAME=VALUE` words as fields of `ExecutionPlan`; a value is JSON or a plain word.

    `activations={"0": "keep"}` names layers, `placement={"head": "device"}` units, `offload_input=[0, 1]` layers.

    Raises:
        UserError: A plan has no such field, or the value is of another kind.
    """
    known = {field.name: str(field.type) for field in fields(ExecutionPlan)}
    found: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if name not in known or not equals:
            raise UserError(f"{word!r} is not NAME=VALUE of ExecutionPlan", "--option", f"names are {', '.join(known)}")
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
    """Whether a JSON value fits a field with the annotation `kind`; the plan itself checks words."""
    if value is None:
        return "None" in kind
    if isinstance(value, bool):
        return "bool" in kind
    if isinstance(value, int | float):
        return "float" in kind or ("int" in kind.split(" | ") and isinstance(value, int))
    names = {str: ("Literal", "Place", "Policy"), dict: ("Mapping",), list: ("frozenset",)}
    return any(name in kind for name in names[type(value)])
