"""Which families the mesh engine has been proven on, and the verification of others on a tiny copy before a run starts."""

from __future__ import annotations

import logging
from typing import Any

import torch

from megatrain.engine.mesh.stage import verify_cut
from megatrain.engine.parity_check import _NoTinyCopy, _tiny_model
from megatrain.errors import UserError

logger = logging.getLogger(__name__)

CUT = frozenset(
    "llama qwen2 qwen3 mistral gemma gemma2 gemma3_text granite cohere smollm3 olmo2 qwen3_moe mixtral gpt_neox".split()
)
"""Model types whose chain of stages is part of the test suite."""


def verify_family_cut(config: Any, trust_remote_code: bool = False) -> None:
    """Compare a chain of stages of a tiny copy with plain Hugging Face, unless the test suite does.

    Raises:
        UserError: The family cannot be cut into pipeline stages, or differs then.
    """
    if config.model_type in CUT:
        return
    logger.info("verifying on a tiny copy that the family %s can be cut into stages", config.model_type)
    try:
        model = _tiny_model(config, None, trust_remote_code)
    except _NoTinyCopy as error:
        raise UserError(
            f"cannot be verified: {error}", f"model type {config.model_type}", "set parallel.pipeline to 1"
        ) from error
    vocabulary = int(model.config.get_text_config().vocab_size)
    ids_BT = torch.randint(3, vocabulary, (2, 24), generator=torch.Generator().manual_seed(0))
    verify_cut(model, {"input_ids": ids_BT, "labels": ids_BT.clone()})
