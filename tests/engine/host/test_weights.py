"""Layers stream through the ring in the fetch order, before their use and after their own update."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines import host_engine
from families import BY_NAME, batch, build
from megatrain.device.ring import DirectCopier, Slot, SlotState, WeightRing
from megatrain.device.shards import ALONE, Shards
from megatrain.device.streams import Streams
from megatrain.engine.host.engine import HostEngine
from megatrain.engine.host.weights import (
    UpdateGate,
    WeightStream,
    backward_fetch_order,
    forward_fetch_order,
    training_fetch_order,
)
from megatrain.errors import UserError
from megatrain.host_memory.layout import FlatLayout
from megatrain.host_memory.store import HostStore
from megatrain.models.shell import Shell
from megatrain.models.structure import Unit
from megatrain.optim.adamw import AdamW
from megatrain.optim.updater import CpuUpdater

LAYOUT = FlatLayout.of([("w", (3, 5)), ("b", (4,))])


class Updates:
    """An optimizer whose updates of some units still run. Waiting for one finishes it, and is recorded."""

    def __init__(self) -> None:
        self.busy: set[str] = set()
        self.waited: list[str] = []

    def wait(self, unit: str) -> None:
        if unit in self.busy:
            self.waited.append(unit)
            self.busy.remove(unit)

    def gate(self) -> UpdateGate:
        return UpdateGate(lambda unit: unit not in self.busy, self.wait)


class World:
    """A store of small layers, whose weights are their number, and a stream over it that counts loads."""

    def __init__(self, layers: int, slots: int = 2, resident: tuple[str, ...] = (), shards: Shards = ALONE):
        streams = Streams(torch.device("cpu"))
        units = [Unit(f"layer.{i}", f"layers.{i}.", LAYOUT, i) for i in range(layers)]
        self.edges = [Unit(name, "", LAYOUT) for name in ("embedding", "head")]
        everything = [self.edges[0], *units, self.edges[1]]
        self.store = HostStore(
            [(u.name, u.layout) for u in everything],
            split=False,
            states={},
            grad_dtype=None,
            resident=resident,
            device=streams.device,
        )
        for number, unit in enumerate(everything):
            self.store.units[unit.name].hi.fill_(number - 1)
        self.updates, self.loads = Updates(), []
        copier, numel = DirectCopier(streams), LAYOUT.numel

        def slot() -> Slot:
            made = Slot(streams, copier, numel, torch.float32, torch.float32)
            load = made.load
            made.load = lambda owner, *rest: (self.loads.append(owner), load(owner, *rest))[1]  # type: ignore[method-assign]
            return made

        self.ring = WeightRing([slot() for _ in range(slots)])
        edge_slots = [(u, None if u.name in resident and not shards.many else slot()) for u in self.edges]
        self.stream = WeightStream(self.store, units, self.ring, edge_slots, self.updates.gate(), streams, shards)

    def use(self, layer: int) -> None:
        weights = self.stream.fetch(layer)
        assert (weights == layer).all(), f"these are not the weights of layer {layer}"
        self.stream.release(layer)


def test_each_layer_is_loaded_before_it_is_fetched() -> None:
    world = World(4)
    world.stream.follow(forward_fetch_order(4))
    world.use(0)
    assert world.loads == ["layer.0", "layer.1", "layer.2"], "both slots are busy with what comes next"
    world.use(1)
    assert world.loads[3:] == ["layer.3"]


STREAMS: dict[str, Any] = {
    "layers": st.integers(1, 7),
    "segment": st.integers(1, 4),
    "accumulation_steps": st.integers(1, 2),
    "slots": st.integers(2, 9),
    "data": st.data(),
}


@settings(max_examples=40, deadline=None)
@given(**STREAMS)
def test_every_fetch_returns_the_right_weights_whatever_is_resident_or_late(
    layers: int, segment: int, accumulation_steps: int, slots: int, data: st.DataObject
) -> None:
    names = [f"layer.{i}" for i in range(layers)]
    resident = data.draw(st.sets(st.sampled_from(names)))
    world = World(layers, slots, tuple(resident))
    world.updates.busy = set(data.draw(st.sets(st.sampled_from(names)))) - resident
    world.stream.follow(order := training_fetch_order(layers, segment, accumulation_steps))
    for layer in order:
        world.use(layer)
    assert not resident & set(world.loads)
    assert len(world.ring.slots) == slots
    if slots >= layers:
        assert len(world.loads) == layers - len(resident), "with room for all, each is loaded once"


class TwoRanks(Shards):
    """The rules of several ranks, without any."""

    many = True  # type: ignore[assignment]


@settings(max_examples=60, deadline=None)
@given(**STREAMS)
def test_ranks_load_alike_whatever_is_late(
    layers: int, segment: int, accumulation_steps: int, slots: int, data: st.DataObject
) -> None:
    """[Note: all ranks load alike]: a load is a collective, and ranks see different updates finished."""
    names = [f"layer.{i}" for i in range(layers)]
    resident = data.draw(st.sets(st.sampled_from(names)))
    loads = []
    for _ in range(2):
        world = World(layers, slots, tuple(resident), TwoRanks())
        for _ in range(2):  # steps
            world.updates.busy = set(data.draw(st.sets(st.sampled_from(names)))) - resident
            world.stream.follow(order := training_fetch_order(layers, segment, accumulation_steps))
            for layer in order:
                world.use(layer)
            world.stream.drop_all()
        loads.append(world.loads)
    assert loads[0] == loads[1]


def test_the_turn_from_forward_to_backward_loads_nothing_twice() -> None:
    """The last layers are still loaded: Belady's rule keeps them."""
    world = World(6, slots=3)
    world.stream.follow(order := training_fetch_order(6, 1, 1))
    for layer in order:
        world.use(layer)
    assert len(world.loads) == 6 + 6 - 3


def test_prefetching_never_blocks_on_an_update() -> None:
    world = World(4)
    world.updates.busy = {"layer.1", "layer.2"}
    world.stream.follow(forward_fetch_order(4))
    world.use(0)
    assert world.updates.waited == []
    assert world.loads == ["layer.0"]
    world.updates.busy.remove("layer.1")
    world.use(1)
    assert world.updates.waited == []
    world.use(2)
    assert world.updates.waited == ["layer.2"], "fetch waits for the layer's own update, when it must"


def test_waits_for_updates_and_loaded_bytes_are_counted() -> None:
    world = World(3)
    world.stream.follow(forward_fetch_order(3))
    for layer in range(3):
        world.use(layer)
    assert world.stream.loaded_bytes == 3 * LAYOUT.numel * 4
    assert world.stream.update_wait_s >= 0
    assert world.stream.nbytes == 4 * LAYOUT.numel * 4, "two slots and two edges"


def test_a_resident_layer_is_read_where_it_lives() -> None:
    world = World(3, resident=("layer.1",))
    world.stream.follow(forward_fetch_order(3))
    world.use(0)
    assert world.loads == ["layer.0", "layer.2"], "what comes behind the resident layer is prefetched past it"
    assert world.stream.stays(1)
    assert world.stream.fetch(1).data_ptr() == world.store.units["layer.1"].hi.data_ptr()
    world.stream.release(1)
    world.use(2)
    assert world.loads == ["layer.0", "layer.2"]


@pytest.mark.parametrize("called", [0, 2])
def test_a_family_that_calls_its_layers_in_another_order_is_refused(called: int) -> None:
    world = World(3)
    world.stream.follow(forward_fetch_order(3))
    world.use(0)
    with pytest.raises(UserError, match=rf"layer {called} where layer \[1\] was expected"):
        world.stream.fetch(called)


def test_a_fetch_behind_the_end_of_the_order_is_refused() -> None:
    world = World(1)
    world.stream.follow([0])
    world.use(0)
    with pytest.raises(UserError, match="layer 0 where"):
        world.stream.fetch(0)


def test_a_new_order_starts_only_after_the_old_one_is_finished_or_abandoned() -> None:
    world = World(3)
    world.stream.follow(forward_fetch_order(3))
    world.use(0)
    with pytest.raises(AssertionError, match="2 fetches left"):
        world.stream.follow(forward_fetch_order(3))
    world.stream.fetch(1)
    world.stream.abandon()
    assert all(slot.state is SlotState.EMPTY for slot in world.ring.slots)
    world.stream.follow(forward_fetch_order(3))
    for layer in range(3):
        world.use(layer)


def test_after_an_update_no_stale_weights_are_used() -> None:
    world = World(2)
    for value in (0.0, 10.0):
        world.stream.follow(forward_fetch_order(2))
        assert (world.stream.edge_weights(1) == 2 + value).all()
        for layer in range(2):
            assert (world.stream.fetch(layer) == layer + value).all()
            world.stream.release(layer)
        world.stream.drop_all()
        for planes in world.store.units.values():
            planes.hi += 10


def test_without_an_update_in_between_loaded_weights_are_reused() -> None:
    world = World(2)
    for _ in range(2):
        world.stream.follow(forward_fetch_order(2))
        world.stream.edge_weights(0)
        world.stream.edge_weights(1)
        for layer in range(2):
            world.use(layer)
        world.stream.edges_in_use()
    assert sorted(world.loads) == ["embedding", "head", "layer.0", "layer.1"]


def test_an_edge_is_bound_before_it_is_loaded() -> None:
    world = World(1)
    bound = world.stream.edge_buffer(1)
    assert world.loads == []
    world.stream.edge_weights(1)
    assert (bound == 1).all(), "the head of one layer is number 1"


def test_a_resident_edge_has_no_slot() -> None:
    world = World(1, resident=("head",))
    assert world.stream.edge_weights(1).data_ptr() == world.store.units["head"].hi.data_ptr()
    assert world.stream.edge_buffer(1).data_ptr() == world.store.units["head"].hi.data_ptr()
    world.stream.edges_in_use()
    assert world.loads == []


# ------------------------------------------------------------------ the fetch order

LAYERS = st.integers(1, 20)


def test_small_orders() -> None:
    assert forward_fetch_order(3) == [0, 1, 2]
    assert backward_fetch_order(3, 1) == [2, 1, 0]
    # layers 2 and 0 are recomputed for the inputs of 3 and 1
    assert backward_fetch_order(4, 2) == [2, 3, 2, 0, 1, 0]
    assert backward_fetch_order(5, 3) == [3, 4, 3, 0, 1, 2, 1, 0]
    assert training_fetch_order(2, 1, 2) == [0, 1, 1, 0, 0, 1, 1, 0]


@given(LAYERS, st.integers(1, 25), st.integers(1, 3))
def test_each_accumulation_step_goes_forward_once_and_backward_through_the_segments(
    layers: int, segment: int, accumulation_steps: int
) -> None:
    forward, backward = forward_fetch_order(layers), backward_fetch_order(layers, segment)
    assert training_fetch_order(layers, segment, accumulation_steps) == (forward + backward) * accumulation_steps
    inner = sum(min(segment, layers - start) - 1 for start in range(0, layers, segment))
    assert len(backward) == layers + inner


@given(LAYERS, st.integers(1, 25))
def test_each_backward_finds_the_layer_s_input_and_output_gradient(layers: int, segment: int) -> None:
    """Replays the order: inputs of every K-th layer are kept; recomputing a layer gives the input of the next."""
    inputs = set(range(0, layers, segment))
    waiting = layers - 1  # whose output gradient is complete
    recomputed_from: int | None = None
    for layer in backward_fetch_order(layers, segment):
        assert layer in inputs, f"layer {layer} has no input"
        end_of_segment = min((layer // segment + 1) * segment, layers) - 1
        if layer == waiting and (layer == end_of_segment or recomputed_from != layer - 1):
            waiting -= 1
        else:
            assert layer + 1 <= end_of_segment, "nothing is recomputed across the end of a segment"
            inputs.add(layer + 1)
            recomputed_from = layer
    assert waiting == -1, "every layer had its backward"


# ------------------------------------------------------------------ overlap, without clocks

LLAMA = BY_NAME["llama"]


def engine_of(**options: Any) -> HostEngine:
    return host_engine(build(LLAMA, seed=0), device="cpu", compute_dtype="fp32", threads=1, verify="never", **options)


def hold(unit: str, let_go: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the unit's updates wait for `let_go`; they fail if it is never set."""
    submit = CpuUpdater.submit_update

    def held(updater: CpuUpdater, name: str, *args: Any) -> Any:
        *args, after = args

        def waits() -> None:
            assert let_go.wait(20), f"the step did not get that far while {unit} was updated"
            after()

        return submit(updater, name, *args, waits if name == unit else after)

    monkeypatch.setattr(CpuUpdater, "submit_update", held)


def on_layer_call(do: Callable[[int, str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Call `do` with (layer, variant) before each computation of a layer."""
    compute = Shell.call_layer

    def call(shell: Shell, index: int, variant: Any, *args: Any) -> Any:
        do(index, variant)
        return compute(shell, index, variant, *args)

    monkeypatch.setattr(Shell, "call_layer", call)


@pytest.mark.parametrize(("unit", "layer"), [("layer.1", 0), ("layer.3", 2), ("head", 3)])
def test_a_unit_is_updated_under_the_next_forward_until_it_is_needed(
    unit: str, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The unit's update of the first step ends only after the second step's forward has reached the layer before it."""
    data, let_go = batch(LLAMA, seed=0, rows=2, tokens=8), threading.Event()
    with engine_of() as engine, monkeypatch.context() as patch:
        hold(unit, let_go, patch)
        engine.train_step(data)
        on_layer_call(lambda index, _: let_go.set() if index == layer else None, patch)
        assert engine.train_step(data).skipped is None
        assert let_go.is_set()


def test_without_clipping_a_layer_is_updated_under_the_backward_of_those_below(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer 0's backward starts only after layer 3's update has ended."""
    data, updated = batch(LLAMA, seed=0, rows=2, tokens=8), threading.Event()
    with engine_of(gradient_plane=False, optim=AdamW(max_grad_norm=None)) as engine, monkeypatch.context() as patch:
        submit = CpuUpdater.submit_update

        def watched(updater: CpuUpdater, name: str, *args: Any) -> Any:
            job = submit(updater, name, *args)
            if name == "layer.3":
                job.add_done_callback(lambda _: updated.set())
            return job

        def waits(index: int, variant: str) -> None:
            if index == 0 and variant == "recompute":
                assert updated.wait(20), "layer 3 is not updated before the backward of layer 0"

        patch.setattr(CpuUpdater, "submit_update", watched)
        on_layer_call(waits, patch)
        assert engine.train_step(data).skipped is None


def test_a_step_returns_before_its_updates_have_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them still wait when `train_step` returns."""
    data, let_go = batch(LLAMA, seed=0, rows=2, tokens=8), threading.Event()
    with engine_of() as engine, monkeypatch.context() as patch:
        hold("embedding", let_go, patch)
        result = engine.train_step(data)
        assert result.loss is not None
        assert engine.counters()["updates_running"]
        let_go.set()
        engine.synchronize()
        assert not engine.counters()["updates_running"]
