"""Runtime health of a run: shares of the machine's rates, MFU, alerts, the host-memory watermark, and divergence:
non-finite steps in a row, or a loss far above the recent ones.
"""

from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from megatrain.config.schema import AlertAction, RunConfig
from megatrain.engine.plan import compute_dtype_of, device_of
from megatrain.errors import HostMemoryLow
from megatrain.host_memory.available import available_host_bytes
from megatrain.machine.probe import known_machine, matrix_tflops
from megatrain.metrics.alerts import PIPELINE_RULES, RANK_LIMITS, Alert, AlertWatch, Rule
from megatrain.metrics.mfu import Utilisation
from megatrain.metrics.record import MeshRecord, PipelineRecord, StepRecord, with_shares
from megatrain.models.build import load_model_config
from megatrain.planner.model_cost import shape_of
from megatrain.planner.plan import UNPLANNED_SHARE
from megatrain.units import counted, size_lines

WATERMARK_EVERY_S = 0.5


class RunHealth:
    """Judges the steps of one process of a run.

    Args:
        run: The config.
        model_folder: The local folder behind `model.path`.
        world: Number of processes of the run.

    Attributes:
        host_bytes_left: Host memory that was available when it ran low.
    """

    def __init__(self, run: RunConfig, model_folder: Path, world: int):
        self._run, self._process = run, psutil.Process()
        self.host_bytes_left = 0
        limits: dict[Rule, float | None] = {rule: getattr(run.alerts, rule) for rule in PIPELINE_RULES}
        limits |= {"mfu_floor": run.watchdog.mfu_floor, **RANK_LIMITS}
        if device_of(run.run.device).type == "cpu":
            # Ranks of one host share its processors there, and threads that wait for work take processor time, too.
            limits["straggler"] = None
        fraction = run.memory.device_fraction
        fraction = 1 - UNPLANNED_SHARE if fraction == "auto" else fraction
        self._alerts = AlertWatch(limits, run.alerts.steps, fraction)
        self._machine = known_machine(run.run.device) if run.metrics.instruments else None
        self._utilisation = utilisation_of(run, model_folder, world)

    @property
    def host_rss_bytes(self) -> int:
        """Resident set of this process."""
        return self._process.memory_info().rss

    def mfu(self, document_tokens: np.ndarray, trained_tokens: int, seconds: float) -> float | None:
        """See `Utilisation.mfu`; None where no peak is known."""
        if self._utilisation is None:
            return None
        return self._utilisation.mfu(document_tokens, trained_tokens, seconds)

    def pipeline(self, found: PipelineRecord | None, data_wait_s: float) -> PipelineRecord | None:
        """The engine's figures, completed by shares of the machine's measured rates and the wait for data."""
        if found is None:
            return None
        machine = self._machine
        found = with_shares(
            found,
            h2d_gbps=machine.h2d_gbps if machine and machine.device_gib else None,
            d2h_gbps=machine.d2h_gbps if machine and machine.device_gib else None,
            host_gbps=machine.host_bandwidth_gbps if machine else None,
        )
        return replace(found, waited_s={**found.waited_s, "data": data_wait_s})

    def alerts(self, record: StepRecord, ranks: MeshRecord | None) -> list[tuple[Alert, AlertAction]]:
        """The alerts that a step completes, each with the action that the config wants."""
        return [
            (alert, getattr(self._run.alerts, f"{alert.rule}_action", "warn"))
            for alert in self._alerts.check(record, ranks)
        ]

    def as_dict(self) -> dict[str, Any]:
        """The state of the alerts that act, as JSON data for a checkpoint; empty where alerts only warn.

        It depends on times, so two equal runs with acting alerts write checkpoints that differ in it.
        """
        acting: list[Rule] = [rule for rule in PIPELINE_RULES if getattr(self._run.alerts, f"{rule}_action") != "warn"]
        return self._alerts.as_dict(acting) if acting else {}

    def restore(self, alerts: Mapping[str, Any]) -> None:
        """Continue from the alerts' state in a checkpoint."""
        self._alerts.restore(alerts)

    def host_memory_low(self, memory: Mapping[str, int]) -> HostMemoryLow:
        """The error that ends a run whose host memory is low, with the breakdown of the engine's `memory`."""
        lines = {
            "available (system and control groups)": self.host_bytes_left,
            "this process (resident set)": self.host_rss_bytes,
            **{name.replace("host_", "of it: "): size for name, size in memory.items() if name.startswith("host_")},
        }
        table = "\n".join(size_lines(lines, smallest_bytes=1))
        run, rows = self._run, self._run.rows_per_step
        less = (
            [f"batch.tokens_per_step: {rows // 2 * run.data.max_tokens} (now {run.batch.tokens_per_step})"]
            if rows > 1
            else []
        )
        if run.activations.offload_input != "off":
            less.append(f"activations.offload_input: off (now {run.activations.offload_input})")
        if run.checkpoint.background and run.checkpoint.every_steps is not None:
            less.append("checkpoint.background: false (now true)")
        now = run.memory.host_gib
        less.append(f"memory.host_gib: a smaller one (now {now if now == 'auto' else f'{now:g}'})")
        return HostMemoryLow(
            f"host memory is below memory.host_reserve_gib: {self._run.memory.host_reserve_gib:g}; the run was saved and ended "
            f"before the system kills it\n{table}\n"
            f"  -> end other processes on this machine, or use less: {', '.join(less)}; then resume with --resume auto"
        )


def utilisation_of(run: RunConfig, model_folder: Path, world: int) -> Utilisation | None:
    """Computes a run's MFU; None on a CPU, for fp32, and where the GPU's matrix peak is unknown.

    The ranks of the mesh engine measure an unknown peak at their start.
    """
    device = device_of(run.run.device)
    if device.type != "cuda":
        return None
    if compute_dtype_of(run.precision.compute_dtype, device) not in (torch.bfloat16, torch.float16):
        return None
    machine = known_machine(device)
    if machine is None and run.engine == "host":
        return None
    peak_tflops = machine.matrix_tflops if machine is not None else matrix_tflops(device)
    config = load_model_config(model_folder, run.model.trust_remote_code)
    shape = shape_of(
        config, attn_implementation=run.model.attn_implementation, trust_remote_code=run.model.trust_remote_code
    )
    return Utilisation(shape, peak_tflops * world)


class HostWatermark:
    """While open, reads the available host memory twice a second and calls `on_low` once when it is below the reserve.

    Args:
        reserve_bytes: What must stay available; 0 disables the watermark.
        on_low: Called from the thread with the bytes that are available.
        available: Returns the available bytes.
    """

    def __init__(
        self, reserve_bytes: int, on_low: Callable[[int], None], available: Callable[[], int] = available_host_bytes
    ):
        self._reserve_bytes, self._on_low, self._available = reserve_bytes, on_low, available
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="host-watermark", daemon=True)

    def __enter__(self) -> HostWatermark:
        if self._reserve_bytes:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._reserve_bytes:
            self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(WATERMARK_EVERY_S):
            left = self._available()
            if left < self._reserve_bytes:
                self._on_low(left)
                return


RECENT_STEPS = 20


@dataclass(frozen=True)
class Divergence:
    """A divergence."""

    first_step: int  # the first bad step; the weights before it are good as far as is known
    step: int  # the last bad step
    what: str  # for messages
    go_back: bool = False  # roll back whatever `run.on_divergence` says


class DivergenceGuard:
    """Checks every step's record.

    Args:
        max_bad_steps: This many non-finite steps in a row are a divergence.
        loss_spike: A loss above this multiple of the median of the last `RECENT_STEPS` is one; None: never.
    """

    def __init__(self, max_bad_steps: int, loss_spike: float | None):
        self._max_bad_steps, self._loss_spike = max_bad_steps, loss_spike
        self._bad_in_a_row = 0
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)

    def check(self, record: StepRecord) -> Divergence | None:
        """The divergence that this step completes, if any."""
        not_finite = record.skipped is not None and record.trained_tokens > 0
        self._bad_in_a_row = self._bad_in_a_row + 1 if not_finite else 0
        if self._bad_in_a_row >= self._max_bad_steps:
            first = record.step - self._bad_in_a_row + 1
            what = f"{counted(self._bad_in_a_row, 'step')} in a row skipped, the last because of: {record.skipped}"
            return Divergence(first, record.step, what)
        if record.loss is None:
            return None
        median = statistics.median(self._recent) if len(self._recent) == RECENT_STEPS else None
        if self._loss_spike is not None and median is not None and record.loss > self._loss_spike * median:
            what = (
                f"the loss of step {record.step} is {record.loss:.4f}, more than {self._loss_spike:g} times the median "
                f"{median:.4f} of the {RECENT_STEPS} steps before (run.loss_spike)"
            )
            return Divergence(record.step, record.step, what)
        self._recent.append(record.loss)
        return None

    def as_dict(self) -> dict[str, Any]:
        """The history that decides, as JSON data for a checkpoint."""
        return {"bad_in_a_row": self._bad_in_a_row, "recent_losses": list(self._recent)}

    def restore(self, history: Mapping[str, Any]) -> None:
        """Continue from the history of a checkpoint (`as_dict`), at a resume or a rollback. An empty one starts over."""
        self._bad_in_a_row = int(history.get("bad_in_a_row", 0))
        self._recent.clear()
        self._recent.extend(map(float, history.get("recent_losses", ())))
