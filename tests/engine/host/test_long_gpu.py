"""Long rows on a real GPU: no memory of T x T, equal results with every setting, peaks as the formulas predict."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engines import host_engine
from families import BY_NAME, batch, build
from megatrain.commands.work import QWEN25_7B
from megatrain.engine.host.engine import HostEngine
from megatrain.machine.machine import load_machine
from megatrain.models.build import load_model_config
from megatrain.planner.model_cost import shape_of
from megatrain.planner.plan import Choice, Options, PlanRequest, Policy, StepSize
from megatrain.planner.run import caps_for, plan_of
from reference import gradient_error

pytestmark = pytest.mark.gpu

MACHINE = Path(__file__).parents[3] / "docs/machines/h200.yaml"
WIDE = {**QWEN25_7B, "num_hidden_layers": 3, "vocab_size": 32768}
"""Three layers of Qwen2.5-7B."""


SMALL: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 1 << 17,
}


def documents(tokens: int, lengths: tuple[int, ...]) -> torch.Tensor:
    """Positions (1, tokens) of documents of these lengths, repeated."""
    parts: list[torch.Tensor] = []
    while sum(map(len, parts)) < tokens:
        parts += [torch.arange(length) for length in lengths]
    return torch.cat(parts)[:tokens][None]


@pytest.mark.parametrize("kind", ["full", "sliding", "packed"])
def test_attention_never_holds_t_x_t(kind: str, tmp_path: Path) -> None:
    tokens = 32768
    family = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    if kind == "sliding":
        family = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 4096}
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, **family}))
    ids = torch.randint(0, 512, (1, tokens), generator=torch.Generator().manual_seed(0))
    data = {"input_ids": ids, "labels": ids.clone()}
    if kind == "packed":
        data["position_ids"] = documents(tokens, (5000, 1200, 9000))
    with host_engine(tmp_path, init="random", device="cuda", verify="never", head_chunk_tokens=2048) as engine:
        engine.backward(data)  # compiles
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        engine.backward(data)
        peak = torch.cuda.max_memory_allocated() - before
        assert engine.counters()["compiled_layers"] == len(engine.structure.layers)
    assert peak < tokens * tokens / 2, (
        f"{peak / 2**20:.0f} MiB; a mask of one byte an entry has {tokens**2 / 2**20:.0f}"
    )


SETTINGS: dict[str, dict[str, Any]] = {
    "attention kept": {"keep_attention": "all"},
    "mlp kept": {"keep_mlp": "all"},
    "mlp in chunks": {"mlp_chunk_tokens": 1024},
    "offloaded": {"offload_input": "all"},
    "head in chunks": {"head_chunk_tokens": 512},
    "segment": {"segment": 2},
    "all of them": {
        "keep_attention": (1, 3), "keep_mlp": (2,), "mlp_chunk_tokens": 1024, "offload_input": (0,), "head_chunk_tokens": 512
    },
}  # fmt: skip


@pytest.mark.parametrize("compile", ["off", "auto"])
def test_loss_and_gradients_at_8k_with_every_setting_equal_those_without(compile: str) -> None:
    family = BY_NAME["llama"]
    data = batch(family, seed=0, rows=1, tokens=8192)

    def step(**options: Any) -> tuple[float | None, dict[str, torch.Tensor]]:
        given = {"device": "cuda", "compute_dtype": "fp32", "verify": "never", "compile": compile, **options}
        with host_engine(build(family, seed=0), **given) as engine:
            result = engine.backward(data)
            return result.loss, {name: gradient.clone() for name, gradient in engine.named_gradients()}

    want_loss, want = step()
    compiled_too = ("attention kept", "mlp in chunks", "all of them")
    for name, options in SETTINGS.items():
        if compile == "auto" and name not in compiled_too:
            continue
        loss, got = step(**options)
        assert loss == pytest.approx(want_loss, rel=1e-6), name
        error, worst = gradient_error(got, want)
        assert error < 1e-4, f"{name}: {worst}: {error:.1e}"


@pytest.mark.parametrize(
    ("policy", "tokens", "mlp_chunk_tokens", "offloaded"),
    [
        ("recompute", 32768, None, 0),
        ("recompute", 65536, 16384, 0),
        ("recompute", 131072, 16384, 2),
        ("keep_attention", 65536, 16384, 0),
        ("keep_attention", 131072, 16384, 0),
        ("keep_attention", 131072, 16384, 2),
        ("selective", 32768, None, 0),
        ("keep", 32768, None, 0),
    ],
)
def test_the_peak_is_that_of_the_formula(
    policy: Policy, tokens: int, mlp_chunk_tokens: int | None, offloaded: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(WIDE))
    shape = shape_of(load_model_config(tmp_path))
    choice = Choice(0, False, False, (policy,) * shape.depth, offloaded, 1, 1, 8192, mlp_chunk_tokens)
    machine = load_machine(MACHINE)
    made = plan_of(PlanRequest(shape, machine, StepSize(1, tokens), caps_for(machine), Options()), choice)
    ids = torch.randint(0, shape.vocabulary, (1, tokens), generator=torch.Generator().manual_seed(0))
    gc.collect()  # memory that a failed case still holds would be freed in the middle of this one
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with HostEngine(tmp_path, made.execution, init="random", device="cuda", verify="never") as engine:
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            engine.train_step({"input_ids": ids, "labels": ids.clone()})
        peak = torch.cuda.max_memory_allocated() - before
    lines = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in made.device.items())
    assert peak == pytest.approx(made.device_bytes, rel=0.05), (
        f"{peak / 2**30:.2f} GiB measured, {made.device_bytes / 2**30:.2f} by formula in the {made.device_moment}: {lines}"
    )
