"""Full-parameter training in a loop of one's own: a `datasets` data set and a data collator of transformers.

    python examples/own_loop.py MODEL DATA.jsonl OUT [STEPS]

For those who come from `transformers.Trainer`: data set, tokenizer, collator, `DataLoader` and learning rate are what they are
there, and `HostEngine.train_step` stands for forward, backward, clipping and optimizer. A batch is CPU tensors `input_ids`,
`labels` and `attention_mask` of shape (rows, tokens), labels unshifted, -100 where nothing is to be learnt: what collators
return.
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
    # `mlm=False`: labels are the ids, and -100 on padding. A collator with a prompt mask of its own does as well.
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
    """Batches without an end, each pass in another order."""
    while True:
        yield from loader


def cosine(step: int, steps: int) -> float:
    """The learning rate of a step, 0 the first."""
    return LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * step / steps))


if __name__ == "__main__":
    if len(sys.argv) not in (4, 5):
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2], sys.argv[3], *map(int, sys.argv[4:]))
