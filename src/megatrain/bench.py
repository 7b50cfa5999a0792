"""`megatrain bench`: training steps of a shape with random weights and synthetic tokens, beside the plan and two bounds.

[Note: the bounds]
`bound` is what the same compiled layers and head take when nothing is computed twice, nothing moves and nothing is updated: one
layer of each template group, weights on the device, everything kept, forward and backward of a step's rows, times the group's
layers; plus the head (logits and cross entropy, in the engine's chunks) and the embedding. `policy bound` is the same with each
layer's policy and chunks from the plan, recompute included. Both are measured in the same process, after the engine has given its
memory back. The layer runs back to back, as often as the model has layers, on random numbers: at its power limit a GPU lowers its
clock, so that a short burst, or gradients that are all ones, is a tenth faster than any training step can be.

[Note: formulas]
model FLOPs   3 x (products + causal attention of a forward), counted from the layer's code; recompute is not in it
MFU           model FLOPs / (seconds x matrix peak measured on this machine)
recompute     FLOPs of forwards that are done again, beside it
PCIe          bytes of weights and gradients that moved / seconds; share: of the measured rate both ways together
overlap       1 - (step - policy bound) / (seconds that copies and CPU AdamW would take alone), between 0 and 1
other stall   step - policy bound - waits for AdamW and slabs: waits for copies, launches, the GPU's own AdamW
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils import _pytree as pytree

from megatrain.device.attention import fastest_attention, measured_backends
from megatrain.errors import UserError
from megatrain.executor.engine import HostEngine
from megatrain.executor.gate import token_wise
from megatrain.loss import cross_entropy_sum
from megatrain.machine.machine import Machine, load_machine
from megatrain.machine.probe import device_seconds, probe, sustained_seconds
from megatrain.models.build import build_meta_model, find_model_folder, fp32_parameter_names, load_model_config
from megatrain.models.shell import Shell
from megatrain.models.structure import Structure, take_apart
from megatrain.models.templates import LayerCode, Variant
from megatrain.optim.adamw import AdamW
from megatrain.planner.choice import SELECTIVE_BUDGET, Caps, Options, Policy, StepSize
from megatrain.planner.plan import DEVICE_FRACTION, Plan, caps_for, engine_options, gib, plan
from megatrain.planner.report import plan_text
from megatrain.planner.run import available_caps
from megatrain.planner.shape import ModelShape, shape_of_structure
from megatrain.planner.timeline import recomputed_flops

logger = logging.getLogger(__name__)

QWEN3 = {  # hidden, intermediate, layers, heads, kv heads, tied
    "qwen3-0.6b": (1024, 3072, 28, 16, 8, True),
    "qwen3-1.7b": (2048, 6144, 28, 16, 8, True),
    "qwen3-4b": (2560, 9728, 36, 32, 8, True),
    "qwen3-8b": (4096, 12288, 36, 32, 8, False),
    "qwen3-14b": (5120, 17408, 40, 40, 8, False),
    "qwen3-17b": (5120, 17408, 48, 40, 8, False),
    "qwen3-18b": (5120, 17408, 50, 40, 8, False),
    "qwen3-20b": (5120, 17408, 56, 40, 8, False),
    "qwen3-32b": (5120, 25600, 64, 64, 8, False),
    "tiny": (64, 128, 4, 4, 2, False),
}
QWEN25_7B: dict[str, Any] = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
    "max_position_embeddings": 1 << 20,
    "rope_theta": 1e6,
}
CONFIGS = {"qwen2.5-7b": QWEN25_7B}
"""Named shapes: these by their whole config.json, those of Qwen3 by what differs. 17b, 18b and 20b
are 14b with more layers; tiny is for trying the command out."""

BOUND_TOKENS = 32768
"""Most tokens that a bound computes together."""

Say = Callable[[str], None]


@dataclass
class Report:
    """What a benchmark found; its fields are the JSON.

    Attributes:
        model, rows, tokens, parameters, device: What was run.
        options: The engine's keyword arguments.
        seconds: Median seconds of a step by part: `step`, `data` beside it, and in it `forward`, `head`, `backward` (device
            time, stalls included), `update_wait`, `slab_wait`, `other_stall`.
        tokens_per_second: Tokens of the rows, all of them targets but one a row.
        tflops, mfu, recompute_tflops: See [Note: formulas]; None where there is no GPU.
        pcie: Bytes a step and GB/s each way, share of the measured link, overlap.
        device_peak, host_peak: Bytes; resident set size of the process.
        bound, policy_bound: Seconds. See [Note: the bounds].
        plan: Prediction beside measurement.
        steps: Every step's seconds.
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
        steps, warmup: Steps that count, and steps before them.
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
        folder, on_gpu = _folder_of(shape, Path(scratch)), _on_gpu(device)
        limits = _Limits(device_gib, host_gib, device_fraction or DEVICE_FRACTION)
        structure = _structure(folder, torch.bfloat16)
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
            _measure_bounds(report, structure, model, made, device, say)
        _conclude(report, model, made, machine, on_gpu)
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
        folder, made = _folder_of(shape, Path(scratch)), None
        limits = _Limits(device_gib, host_gib, device_fraction or DEVICE_FRACTION)
        if _on_gpu(device):
            machine = load_machine(machine_file) if machine_file else probe(device)
            model = shape_of_structure(_structure(folder, torch.bfloat16), shape)
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


def _folder_of(shape: str, scratch: Path) -> Path:
    """A folder with the shape's config.json."""
    if shape.lower() in CONFIGS:
        (scratch / "config.json").write_text(json.dumps(CONFIGS[shape.lower()]))
        return scratch
    if shape.lower() not in QWEN3:
        if not Path(shape).exists():
            raise UserError(
                f"no such shape or folder: {shape!r}", "bench", f"names are {', '.join([*QWEN3, *CONFIGS])}"
            )
        return find_model_folder(shape)
    hidden, intermediate, layers, heads, kv_heads, tied = QWEN3[shape.lower()]
    config = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128 if hidden > 64 else 16,
        "vocab_size": 151936 if hidden > 64 else 512,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 1 << 20,
    }
    (scratch / "config.json").write_text(json.dumps(config))
    return scratch


def _structure(folder: Path, dtype: torch.dtype) -> Structure:
    return take_apart(build_meta_model(load_model_config(folder), compute_dtype=dtype))


def _plain(arguments: dict[str, Any]) -> dict[str, Any]:
    """For JSON: tuples of layer numbers as their count is not enough to run it again, so they stay lists."""
    return {name: list(value) if isinstance(value, tuple) else value for name, value in arguments.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Steps


def _measure_steps(
    report: Report,
    folder: Path,
    arguments: dict[str, Any],
    device: str,
    steps: int,
    warmup: int,
    say: Say,
) -> None:
    process = psutil.Process(os.getpid())
    started = time.perf_counter()
    engine = _engine(folder, device, arguments)
    try:
        report.device = str(engine.device)
        say(f"engine made in {time.perf_counter() - started:.1f} s, {report.parameters / 1e9:.3g} B parameters")
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
        _release()
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


def _release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---------------------------------------------------------------------------------------------------------------------
# Bounds


def _measure_bounds(
    report: Report, structure: Structure, model: ModelShape, made: Plan | None, device: str, say: Say
) -> None:
    """See [Note: the bounds]. Runs out of memory on a full device are said, and leave the bounds out."""
    on = torch.device(report.device)
    try:
        bench_layers = _LayerClock(structure, model, on, report.tokens)
        edges = _edge_seconds(structure, on, report, made)
        say(f"embedding and head: {edges:.3f} s")
        report.bound = edges + _bound_of_layers(bench_layers, model, report, say)
        say(f"bound: {report.bound:.3f} s")
        if made is not None:
            report.policy_bound = edges + _policy_bound_of_layers(bench_layers, model, made, say)
        elif _default_recompute(report):
            report.policy_bound = edges + _recompute_bound(bench_layers, model, report)
        if report.policy_bound is not None:
            say(f"policy bound: {report.policy_bound:.3f} s")
    except torch.OutOfMemoryError as error:
        logger.warning("the bounds were not measured: %s", str(error).splitlines()[0])
    finally:
        _release()


def _default_recompute(report: Report) -> bool:
    return not report.options.get("kept") and not report.options.get("selective")


class _LayerClock:
    """Seconds of a layer of each template group, weights on the device, for given rows and policy.

    Layers of all groups get the arguments of the first layer: same shapes, maybe another mask.
    """

    def __init__(self, structure: Structure, model: ModelShape, device: torch.device, tokens: int):
        self._structure, self._model, self._device, self._tokens = structure, model, device, tokens
        self._dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._buffers = {name: buffer.to(device) for name, buffer in structure.model.named_buffers()}
        self._known: dict[tuple[int, int, Policy], float] = {}
        self._codes: dict[int, LayerCode] = {}
        self._attention = _attention_order(structure, tokens, self._dtype, device)

    def seconds(self, group: int, rows: int, policy: Policy) -> float:
        """Forward and backward of `rows` rows at once, with what the policy computes again."""
        key = (group, rows, policy)
        if key not in self._known:
            with fastest_attention(self._attention):
                self._known[key] = self._measured(group, rows, policy)
            _release()
        return self._known[key]

    def _measured(self, group: int, rows: int, policy: Policy) -> float:
        from megatrain.planner.trace import layer_arguments

        index = self._model.groups.index(group)
        unit = self._structure.layers[index]
        code = self._code(group, index)
        flat = (torch.randn(unit.layout.numel, device=self._device) * 0.02).to(self._dtype)
        weights = {name: view.requires_grad_() for name, view in unit.layout.views(flat).items()}
        bound = {**weights, **self._layer_buffers(unit.prefix)}
        ids = torch.zeros((rows, self._tokens), dtype=torch.int64, device=self._device)
        args, kwargs = layer_arguments(self._structure, ids, self._buffers)
        args, kwargs, hidden = _with_random_hidden(args, kwargs, self._dtype)
        random_gradient = torch.randn_like(hidden) * 1e-4

        def once(variant: Variant) -> None:
            outputs = [o for o in pytree.tree_leaves(code(variant, bound, args, kwargs)) if isinstance(o, torch.Tensor)]
            outputs = [o for o in outputs if o.requires_grad]
            gradients = [random_gradient if o.shape == hidden.shape else torch.ones_like(o) for o in outputs]
            torch.autograd.grad(outputs, [hidden, *weights.values()], gradients, allow_unused=True)

        def layer() -> None:
            if policy == "recompute":
                with torch.no_grad():
                    code("forward", bound, args, kwargs)
            once(policy)

        return sustained_seconds(layer, self._device, len(self._model.groups))

    def _code(self, group: int, index: int) -> LayerCode:
        if group not in self._codes:
            module = self._structure.layer_stack()[index]
            compiled = self._device.type == "cuda"
            self._codes[group] = LayerCode(module, f"bound_{group}", compiled, SELECTIVE_BUDGET)
        return self._codes[group]

    def _layer_buffers(self, prefix: str) -> dict[str, torch.Tensor]:
        return {name.removeprefix(prefix): b for name, b in self._buffers.items() if name.startswith(prefix)}


def _with_random_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any], torch.Tensor]:
    """The arguments in the compute type, with random hidden states (the first (B, T, D) floats) that want a gradient."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    hidden = None
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            leaves[i] = leaf.to(dtype)
            if hidden is None and leaf.ndim == 3:
                hidden = leaves[i] = torch.randn_like(leaves[i]).requires_grad_()
    assert hidden is not None, "the layer gets no hidden states"
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    return args, kwargs, hidden


def _bound_of_layers(clock: _LayerClock, model: ModelShape, report: Report, say: Say) -> float:
    """Everything kept, as many rows at once as `BOUND_TOKENS` and the device's memory allow."""
    together = max(1, min(report.rows, BOUND_TOKENS // report.tokens))
    while True:
        try:
            chunks = report.rows / together
            total = 0.0
            for group in sorted(set(model.groups)):
                seconds = clock.seconds(group, together, "keep") * chunks
                say(
                    f"a layer of group {group}, {together} rows together, all kept: {seconds * 1e3:.1f} ms for the step"
                )
                total += seconds * model.groups.count(group)
            return total
        except torch.OutOfMemoryError:
            if together == 1:
                raise
            together //= 2
            logger.warning("the bound does not fit with %d rows together; trying %d", together * 2, together)
            _release()


def _policy_bound_of_layers(clock: _LayerClock, model: ModelShape, made: Plan, say: Say) -> float:
    rows = -(-made.step.rows // made.choice.windows)
    chunk = -(-rows // -(-rows // made.choice.chunk_rows))
    chunks = made.step.rows / chunk
    total = 0.0
    kinds: set[tuple[int, Policy]] = {(model.groups[i], policy) for i, policy in enumerate(made.choice.policies)}
    for group, policy in sorted(kinds):
        seconds = clock.seconds(group, chunk, policy) * chunks
        layers = sum((model.groups[i], p) == (group, policy) for i, p in enumerate(made.choice.policies))
        say(
            f"{layers} layers of group {group}, {chunk} rows together, {policy}: {seconds * 1e3:.1f} ms each for the step"
        )
        total += seconds * layers
    return total


def _recompute_bound(clock: _LayerClock, model: ModelShape, report: Report) -> float:
    together = max(1, min(report.rows, report.options.get("chunk_rows") or BOUND_TOKENS // 2 // report.tokens))
    chunks = report.rows / together
    return sum(clock.seconds(group, together, "recompute") * chunks for group in model.groups)


def _edge_seconds(structure: Structure, device: torch.device, report: Report, made: Plan | None) -> float:
    """Embedding, forward and backward, and the head over all targets, in the engine's token chunks."""
    cuda = device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    buffers = {name: buffer.to(device) for name, buffer in structure.model.named_buffers()}
    fp32 = frozenset(fp32_parameter_names(structure.model, dtype))  # type: ignore[arg-type]
    shell = Shell(structure, buffers, _no_layer, fp32)
    weights = {
        name: (torch.randn(entry.shape, device=device) * 0.02)
        .to(torch.float32 if name in fp32 else dtype)
        .requires_grad_()
        for unit in (structure.embedding, structure.head)
        for entry, (_, name) in zip(unit.layout.entries, unit.full_names(), strict=True)
    }
    config: Any = structure.model.config
    text = config.get_text_config()
    count = report.rows * (report.tokens - 1)
    asked = report.options.get("head_chunk_tokens") or (made.choice.head_chunk_tokens if made else 4096)
    chunk = min(asked, count)
    hidden_ND = torch.randn(chunk, text.hidden_size, device=device, dtype=dtype).requires_grad_()
    labels_N = torch.randint(0, text.vocab_size, (chunk,), device=device)
    entropy = torch.compile(cross_entropy_sum, dynamic=False) if cuda else cross_entropy_sum
    trained = [weights[name] for name in shell.head_names]

    def head() -> None:
        loss = entropy(shell.logits(weights, hidden_ND), labels_N)
        torch.autograd.grad(loss, [hidden_ND, *trained], allow_unused=True)

    table_name = max(structure.embedding.layout.entries, key=lambda entry: entry.numel).name
    ids = torch.randint(0, text.vocab_size, (report.rows, report.tokens), device=device)

    def embedding() -> None:
        found = torch.nn.functional.embedding(ids, weights[table_name])
        torch.autograd.grad(found, weights[table_name], torch.ones_like(found))

    return sustained_seconds(head, device, -(-count // chunk)) * count / chunk + device_seconds(embedding, device)


def _no_layer(*_: Any) -> Any:
    raise AssertionError("the head calls no layer")


def _attention_order(structure: Structure, tokens: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    config: Any = structure.model.config
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if device.type != "cuda" or not isinstance(heads, int):
        return ()
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    return tuple(backend for backend, _ in measured_backends(heads, kv_heads, dim, tokens, dtype, device))


# ---------------------------------------------------------------------------------------------------------------------
# Conclusions


def _conclude(report: Report, model: ModelShape, made: Plan | None, machine: Machine, on_gpu: bool) -> None:
    """Everything that follows from the measurements. See [Note: formulas]."""
    step = report.seconds["step"]
    tokens = report.rows * report.tokens
    if report.policy_bound is not None:
        waits = report.seconds.get("update_wait", 0.0) + report.seconds.get("slab_wait", 0.0)
        report.seconds["other_stall"] = max(0.0, step - report.policy_bound - waits)
    if on_gpu:
        report.tflops = 3 * model.forward_flops(report.tokens) * tokens / step / 1e12
        report.mfu = report.tflops / machine.matrix_tflops
        moved = report.pcie["loaded_bytes"] + report.pcie["sent_bytes"]
        report.pcie["gbps"] = moved / step / 1e9
        report.pcie["share_of_link"] = report.pcie["gbps"] / (2 * machine.both_gbps)
    if made is None:
        return
    flops = recomputed_flops(model, made.step, made.choice)
    if on_gpu:
        report.recompute_tflops = flops * tokens / step / 1e12
        alone = sum(seconds for name, seconds in made.timeline.busy.items() if name != "gpu")
        if report.policy_bound is not None and alone > 0:
            report.pcie["overlap"] = min(1.0, max(0.0, 1 - (step - report.policy_bound) / alone))
    report.plan = {
        "step": _beside(made.seconds, step),
        "device_bytes": _beside(made.device_bytes, report.device_peak),
        "host_bytes": _beside(made.host_bytes, report.host_peak),
        "details": made.as_dict(),
    }


def _beside(planned: float, measured: float) -> dict[str, float]:
    return {"planned": planned, "measured": measured, "ratio": measured / planned if planned else 0.0}


def report_text(report: Report) -> str:
    """The report for people."""
    seconds = report.seconds
    step = seconds["step"]
    lines = [
        f"{report.model}, {report.parameters / 1e9:.3g} B parameters, {report.rows} x {report.tokens} tokens on {report.device}",
        f"  {step:.3f} s a step (median of {len(report.steps)}), {report.tokens_per_second:,.0f} tokens/s",
        "  seconds: "
        + ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in seconds.items() if name != "step"),
    ]
    if report.tflops is not None and report.mfu is not None:
        again = f", and {report.recompute_tflops:.0f} of recompute" if report.recompute_tflops else ""
        lines.append(f"  {report.tflops:.0f} TFLOP/s of the model, MFU {report.mfu:.1%}{again}")
    if "gbps" in report.pcie:
        overlap = f", {report.pcie['overlap']:.0%} hidden (with CPU AdamW)" if "overlap" in report.pcie else ""
        lines.append(
            f"  PCIe: {report.pcie['loaded_bytes'] / 1e9:.1f} GB in, {report.pcie['sent_bytes'] / 1e9:.1f} GB out a step, "
            f"{report.pcie['gbps']:.1f} GB/s, {report.pcie['share_of_link']:.0%} of the link{overlap}"
        )
    for name, bound in (("bound", report.bound), ("policy bound", report.policy_bound)):
        if bound is not None:
            lines.append(f"  {name} {bound:.3f} s: the step reaches {bound / step:.3f} of it")
    if report.plan is not None:
        lines.append("  plan against measurement:")
        lines.append(_comparison("step", report.plan["step"], lambda s: f"{s:.3f} s"))
        for name in ("device_bytes", "host_bytes"):
            lines.append(_comparison(name.removesuffix("_bytes") + " memory", report.plan[name], gib))
    return "\n".join(lines)


def _comparison(name: str, pair: dict[str, float], text: Callable[[float], str]) -> str:
    return f"    {name:14} planned {text(pair['planned']):>11}, measured {text(pair['measured']):>11} ({pair['ratio'] - 1:+.1%})"


def engine_overrides(words: Sequence[str]) -> dict[str, Any]:
    """`NAME=VALUE` words as keyword arguments of `HostEngine`; a value is JSON, or a plain word.

    Raises:
        UserError: The engine has no such argument.
    """
    known = inspect.signature(HostEngine.__init__).parameters
    found: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if name not in known or not equals:
            raise UserError(f"{word!r} is no NAME=VALUE of HostEngine", "--option", f"names are {', '.join(known)}")
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text
    return found


def report_json(report: Report) -> str:
    return json.dumps(asdict(report), indent=1)
