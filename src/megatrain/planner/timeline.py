"""Predicted time of a step: updates, copies and layers, simulated unit by unit.

[Note: the rates]
A phase of a layer takes its products at a fraction of the machine's matrix rate, its attention at the measured attention rate,
and its pointwise operations as a multiple of the bytes that the layer saves over the device's bandwidth. The fractions and
multiples below were fitted once, to Qwen3-8B layers (193 M parameters) at 32 x 1024 tokens on an H200 (forward 18.2 ms without
gradients, 20.9 ms keeping all, backward 41.1 ms, 44.3 ms where budget 0.5 recomputes) and to its head (0.188 s for 32 k tokens).
`Machine` holds what differs between machines, the traced counts of a layer what differs between models.

[Note: the pipeline]
Time 0 is the end of the previous step. Resident units are updated first, on the compute stream. The CPU updates host units in
forward order, under the forward. A layer's copy starts when its update has ended, the previous copy has ended, and a slot is
free; its forward starts when the copy and the previous forward have ended. In the backward copies run in reverse order, and a
layer's gradient leaves after its backward; the backward after the next one waits for that copy.

[Note: several GPUs]
Each rank copies its shard of a unit, then all gather it, one after the other on the same stream; resident units are gathered,
too. With a slot for each layer that is done once a step. A gradient is summed over the ranks before its shard leaves. These
collectives take part of the GPU from the layers that compute meanwhile: on two H200 a gather of 0.8 ms delays them by 0.9 ms, a
reduction of 1.7 ms by 0.85 ms. All ranks together update at the host's rate, so the updates take as long as one rank's of
everything. Where each host holds a replica, the shards of a gradient are added up over the network, and each host updates its own
copy; where all hosts share one copy, gathers and sums go over the network, and the hosts update together.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megatrain.engine.plan import Policy
from megatrain.machine.machine import Cluster, Machine
from megatrain.optim.adamw import AdamW
from megatrain.optim.blocks import CODES
from megatrain.planner.memory import KEPT_SHARE
from megatrain.planner.model_cost import LayerCost, ModelShape
from megatrain.planner.plan import Choice, Cut, Options, StepSize

FORWARD_FRACTION, BACKWARD_FRACTION, HEAD_FRACTION = 0.975, 0.90, 0.82
"""Share of the matrix rate that products reach."""
SHORT_CHUNK_TOKENS = 512
"""A chunk of n tokens reaches n / (n + this) of the rate of a long one."""
PLAIN_TRAFFIC, SAVING_TRAFFIC, BACKWARD_TRAFFIC = 0.8, 3.3, 3.1
"""Bytes moved by pointwise operations per byte that the layer saves: forward without gradients, forward with, backward."""
REBUILD_TRAFFIC = 5.9
"""The same for the recompute in a selective layer's backward, per byte that it did not keep."""
EAGER_TIME = 1.33
FP32_TIME = 8.0
LAUNCH_S = 0.0006
"""Least time of one layer call, forward or backward: Python and kernel launches."""
CODES_RATE = 0.1
"""Rate of AdamW on one host thread with moments in 8-bit codes, over that with fp32 moments: `benchmarks/adamw_moments.py`."""
STEP_S = 0.008
"""Batch, embedding, norms, and the synchronisation at the end of the step."""
GATHER_DELAY, REDUCE_DELAY = 1.1, 0.5
"""Delay of the computation by a collective under it, as a share of the collective's own time."""
ADD_SPEEDUP, NORM_SPEEDUP = 2.0, 5.0
"""Rates of adding a slab to a gradient plane and of a plane's sum of squares, relative to AdamW."""


@dataclass(frozen=True)
class Timeline:
    """Predicted seconds of a step."""

    step: float
    phases: dict[str, float]  # parts of the step; `update_wait`: stalls behind AdamW and the resident units' own update
    compute: float  # GPU computation, recompute included, without stalls
    busy: dict[str, float] = field(default_factory=dict)  # work of gpu, cpu adamw, h2d and d2h, hidden or not

    @property
    def bottleneck(self) -> str:
        """The worker that limits the step."""
        stalls = self.step - self.compute
        if stalls < 0.08 * self.step:
            return "gpu: matrix products"
        if self.phases["update_wait"] > stalls / 2:
            return "cpu: AdamW on host units (host memory bandwidth)"
        inwards = self.busy.get("h2d", 0.0) >= self.busy.get("d2h", 0.0)
        return "link: weights to the GPU" if inwards else "link: gradients to the host"


@dataclass(frozen=True)
class LayerWork:
    """Seconds of a layer's passes over some tokens on one GPU. See [Note: the rates]."""

    plain: float  # forward without gradients
    saving: float  # forward that saves activations
    backward: float  # backward with everything saved
    products: float  # matrix products of a forward; the gradients of the weights take the same
    traffic: float  # reading or writing everything that the layer saves, once
    attention: float  # part of a forward
    token_wise: float  # products of token-wise modules, part of a forward


def layer_work(
    cost: LayerCost, row_tokens: int, tokens: int, chunk_tokens: int, rates: Machine | Cluster, options: Options
) -> LayerWork:
    """Seconds of a layer over `tokens` tokens in rows of `row_tokens`, `chunk_tokens` at a time."""
    slow = (1.0 if options.compiled else EAGER_TIME) * (FP32_TIME if options.compute == "fp32" else 1.0)
    rate = rates.matrix_tflops * 1e12 * chunk_tokens / (chunk_tokens + SHORT_CHUNK_TOKENS) / slow
    products = cost.product_flops.at(row_tokens) * tokens / rate
    # the attention rate is that of forward and backward together, which are 3.5 forwards: 1 and 2.5
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


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds of one layer over one accumulation step; the backward includes recompute."""

    forward: float
    backward: float


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
    """See [Note: the rates]. With `in_chunks`, the MLP's backward recomputes each chunk of tokens, whatever the policy."""
    work = layer_work(shape.cost(layer), step.tokens, cut.tokens, cut.microbatch_tokens, machine, options)
    sums = (
        cut.microbatches
        * shape.layers[layer]
        * (10 if cut.microbatches > 1 else 6)
        / (machine.device_bandwidth_gbps * 1e9)
    )
    recomputed: dict[Policy, float] = {
        "keep": 0.0,
        "selective": REBUILD_TRAFFIC * work.traffic * (1.0 - KEPT_SHARE["selective"]),
        "keep_attention": work.saving - work.attention,
        "keep_mlp": work.saving - work.token_wise,
        "recompute": work.saving + (work.token_wise if in_chunks else 0.0),
    }
    twice = policy not in ("keep", "selective")  # the layer's code is called again before its backward
    least = LAUNCH_S * cut.microbatches
    return LayerSeconds(
        forward=max(work.plain if twice else work.saving, least),
        backward=max(work.backward + sums + recomputed[policy], least * (2 if twice else 1)),
    )


def recomputed_flops(shape: ModelShape, step: StepSize, choice: Choice) -> float:
    """FLOPs per token of products and attention that a step computes a second or third time."""
    total = 0.0
    for layer, policy in enumerate(choice.policies):
        cost = shape.cost(layer)
        products, attention, token_wise = (
            flops.at(step.tokens) for flops in (cost.product_flops, cost.attention_flops, cost.token_wise_flops)
        )
        third = token_wise if choice.mlp_chunk_tokens is not None else 0.0
        again: dict[Policy, float] = {
            "recompute": products + attention + third,
            "keep_attention": products,
            "keep_mlp": products - token_wise + attention,
        }
        total += again.get(policy, 0.0)
    return total


def head_seconds(shape: ModelShape, machine: Machine, options: Options, cut: Cut) -> float:
    """Forward and backward of the head over one accumulation step, with the fp32 sum of its gradient."""
    slow = FP32_TIME if options.compute == "fp32" else 1.0
    reached = HEAD_FRACTION * cut.head_tokens / (cut.head_tokens + SHORT_CHUNK_TOKENS / 4)
    products = 6.0 * shape.head_matrix * cut.tokens / (machine.matrix_tflops * 1e12 * reached / slow)
    sums = (cut.head_chunks if cut.head_chunks > 1 else 0) * shape.head_matrix * 10
    return products + sums / (machine.device_bandwidth_gbps * 1e9) + LAUNCH_S * cut.head_chunks


class _Link:
    """One direction of the link: copies in order."""

    def __init__(self) -> None:
        self.free = self.busy = 0.0

    def copy(self, nbytes: float, after: float, rate: float, collective_s: float = 0.0) -> float:
        """End of a copy, and of the collective before or behind it, that cannot start before `after`."""
        self.free = max(after, self.free) + nbytes / rate + collective_s
        self.busy += nbytes / rate + collective_s
        return self.free


class _Pipeline:
    """State of the workers during the simulation. See [Note: the pipeline]."""

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
        self.hidden_bytes = cut.tokens * shape.hidden * options.compute_bytes
        self.one_way, self.both = (rate * 1e9 for rate in machine.link_gbps(options.local_ranks))
        if options.staged:  # a thread copies into the staging buffer at the host's speed
            self.one_way = self.both = min(self.both, machine.host_bandwidth_gbps * 1e9 / 6)
        shards, replicas = options.shards, options.replicas
        peer, network = machine.peer_gbps * 1e9, machine.network_gbps * 1e9
        if shards > options.local_ranks:  # every GPU of a host has its share of the network's rate
            peer = min(peer, options.local_ranks * network)
        others = (shards - 1) / shards / peer  # s per byte of a whole unit
        between = 2 * (replicas - 1) / replicas / shards / network  # the sum of a shard over hosts with a replica each
        self.gather_s = [size * options.stream_bytes * others for size in shape.layers]
        self.reduce_s = [size * max(4, options.transport_bytes) * (others + between) for size in shape.layers]
        self.edge_s = options.stream_bytes * others  # s per element of an edge
        self.now = 0.0  # the compute stream
        self.h2d, self.d2h = _Link(), _Link()
        self.compute_s = self.adds_end = 0.0
        self.slot_free = [0.0] * options.slots(choice, sum(map(self.passes, range(shape.depth))))
        self.turn = 0
        self.loaded = False  # whether all layers are in their slots

    def streamed(self, layer: int) -> bool:
        return layer >= self.choice.resident_layers

    def passes(self, layer: int) -> bool:
        """Whether the layer passes through a slot."""
        return self.options.passes(not self.streamed(layer))

    def gradient_bytes(self, layer: int, width: int) -> float:
        """Bytes of this rank's part of a layer's gradient on the link."""
        return self.shape.trained_layers[layer] * width / self.options.shards * self.streamed(layer)

    def shard_bytes(self, layer: int, width: int) -> float:
        """Bytes of this rank's part of a layer on the link."""
        return self.shape.layers[layer] * width / self.options.shards * self.streamed(layer)

    def compute(self, seconds: float, after: float = 0.0) -> None:
        self.now = max(self.now, after) + seconds
        self.compute_s += seconds

    def forward(self, updated: dict[str, float]) -> None:
        shape, weight = self.shape, self.options.stream_bytes
        for layer in range(shape.depth):
            ready = delay = 0.0
            if self.passes(layer) and not self.loaded:
                delay = GATHER_DELAY * self.gather_s[layer]
                after = max(updated.get(f"layer.{layer}", 0.0), self.slot_free[self.turn])
                ready = self.h2d.copy(self.shard_bytes(layer, weight), after, self.one_way, self.gather_s[layer])
            self.compute(self.layers[layer].forward + delay, ready)
            if self.passes(layer):
                self.slot_free[self.turn] = self.now
                self.turn = (self.turn + 1) % len(self.slot_free)
            if layer < self.choice.offloaded:
                self.d2h.copy(self.hidden_bytes, self.now, self.both)
        self.loaded = self.choice.replicated

    def backward(self) -> None:
        shape, options, choice = self.shape, self.options, self.choice
        order = list(reversed(range(shape.first_trained_layer, shape.depth)))
        if options.segment > 1:  # the inner inputs of each segment are computed once more
            self.compute(sum(self.layers[i].forward for i in order if i % options.segment != options.segment - 1))
        staging = [0.0, 0.0]
        in_slots = set([i for i in order if self.passes(i)][: len(self.slot_free)])
        slot_free = [self.now] * len(self.slot_free)
        adds = self.now
        for number, layer in enumerate(order):
            ready, slot = 0.0, number % len(slot_free)
            delay = REDUCE_DELAY * self.reduce_s[layer]
            if self.passes(layer) and layer not in in_slots:
                shard = self.shard_bytes(layer, options.stream_bytes)
                ready = self.h2d.copy(shard, slot_free[slot], self.both, self.gather_s[layer])
                delay += GATHER_DELAY * self.gather_s[layer]
            if layer < choice.offloaded:
                ready = max(ready, self.h2d.copy(self.hidden_bytes, slot_free[slot], self.both))
            wait = staging[number % 2] if self.passes(layer) else 0.0
            self.compute(self.layers[layer].backward + delay, max(ready, wait))
            slot_free[slot] = self.now
            if self.passes(layer):
                shard = self.gradient_bytes(layer, options.transport_bytes)
                arrived = self.d2h.copy(shard, self.now, self.both, self.reduce_s[layer])
                staging[number % 2] = arrived
            if self.streamed(layer) and (choice.accumulation_steps > 1 or not options.gradient_plane):
                speed = ADD_SPEEDUP if options.gradient_plane else 1.0
                rate = self.machine.adamw_rate(host_threads(options)) * options.shards / options.local_ranks
                adds = max(adds, arrived) + shape.trained_layers[layer] / (speed * rate)
        self.adds_end = max(self.adds_end, adds)
        self.slot_free = [self.now] * len(self.slot_free)

    def begin(self, updated: dict[str, float], resident_s: float, embedding: int) -> float:
        """Update the resident units and copy the embedding. Returns the stall caused by the copy alone."""
        self.compute(resident_s + STEP_S)
        gather_s = self.shape.embedding * self.edge_s
        if not embedding and not gather_s:
            return 0.0
        nbytes = embedding * self.options.stream_bytes / self.options.shards
        ready = self.h2d.copy(nbytes, updated.get("embedding", 0.0), self.one_way, gather_s)
        waited = max(0.0, ready - self.now)
        self.now = max(self.now, ready)
        return min(nbytes / self.one_way + gather_s, waited)


def simulate(
    shape: ModelShape, machine: Machine, step: StepSize, options: Options, choice: Choice, host_share: float = 1.0
) -> Timeline:
    """One step of a long run, with AdamW at a share of the host's rate. See [Note: the pipeline]."""
    line = _Pipeline(shape, machine, step, options, choice)
    rate, ranks = host_share * _host_rate(machine, options), options.shards
    host = {name: size for name, size in shape.unit_elements.items() if not choice.is_resident(name)}
    trained = {name: size for name, size in shape.trained_elements.items() if not choice.is_resident(name)}
    adamw_s = sum(trained.values()) / rate
    resident_s = (
        choice.trained_elements(shape, resident=True) / ranks / (machine.device_adamw_gparams * 1e9 * _smaller(options))
    )
    updated = _updates_end(trained, rate, line) if options.gradient_plane else {}

    embedding_copy = line.begin(updated, resident_s, host.get("embedding", 0))
    line.forward(updated)
    without_updates = _Pipeline(shape, machine, step, options, choice)
    without_updates.begin({}, resident_s, host.get("embedding", 0))
    without_updates.forward({})
    phases = {"update_wait": max(0.0, line.now - without_updates.now) + resident_s, "other": STEP_S + embedding_copy}
    phases["forward"] = line.now - phases["update_wait"] - phases["other"]
    phases["head"] = phases["backward"] = 0.0

    for number in range(choice.accumulation_steps):
        mark = line.now
        if number:
            line.forward({})
            phases["forward"] += line.now - mark
            mark = line.now
        ready = 0.0
        if "head" in host and number == 0:
            updated_at = updated.get("head", 0.0)
            shard, gather_s = shape.head * options.stream_bytes / ranks, shape.head * line.edge_s
            ready = line.h2d.copy(shard, updated_at, line.one_way, gather_s)
            late = min(max(0.0, ready - line.now), max(0.0, updated_at - line.now))
            phases["update_wait"] += late
            mark += late
        line.compute(line.head_s, ready)
        phases["head"] += line.now - mark
        if "head" in host:
            line.d2h.copy(trained["head"] * options.transport_bytes / ranks, line.now, line.both)
        mark = line.now
        line.backward()
        phases["backward"] += line.now - mark
    d2h_s = line.d2h.busy + trained.get("embedding", 0) * options.transport_bytes / ranks / line.one_way
    end = line.now
    if choice.accumulation_steps > 1 or not options.gradient_plane:
        end = max(end, line.adds_end)
        if options.gradient_plane:
            end += sum(host.values()) / (NORM_SPEEDUP * rate)
    phases["gradient_sum"] = end - line.now
    busy = {"gpu": line.compute_s, "cpu adamw": adamw_s, "h2d": line.h2d.busy, "d2h": d2h_s}
    return Timeline(end, {name: round(seconds, 6) for name, seconds in phases.items()}, line.compute_s, busy)


def _host_rate(machine: Machine, options: Options) -> float:
    """AdamW's rate on the hosts of a copy of the state [parameters/s].

    Smaller states save memory traffic, as far as the arithmetic keeps up.
    """
    threads = host_threads(options)
    rate, count = machine.adamw_rate(threads), threads or machine.threads
    hosts = options.shards / options.local_ranks  # that update one copy of the state together
    arithmetic = max(rate, machine.adamw_rate(1) * count)
    if any(state.dtype in CODES for state in options.optim.states):
        arithmetic = CODES_RATE * machine.adamw_rate(1) * count
    return hosts * min(rate * _smaller(options), arithmetic)


def _smaller(options: Options) -> float:
    """Memory traffic of the update that the machine was measured with (fp32 moments, bf16 gradients), over this one's."""
    return AdamW().update_bytes(2) / options.optim.update_bytes(2)


def host_threads(options: Options) -> int | None:
    """AdamW threads of a host's ranks; None: the best number."""
    return None if options.threads is None else options.threads * options.local_ranks


def _updates_end(host: dict[str, int], rate: float, line: _Pipeline) -> dict[str, float]:
    """When each host unit's update ends. The embedding's gradient arrives last, so its update starts late."""
    ends: dict[str, float] = {}
    clock = 0.0
    for name, elements in host.items():
        arrival = (
            elements * line.options.transport_bytes / line.options.shards / line.both if name == "embedding" else 0.0
        )
        clock = max(clock, arrival) + elements / rate
        ends[name] = clock
    return ends
