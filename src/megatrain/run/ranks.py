"""Commands on all GPUs of a host: one process for each, started through torch's elastic launcher, as one command.

Each process runs the same command line, and finds in its environment that it is one of several, as under torchrun. Signals to
this process are passed on: the ranks finish their step, save and end. When a rank fails, the launcher ends the others and
restarts all, `run.max_restarts` times; they resume from the newest checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, Literal, TypeVar

import psutil

from megatrain.config.schema import RunConfig
from megatrain.errors import MegatrainError, UserError
from megatrain.run.signals import SAVING, STOPPING

T = TypeVar("T")

SHUTDOWN_S = 24 * 3600
"""How long ranks may take to end after SIGTERM, which includes a save. A rank that hangs is the watchdog's business."""


def processes_of(run: RunConfig) -> int:
    """Number of processes that the run needs on this host; 1 also where this process is one of them already.

    Raises:
        UserError: `run.gpus` asks for more GPUs than are visible.
    """
    return process_count(run.run.gpus, run.run.device, "run.gpus")


def process_count(asked: int | Literal["auto"], device: str, where: str) -> int:
    """Number of processes that a command needs on this host, as `processes_of`.

    Args:
        asked: Processes, or `auto`: one for each visible GPU.
        device: `auto`, `cpu`, `cuda`, or a single GPU as `cuda:1`.
        where: The setting, for errors.
    """
    if "WORLD_SIZE" in os.environ or asked == 1 or (asked == "auto" and (device == "cpu" or ":" in device)):
        return 1
    if ":" in device:
        raise UserError(f"asks for {asked} processes, and the device is {device} alone", where, "use the device cuda")
    import torch

    visible = torch.cuda.device_count() if device != "cpu" else 0  # does not initialise CUDA
    if asked == "auto":
        return max(1, visible)
    if visible and asked > visible:
        raise UserError(f"asks for {asked} GPUs, {visible} are visible", where, "use auto, or a smaller number")
    return asked


def start_ranks(words: Sequence[str], count: int, max_restarts: int) -> int:
    """Run `megatrain WORDS` in `count` processes. Returns the exit code: 0, or that of the rank that failed first."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from megatrain.engine.mesh import launch

    # Each rank reports its errors itself.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ[launch.ONE_COMMAND] = "1"
    # Threads of torch on the CPU, for loading and saving; those of the optimizer are `run.threads`.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // count)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=f"megatrain-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=max_restarts,
        monitor_interval=0.2,
        signals_to_handle="SIGQUIT",
        shutdown_timeout=SHUTDOWN_S,
    )
    try:
        with passing_signals_on():
            elastic_launch(config, sys.executable)("-m", "megatrain", *words)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    return 0


@contextlib.contextmanager
def passing_signals_on() -> Iterator[None]:
    """While open, signals of a run go to all ranks. They do not get them from the terminal: each has its own session."""

    def pass_on(number: int, _frame: FrameType | None) -> None:
        for rank in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (*STOPPING, *SAVING)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---------------------------------------------------------------- inside a rank of a command without a run


@contextlib.contextmanager
def joined(device: str) -> Iterator[None]:
    """The process group of a command that has no run folder; nothing for one process. An error is printed by one rank."""
    import torch.distributed as dist

    from megatrain.engine.mesh import launch

    if launch.world_size() == 1:
        yield
        return
    made = not dist.is_initialized()
    launch.join(launch.device_of_rank(device))
    try:
        yield
    except MegatrainError as error:
        if launch.rank() == 0:
            launch.tell_end()
        elif launch.end_was_told():
            raise SystemExit(error.exit_code) from error
        raise
    if made:
        dist.destroy_process_group()


def from_rank_0(work: Callable[[], T]) -> T:
    """Rank 0's result of `work`, on all ranks. Where it fails, all ranks end, and rank 0 says why. Collective."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return work()
    found: list[Any] = [None, UserError.exit_code]
    try:
        if dist.get_rank() == 0:
            found = [work(), 0]
    except MegatrainError as error:
        found[1] = error.exit_code
        raise
    finally:
        dist.broadcast_object_list(found, src=0)
    if found[1]:
        from megatrain.engine.mesh import launch

        launch.end_was_told()
        raise SystemExit(found[1])
    return found[0]


def gathered(value: T) -> list[T]:
    """Each rank's value, by rank. Collective."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
