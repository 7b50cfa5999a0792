"""Memory of a step by formula: host, device and disk, by purpose.

[Note: held and working memory of a layer]
`keep` is everything that a compiled layer saves per token (see model_cost.py). The other policies follow from it, with factors
fitted to an H200 at Qwen3-8B's shape and 32 x 1024 tokens (measured / by formula, GiB):
    held between forward and backward, the layer's output y included
        keep        keep                            4.20 / 4.19
        selective   y + 0.95 budget (keep - y)      2.12 / 2.12 (budget 0.5), 1.38 / 1.37 (0.3), 1.00 / 1.00 (0.2)
        recompute   y                               0.25
    at the worst moment of the layer's own backward
        1.12 keep + gradients of its weights        5.04 / 5.05 (keep), 5.12 / 5.05 (budget 0.5)
A recomputed layer needs only `keep` at that moment: its input and output are counted elsewhere, and the products of the MLP
have made room for their gradients (9.04 / 9.13 in all, three layers of Qwen2.5-7B on one row of 32,768 tokens).
An eager layer saves 1.7 times as much (7.5 / 4.4). Two policies hold what their names say and nothing else: `keep_attention` the
output of fused attention and its log-sum-exp, `keep_mlp` the results of the products in the layer's token-wise modules.

[Note: one layer of a long row]
With the MLP in chunks of tokens, only one chunk of it exists at a time, and the worst moment is attention's own backward. Besides
the gradients of the layer's input and output there are four tensors as large as hidden states: the gradients behind attention and
of its output, and two that are held because the compiler computes the gradients of both norms' weights together, at the end. Then
the output of attention; queries, keys and values, and their gradients; and the kernel's own sums: the queries' gradients in fp32
and, where several heads share keys and values, the gradients of these for every head. The other candidate is the MLP's backward:
normed input, its gradient, the residual, queries, keys and values, the output of attention, and one chunk: what the MLP saves and
a third more, because gradients take the place of the largest tensor; and the fp32 sums of its weights' gradients instead of their
bf16. Measured / by formula on an H200, three layers of Qwen2.5-7B, chunks of 16,384 tokens, GiB in all:
    65,536 tokens       recompute 10.15 / 10.28, keep_attention 10.76 / 11.16
    131,072 tokens      recompute and two inputs offloaded 17.17 / 17.43, keep_attention 18.95 / 19.21

[Note: the device's worst moment]
When the head runs, everything that the forward has kept is there. Then layers free theirs, last one first, while gradients of
resident units accumulate until the update. So the peak is the maximum over the head, the backward of the final norm, the
backward of each layer, and the end. The head's gradient is summed in fp32 over its token chunks (4 bytes per element). In
addition to the sum there are, of the current chunk, two copies of the logits, or one and the gradient being computed. Eager cross
entropy holds its logits in fp32 three times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatrain.engine.plan import Policy
from megatrain.host_memory.layout import BLOCK_ELEMENTS
from megatrain.optim.blocks import CODES
from megatrain.optim.spec import OptimizerSpec
from megatrain.planner.model_cost import ModelShape
from megatrain.planner.plan import SELECTIVE_BUDGET, Choice, Cut, Lines, Options, StepSize
from megatrain.units import GIB

PROCESS_BYTES = int(1.8 * GIB)
"""Host memory of Python, torch, the CUDA context and small pinned buffers; measured with all planes on the GPU."""
KERNEL_BYTES = 96 << 20
"""Device memory of matrix kernels' workspaces, rotary tables and other small tensors."""
WORKSPACES = "kernel workspaces, inputs"
EAGER_FACTOR = 1.7
SELECTIVE_FACTOR = 0.95
BACKWARD_FACTOR = 1.12
RECOMPUTED_BACKWARD_FACTOR = 1.0
MLP_CHUNK_FACTOR = 4 / 3
"""Activations and their gradients during one chunk's backward, relative to what the MLP saves."""
KEPT_SHARE: dict[Policy, float] = {
    "keep": 1.0, "selective": SELECTIVE_FACTOR * SELECTIVE_BUDGET,
    "keep_attention": 0.0, "keep_mlp": 0.0, "recompute": 0.0,
}  # fmt: skip
"""Share of the activations, apart from the layer's output, that is kept. See [Note: held and working memory of a layer]."""


def _saved_by_layer(shape: ModelShape, tokens: int, options: Options) -> np.ndarray:
    """(L,) bytes per token that each layer's backward can use, in rows of `tokens`."""
    factor = options.compute_bytes / 2 * (1.0 if options.compiled else EAGER_FACTOR)
    return np.array([cost.saved_bytes.at(tokens) for cost in shape.costs])[shape.group_index] * factor


def held_bytes(shape: ModelShape, tokens: int, options: Options, policies: Sequence[Policy]) -> np.ndarray:
    """(L,) bytes per token that each layer holds between forward and backward, without its input and its output."""
    output = shape.hidden * options.compute_bytes
    rest = np.maximum(0.0, _saved_by_layer(shape, tokens, options) - output)
    held = rest * np.array([KEPT_SHARE[policy] for policy in policies])
    parts: dict[Policy, list[float]] = {
        "keep_attention": [cost.attention_saved_bytes.at(tokens) for cost in shape.costs],
        "keep_mlp": [cost.token_wise_product_bytes.at(tokens) for cost in shape.costs],
    }
    for part, of_group in parts.items():
        of_layer = np.array(of_group)[shape.group_index] * (options.compute_bytes / 2)
        held = held + of_layer * np.array([policy == part for policy in policies])
    return held


def working_bytes(shape: ModelShape, step: StepSize, options: Options, choice: Choice) -> np.ndarray:
    """(L,) bytes at the worst moment of each layer's backward, without the gradients of its weights.

    See [Note: held and working memory of a layer] and [Note: one layer of a long row].
    """
    tokens = Cut.of(step, choice).microbatch_tokens
    recomputed = np.array([policy == "recompute" for policy in choice.policies])
    factor = np.where(recomputed, RECOMPUTED_BACKWARD_FACTOR, BACKWARD_FACTOR)
    whole = factor * _saved_by_layer(shape, step.tokens, options) * tokens
    if choice.mlp_chunk_tokens is None:
        return whole
    hidden = shape.hidden * options.compute_bytes
    chunk = min(choice.mlp_chunk_tokens, tokens)
    scale = options.compute_bytes / 2
    worst = []
    for cost in shape.costs:
        in_chunks = cost.token_wise_bytes.at(step.tokens) * scale
        qkv = cost.attention_input_bytes.at(step.tokens) * scale
        output = cost.attention_saved_bytes.at(step.tokens) * scale
        shared = qkv < 2.9 * output  # several heads share keys and values
        attention = (4 * hidden + 2 * qkv + output + (4 if shared else 2) * output) * tokens
        sums = (4 - options.compute_bytes) * cost.token_wise_parameters
        mlp = (3 * hidden + qkv + output) * tokens + MLP_CHUNK_FACTOR * in_chunks * chunk + sums
        worst.append(max(attention, mlp) if in_chunks else np.inf)
    return np.minimum(whole, np.array(worst)[shape.group_index])


@dataclass(frozen=True)
class DevicePeak:
    """The device's memory at its worst moment."""

    lines: Lines
    moment: str

    @property
    def nbytes(self) -> int:
        return sum(self.lines.values())


def device_peak(shape: ModelShape, step: StepSize, options: Options, choice: Choice) -> DevicePeak:
    """See [Note: the device's worst moment]."""
    fixed = _fixed_lines(shape, step, options, choice)
    lines, moment = max(_moments(shape, step, options, choice), key=lambda pair: sum(pair[0].values()))
    return DevicePeak({name: int(size) for name, size in {**fixed, **lines}.items() if size >= 1}, moment)


def _fixed_lines(shape: ModelShape, step: StepSize, options: Options, choice: Choice) -> dict[str, float]:
    """Memory in use for the whole step."""
    cut = Cut.of(step, choice)
    passing = shape.layers[0 if options.passes(True) else choice.resident_layers :]
    widest = max(passing, default=0)
    slots = options.slots(choice, len(passing))
    edges = shape.embedding * options.passes(choice.resident_embedding)
    edges += shape.head * options.passes(choice.resident_head)
    frozen = choice.resident_elements(shape) - choice.trained_elements(shape, resident=True)
    resident = choice.trained_elements(shape, resident=True) / options.shards
    width, sent = (
        options.optim.bytes_per_parameter,
        shape.trained_layers[0 if options.passes(True) else choice.resident_layers :],
    )
    if options.shards > 1:  # ranks sum whole units
        sent = tuple(whole for whole, trained in zip(passing, sent, strict=True) if trained)
    lines: dict[str, float] = {
        f"resident units: weights and optimizer states ({width:g} bytes a parameter)": width * resident,
        "resident units: frozen weights": options.stream_bytes * frozen / options.shards,
        f"{slots} weight slots": slots * widest * options.slot_bytes,
        "weights of embedding and head": edges * options.slot_bytes,
        "gradient staging": 2 * max(sent, default=0) * options.staging_bytes,
        WORKSPACES: KERNEL_BYTES + 24 * step.all_tokens,
    }
    if cut.microbatches > 1 and options.transport_bytes < 4 and options.ranks == 1:
        lines["gradient sum over microbatches (fp32)"] = 4 * max(shape.trained_layers)
    if choice.accumulation_steps > 1:
        lines["gradients of resident units (fp32)"] = 4 * resident
    return lines


def _moments(
    shape: ModelShape, step: StepSize, options: Options, choice: Choice
) -> Iterator[tuple[dict[str, float], str]]:
    """Candidates for the worst moment: (lines in addition to the fixed ones, name). Of the layers, only the worst."""
    cut = Cut.of(step, choice)
    hidden = cut.tokens * shape.hidden * options.compute_bytes
    inputs, held = _held_by_layer(shape, step, options, choice)
    # of resident units; with several accumulation steps their fp32 sums are a fixed line
    gradient = options.transport_bytes / options.shards if choice.accumulation_steps == 1 else 0
    # the final norm: an fp32 copy of its input, its result before and after the weight, and the gradient of the result
    norm = hidden * 3 + (cut.tokens * shape.hidden * 4 if options.compute_bytes == 2 else 0)
    norm_backward = norm + 12 * cut.tokens * shape.hidden
    if choice.mlp_chunk_tokens is not None and shape.norm_in_chunks:
        norm, norm_backward = 2 * hidden, 3 * hidden
    in_flight = 2 * hidden if choice.offloaded else 0
    matrix = shape.head_matrix
    part = matrix * options.compute_bytes
    entries = cut.head_tokens * shape.vocabulary
    logits = entries * options.compute_bytes
    head_work = max(2 * logits if options.compiled else 12 * entries, logits + part)
    head_sum = 0
    if cut.head_chunks > 1:
        head_sum = 4 * matrix
        # the second chunk creates the sum, while the gradients of both exist
        head_work = max(head_work, part) if cut.head_chunks > 2 else max(head_work + part - head_sum, 2 * part)
    head_gradient = head_sum or part
    kept = {"layer inputs": float(inputs.sum()) + hidden, "kept activations": float(held.sum())}
    yield (
        {**kept, "final norm": norm, "gradient of the head": head_sum, "logits and head workspace": head_work},
        "head",
    )
    yield {**kept, "final norm": norm_backward, "gradient of the head": head_gradient}, "final norm's backward"
    # a tied head's gradient waits for the embedding's; a streamed one's leaves during the last layer's backward
    head_waits = head_gradient if shape.tied else shape.head * gradient * choice.resident_head
    leaving = np.zeros(shape.depth)
    leaving[-1] = 0 if shape.tied else shape.head * options.staging_bytes
    resident = shape.sizes * gradient * (np.arange(shape.depth) < choice.resident_layers)
    own = held / cut.microbatches  # of the microbatch in its backward
    during = {  # by layer
        "layer inputs": np.cumsum(inputs) + in_flight + hidden * (options.segment - 1),
        "kept activations": np.cumsum(held),
        "gradients of hidden states": np.full(shape.depth, 2.0 * hidden),
        "one layer's backward": np.maximum(0.0, working_bytes(shape, step, options, choice) - own)
        + shape.sizes * options.compute_bytes,
        "gradient of the head": np.maximum(head_waits, leaving),
        "gradients of resident layers": np.cumsum(resident[::-1])[::-1],
    }
    worst = int(np.argmax(sum(during.values())))
    yield {name: float(sizes[worst]) for name, sizes in during.items()}, f"backward of layer {worst}"
    end = {
        "gradients of hidden states": hidden,
        "gradient of the embedding": shape.trained_elements["embedding"]
        * (options.compute_bytes + options.staging_bytes),
        "gradient of the head": head_waits,
        "gradients of resident layers": float(resident.sum()),
    }
    yield end, "end of the backward"


def _held_by_layer(
    shape: ModelShape, step: StepSize, options: Options, choice: Choice
) -> tuple[np.ndarray, np.ndarray]:
    """(input, kept activations) of each layer on the device while the head runs; (L,) bytes each."""
    cut = Cut.of(step, choice)
    hidden = cut.tokens * shape.hidden * options.compute_bytes
    layers = np.arange(shape.depth)
    inputs = np.where((layers >= choice.offloaded) & (layers % options.segment == 0), float(hidden), 0.0)
    held = held_bytes(shape, step.tokens, options, choice.policies)
    # with several microbatches the joined output is a copy of parts that the graphs hold as well
    copies = hidden * (held > 0) if cut.microbatches > 1 else 0.0
    return inputs, held * cut.tokens + copies


def host_lines(shape: ModelShape, step: StepSize, options: Options, choice: Choice) -> Lines:
    """Host memory of a run on a GPU, by plane and buffer."""
    return {**_host_lines(shape, step, options, choice), "process, CUDA context": PROCESS_BYTES}


def cpu_lines(shape: ModelShape, step: StepSize, options: Options, choice: Choice) -> Lines:
    """Host memory of a run on the CPU: planes, and the buffers and activations that a GPU run has on the device.

    The process itself is not counted, because it exists already when available memory is measured.
    """
    lines = {**_host_lines(shape, step, options, choice), **device_peak(shape, step, options, choice).lines}
    lines[WORKSPACES] -= KERNEL_BYTES
    return lines


def _host_lines(shape: ModelShape, step: StepSize, options: Options, choice: Choice) -> dict[str, int]:
    """Of one rank."""
    cut = Cut.of(step, choice)
    elements = choice.trained_elements(shape, resident=False) / options.shards
    frozen = (shape.parameters - choice.resident_elements(shape)) / options.shards - elements
    if options.compute == "bf16":
        lines = {
            "hi: bf16 weights (2 bytes a parameter)": 2 * elements,
            "lo: the rest of the fp32 master (2)": 2 * elements,
        }
    else:
        lines = {"fp32 master (4 bytes a parameter)": 4 * elements}
    for state in options.optim.states:
        lines[f"{state.name}: {state.label} ({state.dtype.itemsize})"] = state.dtype.itemsize * elements
        if state.dtype in CODES:
            lines[f"{state.name}: scales of its blocks"] = 4 * elements / BLOCK_ELEMENTS
    width = options.gradient_bytes(choice.accumulation_steps)
    lines[f"gradients of a step ({width})"] = width * elements
    lines[f"frozen weights ({options.stream_bytes} bytes a parameter)"] = options.stream_bytes * frozen
    streamed = shape.trained_layers[choice.resident_layers :]
    edges = [
        shape.trained_elements["embedding"] * (not choice.resident_embedding),
        shape.trained_elements["head"] * (not choice.resident_head),
    ]
    if not options.gradient_plane or choice.accumulation_steps > 1 or options.staged:
        slabs = max(1, min(options.gradient_slabs, len(streamed)))
        in_slabs = (slabs * max(streamed, default=0) + sum(edges)) / options.shards
        lines[f"{slabs} gradient slabs, and of embedding and head"] = in_slabs * options.transport_bytes
    if options.staged:
        moved = [size for unit, size in shape.unit_elements.items() if not choice.is_resident(unit)]
        lines["staging buffers"] = 2 * max(moved, default=0) / options.shards * options.stream_bytes
    hidden = cut.tokens * shape.hidden * options.compute_bytes
    lines[f"offloaded inputs of {choice.offloaded} layers"] = choice.offloaded * hidden
    return {name: int(size) for name, size in lines.items() if size}


def disk_lines(shape: ModelShape, optim: OptimizerSpec) -> Lines:
    """Bytes of one checkpoint."""
    states, rest = ", ".join(["lo", *(state.name for state in optim.states)]), optim.bytes_per_parameter - 2
    trained = sum(shape.trained_elements.values())
    return {
        "bf16 weights that transformers loads (2 bytes a parameter)": 2 * shape.parameters,
        f"the rest of the fp32 master and optimizer states: {states} ({rest:g})": int(rest * trained),
    }
