"""A tiny but complete run for tests: model folder with tokenizer and chat template, data files, config."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WORDS = "the a cat dog bird tree river sees likes finds small large old new and or but red green blue".split()


def sentence(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


@functools.cache
def _tokenizer_json(seed: int = 0) -> str:
    rng = random.Random(seed)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((sentence(rng, 20) for _ in range(50)), trainer)
    return tokenizer.to_str()


def write_model(folder: Path, *, weights: bool = True, chat_template: bool = True, **config: Any) -> Path:
    """A Llama of some ten thousand parameters, as a Hugging Face folder."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_tokenizer_json()), eos_token="<|end|>", pad_token="<|pad|>"
    )
    if chat_template:
        tokenizer.chat_template = CHAT_TEMPLATE
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
