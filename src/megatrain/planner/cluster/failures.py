"""How often to save, and what is left of a run's time: Young's and Daly's optimum.

A failure anywhere stops all. With M the mean time between failures of the whole job and C the seconds for which a
save stops training, saving every t seconds loses C / t of the time to saves, and each failure loses t / 2, the
writing W of the save that did not get done, and the restart R. The best t is near sqrt(2 C M) (J. Young, 1974); J.
Daly's higher order (2006) is used: sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + C / 18M) - C. One save is written at a time,
so t is at least W.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatrain.machine.cluster import Cluster

CHECKPOINT_BYTES = 12
"""Of a parameter: hi, lo, m, v."""


@dataclass(frozen=True)
class Goodput:
    """What failures cost.

    Attributes:
        mtbf_hours: Of the whole job.
        stop_s: For which a save stops training.
        write_s: Until it is on the disk.
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


def goodput(cluster: Cluster, world: int, parameters: int, own: int, step_s: float, background: bool) -> Goodput:
    """What failures cost a run of `world` GPUs.

    Args:
        parameters: Of the model.
        own: Elements that the fullest rank copies to its host for a save.
        step_s: Seconds of a step.
        background: Saves are written while training goes on.
    """
    mtbf_s = cluster.mtbf_hours * 3600 / world
    nbytes = CHECKPOINT_BYTES * parameters
    write_s = nbytes / (cluster.storage_write_gbps * 1e9)
    stop_s = CHECKPOINT_BYTES * own / (cluster.to_host_gbps * 1e9) if background else write_s
    restart_s = cluster.restart_minutes * 60 + nbytes / (cluster.storage_read_gbps * 1e9)
    wanted = best_interval(stop_s, mtbf_s)
    steps = max(1, round(wanted / step_s), math.ceil(write_s / step_s) if background else 1)
    every_s = steps * step_s
    unwritten_s = write_s if background else 0.0
    lost = stop_s / every_s + (every_s / 2 + unwritten_s + restart_s) / mtbf_s
    return Goodput(mtbf_s / 3600, stop_s, write_s, restart_s, every_s, steps, 1.0 / (1.0 + lost))


def best_interval(stop_s: float, mtbf_s: float) -> float:
    """Seconds of training between two saves, by Daly's formula; with saves longer than twice the MTBF, the MTBF itself."""
    if stop_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = stop_s / (2 * mtbf_s)
    return math.sqrt(2 * stop_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stop_s
