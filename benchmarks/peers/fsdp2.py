"""Peer: PyTorch FSDP2 with CPU offload on one GPU. Parameters, gradients and moments are on the host; AdamW is torch's fused one.

Use: python benchmarks/peers/fsdp2.py [--size 4b] [--rows 32] [--tokens 1024] [--steps 4]
Gradients arrive on the host in fp32, where torch clips them and updates the weights. Layers are fetched, recomputed and
freed one by one.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from common import arguments, config, measure, one_process
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from transformers import Qwen3ForCausalLM


def build(size: str) -> Qwen3ForCausalLM:
    """The model with random fp32 master weights on the host, sharded over one process and offloaded."""
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config(size))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    policies = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(pin_memory=True),
    }
    for layer in model.model.layers:
        fully_shard(layer, **policies)
    fully_shard(model, **policies)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local = parameter.to_local()
            torch.nn.init.ones_(local) if "norm" in name else torch.nn.init.normal_(local, std=0.02)
    # to_empty has cleared the rotary table, which is a buffer
    rotary = model.model.rotary_emb
    fresh = type(rotary)(config(size), device="cuda")
    for name, buffer in fresh.named_buffers():
        setattr(rotary, name, buffer)
    if hasattr(fresh, "original_inv_freq"):
        rotary.original_inv_freq = fresh.original_inv_freq
    return model


def main() -> None:
    given = arguments("FSDP2 with CPU offload")
    one_process(29511)
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    torch.manual_seed(0)
    model = build(given.size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.01, fused=True)

    def step(ids_BT: torch.Tensor) -> float:
        loss = model(input_ids=ids_BT, labels=ids_BT, use_cache=False).loss
        loss.backward()
        torch.cuda.synchronize()  # until all gradients are on the host
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    measure("fsdp2", given, sum(p.numel() for p in model.parameters()), step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
