"""How often to save, and the share of a run's time that failures and saves leave: Young's and Daly's optimum.

A failure anywhere stops the whole job. With M the mean time between failures of the job and C the seconds for which a save stops
training, saving every t seconds loses C / t of the time to saves, and each failure loses t / 2, the writing W of the unfinished
save, and the restart R. The best t is near sqrt(2 C M) (J. Young, 1974); J. Daly's higher order (2006) is used:
sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + C / 18M) - C. One save is written at a time, so t is at least W.

[Note: seconds of a save]
One process of each host writes, in whole units (engine/mesh/saving.py). A host gathers its next unit while it writes one, so the
slower of the two counts, plus the gathering of its first unit; then it reads everything back. All wait for the host with the most
bytes. The file system may have a limit for all hosts together. At a restart all hosts together read the checkpoint twice
(`MeshEngine.load`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from megatrain.engine.mesh.saving import shares
from megatrain.machine.machine import Cluster


@dataclass(frozen=True)
class Goodput:
    """The cost of failures.

    Attributes:
        mtbf_hours: Mean time between failures of the whole job.
        stop_s: Seconds for which a save stops training.
        write_s: Seconds until a save is on the disk and verified.
        restart_s: From a failure to the first step, reading included.
        every_s: Seconds between saves.
        every_steps: Steps between saves.
        share: Share of the time that ends up as training.
    """

    mtbf_hours: float
    stop_s: float
    write_s: float
    restart_s: float
    every_s: float
    every_steps: int
    share: float


def goodput(
    cluster: Cluster,
    world: int,
    units: Mapping[str, int],
    own: int,
    step_s: float,
    background: bool,
    parameter_bytes: int,
) -> Goodput:
    """The cost of failures in a run of `world` GPUs.

    Args:
        units: Parameters of the model's units, by name.
        own: Elements that the fullest rank copies to its host for a save.
        background: Saves are written while training continues.
        parameter_bytes: Bytes of a parameter in a checkpoint.
    """
    mtbf_s = cluster.mtbf_hours * 3600 / world
    hosts = math.ceil(world / cluster.gpus_per_node)
    write_s = save_seconds(cluster, hosts, units, parameter_bytes)
    stop_s = parameter_bytes * own / (cluster.to_host_gbps * 1e9) if background else write_s
    twice = 2 * parameter_bytes * sum(units.values())
    read_s = _slower(twice / hosts, cluster.storage_read_gbps, twice, cluster.storage_read_limit_gbps)
    restart_s = cluster.restart_minutes * 60 + read_s
    wanted_s = best_interval(stop_s, mtbf_s)
    steps = max(1, round(wanted_s / step_s), math.ceil(write_s / step_s) if background else 1)
    every_s = steps * step_s
    unwritten_s = write_s if background else 0.0
    lost = stop_s / every_s + (every_s / 2 + unwritten_s + restart_s) / mtbf_s
    return Goodput(mtbf_s / 3600, stop_s, write_s, restart_s, every_s, steps, 1.0 / (1.0 + lost))


def save_seconds(cluster: Cluster, hosts: int, units: Mapping[str, int], parameter_bytes: int) -> float:
    """Seconds until a checkpoint is on the disk and verified; see [Note: seconds of a save]. Arguments as for `goodput`."""
    most = max(shares(units, range(hosts)).values(), key=lambda names: sum(units[name] for name in names))
    nbytes = parameter_bytes * sum(units[name] for name in most)
    total = parameter_bytes * sum(units.values())
    gather_s = nbytes / (cluster.gather_gbps * 1e9)
    write_s = _slower(nbytes, cluster.storage_write_gbps, total, cluster.storage_write_limit_gbps)
    read_s = _slower(nbytes, cluster.storage_read_gbps, total, cluster.storage_read_limit_gbps)
    return gather_s * units[most[0]] / sum(units[name] for name in most) + max(gather_s, write_s) + read_s


def _slower(nbytes: float, gbps: float, total: float, limit_gbps: float | None) -> float:
    """Seconds for one host's bytes, or for all bytes if the file system's limit takes longer."""
    return max(nbytes / (gbps * 1e9), 0.0 if limit_gbps is None else total / (limit_gbps * 1e9))


def best_interval(stop_s: float, mtbf_s: float) -> float:
    """Seconds of training between two saves, by Daly's formula; the MTBF itself if a save takes longer than twice the MTBF."""
    if stop_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = stop_s / (2 * mtbf_s)
    return math.sqrt(2 * stop_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stop_s
