"""`megatrain train` on all GPUs of a host: starts one process for each through torch's elastic launcher, as one command.

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
from collections.abc import Iterator, Sequence
from types import FrameType

import psutil

from megatrain.config.schema import RunConfig
from megatrain.errors import UserError
from megatrain.run.signals import SAVING, STOPPING

SHUTDOWN_S = 24 * 3600
"""How long ranks may take to end after SIGTERM, which includes a save. A rank that hangs is the watchdog's business."""


def processes_of(run: RunConfig) -> int:
    """Number of processes that the run needs on this host; 1 also where this process is one of them already.

    Raises:
        UserError: `run.gpus` asks for more GPUs than are visible.
    """
    asked = run.run.gpus
    if "WORLD_SIZE" in os.environ or asked == 1 or (asked == "auto" and run.run.device == "cpu"):
        return 1
    import torch

    visible = torch.cuda.device_count() if run.run.device != "cpu" else 0  # does not initialise CUDA
    if asked == "auto":
        return max(1, visible)
    if visible and asked > visible:
        raise UserError(f"asks for {asked} GPUs, {visible} are visible", "run.gpus", "use auto, or a smaller number")
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
