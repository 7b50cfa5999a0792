"""Does what torchrun does, with forked ranks: starts them, and restarts all when one has failed. A start takes half a second.

One store serves all attempts, as with torchrun, with whatever the dead ranks of earlier attempts have left in it.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from megatrain.commands.main import main

TIMEOUT_S = 60
SHUTDOWN_S = 30
"""The time torchrun gives ranks between SIGTERM and SIGKILL."""

Sabotage = Callable[[int, int], None]
"""(rank, attempt): called in the rank before it starts."""


def run(worlds: Sequence[int], words: list[str], log: Path, sabotage: Sabotage) -> list[list[int]]:
    """`megatrain WORDS` on every rank until all have ended well.

    Args:
        worlds: Number of ranks, on this host, of each attempt: nodes may be lost on the way.
        words: The command line.
        log: Collects the ranks' output.
        sabotage: See `Sabotage`.

    Returns:
        Per attempt, the exit status of each rank, negative for a signal.

    Raises:
        AssertionError: It never ended well, with the end of the log.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    found: list[list[int]] = []
    for attempt, world in enumerate(worlds):
        pids = {_fork(rank, world, attempt, store.port, words, log, sabotage): rank for rank in range(world)}
        found.append(_watch(pids))
        if not any(found[-1]):
            return found
    raise AssertionError(f"exit codes {found}\n{log.read_text()[-6000:]}")


def _fork(rank: int, world: int, attempt: int, port: int, words: list[str], log: Path, sabotage: Sabotage) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        # pytest has replaced them
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        numbers |= {"MASTER_PORT": port, "TORCHELASTIC_RESTART_COUNT": attempt}
        os.environ.update({name: str(value) for name, value in numbers.items()})
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"})
        # threads that the parent may have begun do not live here: nothing may wait for them, no destructor either
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        gc.freeze()
        torch.set_num_threads(1)
        sabotage(rank, attempt)
        code = main(words)
    except SystemExit as ended:  # of ranks that leave the telling to rank 0
        code = int(ended.code or 0)
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    os._exit(code)


def _watch(pids: dict[int, int]) -> list[int]:
    """Exit status by rank. When one fails, the others get SIGTERM, and SIGKILL after a while."""
    statuses = [0] * len(pids)
    left = dict(pids)
    deadline, asked = time.monotonic() + TIMEOUT_S, False
    while left:
        for pid in list(left):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                statuses[left.pop(pid)] = os.waitstatus_to_exitcode(status)
        if any(statuses) and not asked:
            asked, deadline = True, time.monotonic() + SHUTDOWN_S
            for pid in left:
                os.kill(pid, signal.SIGTERM)
        if time.monotonic() > deadline:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return statuses
