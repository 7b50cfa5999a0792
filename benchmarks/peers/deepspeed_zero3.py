"""Peer: DeepSpeed ZeRO-3 on one GPU, parameters and optimizer offloaded to pinned host memory; AdamW is DeepSpeed's CPU Adam.

Use: python benchmarks/peers/deepspeed_zero3.py [--size 4b] [--rows 32] [--tokens 1024] [--steps 4]
Needs `pip install deepspeed` and a C++ compiler, which builds CPU Adam at the first start.
"""

from __future__ import annotations

import deepspeed
import torch
from common import arguments, config, measure, one_process
from transformers import Qwen3ForCausalLM


def settings(rows: int) -> dict[str, object]:
    pinned = {"device": "cpu", "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": pinned,
            "offload_optimizer": pinned,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "stage3_prefetch_bucket_size": 200_000_000,
            "stage3_max_live_parameters": 400_000_000,
            "stage3_param_persistence_threshold": 100_000,
            "sub_group_size": 1_000_000_000,
        },
    }


def main() -> None:
    given = arguments("DeepSpeed ZeRO-3 with CPU offload")
    one_process(29512)
    torch.cuda.set_device(0)
    deepspeed.init_distributed("nccl")
    torch.manual_seed(0)
    chosen = settings(given.rows)
    with deepspeed.zero.Init(config_dict_or_path=chosen):
        model = Qwen3ForCausalLM(config(given.size))
    model.gradient_checkpointing_enable()
    model.train()
    parameters = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=chosen)

    def step(ids_BT: torch.Tensor) -> float:
        loss = engine(input_ids=ids_BT, labels=ids_BT, use_cache=False).loss
        engine.backward(loss)
        engine.step()  # clips, updates on the CPU, refreshes the bf16 weights
        return loss.item()

    measure("deepspeed zero-3", given, parameters, step)


if __name__ == "__main__":
    main()
