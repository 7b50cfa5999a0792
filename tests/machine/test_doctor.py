"""The doctor's findings name the cause and the remedy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from megatrain.commands.main import main
from megatrain.machine.doctor import Surroundings, doctor, findings, table
from megatrain.machine.machine import load_machine
from megatrain.machine.system import Link

HEALTHY = load_machine(Path(__file__).parents[2] / "docs/machines/h200.yaml")
AROUND = Surroundings(
    all_cores=16,
    allowed_cpus=frozenset(range(16)),
    cpu_quota=None,
    nodes={0: set(range(16))},
    link=Link(5, 16, 16),
    total_host_bytes=128 << 30,
    locked_limit=None,
    wsl=False,
    disk_free_bytes=1 << 40,
)


def test_a_healthy_machine_has_no_findings() -> None:
    assert findings(replace(HEALTHY, disk_write_gbps=1.2), AROUND) == []


@pytest.mark.parametrize(
    ("machine", "around", "words"),
    [
        ({"cores": 2}, {"allowed_cpus": frozenset({0, 1})}, ["2 of 16 cores", "affinity"]),
        ({"cores": 2}, {"cpu_quota": 2.0}, ["2 of 16 cores", "quota is 2 cores"]),
        ({}, {"cpu_quota": 8.0}, ["quota is 8 cores while 16 are visible"]),
        ({"adamw_gparams": {1: 0.6, 16: 0.65}}, {}, ["hardly faster than with 1", "share one core"]),
        ({"adamw_gparams": {16: 1.5}}, {}, ["AdamW moves 39 GB/s of the 135"]),
        ({"adamw_gparams": {1: 0.5}}, {}, ["too few threads"]),
        (
            {"device_node": 1, "numa_nodes": 2},
            {"nodes": {0: set(range(16)), 1: set(range(16, 32))}},
            ["runs on NUMA node 0, the GPU is attached to node 1", "numactl"],
        ),
        ({"host_gib": 32.0}, {}, ["32 GiB of 128 GiB", "container limit"]),
        ({"h2d_gbps": 12.0}, {"link": Link(5, 4, 16)}, ["4 of 16 PCIe lanes"]),
        ({"d2h_gbps": 14.0}, {}, ["copies reach 14 GB/s where PCIe 5 x16 gives about 53"]),
        ({"pin_limit_gib": 8.0}, {"wsl": True}, ["pinning stopped at 8.0 GiB", "WSL", "memory.pin: staged"]),
        ({"pin_limit_gib": 8.0}, {"locked_limit": 8 << 30}, ["ulimit -l: 8.00 GiB"]),
        ({"attention_ms": {}}, {}, ["no fused attention"]),
        ({"disk_write_gbps": 0.1}, {}, ["takes 16 minutes", "run.dir"]),
        (
            {"gpus": 2, "gpu_link_gbps": {0: 50.0, 1: 51.0}, "all_gpus_gbps": 26.0},
            {},
            ["26 GB/s each way while all 2 GPUs copy, 50 alone", "PCIe switch"],
        ),
        ({"gpus": 2, "gpu_link_gbps": {0: 50.0, 1: 25.0}}, {}, ["GPU 1 copies at 25", "all ranks wait"]),
        ({"gpus": 2}, {"no_peer_access": [(0, 1)]}, ["no peer access between GPUs 0 and 1", "host memory"]),
    ],
)
def test_a_finding_names_its_cause_and_remedy(machine: dict, around: dict, words: list[str]) -> None:
    text = "\n".join(findings(replace(HEALTHY, **machine), replace(AROUND, **around)))
    for word in words:
        assert word in text


def test_the_table_shows_every_figure() -> None:
    text = "\n".join(table(HEALTHY, AROUND))
    for part in (
        "16 usable of 16",
        "138.5 GiB",
        "55.0 GB/s in",
        "800 TFLOP/s",
        "CUDNN_ATTENTION 1.47 ms",
        "no limit met",
    ):
        assert part in text


def test_the_table_of_several_gpus() -> None:
    machine = replace(HEALTHY, gpus=2, peer_gbps=230.0, gpu_link_gbps={0: 50.0, 1: 51.0}, all_gpus_gbps=44.0)
    text = "\n".join(table(machine, replace(AROUND, gpu_nodes={0: 0, 1: None}, no_peer_access=[(0, 1)])))
    for part in ("230 GB/s", "peer access not 0-1", "GPU 0: 0, GPU 1: ?", "50.0, 51.0 GB/s each way alone, 44.0 all"):
        assert part in text
    assert "other GPUs" not in "\n".join(table(HEALTHY, AROUND))


def test_the_command_measures_this_machine_and_caches_the_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import megatrain.machine.probe as probe_module

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(probe_module, "ADAMW_ELEMENTS", 1 << 20)
    monkeypatch.setattr(probe_module, "COPY_BYTES", 1 << 22)
    monkeypatch.setattr(probe_module, "DISK_BYTES", 1 << 24)
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--device", "cpu", "--yaml"]) == 0
    figures = YAML(typ="safe").load(capsys.readouterr().out)
    assert figures["device_gib"] == 0
    assert figures["adamw_gparams"][1] > 0
    assert len(list((tmp_path / "cache/megatrain").iterdir())) == 1

    monkeypatch.setattr(probe_module, "measure", lambda *_: pytest.fail("measured again"))
    text = doctor("cpu", folder=tmp_path)
    assert "cores" in text
    assert [p.name for p in tmp_path.iterdir()] == ["cache"]  # the disk's test file is gone


def test_a_broken_cache_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import megatrain.machine.probe as probe_module

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = probe_module.cache_file(None)
    file.parent.mkdir(parents=True)
    for broken in ("{", '{"name": "x"}'):
        file.write_text(broken)
        monkeypatch.setattr(probe_module, "measure", lambda *_: replace(HEALTHY, name="new"))
        assert probe_module.probe("cpu").name == "new"
        assert "new" in file.read_text()
