"""Machine and cluster files: their fields, their errors, and the rates derived from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from megatrain.errors import UserError
from megatrain.machine.doctor import machine_yaml
from megatrain.machine.machine import Cluster, Machine, load_cluster, load_machine, machine_from

DOCS = Path(__file__).parents[2] / "docs"
FILES = sorted((DOCS / "machines").glob("*.yaml"))
CLUSTERS = [file for file in FILES if "gpus_per_node" in file.read_text(encoding="utf-8")]
MACHINES = [file for file in FILES if file not in CLUSTERS]
PLAIN = Machine(name="plain", device_gib=10.0, host_gib=64.0, cores=8, adamw_gparams={1: 0.5, 4: 1.8, 8: 1.82})


@pytest.mark.parametrize("file", MACHINES, ids=lambda file: file.stem)
def test_every_shipped_machine_file_loads(file: Path) -> None:
    machine = load_machine(file)
    assert machine.device_gib > 20
    assert machine.both_gbps <= machine.h2d_gbps


@pytest.mark.parametrize("file", CLUSTERS, ids=lambda file: file.stem)
def test_every_shipped_cluster_file_loads(file: Path) -> None:
    cluster = load_cluster(file)
    assert cluster.matrix_tflops < cluster.peak_tflops
    assert cluster.network_gbps < cluster.node_gbps


def test_a_machine_survives_its_file(tmp_path: Path) -> None:
    for text, name in ((PLAIN.as_json(), "a.json"), (machine_yaml(PLAIN), "b.yaml")):
        (tmp_path / name).write_text(text)
        assert load_machine(tmp_path / name) == PLAIN


MACHINE_TEXT = "name: x\nhost_gib: lots\ncores: 4\nh2d_gpbs: 5\n"
CLUSTER_TEXT = (
    "name: x\ngpus_per_node: 7.5\nnode_gpbs: 5\nnetwork_gbps: -1\ndevice_gib: .inf\nattention_long_tflops: null\n"
)


@pytest.mark.parametrize(
    ("load", "text", "parts"),
    [
        (load_machine, MACHINE_TEXT, ["device_gib is missing", "host_gib should be a number", 'mean "h2d_gbps"']),
        (
            load_cluster,
            CLUSTER_TEXT,
            [
                "gpus_per_node should be a whole number",
                'did you mean "node_gbps"',
                "network_gbps should be a positive number",
                "device_gib should be a positive number",
                "attention_long_tflops should be a positive number",
                "peak_tflops is missing",
            ],
        ),
    ],
)
def test_one_error_lists_all_problems_of_a_file(
    tmp_path: Path, load: Callable[[Path], object], text: str, parts: list[str]
) -> None:
    file = tmp_path / "figures.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as error:
        load(file)
    for part in (str(file), *parts):
        assert part in str(error.value)


@pytest.mark.parametrize("value", [0, float("inf"), float("nan"), 1e300, True])
@pytest.mark.parametrize("name", ["h2d_gbps", "both_gbps", "matrix_tflops", "attention_long_tflops", "cores"])
def test_figures_that_plans_divide_by_are_positive_and_finite(name: str, value: float) -> None:
    with pytest.raises(UserError, match=f"{name} should be"):
        machine_from({**asdict(PLAIN), name: value}, "m.yaml")


def test_a_cluster_s_figures_are_positive(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(CLUSTERS[0].read_text(encoding="utf-8").replace("device_gib: 79", "device_gib: 0"))
    with pytest.raises(UserError, match="device_gib should be a positive number"):
        load_cluster(tmp_path / "c.yaml")


@pytest.mark.parametrize("rates", [{0: 1.0}, {"\u00b2": 1.0}, {1: True}, {1: float("inf")}, {-1: 1.0}, {}])
def test_threads_are_counted_in_positive_numbers(rates: dict[object, float]) -> None:
    with pytest.raises(UserError, match="adamw_gparams should map"):
        machine_from({**asdict(PLAIN), "adamw_gparams": rates}, "m.yaml")


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "adamw_gparams: 3"])
def test_a_file_without_a_machine_is_a_user_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "m.yaml").write_text(text)
    with pytest.raises(UserError):
        load_machine(tmp_path / "m.yaml")


def test_a_missing_file_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such file\n  -> check the path"):
        load_machine(tmp_path / "nowhere.yaml")


def test_machine_and_cluster_files_are_not_mixed_up() -> None:
    with pytest.raises(UserError, match="of one machine, not of a cluster"):
        load_cluster(MACHINES[0])
    with pytest.raises(UserError, match="file of a cluster, not of one machine"):
        load_machine(CLUSTERS[0])


def test_threads_are_the_fewest_within_3_percent_of_the_best() -> None:
    assert PLAIN.threads == 4


def test_adamw_rate_by_threads() -> None:
    streaming = replace(PLAIN, adamw_streaming_gparams=0.9)
    assert streaming.adamw_rate() == pytest.approx(0.9e9)
    assert PLAIN.adamw_rate(1) == pytest.approx(0.95 * 0.5e9)
    assert PLAIN.adamw_rate(2) == pytest.approx(0.95 * 1.0e9)
    assert PLAIN.adamw_rate(64) == pytest.approx(0.95 * 1.8e9)


def test_attention_is_faster_in_longer_rows() -> None:
    cluster = load_cluster(CLUSTERS[0])
    rates = [cluster.attention_rate(tokens) for tokens in (1024, 8192, 32768, 131072)]
    assert rates == sorted(rates)
    assert rates[0] == pytest.approx(cluster.attention_tflops * 1e12)
    assert rates[2] == pytest.approx(cluster.attention_long_tflops * 1e12)


def test_thread_counts_may_be_text_keys() -> None:
    data = {"name": "x", "device_gib": 1, "host_gib": 1, "cores": 1, "adamw_gparams": {"8": 2}}
    assert machine_from(data, "here").adamw_gparams == {8: 2.0}


@pytest.mark.parametrize("kind", [Machine, Cluster])
def test_every_field_is_documented(kind: type[Machine] | type[Cluster]) -> None:
    text = (DOCS / "planner.md").read_text(encoding="utf-8")
    assert [name for name in kind.__dataclass_fields__ if f"`{name}`" not in text] == []
