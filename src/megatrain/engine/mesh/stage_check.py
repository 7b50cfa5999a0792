"""Checks that a family can be cut into pipeline stages: a list of tested families, and a comparison on a tiny copy for others."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from megatrain.engine.mesh.layout import Layout
from megatrain.engine.mesh.stage import CANNOT_CUT, Stage, cut, plan_parts
from megatrain.engine.objective import IGNORED, cross_entropy_sum
from megatrain.engine.parity_check import NoTinyCopy, find_differences, tiny_model
from megatrain.errors import UserError
from megatrain.models.structure import dissect

logger = logging.getLogger(__name__)

CUT = frozenset(
    "llama qwen2 qwen3 mistral gemma gemma2 gemma3_text granite cohere smollm3 olmo2 qwen3_moe mixtral gpt_neox".split()
)
"""Model types whose chain of stages is part of the test suite."""


def verify_family_cut(config: Any, trust_remote_code: bool = False) -> None:
    """Compare a chain of stages of a tiny copy with plain Hugging Face, unless the test suite covers the family.

    Raises:
        UserError: The family cannot be cut into pipeline stages, or computes something else when it is.
    """
    if config.model_type in CUT:
        return
    logger.info("checking on a tiny copy whether %s can be cut into pipeline stages", config.model_type)
    try:
        model = tiny_model(config, None, trust_remote_code)
    except NoTinyCopy as error:
        raise UserError(f"cannot be verified: {error}", f"model type {config.model_type}", CANNOT_CUT) from error
    vocabulary = int(model.config.get_text_config().vocab_size)
    ids_BT = torch.randint(3, vocabulary, (2, 24), generator=torch.Generator().manual_seed(0))
    verify_cut(model, {"input_ids": ids_BT, "labels": ids_BT.clone()})


def verify_cut(model: nn.Module, batch: dict[str, torch.Tensor], stages: int = 2, tolerance: float = 1e-5) -> None:
    """Run a (tiny) model as a chain of stages in this process and compare loss and gradients with plain Hugging Face.

    Args:
        model: With real parameters; its gradients are used and cleared.
        batch: `input_ids` and `labels` (B, T).
        stages: Number of stages, at most the number of layers.
        tolerance: Largest relative difference of loss and gradients.

    Raises:
        UserError: The family differs, or cannot be cut.
    """
    structure, where = dissect(model), f"model type {model.config.model_type}"  # type: ignore[union-attr]
    labels = torch.full_like(batch["labels"], IGNORED)
    labels[:, :-1] = batch["labels"][:, 1:]

    def gradients(loss: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
        model.zero_grad(set_to_none=True)
        loss.backward()
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=True)
        return float(loss.detach()), found

    logits = model(input_ids=batch["input_ids"], use_cache=False).logits
    want_loss, want = gradients(cross_entropy_sum(logits.flatten(0, 1), labels.flatten()))
    layers = len(structure.layers)
    counts = tuple(layers * (s + 1) // stages - layers * s // stages for s in range(stages))
    try:
        state = batch["input_ids"]
        for part in plan_parts(structure, Layout(pipeline=stages, stage_layers=counts)):
            stage = Stage(cut(model, structure, part), structure, part, split_head=False)
            stage.train(model.training)
            stage.hook_entry()
            state = stage(state, labels=labels)
        loss, got = gradients(state.sum())
    except (RuntimeError, TypeError, AttributeError, KeyError, IndexError, ValueError) as error:
        raise UserError(
            f"a chain of stages does not run: {type(error).__name__}: {error}", where, CANNOT_CUT
        ) from error
    if differences := find_differences(loss, want_loss, got, want, tolerance, tolerance):
        raise UserError(f"a chain of stages computes something else: {'; '.join(differences[:3])}", where, CANNOT_CUT)
