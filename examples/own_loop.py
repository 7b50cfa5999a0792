"""Full-parameter training in your own loop, with a `datasets` dataset and a data collator of transformers.

    python examples/own_loop.py MODEL DATA.jsonl OUT [STEPS]

If you come from `transformers.Trainer`: dataset, tokenizer, collator, `DataLoader` and learning rate are the same, and
`HostEngine.train_step` does forward, backward, clipping and the optimizer step. A batch is what collators return: CPU tensors
`input_ids`, `labels` and `attention_mask` of shape (rows, tokens), labels unshifted, -100 for tokens without a target.
Gradients are those of the mean over all target tokens of the batch, however many rows it has: there is nothing to accumulate.

DATA.jsonl holds lines like {"text": "..."}. Needs the datasets library: pip install datasets
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, DataCollatorForLanguageModeling

import megatrain as mt

MAX_TOKENS, ROWS, LEARNING_RATE = 128, 8, 1e-5


def main(model: str, data: str, out: str, steps: int = 20) -> list[float]:
    """Train, save a checkpoint that transformers loads, and return the losses."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    rows = load_dataset("json", data_files=data, split="train")
    rows = rows.map(
        lambda batch: {"input_ids": tokenizer(batch["text"], truncation=True, max_length=MAX_TOKENS)["input_ids"]},
        batched=True,
        remove_columns=rows.column_names,
    )
    # `mlm=False`: labels are the ids, and -100 on padding. A collator that masks prompts works, too.
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    loader: Any = DataLoader(
        rows, batch_size=ROWS, shuffle=True, collate_fn=collator, generator=torch.Generator().manual_seed(0)
    )
    losses: list[float] = []
    with mt.HostEngine(model, optim=mt.AdamW(learning_rate=LEARNING_RATE, max_grad_norm=1.0)) as engine:
        for step, batch in zip(range(steps), repeated(loader), strict=False):
            result = engine.train_step(dict(batch), learning_rate=cosine(step, steps))
            print(f"step {step + 1}/{steps}  loss {result.loss}  norm {result.grad_norm}  {result.tokens} tokens")
            losses += [result.loss] if result.loss is not None else []
        engine.save(out)
    return losses


def repeated(loader: Any) -> Any:
    """Endless batches; each pass over the data has another order."""
    while True:
        yield from loader


def cosine(step: int, steps: int) -> float:
    """The learning rate of a step, counted from 0."""
    return LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * step / steps))


if __name__ == "__main__":
    if len(sys.argv) not in (4, 5):
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2], sys.argv[3], *map(int, sys.argv[4:]))
