"""`megatrain generate`: generate text with plain transformers, with the whole model in memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatrain.checkpoint.export import find_checkpoint
from megatrain.errors import UserError
from megatrain.metrics.logger import RunLogger, quiet_libraries
from megatrain.run.preflight import load_tokenizer
from megatrain.text import one_line


def generate(
    given: str | Path,
    prompts: Sequence[str],
    *,
    tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    plain: bool = False,
    device: str = "auto",
    trust_remote_code: bool = False,
) -> list[str]:
    """Answer or continue each prompt, with at most `tokens` new tokens; prints and returns the texts.

    Args:
        given: Folder of a run (its newest checkpoint), a checkpoint or a model, or a cached hub id.
        prompts: With a chat template each is a user message, unless `plain`.
        temperature: Sampling temperature; 0: always the most likely token.

    Raises:
        UserError: The model or its tokenizer is missing, a prompt has no token, or memory is too small.
    """
    import torch
    from transformers import set_seed

    from megatrain.engine.plan import device_of
    from megatrain.models.build import find_model_folder, known_positions, load_model_config

    quiet_libraries()
    answers: list[str] = []
    with RunLogger() as log:
        path = Path(given).expanduser()
        folder = find_checkpoint(path) if (path / "checkpoints").is_dir() else find_model_folder(given)
        load_model_config(folder, trust_remote_code)  # for its error messages
        tokenizer = load_tokenizer(folder, trust_remote_code)
        chat = not plain and bool(tokenizer.chat_template)
        target = device_of(device)
        model = _load(folder, target, trust_remote_code)
        positions = known_positions(model.config)
        log.info(f"{folder} on {target}; {'chat template' if chat else 'plain text'}")
        for prompt in prompts:
            ids = _ids(tokenizer, prompt, chat).to(target)
            if positions is not None and (total := ids.shape[1] + tokens) > positions:
                what = f"prompt and answer of {total} tokens are longer than the {positions} positions of the model"
                raise UserError(what, "--tokens", "set fewer tokens, or shorten the prompt")
            drawn: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
            if temperature > 0:
                set_seed(seed)
                drawn = {"do_sample": True, "temperature": temperature}
            with torch.no_grad():
                pad_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
                drawn |= {"attention_mask": torch.ones_like(ids), "max_new_tokens": tokens, "pad_token_id": pad_id}
                try:
                    written = model.generate(input_ids=ids, **drawn)
                except (ValueError, TypeError) as error:
                    what = f"cannot generate: {(str(error).splitlines() or [type(error).__name__])[0]}"
                    raise UserError(what, str(folder), "check its generation_config.json") from error
            new = written[0, ids.shape[1] :]
            text = str(tokenizer.decode(new, skip_special_tokens=True))
            cut = "" if len(new) < tokens else f" (stopped after --tokens {tokens})"
            log.info("")
            log.info(f"--- {one_line(prompt)}")
            log.show(
                f"{text}{cut}"
            )  # with the model's line breaks; control characters that it writes are shown as codes
            answers.append(text)
    return answers


def _load(folder: Path, device: Any, trust_remote_code: bool) -> Any:
    """Load the whole model: in bf16 on a GPU, else in the dtype of its files."""
    import torch
    from transformers import AutoModelForCausalLM

    from megatrain.checkpoint.reader import check_model_folder
    from megatrain.models.folder import offline

    if os.path.lexists(folder / "adapter_config.json"):
        what = "holds adapter_config.json: transformers would load an adapter on top of the weights, where peft is installed"
        raise UserError(what, str(folder), "merge the adapter into the weights, or move the file away")
    check_model_folder(folder)  # refuses pickles, and names in an index that lead out of the folder
    dtype = torch.bfloat16 if device.type == "cuda" else "auto"
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    try:
        with offline():
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, use_safetensors=True, **options)
        return model.to(device).eval()
    except torch.OutOfMemoryError as error:
        raise UserError("the whole model does not fit on the GPU", str(folder), "use --device cpu") from error
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise UserError(
            f"cannot be loaded: {(str(error).splitlines() or [type(error).__name__])[0]}", str(folder)
        ) from error


def _ids(tokenizer: Any, prompt: str, chat: bool) -> Any:
    """(1, T) int64: the prompt, as a user message with the generation prompt, or as it is."""
    if chat:
        messages = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    else:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    if not ids.shape[1]:
        raise UserError(f"the prompt {prompt!r} has no tokens", "--prompt", "write at least one word")
    return ids.long()
