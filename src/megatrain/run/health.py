"""What a run watches of itself: its figures beside the machine's, the rules of `alerts`, and the host memory that is left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import get_args

import psutil

from megatrain.config.schema import RunConfig
from megatrain.errors import HostMemoryLow
from megatrain.machine.probe import known_machine
from megatrain.metrics.alerts import Alert, AlertWatch, Rule
from megatrain.metrics.record import PipelineRecord, StepRecord, with_shares
from megatrain.units import size_lines


class RunWatch:
    """Looks at the steps of one process of a run.

    Args:
        run: The config.
        process: Whose memory is told when the host's ends.

    Attributes:
        host_bytes_left: What the system and all control groups left when the host's memory came to its end.
    """

    def __init__(self, run: RunConfig, process: psutil.Process):
        self._run, self._process = run, process
        self.host_bytes_left = 0
        limits: dict[Rule, float | None] = {rule: getattr(run.alerts, rule) for rule in get_args(Rule)}
        self._alerts = AlertWatch(limits, run.alerts.steps, run.memory.device_fraction)
        self._machine = known_machine(run.run.device) if run.metrics.instruments else None

    def figures(self, found: PipelineRecord | None, data_wait_s: float) -> PipelineRecord | None:
        """The engine's figures with what it cannot know: shares of the machine's measured rates, and the wait for data."""
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

    def alerts(self, record: StepRecord) -> list[tuple[Alert, str]]:
        """The alerts that a step's record completes, each with the action that the config wants."""
        return [(alert, getattr(self._run.alerts, f"{alert.rule}_action")) for alert in self._alerts.look(record)]

    def host_memory_low(self, memory: Mapping[str, int]) -> HostMemoryLow:
        """The error that ends a run whose host memory has come to its end. `memory`: the engine's, by purpose."""
        lines = {
            "left, of all groups and of the system": self.host_bytes_left,
            "of this process (resident set)": self._process.memory_info().rss,
            **{name.replace("host_", "in it: "): size for name, size in memory.items() if name.startswith("host_")},
        }
        table = "\n".join(size_lines(lines, smallest_bytes=1))
        return HostMemoryLow(
            f"host memory is below memory.host_reserve_gib: {self._run.memory.host_reserve_gib:g}; the run was saved and ended "
            f"before the system kills it\n{table}\n"
            "  -> end what else runs here, or take less: memory.host_gib, activations.offload_input: off, fewer rows a step "
            "(batch.tokens_per_step); then go on with --resume auto"
        )
