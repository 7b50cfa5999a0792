"""This process among the ranks: torchrun's environment, the process group, and what a job's attempts tell each other.

[Note: one store, many attempts]
When torchrun restarts its processes they meet in the same store as before, unless told otherwise
(`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`), and find the addresses that the dead ranks left: gloo cannot connect, NCCL waits
forever. Restart counts do not help, because the agents of different nodes count differently. So the ranks agree on a prefix
that was never used before: each rank says hello with a random word; rank 0 publishes the words it sees, with its own word; a
rank that finds its current word in the list takes rank 0's word as the prefix. Rank 0 publishes again until all ranks have it.

[Note: errors that come again]
torchrun restarts its processes after every exit code but 0; a process cannot tell it that an error would only repeat. Such an
error is left in the store, which outlives the processes: the next attempts find it before they read a model, and end with it at
once. The store lives as long as torchrun itself, so a resubmitted job starts afresh. Where torchrun's agents do not host the
store (`TORCHELASTIC_USE_AGENT_STORE`) it ends with rank 0, and every attempt finds the error for itself.

Rank 0 is the one that prints. Another rank that finds an error first leaves it in the store and waits until rank 0 has told it:
when the first process ends, torchrun ends the others, and rank 0 may still be importing torch.

[Note: out of memory]
When a step fails on one rank, the others wait for it in collectives that it cannot enter again. So its process ends with the exit
code of a hang, after it has increased the count in RUN/denser. torchrun restarts all ranks; they resume from the newest
checkpoint, with the plan reduced as often as the count says (`MeshPlan.reduced`). To keep the reduced plan, write its line into
the config; to undo it, remove the file.
"""

from __future__ import annotations

import datetime
import json
import os
import time
import uuid
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from megatrain.engine.plan import named_device
from megatrain.errors import UserError

TIMEOUT_S = 600
"""Default timeout of collectives."""
_timeout_s: float = TIMEOUT_S
"""Timeout of the process group that `join` made."""
_shared: Any = None
"""The store of the latest `join` under torchrun, shared by all attempts."""
_END = "megatrain/end"


def world_size() -> int:
    """Number of processes, known before any process group exists."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def local_world_size() -> int:
    """Number of processes on this host; all of them if torchrun does not tell."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))


def rank() -> int:
    """This process's number, known before any process group exists."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def attempt() -> int:
    """How often torchrun has restarted this job's processes, as counted by the agent of this host."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


ONE_COMMAND = "MEGATRAIN_ONE_COMMAND"


def one_command() -> bool:
    """Whether `megatrain` itself has started the ranks, so that all attempts write to one terminal; see run/ranks.py."""
    return ONE_COMMAND in os.environ


def device_of_rank(device: str | torch.device) -> torch.device:
    """The device that a setting means on this rank: `auto` and `cuda` are its GPU on its host."""
    found = named_device(device)
    if found.type == "cuda" and found.index is None:
        local = int(os.environ.get("LOCAL_RANK", "0"))
        count = torch.cuda.device_count()
        if local >= count:
            raise UserError(
                f"process {local} of this host finds {count} CUDA devices",
                "run.device",
                f"start {count} processes per host (--nproc-per-node {count})" if count else "use run.device: cpu",
            )
        found = torch.device("cuda", local)
    return found


def join(device: torch.device, timeout_s: float = TIMEOUT_S) -> None:
    """Make the default process group unless there is one. Without torchrun it has one member and needs no network.

    Args:
        device: This rank's device.
        timeout_s: A collective that takes longer ends the process.
    """
    global _shared, _timeout_s
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = datetime.timedelta(seconds=timeout_s)
    _timeout_s = timeout_s
    # A failed or late collective ends the process, so that torchrun restarts all. It is the default of most releases.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    if "WORLD_SIZE" in os.environ:
        shared, number, size = next(iter(rendezvous("env://", timeout=timeout)))
        _shared = shared
        prefix = fresh_prefix(shared, number, size)
        store = dist.PrefixStore(prefix, shared)  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=number, world_size=size, timeout=timeout)
    else:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)


def collective_timeout() -> datetime.timedelta:
    """The timeout given to `join`. Other groups do not inherit it: NCCL's would end the process after ten minutes."""
    return datetime.timedelta(seconds=_timeout_s)


def note_begun(folder: Path) -> None:
    """Note that this job has begun the run in `folder`: a later attempt of torchrun's may resume there."""
    if _shared is not None:
        _shared.set(f"megatrain/begun/{folder.absolute()}", "")


def has_begun(folder: Path) -> bool:
    """Whether an earlier attempt of this job has begun the run in `folder`; False where the store ended with it."""
    return _shared is not None and _shared.check([f"megatrain/begun/{folder.absolute()}"])


def note_end(code: int, text: str) -> None:
    """Note an error that a restart would repeat; the first one counts. See [Note: errors that come again]."""
    if (store := _store_of_all_attempts()) is not None:
        store.compare_set(_END, "", json.dumps([code, text, attempt()]))


def noted_end() -> tuple[int, str, int] | None:
    """(exit code, text, attempt) of the noted error that ended an attempt of this job, maybe this one, or None."""
    store = _store_of_all_attempts()
    if store is None or not store.check([_END]):
        return None
    code, text, number = json.loads(store.get(_END))
    return code, text, number


def tell_end() -> None:
    """Call on rank 0 before it prints an error that other ranks may wait for: see [Note: errors that come again]."""
    if (store := _store_of_all_attempts()) is not None:
        store.set(f"{_END}/told/{attempt()}", "")


def end_was_told(wait_s: float = 20.0) -> bool:
    """Wait on another rank until rank 0 has told the error of this attempt; False if it did not. True without a store."""
    store = _store_of_all_attempts()
    if store is None:
        return True
    deadline = time.monotonic() + wait_s
    while not store.check([f"{_END}/told/{attempt()}"]):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    time.sleep(0.2)  # for the printing itself
    return True


def _store_of_all_attempts() -> Any:
    """The store shared by all attempts; None outside torchrun, and where each attempt has its own."""
    global _shared
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    if _shared is None:
        _shared, _, _ = next(iter(rendezvous("env://", timeout=datetime.timedelta(seconds=TIMEOUT_S))))
    return _shared


def fresh_prefix(store: Any, rank: int, world: int, timeout_s: float = TIMEOUT_S) -> str:
    """A random word for this start, the same on all ranks. See [Note: one store, many attempts].

    Raises:
        UserError: Not all ranks arrived in time.
    """
    word = uuid.uuid4().hex
    store.set(f"megatrain/hello/{rank}", word)
    deadline = time.monotonic() + timeout_s
    published = None
    while time.monotonic() < deadline:
        if rank == 0:
            here = [r for r in range(world) if store.check([f"megatrain/hello/{r}"])]
            roster = json.dumps([word, *((r, store.get(f"megatrain/hello/{r}").decode()) for r in here)])
            if roster != published:
                store.set("megatrain/roster", roster)
                published = roster
            if world == 1 or store.check([f"megatrain/{word}/{r}" for r in range(1, world)]):
                return word
        elif store.check(["megatrain/roster"]):
            first, *hellos = json.loads(store.get("megatrain/roster"))
            if [rank, word] in hellos:
                store.set(f"megatrain/{first}/{rank}", "")
                return first
        time.sleep(0.02)
    raise UserError(f"not all {world} processes arrived within {timeout_s:.0f} s", "torchrun")


FILE = "denser"


def times_out_of_memory(folder: Path) -> int:
    """How often the run in `folder` has run out of device memory."""
    file = folder / FILE
    return int(file.read_text()) if file.exists() else 0


def note_out_of_memory(folder: Path, times: int) -> None:
    """Record that the run has run out of device memory, `times` times in all."""
    temporary = folder / f"{FILE}.new"
    temporary.write_text(f"{times}\n")
    temporary.replace(folder / FILE)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the error is, or was caused by, an out-of-memory error: torch's pipeline stages wrap errors of a forward."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__
    return False
