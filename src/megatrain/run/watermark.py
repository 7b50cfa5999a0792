"""The host memory's watermark: a thread that sees its end coming before the kernel ends the process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from megatrain.host_memory.available import available_host_bytes

EVERY_S = 0.5


class HostWatermark:
    """While open, looks twice a second at what host memory is left, and calls `on_low` once when it is too little.

    Args:
        reserve_bytes: What must stay available; 0 looks at nothing.
        on_low: Called by the thread with the bytes that are left.
        available: Where the number comes from.
    """

    def __init__(
        self,
        reserve_bytes: int,
        on_low: Callable[[int], None],
        available: Callable[[], int] = available_host_bytes,
    ):
        self._reserve_bytes, self._on_low, self._available = reserve_bytes, on_low, available
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="host-watermark", daemon=True)

    def __enter__(self) -> HostWatermark:
        if self._reserve_bytes:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._reserve_bytes:
            self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(EVERY_S):
            left = self._available()
            if left < self._reserve_bytes:
                self._on_low(left)
                return
