"""What a compiled layer holds and costs by activation memory budget, and other figures that the plan is made of.

Use: python benchmarks/layer_budget.py SIZE ROWS TOKENS BUDGET...
"""

from __future__ import annotations

import sys
import time

import torch
from host_step import config_folder
from torch.nn.functional import cross_entropy

from megatrain.device.attention import fastest_attention, measured_backends
from megatrain.host_memory.layout import FlatLayout
from megatrain.host_memory.store import UnitPlanes
from megatrain.models.build import build_meta_model, load_model_config
from megatrain.models.structure import dissect
from megatrain.models.templates import LayerCode
from megatrain.optim.adamw import AdamW
from megatrain.optim.spec import segments_of


def seconds(run, repeat=5):
    times = []
    for _ in range(repeat):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def gpu_adamw(numel=193_000_000):
    g = torch.randn(numel, device="cuda").bfloat16()
    kinds = {
        "hi": torch.randn(numel, device="cuda").bfloat16(),
        "lo": torch.randint(-9, 9, (numel,), device="cuda").short(),
        "m": torch.randn(numel, device="cuda") * 0.1,
        "v": torch.rand(numel, device="cuda") * 0.1,
    }
    layout, optim = FlatLayout((), numel), AdamW()
    planes = UnitPlanes.of("unit", layout, kinds)
    twin = UnitPlanes.of("unit", layout, {kind: plane.clone() for kind, plane in kinds.items()})
    segments = segments_of(
        [("a.weight", (numel // 2, 1), 0, numel // 2), ("b", (numel // 2,), numel // 2, numel // 2)], optim
    )
    coefficients = optim.coefficients(3, 1e-3, 0.37)
    optim.update_on_device(planes, g, segments, coefficients)
    optim.update_unit_(twin, g, segments, coefficients)
    same = [torch.equal(plane.view(torch.uint8), twin.state()[kind].view(torch.uint8)) for kind, plane in kinds.items()]
    t = seconds(lambda: optim.update_on_device(planes, g, segments, coefficients))
    print(f"gpu adamw: same bits {same}, {numel / t / 1e9:.1f} G params/s", flush=True)


def head(size, tokens_list, hidden, vocabulary=151936):
    weight = (torch.randn(vocabulary, hidden, device="cuda") * 0.02).bfloat16().requires_grad_()
    loss_of = {
        "eager": lambda h, y: cross_entropy(torch.nn.functional.linear(h, weight).float(), y, reduction="sum"),
    }
    loss_of["compiled"] = torch.compile(loss_of["eager"], dynamic=False)
    for tokens in tokens_list:
        h = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        y = torch.randint(0, vocabulary, (tokens,), device="cuda")
        for name, f in loss_of.items():
            torch.cuda.reset_peak_memory_stats()
            base = torch.cuda.memory_allocated()
            t = seconds(lambda: torch.autograd.grad(f(h, y), [h, weight]))
            peak = torch.cuda.max_memory_allocated() - base
            print(
                f"head {name} {tokens} tokens: {t / tokens * 32768:.3f} s per 32k tokens, peak {peak / 2**30:.2f} GiB",
                flush=True,
            )


def main(size, rows, tokens, budgets):
    config = load_model_config(config_folder(size))
    meta = build_meta_model(config, compute_dtype=torch.bfloat16)
    structure = dissect(meta)
    unit = structure.layers[0]
    module = structure.layer_stack()[0]
    flat = (torch.randn(unit.layout.numel, device="cuda") * 0.02).bfloat16()
    weights = {n: v.requires_grad_() for n, v in unit.layout.views(flat).items()}
    x = torch.randn(rows, tokens, config.hidden_size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    rotary = meta.model.rotary_emb.cuda()
    position = rotary(x, torch.arange(tokens, device="cuda")[None])
    order = measured_backends(
        config.num_attention_heads, config.num_key_value_heads, config.head_dim, tokens, torch.bfloat16, x.device
    )
    print("attention", [(b.name, round(ms, 2)) for b, ms in order], flush=True)
    kwargs = {"position_embeddings": position, "attention_mask": None, "position_ids": None, "use_cache": False}
    with fastest_attention(tuple(b for b, _ in order)):
        for budget in budgets:
            code = LayerCode(module, f"b{int(budget * 1000)}", compiled=True, budget=budget)
            started = time.perf_counter()
            y = code("keep", weights, (x,), kwargs)
            torch.autograd.grad(y, [x, *weights.values()], torch.ones_like(y))
            torch.cuda.synchronize()
            compiled = time.perf_counter() - started
            del y
            base = torch.cuda.memory_allocated()
            y = code("keep", weights, (x,), kwargs)
            torch.cuda.synchronize()
            held = torch.cuda.memory_allocated() - base
            g = torch.ones_like(y)
            torch.cuda.reset_peak_memory_stats()
            at = torch.cuda.memory_allocated()
            grads = torch.autograd.grad(y, [x, *weights.values()], g)
            peak = torch.cuda.max_memory_allocated() - at
            del grads, y
            forward = seconds(lambda: code("keep", weights, (x,), kwargs))
            both = seconds(lambda: torch.autograd.grad(code("keep", weights, (x,), kwargs), [x, *weights.values()], g))
            print(
                f"budget {budget}: compile {compiled:.0f} s, held {held / 2**30:.2f} GiB, backward peak +{peak / 2**30:.2f} GiB, "
                f"forward {forward * 1e3:.1f} ms, both {both * 1e3:.1f} ms",
                flush=True,
            )
        code = LayerCode(module, "fwd", compiled=True)
        with torch.no_grad():
            code("forward", weights, (x,), kwargs)
            print(
                f"forward without gradients {seconds(lambda: code('forward', weights, (x,), kwargs)) * 1e3:.1f} ms",
                flush=True,
            )


if __name__ == "__main__":
    gpu_adamw()
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), [float(b) for b in sys.argv[4:]])
    head(sys.argv[1], [1408, 2816, 8192], 4096)
