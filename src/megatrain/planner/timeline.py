"""Seconds of a step: the pipeline of updates, copies and layers, played through unit by unit.

[Note: the rates]
A phase of a layer takes its products at a fraction of the machine's matrix rate, its attention at the measured attention rate,
and its pointwise work as a multiple of the bytes that the layer saves over the device's bandwidth. The fractions and multiples
below were fitted once to Qwen3-8B layers (193 M parameters) at 32 x 1024 tokens on an H200 (forward 18.2 ms without gradients,
20.9 ms keeping all, backward 41.1 ms, 44.3 ms where budget 0.5 recomputes) and to its head (0.188 s for 32 k tokens). What
differs between machines is in `Machine`, what differs between models is in the traced counts.

[Note: the pipeline]
Time 0 is the end of the previous step. Resident units are updated first, on the compute stream. Host units are updated in
forward order by the CPU, under the forward: a layer's copy starts when its update has ended, the copy before it has, and its slot
is free; its forward starts when the copy has ended and the forward before it has. In the backward the copies run the other way,
and a layer's gradient leaves behind its backward; the backward after next waits for that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from megatrain.machine.machine import Machine
from megatrain.planner.choice import Choice, Cut, Options, Policy, StepSize
from megatrain.planner.memory import KEPT_SHARE
from megatrain.planner.model_cost import LayerCost, ModelShape

FORWARD_FRACTION = 0.975
BACKWARD_FRACTION = 0.90
HEAD_FRACTION = 0.82
SHORT_CHUNK_TOKENS = 512
"""A chunk of n tokens reaches n / (n + this) of the rate of a long one."""
PLAIN_TRAFFIC, SAVING_TRAFFIC, BACKWARD_TRAFFIC = 0.8, 3.3, 3.1
"""Bytes moved by pointwise work, in units of what the layer saves: forward without gradients, with, backward."""
REBUILD_TRAFFIC = 5.9
"""The same for what a selective layer computes again, in units of the bytes that it did not keep."""
EAGER_TIME = 1.33
FP32_TIME = 8.0
LAUNCH_S = 0.0006
"""Python and launches of one layer call, forward or backward: what a layer takes at least, per chunk."""
STEP_S = 0.008
"""Batch, embedding, norms, the one synchronisation."""
ADD_SPEEDUP, NORM_SPEEDUP = 2.0, 5.0
"""Adding a slab to a gradient plane, and the sum of squares of a plane, against AdamW's rate."""


@dataclass(frozen=True)
class Timeline:
    """Seconds of a step.

    Attributes:
        step: In all.
        phases: `update_wait` (for AdamW: the forward's stalls behind it, and the residents' own update), `forward`, `head`,
            `backward`, `gradient_sum` (at the end, several windows), `other`; they add up to `step`.
        compute: What the GPU computes, recompute included, without stalls.
        busy: Seconds of work of each worker in a step, whether or not hidden: gpu, cpu adamw, h2d, d2h.
    """

    step: float
    phases: dict[str, float]
    compute: float
    busy: dict[str, float] = field(default_factory=dict)

    @property
    def bottleneck(self) -> str:
        """The worker that the step waits for."""
        stalls = self.step - self.compute
        if stalls < 0.08 * self.step:
            return "gpu: matrix products"
        links = {name: seconds for name, seconds in self.busy.items() if name in ("h2d", "d2h")}
        worker = "cpu adamw" if self.phases["update_wait"] > stalls / 2 else max(links, key=lambda name: links[name])
        return {
            "cpu adamw": "cpu: AdamW on host units (host memory bandwidth)",
            "h2d": "link: weights to the GPU",
            "d2h": "link: gradients to the host",
        }[worker]


@dataclass(frozen=True)
class LayerSeconds:
    """One layer over one window: its forward, and its backward with whatever is computed again before it."""

    forward: float
    backward: float


class Rates(Protocol):
    """What of a machine or a cluster the seconds of a layer depend on; see `Machine`."""

    @property
    def matrix_tflops(self) -> float: ...
    @property
    def device_bandwidth_gbps(self) -> float: ...
    def attention_rate(self, tokens: int) -> float: ...


@dataclass(frozen=True)
class LayerWork:
    """Seconds of a layer's passes over some tokens on one GPU. See [Note: the rates].

    Attributes:
        plain: A forward without gradients.
        saving: A forward that saves what the backward can use.
        backward: With everything saved.
        products: Matrix products of a forward, which is also what they take for the gradients of the weights.
        traffic: Reading or writing everything that the layer saves, once.
        attention, token_wise: Of a forward, the part that is attention, and the one that is its token-wise modules' products.
    """

    plain: float
    saving: float
    backward: float
    products: float
    traffic: float
    attention: float
    token_wise: float


def layer_work(
    cost: LayerCost, row_tokens: int, tokens: int, chunk_tokens: int, rates: Rates, options: Options
) -> LayerWork:
    """Seconds of a layer over `tokens` tokens of rows of `row_tokens`, `chunk_tokens` at a time."""
    slow = (1.0 if options.compiled else EAGER_TIME) * (FP32_TIME if options.compute == "fp32" else 1.0)
    rate = rates.matrix_tflops * 1e12 * chunk_tokens / (chunk_tokens + SHORT_CHUNK_TOKENS) / slow
    products = cost.product_flops.at(row_tokens) * tokens / rate
    # of a forward and backward of 3.5 forwards' worth of work, 1 is the forward and 2.5 the backward
    attention = cost.attention_flops.at(row_tokens) * tokens / rates.attention_rate(row_tokens) * slow
    saved = cost.saved_bytes.at(row_tokens) * tokens * options.compute_bytes / 2
    traffic = saved / (rates.device_bandwidth_gbps * 1e9) * (1.0 if options.compiled else EAGER_TIME)
    return LayerWork(
        plain=products / FORWARD_FRACTION + attention + PLAIN_TRAFFIC * traffic,
        saving=products / FORWARD_FRACTION + attention + SAVING_TRAFFIC * traffic,
        backward=2 * products / BACKWARD_FRACTION + 2.5 * attention + BACKWARD_TRAFFIC * traffic,
        products=products / BACKWARD_FRACTION,
        traffic=traffic,
        attention=attention,
        token_wise=cost.token_wise_flops.at(row_tokens) * tokens / rate / FORWARD_FRACTION,
    )


def layer_seconds(
    shape: ModelShape,
    machine: Machine,
    step: StepSize,
    options: Options,
    cut: Cut,
    layer: int,
    policy: Policy,
    in_chunks: bool = False,
) -> LayerSeconds:
    """See [Note: the rates]. `in_chunks`: the MLP's backward computes each chunk of tokens again, whatever was before."""
    work = layer_work(shape.cost(layer), step.tokens, cut.window_tokens, cut.chunk_tokens, machine, options)
    sums = cut.chunks * shape.layers[layer] * (10 if cut.chunks > 1 else 6) / (machine.device_bandwidth_gbps * 1e9)
    backward = work.backward + sums
    if policy == "recompute":
        backward += work.saving + (work.token_wise if in_chunks else 0.0)
    elif policy == "keep_attention":
        backward += work.saving - work.attention
    elif policy == "keep_mlp":
        backward += work.saving - work.token_wise
    elif policy == "selective":
        backward += REBUILD_TRAFFIC * work.traffic * (1.0 - KEPT_SHARE[policy])
    least = LAUNCH_S * cut.chunks
    again = policy in ("recompute", "keep_attention", "keep_mlp")
    forward = work.plain if again else work.saving
    return LayerSeconds(max(forward, least), max(backward, least * (2 if again else 1)))


def recomputed_flops(shape: ModelShape, step: StepSize, choice: Choice) -> float:
    """FLOPs per token of products and attention that a step computes a second or third time, by the layers' policies."""
    total = 0.0
    for layer, policy in enumerate(choice.policies):
        cost = shape.cost(layer)
        products, attention, token_wise = (
            flops.at(step.tokens) for flops in (cost.product_flops, cost.attention_flops, cost.token_wise_flops)
        )
        third = token_wise if choice.mlp_chunk_tokens is not None else 0.0
        again: dict[Policy, float] = {
            "recompute": products + attention + third, "keep_attention": products, "keep_mlp": products - token_wise + attention
        }  # fmt: skip
        total += again.get(policy, 0.0)
    return total


def head_seconds(shape: ModelShape, machine: Machine, options: Options, cut: Cut) -> float:
    """Forward and backward of the head over one window, with the fp32 sum of its gradient."""
    slow = FP32_TIME if options.compute == "fp32" else 1.0
    rate = (
        machine.matrix_tflops
        * 1e12
        * HEAD_FRACTION
        * cut.head_tokens
        / (cut.head_tokens + SHORT_CHUNK_TOKENS / 4)
        / slow
    )
    products = 6.0 * shape.head_matrix * cut.window_tokens / rate
    sums = (cut.head_chunks if cut.head_chunks > 1 else 0) * shape.head_matrix * 10
    return products + sums / (machine.device_bandwidth_gbps * 1e9) + LAUNCH_S * cut.head_chunks


class _Pipeline:
    """The state of the workers while the step is played through. See [Note: the pipeline]."""

    def __init__(self, shape: ModelShape, machine: Machine, step: StepSize, options: Options, choice: Choice):
        self.shape, self.machine, self.options, self.choice = shape, machine, options, choice
        self.cut = cut = Cut.of(step, choice)
        kinds = {
            (shape.groups[i], policy): layer_seconds(
                shape, machine, step, options, cut, i, policy, choice.mlp_chunk_tokens is not None
            )
            for i, policy in enumerate(choice.policies)
        }
        self.layers = [kinds[shape.groups[i], policy] for i, policy in enumerate(choice.policies)]
        self.head_s = head_seconds(shape, machine, options, cut)
        self.hidden_bytes = cut.window_tokens * shape.hidden * options.compute_bytes
        self.one_way, self.both = machine.h2d_gbps * 1e9, machine.both_gbps * 1e9
        if options.staged:  # a thread copies into the staging buffer at the host's speed
            self.one_way = self.both = min(self.both, machine.host_bandwidth_gbps * 1e9 / 6)
        self.now = 0.0  # the compute stream
        self.h2d_free = self.d2h_free = 0.0
        self.h2d_s = self.d2h_s = self.compute_s = self.adds_end = 0.0
        self.slot_free = [0.0] * options.weight_slots
        self.turn = 0

    def streamed(self, layer: int) -> bool:
        return layer >= self.choice.resident_layers

    def copy_in(self, nbytes: float, after: float, rate: float) -> float:
        """End of a copy to the device that cannot start before `after`."""
        start, seconds = max(after, self.h2d_free), nbytes / rate
        self.h2d_free = start + seconds
        self.h2d_s += seconds
        return self.h2d_free

    def copy_out(self, nbytes: float, after: float, rate: float) -> float:
        start, seconds = max(after, self.d2h_free), nbytes / rate
        self.d2h_free = start + seconds
        self.d2h_s += seconds
        return self.d2h_free

    def compute(self, seconds: float, after: float = 0.0) -> None:
        self.now = max(self.now, after) + seconds
        self.compute_s += seconds

    def forward(self, updated: dict[str, float]) -> None:
        shape, weight = self.shape, self.options.stream_bytes
        for layer in range(shape.depth):
            ready = 0.0
            if self.streamed(layer):
                after = max(updated.get(f"layer.{layer}", 0.0), self.slot_free[self.turn])
                ready = self.copy_in(shape.layers[layer] * weight, after, self.one_way)
            self.compute(self.layers[layer].forward, ready)
            if self.streamed(layer):
                self.slot_free[self.turn] = self.now
                self.turn = (self.turn + 1) % len(self.slot_free)
            if layer < self.choice.offloaded:
                self.copy_out(self.hidden_bytes, self.now, self.both)

    def backward(self) -> None:
        shape, options, choice = self.shape, self.options, self.choice
        visits = list(reversed(range(shape.depth)))
        if options.segment > 1:  # each segment's inner inputs are computed once more
            extra = sum(self.layers[i].forward for i in visits if i % options.segment != options.segment - 1)
            self.compute(extra)
        staging = [0.0, 0.0]
        streamed = [i for i in visits if self.streamed(i)]
        in_slots = set(streamed[: len(self.slot_free)])
        slot_free = [self.now] * len(self.slot_free)
        adds = self.now
        for number, layer in enumerate(visits):
            ready = 0.0
            if self.streamed(layer) and layer not in in_slots:
                ready = self.copy_in(
                    shape.layers[layer] * options.stream_bytes, slot_free[number % len(slot_free)], self.both
                )
            if layer < choice.offloaded:
                ready = max(ready, self.copy_in(self.hidden_bytes, slot_free[number % len(slot_free)], self.both))
            wait = staging[number % 2] if self.streamed(layer) else 0.0
            self.compute(self.layers[layer].backward, max(ready, wait))
            slot_free[number % len(slot_free)] = self.now
            if self.streamed(layer):
                staging[number % 2] = arrived = self.copy_out(
                    shape.layers[layer] * options.transport_bytes, self.now, self.both
                )
                if choice.accumulation_steps > 1 or not options.gradient_plane:
                    speed = ADD_SPEEDUP if options.gradient_plane else 1.0
                    adds = max(adds, arrived) + shape.layers[layer] / (speed * self.machine.adamw_rate(options.threads))
        self.adds_end = max(self.adds_end, adds)
        self.slot_free = [self.now] * len(self.slot_free)


def simulate(
    shape: ModelShape, machine: Machine, step: StepSize, options: Options, choice: Choice, host_share: float = 1.0
) -> Timeline:
    """Play one step of a long run through, AdamW at a share of the host's rate. See [Note: the pipeline]."""
    line = _Pipeline(shape, machine, step, options, choice)
    rate = host_share * machine.adamw_rate(options.threads)
    host = {name: size for name, size in shape.unit_elements.items() if not choice.is_resident(name)}
    adamw_s = sum(host.values()) / rate
    resident_s = choice.resident_elements(shape) / (machine.device_adamw_gparams * 1e9)
    updated = _updates_end(host, rate, line) if options.gradient_plane else {}

    line.compute(resident_s + STEP_S)
    head_only = _embedding_arrives(line, updated, host)
    line.forward(updated)
    without_updates = _Pipeline(shape, machine, step, options, choice)
    without_updates.compute(resident_s + STEP_S)
    _embedding_arrives(without_updates, {}, host)
    without_updates.forward({})
    phases = {"update_wait": max(0.0, line.now - without_updates.now) + resident_s, "other": STEP_S + head_only}
    phases["forward"] = line.now - phases["update_wait"] - phases["other"]

    for window in range(choice.accumulation_steps):
        if window:
            mark = line.now
            line.forward({})
            phases["forward"] += line.now - mark
        mark = line.now
        ready = (
            line.copy_in(shape.head * options.stream_bytes, updated.get("head", 0.0), line.one_way)
            if "head" in host and not window
            else 0.0
        )
        if ready > line.now:
            late = min(ready - line.now, max(0.0, updated.get("head", 0.0) - line.now))
            phases["update_wait"] += late
            mark += late
        line.compute(line.head_s, ready)
        phases["head"] = phases.get("head", 0.0) + line.now - mark
        if "head" in host:
            line.copy_out(shape.head * options.transport_bytes, line.now, line.both)
        mark = line.now
        line.backward()
        phases["backward"] = phases.get("backward", 0.0) + line.now - mark
    if "embedding" in host:
        line.d2h_s += shape.embedding * options.transport_bytes / line.one_way
    end = line.now
    if choice.accumulation_steps > 1 or not options.gradient_plane:
        end = max(end, line.adds_end)
        if options.gradient_plane:
            end += sum(host.values()) / (NORM_SPEEDUP * rate)
    phases["gradient_sum"] = end - line.now
    busy = {"gpu": line.compute_s, "cpu adamw": adamw_s, "h2d": line.h2d_s, "d2h": line.d2h_s}
    return Timeline(end, {name: round(seconds, 6) for name, seconds in phases.items()}, line.compute_s, busy)


def _updates_end(host: dict[str, int], rate: float, line: _Pipeline) -> dict[str, float]:
    """When each host unit's AdamW ends. The embedding's gradient arrives last, so layers are begun before it."""
    ends: dict[str, float] = {}
    clock = 0.0
    for name, elements in host.items():
        arrival = elements * line.options.transport_bytes / line.both if name == "embedding" else 0.0
        clock = max(clock, arrival) + elements / rate if name == "embedding" else clock + elements / rate
        ends[name] = clock
    return ends


def _embedding_arrives(line: _Pipeline, updated: dict[str, float], host: dict[str, int]) -> float:
    """Copy the embedding if it is streamed. Returns the seconds that the copy itself keeps the GPU waiting."""
    if "embedding" not in host:
        return 0.0
    copy = host["embedding"] * line.options.stream_bytes / line.one_way
    ready = line.copy_in(host["embedding"] * line.options.stream_bytes, updated.get("embedding", 0.0), line.one_way)
    waited = max(0.0, ready - line.now)
    line.now = max(line.now, ready)
    return min(copy, waited)
