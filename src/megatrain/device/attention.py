"""Find the fastest attention kernel for a model's heads by measuring."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import statistics
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._inductor.config as inductor_config
import torch.utils.deterministic
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

logger = logging.getLogger(__name__)

LONGEST_MEASURED = 32768
"""Longer rows use the ranking for this many tokens: kernel times grow with the square of the row length."""
CANDIDATES = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)


def attention_order(
    shape: tuple[int, int, int] | None, tokens: int, dtype: torch.dtype, device: torch.device
) -> tuple[SDPBackend, ...]:
    """Backends for `fastest_attention`, fastest first; empty (torch's own choice) if nothing can be measured.

    `shape` is (heads, key-value heads, head size) as computed on this device, None if unknown.
    """
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or shape is None:
        return ()
    return tuple(backend for backend, _ in measured_backends(*shape, min(tokens, LONGEST_MEASURED), dtype, device))


@functools.cache
def measured_backends(
    heads: int, kv_heads: int, head_dim: int, tokens: int, dtype: torch.dtype, device: torch.device
) -> tuple[tuple[SDPBackend, float], ...]:
    """(backend, milliseconds of a causal forward and backward) of the available backends, fastest first.

    Measures rows of `tokens` tokens in bf16 or fp16 on a CUDA device; several rows at once if they are short, to fill it.
    """
    rows = max(1, 16384 // tokens)
    q, k, v = (
        torch.randn(rows, count, tokens, head_dim, dtype=dtype, device=device, requires_grad=True)
        for count in (heads, kv_heads, kv_heads)
    )

    def run() -> None:
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
        torch.autograd.grad(out, (q, k, v), out)

    found = []
    for backend in CANDIDATES:
        # torch says why a backend cannot be used, warning by warning
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                with sdpa_kernel(backend):
                    found.append((backend, statistics.median(elapsed_ms(run) for _ in range(5))))
            except RuntimeError as error:
                logger.debug("attention backend %s is not available: %s", backend.name, error)
        for text in dict.fromkeys(str(warning.message) for warning in told):
            logger.debug("attention backend %s: %s", backend.name, text)
    return tuple(sorted(found, key=lambda pair: pair[1]))


def elapsed_ms(run: Callable[[], object]) -> float:
    """Milliseconds that a call takes on the current CUDA stream."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


@contextlib.contextmanager
def fastest_attention(order: tuple[SDPBackend, ...]) -> Iterator[None]:
    """Make scaled_dot_product_attention use the first backend of `order` that supports a call; torch's own choice if empty."""
    if not order:
        yield
        return
    rest = [SDPBackend.MATH, *(b for b in CANDIDATES if b not in order)]
    with sdpa_kernel([*order, *rest], set_priority=True):
        yield


@contextlib.contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Inside, operations give the same bits every time, or warn if they cannot.

    The backward kernels of cuDNN and flash attention add in no fixed order, whatever torch is asked for; the memory-efficient
    and the plain one do not. Flex attention, whose kernels are the compiler's, is deterministic.
    """
    # The size that torch takes anyway, but without the variable it warns at every product.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    setting: Any = torch.utils.deterministic  # a module that is an instance of a class with this property
    fills = setting.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    setting.fill_uninitialized_memory = False  # a debugging aid that writes all new memory once more
    try:
        with (
            sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True),
            inductor_config.patch(deterministic=True),
        ):
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        setting.fill_uninitialized_memory = fills
