"""The collectives and dispatches of a tensor-parallel layer; test_families.py compares its results with one process."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import families
import mesh_ranks as ranks
from fp64 import Fp32MeansFp64
from megatrain.engine.mesh.engine import MeshEngine
from megatrain.engine.mesh.layout import Layout, MeshPlan
from mesh_cases import Case
from mesh_parity import batches, build, differences, on_ranks, plain

LAYOUT = Layout(tensor=2, shard=1, microbatches=1)


class Seen(TorchDispatchMode):
    """Counts the collectives called inside, and the operations on DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: Counter[str] = Counter()
        self.on_dtensors: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = func.namespace, func.overloadpacket.__name__
        if namespace in ("c10d", "_c10d_functional") and name != "wait_tensor":
            self.collectives[name] += 1
        if any(isinstance(leaf, DTensor) for leaf in pytree.tree_leaves((args, kwargs))):
            self.on_dtensors[name] += 1
        return func(*args, **(kwargs or {}))


def seen(family: str, layers: int, heads: tuple[int, int] | None, recompute: bool) -> Seen:
    """What one rank calls in forward and backward of one microbatch. FSDP has a group of one and moves nothing."""
    case = Case(family, LAYOUT, layers, tied=False, kind="plain", heads=heads)
    engine = MeshEngine(build(case), MeshPlan(LAYOUT, recompute, compute_dtype="fp64"), debug=Fp32MeansFp64)
    engine.backward(batches(case)[0])  # one-time work
    engine.gradients.clear()
    with Seen() as found:
        engine.backward(batches(case)[1])
    return found


def moved_by_a_layer(family: str, heads: tuple[int, int] | None, recompute: bool) -> tuple[Counter[str], Counter[str]]:
    few, many = seen(family, 2, heads, recompute), seen(family, 3, heads, recompute)
    return many.collectives - few.collectives, many.on_dtensors - few.on_dtensors


@pytest.mark.parametrize(
    ("family", "heads", "recompute", "gathers", "scatters"),
    [
        ("qwen3", None, False, 4, 4),
        ("llama", None, False, 4, 4),
        ("qwen3_moe", None, False, 4, 4),
        ("qwen3", None, True, 6, 5),  # the forward again, up to the last tensor that the backward reads
        (
            "qwen3",
            (3, 3),
            False,
            3,
            3,
        ),  # a whole attention only gathers in the forward and only scatters in the backward
    ],
)
def test_a_layer_moves_its_tokens_and_nothing_else(family, heads, recompute, gathers, scatters):
    """Two gathers and two scatters in either direction, and no DTensors. See [Note: communication of a layer]."""
    for collectives, on_dtensors in ranks.run(2, moved_by_a_layer, family, heads, recompute):
        assert collectives == {"all_gather_into_tensor": gathers, "reduce_scatter_tensor": scatters}
        assert not on_dtensors


def graphs_of_a_layer() -> list[Counter[str]]:
    """Collectives in each graph, forward and backward, that compiling a model's layers gives on one rank."""
    found: list[Counter[str]] = []

    def read(graph: Any, inputs: Any) -> Any:
        called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
        names = [t.overloadpacket.__name__ for t in called if getattr(t, "namespace", "") == "_c10d_functional"]
        found.append(Counter(name for name in names if name != "wait_tensor"))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=read, bw_compiler=read, partition_fn=min_cut_rematerialization_partition)
    real, layout = torch.compile, dataclasses.replace(LAYOUT, microbatches=2)
    torch.compile = lambda function, **options: real(function, backend=backend, fullgraph=True, **options)  # in a fork
    case = Case("llama", layout, 3, tied=False, kind="packed")
    engine = MeshEngine(build(case).float(), MeshPlan(layout, compile="on", compute_dtype="fp32"))
    for batch in batches(case):
        engine.train_step(batch)
    return found


@pytest.mark.slow
def test_compiled_layers_are_one_graph_with_the_same_collectives():
    """The compiler saves their results instead of calling them again in the backward."""
    moved = {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2}
    assert ranks.run(2, graphs_of_a_layer) == [[moved, moved]] * 2


def test_a_mixture_of_tensor_ranks_runs_eager():
    """Each microbatch gives a rank's experts a different number of tokens, for each of which the compiler would make new code."""
    case = Case("qwen3_moe", LAYOUT, 2, tied=False)

    def compiled() -> bool:
        return MeshEngine(build(case).float(), MeshPlan(LAYOUT, compile="on", compute_dtype="fp32")).compiled

    assert ranks.run(2, compiled) == [False, False]


def test_the_padding_row_has_no_gradient_on_any_rank(monkeypatch):
    """`padding_idx` counts rows of the whole vocabulary, of which a rank holds a part."""
    case = Case("llama", LAYOUT, 2, tied=False, kind="plain")
    padding = int(batches(case)[0]["input_ids"].max())
    assert padding > families.VOCAB // 2 + 1, "on the second rank"
    llama = families.BY_NAME["llama"]
    padded = dataclasses.replace(llama, overrides={**llama.overrides, "pad_token_id": padding})
    monkeypatch.setitem(families.BY_NAME, "llama_padded", padded)
    case = dataclasses.replace(case, family="llama_padded")
    want = plain(case)
    assert not want.gradients["model.embed_tokens.weight"][padding].any()
    assert not differences(on_ranks(case), want)
