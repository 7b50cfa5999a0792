"""Which families the mesh engine has been proven on, and the verification of others on a tiny copy before a run starts."""

from __future__ import annotations

import logging
from typing import Any

from megatrain.errors import UserError
from megatrain.executor.gate import _batch, _build, tiny_configs
from megatrain.mesh.stage import verify_cut

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
    errors = []
    for tiny in tiny_configs(config):
        try:
            model = _build(tiny, trust_remote_code)
        except Exception as error:  # noqa: BLE001  a config that does not scale down: try the next copy
            errors.append(f"{type(error).__name__}: {error}")
            continue
        verify_cut(model, _batch(int(tiny.get_text_config().vocab_size)))
        return
    raise UserError(
        f"no tiny copy of this config could be built to verify the family ({errors[-1].splitlines()[0]})",
        f"model type {config.model_type}",
        "set parallel.pipeline to 1",
    )
