"""The real job: fine-tune SmolLM2-135M-Instruct on Alpaca's questions and answers, and compare with plain transformers.

Use: python benchmarks/smollm2_alpaca.py MODEL DATA RUN_DIR [--section.key value ...]
     MODEL    SmolLM2-135M-Instruct as a Hugging Face folder
     DATA     a file of instruction, input and output (LLaMA-Factory's alpaca_en_demo.json)
     RUN_DIR  a folder that does not exist yet

The run itself is `megatrain.train`. On the same rows, plain transformers computes the loss of the first batch before the
run, and the held-out loss of the checkpoint after it, one document at a time and without packing. The table is printed last.
"""

from __future__ import annotations

import platform
import resource
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import megatrain as mt
from megatrain.data.rows import StepLoader
from megatrain.metrics.record import read_records
from megatrain.run.prepare import prepare

QUESTION = "Give three tips for staying healthy."
ANSWER_TOKENS = 96
LOSS_TOLERANCE = 1e-5
"""Relative, in fp32: packed rows and single documents are summed in different order."""


def run_config(model: str, data: str, run_dir: str, overrides: list[str]) -> mt.RunConfig:
    """30 steps of two rows of 1,024 tokens, in fp32 on every device."""
    sections = {
        "model": {"path": model},
        "data": {"train": data, "val": {"fraction": 0.05}, "max_tokens": 1024},
        "batch": {"tokens_per_step": 2048},
        "optim": {"learning_rate": 2e-5, "weight_decay": 0.01, "max_grad_norm": 1.0},
        "schedule": {"kind": "cosine", "warmup_steps": 3, "min_lr_ratio": 0.1, "steps": 30},
        "precision": {"compute_dtype": "fp32"},
        "eval": {"at_start": True, "every_steps": 10},
        "run": {"dir": run_dir},
    }
    return mt.load_config(sections, overrides)


def documents_of(batch: Mapping[str, torch.Tensor]) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """(input_ids, labels), each (1, T), of every document in packed rows; padding has no targets and is skipped."""
    for ids, labels, documents in zip(batch["input_ids"], batch["labels"], batch["document_ids"], strict=True):
        for number in documents.unique().tolist():
            here = documents == number
            if (labels[here] != -100).any():
                yield ids[here][None], labels[here][None]


@torch.no_grad()
def plain_loss(model: Any, batches: Iterable[Mapping[str, torch.Tensor]]) -> float:
    """Mean cross entropy over all target tokens of the batches, by plain transformers, one document at a time."""
    loss_sum, tokens = 0.0, 0
    for batch in batches:
        for ids, labels in documents_of(batch):
            targets = int((labels[:, 1:] != -100).sum())
            loss_sum += model(input_ids=ids.to(model.device), labels=labels.to(model.device)).loss.item() * targets
            tokens += targets
    return loss_sum / tokens


@torch.no_grad()
def answer(model: Any, tokenizer: Any) -> str:
    """The model's greedy answer to QUESTION."""
    chat = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    prompt = prompt.to(model.device)
    ids = model.generate(**prompt, max_new_tokens=ANSWER_TOKENS, do_sample=False)
    return tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def plain_model(folder: str | Path) -> Any:
    """The model in plain transformers and fp32."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().to(device)


def set_exact_weights(plain: Any, source: str, checkpoint: Path) -> None:
    """Load a checkpoint's fp32 master weights into a plain model; the checkpoint's bf16 weights are these, rounded."""
    plan = mt.ExecutionPlan(compute_dtype="fp32", gradient_plane=False)
    with mt.HostEngine(source, plan, optim=mt.AdamW(max_grad_norm=None)) as engine:
        engine.load(checkpoint)
        plain.load_state_dict(dict(engine.named_parameters()), strict=False)
    plain.tie_weights()


def main(model: str, data: str, run_dir: str, overrides: list[str]) -> None:
    run = run_config(model, data, run_dir, overrides)
    prepared = prepare(run, resume=None, log=print)
    assert prepared.val is not None
    held_out = list(StepLoader(prepared.val, run.rows_per_step, seed=0, shuffle=False).epoch())
    tokenizer = AutoTokenizer.from_pretrained(model)

    print("plain transformers, before", flush=True)
    plain = plain_model(model)
    plain_first = plain_loss(plain, [prepared.loader.batch(0)])
    plain_held_out = plain_loss(plain, held_out)
    answer_before = answer(plain, tokenizer)
    print(f"first loss {plain_first:.6f}, held out {plain_held_out:.6f}; {answer_before!r}", flush=True)
    del plain

    start = time.perf_counter()
    summary = mt.train(run)
    train_s = time.perf_counter() - start
    assert summary.first_loss is not None and summary.checkpoint is not None
    difference = abs(summary.first_loss - plain_first) / plain_first
    print(
        f"first training loss {summary.first_loss:.7f}, plain transformers {plain_first:.7f}: {difference:.1e} relative"
    )
    assert difference <= LOSS_TOLERANCE, f"the first loss differs from plain transformers by {difference:.1e}"

    print("plain transformers, after", flush=True)
    trained = plain_model(summary.checkpoint)
    trained_held_out = plain_loss(trained, held_out)
    answer_after = answer(trained, tokenizer)
    set_exact_weights(trained, model, summary.checkpoint)
    exact_held_out = plain_loss(trained, held_out)

    records = read_records(summary.folder / "metrics.jsonl")
    before, steps = records[0], records[1:]
    assert before.step == 0, f"the first record is of step {before.step}"
    losses = [record.loss for record in steps if record.loss is not None]
    rate = sum(record.processed_tokens for record in steps) / sum(record.step_s for record in steps)
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"""
| loss [nats per target token] | before | after {summary.step} steps |
|---|---|---|
| training, megatrain: the first step; mean of the last five | {losses[0]:.6f} | {sum(losses[-5:]) / 5:.4f} |
| training, the same first batch by plain transformers | {plain_first:.6f} | |
| held out ({before.val_tokens:,} target tokens), megatrain, fp32 | {before.val_loss:.6f} | {steps[-1].val_loss:.6f} |
| held out, plain transformers: source folder; the checkpoint's fp32 weights | {plain_held_out:.6f} | {exact_held_out:.6f} |
| held out, plain transformers: source folder; the checkpoint's bf16 weights | {plain_held_out:.6f} | {trained_held_out:.6f} |

First loss: relative difference {difference:.1e} (allowed {LOSS_TOLERANCE:.0e}). {len(steps)} steps of at most \
{run.batch.tokens_per_step:,} tokens, {sum(record.processed_tokens for record in steps):,} tokens in all, {train_s / 60:.1f} min
with evaluation and checkpoint; {rate:.0f} tokens/s in the steps; peak RSS of the whole script {peak_gib:.1f} GiB.
{platform.machine()}, {torch.get_num_threads()} threads, device {run.run.device}; Python {platform.python_version()}, torch \
{torch.__version__}, transformers {transformers.__version__}, megatrain {mt.__version__}; {time.strftime("%Y-%m-%d")}.

Question: {QUESTION} (greedy, at most {ANSWER_TOKENS} tokens)

Before:
{answer_before}

After:
{answer_after}""")


if __name__ == "__main__":
    if len(sys.argv) < 4:
        raise SystemExit(__doc__)
    main(*sys.argv[1:4], sys.argv[4:])
