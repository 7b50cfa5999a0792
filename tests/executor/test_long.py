"""Long-context settings change what is kept and in which pieces things are computed, and nothing of the result."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from families import CORE, Family, batch, build
from megatrain.executor.engine import HostEngine
from reference import gradient_error


def step_of(family: Family, **options: Any) -> tuple[float | None, dict[str, torch.Tensor]]:
    """Loss and gradients of one batch of rows with two chunks of rows."""
    rows = batch(family, seed=1, rows=3, tokens=24, kind="padded")
    with HostEngine(
        build(family, seed=0), device="cpu", verify="never", chunk_rows=2, **{"compile": "off", **options}
    ) as engine:
        result = engine.backward(rows)
        return result.loss, {name: gradient.clone() for name, gradient in engine.named_gradients()}


@pytest.mark.parametrize("part", ["keep_attention", "keep_mlp"])
@pytest.mark.parametrize("family", CORE, ids=str)
def test_a_kept_part_changes_no_bit(family: Family, part: str) -> None:
    want_loss, want = step_of(family)
    loss, got = step_of(family, **{part: "all"})
    assert loss == want_loss
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("family", CORE, ids=str)
def test_chunks_of_tokens_give_the_same_sums(family: Family) -> None:
    want_loss, want = step_of(family)
    loss, got = step_of(family, mlp_chunk_tokens=7)
    assert loss == pytest.approx(want_loss, rel=1e-6)
    error, name = gradient_error(got, want)
    assert error < 1e-5, f"{name}: {error:.1e}"
