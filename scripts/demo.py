"""`make demo`: train a small Llama from scratch and sample from it, with everything a real run uses, in about two minutes.

    train a tokenizer  -->  model folder without weights  -->  run.yaml  -->  train  -->  sample with plain transformers

The training text is the source code of Python's standard library. All output goes into a new numbered folder below `runs/demo`;
nothing is overwritten or deleted.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

import megatrain as mt
from megatrain.metrics.record import read_records

STANDARD_LIBRARY = Path(sysconfig.get_paths()["stdlib"])
TRAIN_TEXT, HELD_OUT_TEXT = STANDARD_LIBRARY / "*.py", STANDARD_LIBRARY / "json" / "*.py"
VOCABULARY = 1024
ROW_TOKENS = 128
PROMPT = "def read_lines(self, "
SAMPLE_TOKENS = 120

RUN_YAML = """\
model:    {{path: {folder}/model, init: random}}
data:     {{train: "{text}", val: "{held_out}", max_tokens: {row_tokens}, cache_dir: {folder}/tokens}}
batch:    {{tokens_per_step: {step_tokens}}}
optim:    {{learning_rate: 6e-3, weight_decay: 0.1, betas: [0.9, 0.95]}}
schedule: {{kind: cosine, warmup_ratio: 0.1, min_lr_ratio: 0.05, steps: {steps}}}
eval:     {{at_start: true}}
run:      {{dir: {folder}/run, seed: 0}}
"""


def main(words: Sequence[str] | None = None) -> None:
    arguments = _arguments(words)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # tokenizers warns if a process forks after using threads
    start = time.perf_counter()
    folder = _new_folder(arguments.dir)
    _say(f"a tokenizer of {VOCABULARY} tokens and a model without weights, in {folder}/model")
    write_model(folder / "model", arguments.text)
    config = folder / "run.yaml"
    config.write_text(
        RUN_YAML.format(
            folder=folder,
            text=arguments.text,
            held_out=HELD_OUT_TEXT,
            row_tokens=ROW_TOKENS,
            step_tokens=arguments.rows_per_step * ROW_TOKENS,
            steps=arguments.steps,
        ),
        encoding="utf-8",
    )
    _say(f"megatrain train {config}")
    print(config.read_text(encoding="utf-8"))
    summary = mt.train(mt.load_config(config))
    if summary.stopped_by is not None:
        print(f"stopped early; continue with: megatrain train {config} --resume auto")
        return
    assert summary.checkpoint is not None, "a complete run has saved"

    _say(f"the checkpoint in plain transformers, after {PROMPT!r}")
    print(sample(summary.checkpoint))

    _say("results")
    records = read_records(summary.folder / "metrics.jsonl")
    print(f"training loss  {summary.first_loss:.3f} -> {summary.last_loss:.3f}")
    print(f"held-out loss  {records[0].val_loss:.3f} -> {summary.val_loss:.3f}   (nats per token)")
    print(f"plot           {summary.folder / 'loss.png'}")
    print(f"checkpoint     {summary.checkpoint}")
    print(f"time           {time.perf_counter() - start:.0f} s")


def write_model(folder: Path, text: str) -> None:
    """A Hugging Face folder without weights: a byte-level BPE trained on the text, and the config of a small Llama."""
    files = sorted(map(str, Path(text).parent.glob(Path(text).name)))
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # a token for every byte, even if it is not in the text
        show_progress=False,
    )
    bpe.train(files, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>", pad_token="<|end|>")
    tokenizer.save_pretrained(folder)
    LlamaConfig(
        vocab_size=VOCABULARY,  # BPE learns fewer tokens from a short text; the remaining rows are then unused
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.08,  # about 1 / sqrt(hidden_size); the usual 0.02 is for wider models and trains slower here
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)


def sample(checkpoint: Path) -> str:
    """A continuation of PROMPT by plain transformers, at low temperature and with a fixed seed."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    torch.manual_seed(0)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    ids = model.generate(
        input_ids=prompt.input_ids,
        attention_mask=prompt.attention_mask,
        max_new_tokens=SAMPLE_TOKENS,
        do_sample=True,
        temperature=0.6,
        top_k=20,
    )
    return tokenizer.decode(ids[0], skip_special_tokens=True)


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small model from scratch and sample from it, in about two minutes."
    )
    parser.add_argument("--dir", type=Path, default=Path("runs/demo"), help="parent of the new numbered folder")
    parser.add_argument("--text", default=str(TRAIN_TEXT), help="glob of files in one folder, read as text")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rows-per-step", type=int, default=24, help=f"rows of {ROW_TOKENS} tokens")
    return parser.parse_args(words)


def _new_folder(parent: Path) -> Path:
    """Create the first of parent/1, parent/2, ... that does not exist."""
    parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = parent / str(number)
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder


def _say(what: str) -> None:
    print(f"\n--- {what}", flush=True)


if __name__ == "__main__":
    main()
