"""The parity comparison finds known faults of parallel trainers, injected on purpose."""

from __future__ import annotations

import pytest
from torch.distributed.fsdp import FSDPModule

from megatrain.engine.mesh import gradients
from megatrain.engine.mesh import pipeline as schedule
from megatrain.engine.mesh.context_parallel import TokenMap
from megatrain.engine.mesh.layout import Layout
from megatrain.engine.mesh.pipeline import Runner
from mesh_cases import Case
from mesh_parity import differences, on_ranks, plain

PIPELINE = Case("llama", Layout(pipeline=2, shard=1), 4, tied=True, kind="plain")
SHARDED = Case("llama", Layout(shard=2), 4, tied=True, kind="plain")
SPLIT = Case("qwen3", Layout(tensor=2, shard=1), 4, tied=False, kind="plain")
COPIES = Case("llama", Layout(replicate=2, shard=1), 4, tied=True, kind="plain")
CONTEXT = Case("llama", Layout(context=2, shard=1), 4, tied=True, kind="packed")


def no_tie_sync() -> None:
    gradients.Gradients._sum_ties = lambda self: None


def local_norm() -> None:
    """Each rank clips by the norm of its own shard."""
    finish = gradients.Gradients.finish

    def local_finish(self, loss):
        own = self._squares().sqrt().item()
        return finish(self, loss)[0], own

    gradients.Gradients.finish = local_finish


def copies_counted_twice() -> None:
    def squares(self):
        return sum(gradients.local(p.grad).double().square().sum() for p, _ in self.owned().values())

    gradients.Gradients._squares = squares


def local_token_mean() -> None:
    """Each rank divides by its own number of target tokens, and the ranks are averaged."""
    run = Runner.forward_backward

    def mean(self, microbatches):
        own = sum(int((m["labels"] != -100).sum()) for m in microbatches)
        for stage in self.stages:
            stage.loss_divisor = float(own) * self._layout.data
        return run(self, microbatches)

    Runner.forward_backward = mean


def averaged_reduction() -> None:
    """FSDP's default: gradients are divided by the number of data ranks."""
    FSDPModule.set_gradient_divide_factor = lambda self, factor: None


def averaged_microbatches() -> None:
    """The default of torch's schedules: gradients are divided by the number of microbatches."""
    for name, kind in schedule.SCHEDULE_CLASSES.items():
        schedule.SCHEDULE_CLASSES[name] = lambda *a, kind=kind, **k: kind(*a, **{**k, "scale_grads": True})


def documents_ignored() -> None:
    mask = TokenMap.mask

    def leaky(self, window):
        self.documents = None
        return mask(self, window)

    TokenMap.mask = leaky


def partial_gradients() -> None:
    """Gradients of parameters shared by tensor ranks are not summed over them."""
    gradients.all_reduce_coalesced = lambda shares, group: None


@pytest.mark.parametrize(
    ("case", "fault"),
    [
        (PIPELINE, no_tie_sync),
        (PIPELINE, local_norm),
        (SHARDED, local_norm),
        (COPIES, copies_counted_twice),
        (SPLIT, copies_counted_twice),
        (SHARDED, local_token_mean),
        (COPIES, averaged_reduction),
        (PIPELINE, averaged_microbatches),
        (CONTEXT, documents_ignored),
        (SPLIT, partial_gradients),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_the_comparison_finds_the_fault(case, fault):
    try:
        found = differences(on_ranks(case, fault), plain(case), tolerance=1e-6)
    except AssertionError as error:  # replicas differ, which is found before anything is compared
        found = [str(error)]
    print("\n".join(found))
    assert found, "the fault went unnoticed"


@pytest.mark.parametrize("case", [PIPELINE, SHARDED, SPLIT, COPIES, CONTEXT], ids=str)
def test_without_a_fault_nothing_differs(case):
    assert not differences(on_ranks(case), plain(case))
