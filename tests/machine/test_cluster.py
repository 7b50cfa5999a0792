"""Files of clusters: what they may hold, and what they say when they are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.errors import UserError
from megatrain.machine.cluster import Cluster, load_cluster
from megatrain.machine.machine import load_machine

DOCS = Path(__file__).parents[2] / "docs"
FILES = [
    file for file in sorted((DOCS / "machines").glob("*.yaml")) if "gpus_per_node" in file.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_shipped_cluster_is_one(file: Path) -> None:
    cluster = load_cluster(file)
    assert cluster.matrix_tflops < cluster.peak_tflops
    assert cluster.network_gbps < cluster.node_gbps


def test_all_problems_of_a_file_at_once(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("name: x\ngpus_per_node: 7.5\nnode_gpbs: 5\nnetwork_gbps: -1\ndevice_gib: .inf\n")
    with pytest.raises(UserError) as error:
        load_cluster(file)
    for part in (
        str(file),
        "gpus_per_node should be a whole number",
        'did you mean "node_gbps"',
        "network_gbps should be a positive number",
        "device_gib should be a positive number",
        "peak_tflops is missing",
    ):
        assert part in str(error.value)


def test_a_machine_is_no_cluster_and_a_cluster_no_machine() -> None:
    with pytest.raises(UserError, match="of one machine, not of a cluster"):
        load_cluster(DOCS / "machines/h200.yaml")
    with pytest.raises(UserError, match="file of a cluster, not of one machine"):
        load_machine(FILES[0])


def test_attention_is_faster_in_longer_rows() -> None:
    cluster = load_cluster(DOCS / "machines/h100-cluster.yaml")
    rates = [cluster.attention_rate(tokens) for tokens in (1024, 8192, 32768, 131072)]
    assert rates == sorted(rates)
    assert rates[0] == pytest.approx(cluster.attention_tflops * 1e12)
    assert rates[2] == pytest.approx(cluster.attention_long_tflops * 1e12)


def test_every_field_is_described() -> None:
    text = (DOCS / "planner.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in Cluster.__dataclass_fields__)
