"""Memory formulas, compared with measurements on an H200 and with sums by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from megatrain.machine.machine import Machine
from megatrain.planner.memory import KERNEL_BYTES, PROCESS_BYTES, cpu_lines, device_peak, held_bytes, host_lines
from megatrain.planner.model_cost import ModelShape
from megatrain.planner.plan import Choice, Options, Policy, StepSize
from megatrain.units import GIB

Shapes = Callable[..., ModelShape]
STEP = StepSize(32, 1024)


def choice(shape: ModelShape, **changes: object) -> Choice:
    plain = Choice(
        resident_layers=0,
        resident_embedding=False,
        resident_head=False,
        policies=("recompute",) * shape.depth,
        offloaded=0,
        accumulation_steps=1,
        microbatch_rows=32,
        head_chunk_tokens=4096,
    )
    return replace(plain, **changes)


@pytest.mark.parametrize(("policy", "measured_gib"), [("keep", 4.20), ("selective", 2.12), ("recompute", 0.25)])
def test_activations_of_a_layer_as_measured(shape: Shapes, policy: Policy, measured_gib: float) -> None:
    model = shape("qwen3-8b")
    output = 2 * model.hidden  # part of the measurement; the plan counts it as the next layer's input
    held = (held_bytes(model, 1024, Options(), (policy,) * model.depth)[0] + output) * STEP.all_tokens
    assert held / GIB == pytest.approx(measured_gib, rel=0.05)


def test_peak_of_an_all_host_eager_step_as_measured(shape: Shapes) -> None:
    model = shape("qwen3-8b")
    peak = device_peak(model, STEP, Options(compiled=False), choice(model, microbatch_rows=16, head_chunk_tokens=2355))
    # 22.6 GiB were measured when the previous chunk's head gradient (bf16, 1.16 GiB) was not yet freed.
    assert peak.nbytes / GIB == pytest.approx(22.6 - 1.16, rel=0.05)
    assert peak.moment == "head"


def test_host_memory_of_an_all_host_step_as_measured(shape: Shapes) -> None:
    model = shape("qwen3-8b")
    lines = host_lines(model, STEP, Options(), choice(model))
    assert sum(lines.values()) / GIB == pytest.approx(108.5, rel=0.02)
    assert sum(lines.values()) - PROCESS_BYTES == 14 * model.parameters


def test_planes_take_12_bytes_per_parameter_and_gradients_follow_the_options(shape: Shapes) -> None:
    model = shape("qwen3-8b", 4)
    count = model.parameters

    def planes(options: Options, **changes: object) -> int:
        lines = host_lines(model, STEP, options, choice(model, **changes))
        return sum(size for name, size in lines.items() if "slab" not in name and "process" not in name)

    assert planes(Options()) == 14 * count
    assert planes(Options(), accumulation_steps=2) == 16 * count
    assert planes(Options(gradient_plane=False)) == 12 * count
    assert planes(Options(compute="fp32", transport_bytes=4)) == 16 * count


def test_resident_units_move_from_host_to_device(shape: Shapes) -> None:
    model = shape("qwen3-8b", 4)
    moved = choice(model, resident_layers=2, resident_head=True)
    elements = 2 * model.layers[0] + model.head
    assert moved.resident_elements(model) == elements
    all_on_host = sum(host_lines(model, STEP, Options(), choice(model)).values())
    assert all_on_host - sum(host_lines(model, STEP, Options(), moved).values()) == 14 * elements
    line = device_peak(model, STEP, Options(), moved).lines[
        "resident units: weights and optimizer states (12 bytes a parameter)"
    ]
    assert line == 12 * elements


def test_a_run_on_the_cpu_has_the_device_s_buffers_in_host_memory(shape: Shapes) -> None:
    model, options = shape("qwen3-8b", 4), Options(compute="fp32", transport_bytes=4, compiled=False)
    made = choice(model, microbatch_rows=16)
    lines = cpu_lines(model, STEP, options, made)
    on_device = device_peak(model, STEP, options, made).nbytes - KERNEL_BYTES
    on_host = sum(host_lines(model, STEP, options, made).values()) - PROCESS_BYTES
    assert sum(lines.values()) == on_host + on_device
    assert on_host == 16 * model.parameters
    assert lines["2 weight slots"] == 2 * 4 * model.layers[0]
    assert lines["weights of embedding and head"] == 4 * (model.embedding + model.head)
    assert lines["layer inputs"] == 5 * STEP.all_tokens * model.hidden * 4, "four layers' and the final norm's"
    half = cpu_lines(model, STEP, options, choice(model, microbatch_rows=16, accumulation_steps=2))
    assert half["layer inputs"] < lines["layer inputs"] / 2 + 1


def test_offloaded_inputs_move_from_device_to_host(shape: Shapes) -> None:
    model = shape("qwen3-8b")
    one_input = STEP.all_tokens * model.hidden * 2
    with_all = device_peak(model, STEP, Options(), choice(model))
    with_few = device_peak(model, STEP, Options(), choice(model, offloaded=30))
    moved = (with_all.lines["layer inputs"] - with_few.lines["layer inputs"]) / one_input
    assert 28 <= moved <= 30, "at the worst moment up to two inputs are in flight"
    assert (
        host_lines(model, STEP, Options(), choice(model, offloaded=30))["offloaded inputs of 30 layers"]
        == 30 * one_input
    )


def test_gradients_of_resident_layers_can_be_the_worst_moment(shape: Shapes) -> None:
    """With few activations, the peak is at the end, when the gradients of all resident units exist."""
    model = shape("qwen3-8b")
    everything = choice(model, resident_layers=36, resident_embedding=True, resident_head=True)
    peak = device_peak(model, StepSize(1, 256), Options(), everything)
    assert peak.moment == "end of the backward"
    assert peak.lines["gradients of resident layers"] == 2 * sum(model.layers)


def test_more_of_anything_needs_more_memory(shape: Shapes) -> None:
    model = shape("qwen3-8b")
    few = choice(model, policies=("recompute",) * 30 + ("selective",) * 6)
    more = [
        replace(few, policies=("recompute",) * 29 + ("selective",) * 7),
        replace(few, policies=("recompute",) * 30 + ("selective",) * 5 + ("keep",)),
        replace(few, resident_layers=1),
        replace(few, head_chunk_tokens=16384),
    ]
    base = device_peak(model, STEP, Options(), few).nbytes
    assert all(device_peak(model, STEP, Options(), other).nbytes > base for other in more)
    assert device_peak(model, StepSize(64, 1024), Options(), few).nbytes > base


def test_a_tied_heads_gradient_waits_for_the_embeddings(shape: Shapes) -> None:
    model = shape("qwen3-4b")
    peak = device_peak(model, StepSize(8, 1024), Options(), choice(model, microbatch_rows=8, head_chunk_tokens=1024))
    assert peak.lines["gradient of the head"] == 4 * model.head_matrix


def test_the_machine_files_load(machine: Callable[..., Machine]) -> None:
    assert machine("h200").device_gib > machine("rtx4090-256gib").device_gib


def test_frozen_elements_take_their_weight_and_move_no_gradient(shape: Shapes) -> None:
    model = shape("qwen3-8b", 4)
    frozen = replace(model, frozen=(model.embedding, *model.layers[:2], 0, 0, model.head))
    count = sum(model.layers[2:])
    assert frozen.first_trained_layer == 2
    lines = host_lines(frozen, STEP, Options(), choice(frozen))
    assert sum(lines.values()) - PROCESS_BYTES == 14 * count + 2 * (model.parameters - count)
    resident = choice(frozen, resident_layers=4, resident_embedding=True, resident_head=True)
    whole = device_peak(model, STEP, Options(), resident).nbytes
    assert whole - device_peak(frozen, STEP, Options(), resident).nbytes >= 10 * (model.parameters - count)
