"""The fastest attention kernel a machine has for a model's heads, found by measuring."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

logger = logging.getLogger(__name__)

LONGEST_MEASURED = 32768
"""Longer rows are taken to rank the kernels as rows of so many tokens do: their time grows with the square."""
CANDIDATES = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)


def measured_backends(
    heads: int, kv_heads: int, head_dim: int, tokens: int, dtype: torch.dtype, device: torch.device
) -> tuple[tuple[SDPBackend, float], ...]:
    """(backend, milliseconds of a causal forward and backward) of those that can, fastest first.

    Args:
        heads, kv_heads, head_dim: Shape of the attention.
        tokens: Length of a row, `LONGEST_MEASURED` at most; several short rows are measured, so that the device is full.
        dtype: bf16 or fp16.
        device: A CUDA device.
    """
    return _measured(heads, kv_heads, head_dim, min(tokens, LONGEST_MEASURED), dtype, device)


def attention_order(
    shape: tuple[int, int, int] | None, tokens: int, dtype: torch.dtype, device: torch.device
) -> tuple[SDPBackend, ...]:
    """Backends for `fastest_attention`, fastest first; none, which is torch's own choice, where nothing can be measured.

    Args:
        shape: (heads, key-value heads, head size) as computed here; None where they are not known.
        tokens: Length of a row.
        dtype: Of the computation.
        device: Of the computation.
    """
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or shape is None:
        return ()
    return tuple(backend for backend, _ in measured_backends(*shape, tokens, dtype, device))


@functools.cache
def _measured(
    heads: int, kv_heads: int, head_dim: int, tokens: int, dtype: torch.dtype, device: torch.device
) -> tuple[tuple[SDPBackend, float], ...]:
    rows = max(1, 16384 // tokens)
    q, k, v = (
        torch.randn(rows, count, tokens, head_dim, dtype=dtype, device=device, requires_grad=True)
        for count in (heads, kv_heads, kv_heads)
    )
    found = []
    for backend in CANDIDATES:
        try:
            found.append((backend, _milliseconds(backend, q, k, v)))
        except RuntimeError as error:
            logger.debug("attention backend %s is not available: %s", backend.name, error)
    return tuple(sorted(found, key=lambda pair: pair[1]))


def _milliseconds(backend: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
    grouped = q.shape[1] != k.shape[1]
    times = []
    with sdpa_kernel(backend):
        for _ in range(5):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
            torch.autograd.grad(out, (q, k, v), out)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


@contextlib.contextmanager
def fastest_attention(order: tuple[SDPBackend, ...]) -> Iterator[None]:
    """Inside, scaled_dot_product_attention takes the first of `order` that can do a call, else torch's own choice."""
    if not order:
        yield
        return
    rest = [SDPBackend.MATH, *(b for b in CANDIDATES if b not in order)]
    with sdpa_kernel([*order, *rest], set_priority=True):
        yield
