"""One rank of engine/host/test_multi_gpu.py, in a separate process: a crash or hang there ends no test session.

    PYTHONPATH=src:tests/support torchrun --nproc-per-node 2 tests/support/rank_gpu_child.py RESULTS.jsonl [--device cuda]

Rank 0 writes a JSON line per case as soon as it ends: the losses of the calm run, whether the disturbed run has the same bits,
and the losses of one device alone.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import families
from engines import host_engine
from gpu_cases import arguments, run_cases
from megatrain.device.streams import Streams
from megatrain.engine.mesh import launch
from megatrain.optim.adamw import AdamW

OPTIM = AdamW(learning_rate=1e-3, max_grad_norm=1.0)


@dataclass(frozen=True)
class RankGpuCase:
    """A plan on all ranks, calm and with delays, and on one device.

    Attributes:
        plan: Keywords of `engines.host_engine`.
        tolerance: Of the losses, relative to those of one device.
    """

    name: str
    plan: dict[str, Any] = field(default_factory=dict)
    steps: int = 20
    family: str = "qwen3"
    tolerance: float = 1e-3

    def __str__(self) -> str:
        return self.name


CASES = [
    RankGpuCase("streamed", steps=50),
    RankGpuCase("staged", {"pin": "staged"}),
    RankGpuCase("accumulated", {"accumulation_steps": 2, "microbatch_rows": 1}),
    RankGpuCase("resident", {"resident": "all"}),
    RankGpuCase("replicated", {"resident": "all", "weight_slots": "all", "accumulation_steps": 2}),
    RankGpuCase("a-copy-on-each-host", {"replicas": 2}),
    RankGpuCase("some-resident", {"resident": ("embedding", "layer.1"), "accumulation_steps": 2}),
    RankGpuCase("kept-and-offloaded", {"keep": (0,), "offload_input": (1, 2), "weight_slots": 3}),
    RankGpuCase("replicas", {"replicas": 2, "resident": ("layer.1",)}),
    RankGpuCase("replicas-accumulated", {"replicas": 2, "accumulation_steps": 2, "microbatch_rows": 1}),
    RankGpuCase("tied-gemma2", {"resident": ("head", "layer.0")}, family="gemma2"),
    RankGpuCase("compiled", {"compile": "on"}, steps=10, tolerance=2e-3),
]


def random_delays(seed: int) -> Callable[[str, Streams], None]:
    """Delays a stream by up to about a millisecond, at random, after work was queued on it."""
    generator = random.Random(seed)

    def disturb(name: str, streams: Streams) -> None:
        if streams.cuda and generator.random() < 0.3:
            with torch.cuda.stream(getattr(streams, name)):
                torch.cuda._sleep(generator.randrange(1, 2_000_000))

    return disturb


def trained(case: RankGpuCase, device: torch.device, **options: Any) -> tuple[list[float | None], str]:
    """Losses, and a hash of all norms and of the final weights."""
    family = families.BY_NAME[case.family]
    given = {"compute_dtype": "bf16", "compile": "off", "optim": OPTIM, "threads": 4, **case.plan, **options}
    losses, digest = [], hashlib.sha256()
    with host_engine(families.build(family, seed=0), device=device, verify="never", **given) as engine:
        for step in range(case.steps):
            rows = families.batch(family, seed=step, rows=6, tokens=64, kind="packed")
            result = engine.train_step(rows)
            losses.append(result.loss)
            digest.update(repr((result.loss, result.grad_norm)).encode())
        for _, weight in engine.named_parameters():
            digest.update(weight.contiguous().numpy().tobytes())
    return losses, digest.hexdigest()


def run(case: RankGpuCase, device: torch.device) -> dict[str, Any]:
    world, rank = dist.group.WORLD, dist.get_rank()
    calm, bits = trained(case, device, group=world)
    _, disturbed = trained(case, device, group=world, disturb=random_delays(17 + rank), poison=True)
    alone = trained(case, device)[0] if rank == 0 else []
    dist.barrier()
    return {"losses": calm, "same_bits": bits == disturbed, "alone": alone}


def main() -> None:
    given = arguments(__doc__)
    device = launch.device_of_rank(given.device)
    launch.join(device)
    run_cases(CASES, partial(run, device=device), given.results, writes=dist.get_rank() == 0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
