"""On each route, every gradient arrives where AdamW reads it, complete and with the right sum."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future

import pytest
import torch

from megatrain.device.slabs import Slab, SlabPool
from megatrain.device.streams import Event, Streams
from megatrain.engine.host.gradients import EdgeSum, GradientFlow, Route, UnitSum
from megatrain.host_memory.layout import FlatLayout
from megatrain.host_memory.store import HostStore
from megatrain.models.structure import Unit

CPU = torch.device("cpu")
LAYER = FlatLayout.of([("w", (3, 5)), ("b", (4,)), ("unused", (2, 2))])
EDGE = FlatLayout.of([("embed.weight", (6, 3))])
UNITS = (
    Unit("embedding", "", EDGE),
    Unit("layer.0", "layers.0.", LAYER, 0),
    Unit("layer.1", "layers.1.", LAYER, 1),
    Unit("head", "", FlatLayout.of([])),
)


class Jobs:
    """Consumes slabs at once, or on request."""

    def __init__(self, store: HostStore):
        self._store, self.updated, self.late, self.waiting = store, {}, False, []

    def add(self, unit: Unit, slab: torch.Tensor, first: bool, arrived: Event) -> Future[None]:
        plane = self._store.units[unit.name].grad
        return self._job(lambda: plane.copy_(slab) if first else plane.add_(slab))

    def update_from(self, unit: Unit, slab: torch.Tensor, arrived: Event) -> Future[None]:
        return self._job(lambda: self.updated.update({unit.name: slab.clone()}))

    def _job(self, run: Callable[[], object]) -> Future[None]:
        job: Future[None] = Future()

        def work() -> None:
            run()
            job.set_result(None)

        self.waiting.append(work) if self.late else work()
        return job


class World:
    def __init__(
        self,
        route: Route,
        transport: torch.dtype = torch.float32,
        plane: torch.dtype | None = torch.float32,
        resident: tuple[str, ...] = (),
        slabs: int = 2,
    ):
        streams = Streams(CPU)
        layouts = [(unit.name, unit.layout) for unit in UNITS]
        self.store = HostStore(layouts, split=False, states={}, grad_dtype=plane, resident=resident, device=CPU)
        for planes in self.store.units.values():
            if planes.grad is not None:
                planes.grad.fill_(float("nan"))  # of the previous step: must not be read
        self.jobs = Jobs(self.store)
        pool = None if route is Route.COPY else SlabPool(streams, slabs, LAYER.numel, transport)
        edge_slabs = {} if route is Route.COPY else {"embedding": Slab(streams, EDGE.numel, transport)}
        self.flow = GradientFlow(streams, self.store, UNITS, route, transport, pool, edge_slabs, self.jobs, poison=True)
        self.flow.begin_step()

    def backward(self, unit: Unit, *chunks: dict[str, torch.Tensor]) -> None:
        total = self.flow.begin_layer(unit, len(chunks))
        for chunk in chunks:
            total.add(chunk)
        self.flow.send_layer(total)

    def plane(self, unit: Unit) -> torch.Tensor:
        grad = self.store.units[unit.name].grad
        assert grad is not None
        return grad


def gradient(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(3, 5, generator=generator), "b": torch.randn(4, generator=generator)}


def flat(gradient: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.zeros(LAYER.numel, dtype=torch.float32)
    for name, tensor in gradient.items():
        LAYER.view(out, name).copy_(tensor)
    return out.to(dtype)


def summed(*gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([g[name] for g in gradients]).sum(0) for name in gradients[0]}


def square(*tensors: torch.Tensor) -> float:
    return sum(float(t.double().square().sum()) for t in tensors)


# ------------------------------------------------------------------ sums


def test_a_parameter_without_a_gradient_contributes_zeros_at_its_own_place() -> None:
    """The memory that it is written to held something else before."""
    total = UnitSum(UNITS[1], torch.full((LAYER.numel,), float("nan")), fresh=True)
    total.add({"b": torch.ones(4), "w": None})
    assert torch.equal(total.flat, flat({"b": torch.ones(4)}))
    total.add({"w": torch.ones(3, 5)})
    assert torch.equal(total.flat, flat({"b": torch.ones(4), "w": torch.ones(3, 5)}))


def test_memory_that_is_not_fresh_is_added_to() -> None:
    total = UnitSum(UNITS[1], flat(gradient(0)), fresh=False)
    total.add(gradient(1))
    assert torch.equal(total.flat, flat(summed(gradient(0), gradient(1))))


def test_parts_of_an_edge_add_up_in_fp32() -> None:
    """Both gradients of a tied tensor become one. 1 + 2^-9 is no bf16 number, nor is any later sum of it."""
    edges, small = EdgeSum(), torch.full((6, 3), 2.0**-9, dtype=torch.bfloat16)
    edges.add("embed.weight", torch.ones(6, 3, dtype=torch.bfloat16))
    edges.add("embed.weight", None)
    for _ in range(4):
        edges.add("embed.weight", small)
    taken = edges.take(UNITS[0], torch.float32, CPU)
    assert torch.equal(EDGE.view(taken, "embed.weight"), torch.full((6, 3), 1 + 2.0**-7))
    assert not edges.take(UNITS[0], torch.float32, CPU).any(), "taken once"


# ------------------------------------------------------------------ routes


@pytest.mark.parametrize("transport", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("route", Route, ids=lambda r: r.name)
def test_the_norm_is_that_of_the_gradients_that_arrive(route: Route, transport: torch.dtype) -> None:
    plane = {Route.COPY: transport, Route.ACCUMULATE: torch.float32, Route.FUSED_UPDATE: None}[route]
    world = World(route, transport, plane)
    embedding = torch.randn(6, 3, generator=torch.Generator().manual_seed(7))
    for number in (2, 1):
        world.backward(UNITS[number], gradient(number))
    world.flow.edges.add("embed.weight", embedding)
    world.flow.send_edge(UNITS[3])
    world.flow.send_edge(UNITS[0])
    world.flow.settle()
    got = world.jobs.updated if route is Route.FUSED_UPDATE else {u.name: world.plane(u) for u in UNITS[:3]}
    for number in (1, 2):
        assert torch.equal(got[f"layer.{number - 1}"].float(), flat(gradient(number), transport).float()), number
    assert torch.equal(EDGE.view(got["embedding"], "embed.weight").float(), embedding.to(transport).float())
    want = square(*(got[u.name] for u in UNITS[:3]))
    assert float(world.flow.squared_norm()) == pytest.approx(want, rel=1e-6)
    assert world.flow.sent_bytes == (2 * LAYER.numel + EDGE.numel) * transport.itemsize


def test_microbatches_are_summed_in_fp32_and_rounded_once() -> None:
    world = World(Route.COPY, torch.bfloat16, torch.bfloat16)
    tiny = {"w": torch.full((3, 5), 2.0**-9)}
    world.backward(UNITS[1], {"w": torch.ones(3, 5)}, *[tiny] * 4)
    assert torch.equal(world.plane(UNITS[1]), flat({"w": torch.full((3, 5), 1 + 2.0**-7)}, torch.bfloat16))


def test_accumulation_steps_are_summed_in_the_fp32_plane() -> None:
    """In bf16, four times 2^-9 would vanish beside 1."""
    world = World(Route.ACCUMULATE, torch.bfloat16)
    world.backward(UNITS[1], {"w": torch.ones(3, 5)})
    for _ in range(4):
        world.backward(UNITS[1], {"w": torch.full((3, 5), 2.0**-9)})
    world.flow.settle()
    assert torch.equal(world.plane(UNITS[1]), flat({"w": torch.full((3, 5), 1 + 2.0**-7)}))


def test_a_new_step_starts_at_zero() -> None:
    world = World(Route.ACCUMULATE)
    for seed in (0, 1):
        world.flow.begin_step()
        world.backward(UNITS[1], gradient(seed))
        world.flow.settle()
        assert torch.equal(world.plane(UNITS[1]), flat(gradient(seed)))
        assert float(world.flow.squared_norm()) == pytest.approx(square(flat(gradient(seed))), rel=1e-6)


def test_a_late_consumer_finds_its_slab_unchanged() -> None:
    """The device buffer is poisoned after the copy; the next layer uses another slab."""
    world = World(Route.FUSED_UPDATE, plane=None)
    world.jobs.late = True
    for number in (2, 1):
        world.backward(UNITS[number], gradient(number))
    assert world.jobs.updated == {}
    for work in world.jobs.waiting:
        work()
    world.flow.settle()
    assert torch.equal(world.jobs.updated["layer.1"], flat(gradient(2)))
    assert torch.equal(world.jobs.updated["layer.0"], flat(gradient(1)))


def test_a_step_without_gradients_has_norm_zero() -> None:
    assert float(World(Route.COPY).flow.squared_norm()) == 0.0


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize(("accumulation_steps", "plane"), [(1, torch.float32), (1, torch.bfloat16), (3, torch.float32)])
def test_resident_units_keep_their_gradient_on_the_device(
    chunks: int, accumulation_steps: int, plane: torch.dtype
) -> None:
    route = Route.COPY if accumulation_steps == 1 else Route.ACCUMULATE
    world = World(route, torch.bfloat16, plane, resident=("layer.0", "embedding"))
    parts = [[gradient(10 * step + chunk) for chunk in range(chunks)] for step in range(accumulation_steps)]
    for step in parts:
        world.backward(UNITS[1], *step)
        world.flow.edges.add("embed.weight", torch.ones(6, 3))
        world.flow.send_edge(UNITS[0])
    world.flow.settle()
    want = flat(summed(*(part for step in parts for part in step)))
    torch.testing.assert_close(
        world.plane(UNITS[1]), want.to(plane), rtol=1e-2 if plane == torch.bfloat16 else 1e-5, atol=1e-5
    )
    assert (EDGE.view(world.plane(UNITS[0]), "embed.weight") == accumulation_steps).all()
    assert world.flow.sent_bytes == 0
    if route is Route.COPY:
        both = square(world.plane(UNITS[1]), world.plane(UNITS[0]))
        assert float(world.flow.squared_norm()) == pytest.approx(both, rel=1e-5)


def test_an_abandoned_step_leaves_no_buffer_in_use_and_no_gradient() -> None:
    world = World(Route.COPY)
    world.flow.begin_layer(UNITS[2], 1)
    world.flow.edges.add("embed.weight", torch.ones(6, 3))
    world.flow.abandon()
    for number in (2, 1):
        world.backward(UNITS[number], gradient(number))
    world.flow.send_edge(UNITS[0])
    assert not world.plane(UNITS[0]).any()
    assert float(world.flow.squared_norm()) == pytest.approx(square(flat(gradient(1)), flat(gradient(2))), rel=1e-6)


def test_an_overflow_is_seen_in_the_norm() -> None:
    world = World(Route.COPY)
    world.backward(UNITS[1], {"w": torch.full((3, 5), float("inf"))})
    assert math.isinf(float(world.flow.squared_norm()))


def test_device_memory_is_two_layers_and_an_fp32_sum_for_several_microbatches() -> None:
    world = World(Route.COPY, torch.bfloat16, torch.bfloat16)
    assert world.flow.nbytes == 2 * LAYER.numel * 2
    world.backward(UNITS[1], gradient(0), gradient(1))
    assert world.flow.nbytes == 2 * LAYER.numel * 2 + LAYER.numel * 4
