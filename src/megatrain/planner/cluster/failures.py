"""How often to save, and what is left of a run's time: Young's and Daly's optimum.

A failure anywhere stops all. With M the mean time between failures of the whole job and C the seconds for which a
save stops training, saving every t seconds loses C / t of the time to saves, and each failure loses t / 2, the
writing W of the save that did not get done, and the restart R. The best t is near sqrt(2 C M) (J. Young, 1974); J.
Daly's higher order (2006) is used: sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + C / 18M) - C. One save is written at a time,
so t is at least W.

[Note: seconds of a save]
One process of each host writes, whole units each (writers.py). A host gathers its next unit while it writes one, so the
slower of the two counts, and the gathering of its first unit; then it reads back. All wait for the host with most. The file
system may have a limit for all of them together. At a restart all hosts together read the checkpoint twice (`MeshEngine.load`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from megatrain.engine.mesh.writers import shares
from megatrain.machine.machine import Cluster
from megatrain.optim.adamw import AdamW

CHECKPOINT_BYTES = AdamW().bytes_per_parameter


@dataclass(frozen=True)
class Goodput:
    """What failures cost.

    Attributes:
        mtbf_hours: Of the whole job.
        stop_s: For which a save stops training.
        write_s: Until it is on the disk and was read back.
        restart_s: From a failure to the first step, reading included.
        every_s: Seconds between saves.
        every_steps: The same in steps.
        share: Of the time that ends up as training.
    """

    mtbf_hours: float
    stop_s: float
    write_s: float
    restart_s: float
    every_s: float
    every_steps: int
    share: float


def goodput(
    cluster: Cluster, world: int, units: Mapping[str, int], own: int, step_s: float, background: bool
) -> Goodput:
    """What failures cost a run of `world` GPUs.

    Args:
        units: Parameters of the model's units, by name.
        own: Elements that the fullest rank copies to its host for a save.
        step_s: Seconds of a step.
        background: Saves are written while training goes on.
    """
    mtbf_s = cluster.mtbf_hours * 3600 / world
    hosts = math.ceil(world / cluster.gpus_per_node)
    write_s = save_seconds(cluster, hosts, units)
    stop_s = CHECKPOINT_BYTES * own / (cluster.to_host_gbps * 1e9) if background else write_s
    twice = 2 * CHECKPOINT_BYTES * sum(units.values())
    restart_s = cluster.restart_minutes * 60 + _slower(
        twice / hosts, cluster.storage_read_gbps, twice, cluster.storage_read_limit_gbps
    )
    wanted = best_interval(stop_s, mtbf_s)
    steps = max(1, round(wanted / step_s), math.ceil(write_s / step_s) if background else 1)
    every_s = steps * step_s
    unwritten_s = write_s if background else 0.0
    lost = stop_s / every_s + (every_s / 2 + unwritten_s + restart_s) / mtbf_s
    return Goodput(mtbf_s / 3600, stop_s, write_s, restart_s, every_s, steps, 1.0 / (1.0 + lost))


def save_seconds(cluster: Cluster, hosts: int, units: Mapping[str, int]) -> float:
    """Until a checkpoint is on the disk and was read back; see [Note: seconds of a save].

    Args:
        units: Parameters of the model's units, by name.
    """
    most = max(shares(units, range(hosts)).values(), key=lambda names: sum(units[name] for name in names))
    nbytes = CHECKPOINT_BYTES * sum(units[name] for name in most)
    total = CHECKPOINT_BYTES * sum(units.values())
    gather_s = nbytes / (cluster.gather_gbps * 1e9)
    write_s = _slower(nbytes, cluster.storage_write_gbps, total, cluster.storage_write_limit_gbps)
    read_s = _slower(nbytes, cluster.storage_read_gbps, total, cluster.storage_read_limit_gbps)
    return gather_s * units[most[0]] / sum(units[name] for name in most) + max(gather_s, write_s) + read_s


def _slower(nbytes: float, gbps: float, total: float, limit_gbps: float | None) -> float:
    """Seconds for the bytes of one host, or for all bytes where the file system's limit is what counts."""
    return max(nbytes / (gbps * 1e9), 0.0 if limit_gbps is None else total / (limit_gbps * 1e9))


def best_interval(stop_s: float, mtbf_s: float) -> float:
    """Seconds of training between two saves, by Daly's formula; with saves longer than twice the MTBF, the MTBF itself."""
    if stop_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = stop_s / (2 * mtbf_s)
    return math.sqrt(2 * stop_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stop_s
