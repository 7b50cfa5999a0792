"""Machine files: what they may hold, and what they say when they are wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatrain.errors import UserError
from megatrain.machine.doctor import machine_yaml
from megatrain.machine.machine import Machine, load_machine, machine_from

DOCS = Path(__file__).parents[2] / "docs/machines"
FILES = [file for file in sorted(DOCS.glob("*.yaml")) if "gpus_per_node" not in file.read_text(encoding="utf-8")]
PLAIN = Machine(name="plain", device_gib=10.0, host_gib=64.0, cores=8, adamw_gparams={1: 0.5, 4: 1.8, 8: 1.82})


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_shipped_file_is_a_machine(file: Path) -> None:
    machine = load_machine(file)
    assert machine.device_gib > 20
    assert machine.both_gbps <= machine.h2d_gbps


def test_a_machine_survives_its_file(tmp_path: Path) -> None:
    for text, name in ((PLAIN.as_json(), "a.json"), (machine_yaml(PLAIN), "b.yaml")):
        (tmp_path / name).write_text(text)
        assert load_machine(tmp_path / name) == PLAIN


def test_all_problems_of_a_file_at_once(tmp_path: Path) -> None:
    file = tmp_path / "machine.yaml"
    file.write_text("name: x\nhost_gib: lots\ncores: 4\nh2d_gpbs: 5\n")
    with pytest.raises(UserError) as error:
        load_machine(file)
    for part in (str(file), "device_gib is missing", "host_gib should be a number", 'did you mean "h2d_gbps"'):
        assert part in str(error.value)


@pytest.mark.parametrize("value", [0, float("inf"), float("nan"), 1e300, True])
@pytest.mark.parametrize("name", ["h2d_gbps", "both_gbps", "matrix_tflops", "attention_long_tflops", "cores"])
def test_figures_that_plans_divide_by_are_positive_and_finite(name: str, value: float) -> None:
    with pytest.raises(UserError, match=f"{name} should be"):
        machine_from({**PLAIN.as_dict(), name: value}, "m.yaml")


@pytest.mark.parametrize("rates", [{0: 1.0}, {"\u00b2": 1.0}, {1: True}, {1: float("inf")}, {-1: 1.0}])
def test_threads_are_counted_in_positive_numbers(rates: dict[object, float]) -> None:
    with pytest.raises(UserError, match="adamw_gparams should map"):
        machine_from({**PLAIN.as_dict(), "adamw_gparams": rates}, "m.yaml")


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "adamw_gparams: 3"])
def test_what_is_no_machine_is_an_error_of_the_user(tmp_path: Path, text: str) -> None:
    (tmp_path / "m.yaml").write_text(text)
    with pytest.raises(UserError):
        load_machine(tmp_path / "m.yaml")


def test_a_missing_file_is_an_error_of_the_user(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such file\n  -> check the path"):
        load_machine(tmp_path / "nowhere.yaml")


def test_threads_are_the_fewest_that_are_as_good() -> None:
    assert PLAIN.threads == 4


def test_adamw_rate_by_threads() -> None:
    streaming = replace(PLAIN, adamw_streaming_gparams=0.9)
    assert streaming.adamw_rate() == pytest.approx(0.9e9)
    assert PLAIN.adamw_rate(1) == pytest.approx(0.95 * 0.5e9)
    assert PLAIN.adamw_rate(2) == pytest.approx(0.95 * 1.0e9)
    assert PLAIN.adamw_rate(64) == pytest.approx(0.95 * 1.8e9)


def test_a_file_may_give_threads_as_text_keys() -> None:
    data = {"name": "x", "device_gib": 1, "host_gib": 1, "cores": 1, "adamw_gparams": {"8": 2}}
    assert machine_from(data, "here").adamw_gparams == {8: 2.0}
