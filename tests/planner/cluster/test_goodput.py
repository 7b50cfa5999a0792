"""How often to save: the interval is optimal, and the losses add up."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from megatrain.machine.machine import Cluster
from megatrain.planner.cluster.estimate import best_interval, goodput, save_seconds

BYTES = 12
"""Of a parameter in a checkpoint."""
UNITS = {f"layer.{number}": 10**9 for number in range(100)}


def lost(every_s: float, stop_s: float, mtbf_s: float) -> float:
    return stop_s / every_s + every_s / 2 / mtbf_s


@pytest.mark.parametrize("stop_s", [1.0, 30.0, 600.0])
def test_no_other_interval_loses_noticeably_less(stop_s: float) -> None:
    mtbf_s = 50 * 3600.0
    best = best_interval(stop_s, mtbf_s)
    least = min(lost(best * factor, stop_s, mtbf_s) for factor in (0.25, 0.5, 0.8, 1.25, 2.0, 4.0))
    assert lost(best, stop_s, mtbf_s) < least
    assert best == pytest.approx(math.sqrt(2 * stop_s * mtbf_s), rel=0.1)


def test_a_save_longer_than_the_time_between_failures_is_not_tried_more_often() -> None:
    assert best_interval(stop_s=1000.0, mtbf_s=400.0) == 400.0


def test_a_larger_cluster_fails_more_often_and_saves_more_often(cluster: Cluster) -> None:
    small, large = (goodput(cluster, world, UNITS, 10**8, 5.0, False, BYTES) for world in (256, 4096))
    assert small.mtbf_hours == pytest.approx(16 * large.mtbf_hours)
    assert small.every_steps > large.every_steps
    assert small.share > large.share > 0.5


def test_saves_in_the_background_stop_for_the_copy_and_wait_for_each_other(cluster: Cluster) -> None:
    own = 10**9
    behind, front = (goodput(cluster, 1024, UNITS, own, 5.0, background, BYTES) for background in (True, False))
    assert behind.stop_s == pytest.approx(BYTES * own / (cluster.to_host_gbps * 1e9))
    assert front.stop_s == front.write_s == behind.write_s
    assert behind.every_s >= behind.write_s
    assert behind.share > front.share


def test_no_failures_lose_nothing_but_saves(cluster: Cluster) -> None:
    steady = replace(cluster, mtbf_hours=1e15)
    assert goodput(steady, 8, {"layer.0": 10**9}, 10**8, 1.0, True, BYTES).share == pytest.approx(1.0, abs=1e-3)


def test_hosts_write_side_by_side_until_units_or_the_file_system_end_it(cluster: Cluster) -> None:
    unit_bytes = BYTES * 1e9
    gather_s, write_s, read_s = (
        unit_bytes / (rate * 1e9)
        for rate in (cluster.gather_gbps, cluster.storage_write_gbps, cluster.storage_read_gbps)
    )
    assert save_seconds(cluster, 1, UNITS, BYTES) == pytest.approx(gather_s + 100 * (max(gather_s, write_s) + read_s))
    assert save_seconds(cluster, 25, UNITS, BYTES) == pytest.approx(gather_s + 4 * (max(gather_s, write_s) + read_s))
    assert save_seconds(cluster, 128, UNITS, BYTES) == save_seconds(cluster, 100, UNITS, BYTES)
    limited = replace(cluster, storage_write_limit_gbps=20.0, storage_read_limit_gbps=40.0)
    assert save_seconds(limited, 100, UNITS, BYTES) == pytest.approx(
        gather_s + 100 * unit_bytes * (1 / 20e9 + 1 / 40e9)
    )
    assert save_seconds(limited, 1, UNITS, BYTES) == save_seconds(cluster, 1, UNITS, BYTES)


def test_all_hosts_read_at_a_restart(cluster: Cluster) -> None:
    one, many = (goodput(cluster, world, UNITS, 10**8, 5.0, True, BYTES).restart_s for world in (8, 1024))
    assert one - cluster.restart_minutes * 60 == pytest.approx(128 * (many - cluster.restart_minutes * 60))
