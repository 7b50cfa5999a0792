"""A tiny but complete run for tests: model folder with tokenizer and chat template, data files, config."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from megatrain.config.load import load_config
from megatrain.config.schema import RunConfig
from megatrain.metrics.record import StepRecord, read_records
from tiny_tokenizer import CHATML, make_tokenizer

# Words of the corpus that the tokenizer was trained on: about a token each.
WORDS = (
    "the quick brown fox jumps over lazy dog and does not care at all what is capital of France Paris user assistant "
    "system think hello answer question thought number one two three"
).split()


def sentence(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


def write_model(folder: Path, *, weights: bool = True, chat_template: bool = True, **config: Any) -> Path:
    """A Llama of some ten thousand parameters, as a Hugging Face folder."""
    tokenizer = make_tokenizer(CHATML if chat_template else None)
    tokenizer.save_pretrained(folder)
    fields = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    llama = LlamaConfig(**{**fields, **config})
    if weights:
        torch.manual_seed(0)
        LlamaForCausalLM(llama).save_pretrained(folder)
    else:
        llama.save_pretrained(folder)
    return folder


def write_texts(path: Path, count: int, seed: int = 1) -> Path:
    rng = random.Random(seed)
    path.write_text("".join(json.dumps({"text": sentence(rng, rng.randint(5, 60))}) + "\n" for _ in range(count)))
    return path


def write_chats(path: Path, count: int, seed: int = 2) -> Path:
    rng = random.Random(seed)
    with path.open("w") as file:
        for _ in range(count):
            user, assistant = sentence(rng, 8), sentence(rng, 12)
            messages = [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def config(folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """A run of a few steps on the CPU, everything below `folder`: model/, texts.jsonl, run/, cache/."""
    plain: dict[str, dict[str, Any]] = {
        "model": {"path": str(folder / "model")},
        "data": {"train": str(folder / "texts.jsonl"), "max_tokens": 64, "cache_dir": str(folder / "cache")},
        "batch": {"tokens_per_step": 256},
        "optim": {"learning_rate": 1e-3},
        "schedule": {"kind": "constant", "steps": 4},
        "run": {"dir": str(folder / "run"), "device": "cpu", "threads": 1},
    }
    return {name: {**plain.get(name, {}), **sections.get(name, {})} for name in {**plain, **sections}}


def prepare(folder: Path) -> Path:
    """The files that `config` names."""
    write_model(folder / "model")
    write_texts(folder / "texts.jsonl", 60)
    return folder


def make(files: Path, tmp_path: Path, *overrides: str) -> RunConfig:
    """The config of a run in `tmp_path`, of the files of `prepare`."""
    return load_config(config(files, run={"dir": str(tmp_path / "run")}), overrides)


def records(run: RunConfig) -> list[StepRecord]:
    return read_records(Path(run.run.dir) / "metrics.jsonl")


def log_of(run: RunConfig) -> str:
    return (Path(run.run.dir) / "log.txt").read_text()


def checkpoints(run: RunConfig) -> list[str]:
    """Names of the checkpoints, oldest first."""
    return sorted(path.name for path in (Path(run.run.dir) / "checkpoints").iterdir() if path.is_dir())


def group_ended() -> Iterator[None]:
    """A fixture. After an error a rank leaves its process group to die with the process; here the process goes on."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
