"""Model shapes that can be measured by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from megatrain.errors import UserError
from megatrain.models.build import build_meta_model, find_model_folder, load_model_config
from megatrain.models.structure import Structure, dissect

QWEN3 = {  # hidden, intermediate, layers, heads, kv heads, tied
    "qwen3-0.6b": (1024, 3072, 28, 16, 8, True),
    "qwen3-1.7b": (2048, 6144, 28, 16, 8, True),
    "qwen3-4b": (2560, 9728, 36, 32, 8, True),
    "qwen3-8b": (4096, 12288, 36, 32, 8, False),
    "qwen3-14b": (5120, 17408, 40, 40, 8, False),
    "qwen3-17b": (5120, 17408, 48, 40, 8, False),
    "qwen3-18b": (5120, 17408, 50, 40, 8, False),
    "qwen3-20b": (5120, 17408, 56, 40, 8, False),
    "qwen3-32b": (5120, 25600, 64, 64, 8, False),
    "tiny": (64, 128, 4, 4, 2, False),
}
"""17b, 18b and 20b are 14b with more layers; tiny is for trying the command out."""
QWEN25_7B: dict[str, Any] = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
    "max_position_embeddings": 1 << 20,
    "rope_theta": 1e6,
}
CONFIGS = {"qwen2.5-7b": QWEN25_7B}


def folder_of(shape: str, scratch: Path) -> Path:
    """A folder with the shape's config.json: the given folder, or `scratch` for a name.

    Raises:
        UserError: The shape is neither a name nor a folder.
    """
    name = shape.lower()
    config = CONFIGS.get(name)
    if name in QWEN3:
        hidden, intermediate, layers, heads, kv_heads, tied = QWEN3[name]
        config = {
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": 128 if hidden > 64 else 16,
            "vocab_size": 151936 if hidden > 64 else 512,
            "tie_word_embeddings": tied,
            "max_position_embeddings": 1 << 20,
        }
    if config is not None:
        (scratch / "config.json").write_text(json.dumps(config))
        return scratch
    if not Path(shape).exists():
        raise UserError(f"no such shape or folder: {shape!r}", "bench", f"names are {', '.join([*QWEN3, *CONFIGS])}")
    return find_model_folder(shape)


def structure_of(folder: Path, dtype: torch.dtype) -> Structure:
    """The model that the folder's config describes, without weights."""
    return dissect(build_meta_model(load_model_config(folder), compute_dtype=dtype))
