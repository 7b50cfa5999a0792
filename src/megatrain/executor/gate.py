"""The parity gate: a family that no test covers is verified on a tiny copy of its config before a run starts.

The copy has the family's own code and switches, but small widths, few layers and a small vocabulary. Loss, every gradient and
the answer to a packed row are compared with plain Hugging Face in fp32 on the CPU. What differs is refused.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from megatrain.errors import UserError
from megatrain.models.families import TESTED

logger = logging.getLogger(__name__)

LOSS_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4
"""Relative, in fp32. Families that compute the same differ by rounding alone (1e-7); a missing multiplier or mask is off by 1e-2."""

TINY = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "sliding_window": 8,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
TOKENS, ROWS = 24, 3


def verify_family(config: PreTrainedConfig, *, always: bool = False, trust_remote_code: bool = False) -> None:
    """Compare a tiny copy of the family with plain Hugging Face, unless its parity is part of the test suite.

    Args:
        config: The config of the model that is about to be trained; not changed.
        always: Verify tested families too.
        trust_remote_code: Whether the family's own code may run.

    Raises:
        UserError: The family cannot run this way, or differs.
    """
    if config.model_type in TESTED and not always:
        return
    logger.info("verifying the family %s on a tiny copy of its config", config.model_type)
    errors = []
    for tiny in tiny_configs(config):
        try:
            model = _build(tiny, trust_remote_code)
        except Exception as error:  # a config that does not scale down is not the user's fault: try the next copy
            errors.append(f"{type(error).__name__}: {error}")
            continue
        _compare(model, config.model_type)
        return
    raise UserError(
        f"no tiny copy of this config could be built to verify the family ({errors[-1].splitlines()[0]})",
        f"model type {config.model_type}",
        "this family is not supported by the host engine yet",
    )


def tiny_configs(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """Copies of a config with small sizes; first everything small, then less and less is touched."""
    layers = min(_layer_count(config), max(2, _layer_period(config)))
    for names in (TINY, ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings"), ("vocab_size",)):
        tiny = copy.deepcopy(config)
        for part in {id(c): c for c in (tiny, tiny.get_text_config())}.values():
            _shrink(part, {name: TINY[name] for name in names}, layers)
        yield tiny


def _shrink(config: Any, sizes: Mapping[str, int], layers: int) -> None:
    for name, value in sizes.items():
        present = getattr(config, name, None)
        if isinstance(present, int) and not isinstance(present, bool) and present > value:
            setattr(config, name, value)
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        present = getattr(config, name, None)
        if isinstance(present, int) and present > 8:
            setattr(config, name, 8)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        present = getattr(config, name, None)
        if isinstance(present, int) and present >= config.vocab_size:
            setattr(config, name, 0)
    for name in ("layer_types", "mlp_layer_types", "layers_block_type"):
        kinds = getattr(config, name, None)
        if isinstance(kinds, list):
            setattr(config, name, kinds[:layers])
    config.num_hidden_layers = layers


def _layer_count(config: PreTrainedConfig) -> int:
    return int(config.get_text_config().num_hidden_layers)


def _layer_period(config: PreTrainedConfig) -> int:
    """Layers until every kind of layer has occurred, at most 8."""
    kinds = getattr(config.get_text_config(), "layer_types", None)
    if not kinds:
        dense_first = getattr(config.get_text_config(), "first_k_dense_replace", 0) or 0
        return min(8, dense_first + 2)
    return min(8, max(kinds.index(kind) for kind in set(kinds)) + 1)


def _build(config: PreTrainedConfig, trust_remote_code: bool) -> nn.Module:
    """A tiny random model in which nothing has its neutral value: norms are off 1, biases and router corrections off 0."""
    state = torch.get_rng_state()
    torch.manual_seed(0)
    try:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
            for name, buffer in model.named_buffers():
                if "bias" in name and buffer.is_floating_point():
                    buffer.add_(torch.randn_like(buffer), alpha=0.05)
    finally:
        torch.set_rng_state(state)
    for module in model.modules():
        for name in ("p", "dropout", "attention_dropout", "activation_dropout", "resid_dropout", "router_jitter_noise"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model.train()


def _compare(model: Any, model_type: str) -> None:
    """Loss and every gradient of one batch, cut in chunks on megatrain's side, against plain Hugging Face."""
    from megatrain.executor.engine import HostEngine  # the engine calls the gate, the gate runs a tiny engine

    batch = _batch(int(model.config.get_text_config().vocab_size))
    where = f"model type {model_type}"
    loss, gradients = _plain(model, batch)
    try:
        with HostEngine(model, device="cpu", compute_dtype="fp32", chunk_rows=2, threads=1) as engine:
            result = engine.backward(batch)
            found = dict(engine.named_gradients())
    except UserError as error:
        raise UserError(f"this family cannot be streamed: {error.what}", where, error.remedy) from error
    except (
        RuntimeError,
        AttributeError,
        TypeError,
        ValueError,
        IndexError,
        KeyError,
        AssertionError,
        NotImplementedError,
    ) as error:
        raise UserError(
            f"this family cannot be streamed: {type(error).__name__}: {error}",
            where,
            "it is not supported by the host engine yet",
        ) from error
    assert result.loss is not None
    differences = [f"loss {result.loss:.6f} instead of {loss:.6f}"] if _off(result.loss, loss, LOSS_TOLERANCE) else []
    largest = max((float(g.norm()) for g in gradients.values()), default=0.0)
    for name, gradient in gradients.items():
        error = float((found[name] - gradient).norm()) if name in found else math.inf
        if not error <= GRADIENT_TOLERANCE * (float(gradient.norm()) + 1e-3 * largest):
            differences.append(f"gradient of {name} off by {error / (float(gradient.norm()) + 1e-30):.1e}")
    if differences:
        raise UserError(
            f"computed differently from plain Hugging Face: {'; '.join(differences[:3])}",
            where,
            "this family is not supported by the host engine; nothing was trained",
        )


def _off(value: float, expected: float, tolerance: float) -> bool:
    return not abs(value - expected) <= tolerance * abs(expected)


def _batch(vocabulary: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (ROWS, TOKENS), generator=generator)
    labels = ids.clone()
    labels[0, :5] = -100
    return {"input_ids": ids, "labels": labels}


def _plain(model: Any, batch: dict[str, torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits.float()
    labels = batch["labels"][:, 1:].reshape(-1)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(len(labels), -1), labels)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for parameter in model.parameters():
        parameter.grad = None
    return float(loss), gradients
