"""The compiler's persistent cache, and how often it has compiled."""

from __future__ import annotations

import os

from megatrain.paths import user_cache

VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


def keep_compiled_code() -> None:
    """Keep compiled code in the user's cache, so that later runs load it; by default it is lost when the machine restarts.

    Call before the first compilation. A user's own settings stay.
    """
    for variable, folder in VARIABLES.items():
        os.environ.setdefault(variable, str(user_cache() / "compiled" / folder))


def compilations() -> int:
    """Functions that torch.compile has compiled in this process, loaded from its cache or not."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]
