"""Tests in which nothing may be asked outside of this machine."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def no_network() -> Iterator[list[str]]:
    """Refuse every look-up and connection in this process. Yields what was asked for; libraries may swallow the error."""
    asked: list[str] = []

    def refuse(*arguments: Any, **_: Any) -> Any:
        address = next((str(part) for part in arguments if not isinstance(part, socket.socket)), "?")
        asked.append(address)
        raise OSError(f"this test has no network: {address}")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("getaddrinfo", "gethostbyname", "create_connection"):
            patch.setattr(socket, name, refuse)
        for name in ("connect", "connect_ex", "sendto"):
            patch.setattr(socket.socket, name, refuse)
        yield asked
