"""The rows of docs/benchmarks.md as a user gets them: `megatrain train`, its defaults, packed text; beside `megatrain bench`.

Use: python benchmarks/front_door.py [--no-bench] [--device cpu] ROW...

Rows: 8b-32 8b-8 8b-24gib 14b 17b 4b-save 0.6b-6gib 115b-10 tiny; each is a shape with random weights, rows x tokens of a step,
and settings of the config. The text is the Python source of the installed packages, its tokenizer is trained on it, and both are
made once, in FRONT_DOOR (a folder; by default in the temporary folder).

A row trains for two epochs (rows of very slow steps: less), whose last step is partial, with a validation after each of them, and
where the disk holds it a save in between. Reported: the median of the full steps after the second, as tokens/s; the slowest of
them; functions compiled after the first step and allocations that were tried again, which must be 0; plan and measurement.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import megatrain as mt
from megatrain.commands.bench import bench
from megatrain.commands.work import Work, folder_of
from megatrain.errors import MegatrainError
from megatrain.metrics.record import StepRecord, read_records
from megatrain.planner.run import plan_run
from megatrain.units import GIB

VOCABULARY, TEXT_BYTES = 16_000, 14_000_000
LLAMA_115B = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8192, "intermediate_size": 28672,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
}  # fmt: skip
"""The layers of Llama-70B; 132 of them are 115 B parameters."""


@dataclass(frozen=True)
class Row:
    shape: str  # a name that `bench --shape` knows, or of a config above
    rows: int  # of 1,024 tokens, a step
    steps: int  # an epoch, the last of them partial
    epochs: float = 2.0
    layers: int | None = None  # instead of the shape's
    saves: bool = False
    settings: dict[str, Any] = field(default_factory=dict)  # config keys that are not at their default
    tokens: int = 1024


ROWS = {
    "8b-32": Row("qwen3-8b", 32, 6),
    "8b-8": Row("qwen3-8b", 8, 8),
    "8b-24gib": Row("qwen3-8b", 64, 4, settings={"memory.device_gib": 24}),
    "14b": Row("qwen3-14b", 32, 4),
    "17b": Row("qwen3-17b", 32, 4, epochs=1.5),
    "4b-save": Row("qwen3-4b", 32, 20, saves=True),
    "0.6b-6gib": Row("qwen3-0.6b", 16, 15, settings={"memory.device_gib": 6}),
    "115b-10": Row("llama-115b", 32, 3, epochs=1.7, layers=10),
    "tiny": Row("tiny", 4, 4, tokens=64),
}


def make_text(folder: Path) -> Path:
    """A JSONL file of Python sources, and beside it their tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    file = folder / "text.jsonl"
    if file.exists():
        return file
    folder.mkdir(parents=True, exist_ok=True)
    packages = Path(sysconfig.get_paths()["purelib"])
    texts: list[str] = []
    size = 0
    for path in sorted(Path(torch.__file__).parent.rglob("*.py")) + sorted(packages.rglob("*.py")):
        text = path.read_text(errors="replace")[:24_000]
        if len(text) > 400:
            texts.append(text)
            size += len(text)
        if size > TEXT_BYTES:
            break
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>"]
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts[:400], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[0], pad_token=special[0])
    fast.save_pretrained(folder / "tokenizer")
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


def make_model(row: Row, folder: Path) -> Path:
    """The shape's folder with the tokenizer; without weights, which are made at random."""
    model = folder / "models" / f"{row.shape}-{row.layers or 'all'}"
    shutil.copytree(folder / "tokenizer", model, dirs_exist_ok=True)
    if row.shape == "llama-115b":
        (model / "config.json").write_text(json.dumps({**LLAMA_115B, "num_hidden_layers": row.layers}))
        return model
    folder_of(row.shape, model)
    if row.shape == "tiny":  # a vocabulary that holds the tokenizer's
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "vocab_size": VOCABULARY + 64}))
    return model


def take_text(row: Row, text: Path, folder: Path) -> tuple[Path, Path]:
    """Files that fill the row's steps, the last one by a third, and a held-out one of half a step."""
    wanted = int((row.steps - 0.67) * row.rows * row.tokens * 3.9)  # some 4 bytes a token
    train, val = folder / f"train-{row.rows}-{row.steps}-{row.tokens}.jsonl", folder / f"val-{row.rows}.jsonl"
    lines = text.read_text().splitlines(keepends=True)
    taken = 0
    with train.open("w") as out:
        while taken < wanted:
            line = lines.pop(0)
            out.write(line)
            taken += len(line)
    val.write_text("".join(lines[: max(2, row.rows // 8)]))
    return train, val


def config_of(row: Row, folder: Path, device: str) -> mt.RunConfig:
    text = make_text(folder)
    train, val = take_text(row, text, folder)
    steps = round(row.steps * row.epochs)
    sections: dict[str, dict[str, Any]] = {
        "model": {"path": str(make_model(row, folder)), "init": "random"},
        "data": {"train": str(train), "val": str(val), "max_tokens": row.tokens, "cache_dir": str(folder / "cache")},
        "batch": {"tokens_per_step": row.rows * row.tokens},
        "schedule": {"steps": steps},
        "eval": {"every_steps": row.steps},
        "checkpoint": {"at_end": False, "every_steps": row.steps if row.saves else None},
        "run": {"dir": str(folder / "run"), "device": device},
    }
    return mt.load_config(sections, [f"{name}={value}" for name, value in row.settings.items()])


def full_steps(records: list[StepRecord]) -> list[StepRecord]:
    """The steps that count: as many rows as any, and not the first two, which touch memory for the first time."""
    most = max(record.rows for record in records)
    return [record for record in records if record.rows == most and record.step > 2]


def measure(name: str, row: Row, folder: Path, device: str, with_bench: bool) -> dict[str, Any]:
    run = config_of(row, folder, device)
    shutil.rmtree(run.run.dir, ignore_errors=True)
    gpu = device != "cpu" and torch.cuda.is_available()
    plan = plan_run(run) if gpu else None
    started = time.perf_counter()
    mt.train(run)
    wall_s = time.perf_counter() - started
    records = read_records(Path(run.run.dir) / "metrics.jsonl")
    steps, pipelines = full_steps(records), [record.pipeline for record in records]
    step_s = statistics.median(record.step_s for record in steps)
    speed = statistics.median(record.processed_tokens / record.step_s for record in steps)
    found: dict[str, Any] = {
        "row": name,
        "step_s": round(step_s, 4),
        "tokens_per_s": round(speed),
        "slowest_s": round(max(record.step_s for record in records[2:]), 3),
        "partial_step_s": round(min((r.step_s for r in records if r.rows < steps[0].rows), default=0.0), 3),
        "first_step_s": round(records[0].step_s, 2),
        "wall_s": round(wall_s, 1),
        "compiled_after_first": sum(p.compilations for p in pipelines[1:] if p),
        "allocation_retries": sum(p.allocation_retries for p in pipelines if p),
        "device_gib": round((records[-1].device_peak_bytes or 0) / GIB, 1),
        "host_gib": round(max(record.host_rss_bytes for record in records) / GIB, 1),
        "steps": len(steps),
    }
    if plan is not None:
        found |= {
            "plan_step_s": round(plan.seconds, 4),
            "plan_time": f"{step_s / plan.seconds - 1:+.1%}",
            "plan_device": f"{(records[-1].device_peak_bytes or 0) / plan.device_bytes - 1:+.1%}",
            "plan_host": f"{found['host_gib'] * GIB / plan.host_bytes - 1:+.1%}",
        }
    shutil.rmtree(run.run.dir, ignore_errors=True)
    free()
    if with_bench:
        work = Work(run.model.path, row.rows, row.tokens, device, device_gib=row.settings.get("memory.device_gib"))
        report = bench(work, steps=3, warmup=2, bounds=False)
        found |= {
            "bench_tokens_per_s": round(report.tokens_per_second),
            "ratio": round(speed / report.tokens_per_second, 3),
        }
        free()
    return found


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", choices=ROWS, metavar="ROW")
    parser.add_argument("--no-bench", action="store_true", help="`megatrain train` alone")
    parser.add_argument("--device", default="auto")
    words = parser.parse_args()
    folder = Path(os.environ.get("FRONT_DOOR") or Path(tempfile.gettempdir()) / "megatrain-front-door")
    results = []
    for name in words.rows:
        try:
            results.append(measure(name, ROWS[name], folder, words.device, not words.no_bench))
        except MegatrainError as error:
            results.append({"row": name, "error": str(error)})
        print("result:", json.dumps(results[-1]), flush=True)
    print("\n".join(json.dumps(result) for result in results))
    return int(any("error" in result for result in results))


if __name__ == "__main__":
    sys.exit(main())
