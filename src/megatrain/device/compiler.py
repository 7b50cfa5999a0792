"""The compiler's persistent cache, and how often it has compiled."""

from __future__ import annotations

import os
import signal

from megatrain.paths import user_cache

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


def keep_compiled_code() -> None:
    """Keep compiled code in the user's cache, so that later runs load it; by default it is lost when the machine restarts.

    Call before the first compilation. A user's own settings stay.
    """
    for variable, folder in VARIABLES.items():
        os.environ.setdefault(variable, str(user_cache() / "compiled" / folder))


def start_workers() -> None:
    """Start the compiler's worker processes now, deaf to the signals that ask a run to stop. Does not wait for them.

    Batch systems and `timeout` send SIGTERM to all processes of a run. A worker that dies of it never answers, and the run would
    wait for it forever instead of finishing its step. Signals that are blocked here stay blocked in the workers; they end
    with this process. Later calls do nothing.
    """
    from torch._inductor.async_compile import AsyncCompile
    from torch.utils._triton import has_triton_package

    if not has_triton_package():  # they compile Triton kernels only
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        AsyncCompile.warm_pool()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def compilations() -> int:
    """Functions that torch.compile has compiled in this process, loaded from its cache or not."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]
