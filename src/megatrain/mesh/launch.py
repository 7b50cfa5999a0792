"""This process among others: what torchrun's environment says, and the process group."""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist

from megatrain.errors import UserError

TIMEOUT_S = 600
"""A collective that takes longer is a hang."""


def world_size() -> int:
    """Number of processes: of the process group if there is one, else what torchrun announced, else 1."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """This process's number, known before any process group exists."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def device_of_rank(device: str | torch.device) -> torch.device:
    """`auto` and `cuda` are this rank's GPU on its host."""
    if str(device) == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    found = torch.device(device)
    if found.type not in ("cpu", "cuda"):
        raise UserError(f"device {found} is not supported", "run.device", "use cpu or cuda")
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


def join(device: torch.device) -> None:
    """Make the default process group unless there is one. Without torchrun it has one member and needs no network."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
