"""Runs a function on several forked ranks with gloo and collects their results.

Forking after the imports starts a rank in half a second; spawning takes as long as importing torch and transformers.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import pickle
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 120


class RankFailed(RuntimeError):
    """One or more ranks raised; the message has their tracebacks."""


def run(world: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """Call `work(*args)` on `world` ranks of one gloo process group.

    Returns:
        The results by rank.

    Raises:
        RankFailed: A rank raised, or did not end in time. No process is left behind.
    """
    with tempfile.TemporaryDirectory() as folder:
        pids = {}
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                _child(rank, world, Path(folder), work, args)
            pids[pid] = rank
        _wait(pids)
        results, errors = [], []
        for rank in range(world):
            file = Path(folder) / f"{rank}.pickle"
            ok, value = (
                pickle.loads(file.read_bytes()) if file.exists() else (False, "no result (killed, or timed out)")
            )
            results.append(value)
            if not ok:
                errors.append(f"--- rank {rank}\n{value}")
    if errors:
        raise RankFailed("\n".join(errors))
    return results


def _child(rank: int, world: int, folder: Path, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    outcome: tuple[bool, Any] = (False, "nothing")
    code = 1
    try:
        torch.set_num_threads(1)
        # Threads that the parent may have begun do not live here: tokenizers would wait for theirs, and so would the destructor
        # of a process group that the parent has left as garbage.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        gc.freeze()
        store = dist.FileStore(str(folder / "store"), world)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=60)
        )
        outcome = (True, work(*args))
        code = 0
    except BaseException:
        outcome = (False, traceback.format_exc())
    finally:
        (folder / f"{rank}.tmp").write_bytes(pickle.dumps(outcome))
        (folder / f"{rank}.tmp").rename(folder / f"{rank}.pickle")
        # No destroy_process_group: a rank that failed must not wait for the others. And no interpreter shutdown: the
        # parent's open files and test session are not this process's to finish.
        os._exit(code)


def _wait(pids: dict[int, int]) -> None:
    """Wait until all have ended; when one fails, the others get a few seconds."""
    deadline = time.monotonic() + TIMEOUT_S
    left = set(pids)
    while left and time.monotonic() < deadline:
        pid, status = _poll(left)
        if pid == 0:
            time.sleep(0.005)
            continue
        left.discard(pid)
        if status != 0:
            deadline = min(deadline, time.monotonic() + 5)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _poll(pids: set[int]) -> tuple[int, int]:
    for pid in pids:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return found, status
    return 0, 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
