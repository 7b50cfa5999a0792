"""How often to save, and what is left of a run's time: Young's and Daly's optimum.

A failure anywhere stops all. With M the mean time between failures of the whole job and C the seconds that a save
costs, saving every t seconds loses C / t of the time to saves and (t / 2 + R) / M to repetition and restart. The best
t is near sqrt(2 C M) (J. Young, 1974); J. Daly's higher order (2006) is used: sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + C /
18M) - C.
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
        save_s: A save, during which training waits.
        restart_s: From a failure to the first step, reading included.
        every_s: Seconds between saves.
        every_steps: The same in steps.
        share: Of the time that ends up as training.
    """

    mtbf_hours: float
    save_s: float
    restart_s: float
    every_s: float
    every_steps: int
    share: float


def goodput(cluster: Cluster, world: int, parameters: int, step_s: float) -> Goodput:
    """What failures cost a run of `world` GPUs with steps of `step_s` seconds."""
    mtbf_s = cluster.mtbf_hours * 3600 / world
    nbytes = CHECKPOINT_BYTES * parameters
    save_s = nbytes / (cluster.storage_write_gbps * 1e9)
    restart_s = cluster.restart_minutes * 60 + nbytes / (cluster.storage_read_gbps * 1e9)
    steps = max(1, round(best_interval(save_s, mtbf_s) / step_s))
    every_s = steps * step_s
    lost = save_s / every_s + (every_s / 2 + restart_s) / mtbf_s
    return Goodput(mtbf_s / 3600, save_s, restart_s, every_s, steps, 1.0 / (1.0 + lost))


def best_interval(save_s: float, mtbf_s: float) -> float:
    """Seconds of training between two saves, by Daly's formula; with saves longer than twice the MTBF, the MTBF itself."""
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2 * mtbf_s)
    return math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s
