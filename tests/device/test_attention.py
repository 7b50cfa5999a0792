"""The choice of an attention kernel changes speed, not results."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

import pytest
import torch
from torch.nn.attention import SDPBackend

from megatrain.device import attention
from megatrain.device.attention import CANDIDATES, fastest_attention, measured_backends


def attend() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 6, 16, generator=generator) for _ in range(3))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("order", [(), (SDPBackend.FLASH_ATTENTION,), CANDIDATES], ids=["none", "flash", "all"])
def test_any_order_of_backends_can_serve_every_call(order: tuple[SDPBackend, ...]) -> None:
    want = attend()
    with fastest_attention(order):
        torch.testing.assert_close(attend(), want)
    torch.testing.assert_close(attend(), want)


def test_torchs_warnings_of_backends_that_are_tried_are_details(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    """A user cannot act on them: another backend is used."""

    def fails(run: Callable[[], object]) -> float:
        for _ in range(3):
            warnings.warn("Flash attention kernel not used because", stacklevel=1)
        raise RuntimeError("no available kernel")

    monkeypatch.setattr(attention, "elapsed_ms", fails)
    with caplog.at_level(logging.DEBUG):
        assert measured_backends.__wrapped__(2, 2, 16, 16, torch.bfloat16, torch.device("cpu")) == ()
    assert len(recwarn) == 0
    assert {record.levelno for record in caplog.records} == {logging.DEBUG}
    assert caplog.text.count("Flash attention kernel not used because") == len(CANDIDATES), "each once"


@pytest.mark.gpu
def test_backends_are_measured_and_sorted_by_time() -> None:
    found = measured_backends(4, 2, 64, 256, torch.bfloat16, torch.device("cuda", 0))
    assert found
    times = [milliseconds for _, milliseconds in found]
    assert times == sorted(times)
    assert times[0] > 0
