"""The worked example of docs/extending.md: a new family needs no code here, and the parity check vouches for it."""

from __future__ import annotations

import pytest
import torch

from megatrain.engine.host.engine import HostEngine
from reference import gradient_error, reference_loss_and_grads
from toy_family import ToyConfig, ToyForCausalLM


def test_a_family_that_transformers_knows_is_checked_and_trained() -> None:
    torch.manual_seed(0)
    model = ToyForCausalLM(
        ToyConfig(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4)
    )
    ids = torch.randint(0, 97, (3, 16), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids.clone()}
    want = reference_loss_and_grads(model, batch)
    with HostEngine(model, device="cpu", verify="always") as engine:  # compares a tiny copy with plain Hugging Face
        result = engine.backward(batch)
        error, name = gradient_error(dict(engine.named_gradients()), want.gradients)
    assert result.loss == pytest.approx(want.loss, rel=1e-6)
    assert error < 1e-5, name
