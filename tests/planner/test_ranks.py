"""Plans for several GPUs: memory by formula against the engine's own figures, and what they promise."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import families
import mesh_ranks
from engines import host_engine
from megatrain.commands.work import folder_of, structure_of
from megatrain.errors import PlanRefused
from megatrain.machine.machine import load_machine
from megatrain.models.structure import dissect
from megatrain.planner.memory import device_peak, host_lines
from megatrain.planner.model_cost import shape_of_structure
from megatrain.planner.plan import Choice, Options, StepSize
from megatrain.planner.report import plan_text
from megatrain.planner.run import caps_for, plan_step

MACHINES = Path(__file__).parents[2] / "docs/machines"


def tiny() -> Any:
    return families.build(families.BY_NAME["qwen3"], seed=1, tie=False)


def measured(resident: tuple[str, ...], slots: int | str) -> dict[str, int]:
    with host_engine(
        tiny(), device="cpu", verify="never", compute_dtype="bf16", threads=1, resident=resident, group=dist.group.WORLD,
        weight_slots=slots,
    ) as engine:  # fmt: skip
        return engine.memory()


@pytest.mark.parametrize(("resident_layers", "slots"), [(0, 2), (1, 2), (None, "all")])
def test_bytes_of_a_rank_by_formula_are_those_of_the_engine(resident_layers, slots):
    """But for what padding and pages add, which is most of a tiny model's: at most a page a plane and unit."""
    shape = shape_of_structure(dissect(tiny()), "tiny")
    resident_layers = shape.depth if resident_layers is None else resident_layers
    policies = ("recompute",) * shape.depth
    choice = Choice(resident_layers, False, False, policies, 0, 1, 4, 1024, replicated=slots == "all")
    options = Options(ranks=2)
    resident = tuple(f"layer.{i}" for i in range(resident_layers))
    found = mesh_ranks.run(2, measured, resident, slots)
    assert found[0] == found[1]
    memory, step = found[0], StepSize(4, 32)
    host, device = host_lines(shape, step, options, choice), device_peak(shape, step, options, choice).lines
    page = 4096 * (shape.depth + 2)

    def near(bytes_measured: int, by_formula: float, slack: int) -> bool:
        return by_formula <= bytes_measured <= by_formula + slack

    for kind in ("hi", "lo", "m", "v"):
        (line,) = (size for name, size in host.items() if name.startswith(f"{kind}:"))
        assert near(memory[f"host_{kind}"], line, page), (kind, memory, host)
    padding = 2 * 256 * 16  # bytes of a padded unit's tail, at most
    in_slots = sum(size for name, size in device.items() if "weight slots" in name or name.startswith("weights of"))
    assert near(memory["device_slots"], in_slots, (2 + options.slots(choice, shape.depth)) * padding)
    assert near(memory["device_gradients"], device["gradient staging"], 2 * padding)
    held = sum(size for name, size in device.items() if name.startswith("resident"))
    assert near(memory["device_resident"], held, 14 * padding * resident_layers)


def test_two_gpus_are_planned_as_measured_ones_behave(tmp_path):
    """The collectives cost a few percent, and the state is held once."""
    machine = replace(load_machine(MACHINES / "h200-1536gib.yaml"), peer_gbps=230.0)
    structure = structure_of(folder_of("qwen3-8b", tmp_path), torch.bfloat16)
    shape = shape_of_structure(structure, "8b")
    # most units stream, as where the model is larger than all GPUs
    caps = replace(caps_for(machine), device_bytes=40 << 30)
    one, two = (plan_step(shape, machine, StepSize(64, 1024), caps, Options(ranks=n)) for n in (1, 2))
    assert 1.8 * one.tokens_per_s < two.tokens_per_s < 2.05 * one.tokens_per_s
    planes = [sum(size for name, size in plan.host.items() if ":" in name) for plan in (one, two)]
    assert planes[1] < 0.51 * planes[0]
    text = plan_text(two)
    assert "2 GPUs, one process each, with 32 rows of the step and 1/2 of the state" in text
    slow = plan_step(shape, replace(machine, peer_gbps=8.0), StepSize(64, 1024), caps, Options(ranks=2))
    assert slow.seconds > 1.02 * two.seconds


def test_small_models_are_replicated_where_that_is_faster(tmp_path):
    """Their weights are gathered once a step. A user may refuse it; it is not planned where nothing is gathered or fits."""
    machine = replace(load_machine(MACHINES / "h200-1536gib.yaml"), peer_gbps=20.0)
    shape = shape_of_structure(structure_of(folder_of("qwen3-0.6b", tmp_path), torch.bfloat16), "0.6b")

    def made(ranks: int, slots: Any = "auto", device_gib: int = 130) -> Any:
        caps = replace(caps_for(machine), device_bytes=device_gib << 30)
        return plan_step(shape, machine, StepSize(64, 1024), caps, Options(ranks=ranks, weight_slots=slots))

    two, gathered, one = made(2), made(2, 2), made(1)
    assert two.choice.replicated and two.execution.weight_slots == "all" and two.all_resident
    assert not gathered.choice.replicated and gathered.execution.weight_slots == 2
    assert two.seconds < gathered.seconds and two.device_bytes > gathered.device_bytes - (1 << 30)
    assert not one.choice.replicated and one.execution.weight_slots == 2
    assert not made(2, device_gib=6).choice.replicated


def test_two_hosts_hold_a_copy_each_if_that_is_faster_and_fits(tmp_path):
    """A copy each needs the network for sums of shards only; one copy for both needs half of the host memory."""
    machine = replace(load_machine(MACHINES / "h200x8-2hosts.yaml"), network_gbps=20.0)
    assert machine.hosts == 2
    shape = shape_of_structure(structure_of(folder_of("qwen3-32b", tmp_path), torch.bfloat16), "32b")
    few = {"policy": "recompute", "accumulation_steps": 1, "microbatch_rows": 8, "head_chunk_tokens": 8192}

    def made(rows: int = 256, network_gbps: float = 20.0, host_gib: float = 1500, **options: Any) -> Any:
        there = replace(machine, network_gbps=network_gbps)
        caps = replace(caps_for(there), host_bytes=int(host_gib * 2**30), device_bytes=30 << 30)
        return plan_step(
            shape, there, StepSize(rows, 1024), caps, Options(**{"ranks": 16, "hosts": 2, **few, **options})
        )

    each, shared, best = made(replicate_hosts=True), made(replicate_hosts=False), made()
    assert each.execution.replicas == 2 and shared.execution.replicas == 1
    assert best.seconds == min(each.seconds, shared.seconds)
    assert made(host_gib=300).execution.replicas == 1, "a copy for each host does not fit it"
    assert made(network_gbps=1.0).seconds > best.seconds
    one_host = made(rows=128, ranks=8, hosts=1)
    assert one_host.tokens_per_s < best.tokens_per_s < 2.1 * one_host.tokens_per_s
    assert "16 GPUs of 2 hosts" in plan_text(each) and "1/8 of the state; a copy on each host" in plan_text(each)
    assert "1/16 of the state; one copy on all hosts" in plan_text(shared)


@pytest.mark.parametrize("name", ["h200x8-2tib.yaml", "h200x8-2hosts.yaml", "rtx4090x4-512gib.yaml"])
def test_machine_files_of_several_gpus_are_valid(name):
    assert load_machine(MACHINES / name).gpus > 1


def test_a_refused_plan_names_a_host_and_a_step_for_all_processes(tmp_path):
    machine = load_machine(MACHINES / "rtx4090x4-512gib.yaml")
    shape = shape_of_structure(structure_of(folder_of("qwen3-32b", tmp_path), torch.bfloat16), "qwen3-32b")
    caps = replace(caps_for(machine), host_bytes=300 << 30)
    with pytest.raises(PlanRefused) as refused:
        plan_step(shape, machine, StepSize(64, 1024), caps, Options(ranks=4))
    text = str(refused.value)
    assert "64 rows" in text and "memory of one of 4 processes" in text
    (needed,) = re.findall(r"a host with ([\d.]+) GiB for the run", text)
    assert 14 * shape.parameters / 2**30 < float(needed) < 17 * shape.parameters / 2**30
