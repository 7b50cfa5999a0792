"""Compares the cluster planner with published runs: prints the table of docs/parallel.md.

Nothing here was fitted to these runs. The rates are those of docs/machines/h100-cluster.yaml, measured on one H200. A row varies
or assumes what its publication does not say, and names it. The engines that ran them fuse pointwise work and gather parameters
ahead of the pipeline; rows with hidden tensor-parallel collectives say so.

    PYTHONPATH=src python benchmarks/published_clusters.py
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import LlamaConfig

from megatrain.engine.mesh.layout import Layout
from megatrain.machine.machine import load_cluster
from megatrain.planner.cluster.candidate import Candidate, Overheads, Request
from megatrain.planner.cluster.estimate import Estimate, evaluate
from megatrain.planner.cluster.plan import make_request
from megatrain.planner.plan import StepSize

FILE = Path(__file__).parents[1] / "docs/machines/h100-cluster.yaml"


@dataclass(frozen=True)
class Row:
    """A published run and its simulation."""

    run: str
    assumed: str
    published: str
    simulated: str

    def __str__(self) -> str:
        return f"| {self.run} | {self.assumed} | {self.published} | {self.simulated} |"


def rows() -> Iterator[Row]:
    """All comparisons."""
    yield from llama3()
    yield from torchtitan()
    yield from megatron()


def llama3() -> Iterator[Row]:
    """Llama 3 405B; The Llama 3 Herd of Models, table 4."""
    for world, context, data, per_rank, tokens, published in (
        (8192, 1, 64, 32, 8192, "43%"),
        (16384, 1, 128, 16, 8192, "41%"),
        (16384, 16, 8, 16, 131072, "38%"),
    ):
        request = make("405b", world, data * per_rank, tokens)
        base = Layout(tensor=8, pipeline=16, context=context, shard=data, microbatches=per_rank)
        mfu = [evaluate(request, Candidate(interleaved(base, v), recompute=False)).mfu for v in (1, 2, 4)]
        yield Row(
            f"Llama 3 405B, {world:,} GPUs, tensor 8, pipeline 16, context {context}, {tokens:,} tokens",
            "virtual 1, 2, 4",
            f"MFU {published}",
            "MFU " + ", ".join(f"{share:.0%}" for share in mfu),
        )


def torchtitan() -> Iterator[Row]:
    """Llama 3.1 405B, 512 GPUs; torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, table 5. Its rates are of float8."""
    request = make("405b", 512, 256, 8192, tensor_overlap=1.0)
    for count in (8, 16, 32):
        base = Layout(tensor=8, pipeline=8, shard=8, microbatches=count)
        once, twice = (evaluate(request, Candidate(interleaved(base, v), recompute=True)) for v in (1, 2))
        yield Row(
            "Llama 3.1 405B, 512 GPUs, tensor 8, pipeline 8, shard 8, 256 rows of 8,192 tokens, 1F1B against interleaved",
            f"{count} microbatches{' (its default)' if count == 8 else ''}, virtual 2",
            "+28%; 82.5 and 72.7 GiB",
            f"{once.step_s / twice.step_s - 1:+.0%}; {gib(once)} and {gib(twice)} GiB",
        )


def megatron() -> Iterator[Row]:
    """462 B on 6,144 GPUs, and GPT-3 from 96 to 4,608; Megatron-LM, README, "Training Speed and Scalability"."""
    for batch in (1536, 3072, 6144):
        base = Layout(tensor=8, pipeline=8, shard=96, microbatches=batch // 96)
        shown = [
            evaluate(
                make("462b", 6144, batch, 4096, tensor_overlap=hidden), Candidate(interleaved(base, 7), recompute=False)
            ).mfu
            for hidden in (0.0, 1.0)
        ]
        yield Row(
            "GPT 462B, 6,144 GPUs, 4,096 tokens, vocabulary 131,072",
            f"112 layers of 18,432, tensor 8, pipeline 8, virtual 7, {batch:,} rows",
            "MFU 47 to 48%",
            f"MFU {shown[0]:.0%}; all tensor collectives hidden {shown[1]:.0%}",
        )
    shares = []
    for data in (3, 144):
        layout = Layout(tensor=4, pipeline=8, shard=data, microbatches=1152 // data)
        shares.append(
            evaluate(make("gpt3", 32 * data, 1152, 4096), Candidate(interleaved(layout, 6), recompute=False)).mfu
        )
    yield Row(
        "GPT-3 175B, from 96 to 4,608 GPUs, 1,152 rows of 4,096 tokens",
        "tensor 4, pipeline 8, virtual 6",
        "MFU 47% to 42%",
        f"MFU {shares[0]:.0%} to {shares[1]:.0%}",
    )


def interleaved(layout: Layout, virtual: int) -> Layout:
    return replace(layout, virtual=virtual, schedule="interleaved") if virtual > 1 else layout


def make(model: str, world: int, rows: int, tokens: int, tensor_overlap: float = 0.0) -> Request:
    """A request as the publishers' engines would run it."""
    overheads = Overheads(compiled="all", tensor_overlap=tensor_overlap, gathers_ahead=True, context_attention=1.0)
    return replace(_base(model), world=world, step=StepSize(rows, tokens), overheads=overheads)


SHAPES = {
    "405b": (16384, 53248, 126, 128, 8, 128256),
    "462b": (18432, 49152, 112, 144, 144, 131072),
    "gpt3": (12288, 32768, 96, 96, 96, 131072),
}
"""Width, MLP, layers, heads, key-value heads, vocabulary. GPTs have gated MLPs with the same number of parameters: 8 width^2."""


@functools.cache
def _base(model: str) -> Request:
    hidden, intermediate, layers, heads, kv_heads, vocabulary = SHAPES[model]
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=vocabulary, tie_word_embeddings=False, max_position_embeddings=131072,
    )  # fmt: skip
    return make_request(config, load_cluster(FILE), 1, StepSize(1, 4096), name=model)


def gib(estimate: Estimate) -> str:
    return f"{estimate.memory.nbytes / 2**30:.1f}"


def table() -> str:
    """As markdown."""
    return "\n".join(["| run | assumed | published | simulated |", "|---|---|---|---|", *map(str, rows())])


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
